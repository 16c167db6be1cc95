"""Paged decode attention in its plainest form: one program a sequence and kv head, one loop, for reading and comparing.

What kernels/paged_attention.py adds for speed is left out (split-KV, the look-up one tile ahead, windows, soft caps),
and three things can be chosen that it decides itself:

- ``tile``: tokens that a turn of the loop takes, smaller or larger than a page. Within a page a tile needs one look-up;
  a tile of several pages needs one a token. A page says where tokens lie, a tile how many come at once.
- ``masked``: False counts the last page as full, as if the length did not matter.
- the cache's dtype: int8 or fp8 (e4m3) as well, with one scale for all keys and one for all values. They are converted
  where they are used, so memory delivers 1 byte a value. A scale that is the same for all of K can be multiplied with
  the scores' scale, and that of V with the output: the loop does not know them.

    s = (scale * k_scale) * q . K^T over the sequence's tokens       out = v_scale * softmax(s) . V

    q, out           [seqs, heads, head_dim]
    k_cache, v_cache [num_blocks, kv_heads, block_size, head_dim], any strides, last dimension contiguous
    block_tables     [seqs, max_blocks], int32; seq_lens [seqs], int32; 0 gives output 0
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import DTYPES
from kernels.op import Case, Cost, Op, wide
from kernels.paged_attention import paged_decode_reference
from kernels.paged_cache import LOG2_E, page_ids, paged_cache, pow2

NARROW = (torch.int8, torch.float8_e4m3fn)


def paged_plain_reference(
    q, k_cache, v_cache, block_tables, seq_lens, *, tile=64, masked=True, k_scale=1.0, v_scale=1.0
) -> torch.Tensor:
    """The definition, in at least fp32: the cache times its scales, then attention -> [seqs, heads, head_dim]."""
    if not masked:
        seq_lens = -(-seq_lens // k_cache.shape[2]) * k_cache.shape[2]
    k, v = wide(k_cache.to(q.dtype)) * k_scale, wide(v_cache.to(q.dtype)) * v_scale
    return paged_decode_reference(q, k, v, block_tables, seq_lens)


@triton.jit(do_not_specialize=["stride_table"])
def _plain_kernel(
    q_ptr,  # [seqs, KV_HEADS * GROUP, HEAD_DIM]
    k_ptr,  # [num_blocks, KV_HEADS, PAGE, HEAD_DIM]
    v_ptr,  # [num_blocks, KV_HEADS, PAGE, HEAD_DIM]
    table_ptr,  # [seqs, max_blocks]
    length_ptr,  # [seqs]
    out_ptr,  # [seqs, KV_HEADS * GROUP, HEAD_DIM], contiguous
    scale,  # times k_scale and log2(e)
    v_scale,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_kh,
    stride_kn,
    stride_vb,
    stride_vh,
    stride_vn,
    stride_table,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr,  # GROUP rounded up to a power of two of at least 16
    BLOCK_D: tl.constexpr,
):
    seq = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    head = tl.program_id(0) % KV_HEADS
    rows = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = head * GROUP + rows
    kept = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    length = tl.load(length_ptr + seq)
    if not MASKED:
        length = tl.cdiv(length, PAGE) * PAGE
    end = tl.cdiv(length, TILE)
    q = tl.load(q_ptr + seq * stride_qt + heads[:, None] * stride_qh + dims[None, :], mask=kept, other=0.0)
    k_ptr += head.to(tl.int64) * stride_kh
    v_ptr += head.to(tl.int64) * stride_vh

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for tile in range(0, end):
        n = tile * TILE + tl.arange(0, TILE)
        live = n < length
        # What is not live is not read: the rest of a page may hold NaN, and 0 * NaN is NaN.
        seen = live[:, None] & (dims < HEAD_DIM)[None, :]
        page = page_ids(table_ptr + seq * stride_table, tile, end, length, TILE, PAGE)
        k_at = page * stride_kb + n % PAGE * stride_kn
        v_at = page * stride_vb + n % PAGE * stride_vn
        k = tl.load(k_ptr + k_at[:, None] + dims[None, :], mask=seen, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + v_at[:, None] + dims[None, :], mask=seen, other=0.0).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(live[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))  # finite: a tile of the loop holds a token that is seen
        p = tl.exp2(s - m_new[:, None])
        shrink = tl.exp2(m - m_new)
        l = l * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        m = m_new
    out = acc * (v_scale / tl.where(l == 0.0, 1.0, l))[:, None]
    at = (seq * (KV_HEADS * GROUP) + heads[:, None]) * HEAD_DIM + dims[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=kept)


def paged_plain(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    tile: int = 64,
    masked: bool = True,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Attention of one token a sequence over its pages. Shapes as in the module's docstring -> [seqs, heads, head_dim].

    tile: a power of two from 16 to 256. The caches have q's dtype, or both are int8 or both float8_e4m3fn; values are
    the cache's times k_scale or v_scale. Raises ValueError for arguments that do not fit each other.
    """
    _check(q, k_cache, v_cache, block_tables, seq_lens, tile)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    seqs, heads, head_dim = q.shape
    kv_heads, page = k_cache.shape[1:3]
    _plain_kernel[(seqs * kv_heads,)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        out,
        head_dim**-0.5 * k_scale * LOG2_E.value,
        v_scale,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        PAGE=page,
        TILE=tile,
        MASKED=masked,
        BLOCK_M=pow2(heads // kv_heads),
        BLOCK_D=pow2(head_dim),
        num_warps=4,
        num_stages=3,
    )
    return out


def _check(q, k_cache, v_cache, block_tables, seq_lens, tile) -> None:
    shapes = f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}"
    if q.dim() != 3 or k_cache.dim() != 4 or v_cache.shape != k_cache.shape or k_cache.shape[3] != q.shape[2]:
        raise ValueError(
            f"paged_plain: q must be [seqs, heads, head_dim], the caches [blocks, kv_heads, block_size, head_dim]; "
            f"got {shapes}"
        )
    kv_heads, size = k_cache.shape[1:3]
    if not kv_heads or q.shape[1] % kv_heads or not 0 < size <= 256 or size & (size - 1):
        raise ValueError(
            f"paged_plain: heads must be a multiple of kv_heads and block_size a power of two up to 256; got {shapes}"
        )
    if q.dtype not in DTYPES or v_cache.dtype != k_cache.dtype or k_cache.dtype not in (q.dtype, *NARROW):
        raise ValueError(
            f"paged_plain: q must be float32, float16 or bfloat16, and both caches like q, int8 or float8_e4m3fn; "
            f"got {q.dtype}, {k_cache.dtype} and {v_cache.dtype}"
        )
    for name, t, dims in (("block_tables", block_tables, 2), ("seq_lens", seq_lens, 1)):
        if t.dim() != dims or t.dtype != torch.int32 or t.shape[0] != q.shape[0]:
            raise ValueError(
                f"paged_plain: {name} must be int32 with {dims} dimensions and a row for each of {q.shape[0]} "
                f"sequences, got {t.dtype} {tuple(t.shape)}"
            )
    for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("block_tables", block_tables)):
        if t.shape[-1] > 1 and t.stride(-1) != 1:
            raise ValueError(f"paged_plain: {name} must be contiguous in its last dimension, got {t.stride()}")
    if tile not in (16, 32, 64, 128, 256):
        raise ValueError(f"paged_plain: tile must be a power of two from 16 to 256, got {tile!r}")


