"""Paged decode attention: one new query token a sequence, keys and values scattered over pages of a cache.

A cache of contiguous sequences must reserve room for the longest each may become. Paging cuts the cache into pages of
``block_size`` tokens, and a block table a sequence says which page holds which tokens, as virtual memory does. The
kernel pays one table look-up a token; the bytes it moves stay the same.

    s = scale * q . K^T over the sequence's tokens, optionally softcap * tanh(s / softcap)
    out = softmax(s) . V

Each key and value is used for the ``group`` = heads / kv_heads query heads that share it: 4 * group FLOPs for every
2 elements read, 4 FLOP a byte at group 4 in 16 bit against 160 that an H200 could do. So memory decides, and three
things follow:

- The group's query heads are the rows of one tile, padded to the 16 rows of a tensor-core instruction, so that the
  cache is read once for all of them.
- Bytes in flight (see kernels/stream.py): K and V tiles come by asynchronous copies, ``num_stages`` deep, and the page
  ids of a tile are loaded one tile ahead, or every tile would wait for two latencies, one after the other.
- A single long sequence has only kv_heads programs for 132 SMs. Split-KV (Flash-Decoding, Dao et al. 2023) gives a
  sequence's tokens to several programs. Each leaves its maximum m, its sum l and its unnormalised output in fp32; a
  second kernel merges them: with M = max m_i, out = sum(2^(m_i - M) acc_i) / sum(2^(m_i - M) l_i).

How many splits a sequence has is fixed when the kernel is launched, from shapes alone, so that a CUDA graph can replay
it: the lengths are read on the device, every sequence's tiles are divided among the splits, and a program without a
tile returns at once. No atomics: the same inputs give the same bits.

    q, out           [seqs, heads, head_dim]
    k_cache, v_cache [num_blocks, kv_heads, block_size, head_dim], any strides, last dimension contiguous
    block_tables     [seqs, max_blocks], int32; entries past a sequence's last token are never read
    seq_lens         [seqs], int32, tokens in the cache, the new one included; 0 gives output 0
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from kernels.launch import arch, fits, shared_limit
from kernels.op import Case, Cost, Op, wide
from kernels.paged_cache import (
    LOG2_E,
    check_paged,
    check_pages,
    gather_pages,
    page_ids,
    paged_cache,
    pow2,
    sm_count,
    soften,
)

# ---------------------------------------------------------------------------------------------------- definition


def paged_decode_reference(
    q, k_cache, v_cache, block_tables, seq_lens, *, scale=None, window=None, softcap=None, out=None, **_
) -> torch.Tensor:
    """The definition, in at least fp32. Shapes as in the module's docstring -> [seqs, heads, head_dim], q's dtype.

    Settings of the launch (``splits``, ``workspace``) are accepted and change nothing.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    kv_heads = k_cache.shape[1]
    out = torch.empty_like(q) if out is None else out
    for i, length in enumerate(seq_lens.tolist()):
        first = 0 if window is None else max(0, length - window)
        if length <= 0:
            out[i] = 0
            continue
        k = wide(gather_pages(k_cache, block_tables[i], first, length))
        v = wide(gather_pages(v_cache, block_tables[i], first, length))
        s = scale * (wide(q[i]).unflatten(0, (kv_heads, -1)) @ k.transpose(1, 2))
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        out[i] = (torch.softmax(s, -1) @ v).flatten(0, 1).to(q.dtype)
    return out


