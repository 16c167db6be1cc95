"""Lab 07: the timeline of launches, a graph's static tensors, and the padding of buckets."""

from __future__ import annotations

import torch

from labkit.course.exercise import Exercise, Hint, Trial
from solutions import lab07 as answers

# --- 07.1


def _kernels(name, kernel_us, launch_us) -> Trial:
    return Trial(name, lambda: {"kernel_us": list(kernel_us), "launch_us": launch_us})


def _runs(i):
    return i["kernel_us"], i["launch_us"], sum(i["kernel_us"]), len(i["kernel_us"]) * i["launch_us"]


def _ends(formula):
    """The end that another rule gives, where it is not the right one. ``formula(kernels, launch, work, launches)``."""
    return lambda i, got, want: abs(got[0] - want[0]) > 1e-9 and abs(got[0] - formula(*_runs(i))) < 1e-9


def _walk(kernels, launch, first=1, wait_for_last=False):
    """When the last kernel ends if kernel i is launched at (i + first) * launch, or only once the one before ended."""
    end = 0.0
    for place, runs in enumerate(kernels):
        end = end + launch + runs if wait_for_last else max(end, (place + first) * launch) + runs
    return end


def _idle_between(i, got, want):
    """The end is right, but the wait for the first kernel is left out."""
    return abs(got[0] - want[0]) < 1e-9 and abs(got[1] - (want[1] - i["launch_us"])) < 1e-9


def _idle_of_launches(i, got, want):
    return abs(got[0] - want[0]) < 1e-9 and abs(got[1] - max(0.0, _runs(i)[3] - _runs(i)[2])) < 1e-9


# --- 07.2

WIDTH = 3


def _machine(bucket):
    """A graph of a tiny model: out[i] is what ``slots[i]`` holds after the row of ``ids[i]`` was added to it. Its
    tensors are fixed, as a graph's are; rows with slot -1 store nothing. -> (ids, slots, out, replay)"""
    table = torch.arange(30, dtype=torch.float32).view(10, WIDTH) + 1
    held = torch.zeros(bucket + 1, WIDTH)
    # as a capture leaves them: padding only
    ids, slots = torch.zeros(bucket, dtype=torch.int64), torch.full((bucket,), -1)
    out = torch.zeros(bucket, WIDTH)

    def replay():
        kept = slots >= 0
        held.index_add_(0, slots[kept], table[ids[kept]])
        out.copy_(held[slots])  # slot -1 reads the last row

    return ids, slots, out, replay


def _graph(name, bucket, batches) -> Trial:
    def make():
        ids, slots, out, replay = _machine(bucket)
        return {"replay": replay, "ids": ids, "slots": slots, "out": out, "batches": [list(b) for b in batches]}

    return Trial(name, make)


def _instead(rebind=False, stale=False, slot=-1, old_slots=False, view=False, whole=False):
    """What another way to run the steps would return."""

    def fits(i, got, want):
        ids, slots, out, replay = _machine(len(i["ids"]))
        guess = []
        for batch in i["batches"]:
            n = len(batch)
            if not rebind:
                if not stale:
                    ids.zero_()
                    if not old_slots:
                        slots.fill_(slot)
                ids[:n] = torch.tensor([a for a, _ in batch])
                slots[:n] = torch.tensor([b for _, b in batch])
            replay()
            rows = out if whole else out[:n]
            guess.append(rows if view else rows.clone())
        return len(got) == len(guess) and all(
            g.shape == x.shape and torch.equal(g, x) for g, x in zip(got, guess, strict=True)
        )

    return fits


# --- 07.3


def _steps(name, batches, buckets) -> Trial:
    return Trial(name, lambda: {"batches": list(batches), "buckets": list(buckets)})


