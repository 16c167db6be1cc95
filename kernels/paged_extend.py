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
from kernels.op import Case, Cost, Op, wide
from kernels.paged_attention import Launch
from kernels.paged_cache import (
    LOG2_E,
    check_paged,
    check_pages,
    gather_pages,
    page_ids,
    paged_cache,
    pow2,
    soften,
)


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

    Tokens before a sequence's first (q longer than the sequence) see nothing and get 0. Rows of q that belong to no
    sequence, behind cu_seqlens_q[-1], are not written.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kv_heads = k_cache.shape[1]
    out = torch.empty_like(q) if out is None else out
    bounds = cu_seqlens_q.tolist()
    for i, length in enumerate(seq_lens.tolist()):
        begin, end = bounds[i], bounds[i + 1]
        if begin == end or length <= 0:
            out[begin:end] = 0
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


# Rows of a tile -> how it is launched. Measured on an H200 (bf16, 32 heads, 8 kv heads, head size 128, pages of 16), in
# us: a chunk of 2048 tokens of 8192, four of 512 of 4096, and a mixed step (512 of 4096, 63 decoding rows at 2048):
#   128 rows   8 KB tiles  8 warps  3 stages   714  394  307
#   128 rows  16 KB tiles  8 warps  3 stages   770  430  286
#    64 rows   8 KB tiles  4 warps  3 stages   807  446  236
#    64 rows  16 KB tiles  4 warps  3 stages   885  489  254    (spills on sm_80 to sm_120)
# Decoding rows want many programs an SM, chunks want many rows: the mean number of new tokens tells them apart.
LAUNCH = {
    16: Launch(16384, 4, 3),
    64: Launch(8192, 4, 3),
    128: Launch(8192, 8, 3),
}


def shared_bytes(block_m: int, block_d: int, element_size: int) -> int:
    """Upper bound. Tensor-core instructions that read shared memory themselves (64 rows and more) hold one more."""
    launch = LAUNCH[block_m]
    return launch.shared_bytes(block_m, block_d, element_size, pairs=launch.num_stages - (block_m < 64))


@cache
def block_rows(device: torch.device, rows: int, mean_rows: int, group: int, head_dim: int, size: int) -> int:
    """Rows of a tile for sequences of up to ``rows`` rows, ``mean_rows`` on average. Raises ValueError if none fits."""
    wanted = 128 if min(rows, mean_rows) >= 128 or group > 64 else 64 if max(rows, group) > 16 else 16
    if size == 4:  # products in fp32 are not for tensor cores: larger tiles only spill
        wanted = 64 if group > 16 else 16
    for block_m in (128, 64, 16):
        if pow2(group) <= block_m <= wanted:
            if fits(shared_bytes(block_m, pow2(head_dim), size), device):
                return block_m
    raise ValueError(
        f"paged_extend: {group} query heads a kv head, of head_dim {head_dim} with {size}-byte elements, need more "
        f"than the {shared_limit(device)} bytes of shared memory a block of {device} can have"
    )


