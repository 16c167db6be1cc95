"""One row times a matrix of 4 bits, in whole numbers: ``kernels.awq_linear`` at batch 1, on tensor cores for bytes.

At one row each weight is used once, and what its code costs on the way from memory to the sum decides. In
``kernels.awq_few_rows`` that is about 1.2 operations a weight and an instruction of the tensor cores for 256, and an
H200's SMs, at 36 weights a cycle, are kept too busy to wait for memory. Bytes cost half of both:

- **w.** A code of 4 bits is a byte with its upper half empty. One mask makes four of a word, one shift and mask the
  other four: 3 operations for 8 codes, and no magic number. The instruction for bytes takes 16 x 32 of them.
- **x.** It has 16 bits, and is written in three digits of 8: x = unit * (d0 + 256 d1 + 65536 d2), each from -128 to
  127, with unit = max |x| / 2^22 (of the row). The instruction multiplies w by 8 columns, of which one row of x would
  use one. The digits use three. What is rounded is half a unit, and as much as fp32 rounds of x / unit, less than
  another half: 2^-22 of the largest |x| at most, 2^-13 of what bf16 itself rounds of it.
- **Sums** of integers are exact, and end in the same bits in whatever order they are taken. A tile's sum is less than
  2^18, so beside 12 582 912 = 2^23 + 2^22, from which fp32 counts in ones up and down, it is a number of fp32 as it
  stands: the sums begin with the bits of that number, and need no conversion.

A program keeps its warps' digits in registers, or in shared memory where they are too many, and takes one block of 16
rows after the other, each warp its share of k; the words of the tiles to come are on their way meanwhile, the first
ones before the kernel before has ended.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.awq_numbers import words_layout
from kernels.launch import arch, shared_limit
from kernels.paged_cache import sm_count

ROWS = gl.constexpr(16)  # of w
COLS = gl.constexpr(8)  # of the tensor cores' instruction
TILE = gl.constexpr(128)  # columns of w
WORDS = gl.constexpr(4)  # of a thread and tile
COUNTER = gl.constexpr(0x4B400000)  # the bits of 12 582 912.0
# Four words to eight registers of bytes: byte j of register c is half c // 4 of byte j of word c % 4.
BYTES = gl.constexpr(
    "{ .reg .b32 s;\n"
    + "\n".join(
        f"and.b32 ${i}, ${8 + i}, 0x0F0F0F0F; shr.b32 s, ${8 + i}, 4; and.b32 ${4 + i}, s, 0x0F0F0F0F;"
        for i in range(4)
    )
    + " }"
)
# Byte d of four registers to one of bytes; $5 chooses d of two registers.
PICK = gl.constexpr("{ .reg .b32 s, t; prmt.b32 s, $1, $2, $5; prmt.b32 t, $3, $4, $5; prmt.b32 $0, s, t, 0x5410; }")
BYTES_FORM = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 4))  # &: words are read after the first bytes are written
PICK_FORM = gl.constexpr("=r,r,r,r,r,r,r,r,r")


@gluon.jit
def _codes(words, WARPS: gl.constexpr):
    """int32 [WARPS, ROWS, 4, WORDS] -> codes as int8 [WARPS, ROWS, TILE], in the order word, half, thread, byte."""
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        BYTES, BYTES_FORM, [words], dtype=(gl.int8,) * 8, is_pure=True, pack=4
    )
    q = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    # warp, row, thread, byte, word's low bit, its high bit, half
    return q.permute(0, 1, 5, 4, 6, 2, 3).reshape(WARPS, ROWS, TILE)


@gluon.jit
def _fetch(w, tile, block, blocks, TILES_A_GROUP: gl.constexpr):
    """Words and scales of the warps' tiles ``tile``, ``tile`` + 1, ... of a block's rows; past the ends 0."""
    words_at, scale_at, of_words, of_scale, tiles = w
    groups = gl.cdiv(tiles, TILES_A_GROUP)
    words = gl.load(
        words_at + (block * tiles + tile) * (16 * 4 * WORDS), mask=(of_words + tile < tiles) & (block < blocks), other=0
    )
    scale = gl.load(
        scale_at + (block * groups + (of_scale + tile) // TILES_A_GROUP) * 16,
        mask=(of_scale + tile < tiles) & (block < blocks), other=0,
    )  # fmt: skip
    return words, scale


@gluon.jit
def _x_of(x_ptr, gamma_ptr, ks, k):
    """x, times gamma, in fp32; 0 past k."""
    x = gl.load(x_ptr + ks, mask=ks < k, other=0.0).to(gl.float32)
    if gamma_ptr is not None:
        x = x * gl.load(gamma_ptr + ks, mask=ks < k, other=0.0).to(gl.float32)
    return x


@gluon.jit
def _one_row_kernel(
    x_ptr,  # [k]
    words_ptr, scale_ptr,  # as in kernels/awq_packed.py
    gamma_ptr,  # [k], or None
    bias_ptr,  # [n], or [2 n] if GATED; or None
    residual_ptr,  # [n], or None
    out_ptr,  # [n]
    n, k,
    eps,
    NORM: gl.constexpr, GATED: gl.constexpr,
    STEPS: gl.constexpr,  # tiles a warp has of each row
    DEEP: gl.constexpr,  # tiles a warp has asked for beyond the one it multiplies; divides STEPS
    KEEP: gl.constexpr,  # digits stay in registers
    WARPS: gl.constexpr, TILES_A_GROUP: gl.constexpr,
    WORDS_LAYOUT: gl.constexpr,  # [WARPS, ROWS, 4, WORDS], see awq_numbers.words_layout
    OVERLAP: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], instr_shape=[1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 4)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 4)
    tiles = gl.cdiv(k, TILE)
    half_blocks = gl.cdiv(n, ROWS)  # of gate, and of up
    begin = gl.program_id(0)
    step = gl.num_programs(0)

    # w: the first tiles are asked for at once
    flat: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, WORDS_LAYOUT))
    of_word: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, WORDS_LAYOUT)))
    of_four: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, WORDS_LAYOUT)))
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, flat)), 0)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, flat)), 1) + gl.zeros_like(row)
    four = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=of_four), 0), 1), 3)
    four = four * WORDS + gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=of_word), 0), 1), 2)
    at = gl.expand_dims(gl.expand_dims(warp * 16 + row, 2), 3) * (4 * WORDS) + four
    deep = gl.expand_dims(gl.expand_dims(warp, 2), 3) + gl.zeros_like(at)
    w = (words_ptr + at, scale_ptr + row + gl.zeros_like(warp), deep, warp, tiles)
    coming = ()
    for i in gl.static_range(DEEP):
        coming = coming + (_fetch(w, i * WARPS, begin, half_blocks, TILES_A_GROUP),)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()  # from here on x and the residual are there, and out may be written

    # x: its largest value and its squares, then its digits
    plain: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [WARPS, 1], [1, 0])
    ks = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, plain)), 1) * TILE
    ks = ks + gl.expand_dims(gl.arange(0, TILE, layout=gl.SliceLayout(0, plain)), 0)
    largest = gl.zeros([WARPS, TILE], gl.float32, plain)
    squares = gl.zeros([WARPS, TILE], gl.float32, plain)
    for i in gl.static_range(STEPS):
        x = _x_of(x_ptr, gamma_ptr, ks + i * (WARPS * TILE), k)
        if NORM:
            raw = _x_of(x_ptr, None, ks + i * (WARPS * TILE), k)
            squares += raw * raw
        largest = gl.maximum(largest, gl.abs(x))
    largest = gl.maximum(gl.max(gl.max(largest, 1), 0), 1e-30)
    unit = largest * (1.0 / 4194304)
    per_unit = 4194304 / largest
    factor = unit
    if NORM:
        factor = unit * gl.rsqrt(gl.sum(gl.sum(squares, 1), 0) / k + eps)
    digit = gl.expand_dims(gl.expand_dims(gl.arange(0, COLS, layout=gl.SliceLayout(0, gl.SliceLayout(1, RIGHT))), 0), 1)
    digit = gl.minimum(digit, 3)  # of the columns past the third nothing is kept
    pick = (digit + (digit + 4) * 16).broadcast_to((WARPS, TILE, COLS))
    ones = gl.full([WARPS, ROWS, TILE], 1, gl.int8, LEFT)
    counter = gl.full([WARPS, ROWS, COLS], COUNTER, gl.int32, SUMS)
    nothing = gl.zeros([WARPS, ROWS, COLS], gl.int32, SUMS)
    if not KEEP:
        turned: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 2, 0])
        digits = gl.allocate_shared_memory(gl.int8, [STEPS, WARPS, TILE, COLS], turned)
        unswizzled: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        sums_smem = gl.allocate_shared_memory(gl.float32, [STEPS, WARPS, COLS], unswizzled)
    kept = ()
    sums = ()
    for i in gl.static_range(STEPS):
        # Rounded to an integer by adding 3 * 2^22. To make bytes signed, 128 is added to each, carries and all, and
        # taken from each alone.
        x = _x_of(x_ptr, gamma_ptr, ks + i * (WARPS * TILE), k)
        q = ((x * per_unit + 12582912.0).to(gl.int32, bitcast=True) - COUNTER + 0x808080) ^ 0x808080
        # Columns 32 word + 16 high + 8 half + 2 thread + side lie in the order of codes: word, half, thread, byte, and
        # byte 2 side + high.
        q = q.reshape(WARPS, 4, 2, 2, 4, 2).permute(0, 1, 3, 4, 5, 2).reshape(WARPS, TILE)
        q = gl.expand_dims(gl.convert_layout(q, gl.SliceLayout(2, RIGHT)), 2).broadcast_to((WARPS, TILE, COLS))
        q = gl.inline_asm_elementwise(PICK, PICK_FORM, [q, pick], dtype=gl.int8, is_pure=True, pack=4)
        total_of_x = mma_v2(ones, q, nothing).to(gl.float32)
        if KEEP:
            kept = kept + (q,)
            sums = sums + (total_of_x,)
        else:
            digits.index(i).store(q)
            sums_smem.index(i).store(gl.max(total_of_x, 1))  # its rows are alike

    of_digit = gl.arange(0, COLS, layout=gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))
    of_digit = gl.expand_dims(gl.expand_dims(of_digit, 0), 1)
    weight = gl.where(of_digit == 0, factor, gl.where(of_digit == 1, 256 * factor, 65536 * factor))
    weight = gl.where(of_digit < 3, weight, 0.0)
    out_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
    while begin < half_blocks:
        gate = gl.zeros([WARPS, ROWS, COLS], gl.float32, SUMS)
        total = gate
        for half in gl.static_range(1 + GATED):
            total = gl.zeros([WARPS, ROWS, COLS], gl.float32, SUMS)
            for i in gl.static_range(STEPS):
                words, scale = coming[0]
                if KEEP:
                    x8 = kept[i]
                    of_x = sums[i]
                else:
                    x8 = digits.index(i).load(RIGHT)
                    of_x = gl.expand_dims(sums_smem.index(i).load(gl.SliceLayout(1, SUMS)), 1)
                codes = gl.convert_layout(_codes(words, WARPS), LEFT, assert_trivial=True)
                part = mma_v2(codes, x8, counter).to(gl.float32, bitcast=True)
                scale = gl.convert_layout(scale, gl.SliceLayout(2, SUMS), assert_trivial=True)
                zero = gl.expand_dims((scale & -65536).to(gl.float32, bitcast=True), 2)
                scale = gl.expand_dims(scale.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32), 2)
                total += scale * (part - (zero * of_x + 12582912.0))  # all but the scaling is exact
                if i + DEEP < STEPS:
                    block = begin + half * half_blocks
                    new = _fetch(w, (i + DEEP) * WARPS, block, (1 + GATED) * half_blocks, TILES_A_GROUP)
                elif half < GATED:  # up begins where gate ends, at a whole block
                    block = begin + half_blocks
                    new = _fetch(w, (i + DEEP - STEPS) * WARPS, block, 2 * half_blocks, TILES_A_GROUP)
                else:
                    new = _fetch(w, (i + DEEP - STEPS) * WARPS, begin + step, half_blocks, TILES_A_GROUP)
                coming = coming[1:] + (new,)
            if half < GATED:
                gate = total
        if GATED:
            y = _finish(gate, weight, bias_ptr, begin, n, out_row)
            up = _finish(total, weight, None if bias_ptr is None else bias_ptr + n, begin, n, out_row)
            y = y / (1.0 + gl.exp(-y)) * up
        else:
            y = _finish(total, weight, bias_ptr, begin, n, out_row)
        at_out = begin * ROWS + out_row
        if residual_ptr is not None:
            y += gl.load(residual_ptr + at_out, mask=at_out < n, other=0.0).to(gl.float32)
        gl.store(out_ptr + at_out, y.to(out_ptr.dtype.element_ty), mask=at_out < n)
        begin += step


@gluon.jit
def _finish(total, weight, bias_ptr, block, n, row):
    """Put the digits together and add up the warps' shares of k -> fp32 [ROWS]."""
    y = gl.sum(gl.sum(total * weight, 2), 0)
    y = gl.convert_layout(y, row.type.layout)
    if bias_ptr is not None:
        y += gl.load(bias_ptr + block * ROWS + row, mask=block * ROWS + row < n, other=0.0).to(gl.float32)
    return y


