"""Some rows, about 9 to 128, times a matrix of 2 to 8 bits: ``kernels.awq_linear`` as a product on tensor cores.

w is the product's left operand, whose numbers a thread makes of its own words, and the rows of x are the columns.
Words, x and scales come through the compiler's ring of asynchronous copies. Of w a program has 64 or 128 rows and all
of k; if that gives too few programs, k is divided among several, and the last to arrive adds up their parts, as in
``kernels.skinny_gemm``.

On sm_90 and sm_100 the numbers go from registers to the tensor cores. Those of 3 bits pass through shared memory on
sm_90, and all do on GPUs whose tensor cores are synchronous: there the compiler wants columns in another order.

Where hundreds of rows are for cuBLAS, ``write_out`` turns w into 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.awq_numbers import assembly, magic_of, numbers_of_rows, types_of
from kernels.awq_packed import PackedWeight
from kernels.launch import arch, shared_limit
from kernels.paged_cache import sm_count
from kernels.skinny_gemm import _counters


@triton.jit
def _linear_kernel(
    x_ptr,  # [m, k], row stride stride_x
    words_ptr,  # int32 [blocks, tiles, 16, 4, WORDS]
    more_ptr,  # int32 [blocks, tiles, 16, 4, 1], or None
    scale_ptr,  # int32 [blocks, groups, 16]: scale and zero point
    bias_ptr,  # [n], or None
    out_ptr,  # [m, n]
    parts_ptr,  # fp32 [SPLITS, padded, columns of tiles * BLOCK_M]
    arrived_ptr,  # int32, zeros, and left as zeros
    m, n, k, padded, stride_x,
    BLOCK_N: tl.constexpr,  # rows of w
    BLOCK_M: tl.constexpr,  # rows of x
    TILE: tl.constexpr, WORDS: tl.constexpr, CODE: tl.constexpr, TILES_A_GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    RAGGED: tl.constexpr,  # the last tile is not full
    MAGIC: tl.constexpr,  # what the assembly adds to codes
    STAGES: tl.constexpr,
    ASM: tl.constexpr, TYPES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0) % SPLITS
    rows = tl.program_id(0) // SPLITS * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    ks = tl.arange(0, TILE)
    threads = tl.arange(0, 4)
    of_thread = tl.arange(0, WORDS)
    tiles = tl.cdiv(k, TILE)
    at = ((rows // 16 * tiles * 16 + rows % 16)[:, None] * 4 + threads[None, :])[:, :, None]  # of tile 0
    words_at = words_ptr + at * WORDS + of_thread[None, None, :]
    if more_ptr is not None:
        more_at = more_ptr + at + tl.zeros_like(of_thread)[None, None, :]
    scale_at = scale_ptr + rows // 16 * tl.cdiv(tiles, TILES_A_GROUP) * 16 + rows % 16
    # Rows past m are the last one again; what becomes of them is not stored.
    x_at = x_ptr + tl.minimum(cols, m - 1).to(tl.int64)[None, :] * stride_x + ks[:, None]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in tl.range(tiles * split // SPLITS, tiles * (split + 1) // SPLITS, num_stages=STAGES):
        words = tl.load(words_at + tile * (16 * 4 * WORDS))
        scale = tl.load(scale_at + tile // TILES_A_GROUP * 16)
        if RAGGED:
            x = tl.load(x_at + tile * TILE, mask=(ks < k - tile * TILE)[:, None], other=0.0)
        else:
            x = tl.load(x_at + tile * TILE)
        if more_ptr is not None:
            third = tl.load(more_at + tile * (16 * 4)) >> (4 * of_thread)[None, None, :]
        else:
            third = words
        q = numbers_of_rows(words, third, ASM, TYPES, CODE, more_ptr is not None, BLOCK_N, TILE, WORDS, x.dtype)
        zero = (scale & -65536).to(tl.float32, bitcast=True) + MAGIC
        scale = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        acc += tl.dot(q - zero.to(x.dtype)[:, None], x, input_precision="ieee") * scale[:, None]
    if SPLITS > 1:
        # As in kernels.skinny_gemm: the last part to arrive adds all of them up, in the order of the parts.
        wide_m = tl.num_programs(1) * BLOCK_M
        part_at = parts_ptr + rows.to(tl.int64)[:, None] * wide_m + cols[None, :]
        tl.store(part_at + split * padded * wide_m, acc)
        tl.debug_barrier()
        counter = arrived_ptr + tl.program_id(0) // SPLITS * tl.num_programs(1) + tl.program_id(1)
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived < SPLITS - 1:
            return
        tl.debug_barrier()
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for i in tl.static_range(SPLITS):
            acc += tl.load(part_at + i * padded * wide_m, cache_modifier=".cg")
        tl.store(counter, 0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + cols.to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(rows < n)[:, None] & (cols < m)[None, :])


@triton.jit
def _write_out_kernel(
    words_ptr, more_ptr, scale_ptr,  # as above
    out_ptr,  # [n, k]
    n, k,
    BLOCK_N: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr, CODE: tl.constexpr, TILES_A_GROUP: tl.constexpr,
    ASM: tl.constexpr, TYPES: tl.constexpr, MAGIC: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    threads = tl.arange(0, 4)
    of_thread = tl.arange(0, WORDS)
    tiles = tl.num_programs(1)
    at = ((rows // 16 * tiles + tile) * 16 + rows % 16)[:, None] * 4 + threads[None, :]
    words = tl.load(words_ptr + at[:, :, None] * WORDS + of_thread[None, None, :])
    if more_ptr is not None:
        third = tl.load(more_ptr + at[:, :, None] + tl.zeros_like(of_thread)[None, None, :])
        third = third >> (4 * of_thread)[None, None, :]
    else:
        third = words
    scale = tl.load(scale_ptr + (rows // 16 * tl.cdiv(tiles, TILES_A_GROUP) + tile // TILES_A_GROUP) * 16 + rows % 16)
    dtype = out_ptr.dtype.element_ty
    q = numbers_of_rows(words, third, ASM, TYPES, CODE, more_ptr is not None, BLOCK_N, TILE, WORDS, dtype).to(
        tl.float32
    )
    q -= ((scale & -65536).to(tl.float32, bitcast=True) + MAGIC)[:, None]
    q *= scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]
    ks = tile * TILE + tl.arange(0, TILE)
    at = out_ptr + rows.to(tl.int64)[:, None] * k + ks[None, :]
    tl.store(at, q.to(dtype), mask=(rows < n)[:, None] & (ks < k)[None, :])


# --------------------------------------------------------------------------------------------- launch


@dataclass(frozen=True)
class Launch:
    block_n: int
    block_m: int
    num_warps: int
    num_stages: int


# By the most rows of x: for w of fewer than WIDE rows, and of more. On an H200, 4 bits, microseconds and cuBLAS's on 16
# bits: 16 rows 9.5 and 13.4 (4096 x 4096), 18.2 and 32.1 (4096 x 14336), 25.7 and 56 (28672 x 4096); 64 rows 12.5 and
# 11.6, 26 and 36, 38.5 and 60.7.
WIDE = 8192
LAUNCH = {
    16: (Launch(64, 16, 4, 4), Launch(128, 16, 8, 4)),
    32: (Launch(64, 32, 4, 4), Launch(64, 32, 4, 4)),
    64: (Launch(64, 64, 4, 4), Launch(128, 64, 4, 3)),
    128: (Launch(128, 64, 4, 3), Launch(128, 64, 4, 3)),
}
ASYNCHRONOUS = (90, 100)  # tensor cores that read shared memory; others' operands take registers, enough for 64 rows


def launch_of(m: int, n: int, arch: int) -> Launch:
    if arch not in ASYNCHRONOUS:
        m, n = min(m, 64), 0
    return next((LAUNCH[most] for most in LAUNCH if m <= most), LAUNCH[128])[n >= WIDE]


def shared_bytes(launch: Launch, weight: PackedWeight, arch: int) -> int:
    """Upper bound: the pipeline's copies of x, of words and of scales, and numbers where they pass through."""
    t, w = launch, weight
    words = 16 * w.words.shape[-1] * (1 if w.more is None else 2)
    through = w.more is not None or arch not in ASYNCHRONOUS
    return t.num_stages * (2 * w.tile * t.block_m + t.block_n * (words + 8)) + through * 2 * w.tile * t.block_n


