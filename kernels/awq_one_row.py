"""One row times a matrix of 2 to 8 bits, in whole numbers: ``kernels.awq_linear`` at batch 1 on tensor cores for bytes.

At one row each weight is used once, and what its code costs on the way from memory to the sum decides. In
``kernels.awq_few_rows`` that is about 1.2 operations a weight and an instruction of the tensor cores for 256, and an
H200's SMs, at 36 weights a cycle, are kept too busy to wait for memory. Bytes cost half of both:

- **w.** A code of 4 bits is a byte with its upper half empty. One mask makes four of a word, one shift and mask the
  other four: 3 operations for 8 codes, and no magic number. ``kernels.awq_bytes`` does so with 2, 3 and 8 bits, too.
  The instruction for bytes takes 16 x 32 of them.
- **x.** It has 16 bits, and is written in three digits of 8: ``kernels.awq_digits``. The instruction multiplies w by 8
  columns, of which one row of x would use one. The digits use three; the others' sums are multiplied by 0.
- **Sums** of integers are exact, and end in the same bits in whatever order they are taken. A tile's sum is less than
  2^18, or with codes from -128 to 127 at most 2^21, so beside 12 582 912 = 2^23 + 2^22, from which fp32 counts in ones
  up and down, it is a number of fp32 as it stands: the sums begin with the bits of that number, and need no conversion.

A program takes one block of 16 rows after the other, each warp its share of k. The words of the tiles to come are on
their way meanwhile, from block to block, and the first ones before the kernel before has ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.awq_bytes import codes_of
from kernels.awq_digits import (
    COLS,
    COUNTER,
    ROWS,
    TILE,
    digits_in,
    digits_of,
    layouts,
    load_row,
    measured,
    operand,
    sums_of,
)
from kernels.awq_numbers import places_of_words, words_layout
from kernels.awq_packed import PackedWeight
from kernels.launch import arch, shared_limit
from kernels.paged_cache import sm_count

IN_ORDER = gl.constexpr("bar.warp.sync 0xffffffff; mov.b32 $0, $1;")


@gluon.jit
def _fetch(w, begin, AHEAD: gl.constexpr, WALK: gl.constexpr):
    """Words and scales of the warps' AHEAD-th tiles from block ``begin`` on; past the ends 0.

    In the order in which they are used: tile by tile, of gate and of up, and then those of the program's next block.
    """
    words_at, more_at, scale_at, warp, tiles, half_blocks = w
    GATED: gl.constexpr = WALK[0]
    STEPS: gl.constexpr = WALK[1]
    FULL: gl.constexpr = WALK[2]
    WARPS: gl.constexpr = WALK[3]
    TILES_A_GROUP: gl.constexpr = WALK[4]
    BITS: gl.constexpr = WALK[5]
    WORDS: gl.constexpr = WALK[6]
    begin = gl.inline_asm_elementwise(IN_ORDER, "=r,r", [begin], dtype=gl.int32, is_pure=False, pack=1)
    step: gl.constexpr = AHEAD // (1 + GATED) % STEPS
    block = begin + AHEAD // (1 + GATED) // STEPS * gl.num_programs(0)
    row = block + AHEAD % (1 + GATED) * half_blocks  # up begins where gate ends, at a whole block
    live = (warp >= 0) & (block < half_blocks)
    if step == STEPS - 1 or step >= FULL:
        live = live & (warp < tiles - step * WARPS)
    if step * WARPS % TILES_A_GROUP == 0:  # constants of their own become part of the instruction
        scale_at += row * gl.cdiv(tiles, TILES_A_GROUP) * 16 + warp // TILES_A_GROUP * 16
        scale_at += step * WARPS // TILES_A_GROUP * 16
    else:
        scale_at += (row * gl.cdiv(tiles, TILES_A_GROUP) + (warp + step * WARPS) // TILES_A_GROUP) * 16
    scale = gl.load(scale_at, mask=live, other=0)
    live = gl.expand_dims(live, 2)
    words_at += row * tiles * (16 * 4 * WORDS)
    words = gl.load(words_at + step * WARPS * (16 * 4 * WORDS), mask=gl.expand_dims(live, 3), other=0)
    tile = (words, scale)
    if BITS == 3:
        tile = tile + (gl.load(more_at + row * tiles * (16 * 4) + step * WARPS * (16 * 4), mask=live, other=0),)
    return tile


@gluon.jit
def _multiply(total, tile, x, of_x, BITS: gl.constexpr, WARPS: gl.constexpr):
    """total + scale * (codes - zero) . digits of a tile a warp, of which all but the scaling is exact."""
    words = tile[0]
    scale = tile[1]
    SUMS: gl.constexpr = total.type.layout
    codes = codes_of(words, tile[2] if BITS == 3 else None, BITS, WARPS)
    codes = gl.convert_layout(codes, gl.DotOperandLayout(0, SUMS, 4), assert_trivial=True)
    counter = gl.full([WARPS, ROWS, COLS], COUNTER, gl.int32, SUMS)
    part = mma_v2(codes, x, counter).to(gl.float32, bitcast=True)
    scale = gl.convert_layout(scale, gl.SliceLayout(2, SUMS), assert_trivial=True)
    zero = gl.expand_dims((scale & -65536).to(gl.float32, bitcast=True), 2)
    if BITS == 8:
        zero = zero - 128
    scale = gl.expand_dims(scale.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32), 2)
    return total + scale * (part - (zero * of_x + 12582912.0))


@gluon.jit
def _one_row_kernel(
    x_ptr,  # [k]
    words_ptr, more_ptr, scale_ptr,  # as in kernels/awq_packed.py
    gamma_ptr,  # [k], or None
    bias_ptr,  # [n], or [2 n] if GATED; or None
    residual_ptr,  # [n], or None
    out_ptr,  # [n]
    n, k,
    eps,
    NORM: gl.constexpr, GATED: gl.constexpr,
    STEPS: gl.constexpr,  # tiles a warp has of each row
    FULL: gl.constexpr,  # steps of which every warp has a tile
    DEEP: gl.constexpr,  # tiles a warp has asked for beyond the one it multiplies
    TURNS: gl.constexpr,  # blocks before the loop goes back
    BITS: gl.constexpr,  # of a code; of 3, words hold 2
    WARPS: gl.constexpr, TILES_A_GROUP: gl.constexpr,
    WORDS_LAYOUT: gl.constexpr,  # [WARPS, ROWS, 4, WORDS], see awq_numbers.words_layout
    LAYOUTS: gl.constexpr,  # of x and its digits, see awq_digits.layouts
    OVERLAP: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], instr_shape=[1, 16, 8])
    OF_X: gl.constexpr = LAYOUTS[0]
    PLANES: gl.constexpr = LAYOUTS[1]
    WORDS: gl.constexpr = 2 if BITS == 3 else BITS  # of a thread and tile
    WALK: gl.constexpr = (GATED, STEPS, FULL, WARPS, TILES_A_GROUP, BITS, WORDS)
    tiles = gl.cdiv(k, TILE)
    half_blocks = gl.cdiv(n, ROWS)  # of gate, and of up
    begin = gl.program_id(0)

    # w: the first tiles are asked for at once
    warp, row, four = places_of_words(WORDS_LAYOUT, WARPS, ROWS, WORDS)
    at = gl.expand_dims(gl.expand_dims(warp * 16 + row, 2), 3) * (4 * WORDS) + four
    more_at = words_ptr  # stands for nothing, but where there are third bits
    if BITS == 3:
        four = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, WORDS_LAYOUT))))
        four = gl.expand_dims(gl.expand_dims(four, 0), 1)
        more_at = more_ptr + (gl.expand_dims(warp * 16 + row, 2) * 4 + four)
    w = (words_ptr + at, more_at, scale_ptr + row + gl.zeros_like(warp), warp, tiles, half_blocks)
    coming = ()
    for i in gl.static_range(DEEP):
        coming = coming + (_fetch(w, begin, i, WALK),)
    gamma = None
    if gamma_ptr is not None:
        gamma = load_row(gamma_ptr, k, STEPS, WARPS, OF_X)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()  # from here on x and the residual are there, and out may be written

    # x: its digits, in shared memory
    row = load_row(x_ptr, k, STEPS, WARPS, OF_X)
    x, per_unit, factor = measured(row, gamma, k, eps, NORM, STEPS, WARPS, OF_X)
    planes = ()  # memory of its own for each step: stores need no barriers between them
    for i in gl.static_range(STEPS):
        planes = planes + (gl.allocate_shared_memory(gl.int32, [WARPS, 4, TILE // 4], PLANES),)
        planes[i].store(digits_of(x[i], per_unit, WARPS, 8 // WORDS))
    in_order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    sums = ()
    for i in gl.static_range(STEPS):
        sums = sums + (gl.allocate_shared_memory(gl.float32, [WARPS, 8, COLS], in_order),)
        sums[i].store(sums_of(digits_in(planes[i], WARPS, LAYOUTS, SUMS), WARPS, LAYOUTS, SUMS))

    of_digit = gl.arange(0, COLS, layout=gl.SliceLayout(0, gl.SliceLayout(1, SUMS)))
    of_digit = gl.expand_dims(gl.expand_dims(of_digit, 0), 1)
    weight = gl.where(of_digit == 0, factor, gl.where(of_digit == 1, 256 * factor, 65536 * factor))
    weight = gl.where(of_digit < 3, weight, 0.0)
    out_row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
    while begin < half_blocks:
        for _turn in gl.static_range(TURNS):
            gate = gl.zeros([WARPS, ROWS, COLS], gl.float32, SUMS)
            total = gate
            for i in gl.static_range(STEPS):
                x8, of_x = operand(planes[i], sums[i], WARPS, LAYOUTS, SUMS)
                if GATED:
                    gate = _multiply(gate, coming[0], x8, of_x, BITS, WARPS)
                    coming = coming[1:] + (_fetch(w, begin, 2 * i + DEEP, WALK),)
                total = _multiply(total, coming[0], x8, of_x, BITS, WARPS)
                coming = coming[1:] + (_fetch(w, begin, (1 + GATED) * (i + 1) - 1 + DEEP, WALK),)
            y = _finish(total, weight, bias_ptr if bias_ptr is None or not GATED else bias_ptr + n, begin, n, out_row)
            if GATED:
                gate = _finish(gate, weight, bias_ptr, begin, n, out_row)
                y = gate / (1.0 + gl.exp(-gate)) * y
            at_out = begin * ROWS + out_row
            if residual_ptr is not None:
                y += gl.load(residual_ptr + at_out, mask=at_out < n, other=0.0).to(gl.float32)
            gl.store(out_ptr + at_out, y.to(out_ptr.dtype.element_ty), mask=at_out < n)
            begin += gl.num_programs(0)


@gluon.jit
def _finish(total, weight, bias_ptr, block, n, row):
    """Put the digits together and add up the warps' shares of k -> fp32 [ROWS]."""
    y = gl.sum(gl.sum(total * weight, 2), 0)
    y = gl.convert_layout(y, row.type.layout)
    if bias_ptr is not None:
        y += gl.load(bias_ptr + block * ROWS + row, mask=block * ROWS + row < n, other=0.0).to(gl.float32)
    return y


