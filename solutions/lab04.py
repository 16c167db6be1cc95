"""Worked answers of lab 04."""

from __future__ import annotations

import math

import torch


def merge(m1, l1, acc1, m2, l2, acc2):
    """Two partial attentions over disjoint keys as one. m, l [rows]; acc [rows, d], not normalised.

    m: largest score a row saw, -inf if none; l: sum of exp(s - m); acc: sum of exp(s - m) * v.
    """
    m = torch.maximum(m1, m2)
    anchor = torch.where(m == -math.inf, 0.0, m)  # a row that saw nothing: -inf - -inf would be NaN
    alpha1, alpha2 = torch.exp(m1 - anchor), torch.exp(m2 - anchor)
    return m, l1 * alpha1 + l2 * alpha2, acc1 * alpha1[:, None] + acc2 * alpha2[:, None]


def tiled_attention(q, tiles, keys, causal):
    """Attention of q [rows, d] over keys that come in tiles (k, v), each [block, d]; only ``keys`` of them are real.

    Under a causal mask row r stands at position r + keys - rows. A row that sees no key gives 0.
    """
    rows, d = q.shape
    position = torch.arange(rows, device=q.device) + keys - rows
    m = torch.full((rows,), -math.inf, dtype=q.dtype, device=q.device)
    l, acc = torch.zeros_like(m), torch.zeros_like(q)
    start = 0
    for k, v in tiles:
        cols = start + torch.arange(len(k), device=q.device)
        seen = (cols < keys).expand(rows, -1)
        if causal:
            seen = seen & (cols <= position[:, None])
        s = (q @ k.T * d**-0.5).masked_fill(~seen, -math.inf)
        v = torch.where((cols < keys)[:, None], v, 0.0)  # 0 * NaN would be NaN
        m_new = torch.maximum(m, s.amax(1))
        anchor = torch.where(m_new == -math.inf, 0.0, m_new)
        p, alpha = torch.exp(s - anchor[:, None]), torch.exp(m - anchor)
        l = l * alpha + p.sum(1)
        acc = acc * alpha[:, None] + p @ v
        m, start = m_new, start + len(k)
    return acc / torch.where(l == 0, 1.0, l)[:, None]


def largest_block_n(block_m, head_dim, stages, element_bytes, limit):
    """(keys a tile, bytes): the largest power of two, from 16 on, with which Q and the stages of K and V fit.

    (0, 0) if not even 16 keys fit in ``limit`` bytes.
    """
    best, block_n = (0, 0), 16
    while (needed := head_dim * element_bytes * (block_m + 2 * stages * block_n)) <= limit:
        best, block_n = (block_n, needed), 2 * block_n
    return best