# --------------------------------------------------------------------------------------------- launch


WARPS, KEPT = 16, 4


def _plan(tiles: int, norm: bool, gated: bool, arch: int) -> tuple[int, int, bool, int]:
    """(STEPS, DEEP, KEEP, bytes of shared memory at most) for rows of so many tiles: what 128 registers can hold.

    Measured on sm_90; elsewhere, and for gate and up, no more than the compiler places without spilling.
    """
    steps = triton.cdiv(tiles, WARPS)
    roomy = arch == 90 and not gated and (steps <= KEPT or not norm)
    keep = steps <= 2 or (roomy and steps <= KEPT)
    deep = min(steps, KEPT if roomy else 2)
    steps = deep * triton.cdiv(steps, deep)  # tiles past the end are 0
    digits = 0 if keep else steps * WARPS * COLS.value * (TILE.value + 4)
    return steps, deep, keep, digits + 8192


def takes(x: torch.Tensor, weight, norm: bool, gated: bool) -> bool:
    """Whether ``one_row`` runs: one row, 4 bits, tiles of 128 columns, and digits that fit into shared memory.

    Gate and up must not share a block; of more than KEPT steps both together need more registers than there are.
    """
    if len(x) != 1 or weight.stored_bits != 4 or weight.tile != TILE.value:
        return False
    steps, _, _, shared = _plan(weight.words.shape[1], norm, gated, arch(x.device))
    return shared <= shared_limit(x.device) and not (gated and (weight.n // 2 % ROWS.value or steps > KEPT))


def one_row(x, weight, bias, residual, eps, gamma, gated, out) -> torch.Tensor:
    """``awq_linear`` for a row for which ``takes`` holds, its arguments checked."""
    w, n = weight, weight.n // (1 + gated)
    overlap = arch(x.device) >= 90
    steps, deep, keep, _ = _plan(w.words.shape[1], eps is not None, gated, arch(x.device))
    _one_row_kernel[(min(triton.cdiv(n, ROWS.value), sm_count(x.device)),)](
        x, w.words, w.scales, gamma, bias, residual, out, n, w.k, 0.0 if eps is None else eps,
        NORM=eps is not None, GATED=gated, STEPS=steps, DEEP=deep, KEEP=keep, WARPS=WARPS,
        TILES_A_GROUP=-(-w.group // w.tile), WORDS_LAYOUT=_layout(WARPS), OVERLAP=overlap,
        num_warps=WARPS, launch_pdl=overlap,
    )  # fmt: skip
    return out


_layout = cache(lambda warps: words_layout(warps, ROWS.value, WORDS.value))