def paged_plain_cost(q, k_cache, v_cache, block_tables, seq_lens, **_) -> Cost:
    """Each token's keys and values once, in the cache's dtype; q and out. Reads seq_lens on the host."""
    kv_heads, _page, head_dim = k_cache.shape[1:]
    tokens = int(seq_lens.sum())
    moved = 2 * tokens * kv_heads * head_dim * k_cache.element_size() + 2 * q.numel() * q.element_size()
    return Cost(bytes=moved, flops=4 * tokens * q.shape[1] * head_dim)


def _case(name: str, lengths, kv_heads=2, group=4, head_dim=64, block_size=16, narrow=None, **options) -> Case:
    """Caches as hostile as the contract allows. ``narrow``: made of whole numbers up to 127, in that dtype."""

    def make(device, dtype, generator):
        q = torch.randn(len(lengths), kv_heads * group, head_dim, generator=generator).to(device, dtype)
        inputs = paged_cache(lengths, kv_heads, head_dim, block_size, device, dtype, generator)
        if narrow:
            for cache in ("k_cache", "v_cache"):
                inputs[cache] = (40 * inputs[cache].nan_to_num(3)).round().clamp(-127, 127).to(narrow)
        return {"q": q, **inputs, **options}

    return Case(name, make)


OP = Op(
    "paged_plain",
    paged_plain_reference,
    paged_plain,
    paged_plain_cost,
    (
        _case("no sequences", []),
        _case("lengths around a tile", [1, 15, 16, 17, 63, 64, 65, 0]),
        *(
            _case(f"pages of {p}, tiles of {t}", [130, 33], block_size=p, tile=t)
            for p, t in ((1, 16), (64, 16), (8, 32))
        ),
        _case("pages of 16, tiles of 128", [300, 1, 257], tile=128),
        *(_case(f"{g} query heads a kv head", [40, 7], group=g) for g in (1, 5, 8)),
        _case("head size 80", [50, 3], head_dim=80),
        _case("int8 with scales", [70, 33, 1], narrow=torch.int8, k_scale=0.02, v_scale=0.05),
    ),
)
