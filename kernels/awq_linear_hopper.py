"""Many rows times a matrix of 4 bits on Hopper (sm_90): the tensor cores are fed numbers that memory never sees.

What weights are is ``kernels.awq_linear``'s to tell, and how they lie in memory ``kernels.awq_packed``'s. With some
hundred rows of x, arithmetic takes the time. Codes could be written out in 16 bits and multiplied by cuBLAS, but then w
is read with 4 bits, written with 16 and read again. Here a thread's numbers go from its registers into the product,
whose left operand is w:

    out^T = w . x^T,    a tile: BLOCK_N = 128 rows of w times BLOCK_M rows of x

- A producer warp starts all loads (TMA): x into one ring, 64 columns a place, words and scales into another, 128
  columns a place. Words could come straight to registers. But one tile ahead is too late where tiles are narrow, and
  further ahead they take registers from the sums.
- Two warpgroups multiply, 64 rows of w each. The words of a row hold what a thread multiplies, in its order: it reads
  16 bytes for each of its two rows, and no number ever changes hands.
- There are two sets of numbers, for 64 columns each. While one is multiplied, the other is made and queued behind it,
  so that the tensor cores have the next product at hand. Every 256 columns all are waited for: what is still being
  multiplied at the end of a loop's body, ptxas (12.8) would wait for after every instruction.

**Beside the product.** 64 columns take 140 instructions of a warp (fp16: 114), most of them for 16 pairs of numbers:
``kernels.awq_numbers_hopper``. Two warps share a scheduler, and the tensor cores take 4 * BLOCK_M cycles for those
columns. So 280 should vanish under the 1024 of 256 rows and under the 512 of 128, and not under the 256 of 64. On an
H200 the tensor cores are at work for 87, 66 and 40 % of the time. What holds the warps up with 128 and 64 is not known:
no pipe is busy, and with 64 twice as many warps, which take turns along the columns, are as slow.

**The output turns around.** Neighbouring sums of a thread belong to neighbouring rows of the output, whose columns are
contiguous. The instruction that stores 8 x 8 matrices transposes them on the way to shared memory; TMA does the rest.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

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

from kernels.awq_numbers import types_of
from kernels.awq_numbers_hopper import halves, layouts, number_assembly, numbers, pairs_of_scales, scale_assembly
from kernels.launch import arch
from kernels.paged_cache import sm_count

if TYPE_CHECKING:
    from kernels.awq_packed import PackedWeight

ROWS = gl.constexpr(64)  # of w, a warpgroup's: one m64 product
BLOCK_N = gl.constexpr(128)  # two of them
BLOCKS = gl.constexpr(4)  # of 16 rows, which lie together in memory: a warpgroup's
TILE = gl.constexpr(128)  # columns of a tile of words
HALF = gl.constexpr(64)  # of x's ring: 128 bytes, the width of a swizzled row
WORDS = gl.constexpr(16)  # of a row and tile: 4 for each of 4 threads
# By BLOCK_M, places of x's ring and of the words': what fits into shared memory, or loads enough for 1 us.
STAGES = {256: (4, 3), 128: (8, 5), 64: (12, 6)}
# By BLOCK_M, what a tile takes, in rows of x. On an H200, one tile an SM, 4096 columns: 41, 28 and 23 us.
COST = {256: 256, 128: 155, 64: 125}
GROUP = gl.constexpr(4)  # tiles of x that are taken together: of what the SMs read at a time, x is most
REGISTERS = gl.constexpr(240)  # a thread that multiplies: 128 sums, 32 numbers, 16 words; 24 for the producer


# --------------------------------------------------------------------------------------------- kernel


@gluon.jit
def _place(pid, m, n, BLOCK_M: gl.constexpr):
    """The tile (of x, of w) of position ``pid``: bands of GROUP tiles of x, in each one tile of w after another."""
    tiles_m, tiles_n = gl.cdiv(m, BLOCK_M), gl.cdiv(n, BLOCK_N)
    band = pid // (GROUP * tiles_n)
    height = gl.minimum(tiles_m - band * GROUP, GROUP)
    inside = pid % (GROUP * tiles_n)
    return band * GROUP + inside % height, inside // height


@gluon.jit
def _send_words(descs, codes, done, tile, block, tiles_a_group, STAGES: gl.constexpr):
    """Start loading words and scales of a tile, from a block of 16 rows on. Past the last there are zeros."""
    _x_desc, words_desc, scale_desc = descs
    words_smem, scale_smem, full, empty = codes
    place = done % STAGES
    mbarrier.wait(empty.index(place), ((done // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(place), 2 * words_desc.block_type.nbytes + 2 * scale_desc.block_type.nbytes)
    for me in gl.static_range(2):
        at = block + me * BLOCKS
        where = [at, tile * 16, 0]
        tma.async_copy_global_to_shared(words_desc, where, full.index(place), words_smem.index(2 * place + me))
        where = [at, tile // tiles_a_group, 0]
        tma.async_copy_global_to_shared(scale_desc, where, full.index(place), scale_smem.index(2 * place + me))


@gluon.jit
def _producer(descs, ring, codes, m, n, k, tiles_a_group, BLOCK_M: gl.constexpr, STAGES: gl.constexpr):
    x_smem, full, empty = ring
    done = 0  # tiles of words so far
    for pid in range(gl.program_id(0), gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N), gl.num_programs(0)):
        tile_m, tile_n = _place(pid, m, n, BLOCK_M)
        for tile in range(k // TILE):
            _send_words(descs, codes, done, tile, tile_n * (2 * BLOCKS), tiles_a_group, STAGES[1])
            for half in gl.static_range(2):
                step = 2 * done + half
                place = step % STAGES[0]
                mbarrier.wait(empty.index(place), ((step // STAGES[0]) & 1) ^ 1)
                mbarrier.expect(full.index(place), descs[0].block_type.nbytes)
                where = [tile_m * BLOCK_M, tile * TILE + half * HALF]
                tma.async_copy_global_to_shared(descs[0], where, full.index(place), x_smem.index(place))
            done += 1
    # Under its last product a warpgroup makes numbers as under any other: here is something to make them of.
    _send_words(descs, codes, done, 0, 0, tiles_a_group, STAGES[1])


@gluon.jit
def _fetch(codes, done, ME: gl.constexpr, CODES: gl.constexpr, STAGES: gl.constexpr):
    """This warpgroup's words of tile ``done``, for either half, and their scales."""
    words_smem, scale_smem, full, empty = codes
    place = done % STAGES
    mbarrier.wait(full.index(place), (done // STAGES) & 1)
    words = words_smem.index(2 * place + ME).load(CODES[2][0])
    scales = scale_smem.index(2 * place + ME).load(CODES[2][1])
    mbarrier.arrive(empty.index(place), count=1)
    low, high = halves(words, CODES)
    return low, high, pairs_of_scales(scales, CODES)


@gluon.jit
def _multiply(w, acc, ring, step, STAGES: gl.constexpr):
    """Start acc + w . x^T for the HALF columns of step ``step``, once x has come."""
    x_smem, full, _empty = ring
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    return warpgroup_mma(w, x_smem.index(step % STAGES).permute((1, 0)), acc, is_async=True)


@gluon.jit
def _multiplier(
    ME: gl.constexpr, out_desc, bias_ptr, ring, codes, o_smem, m, n, k,
    CODES: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """Rows ME * ROWS onwards of each tile of w."""
    empty = ring[2]
    DTYPE: gl.constexpr = out_desc.dtype
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    X: gl.constexpr = STAGES[0]
    done = 0
    words, more, scales = _fetch(codes, done, ME, CODES, STAGES[1])
    low = numbers(words, scales, CODES, A)
    for pid in range(gl.program_id(0), gl.cdiv(m, BLOCK_M) * gl.cdiv(n, BLOCK_N), gl.num_programs(0)):
        tile_m, tile_n = _place(pid, m, n, BLOCK_M)
        first = tile_n * BLOCK_N + ME * ROWS
        acc = gl.zeros([ROWS, BLOCK_M], gl.float32, SUMS)
        if bias_ptr is not None:
            row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SUMS))
            acc += gl.load(bias_ptr + row, mask=row < n, other=0.0).to(gl.float32)[:, None]
        for _tiles in range(0, k // TILE, TILES):
            for tile in gl.static_range(TILES):
                acc = _multiply(low, acc, ring, 2 * done, X)
                if tile > 0:
                    acc = warpgroup_mma_wait(1, deps=[acc])  # the product before the last has let go of its operands
                    mbarrier.arrive(empty.index((2 * done - 1) % X), count=1)
                high = numbers(more, scales, CODES, A)
                words, more, scales = _fetch(codes, done + 1, ME, CODES, STAGES[1])
                acc = _multiply(high, acc, ring, 2 * done + 1, X)
                acc = warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(empty.index(2 * done % X), count=1)
                low = numbers(words, scales, CODES, A)
                done += 1
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index((2 * done - 1) % X), count=1)
        tma.store_wait(0)  # the last tile's output has left o_smem
        o_smem.index(ME).permute((1, 0)).store(acc.to(DTYPE))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [tile_m * BLOCK_M, first], o_smem.index(ME))
    tma.store_wait(0)


