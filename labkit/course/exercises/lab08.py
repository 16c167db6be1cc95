"""Lab 08: one step of the scheduler, the padding of static batches, and what a prefix cache finds."""

from __future__ import annotations

from labkit.course.exercise import Exercise, Hint, Trial
from solutions import lab08 as answers

# --- 08.1


def _queue(name, running, waiting, budget, seats) -> Trial:
    inputs = {"budget": budget, "seats": seats}
    return Trial(name, lambda: {"running": list(running), "waiting": list(waiting), **inputs})


def _plan(
    i,
    gap=True,
    fresh_gap=True,
    keep=True,
    itself=False,
    cut=True,
    seats=True,
    budgeted=True,
    empty=False,
    admit=True,
    new_first=False,
):
    """The answer with one rule left out or replaced."""
    left, counts, come = i["budget"], [], []

    def take(request, behind, gap=gap):
        nonlocal left
        wanted = request[1] - request[0] if gap else request[1]
        got = min(wanted, left - behind) if budgeted else wanted
        got = got if cut or got == wanted else 0
        left -= got
        return got

    def arrivals():
        for request in i["waiting"] if admit else ():
            if (seats and len(i["running"]) + len(come) == i["seats"]) or (left <= 0 and budgeted and not empty):
                break
            come.append(take(request, 0, gap and fresh_gap))

    if new_first:
        arrivals()
    for place, request in enumerate(i["running"]):
        counts.append(take(request, len(i["running"]) - place - (not itself) if keep else 0))
    if not new_first:
        arrivals()
    return counts + come


def _planned(**rule):
    return lambda i, got, want: list(got) == _plan(i, **rule)


# --- 08.2


def _lengths(name, lengths, edges, size) -> Trial:
    return Trial(name, lambda: {"lengths": list(lengths), "edges": list(edges), "size": size})


def _slots(i, buckets=True, to_edge=False, ordered=False, full=False, whole=False, below=False) -> int:
    """Slots with one rule replaced. below: a length on an edge belongs to the next bucket, and there is one more."""
    slots, lower = 0, 0
    edges = i["edges"] if buckets else [max(i["edges"])]
    for edge in [*edges, float("inf")] if below else edges:
        bucket = [n for n in i["lengths"] if (lower <= n < edge if below else lower < n <= edge)]
        bucket = sorted(bucket) if ordered else bucket
        size = max(len(bucket), 1) if whole else i["size"]
        for first in range(0, len(bucket), size):
            batch = bucket[first : first + size]
            slots += (size if full else len(batch)) * (edge if to_edge else max(batch))
        lower = edge
    return slots


def _padded(share=lambda tokens, slots: 1 - tokens / slots, **rule):
    return lambda i, got, want: abs(got - share(sum(i["lengths"]), _slots(i, **rule))) < 1e-9


# --- 08.3


def _texts(name, cached, prompt, size=4) -> Trial:
    return Trial(name, lambda: {"cached": [list(t) for t in cached], "prompt": list(prompt), "size": size})


