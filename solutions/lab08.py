"""Worked answers of lab 08."""

from __future__ import annotations


def plan_step(running, waiting, budget, seats):
    """Tokens that each request gets in the next step: those that run, then those that come in.

    running, waiting: (computed, known) tokens of each request, in order. Each is given its gap, or what is left of the
    budget, which keeps one token for every running request behind it. Who waits comes in as long as there are seats and
    tokens. -> a list of counts; requests that stay outside have none.
    """
    counts = []
    for place, (computed, known) in enumerate(running):
        behind = len(running) - place - 1
        counts.append(min(known - computed, budget - behind))
        budget -= counts[-1]
    for computed, known in waiting:
        if len(counts) == seats or budget == 0:
            break
        counts.append(min(known - computed, budget))
        budget -= counts[-1]
    return counts


def padding_share(lengths, edges, size):
    """The share of padding in static batches of prompts: 1 - tokens / slots.

    A prompt goes to the first bucket whose edge it does not exceed. A bucket's prompts are batched in their order,
    ``size`` at a time (the last batch may be smaller), and each batch is as long as its own longest prompt.
    """
    slots, lower = 0, 0
    for edge in edges:
        bucket = [n for n in lengths if lower < n <= edge]
        for first in range(0, len(bucket), size):
            batch = bucket[first : first + size]
            slots += len(batch) * max(batch)
        lower = edge
    return 1 - sum(lengths) / slots


def tokens_found(cached, prompt, size):
    """Tokens of ``prompt`` that the prefix cache holds: whole blocks of ``size``, all of them from the beginning on.

    cached: token lists that were computed before. The last token of the prompt never counts: its logits are wanted.
    """
    known = {tuple(text[:end]) for text in cached for end in range(size, len(text) + 1, size)}
    found = 0
    for end in range(size, len(prompt), size):
        if tuple(prompt[:end]) not in known:
            break
        found = end
    return found