def paged_extend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    max_q: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """Attention of every sequence's new tokens over its pages. Shapes as in the module's docstring -> [tokens, heads,
    head_dim]; rows of q behind the last sequence's are not written.

    max_q: no sequence has more new tokens; it sets the rows of a tile. By default the number of tokens. The grid
    depends on shapes and max_q alone and nothing is read from the device, so it can be captured in a CUDA graph.
    scale, window (each token sees itself and the window - 1 before it), softcap: and debug: as for
    paged_decode.

    Raises ValueError for arguments that do not fit each other.
    """
    out = torch.empty_like(q) if out is None else out
    check_paged("paged_extend", q, k_cache, v_cache, block_tables, seq_lens, out, window, softcap)
    tokens, heads, head_dim = q.shape
    _, kv_heads, page, _ = k_cache.shape
    seqs, max_blocks = block_tables.shape
    if cu_seqlens_q.shape != (seqs + 1,) or cu_seqlens_q.dtype != torch.int32 or cu_seqlens_q.device != q.device:
        raise ValueError(
            f"paged_extend: cu_seqlens_q must be int32 of shape ({seqs + 1},) on {q.device}, "
            f"got {cu_seqlens_q.dtype} of shape {tuple(cu_seqlens_q.shape)} on {cu_seqlens_q.device}"
        )
    if max_q is not None and max_q < 0:
        raise ValueError(f"paged_extend: max_q must be None or at least 0, got {max_q}")
    max_q = tokens if max_q is None else min(max_q, tokens)
    if debug:
        check_pages("paged_extend", k_cache, block_tables, seq_lens)
    if not out.numel() or not seqs or not max_q:
        return out
    group = heads // kv_heads
    block_d = pow2(head_dim)
    block_m = block_rows(q.device, max_q * group, tokens * group // seqs, group, head_dim, q.element_size())
    launch = LAUNCH[block_m]
    tiles = tokens // (block_m // group) + seqs
    scale = head_dim**-0.5 if scale is None else scale
    _extend_kernel[(tiles * kv_heads,)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        cu_seqlens_q,
        out,
        scale if softcap else scale * LOG2_E.value,
        seqs,
        max_blocks,
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        PAGE=page,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        BLOCK_M=block_m,
        SMALL_M=pow2(group),
        BLOCK_N=launch.block_n(block_d, q.element_size()),
        BLOCK_D=block_d,
        PRECISION="ieee",
        num_warps=launch.warps(q.element_size()),
        num_stages=launch.num_stages,
    )
    return out


def paged_extend_cost(q, k_cache, v_cache, block_tables, seq_lens, cu_seqlens_q, *, window=None, **_) -> Cost:
    """Keys and values of every token that any new token of the sequence sees, read once a sequence; q and out once.

    2 FLOPs a multiply-add, two of them for each element of a seen key, query head and new token. Reads the lengths on
    the host.
    """
    kv_heads, _page, head_dim = k_cache.shape[1:]
    bounds, read, pairs, rows = cu_seqlens_q.tolist(), 0, 0, 0
    for begin, end, length in zip(bounds[:-1], bounds[1:], seq_lens.tolist(), strict=True):
        n = min(end - begin, max(length, 0))  # new tokens that see something: the last ones
        rows += end - begin
        if n:
            span = length if window is None else min(length, n - 1 + window)
            read += span
            longest = length if window is None else min(length, window)
            short = max(0, longest - (length - n))  # new tokens that see fewer than `longest`, the first ones
            pairs += n * longest - short * (short - 1) // 2
    size = q.element_size()
    return Cost(
        bytes=2 * read * kv_heads * head_dim * size + 2 * rows * q.shape[1] * head_dim * size,
        flops=4 * pairs * q.shape[1] * head_dim,
    )


def _case(name: str, news, lengths, kv_heads=1, group=4, head_dim=64, block_size=16, cache=None, **options) -> Case:
    """``news``: new tokens of each sequence. q is a slice of a fused qkv."""

    def make(device, dtype, generator):
        heads = kv_heads * group
        qkv = torch.randn(sum(news), heads + 2 * kv_heads, head_dim, generator=generator)
        qkv[:, heads:] = float("nan")
        bounds = torch.tensor([0, *news]).cumsum(0).to(torch.int32)
        return {
            "q": qkv.to(device, dtype)[:, :heads],
            **paged_cache(lengths, kv_heads, head_dim, block_size, device, dtype, generator, **(cache or {})),
            "cu_seqlens_q": bounds.to(device),
            **options,
        }

    return Case(name, make)


EXTEND_CASES = (
    _case("no sequences", [], []),
    _case("no new tokens", [0, 0], [5, 0]),
    _case("a prompt without a prefix", [50], [50]),
    _case("prompts shorter than a tile", [1, 2, 3, 5], [1, 2, 3, 5], kv_heads=2),
    _case("decoding rows only", [1, 1, 1], [40, 1, 129], max_q=1),
    _case("a chunk, decoding rows, none", [1, 33, 0, 1, 7, 0], [65, 100, 20, 17, 7, 0], max_q=33),
    _case("no new tokens first and last", [0, 3, 0], [9, 40, 0]),
    _case("more new tokens than cached: the first see nothing", [10, 4], [6, 0]),
    _case("drafts of four tokens", [4, 4, 4], [70, 4, 33], max_q=4, kv_heads=2),
    *(_case(f"{g} query heads a kv head", [9, 1], [40, 30], group=g) for g in (1, 5, 6, 7, 8, 16, 24)),
    *(_case(f"head size {d}", [20, 1], [50, 30], head_dim=d) for d in (16, 80, 96, 128, 256)),
    *(_case(f"pages of {p}", [5, 1], [150, 70], block_size=p) for p in (1, 4, 64, 256)),
    _case("a prefix shared by two sequences", [9, 3], [70, 40], cache={"shared": 2}),
    *(_case(f"window {w}", [40, 1, 3], [90, 70, 3], window=w) for w in (1, 17, 1000)),
    _case("softcap and window", [30], [80], softcap=2.0, window=33),
)
OP = Op("paged_extend", paged_extend_reference, paged_extend, paged_extend_cost, EXTEND_CASES)