# ------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _share(length, split, splits, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """How a sequence's tiles are divided: first token seen, first and end tile of this split, splits that have a tile.

    Tiles are counted from token 0 so that a tile never straddles a page it could lie in; every tile from the first to
    the last holds a token that is seen.
    """
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    low = first // BLOCK_N
    high = tl.cdiv(length, BLOCK_N)
    each = tl.maximum(tl.cdiv(high - low, splits), 1)
    start = low + split * each
    return first, start, tl.minimum(start + each, high), tl.cdiv(high - low, each)


@triton.jit(do_not_specialize=["splits", "max_blocks", "stride_table"])
def _decode_kernel(
    q_ptr,  # [seqs, KV_HEADS * GROUP, HEAD_DIM]
    k_ptr,  # [num_blocks, KV_HEADS, PAGE, HEAD_DIM]
    v_ptr,  # [num_blocks, KV_HEADS, PAGE, HEAD_DIM]
    table_ptr,  # [seqs, max_blocks]
    length_ptr,  # [seqs]
    out_ptr,  # [seqs, KV_HEADS * GROUP, HEAD_DIM]
    work_ptr,  # fp32: acc [seqs, KV_HEADS * GROUP, splits, HEAD_DIM], then m and l [seqs, KV_HEADS * GROUP, splits]
    scale,  # times log2(e), unless there is a softcap
    splits,
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
    GROUP: tl.constexpr,  # query heads that share a kv head
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,  # tokens a page
    WINDOW: tl.constexpr,  # 0: all tokens
    SOFTCAP: tl.constexpr,  # 0: none
    BLOCK_M: tl.constexpr,  # GROUP rounded up to a power of two of at least 16
    BLOCK_N: tl.constexpr,  # tokens a tile
    BLOCK_D: tl.constexpr,  # HEAD_DIM rounded up to a power of two
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,  # programmatic dependent launch
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # what went before has ended
        # The merge may take its place already. A larger grid would take places of ours and then start on uneven SMs:
        # one decode after the other, batch 32 at 4096 tokens, took 164 us each instead of 137.
        if splits > 1:
            tl.extra.cuda.gdc_launch_dependents()
    seq = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    length = tl.minimum(tl.load(length_ptr + seq), max_blocks * PAGE)  # a table says nothing about more tokens
    first, start, end, active = _share(length, split, splits, BLOCK_N, WINDOW)
    if start >= end:
        if split > 0:
            return  # split 0 goes on: it writes the output of an empty sequence

    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = head * GROUP + rows
    kept = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    seq = seq.to(tl.int64)
    table_ptr += seq * stride_table
    page = page_ids(table_ptr, start, end, length, BLOCK_N, PAGE)
    q = tl.load(q_ptr + seq * stride_qt + heads[:, None] * stride_qh + dims[None, :], mask=kept, other=0.0)
    k_ptr += head.to(tl.int64) * stride_kh
    v_ptr += head.to(tl.int64) * stride_vh

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    mass = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(start, end):
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        live = (n < length) & (n >= first)
        # What is not live is not read: the rest of a page may hold NaN, and 0 * NaN is NaN.
        seen = live[:, None] & (dims < HEAD_DIM)[None, :]
        k_at = page * stride_kb + n % PAGE * stride_kn
        v_at = page * stride_vb + n % PAGE * stride_vn
        k = tl.load(k_ptr + k_at[:, None] + dims[None, :], mask=seen, other=0.0)
        v = tl.load(v_ptr + v_at[:, None] + dims[None, :], mask=seen, other=0.0)
        page = page_ids(table_ptr, tile + 1, end, length, BLOCK_N, PAGE)

        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP > 0:
            s = soften(s, SOFTCAP)
        s = tl.where(live[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # q . k can itself be -inf; -inf - -inf is NaN
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(m - base)
        mass = mass * shrink[:, None] + p  # summed over the tile's columns after the loop: one barrier fewer in it
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = m_new
    l = tl.sum(mass, 1)

    if active <= 1:
        out = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        at = seq * stride_ot + heads[:, None] * stride_oh + dims[None, :]
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=kept)
    else:
        row = (seq * (KV_HEADS * GROUP) + heads) * splits + split
        total = tl.num_programs(0).to(tl.int64) * GROUP * splits
        tl.store(work_ptr + row[:, None] * HEAD_DIM + dims[None, :], acc, mask=kept)
        tl.store(work_ptr + total * HEAD_DIM + row, m, mask=rows < GROUP)
        tl.store(work_ptr + total * (HEAD_DIM + 1) + row, l, mask=rows < GROUP)


@triton.jit(do_not_specialize=["splits", "max_blocks"])
def _merge_kernel(
    work_ptr,  # as _decode_kernel leaves it
    length_ptr,  # [seqs]
    out_ptr,  # [seqs, HEADS, HEAD_DIM]
    splits,
    max_blocks,
    stride_ot,
    stride_oh,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,  # partial results merged in one go
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()  # launched while _decode_kernel runs: saves 0.8 us
    row = tl.program_id(0).to(tl.int64)  # seq * HEADS + head
    length = tl.minimum(tl.load(length_ptr + row // HEADS), max_blocks * PAGE)
    active = _share(length, 0, splits, BLOCK_N, WINDOW)[3]
    if active <= 1:
        return  # the one split has written the output itself
    dims = tl.arange(0, BLOCK_D)
    total = tl.num_programs(0).to(tl.int64) * splits
    m = float("-inf")
    l = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for at in range(0, active, BLOCK_S):
        part = at + tl.arange(0, BLOCK_S)
        some = part < active
        part = row * splits + part
        m_part = tl.load(work_ptr + total * HEAD_DIM + part, mask=some, other=float("-inf"))
        l_part = tl.load(work_ptr + total * (HEAD_DIM + 1) + part, mask=some, other=0.0)
        kept = some[:, None] & (dims < HEAD_DIM)[None, :]
        acc_part = tl.load(work_ptr + part[:, None] * HEAD_DIM + dims[None, :], mask=kept, other=0.0)
        m_new = tl.maximum(m, tl.max(m_part, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # two empty states merge to an empty state, not to NaN
        weight = tl.exp2(m_part - base)
        shrink = tl.exp2(m - base)
        l = l * shrink + tl.sum(weight * l_part, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * acc_part, 0)
        m = m_new
    out = acc / tl.where(l == 0.0, 1.0, l)
    at = row // HEADS * stride_ot + row % HEADS * stride_oh
    tl.store(out_ptr + at + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


# -------------------------------------------------------------------------------------------------------- launch


@dataclass(frozen=True)
class Launch:
    """``tile_bytes`` of K, and as much of V, come at once; ``num_stages - 1`` such pairs lie in shared memory."""

    tile_bytes: int
    num_warps: int
    num_stages: int

    def block_n(self, block_d: int, element_size: int) -> int:
        """Tokens a tile: a tensor-core instruction takes 16 of them."""
        return max(16, self.tile_bytes // (block_d * element_size))

    def warps(self, element_size: int) -> int:
        """Products in fp32 run without tensor cores, on whole rows in registers: twice the warps, or they spill."""
        return 2 * self.num_warps if element_size == 4 else self.num_warps

    def shared_bytes(self, block_m: int, block_d: int, element_size: int, pairs: int | None = None) -> int:
        """Upper bound: ``pairs`` of buffers, by default num_stages - 1; q and p; 128 bytes a row for reductions."""
        block_n = self.block_n(block_d, element_size)
        buffers = 2 * block_n * block_d * (self.num_stages - 1 if pairs is None else pairs)
        return (buffers + block_m * (block_d + block_n)) * element_size + 128 * block_m


# A tile of 16 KB is 64 tokens at head size 128 in 16 bit. It needs the same shared memory whatever head size and type
# are, less than any architecture has. Three programs fit an SM of an H200: 96 KB on their way while they compute, and
# as much again while they wait.
# Measured there (bf16, 32 heads, 8 kv heads, head size 128, pages of 16; shares of stream.READ at 1 GiB), batch 32 at
# 4096 tokens, 256 programs: 0.93; two splits 0.73. Batch 64: 0.82 unsplit, 0.90 in two splits, 0.91 in three. By an
# earlier clock, which charged for the write-back of dirty lines, batch 32 had 0.90; 2 stages 0.73, 4 stages 0.89; tiles
# of 8 KB 0.86; 32 KB and 8 warps 0.86; 8 KB and 2 warps 0.80. With 2 stages four programs fit an SM and batch 64 at
# 4096 is one full round; but where lengths differ they lose (64 lengths from 64 to 8192: 0.70 to 0.82 against 0.82 to
# 0.87).
LAUNCH = Launch(tile_bytes=16384, num_warps=4, num_stages=3)
PER_SM = 3  # programs that the registers of an SM hold
ROUNDS = 4  # at most so many rounds of programs are made by splitting
MAX_SPLITS = 128


@cache
def decode_splits(device: torch.device, programs: int, head_dim: int, element_size: int) -> int:
    """Splits for ``programs`` = seqs * kv_heads, from shapes alone.

    Equal programs end together, so what counts is how full the last round is: of SMs while all programs are resident,
    of places for programs once they are not. More splits must fill at least 5 % more, to earn the merge.
    Raises ValueError if not one program fits an SM.
    """
    needed = LAUNCH.shared_bytes(16, pow2(head_dim), element_size)
    if not fits(needed, device):
        raise ValueError(
            f"paged_decode: head_dim {head_dim} with {element_size}-byte elements needs {needed} bytes of shared "
            f"memory a block, {device} has {shared_limit(device)}"
        )
    sms = sm_count(device)
    places = sms * min(PER_SM, (shared_limit(device) + 1024) // (needed + 1024))  # 1 KiB a block is the system's
    best, chosen = 0.0, 1
    for splits in range(1, max(1, min(MAX_SPLITS, ROUNDS * places // programs)) + 1):
        n = programs * splits
        unit = sms if n <= places else places
        full = n / (-(-n // unit) * unit)
        full *= min(1.0, n / min(1.5 * sms, places))  # one program an SM has too few bytes in flight
        if full > best + 0.05:
            best, chosen = full, splits
    return chosen


def decode_workspace(heads: int, kv_heads: int, head_dim: int, device: torch.device | str) -> torch.Tensor:
    """Room for the partial results of any batch with the splits that paged_decode chooses: 1-D, fp32.

    Nothing in it is kept between calls; calls that may overlap need one each.
    """
    device = torch.empty(0, device=device).device  # "cuda" means the current one
    rows = ROUNDS * PER_SM * sm_count(device) * (heads // kv_heads)
    return torch.empty(rows * (head_dim + 2), dtype=torch.float32, device=device)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    splits: int | None = None,
    workspace: torch.Tensor | None = None,
    launch: Launch | None = None,
    debug: bool = False,
) -> torch.Tensor:
    """Attention of one token a sequence over its pages. Shapes as in the module's docstring -> [seqs, heads, head_dim].

    scale: by default head_dim ** -0.5. window: only the newest ``window`` tokens are seen, the new one included.
    softcap: bound of the scores. splits: programs a sequence and kv head, by default ``decode_splits``; 1 needs no
    merge and no workspace. workspace: from ``decode_workspace``, for callers that allocate nothing in a step. launch:
    instead of LAUNCH. Nothing is read from the device, so the call can be captured in a CUDA graph; the splits follow
    the lengths that a replay finds. A length beyond max_blocks * block_size counts as that, and a block id out of
    range reads foreign memory; debug=True waits for the GPU and refuses both.

    Raises ValueError for arguments that do not fit each other.
    """
    out = torch.empty_like(q) if out is None else out
    check_paged("paged_decode", q, k_cache, v_cache, block_tables, seq_lens, out, window, softcap)
    seqs, heads, head_dim = q.shape
    kv_heads, page = k_cache.shape[1:3]
    max_blocks = block_tables.shape[1]
    if seq_lens.shape[0] != seqs:
        raise ValueError(f"paged_decode: q must have one token a sequence, got {seqs} for {seq_lens.shape[0]}")
    if debug:
        check_pages("paged_decode", k_cache, block_tables, seq_lens)
    if not out.numel():
        return out
    launch = launch or LAUNCH
    block_d = pow2(head_dim)
    block_n = launch.block_n(block_d, q.element_size())
    if splits is None:
        splits = decode_splits(q.device, seqs * kv_heads, head_dim, q.element_size())
        splits = max(1, min(splits, -(-max_blocks * page // block_n)))
    elif not 1 <= splits <= 65535:
        raise ValueError(f"paged_decode: splits must be from 1 to 65535, got {splits}")
    needed = seqs * heads * splits * (head_dim + 2) if splits > 1 else 0
    if workspace is None:
        workspace = torch.empty(needed, dtype=torch.float32, device=q.device)
    elif workspace.dtype != torch.float32 or workspace.device != q.device or workspace.numel() < needed:
        raise ValueError(
            f"paged_decode: workspace must hold {needed} float32 on {q.device} for {splits} splits, "
            f"got {workspace.numel()} {workspace.dtype} on {workspace.device}"
        )
    overlap = arch(q.device) >= 90
    common = {
        "HEAD_DIM": head_dim,
        "PAGE": page,
        "WINDOW": window or 0,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "OVERLAP": overlap,
        "launch_pdl": overlap,
    }
    scale = head_dim**-0.5 if scale is None else scale
    _decode_kernel[(seqs * kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        out,
        workspace,
        scale if softcap else scale * LOG2_E.value,
        splits,
        max_blocks,
        q.stride(0),
        q.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        out.stride(0),
        out.stride(1),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        SOFTCAP=softcap or 0.0,
        BLOCK_M=pow2(heads // kv_heads),
        PRECISION="ieee",  # fp32 stays fp32; without effect on 16-bit inputs
        num_warps=launch.warps(q.element_size()),
        num_stages=launch.num_stages,
        **common,
    )
    if splits > 1:
        _merge_kernel[(seqs * heads,)](
            workspace,
            seq_lens,
            out,
            splits,
            max_blocks,
            out.stride(0),
            out.stride(1),
            HEADS=heads,
            BLOCK_S=min(32, pow2(splits)),
            num_warps=4,
            **common,
        )
    return out


def paged_decode_cost(q, k_cache, v_cache, block_tables, seq_lens, *, window=None, **_) -> Cost:
    """Keys and values of every token that is seen, read once a sequence (also where sequences share a page), q and out.

    2 FLOPs a multiply-add, two of them for each element and query head. Reads seq_lens on the host.
    """
    kv_heads, _page, head_dim = k_cache.shape[1:]
    tokens = int(seq_lens.clamp(0, window).sum())
    size = q.element_size()
    return Cost(
        bytes=2 * tokens * kv_heads * head_dim * size + 2 * q.numel() * size, flops=4 * tokens * q.shape[1] * head_dim
    )


# --------------------------------------------------------------------------------------------------------- cases


def _case(
    name: str, lengths, kv_heads=1, group=4, head_dim=64, block_size=16, q_scale=1.0, edit=None, cache=None, **options
) -> Case:
    """q is a slice of a fused qkv. ``edit(inputs)`` changes the inputs at the end; ``cache``: more for paged_cache."""

    def make(device, dtype, generator):
        heads = kv_heads * group
        qkv = q_scale * torch.randn(len(lengths), heads + 2 * kv_heads, head_dim, generator=generator)
        qkv[:, heads:] = float("nan")
        inputs = {"q": qkv.to(device, dtype)[:, :heads]}
        inputs |= paged_cache(lengths, kv_heads, head_dim, block_size, device, dtype, generator, **(cache or {}))
        if edit:
            edit(inputs)
        return {**inputs, **options}

    return Case(name, make)


def _huge_then_small(inputs: dict) -> None:
    """The first key alone decides: its score exceeds the others by far more than any exponential can hold."""
    page = inputs["block_tables"][0, 0]
    inputs["q"].fill_(4.0)
    inputs["k_cache"][page, :, 0] = 16.0


def _below_any_sentinel(inputs: dict) -> None:
    """All scores lie below -50000 (and within fp16 they are exact): a finite stand-in for -inf would win."""
    inputs["q"].fill_(64.0)
    for row, length in enumerate(inputs["seq_lens"].tolist()):
        for i in range(length):
            size = inputs["k_cache"].shape[2]
            inputs["k_cache"][inputs["block_tables"][row, i // size], :, i % size] = -128.0 - i % 2 / 8


def _nan_in_a_used_token(inputs: dict) -> None:
    """The second sequence's newest key is NaN: its output is NaN, its neighbours' is not."""
    size, length = inputs["k_cache"].shape[2], int(inputs["seq_lens"][1])
    inputs["k_cache"][inputs["block_tables"][1, (length - 1) // size], :, (length - 1) % size] = float("nan")


DECODE_CASES = (
    _case("no sequences", []),
    _case("one sequence of one token", [1]),
    _case("empty sequences first, between and last", [0, 5, 0, 33, 0], splits=2),
    _case("all sequences empty", [0, 0], splits=3),
    _case("lengths around a tile of 128", [1, 15, 16, 17, 63, 64, 65, 127, 128, 129]),
    *(_case(f"{g} query heads a kv head", [40, 7], kv_heads=2, group=g) for g in (1, 5, 6, 7, 8, 16, 24)),
    *(_case(f"head size {d}", [50, 3], head_dim=d, splits=2) for d in (16, 80, 96, 128, 256)),
    *(_case(f"pages of {p}", [300, 1, 257], block_size=p, splits=2) for p in (1, 2, 4, 64, 256)),
    _case("a prefix shared by three sequences", [70, 32, 90], kv_heads=2, cache={"shared": 2}, splits=3),
    _case("more splits than pages", [5, 200, 300], block_size=64, splits=11),
    _case("all splits but one empty", [9, 16], splits=7),
    *(_case(f"window {w}", [200, 3, 0, 64, 65], window=w, splits=3) for w in (1, 64, 1000)),
    _case("softcap", [90, 20], softcap=20.0, q_scale=8.0),
    _case("scores far beyond the softcap", [90, 20], softcap=0.5, q_scale=50.0, scale=1.0),
    _case("window and softcap", [150, 40], window=37, softcap=5.0, splits=2),
    _case("scale 0: the mean of V", [77], scale=0.0),
    _case("one huge score, then small ones", [200], edit=_huge_then_small, scale=1.0, splits=2),
    _case("all scores below -50000", [200, 40], edit=_below_any_sentinel, scale=1.0, splits=2),
    _case("NaN in a used token", [40, 70, 33], edit=_nan_in_a_used_token, splits=2),
)
OP = Op("paged_decode", paged_decode_reference, paged_decode, paged_decode_cost, DECODE_CASES)
