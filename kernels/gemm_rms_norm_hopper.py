"""GEMM + RMSNorm for Hopper (sm_90): x comes to registers once, for the tensor cores and for the sum of squares.

The arithmetic is ``kernels.gemm_rms_norm``'s. A tile of 128 x 256 takes 1024 tensor-core cycles for 64 of K. In that
time TMA writes 48 KB to shared memory and the two warpgroups read B, 64 KB, from it: with x read once more that is the
128 bytes a cycle that shared memory delivers. So nothing may read x twice. (With warps of their own that squared x
beside the product, the kernel reached 0.91 of the plain product.) The tensor cores take A from registers as well, so:

- a producer warp starts all loads (TMA, into a ring of STAGES tiles of x and of w);
- two warpgroups multiply, 64 rows of the tile each: x from registers, w from shared memory. While step i is multiplied,
  a thread squares the values of x that it holds for it and fetches those of step i + 1.

Programs are persistent: the loads of a program's next tile start under the end of this one.
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
BLOCK_K = gl.constexpr(64)  # 128 bytes, the width of a swizzled row
# By BLOCK_N, what fits into shared memory. The widest tile is taken that leaves no SM without one.
STAGES = {256: 3, 128: 5, 64: 7}
GROUP = gl.constexpr(8)  # tile rows that are taken together, so that neighbours share tiles in L2
REGISTERS = gl.constexpr(240)  # a thread that multiplies: 128 sums, and two steps of x, 16 each; 24 for the producer


@gluon.jit
def _place(pid, m, n, BLOCK_N: gl.constexpr):
    """The tile (row, column) of position ``pid``: bands of GROUP tile rows, each band column after column."""
    tiles_m, tiles_n = gl.cdiv(m, BLOCK_M), gl.cdiv(n, BLOCK_N)
    band = pid // (GROUP * tiles_n)
    height = gl.minimum(tiles_m - band * GROUP, GROUP)
    inside = pid % (GROUP * tiles_n)
    return band * GROUP + inside % height, inside // height


@gluon.jit
def _producer(x_desc, w_desc, ring, m, n, k, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    x_smem, w_smem, full, empty = ring
    done = 0  # steps along k so far, in all tiles
    for pid in range(gl.program_id(0), gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N), gl.num_programs(0)):
        tile_m, tile_n = _place(pid, m, n, BLOCK_N)
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
def _fetch(ring, done, ME: gl.constexpr, A: gl.constexpr, STAGES: gl.constexpr):
    """This warpgroup's rows of x for step ``done``, once they have come, as the tensor cores want them."""
    x_smem, _w_smem, full, _empty = ring
    mbarrier.wait(full.index(done % STAGES), (done // STAGES) & 1)
    return x_smem.index(2 * (done % STAGES) + ME).load(A)


@gluon.jit
def _squares(x):
    x = x.to(gl.float32)
    return gl.sum(x * x, 1)


@gluon.jit
def _multiplier(ME: gl.constexpr, out_desc, ring, o_smem, m, n, k, eps, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Rows ME * ROWS onwards of each tile."""
    _x_smem, w_smem, _full, empty = ring
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    done = 0
    for pid in range(gl.program_id(0), gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N), gl.num_programs(0)):
        tile_m, tile_n = _place(pid, m, n, BLOCK_N)
        acc = gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT)
        squares = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, A))
        x = _fetch(ring, done, ME, A, STAGES)
        for _start in range(BLOCK_K, k, BLOCK_K):
            acc = warpgroup_mma(x, w_smem.index(done % STAGES).permute((1, 0)), acc, is_async=True)
            squares += _squares(x)
            ahead = _fetch(ring, done + 1, ME, A, STAGES)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(done % STAGES), count=1)  # w is multiplied; x was in registers before
            x = ahead
            done += 1
        acc = warpgroup_mma(x, w_smem.index(done % STAGES).permute((1, 0)), acc, is_async=True)
        squares += _squares(x)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(done % STAGES), count=1)
        done += 1
        rstd = gl.convert_layout(gl.rsqrt(squares / k + eps), gl.SliceLayout(1, LAYOUT))
        tma.store_wait(0)  # the last tile's output has left o_smem
        o_smem.index(ME).store((acc * rstd[:, None]).to(o_smem.dtype))
        fence_async_shared()
        where = [tile_m * BLOCK_M + ME * ROWS, tile_n * BLOCK_N]
        tma.async_copy_shared_to_global(out_desc, where, o_smem.index(ME))
    tma.store_wait(0)


@gluon.jit
def gemm_rms_norm_hopper_kernel(
    x_desc,  # boxes [ROWS, BLOCK_K] of x [m, k]
    w_desc,  # boxes [BLOCK_N, BLOCK_K] of w [n, k]
    out_desc,  # boxes [ROWS, BLOCK_N] of out [m, n]
    m,
    n,
    k,
    eps,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    x_smem = gl.allocate_shared_memory(dtype, [2 * STAGES, ROWS, BLOCK_K], x_desc.layout)
    w_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_K], w_desc.layout)
    o_smem = gl.allocate_shared_memory(dtype, [2, ROWS, BLOCK_N], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # both warpgroups read each w
    ring = (x_smem, w_smem, full, empty)
    gl.warp_specialize(
        [
            (_multiplier, (0, out_desc, ring, o_smem, m, n, k, eps, BLOCK_N, STAGES)),
            (_multiplier, (1, out_desc, ring, o_smem, m, n, k, eps, BLOCK_N, STAGES)),
            (_producer, (x_desc, w_desc, ring, m, n, k, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
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
    sms, tiles_m = _sms(x.device), triton.cdiv(m, BLOCK_M.value)
    block_n = next((b for b in STAGES if tiles_m * triton.cdiv(n, b) >= sms), min(STAGES))
    gemm_rms_norm_hopper_kernel[(min(sms, tiles_m * triton.cdiv(n, block_n)),)](
        _boxes(x, ROWS.value, BLOCK_K.value),
        _boxes(w, block_n, BLOCK_K.value),
        _boxes(out, ROWS.value, block_n),
        m,
        n,
        k,
        eps,
        BLOCK_N=block_n,
        STAGES=STAGES[block_n],
        num_warps=4,
    )