def _rows(i, fits=lambda b, rows: b >= rows, largest=False, cut=False, dropped=False) -> tuple[int, int]:
    """(rows computed, rows that are real) with one rule replaced."""
    computed = real = 0
    for rows in i["batches"]:
        bucket = next((b for b in i["buckets"] if fits(b, rows)), None)
        if largest and bucket is not None:
            bucket = i["buckets"][-1]
        if bucket is None and dropped:
            continue
        if bucket is None and cut:
            bucket = -(-rows // i["buckets"][-1]) * i["buckets"][-1]
        computed += rows if bucket is None else bucket
        real += rows
    return computed, real


def _share(of=lambda computed, real: 1 - real / computed, **rule):
    def fits(i, got, want):
        computed, real = _rows(i, **rule)
        return computed > 0 and abs(got[0] - want[0]) > 1e-9 and abs(got[0] - of(computed, real)) < 1e-9

    return fits


def _mean_of_shares(i, got, want):
    shares = [1 - rows / next((b for b in i["buckets"] if b >= rows), rows) for rows in i["batches"]]
    return abs(got[0] - sum(shares) / len(shares)) < 1e-9


def _floor(i, got, want):
    computed = sum(max((b for b in i["buckets"] if b <= rows), default=rows) for rows in i["batches"])
    return abs(got[0] - (1 - sum(i["batches"]) / computed)) < 1e-9


EXERCISES = (
    Exercise(
        "07.1",
        "The timeline of launches",
        answers.timeline,
        trials=(
            _kernels("one kernel", [3.0], 5.0),
            _kernels("four short kernels", [2.0] * 4, 5.0),
            _kernels("four long kernels", [20.0] * 4, 5.0),
            _kernels("a long one first: the host gets ahead", [50.0, 2.0, 2.0, 2.0, 2.0], 5.0),
            _kernels("a long one last", [2.0, 2.0, 2.0, 2.0, 50.0], 5.0),
            _kernels("short and long in turn", [1.0, 12.0, 1.0, 12.0, 1.0, 1.0], 5.0),
            _kernels("launches that cost nothing", [2.0, 3.0], 0.0),
            _kernels("no kernel", [], 5.0),
        ),
        hints=(
            Hint(
                "the host does not wait for a kernel: it launches the next one while that runs.",
                _ends(lambda kernels, launch, work, launches: _walk(kernels, launch, wait_for_last=True)),
            ),
            Hint(
                "a kernel cannot begin before its own launch is done: the first one begins after launch_us.",
                _ends(lambda kernels, launch, work, launches: _walk(kernels, launch, 0)),
            ),
            Hint(
                "when its launch is done, a kernel may still have to wait for the one before it.",
                _ends(lambda kernels, launch, work, launches: launches + (kernels or [0.0])[-1]),
            ),
            Hint(
                "the larger of the two sums is a bound, not the answer: go through the kernels one by one.",
                _ends(lambda kernels, launch, work, launches: max(work, launches)),
            ),
            Hint("the GPU waits for the first launch, too.", _idle_between),
            Hint("idle is what remains of the time until the end when the kernels are taken off.", _idle_of_launches),
        ),
    ),
    Exercise(
        "07.2",
        "Static tensors",
        answers.run_steps,
        trials=(
            _graph("one batch that fills the bucket", 4, [[(3, 0), (1, 1), (4, 2), (1, 3)]]),
            _graph("one batch of two rows", 4, [[(3, 0), (1, 1)]]),
            _graph("the same batch twice", 4, [[(2, 0), (5, 1)], [(2, 0), (5, 1)]]),
            _graph(
                "a large batch, then a small one, then a large one",
                4,
                [
                    [(1, 0), (2, 1), (3, 2), (4, 3)],
                    [(5, 0)],
                    [(6, 0), (7, 1), (8, 2), (9, 3)],
                ],
            ),
            _graph(
                "a request comes and another one goes",
                4,
                [
                    [(1, 0), (2, 1)],
                    [(3, 1), (4, 2)],
                    [(5, 2)],
                    [(6, 0), (7, 1), (8, 2)],
                ],
            ),
        ),
        hints=(
            Hint(
                "a replay returns nothing: what the graph has computed lies in out.",
                lambda i, got, want: any(g is None for g in got) and len(got) == len(want),
                form=True,
            ),
            Hint(
                "the graph never saw your values: it reads the tensors that it was captured with, so write into them.",
                _instead(rebind=True),
            ),
            Hint(
                "the rows behind a small batch still hold those of the last large one, and are stored again.",
                _instead(stale=True),
            ),
            Hint(
                "the ids behind a small batch are cleared, but the slots there are still those of an earlier step.",
                _instead(old_slots=True),
            ),
            Hint("a row of padding must store nothing: its slot is -1, not 0.", _instead(slot=0)),
            Hint("the next replay writes over out: keep a copy of the rows.", _instead(view=True)),
            Hint("only the rows of the batch are asked for, not those of the padding.", _instead(whole=True)),
        ),
        in_place=("ids", "slots", "out"),
    ),
    Exercise(
        "07.3",
        "The padding of buckets",
        answers.padding,
        trials=(
            _steps("one step", [5], [1, 2, 4, 8]),
            _steps("three steps", [1, 5, 7], [1, 2, 4, 8]),
            _steps("a batch that is a bucket", [4, 4], [1, 2, 4, 8]),
            _steps("uneven buckets", [3, 9, 17, 33], [1, 2, 4, 8, 16, 24, 32, 40]),
            _steps("one bucket for all", [1, 2, 3, 64], [64]),
            _steps("a batch that is too large", [7, 13, 8], [1, 2, 4, 8]),
            _steps("all are too large", [12, 9], [1, 2, 4, 8]),
        ),
        hints=(
            Hint("a batch as large as a bucket fits it.", _share(fits=lambda b, rows: b > rows)),
            Hint("take the smallest bucket that holds the batch, not the largest.", _share(largest=True)),
            Hint("a bucket must hold all rows of the batch: none below it will do.", _floor),
            Hint("divide by all rows that are computed, not by the real ones.", _share(lambda c, r: c / r - 1)),
            Hint("that is the share of the real rows; the padding is the rest.", _share(lambda c, r: r / c)),
            Hint("a large step counts for more: add up the rows of all steps, then divide once.", _mean_of_shares),
            Hint("steps without a graph compute their rows as well, and pad none.", _share(dropped=True)),
            Hint("a batch larger than every bucket has no graph: it runs eagerly, as it is.", _share(cut=True)),
        ),
    ),
)
