"""Up to 8 rows times a matrix of 2 to 8 bits: ``kernels.awq_linear`` where reading the weights is all there is to do.

The product of 8 rows is one column of the tensor cores' smallest instruction (16 x 8 x 16), so w is its left operand,
16 rows at a time, and the rows of x that are missing cost nothing. What must be fast is the way of the weights:

- A program takes one block of 16 rows of w after the other. Its WARPS warps divide them along k: a step is a tile of
  128 columns for each warp. So no sum has to pass through memory, and there are as many programs as SMs.
- Words and scales come through a ring of STAGES steps in shared memory, by asynchronous copies that run on from block
  to block: seven steps of 8 KiB (of 4 bits) are always on their way. A lane copies and reads 16 bytes: its own words of
  four products.
- The first steps are asked for before the kernel before has ended (programmatic dependent launch, as in
  ``kernels.gemv``); only then x is waited for.
- x is brought to shared memory once a program, times gamma; of up to four steps it stays in registers from there on.
- Numbers are multiplied as 2^7 or 2^10 + code, as the assembly gives them: what is too much is the sum of x times
  that and the zero point, and the sums of x, products with ones, are taken once where x stays in registers.

The sums are scaled by group, added up over the warps, divided by x's root mean square, biased, activated and added to
the residual before they are rounded.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.awq_numbers import assembly, magic_of, numbers, types_of, words_layout
from kernels.launch import arch, shared_limit
from kernels.paged_cache import sm_count

MAX_ROWS = 8
COLS = 8  # of the tensor cores' instruction: rows of x
STAGES = gl.constexpr(8)  # of the ring


# --------------------------------------------------------------------------------------------- kernel


@gluon.jit
def _ask(ring, w, number, THREE: gl.constexpr, WALK: gl.constexpr, SHAPE: gl.constexpr):
    """Start the copies of the program's ``number``-th step, a tile a warp, to its place in the ring: one group.

    Of tiles past the end, and of steps past the last, zeros are written.
    """
    ROWS: gl.constexpr = SHAPE[1]
    WORDS: gl.constexpr = SHAPE[4]
    words_ring, more_ring, scale_ring = ring
    words_at, more_at, scale_at, deep, warp, row, tiles, n = w
    GATED: gl.constexpr = WALK[0]
    STEPS: gl.constexpr = WALK[1]
    GROUP: gl.constexpr = WALK[2]
    WARPS: gl.constexpr = SHAPE[0]
    place = number % STAGES
    first = number % STEPS * WARPS  # the first warp's tile
    turn = number // STEPS
    block = gl.program_id(0) + turn // (1 + GATED) * gl.num_programs(0)
    rows = block * ROWS + turn % (1 + GATED) * n
    inside = block < gl.cdiv(n, ROWS)
    live = inside & (deep + first < tiles)
    at = first * 16 + rows * tiles
    async_copy.async_copy_global_to_shared(words_ring.index(place), words_at + at * (4 * WORDS), mask=live)
    if THREE:
        async_copy.async_copy_global_to_shared(more_ring.index(place), more_at + at * 4, mask=live)
    at = scale_at + ((warp + first) // GROUP * 16 + rows * gl.cdiv(tiles, GROUP) + row)
    async_copy.async_copy_global_to_shared(scale_ring.index(place), at, mask=inside & (warp + first < tiles))
    async_copy.commit_group()


@gluon.jit
def _multiply(total, ring, number, x, sums, of_thread, CODES: gl.constexpr, SHAPE: gl.constexpr, LAYOUTS: gl.constexpr):
    """total + scale * ((numbers - MAGIC - zero) . x), of a tile a warp; a warp without a tile has zeros in the ring."""
    WARPS: gl.constexpr = SHAPE[0]
    ROWS: gl.constexpr = SHAPE[1]
    COLS: gl.constexpr = SHAPE[2]
    words_ring, more_ring, scale_ring = ring
    SUMS: gl.constexpr = LAYOUTS[1]
    words = words_ring.index(number % STAGES).load(LAYOUTS[0])
    scale = scale_ring.index(number % STAGES).load(gl.SliceLayout(2, SUMS))
    third = None
    if CODES[4]:
        third = more_ring.index(number % STAGES).load(LAYOUTS[0]) >> (4 * of_thread)
    q = numbers(words, third, CODES, SHAPE)
    q = gl.convert_layout(q, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
    part = mma_v2(q, x, gl.zeros([WARPS, ROWS, COLS], gl.float32, SUMS))
    zero = (scale & -65536).to(gl.float32, bitcast=True) + CODES[2]
    scale = scale.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    return total + gl.expand_dims(scale, 2) * (part - gl.expand_dims(zero, 2) * sums)


@gluon.jit
def _bring_x(
    x_smem, x_ptr, gamma_ptr, m, k, stride_x, eps,
    NORM: gl.constexpr, ALONE: gl.constexpr, STEPS: gl.constexpr, SHAPE: gl.constexpr,
):  # fmt: skip
    """x, times gamma, to shared memory: zeros past k, and past m the last row again.

    -> 1 / sqrt(mean(x^2) + eps) [COLS] ([1] if ALONE); of no use but where NORM.
    """
    COLS: gl.constexpr = SHAPE[2]
    WARPS: gl.constexpr = SHAPE[0]
    TILE: gl.constexpr = SHAPE[3]
    HEIGHT: gl.constexpr = 1 if ALONE else COLS
    LANES: gl.constexpr = TILE // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 32 // LANES, LANES], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    col = gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    col = gl.expand_dims(gl.expand_dims(col, 0), 2)
    ks = gl.arange(0, TILE, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    ks = gl.expand_dims(gl.expand_dims(ks, 0), 1) + gl.expand_dims(gl.expand_dims(warp, 1), 2) * TILE
    at = x_ptr + (gl.minimum(col, m - 1) * stride_x + ks)
    squares = gl.zeros([WARPS, HEIGHT, TILE], gl.float32, layout)
    for step in range(STEPS):
        inside = ks < k - step * WARPS * TILE
        x = gl.load(at + step * WARPS * TILE, mask=inside & (col >= 0), other=0.0)
        if NORM:
            squares += x.to(gl.float32) * x.to(gl.float32)
        if gamma_ptr is not None:
            x = x * gl.load(gamma_ptr + step * WARPS * TILE + ks, mask=inside, other=0.0)
        if ALONE:
            x = x.reshape(WARPS, TILE)
        x_smem.index(step).store(x)
    return gl.rsqrt(gl.sum(gl.sum(squares, 2), 0) / k + eps)


@gluon.jit
def _x_and_sums(x_smem, step, ALONE: gl.constexpr, SHAPE: gl.constexpr, SUMS: gl.constexpr):
    """x of a step as the tensor cores' right operand, [WARPS, TILE, COLS], and the sums of its rows.

    The sums are a product with ones, as many rows of them as of w, so that they come where they are needed.
    """
    WARPS: gl.constexpr = SHAPE[0]
    ROWS: gl.constexpr = SHAPE[1]
    COLS: gl.constexpr = SHAPE[2]
    TILE: gl.constexpr = SHAPE[3]
    right: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    if ALONE:
        x = gl.expand_dims(x_smem.index(step).load(gl.SliceLayout(2, right)), 2)
        x = x.broadcast_to((WARPS, TILE, COLS))
    else:
        x = x_smem.index(step).permute((0, 2, 1)).load(right)
    ones = gl.full([WARPS, ROWS, TILE], 1.0, x.dtype, gl.DotOperandLayout(0, SUMS, 2))
    return x, mma_v2(ones, x, gl.zeros([WARPS, ROWS, COLS], gl.float32, SUMS))


@gluon.jit
def _row_sums(total, first, inverse, bias_ptr, n, NORM: gl.constexpr, SHAPE: gl.constexpr, SUMS: gl.constexpr):
    """Add up the warps' shares of k -> [ROWS, COLS], normalised and biased."""
    ROWS: gl.constexpr = SHAPE[1]
    y = gl.sum(total, 0)
    if NORM:
        y = y * gl.expand_dims(inverse, 0)
    if bias_ptr is not None:
        row = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
        y += gl.expand_dims(gl.load(bias_ptr + row, mask=row < n, other=0.0).to(gl.float32), 1)
    return y