def most_splits(launch: Launch, weight: PackedWeight, arch: int) -> int:
    """The loads of all parts are under way at once when they are added up: what registers hold of a tile's."""
    if launch.block_n * launch.block_m <= (4096 if arch in ASYNCHRONOUS else 2048):
        return 8
    return 4 if weight.more is None else 2


def splits_of(m: int, weight: PackedWeight, launch: Launch, device: torch.device) -> int:
    """Parts of k, a power of two: as many as still run all at once, each of at least two tiles."""
    shared = shared_bytes(launch, weight, arch(device))
    resident = sm_count(device) * max(1, min((shared_limit(device) + 1024) // (shared + 1024), 16 // launch.num_warps))
    programs = triton.cdiv(weight.n, launch.block_n) * triton.cdiv(m, launch.block_m)
    most = most_splits(launch, weight, arch(device))
    splits = 1
    while programs * splits * 2 <= resident and splits * 4 <= weight.words.shape[1] and splits < most:
        splits *= 2
    return splits


def some_rows(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    splits: int | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """Fill out [m, n] with x . w^T [+ bias [n]]; arguments as ``awq_linear`` has checked them.

    splits, launch: instead of ``splits_of`` and ``launch_of``.
    """
    w, m, capability = weight, len(x), arch(x.device)
    t = launch or launch_of(m, w.n, capability)
    grid = triton.cdiv(w.n, t.block_n), triton.cdiv(m, t.block_m)
    if splits is None:
        splits = splits_of(m, w, t, x.device) if x.is_cuda else 1
    padded = 16 * len(w.words)
    parts = arrived = out
    if splits > 1:
        parts = torch.empty(splits * padded * grid[1] * t.block_m, device=x.device, dtype=torch.float32)
        arrived = _counters(grid[0] * grid[1], x.device)
    _linear_kernel[(grid[0] * splits, grid[1])](
        x, w.words, w.more, w.scales, bias, out, parts, arrived, m, w.n, w.k, padded, x.stride(0),
        BLOCK_N=t.block_n, BLOCK_M=t.block_m, SPLITS=splits, RAGGED=w.k % w.tile > 0, STAGES=t.num_stages,
        OVERLAP=capability >= 90, **_settings(w, x.device),
        num_warps=t.num_warps, launch_pdl=capability >= 90,
        maxnreg=128 if capability == 120 and t.block_m < 64 else None,  # ptxas would spill to come down to 80 or 72
    )  # fmt: skip
    return out


def write_out(weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """What the codes stand for, in the weight's dtype -> [n, k]."""
    w, block = weight, 32
    out = torch.empty((w.n, w.k), dtype=w.dtype, device=w.device) if out is None else out
    _write_out_kernel[(triton.cdiv(w.n, block), w.words.shape[1])](
        w.words, w.more, w.scales, out, w.n, w.k, BLOCK_N=block, **_settings(w, w.device), num_warps=4
    )
    return out


def _settings(w: PackedWeight, device: torch.device) -> dict:
    """Constants of either kernel. Where it is interpreted there is no assembly."""
    settings = {
        "TILE": w.tile, "WORDS": w.words.shape[-1], "CODE": 2 if w.more is not None else w.stored_bits,
        "TILES_A_GROUP": -(-w.group // w.tile), "ASM": "", "TYPES": None, "MAGIC": 0,
    }  # fmt: skip
    if device.type == "cuda":
        settings["ASM"] = assembly(w.stored_bits, w.dtype)
        settings["TYPES"] = types_of(w.stored_bits, w.dtype)
        settings["MAGIC"] = magic_of(w.stored_bits, w.dtype)
    return settings
