"""GEMM + RMSNorm for Hopper (sm_90): the sum of squares is a warpgroup's own job, beside the product.

The arithmetic is ``kernels.gemm_rms_norm``'s. There, the threads that feed the tensor cores also read every tile of x
from shared memory to square it, and the tensor cores wait meanwhile. Here each kind of work has warps of its own:

- a producer warp starts all loads (TMA, into a ring of STAGES tiles of x and of w);
- two warpgroups multiply, 64 rows of the tile each, and touch x and w only through the tensor cores;
- two warps read the same tiles of x and sum their squares: 16 KB a step, in the time of 1024 tensor-core cycles.

When a tile of the result is done, these hand the rows' 1 / sqrt(mean + eps) to the multipliers through shared memory.
Programs are persistent: the loads of a program's next tile start under the end of this one.

Each barrier of the ring counts its readers: a place of x is free when both products and the sum have passed it.
"""

from __future__ import annotations

import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS = gl.constexpr(64)  # of a warpgroup: one m64 product
BLOCK_M = gl.constexpr(128)  # two of them
BLOCK_N = gl.constexpr(256)
BLOCK_K = gl.constexpr(64)  # 128 bytes, the width of a swizzled row
STAGES = gl.constexpr(3)
GROUP = gl.constexpr(8)  # tile rows that are taken together, so that neighbours share tiles in L2
READERS = gl.constexpr(3)
SQUARERS = gl.constexpr(2)  # warps; four would make 16 in all, and the compiler 128 registers a thread: too few
REGISTERS = gl.constexpr(208)  # of a thread that multiplies, which holds 128 sums; the warpgroup of the rest has 88


@gluon.jit
def _place(pid, m, n):
    """The tile (row, column) of position ``pid``: bands of GROUP tile rows, each band column after column."""
    tiles_m, tiles_n = gl.cdiv(m, BLOCK_M), gl.cdiv(n, BLOCK_N)
    band = pid // (GROUP * tiles_n)
    height = gl.minimum(tiles_m - band * GROUP, GROUP)
    inside = pid % (GROUP * tiles_n)
    return band * GROUP + inside % height, inside // height