def _blocks(text, size):
    return [tuple(text[at : at + size]) for at in range(0, len(text) // size * size, size)]


def _common(text, prompt) -> int:
    return next((n for n, (a, b) in enumerate(zip(text, prompt, strict=False)) if a != b), min(len(text), len(prompt)))


def _found(i, got, want, texts=None, cap=1):
    """The answer for some of the texts, or without the last token's exception."""
    size, texts = i["size"], i["cached"] if texts is None else texts
    return got == max((min(_common(t, i["prompt"]), len(i["prompt"]) - cap) // size * size for t in texts), default=0)


def _one_text(i, got, want):
    """What the first text gives, or the last one, or the first one that gives something."""
    cached = i["cached"]
    hits = [t for t in cached if t[: i["size"]] == i["prompt"][: i["size"]]]
    return any(_found(i, got, want, texts=texts) for texts in (cached[:1], cached[-1:], hits[:1]))


def _added(i, got, want):
    size, most = i["size"], len(i["prompt"]) - 1
    return got != want and got == sum(min(_common(t, i["prompt"]), most) // size * size for t in i["cached"])


def _anywhere(i, got, want):
    known = {b for t in i["cached"] for b in _blocks(t, i["size"])}
    return got == i["size"] * sum(b in known for b in _blocks(i["prompt"][:-1], i["size"]))


def _unchained(i, got, want):
    known, found = {b for t in i["cached"] for b in _blocks(t, i["size"])}, 0
    for block in _blocks(i["prompt"][:-1], i["size"]):
        if block not in known:
            break
        found += i["size"]
    return got == found


def _in_place(i, got, want):
    """A block counts if any text has it at the same place, whatever stands before it."""
    size, prompt, found = i["size"], i["prompt"], 0
    while found + size < len(prompt):
        if not any(t[found : found + size] == prompt[found : found + size] for t in i["cached"]):
            break
        found += size
    return got == found


def _single_tokens(i, got, want):
    """Tokens in common, with or without the last one, or as many blocks as it takes to hold them."""
    common = max((_common(t, i["prompt"]) for t in i["cached"]), default=0)
    return got in {common, min(common, len(i["prompt"]) - 1), -(-common // i["size"]) * i["size"]}


A, B, C, D = ([10 * n + k for k in range(4)] for n in (1, 2, 3, 4))

EXERCISES = (
    Exercise(
        "08.1",
        "One step",
        answers.plan_step,
        trials=(
            _queue("three that decode", [(20, 21), (7, 8), (99, 100)], [], 16, 8),
            _queue("a prompt comes in", [(20, 21)], [(0, 9)], 16, 8),
            _queue("a prompt is cut", [(20, 21), (5, 6)], [(0, 40)], 16, 8),
            _queue("the rest of a cut prompt, and one behind it", [(14, 40), (8, 9)], [], 16, 8),
            _queue("two more behind a long prompt", [(0, 90), (8, 9), (30, 31)], [(0, 5)], 16, 8),
            _queue("a prompt of which the cache holds 16 tokens", [(3, 4)], [(16, 22)], 16, 8),
            _queue("three wait for two seats", [(3, 4)], [(0, 4), (0, 3), (0, 2)], 32, 3),
            _queue("the budget ends with the first prompt", [(3, 4)], [(0, 15), (0, 2)], 16, 8),
            _queue("every seat is taken", [(3, 4), (9, 10)], [(0, 4)], 16, 2),
            _queue("nobody", [], [], 16, 8),
        ),
        hints=(
            Hint("the cache holds `computed` tokens already: give the gap, known - computed.", _planned(gap=False)),
            Hint(
                "the cache may hold tokens of a request that waits, too: look at its `computed`.",
                _planned(fresh_gap=False),
            ),
            Hint("those that wait may come in, too, if there are seats and tokens left.", _planned(admit=False)),
            Hint("the budget is for the whole step: subtract what each request gets.", _planned(budgeted=False)),
            Hint("at most `seats` requests run at once.", _planned(seats=False)),
            Hint("a prompt may be cut: give it what is left of the budget.", _planned(cut=False)),
            Hint(
                "a long prompt takes all, and those behind it get nothing: keep a token for each running one behind.",
                _planned(keep=False),
            ),
            Hint("count who is behind: only the running requests after this one.", _planned(itself=True)),
            Hint("those that run go first; who waits gets what is left.", _planned(new_first=True)),
            Hint("a request that would get no token stays outside: stop there.", _planned(empty=True)),
        ),
    ),
    Exercise(
        "08.2",
        "The padding of a batch",
        answers.padding_share,
        trials=(
            _lengths("one batch", [10, 40, 20, 30], [64], 4),
            _lengths("two batches in order", [10, 40, 20, 30, 5, 60], [64], 3),
            _lengths("a last batch of one", [10, 40, 20, 30, 64], [64], 2),
            _lengths("two buckets", [10, 40, 20, 30, 5, 60, 12], [16, 64], 2),
            _lengths("a length on the first edge", [16, 10, 40, 20, 30], [16, 64], 4),
            _lengths("lengths on every edge", [16, 17, 33, 32, 64, 1], [16, 32, 64], 4),
            _lengths("a bucket without a prompt", [100, 90, 120, 3, 2], [8, 16, 128], 2),
            _lengths("all alike", [50] * 6, [64], 4),
        ),
        hints=(
            Hint("that is 1 less the answer: the share of the tokens.", _padded(lambda t, s: t / s)),
            Hint("divide the padding by all slots, not by the tokens.", _padded(lambda t, s: s / t - 1)),
            Hint("pad to the longest prompt of the batch, not to the edge of the bucket.", _padded(to_edge=True)),
            Hint("a prompt as long as an edge belongs to that bucket, not to the next.", _padded(below=True)),
            Hint("only prompts of the same bucket share a batch.", _padded(buckets=False)),
            Hint("at most `size` prompts make a batch.", _padded(whole=True)),
            Hint("the last batch of a bucket has as many rows as prompts, no more.", _padded(full=True)),
            Hint("prompts are batched as they come: do not sort them.", _padded(ordered=True)),
        ),
    ),
    Exercise(
        "08.3",
        "What the prefix cache finds",
        answers.tokens_found,
        trials=(
            _texts("two blocks of three", [A + B + C], A + B + D),
            _texts("a common opening of 3 tokens", [A + B], A[:3] + D + C),
            _texts("a block and a half in common", [A + B], A + B[:2] + D),
            _texts("the same text again", [A + B + C], A + B + C),
            _texts("a longer prompt", [A + B], A + B + C + D),
            _texts("the third of four texts", [D + A, B + C, A + B + [7], C], A + B + C),
            _texts("a block in the middle", [D + B + C], A + B + C + [5]),
            _texts("the same blocks in another order", [A + B], B + A + [5]),
            _texts("one token before the first", [A + B + C], [0] + A + B + C),
            _texts("the last block of the old text is not full", [A + B[:3]], A + B + C),
            _texts("a block and a half again", [A + B[:2]], A + B[:2]),
            _texts("one token behind two blocks", [A + B], A + B + [5]),
            _texts("three texts that open alike", [A + D, A + B + D, A], A + B + C),
            _texts("a block of another text at the same place", [A + D, C + B], A + B + D),
            _texts("blocks of one token", [A + B], A + D, 1),
            _texts("an empty cache", [], A + B),
        ),
        hints=(
            Hint("that counts blocks; return tokens.", lambda i, got, want: want > 0 and got * i["size"] == want),
            Hint(
                "the last token must be computed, since its logits are wanted: at most n - 1 tokens count.",
                lambda i, got, want: _found(i, got, want, cap=0),
            ),
            Hint(
                "a block that ends just before the last token is found: only the last token does not count.",
                lambda i, got, want: _found(i, got, want, cap=2),
            ),
            Hint("only whole blocks are kept and found.", _single_tokens),
            Hint(
                "a key and a value depend on all tokens before: a block counts only if everything before it does.",
                lambda i, got, want: _unchained(i, got, want) or _anywhere(i, got, want) or _in_place(i, got, want),
            ),
            Hint("texts may hold the same blocks: the longest find counts, not the sum.", _added),
            Hint("look at all the texts, not only at one.", _one_text),
        ),
    ),
)