# --------------------------------------------------------------------------------------------- launch


@dataclass(frozen=True)
class Settings:
    """How a row is multiplied; any choice gives the same result if registers and shared memory suffice."""

    warps: int = 16  # of a program
    deep: int = 4  # tiles a warp has asked for beyond the one it multiplies
    per_sm: int = 1  # programs


# Tiles asked for that leave registers enough to multiply, by bits: on sm_90 and elsewhere, and on either if gated.
MOST = {2: (7, 7, 4, 4), 3: (4, 4, 2, 2), 4: (7, 4, 4, 2), 8: (2, 2, 2, 1)}


def settings_of(tiles: int, blocks: int, bits: int, gated: bool, arch: int) -> Settings:
    """For rows of so many tiles, of which a program has so many blocks (as gate, and as up).

    On an H200 two programs an SM, of which one multiplies while the other adds up, take 16.4 us for 28672 x 4096 and
    4.9 for 6144 x 4096, where one takes 18.3 and 5.6. Longer rows are read in fewer pieces, and gate and up of 4 bits
    need the registers: 16.8 us with one program, 19.6 with two.
    """
    if arch == 90 and tiles <= 32 and bits < 8 and not (gated and bits == 4):
        return Settings(warps=8, deep=2 if gated and bits == 3 else 4, per_sm=2)
    steps = triton.cdiv(tiles, Settings.warps)
    walk = steps * (1 + gated)
    if walk <= 2:  # two blocks before the loop goes back, unless the second is often past the end
        return Settings(deep=walk * (2 if bits < 8 and (blocks % 2 == 0 or blocks > 8) else 1))
    most = 1 if steps > 4 and arch != 90 else MOST[bits][2 * gated + (arch != 90)]
    deep = _divisor(walk, most)
    return Settings(deep=deep if deep > 2 or steps <= 4 else _divisor(walk + 1 + gated, most))


