"""Lab 05: blocks that fit, slots of tokens, and attention over pages."""

from __future__ import annotations

import math

import torch

from labkit.course.exercise import Exercise, Hint, Trial
from solutions import lab05 as answers

GB = 10**9


# --- 05.1


def _card(name, total, weights, step=GB, share=0.9, layers=32, kv_heads=8, head_dim=128, value_bytes=2, size=16):
    inputs = dict(total_bytes=total, share=share, weight_bytes=weights, step_bytes=step, layers=layers)
    inputs |= dict(kv_heads=kv_heads, head_dim=head_dim, value_bytes=value_bytes, block_size=size)
    return Trial(name, lambda: dict(inputs))


def _room(i):
    return i["share"] * i["total_bytes"] - i["weight_bytes"] - i["step_bytes"]


def _block(i):
    return 2 * i["layers"] * i["kv_heads"] * i["head_dim"] * i["value_bytes"] * i["block_size"]


def _blocks(room=_room, block=_block):
    """The answer with another rule for the room, or for a block's bytes."""
    return lambda i, got, want: got == max(0, int(room(i) // block(i)))


# --- 05.2


def _tokens(name, table, start, count, size) -> Trial:
    return Trial(name, lambda: {"table": list(table), "start": start, "count": count, "block_size": size})


def _each(slot):
    """The answer with another rule for a token's slot. ``slot(i, t, nth)``: t counts from the sequence's beginning."""

    def fits(i, got, want):
        return list(got) == [slot(i, i["start"] + n, n) for n in range(i["count"])]

    return fits


def _slot(i, t):
    return i["table"][t // i["block_size"]] * i["block_size"] + t % i["block_size"]


def _one_off(i, got, want):
    """Slots of other tokens: one too many, one too few, or all shifted by one."""
    last = len(i["table"]) * i["block_size"]
    spans = ((0, 1), (1, 1), (0, -1), (1, 0), (-1, 0))
    begin, end = i["start"], i["start"] + i["count"]
    return any(list(got) == [_slot(i, t) for t in range(max(0, begin + a), min(last, end + b))] for a, b in spans)


# --- 05.3


def _pages(name, length, heads=4, kv_heads=2, size=4, blocks=9, rest=7.0, far=False, scale=1.0) -> Trial:
    """A cache of random pages. ``rest``: what lies behind the last token. ``far``: so do entries of the table that name
    no block."""

    def make():
        random = torch.Generator().manual_seed(length)
        k, v = (torch.randn(blocks, kv_heads, size, 8, generator=random, dtype=torch.float64) for _ in "kv")
        table = torch.randperm(blocks, generator=random).to(torch.int32)
        used = -(-length // size)
        for cache in (k, v):
            cache[table[used - 1], :, length - (used - 1) * size :] = rest
            cache[table[used:].long()] = rest
        table[used:] = 2**30 if far else table[used:]
        q = scale * torch.randn(heads, 8, generator=random, dtype=torch.float64)
        return {"q": q, "k_cache": k, "v_cache": v, "table": table, "length": length}

    return Trial(name, make)


def _attend(i, first=0, last=None, interleaved=False, mixed=False, scale=None, over=-1):
    """Attention with one rule replaced: which tokens, which KV head, how pages are joined, scale, softmax's axis."""
    q, (_, kv_heads, size, d) = i["q"], i["k_cache"].shape
    last = i["length"] if last is None else last
    pages = i["table"][: -(-last // size)].long()
    k, v = (i[n][pages] for n in ("k_cache", "v_cache"))
    if mixed:
        k, v = (x.reshape(kv_heads, -1, d)[:, first:last] for x in (k, v))
    else:
        k, v = (x.transpose(0, 1).flatten(1, 2)[:, first:last] for x in (k, v))
    head = torch.arange(len(q))
    head = head % kv_heads if interleaved else head // (len(q) // kv_heads)
    s = (q[:, None] @ k[head].transpose(1, 2))[:, 0] * (d**-0.5 if scale is None else scale)
    return (torch.softmax(s, over)[:, None] @ v[head])[:, 0]


def _near(got, guess) -> bool:
    return got.shape == guess.shape and torch.allclose(got.double(), guess, 1e-9, 1e-12, equal_nan=True)


def _instead(**rule):
    return lambda i, got, want: _near(got, _attend(i, **rule))


def _last_page(i, got, want):
    size = i["k_cache"].shape[2]
    return _near(got, _attend(i, first=(i["length"] - 1) // size * size))


def _whole_pages(i, got, want):
    size = i["k_cache"].shape[2]
    return _near(got, _attend(i, last=-(-i["length"] // size) * size)) or bool(got.isnan().any())


EXERCISES = (
    Exercise(
        "05.1",
        "Blocks that fit",
        answers.kv_blocks,
        trials=(
            _card("Llama-3-8B in bf16 on 80 GB, the cache in fp32", 80 * GB, 16 * GB, value_bytes=4),
            _card("Llama-3-8B in bf16 on 80 GB, all in bf16", 80 * GB, 16 * GB),
            _card("the same on 24 GB", 24 * GB, 16 * GB),
            _card("no grouped heads", 80 * GB, 14 * GB, kv_heads=32),
            _card("4-bit weights, an 8-bit cache, 24 GB", 24 * GB, 5 * GB, step=2 * GB, value_bytes=1, share=0.95),
            _card("a small model in large blocks", 8 * GB, GB // 4, layers=30, kv_heads=3, head_dim=64, size=64),
            _card("weights that do not fit", 12 * GB, 16 * GB),
        ),
        hints=(
            Hint("a token has a key and a value.", _blocks(block=lambda i: _block(i) / 2)),
            Hint("every layer has a cache of its own.", _blocks(block=lambda i: _block(i) / i["layers"])),
            Hint("count bytes, not values.", _blocks(block=lambda i: _block(i) / i["value_bytes"])),
            Hint(
                "that counts tokens; a block holds block_size of them.",
                _blocks(block=lambda i: _block(i) / i["block_size"]),
            ),
            Hint(
                "the share is of all memory, and the weights are part of it: multiply first, subtract then.",
                _blocks(
                    room=lambda i: i["share"] * (i["total_bytes"] - i["weight_bytes"] - i["step_bytes"]),
                ),
            ),
            Hint("the weights lie in the same memory.", _blocks(room=lambda i: _room(i) + i["weight_bytes"])),
            Hint("a step needs memory for its activations, too.", _blocks(room=lambda i: _room(i) + i["step_bytes"])),
            Hint(
                "the engine may take its share only, not all of the memory.",
                _blocks(room=lambda i: i["total_bytes"] - i["weight_bytes"] - i["step_bytes"]),
            ),
            Hint("if nothing is left, the answer is 0.", lambda i, got, want: got < 0),
            Hint(
                "part of a block is of no use: round down, to a whole number.", lambda i, got, want: 0 < got - want <= 1
            ),
        ),
    ),
    Exercise(
        "05.2",
        "The slots of some tokens",
        answers.slots_of,
        trials=(
            _tokens("one page", [3], 0, 4, 4),
            _tokens("three pages in any order", [7, 2, 9], 0, 12, 4),
            _tokens("the last page partly filled", [7, 2, 9], 0, 10, 4),
            _tokens("a chunk that begins inside a page", [5, 1, 8, 0], 6, 7, 4),
            _tokens("one new token", [5, 1, 8], 9, 1, 4),
            _tokens("pages of one token", [4, 0, 2], 1, 2, 1),
            _tokens("no token", [6, 3], 5, 0, 4),
        ),
        hints=(
            Hint(
                "that is the block: multiply by block_size, and add the token's place in it.",
                _each(lambda i, t, n: i["table"][t // i["block_size"]]),
            ),
            Hint("add the token's place in its block.", _each(lambda i, t, n: _slot(i, t) - t % i["block_size"])),
            Hint(
                "that is where the tokens would lie without pages: look the block up in the table.",
                _each(lambda i, t, n: t),
            ),
            Hint("begin with token `start`, not with the first one.", _each(lambda i, t, n: _slot(i, n))),
            Hint(
                "the next page may lie anywhere: look it up for each token.",
                _each(lambda i, t, n: _slot(i, i["start"]) + n),
            ),
            Hint(
                "a token's place in its page counts from the sequence's beginning: t % block_size.",
                _each(lambda i, t, n: _slot(i, t) - t % i["block_size"] + n % i["block_size"]),
            ),
            Hint("these are the tokens start, ..., start + count - 1.", _one_off),
        ),
    ),
    Exercise(
        "05.3",
        "Attention over pages",
        answers.paged_attention,
        trials=(
            _pages("one full page", 4),
            _pages("three full pages", 12),
            _pages("a last page of 2 tokens", 10),
            _pages("one token", 1),
            _pages("8 query heads on 2 KV heads", 19, heads=8),
            _pages("no grouping", 14, heads=3, kv_heads=3),
            _pages("NaN behind the last token", 18, rest=math.nan),
            _pages("table entries behind the last page name no block", 21, far=True),
        ),
        tolerance=1e-9,
        hints=(
            Hint("the scores are scaled by 1 / sqrt(d).", _instead(scale=1.0)),
            Hint("a new token looks at all its sequence's pages, not only at the newest.", _last_page),
            Hint(
                "heads / kv_heads query heads in a row share a KV head: head h belongs to h // group.",
                _instead(interleaved=True),
            ),
            Hint(
                "in a page the KV heads come before the tokens: bring kv_heads to the front, then join the pages.",
                _instead(mixed=True),
            ),
            Hint("the softmax runs over the tokens, for each head by itself.", _instead(over=0)),
            Hint(
                "what is behind the last token in its page belongs to nobody: cut keys and values at `length`.",
                _whole_pages,
            ),
        ),
    ),
)
