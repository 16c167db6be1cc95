"""Wrong answers of lab 08, each with a part of the hint that it must get."""


def whole_texts(running, waiting, budget, seats):
    counts = []
    for place, (_, known) in enumerate(running):
        counts.append(min(known, budget - (len(running) - place - 1)))
        budget -= counts[-1]
    for _, known in waiting:
        if len(counts) == seats or budget == 0:
            break
        counts.append(min(known, budget))
        budget -= counts[-1]
    return counts


def _planner(name, mistake):
    def plan_step(running, waiting, budget, seats):
        counts = []
        for place, (computed, known) in enumerate(running):
            behind = 0 if mistake == "greedy" else len(running) - place - (mistake != "itself")
            gap = known - computed
            room = gap if mistake == "no budget" else budget - behind
            count = min(gap, room)
            if mistake == "uncut" and count < gap:
                count = 0
            counts.append(count)
            budget -= count
        for computed, known in waiting if mistake != "nobody new" else []:
            if len(counts) == seats and mistake != "no seats":
                break
            if budget == 0 and mistake not in ("empty", "no budget"):
                break
            gap = known if mistake == "whole new" else known - computed
            count = gap if mistake == "no budget" else min(gap, budget)
            if mistake == "uncut" and count < gap:
                count = 0
            counts.append(count)
            budget -= count
        return counts

    plan_step.__name__ = name
    return plan_step


def new_first(running, waiting, budget, seats):
    come = []
    for computed, known in waiting:
        if len(running) + len(come) == seats or budget <= 0:
            break
        come.append(min(known - computed, budget))
        budget -= come[-1]
    counts = []
    for place, (computed, known) in enumerate(running):
        counts.append(min(known - computed, budget - (len(running) - place - 1)))
        budget -= counts[-1]
    return counts + come


def twos(running, waiting, budget, seats):
    return [2] * (len(running) + len(waiting))


def _padding(name, mistake):
    def padding_share(lengths, edges, size):
        slots, lower = 0, 0
        if mistake == "the rest on top":
            edges = [*edges, 10**6]
        for edge in [edges[-1]] if mistake == "one bucket" else edges:
            bucket = [n for n in lengths if lower < n <= edge]
            if mistake in ("below the edge", "the rest on top"):
                bucket = [n for n in lengths if lower <= n < edge]
            if mistake == "sorted":
                bucket.sort()
            step = len(bucket) or 1 if mistake == "one batch" else size
            for first in range(0, len(bucket), step):
                batch = bucket[first : first + step]
                rows = size if mistake == "full rows" else len(batch)
                slots += rows * (edge if mistake == "to the edge" else max(batch))
            lower = edge
        tokens = sum(lengths)
        return {"tokens": tokens / slots, "of tokens": slots / tokens - 1}.get(mistake, 1 - tokens / slots)

    padding_share.__name__ = name
    return padding_share


def no_padding(lengths, edges, size):
    return 0.5


def _longest(cached, prompt):
    best = 0
    for text in cached:
        n = 0
        while n < min(len(text), len(prompt)) and text[n] == prompt[n]:
            n += 1
        best = max(best, n)
    return best


def in_blocks(cached, prompt, size):
    return min(_longest(cached, prompt), len(prompt) - 1) // size


def with_the_last(cached, prompt, size):
    return _longest(cached, prompt) // size * size


def in_tokens(cached, prompt, size):
    return min(_longest(cached, prompt), len(prompt) - 1)


def rounded_up(cached, prompt, size):
    return min(-(-_longest(cached, prompt) // size), (len(prompt) - 1) // size) * size


def two_fewer(cached, prompt, size):
    return max(min(_longest(cached, prompt), len(prompt) - 2), 0) // size * size


def at_the_same_place(cached, prompt, size):
    found = 0
    for end in range(size, len(prompt), size):
        if all(t[end - size : end] != prompt[end - size : end] for t in cached):
            break
        found = end
    return found


def last_text(cached, prompt, size):
    return first_text(cached[-1:], prompt, size)


def first_find(cached, prompt, size):
    return next((n for t in cached if (n := first_text([t], prompt, size))), 0)


def added_up(cached, prompt, size):
    return sum(first_text([t], prompt, size) for t in cached)


def blocks_anywhere(cached, prompt, size):
    known = {tuple(t[i : i + size]) for t in cached for i in range(0, len(t) - size + 1, size)}
    full = range(0, (len(prompt) - 1) // size * size, size)
    return size * sum(tuple(prompt[i : i + size]) in known for i in full)


def without_a_chain(cached, prompt, size):
    known = {tuple(t[i : i + size]) for t in cached for i in range(0, len(t) - size + 1, size)}
    found = 0
    while found + size < len(prompt) and tuple(prompt[found : found + size]) in known:
        found += size
    return found


def first_text(cached, prompt, size):
    return min(_longest(cached[:1], prompt), len(prompt) - 1) // size * size


def everything(cached, prompt, size):
    return len(prompt) + 1


WRONG = {
    "08.1": [
        (whole_texts, "known - computed"),
        (_planner("new_ones_whole", "whole new"), "look at its `computed`"),
        (_planner("keeps_for_itself", "itself"), "only the running requests after"),
        (_planner("nobody_new", "nobody new"), "may come in"),
        (_planner("no_budget", "no budget"), "for the whole step"),
        (_planner("no_seats", "no seats"), "at most `seats`"),
        (_planner("uncut", "uncut"), "may be cut"),
        (_planner("greedy", "greedy"), "keep a token"),
        (new_first, "those that run go first"),
        (_planner("empty_seats", "empty"), "no token stays outside"),
        (twos, ""),
    ],
    "08.2": [
        (_padding("the_tokens", "tokens"), "1 less the answer"),
        (_padding("of_the_tokens", "of tokens"), "by all slots"),
        (_padding("to_the_edge", "to the edge"), "not to the edge"),
        (_padding("below_the_edge", "below the edge"), "belongs to that bucket"),
        (_padding("the_rest_on_top", "the rest on top"), "belongs to that bucket"),
        (_padding("one_bucket", "one bucket"), "the same bucket"),
        (_padding("one_batch", "one batch"), "make a batch"),
        (_padding("full_rows", "full rows"), "as many rows as prompts"),
        (_padding("in_order_of_length", "sorted"), "do not sort"),
        (no_padding, ""),
    ],
    "08.3": [
        (in_blocks, "return tokens"),
        (with_the_last, "at most n - 1"),
        (two_fewer, "just before the last token"),
        (in_tokens, "whole blocks"),
        (rounded_up, "whole blocks"),
        (at_the_same_place, "everything before it"),
        (blocks_anywhere, "everything before it"),
        (without_a_chain, "everything before it"),
        (first_text, "all the texts"),
        (last_text, "all the texts"),
        (first_find, "all the texts"),
        (added_up, "not the sum"),
        (everything, ""),
    ],
}