@gluon.jit
def _few_rows_kernel(
    x_ptr,  # [m, k], row stride stride_x
    words_ptr, more_ptr, scale_ptr,  # as in kernels/awq_packed.py
    gamma_ptr,  # [k], or None
    bias_ptr,  # [n], or [2 n] if GATED; or None
    residual_ptr,  # [m, n], or None
    out_ptr,  # [m, n]
    m, n, k, stride_x,
    eps,
    NORM: gl.constexpr, GATED: gl.constexpr,
    ALONE: gl.constexpr,  # m is 1
    KEEP: gl.constexpr,  # x stays in registers
    STEPS: gl.constexpr,  # tiles a warp has of each row
    GROUP: gl.constexpr,  # tiles that share a scale
    CODES: gl.constexpr,  # the assembly, types and magic number of its numbers; bits a word has of each; third bits?
    SHAPE: gl.constexpr,  # WARPS, ROWS of w, COLS: rows of x, TILE: columns of w, WORDS of a thread
    WORDS_LAYOUT: gl.constexpr,  # [WARPS, ROWS, 4, WORDS], see words_layout
    OVERLAP: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = SHAPE[0]
    ROWS: gl.constexpr = SHAPE[1]
    COLS: gl.constexpr = SHAPE[2]
    TILE: gl.constexpr = SHAPE[3]
    WORDS: gl.constexpr = SHAPE[4]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], instr_shape=[1, 16, 8])
    LAYOUTS: gl.constexpr = (WORDS_LAYOUT, SUMS)
    THREE: gl.constexpr = CODES[4]
    WALK: gl.constexpr = (GATED, STEPS, GROUP)
    tiles = gl.cdiv(k, TILE)

    # w: the first steps are asked for at once
    flat: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, WORDS_LAYOUT))
    of_word: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, WORDS_LAYOUT)))
    of_four: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, WORDS_LAYOUT)))
    four = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=of_four), 0), 1), 3)
    of_thread = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=of_word), 0), 1), 2)
    deep = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, flat)), 1)
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, flat)), 0)
    at = gl.expand_dims(gl.expand_dims((row // 16 * tiles + deep) * 16 + row % 16, 2), 3) * 4 + four
    deep = gl.expand_dims(gl.expand_dims(deep, 2), 3) + gl.zeros_like(at + of_thread)
    few: gl.constexpr = gl.BlockedLayout([1, 1], [32 // ROWS, ROWS], [WARPS, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, few)), 0)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, few)), 1) + gl.zeros_like(row)
    row = row // 16 * gl.cdiv(tiles, GROUP) * 16 + row % 16
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    words_ring = gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, ROWS, 4, WORDS], plain)
    scale_ring = gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    more_ring = words_ring  # stands for nothing, but where there are third bits
    more_at = words_ptr
    if THREE:
        more_ring = gl.allocate_shared_memory(gl.int32, [STAGES, WARPS, ROWS, 4, WORDS], plain)
        more_at = more_ptr + (at + gl.zeros_like(of_thread))
    ring = (words_ring, more_ring, scale_ring)
    w = (words_ptr + (at * WORDS + of_thread), more_at, scale_ptr, deep, warp, row, tiles, n)
    for number in gl.static_range(STAGES - 1):
        _ask(ring, w, number, THREE, WALK, SHAPE)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()  # from here on x and the residual are there, and out may be written

    # x
    if ALONE:
        unswizzled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        x_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STEPS, WARPS, TILE], unswizzled)
    else:
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0])
        x_smem = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [STEPS, WARPS, COLS, TILE], swizzled)
    inverse = _bring_x(x_smem, x_ptr, gamma_ptr, m, k, stride_x, eps, NORM, ALONE, STEPS, SHAPE)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))
    kept = ()
    if KEEP:
        for i in gl.static_range(STEPS):
            kept = kept + (_x_and_sums(x_smem, i, ALONE, SHAPE, SUMS),)

    store: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, WARPS], [0, 1])
    out_row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, store)), 1)
    col = gl.expand_dims(gl.arange(0, COLS, layout=gl.SliceLayout(0, store)), 0)
    block = gl.program_id(0)
    number = 0  # steps so far
    while block < gl.cdiv(n, ROWS):
        first = block * ROWS
        gate = gl.zeros([WARPS, ROWS, COLS], gl.float32, SUMS)
        for half in gl.static_range(1 + GATED):
            total = gl.zeros([WARPS, ROWS, COLS], gl.float32, SUMS)
            if KEEP:
                for i in gl.static_range(STEPS):
                    async_copy.wait_group(STAGES - 2)
                    x, sums = kept[i]
                    total = _multiply(total, ring, number, x, sums, of_thread, CODES, SHAPE, LAYOUTS)
                    _ask(ring, w, number + STAGES - 1, THREE, WALK, SHAPE)
                    number += 1
            else:
                for i in range(STEPS):
                    async_copy.wait_group(STAGES - 2)
                    x, sums = _x_and_sums(x_smem, i, ALONE, SHAPE, SUMS)
                    total = _multiply(total, ring, number, x, sums, of_thread, CODES, SHAPE, LAYOUTS)
                    _ask(ring, w, number + STAGES - 1, THREE, WALK, SHAPE)
                    number += 1
            if half < GATED:
                gate = total
        y = _row_sums(gate if GATED else total, first, inverse, bias_ptr, n, NORM, SHAPE, SUMS)
        if GATED:
            up_bias = None if bias_ptr is None else bias_ptr + n
            up = _row_sums(total, first, inverse, up_bias, n, NORM, SHAPE, SUMS)
            y = y / (1.0 + gl.exp(-y)) * up
        y = gl.convert_layout(y, store)
        inside = (first + out_row < n) & (col < m)
        at_out = col * n + first + out_row
        if residual_ptr is not None:
            y += gl.load(residual_ptr + at_out, mask=inside, other=0.0).to(gl.float32)
        gl.store(out_ptr + at_out, y.to(out_ptr.dtype.element_ty), mask=inside)
        block += gl.num_programs(0)


