"""Wrong answers of lab 05, each with a part of the hint that it must get."""

import torch

NAMES = "total_bytes, share, weight_bytes, step_bytes, layers, kv_heads, head_dim, value_bytes, block_size".split(", ")


def _blocks(name, room=None, per=lambda i: 1, end=lambda blocks: max(0, int(blocks // 1))):
    """A kv_blocks with another room, or with a block's bytes divided by ``per``, or with another end."""
    room = room or (lambda i: i["share"] * i["total_bytes"] - i["weight_bytes"] - i["step_bytes"])

    def kv_blocks(total_bytes, share, weight_bytes, step_bytes, layers, kv_heads, head_dim, value_bytes, block_size):
        values = (total_bytes, share, weight_bytes, step_bytes, layers, kv_heads, head_dim, value_bytes, block_size)
        i = dict(zip(NAMES, values, strict=True))
        block = 2 * layers * kv_heads * head_dim * value_bytes * block_size
        return end(room(i) / (block / per(i)))

    kv_blocks.__name__ = name
    return kv_blocks


def block_only(table, start, count, block_size):
    return [table[t // block_size] for t in range(start, start + count)]


def without_offset(table, start, count, block_size):
    return [table[t // block_size] * block_size for t in range(start, start + count)]


def without_table(table, start, count, block_size):
    return list(range(start, start + count))


def from_the_first(table, start, count, block_size):
    return [table[t // block_size] * block_size + t % block_size for t in range(count)]


def in_a_row(table, start, count, block_size):
    first = table[start // block_size] * block_size + start % block_size
    return [first + n for n in range(count)]


def offset_in_the_chunk(table, start, count, block_size):
    return [table[(start + n) // block_size] * block_size + n % block_size for n in range(count)]


def one_too_few(table, start, count, block_size):
    return [table[t // block_size] * block_size + t % block_size for t in range(start, start + count - 1)]


def one_late(table, start, count, block_size):
    last = len(table) * block_size
    return [
        table[t // block_size] * block_size + t % block_size for t in range(start + 1, min(last, start + count + 1))
    ]


def backwards(table, start, count, block_size):
    return [table[t // block_size] * block_size + t % block_size for t in range(start, start + count)][::-1]


def _attention(mistake):
    def paged_attention(q, k_cache, v_cache, table, length):
        _, kv_heads, size, d = k_cache.shape
        pages = table[: -(-length // size)].long()
        k, v = k_cache[pages], v_cache[pages]
        if mistake == "mixed":
            k, v = (x.reshape(kv_heads, -1, d) for x in (k, v))
        else:
            k, v = (x.transpose(0, 1).flatten(1, 2) for x in (k, v))
        if mistake != "whole pages":
            k, v = k[:, :length], v[:, :length]
        if mistake == "last page":
            k, v = (x[:, (length - 1) // size * size :] for x in (k, v))
        group = len(q) // kv_heads
        if mistake == "interleaved":
            k, v = (x.repeat(group, 1, 1) for x in (k, v))
        else:
            k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        s = torch.einsum("hd,hnd->hn", q, k)
        if mistake != "scale":
            s = s * d**-0.5
        p = torch.softmax(s, 0 if mistake == "over heads" else 1)
        if mistake == "mean":
            p = torch.full_like(s, 1 / s.shape[1])
        return torch.einsum("hn,hnd->hd", p, v)

    paged_attention.__name__ = mistake.replace(" ", "_")
    return paged_attention


WRONG = {
    "05.1": [
        (_blocks("without_values", per=lambda i: 2), "a key and a value"),
        (_blocks("one_layer", per=lambda i: i["layers"]), "every layer"),
        (_blocks("in_values", per=lambda i: i["value_bytes"]), "count bytes"),
        (_blocks("in_tokens", per=lambda i: i["block_size"]), "that counts tokens"),
        (
            _blocks(
                "share_of_the_rest", lambda i: i["share"] * (i["total_bytes"] - i["weight_bytes"] - i["step_bytes"])
            ),
            "multiply first",
        ),
        (_blocks("without_weights", lambda i: i["share"] * i["total_bytes"] - i["step_bytes"]), "the weights lie"),
        (_blocks("without_a_step", lambda i: i["share"] * i["total_bytes"] - i["weight_bytes"]), "activations"),
        (
            _blocks("all_memory", lambda i: i["total_bytes"] - i["weight_bytes"] - i["step_bytes"]),
            "its share only",
        ),
        (_blocks("below_zero", end=lambda blocks: int(blocks // 1)), "the answer is 0"),
        (_blocks("rounded_up", end=lambda blocks: max(0, int(-(-blocks // 1)))), "round down"),
        (_blocks("none", end=lambda blocks: 0), ""),
    ],
    "05.2": [
        (block_only, "that is the block"),
        (without_offset, "add the token's place in its block"),
        (without_table, "without pages"),
        (from_the_first, "begin with token"),
        (in_a_row, "may lie anywhere"),
        (offset_in_the_chunk, "from the sequence's beginning"),
        (one_too_few, "start + count - 1"),
        (one_late, "start + count - 1"),
        (backwards, ""),
    ],
    "05.3": [
        (_attention("scale"), "1 / sqrt(d)"),
        (_attention("last page"), "not only at the newest"),
        (_attention("interleaved"), "h // group"),
        (_attention("mixed"), "bring kv_heads to the front"),
        (_attention("over heads"), "the softmax runs over the tokens"),
        (_attention("whole pages"), "belongs to nobody"),
        (_attention("mean"), ""),
    ],
}