@gluon.jit
def _producer(x_desc, w_desc, rings, m, n, k):
    x_smem, w_smem, full, empty, _o_smem, _rstd_smem, _rstd_full, _rstd_empty = rings
    done = 0  # steps along k so far, in all tiles
    for pid in range(gl.program_id(0), gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N), gl.num_programs(0)):
        tile_m, tile_n = _place(pid, m, n)
        for start in range(0, k, BLOCK_K):
            place = done % STAGES
            mbarrier.wait(empty.index(place), ((done // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(place), 2 * x_desc.block_type.nbytes + w_desc.block_type.nbytes)
            for half in gl.static_range(2):
                where = [tile_m * BLOCK_M + half * ROWS, start]
                tma.async_copy_global_to_shared(x_desc, where, full.index(place), x_smem.index(2 * place + half))
            tma.async_copy_global_to_shared(w_desc, [tile_n * BLOCK_N, start], full.index(place), w_smem.index(place))
            done += 1


@gluon.jit
def _multiplier(ME: gl.constexpr, out_desc, rings, m, n, k):
    """Rows ME * ROWS onwards of each tile: the product along k, scaled when the sum of squares is there."""
    x_smem, w_smem, full, empty, o_smem, rstd_smem, rstd_full, rstd_empty = rings
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    done = 0
    tiles = 0
    for pid in range(gl.program_id(0), gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N), gl.num_programs(0)):
        tile_m, tile_n = _place(pid, m, n)
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
        for start in range(0, k, BLOCK_K):
            place = done % STAGES
            mbarrier.wait(full.index(place), (done // STAGES) & 1)
            acc = warpgroup_mma(
                x_smem.index(2 * place + ME), w_smem.index(place).permute((1, 0)), acc, use_acc=start > 0, is_async=True
            )
            acc = warpgroup_mma_wait(1, deps=[acc])  # the step before this one has been multiplied: its place is free
            mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1, pred=start > 0)
            done += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((done + STAGES - 1) % STAGES), count=1)
        mbarrier.wait(rstd_full, tiles & 1)
        rstd = rstd_smem.index(ME).load(gl.SliceLayout(1, LAYOUT))
        mbarrier.arrive(rstd_empty, count=1)
        tma.store_wait(0)  # the last tile's output has left o_smem
        o_smem.index(ME).store((acc * rstd[:, None]).to(o_smem.dtype))
        fence_async_shared()
        where = [tile_m * BLOCK_M + ME * ROWS, tile_n * BLOCK_N]
        tma.async_copy_shared_to_global(out_desc, where, o_smem.index(ME))
        tiles += 1
    tma.store_wait(0)


@gluon.jit
def _squarer(rings, m, n, k, eps):
    """1 / sqrt(mean(x^2) + eps) of each row of each tile."""
    x_smem, _w_smem, full, empty, _o_smem, rstd_smem, rstd_full, rstd_empty = rings
    # Two threads a row. Eight threads read 16 bytes each of four rows at a time, and the 128-byte swizzle puts those
    # into different banks.
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 32], [16, 2], [SQUARERS, 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    done = 0
    tiles = 0
    for _pid in range(gl.program_id(0), gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N), gl.num_programs(0)):
        low = gl.zeros([ROWS], gl.float32, ROW)
        high = gl.zeros([ROWS], gl.float32, ROW)
        for _start in range(0, k, BLOCK_K):
            place = done % STAGES
            mbarrier.wait(full.index(place), (done // STAGES) & 1)
            x = x_smem.index(2 * place).load(LAYOUT).to(gl.float32)
            low += gl.sum(x * x, 1)
            x = x_smem.index(2 * place + 1).load(LAYOUT).to(gl.float32)
            high += gl.sum(x * x, 1)
            mbarrier.arrive(empty.index(place), count=1)
            done += 1
        mbarrier.wait(rstd_empty, (tiles & 1) ^ 1)
        rstd_smem.index(0).store(gl.rsqrt(low / k + eps))
        rstd_smem.index(1).store(gl.rsqrt(high / k + eps))
        mbarrier.arrive(rstd_full, count=1)
        tiles += 1


@gluon.jit
def gemm_rms_norm_hopper_kernel(
    x_desc,  # boxes [ROWS, BLOCK_K] of x [m, k]
    w_desc,  # boxes [BLOCK_N, BLOCK_K] of w [n, k]
    out_desc,  # boxes [ROWS, BLOCK_N] of out [m, n]
    m,
    n,
    k,
    eps,
):
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, BLOCK_K], x_desc.layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    o_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_N], out_desc.layout)
    rstd_smem = gl.allocate_shared_memory(gl.float32, [2, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    rstd_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    rstd_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=READERS)
    mbarrier.init(rstd_full, count=1)
    mbarrier.init(rstd_empty, count=2)
    rings = (x_smem, w_smem, full, empty, o_smem, rstd_smem, rstd_full, rstd_empty)
    gl.warp_specialize(
        [
            (_multiplier, (0, out_desc, rings, m, n, k)),
            (_multiplier, (1, out_desc, rings, m, n, k)),
            (_squarer, (rings, m, n, k, eps)),
            (_producer, (x_desc, w_desc, rings, m, n, k)),
        ],
        [4, SQUARERS, 1],
        [REGISTERS, 88, 88],
    )


@functools.cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _boxes(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [rows, columns], layout)


def launch(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, eps: float) -> None:
    """Fill out [m, n]. The arguments are ``gemm_rms_norm_triton``'s, checked, and of 16 bits; m, n, k are at least 1.

    All rows start at multiples of 16 bytes, for TMA.
    """
    (m, k), n = x.shape, w.shape[0]
    tiles = triton.cdiv(m, BLOCK_M.value) * triton.cdiv(n, BLOCK_N.value)
    gemm_rms_norm_hopper_kernel[(min(_sms(x.device), tiles),)](
        _boxes(x, ROWS.value, BLOCK_K.value),
        _boxes(w, BLOCK_N.value, BLOCK_K.value),
        _boxes(out, ROWS.value, BLOCK_N.value),
        m,
        n,
        k,
        eps,
        num_warps=4,
    )