@gluon.jit
def awq_linear_hopper_kernel(
    x_desc,  # boxes [BLOCK_M, HALF] of x [m, k]
    words_desc,  # int32, boxes [BLOCKS, 16, WORDS] of [blocks, k / TILE * 16, WORDS]
    scale_desc,  # int32, boxes [BLOCKS, 1, 16] of [blocks, groups, 16]
    out_desc,  # boxes [BLOCK_M, ROWS] of out [m, n]
    bias_ptr,  # [n], or None
    m, n, k,
    tiles_a_group,
    CODES: gl.constexpr,  # scale_assembly, number_assembly, layouts, and the numbers' types
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,  # places of x's ring and of the words'
    TILES: gl.constexpr,  # of words between two places where all products are waited for; divides k / TILE
):  # fmt: skip
    X: gl.constexpr = STAGES[0]
    W: gl.constexpr = STAGES[1]
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [X, BLOCK_M, HALF], x_desc.layout)
    words_smem = gl.allocate_shared_memory(gl.int32, [2 * W, BLOCKS, 16, WORDS], words_desc.layout)
    scale_smem = gl.allocate_shared_memory(gl.int32, [2 * W, BLOCKS, 1, 16], scale_desc.layout)
    o_smem = gl.allocate_shared_memory(x_desc.dtype, [2, BLOCK_M, ROWS], out_desc.layout)
    x_full = gl.allocate_shared_memory(gl.int64, [X, 1], mbarrier.MBarrierLayout())
    x_empty = gl.allocate_shared_memory(gl.int64, [X, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [W, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [W, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(X):
        mbarrier.init(x_full.index(i), count=1)
        mbarrier.init(x_empty.index(i), count=2)  # both warpgroups read each x
    for i in gl.static_range(W):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    ring = (x_smem, x_full, x_empty)
    codes = (words_smem, scale_smem, full, empty)
    descs = (x_desc, words_desc, scale_desc)
    gl.warp_specialize(
        [
            (_multiplier, (0, out_desc, bias_ptr, ring, codes, o_smem, m, n, k, CODES, BLOCK_M, STAGES, TILES)),
            (_multiplier, (1, out_desc, bias_ptr, ring, codes, o_smem, m, n, k, CODES, BLOCK_M, STAGES, TILES)),
            (_producer, (descs, ring, codes, m, n, k, tiles_a_group, BLOCK_M, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


# --------------------------------------------------------------------------------------------- launch


def takes(x: torch.Tensor, weight: PackedWeight) -> bool:
    """Whether ``awq_linear_hopper`` can multiply these: on sm_90, 16 bits times 4, groups of 128 or 256 or so on.

    Rows of x and of the output must start at multiples of 16 bytes, for TMA.
    """
    return (
        arch(x.device) == 90
        and x.dim() == 2
        and x.dtype in (torch.float16, torch.bfloat16)
        and x.dtype == weight.dtype
        and len(x) > 0
        and weight.tile == TILE.value  # so that k is a multiple of it
        and weight.stored_bits == 4
        and weight.n % 8 == 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.stride(0) > 0
        and x.data_ptr() % 16 == 0
    )


def block_m_of(m: int, n: int, sms: int) -> int:
    """Rows of x of a tile: what ends first if ``sms`` programs take equally many tiles; of equals the widest."""

    def time(block_m: int) -> int:
        return triton.cdiv(triton.cdiv(m, block_m) * triton.cdiv(n, BLOCK_N.value), sms) * COST[block_m]

    return min(STAGES, key=time)


@cache
def settings(dtype: torch.dtype, block_m: int, tiles: int) -> dict:
    """The kernel's constants. tiles: of words, in k."""
    codes = (scale_assembly(dtype), number_assembly(dtype), layouts(), types_of(4, dtype))
    return {"CODES": codes, "BLOCK_M": block_m, "STAGES": STAGES[block_m], "TILES": 1 + (tiles % 2 == 0)}


def _boxes(t: torch.Tensor, *shape: int) -> TensorDescriptor:
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.int32: gl.int32}[t.dtype]
    layout = gl.NVMMASharedLayout.get_default_for(list(shape), kind)
    inner = [t.shape[-1], 1][3 - t.dim() :]  # as torch tells it, the stride of a single row may be anything
    return TensorDescriptor(t, list(t.shape), [t.stride(0), *inner], list(shape), layout)


def awq_linear_hopper(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, out: torch.Tensor, block_m: int | None = None
) -> torch.Tensor:
    """Fill out [m, n] with x . w^T [+ bias [n]]. ``takes`` holds; out has x's dtype, and its rows start as x's do."""
    w, m = weight, len(x)
    sms = sm_count(x.device)
    block_m = block_m or block_m_of(m, w.n, sms)
    tiles = triton.cdiv(m, block_m) * triton.cdiv(w.n, BLOCK_N.value)
    awq_linear_hopper_kernel[(min(sms, tiles),)](
        _boxes(x, block_m, HALF.value),
        _boxes(w.words.view(len(w.words), -1, WORDS.value), BLOCKS.value, 16, WORDS.value),
        _boxes(w.scales, BLOCKS.value, 1, 16),
        _boxes(out, block_m, ROWS.value),
        bias, m, w.n, w.k, w.group // w.tile,
        **settings(w.dtype, block_m, w.k // w.tile),
        num_warps=4,
    )  # fmt: skip
    return out
