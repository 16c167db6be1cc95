"""Paged extend attention: several new tokens a sequence over a paged prefix (chunked prefill, mixed steps, drafts).

Each new token sees its sequence's cached tokens up to and including itself: causal, aligned at the bottom right, since
the new tokens are the last ones. One launch takes any mixture: a chunk of 512 tokens, sequences that decode (one token)
and sequences with none.

A program takes BLOCK_M rows of one sequence and kv head. The group's query heads count as rows too, token by token, so
that a tile is full where one token has only a few heads to a key:

    row r of a tile = query head r % group of token r // group,    tokens a tile = BLOCK_M // group

Arithmetic per byte of cache grows with the rows: a chunk is bound by tensor cores, a decoding row by memory. A row of
one token in a tile of 128 would do 128 rows of arithmetic for `group` of them, so such sequences take a small tile.

The grid is fixed by shapes: T tokens of B sequences need at most T // tokens_a_tile + B tiles. Sequence i's tiles begin
at cu_seqlens_q[i] // tokens_a_tile + i, which grows with i, so a program finds its sequence by counting how many begin
at or before its own number.

    q, out           [tokens, heads, head_dim], the sequences' new tokens one after the other
    cu_seqlens_q     [seqs + 1], int32: sequence i has the tokens [cu_seqlens_q[i], cu_seqlens_q[i + 1])
    everything else as in kernels/paged_attention.py; the keys and values of the new tokens lie in the cache already
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.launch import fits, shared_limit
from kernels.op import Case, Cost, Op
from kernels.paged_attention import LOG2_E, Launch, check_paged, gather_pages, page_ids, soften, wide


def paged_extend_reference(
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    cu_seqlens_q,
    *,
    max_q=None,
    scale=None,
    window=None,
    softcap=None,
    out=None,
) -> torch.Tensor:
    """The definition, in at least fp32. Shapes as in the module's docstring -> [tokens, heads, head_dim], q's dtype.

    Tokens before a sequence's first (q longer than the sequence) see nothing and get 0, as do tokens of no sequence.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kv_heads = k_cache.shape[1]
    out = torch.empty_like(q) if out is None else out
    out.zero_()
    bounds = cu_seqlens_q.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        begin, end = bounds[i], bounds[i + 1]
        if begin == end or length <= 0:
            continue
        position = torch.arange(length - (end - begin), length, device=q.device)
        first = 0 if window is None else max(0, int(position[0]) - window + 1)
        key = torch.arange(first, length, device=q.device)
        seen = key <= position[:, None]
        if window is not None:
            seen &= key > position[:, None] - window
        k = wide(gather_pages(k_cache, block_tables[i], first, length))
        v = wide(gather_pages(v_cache, block_tables[i], first, length))
        s = scale * torch.einsum("thgd,hnd->hgtn", wide(q[begin:end]).unflatten(1, (kv_heads, -1)), k)
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        p = torch.softmax(s.masked_fill(~seen, float("-inf")), -1).masked_fill(~seen, 0.0)  # a row that sees nothing: 0
        out[begin:end] = torch.einsum("hgtn,hnd->thgd", p, v).flatten(1, 2).to(q.dtype)
    return out