def _divisor(n: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if n % d == 0)


def walk_of(tiles: int, gated: bool, s: Settings) -> tuple[int, int]:
    """(STEPS, TURNS): tiles of a row that a warp has, and blocks before the loop goes back.

    A tile that is on its way cannot change its registers, so where the loop goes back, tiles to come must be where they
    were before: the tiles between are a multiple of ``deep``. Of many tiles one more may be added, of zeros.
    """

    def turns(steps: int) -> int:
        return s.deep // math.gcd(steps * (1 + gated), s.deep)

    steps = triton.cdiv(tiles, s.warps)
    if steps > 4 and turns(steps + 1) < turns(steps):
        steps += 1
    return steps, turns(steps)


def _settings(x: torch.Tensor, weight: PackedWeight, gated: bool) -> Settings:
    blocks = triton.cdiv(triton.cdiv(weight.n // (1 + gated), ROWS.value), sm_count(x.device))
    return settings_of(weight.words.shape[1], blocks, weight.stored_bits, gated, arch(x.device))


def takes(x: torch.Tensor, weight: PackedWeight, gated: bool) -> bool:
    """Whether ``one_row`` runs: one row, tiles of 128 columns, and digits that fit into shared memory.

    Gate and up must not share a block. There is code for each tile of a row, so these must not be too many.
    """
    if len(x) != 1 or weight.tile != TILE.value or (gated and weight.n // 2 % ROWS.value):
        return False
    settings = _settings(x, weight, gated)
    steps, _ = walk_of(weight.words.shape[1], gated, settings)
    return steps * (1 + gated) <= LONGEST and shared_bytes(steps, settings) <= shared_limit(x.device)


LONGEST = 8  # tiles of a warp


def shared_bytes(steps: int, settings: Settings) -> int:
    """Of a program, at most: planes and sums of each step, and what sums of warps pass through."""
    return steps * settings.warps * (4 * TILE.value + 4 * 8 * COLS.value) + 2048


def one_row(x, weight, bias, residual, eps, gamma, gated, out, settings: Settings | None = None) -> torch.Tensor:
    """``awq_linear`` for a row for which ``takes`` holds, its arguments checked. settings: not ``settings_of``'s."""
    w, n, tiles, words = weight, weight.n // (1 + gated), weight.words.shape[1], weight.words.shape[-1]
    overlap = arch(x.device) >= 90
    s = settings or _settings(x, w, gated)
    steps, turns = walk_of(tiles, gated, s)
    maxnreg = None  # ptxas knows that 16 warps have 128 each
    if s.per_sm > 1 or (steps > 4 and not overlap):  # but before sm_90 spills to come down to 64
        maxnreg = 65536 // (32 * s.warps * s.per_sm)
    _one_row_kernel[(min(triton.cdiv(n, ROWS.value), s.per_sm * sm_count(x.device)),)](
        x, w.words, w.more, w.scales, gamma, bias, residual, out, n, w.k, 0.0 if eps is None else eps,
        NORM=eps is not None, GATED=gated, STEPS=steps, FULL=tiles // s.warps, DEEP=s.deep, TURNS=turns,
        BITS=w.stored_bits, WARPS=s.warps, TILES_A_GROUP=-(-w.group // w.tile),
        WORDS_LAYOUT=_layout(s.warps, words), LAYOUTS=layouts(s.warps, 8 // words), OVERLAP=overlap,
        num_warps=s.warps, launch_pdl=overlap, maxnreg=maxnreg,
    )  # fmt: skip
    return out


_layout = cache(lambda warps, words: words_layout(warps, ROWS.value, words))
