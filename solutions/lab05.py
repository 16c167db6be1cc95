"""Worked answers of lab 05."""

from __future__ import annotations

import torch


def kv_blocks(total_bytes, share, weight_bytes, step_bytes, layers, kv_heads, head_dim, value_bytes, block_size):
    """Blocks of ``block_size`` tokens that fit: the share of all memory, less the weights and what a step needs.

    A block holds a key and a value of each token, layer and KV head. 0 if nothing is left.
    """
    block_bytes = 2 * layers * kv_heads * head_dim * value_bytes * block_size
    return max(0, int((share * total_bytes - weight_bytes - step_bytes) // block_bytes))


def slots_of(table, start, count, block_size):
    """The slots of tokens [start, start + count) of a sequence: block * block_size + offset, one an entry."""
    return [table[t // block_size] * block_size + t % block_size for t in range(start, start + count)]


def paged_attention(q, k_cache, v_cache, table, length):
    """One query token over its pages. q [heads, d]; caches [blocks, kv_heads, size, d]; table [entries] -> [heads, d].

    Query head h belongs to KV head h // (heads / kv_heads). Entries and slots behind the last token are never read.
    """
    _, kv_heads, size, d = k_cache.shape
    pages = table[: -(-length // size)].long()
    k, v = (c[pages].transpose(0, 1).flatten(1, 2)[:, :length] for c in (k_cache, v_cache))  # [kv_heads, length, d]
    s = q.unflatten(0, (kv_heads, -1)) @ k.transpose(1, 2) * d**-0.5  # [kv_heads, group, length]
    return (torch.softmax(s, -1) @ v).flatten(0, 1)
