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

from kernels.launch import DTYPES, fits, shared_limit
from kernels.op import Case, Cost, Op

LOG2_E = tl.constexpr(1.4426950408889634)


# ---------------------------------------------------------------------------------------------------- definition


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in at least fp32 (fp64 stays fp64, so that a reference on fp64 inputs is exact enough to judge by)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def gather_pages(cache: torch.Tensor, table: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Tokens [first, last) of one sequence, from a cache as in the module's docstring -> [kv_heads, tokens, head_dim].

    table: [max_blocks], the sequence's block table; only entries that hold these tokens are read.
    """
    size = cache.shape[2]
    pages = cache[table[first // size : -(-last // size)].long()]
    flat = pages.transpose(0, 1).flatten(1, 2)
    return flat[:, first % size : first % size + last - first]


def paged_decode_reference(
    q, k_cache, v_cache, block_tables, seq_lens, *, scale=None, window=None, softcap=None, out=None
) -> torch.Tensor:
    """The definition, in at least fp32. Shapes as in the module's docstring -> [seqs, heads, head_dim], q's dtype."""
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
def soften(s, SOFTCAP: tl.constexpr):
    """softcap * tanh(s / softcap) in base 2. tanh(x) = 2 sigmoid(2x) - 1 neither overflows nor cancels for large x."""
    return (SOFTCAP * LOG2_E) * (2 * tl.sigmoid(s * (2 / SOFTCAP)) - 1)


@triton.jit
def _share(length, split, splits, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, MIN_TILES: tl.constexpr):
    """How a sequence's tiles are divided: first token seen, first and end tile of this split, splits that have a tile.

    Tiles are counted from token 0 so that a tile never straddles a page it could lie in; every tile from the first to
    the last holds a token that is seen.
    """
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    low = first // BLOCK_N
    high = tl.cdiv(length, BLOCK_N)
    each = tl.maximum(tl.cdiv(high - low, splits), MIN_TILES)
    start = low + split * each
    return first, start, tl.minimum(start + each, high), tl.cdiv(high - low, each)


@triton.jit
def page_ids(table_ptr, tile, end, length, BLOCK_N: tl.constexpr, PAGE: tl.constexpr):
    """Page ids of a tile's tokens: one for all where the tile lies in a page, else one a token.

    Entries past the last token are not read. ids are int64: id * stride passes 2**31 in a large cache.
    """
    if PAGE >= BLOCK_N:
        page = tl.load(table_ptr + tile * BLOCK_N // PAGE, mask=tile < end, other=0)
    else:
        n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        page = tl.load(table_ptr + n // PAGE, mask=n < length, other=0)
    return page.to(tl.int64)


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
    MIN_TILES: tl.constexpr,  # a split has at least so many tiles
    PRECISION: tl.constexpr,
):
    seq = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(1)
    length = tl.minimum(tl.load(length_ptr + seq), max_blocks * PAGE)  # a table says nothing about more tokens
    first, start, end, active = _share(length, split, splits, BLOCK_N, WINDOW, MIN_TILES)
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
    l = tl.zeros([BLOCK_M], tl.float32)
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
        l = l * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        m = m_new

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
    MIN_TILES: tl.constexpr,
    BLOCK_S: tl.constexpr,  # partial results merged in one go
):
    row = tl.program_id(0).to(tl.int64)  # seq * HEADS + head
    length = tl.minimum(tl.load(length_ptr + row // HEADS), max_blocks * PAGE)
    active = _share(length, 0, splits, BLOCK_N, WINDOW, MIN_TILES)[3]
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

    tile_bytes: int = 16384
    num_warps: int = 4
    num_stages: int = 3
    min_tiles: int = 1

    def block_n(self, block_d: int, element_size: int) -> int:
        """Tokens a tile: a tensor-core instruction takes 16 of them."""
        return max(16, self.tile_bytes // (block_d * element_size))

    def shared_bytes(self, block_d: int, element_size: int) -> int:
        """Upper bound: the buffers, and 8 KB for q, p and the reductions between warps."""
        tile = self.block_n(block_d, element_size) * block_d * element_size
        return 2 * tile * (self.num_stages - 1) + 8192


LAUNCH = (Launch(),)


@cache
def launch_for(device: torch.device, block_d: int, element_size: int) -> Launch:
    """The first entry of LAUNCH that fits. Raises ValueError if none does."""
    for launch in LAUNCH:
        if fits(launch.shared_bytes(block_d, element_size), device):
            return launch
    raise ValueError(
        f"paged_decode: head_dim {block_d} with {element_size}-byte elements needs "
        f"{LAUNCH[-1].shared_bytes(block_d, element_size)} bytes of shared memory a block, {device} has "
        f"{shared_limit(device)}"
    )


@cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors; on a CPU, where the kernel is interpreted, 1."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def decode_splits(seqs: int, kv_heads: int, max_tokens: int, device: torch.device | str) -> int:
    """Programs a sequence and kv head, from shapes alone: enough to fill the GPU."""
    programs = max(1, seqs * kv_heads)
    return max(1, min(2 * sm_count(torch.device(device)) // programs, triton.cdiv(max_tokens, 64), 128))


def decode_workspace(seqs: int, heads: int, head_dim: int, splits: int, device: torch.device | str) -> torch.Tensor:
    """Room for the partial results of ``splits`` splits: 1-D, fp32. Nothing need be kept in it between calls."""
    return torch.empty(seqs * heads * splits * (head_dim + 2), dtype=torch.float32, device=device)


def check_paged(op: str, q, k_cache, v_cache, block_tables, seq_lens, out, window, softcap) -> None:
    """Raise ValueError, naming the argument, what it is and what it must be. Reads shapes only, never the device."""

    def need(ok: bool, name: str, must: str, got) -> None:
        if not ok:
            raise ValueError(f"{op}: {name} must {must}, got {got}")

    for name, t, shape in (
        ("q", q, "[tokens, heads, head_dim]"),
        ("k_cache", k_cache, "[num_blocks, kv_heads, block_size, head_dim]"),
        ("v_cache", v_cache, "[num_blocks, kv_heads, block_size, head_dim]"),
        ("block_tables", block_tables, "[seqs, max_blocks]"),
        ("seq_lens", seq_lens, "[seqs]"),
        ("out", out, "[tokens, heads, head_dim]"),
    ):
        need(t.dim() == shape.count(",") + 1, name, f"be {shape}", f"shape {tuple(t.shape)}")
        need(t.device == q.device, name, f"be on q's device {q.device}", t.device)
        if name in ("block_tables", "seq_lens"):
            need(t.dtype == torch.int32, name, "be int32", t.dtype)
        else:
            need(t.dtype == q.dtype, name, f"have q's dtype {q.dtype}", t.dtype)
        need(t.stride(-1) == 1 or t.shape[-1] <= 1, name, "be contiguous in its last dimension", f"strides {t.stride()}")
    need(q.dtype in DTYPES, "q", "be float32, float16 or bfloat16", q.dtype)
    _, kv_heads, size, head_dim = k_cache.shape
    need(k_cache.shape == v_cache.shape, "v_cache", f"have k_cache's shape {tuple(k_cache.shape)}", tuple(v_cache.shape))
    need(q.shape[2] == head_dim <= 256, "head_dim", "be the same in q and k_cache, at most 256", (q.shape[2], head_dim))
    need(kv_heads > 0 and q.shape[1] % kv_heads == 0, "heads", f"be a multiple of kv_heads {kv_heads}", q.shape[1])
    need(0 < size <= 256 and size & (size - 1) == 0, "block_size", "be a power of two from 1 to 256", size)
    need(block_tables.shape[0] == seq_lens.shape[0], "seq_lens", f"have {block_tables.shape[0]} rows", seq_lens.shape[0])
    need(out.shape == q.shape, "out", f"have q's shape {tuple(q.shape)}", tuple(out.shape))
    need(window is None or window >= 1, "window", "be None or at least 1 (the newest token sees itself)", window)
    need(softcap is None or softcap > 0, "softcap", "be None or positive", softcap)


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
) -> torch.Tensor:
    """Attention of one token a sequence over its pages. Shapes as in the module's docstring -> [seqs, heads, head_dim].

    scale: by default head_dim ** -0.5. window: only the newest ``window`` tokens are seen. softcap: bound of the
    scores. splits: programs a sequence and kv head, by default ``decode_splits``; 1 needs no merge and no workspace.
    workspace: from ``decode_workspace``, for callers that allocate nothing in a step. Reads nothing from the device
    and can be captured in a CUDA graph.

    Raises ValueError for arguments that do not fit each other.
    """
    out = torch.empty_like(q) if out is None else out
    check_paged("paged_decode", q, k_cache, v_cache, block_tables, seq_lens, out, window, softcap)
    seqs, heads, head_dim = q.shape
    _, kv_heads, page, _ = k_cache.shape
    max_blocks = block_tables.shape[1]
    if seq_lens.shape[0] != seqs:
        raise ValueError(f"paged_decode: q must have one token a sequence, got {seqs} for {seq_lens.shape[0]} sequences")
    if not out.numel():
        return out
    if max_blocks == 0 or k_cache.shape[0] == 0:  # room for no token
        return out.zero_()
    splits = decode_splits(seqs, kv_heads, max_blocks * page, q.device) if splits is None else splits
    if splits > 1:
        if workspace is None:
            workspace = decode_workspace(seqs, heads, head_dim, splits, q.device)
        elif workspace.dtype != torch.float32 or workspace.numel() < seqs * heads * splits * (head_dim + 2):
            raise ValueError(
                f"paged_decode: workspace must hold {seqs * heads * splits * (head_dim + 2)} float32 for {splits} "
                f"splits, got {workspace.numel()} {workspace.dtype}; see decode_workspace"
            )
    block_d = max(16, triton.next_power_of_2(head_dim))
    launch = launch or launch_for(q.device, block_d, q.element_size())
    block_n = launch.block_n(block_d, q.element_size())
    scale = head_dim**-0.5 if scale is None else scale
    common = {
        "HEAD_DIM": head_dim,
        "PAGE": page,
        "WINDOW": window or 0,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "MIN_TILES": launch.min_tiles,
    }
    _decode_kernel[(seqs * kv_heads, splits)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        out,
        workspace if splits > 1 else out,  # a single split writes no partial result
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
        BLOCK_M=max(16, triton.next_power_of_2(heads // kv_heads)),
        PRECISION="ieee",  # fp32 stays fp32; has no effect on 16-bit inputs
        num_warps=launch.num_warps,
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
            BLOCK_S=min(64, triton.next_power_of_2(splits)),
            num_warps=4,
            **common,
        )
    return out