# --------------------------------------------------------------------------------------------- launch

WARPS, ROWS, KEPT = 8, 16, 4


@cache
def settings(bits: int, words: int, third: bool, dtype: torch.dtype, tile: int) -> dict:
    """The kernel's constants for weights of one kind. words: of a thread and tile."""
    return {
        "CODES": (assembly(bits, dtype), types_of(bits, dtype), magic_of(bits, dtype), 2 if third else bits, third),
        "SHAPE": (WARPS, ROWS, COLS, tile, words),
        "WORDS_LAYOUT": words_layout(WARPS, ROWS, words),
    }


def _shape(m: int, weight) -> tuple[int, bool, int]:
    """(tiles a warp has, whether x stays in registers, bytes of shared memory at most) of a launch."""
    steps = triton.cdiv(weight.words.shape[1], WARPS)
    words = 4 * weight.words.shape[-1] * (1 + (weight.more is not None))
    ring = STAGES.value * WARPS * ROWS * 4 * (words + 1)
    return steps, steps <= KEPT, ring + steps * WARPS * weight.tile * 2 * (1 if m == 1 else COLS) + 8192


def takes(x: torch.Tensor, weight, gated: bool) -> bool:
    """Whether ``few_rows`` runs: at most MAX_ROWS rows, that fit into shared memory beside the ring.

    Gate and up must not share a block of w.
    """
    if not 0 < len(x) <= MAX_ROWS or (gated and weight.n // 2 % ROWS):
        return False
    return _shape(len(x), weight)[2] <= shared_limit(x.device)


def few_rows(x, weight, bias, residual, eps, gamma, gated, out) -> torch.Tensor:
    """``awq_linear`` for rows for which ``takes`` holds, its arguments checked."""
    w, n, m = weight, weight.n // (1 + gated), x.shape[0]
    capability = arch(x.device)
    steps, keep, _ = _shape(m, w)
    _few_rows_kernel[(min(triton.cdiv(n, ROWS), sm_count(x.device)),)](
        x, w.words, w.more, w.scales, gamma, bias, residual, out, m, n, w.k, x.stride(0),
        0.0 if eps is None else eps, NORM=eps is not None, GATED=gated, ALONE=m == 1, KEEP=keep, STEPS=steps,
        GROUP=-(-w.group // w.tile), **settings(w.stored_bits, w.words.shape[-1], w.more is not None, w.dtype, w.tile),
        OVERLAP=capability >= 90, num_warps=WARPS, launch_pdl=capability >= 90,
        maxnreg=255 if capability >= 100 else None,  # ptxas would spill to come down to 64 or 80
    )  # fmt: skip
    return out
