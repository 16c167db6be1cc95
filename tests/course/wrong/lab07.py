"""Wrong answers of lab 07, each with a part of the hint that it must get."""

import torch


def one_after_the_other(kernel_us, launch_us):
    end = sum(kernel_us) + launch_us * len(kernel_us)
    return end, end - sum(kernel_us)


def launched_at_once(kernel_us, launch_us):
    end = 0.0
    for place, runs in enumerate(kernel_us):
        end = max(end, place * launch_us) + runs
    return end, end - sum(kernel_us)


def never_queued(kernel_us, launch_us):
    end = launch_us * len(kernel_us) + (kernel_us[-1] if kernel_us else 0.0)
    return end, end - sum(kernel_us)


def the_larger_sum(kernel_us, launch_us):
    end = max(sum(kernel_us), launch_us * len(kernel_us))
    return end, end - sum(kernel_us)


def idle_between(kernel_us, launch_us):
    end = idle = 0.0
    for place, runs in enumerate(kernel_us):
        begin = max(end, (place + 1) * launch_us)
        idle += begin - end if place else 0.0
        end = begin + runs
    return end, idle


def idle_by_difference(kernel_us, launch_us):
    end = 0.0
    for place, runs in enumerate(kernel_us):
        end = max(end, (place + 1) * launch_us) + runs
    return end, max(0.0, launch_us * len(kernel_us) - sum(kernel_us))


def sevens(kernel_us, launch_us):
    return 7.25, 7.25


def _steps(name, mistake):
    def run_steps(replay, ids, slots, out, batches):
        results = []
        for batch in batches:
            n = len(batch)
            new_ids, new_slots = torch.tensor([i for i, _ in batch]), torch.tensor([s for _, s in batch])
            if mistake == "rebound":
                ids, slots = new_ids, new_slots
            else:
                if mistake != "stale":
                    ids.zero_()
                    if mistake != "old slots":
                        slots.fill_(0 if mistake == "slot 0" else -1)
                ids[:n], slots[:n] = new_ids, new_slots
            made = replay()
            rows = out if mistake == "all rows" else out[:n]
            results.append(made if mistake == "returned" else rows if mistake == "views" else rows.clone())
        return results

    run_steps.__name__ = name
    return run_steps


def ones(replay, ids, slots, out, batches):
    return [torch.ones(len(batch), out.shape[1]) for batch in batches]


def _padding(name, mistake):
    def padding(batches, buckets):
        computed = real = eager = 0
        shares = []
        for rows in batches:
            fit = [b for b in buckets if (b > rows if mistake == "above" else b >= rows)]
            bucket = fit[0] if fit else None
            if mistake == "largest" and fit:
                bucket = fit[-1]
            if mistake == "below":
                bucket = max([b for b in buckets if b <= rows], default=None)
            if bucket is None:
                eager += 1
                if mistake == "dropped":
                    continue
                bucket = rows
                if mistake == "cut":
                    bucket, eager = -(-rows // buckets[-1]) * buckets[-1], 0
            computed += bucket
            real += rows
            shares.append(1 - rows / bucket)
        if mistake == "mean":
            return sum(shares) / len(shares), eager
        if not computed:
            return 0.0, eager
        return {"real": real / computed, "of real": computed / real - 1}.get(mistake, 1 - real / computed), eager

    padding.__name__ = name
    return padding


def a_third(batches, buckets):
    return 0.3333, 99


WRONG = {
    "07.1": [
        (one_after_the_other, "does not wait for a kernel"),
        (launched_at_once, "before its own launch"),
        (never_queued, "wait for the one before"),
        (the_larger_sum, "a bound, not the answer"),
        (idle_between, "the first launch, too"),
        (idle_by_difference, "what remains"),
        (sevens, ""),
    ],
    "07.2": [
        (_steps("what_replay_returns", "returned"), "returns nothing"),
        (_steps("new_tensors", "rebound"), "write into them"),
        (_steps("stale_rows", "stale"), "the last large one"),
        (_steps("slots_not_cleared", "old slots"), "still those of an earlier step"),
        (_steps("slot_zero", "slot 0"), "-1, not 0"),
        (_steps("views_of_out", "views"), "keep a copy"),
        (_steps("all_rows", "all rows"), "only the rows of the batch"),
        (ones, ""),
    ],
    "07.3": [
        (_padding("the_next_bucket", "above"), "as large as a bucket"),
        (_padding("the_largest", "largest"), "the smallest bucket"),
        (_padding("rounded_down", "below"), "hold all rows"),
        (_padding("of_the_real_rows", "of real"), "divide by all rows"),
        (_padding("the_real_share", "real"), "the padding is the rest"),
        (_padding("mean_of_shares", "mean"), "then divide once"),
        (_padding("without_eager_steps", "dropped"), "compute their rows as well"),
        (_padding("in_pieces", "cut"), "has no graph"),
        (a_third, ""),
    ],
}