@triton.jit
def _attend(
    q_ptr,  # at the sequence's first new token
    k_ptr,  # at the kv head
    v_ptr,
    table_ptr,  # at the sequence's row
    out_ptr,  # at the sequence's first new token
    head,
    token,  # first new token of this tile, counted in the sequence
    tokens,  # new tokens of the sequence
    length,
    scale,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_vb,
    stride_vn,
    stride_ot,
    stride_oh,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of rows over the keys that any of them sees."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    row_token = token + rows // GROUP
    heads = head * GROUP + rows % GROUP
    position = length - tokens + row_token
    kept = ((rows < TOKENS * GROUP) & (row_token < tokens))[:, None] & (dims < HEAD_DIM)[None, :]
    q_at = row_token.to(tl.int64)[:, None] * stride_qt + heads[:, None] * stride_qh + dims[None, :]
    q = tl.load(q_ptr + q_at, mask=kept, other=0.0)

    last = tl.minimum(length, length - tokens + token + TOKENS)  # behind the last key that the last row sees
    first = tl.maximum(length - tokens + token - WINDOW + 1, 0) if WINDOW > 0 else 0
    start = first // BLOCK_N
    end = tl.cdiv(tl.maximum(last, 0), BLOCK_N)
    page = page_ids(table_ptr, start, end, last, BLOCK_N, PAGE)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(start, end):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        live = (n < last) & (n >= first)
        there = live[:, None] & (dims < HEAD_DIM)[None, :]
        k_at = page * stride_kb + n % PAGE * stride_kn
        v_at = page * stride_vb + n % PAGE * stride_vn
        k = tl.load(k_ptr + k_at[:, None] + dims[None, :], mask=there, other=0.0)
        v = tl.load(v_ptr + v_at[:, None] + dims[None, :], mask=there, other=0.0)
        page = page_ids(table_ptr, tile + 1, end, last, BLOCK_N, PAGE)

        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP > 0:
            s = soften(s, SOFTCAP)
        seen = n[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= n[None, :] > position[:, None] - WINDOW
        s = tl.where(seen, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row may see nothing of a tile; -inf - -inf is NaN
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(m - base)
        l = l * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = m_new

    out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    o_at = row_token.to(tl.int64)[:, None] * stride_ot + heads[:, None] * stride_oh + dims[None, :]
    tl.store(out_ptr + o_at, out.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["seqs", "max_blocks", "stride_table"])
def _extend_kernel(
    q_ptr,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    k_ptr,  # [num_blocks, KV_HEADS, PAGE, HEAD_DIM]
    v_ptr,  # [num_blocks, KV_HEADS, PAGE, HEAD_DIM]
    table_ptr,  # [seqs, max_blocks]
    length_ptr,  # [seqs]
    bound_ptr,  # [seqs + 1], cu_seqlens_q
    out_ptr,  # [tokens, KV_HEADS * GROUP, HEAD_DIM]
    scale,  # times log2(e), unless there is a softcap
    seqs,
    max_blocks,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_table,
    stride_ot,
    stride_oh,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    BLOCK_M: tl.constexpr,  # rows of a tile, at least GROUP
    SMALL_M: tl.constexpr,  # rows of a tile for sequences that need no more
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    number = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    seq = -1
    for at in range(0, seqs, 256):
        i = at + tl.arange(0, 256)
        begins = tl.load(bound_ptr + i, mask=i < seqs, other=0) // TOKENS + i
        seq += tl.sum(((begins <= number) & (i < seqs)).to(tl.int32), 0)
    begin = tl.load(bound_ptr + seq)
    tokens = tl.load(bound_ptr + seq + 1) - begin
    token = (number - begin // TOKENS - seq) * TOKENS
    if token >= tokens:
        return
    length = tl.minimum(tl.load(length_ptr + seq), max_blocks * PAGE)  # a table says nothing about more tokens
    seq = seq.to(tl.int64)
    begin = begin.to(tl.int64)
    q_ptr += begin * stride_qt
    out_ptr += begin * stride_ot
    table_ptr += seq * stride_table
    k_ptr += head.to(tl.int64) * stride_kh
    v_ptr += head.to(tl.int64) * stride_vh
    # fmt: off
    if SMALL_M < BLOCK_M and tokens * GROUP <= SMALL_M:
        _attend(q_ptr, k_ptr, v_ptr, table_ptr, out_ptr, head, token, tokens, length, scale, stride_qt, stride_qh,
                stride_kb, stride_kn, stride_vb, stride_vn, stride_ot, stride_oh,
                GROUP, HEAD_DIM, PAGE, WINDOW, SOFTCAP, SMALL_M, BLOCK_N, BLOCK_D, PRECISION)
    else:
        _attend(q_ptr, k_ptr, v_ptr, table_ptr, out_ptr, head, token, tokens, length, scale, stride_qt, stride_qh,
                stride_kb, stride_kn, stride_vb, stride_vn, stride_ot, stride_oh,
                GROUP, HEAD_DIM, PAGE, WINDOW, SOFTCAP, BLOCK_M, BLOCK_N, BLOCK_D, PRECISION)
    # fmt: on
