"""2 to 16 rows times a matrix of 4 bits: ``kernels.awq_linear`` for small batches.

Few rows still cost what reading the weights costs, if nothing else comes in its way. What came in its way, as
measured on an H200 (8 rows, 28672 x 4096), was one thing after the other:

- Instructions. A warp has 228 issue slots for the 2048 weights of a tile while memory brings them. Codes of 4 bits
  become fp16 in 5 operations for 8 codes: 0x6400 is 1024, whose last place counts in ones, and has room for a code in
  its lower four bits and for one in the next four, which then stands for 16 times as much. x is divided by 16 where
  that is so (``kernels.awq_operand``), and 1024 times the sum of x is subtracted. About 95 instructions a tile.
- Work on x that every program did for itself: 5 us. ``kernels.awq_operand`` does it once.
- Waiting. Warps divide a block of w along k, and their sums meet in shared memory; 16 warps that wait for each other
  every second tile were stopped for a fifth of the time. So there are two programs an SM, of 8 warps each: while one
  adds up, the other multiplies.
- Reading x. Each warp reads its part of x from the first cache for every block, which takes twice the bytes of w. Where
  there are enough blocks, two are taken at a time (ROWS = 32) and share what was read. Gate and up are such a pair.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.awq_numbers import places_of_words, words_layout
from kernels.awq_operand import operand
from kernels.launch import arch
from kernels.paged_cache import sm_count

TILE = gl.constexpr(128)  # columns of w
WORDS = gl.constexpr(4)  # of a thread and tile
# A word of eight codes to pairs of numbers: 1024 + code where the code is the lower half of a byte, 1024 + 16 code
# where it is the upper one.
NUMBERS = gl.constexpr(
    "{ .reg .b32 s, t;\n"
    "lop3.b32 s, $8, 0x000F000F, 0x64006400, 0xEA; mov.b32 {$0, $1}, s;\n"
    "lop3.b32 s, $8, 0x00F000F0, 0x64006400, 0xEA; mov.b32 {$2, $3}, s; shr.b32 t, $8, 8;\n"
    "lop3.b32 s, t, 0x000F000F, 0x64006400, 0xEA; mov.b32 {$4, $5}, s;\n"
    "lop3.b32 s, t, 0x00F000F0, 0x64006400, 0xEA; mov.b32 {$6, $7}, s; }"
)
NUMBERS_FORM = gl.constexpr(",".join(["=&h"] * 8 + ["r"]))


@gluon.jit
def _numbers(words, SHAPE: gl.constexpr):
    """int32 [WARPS, ROWS, 4, WORDS] -> fp16 [WARPS, ROWS, TILE]: 1024 + code, or 1024 + 16 code in odd eights."""
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        NUMBERS, NUMBERS_FORM, [words], dtype=(gl.float16,) * 8, is_pure=True, pack=1
    )
    q = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    # from warp, row, thread, word, half, low and high bit of the pair
    return q.permute(0, 1, 3, 6, 5, 2, 4).reshape(SHAPE[0], SHAPE[1], TILE)


@gluon.jit
def _fetch(w, ahead: gl.constexpr, walk, STEPS: gl.constexpr, GROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Ask for words and scales of the step ``ahead`` steps after a turn's first; past the ends they are 0."""
    words_at, scale_at, of_words, of_scale, tiles, apart = w
    turn, step, turns = walk
    tile = ahead % STEPS * SHAPE[0]
    turn = turn + ahead // STEPS * step
    inside = turn < turns
    block = turn * apart
    words_at = words_at + (block * tiles + tile) * (16 * 4 * WORDS)
    words = gl.load(words_at, mask=(of_words + tile < tiles) & inside, other=0)
    scale_at = scale_at + (block * gl.cdiv(tiles, GROUP) + (of_scale + tile) // GROUP) * 16
    return words, gl.load(scale_at, mask=(of_scale + tile < tiles) & inside, other=0)


@gluon.jit
def _of_x(x_at, sums_at, i: gl.constexpr, SHAPE: gl.constexpr, RIGHT: gl.constexpr):
    """x of a step's tiles as right operand, fp16 [WARPS, TILE, COLS], and its two sums, [WARPS, 1, COLS]."""
    WARPS: gl.constexpr = SHAPE[0]
    COLS: gl.constexpr = SHAPE[2]
    x = gl.load(x_at + i * (WARPS * TILE * COLS)).reshape(WARPS, COLS // 8, 4, 8, 4, 4, 2)
    # warp, eight, word, column, thread, pair, side -> warp, word, pair, thread, side, eight, column
    x = gl.convert_layout(x.permute(0, 2, 5, 4, 6, 1, 3).reshape(WARPS, TILE, COLS), RIGHT, assert_trivial=True)
    magic = gl.expand_dims(gl.load(sums_at + i * (WARPS * 2 * COLS)), 1)
    return x, magic, gl.expand_dims(gl.load(sums_at + (i * (WARPS * 2 * COLS) + COLS)), 1)


@gluon.jit
def _small_batch_kernel(
    x_ptr, sums_ptr, factor_ptr,  # as in kernels/awq_operand.py
    words_ptr, scale_ptr,  # as in kernels/awq_packed.py
    bias_ptr,  # [n], or [2 n] if GATED; or None
    residual_ptr,  # [m, n], or None
    out_ptr,  # [m, n]
    m, n, k,
    GATED: gl.constexpr,
    STEPS: gl.constexpr,  # tiles a warp has of each row
    DEEP: gl.constexpr,  # tiles a warp has asked for beyond the one it multiplies
    GROUP: gl.constexpr,  # tiles that share a scale
    SHAPE: gl.constexpr,  # WARPS; ROWS of w a turn: 16 or 32; COLS: m rounded up to 8 or 16
    LAYOUTS: gl.constexpr,  # see _layouts
    OVERLAP: gl.constexpr,
):  # fmt: skip
    WARPS: gl.constexpr = SHAPE[0]
    ROWS: gl.constexpr = SHAPE[1]
    COLS: gl.constexpr = SHAPE[2]
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], instr_shape=[1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    of_words: gl.constexpr = LAYOUTS[0]
    of_x: gl.constexpr = LAYOUTS[1]
    merged: gl.constexpr = LAYOUTS[2]
    tiles = gl.cdiv(k, TILE)
    apart: gl.constexpr = 1 if GATED else ROWS // 16  # blocks of 16 rows from a turn's first to that of the next
    turns = gl.cdiv(n, 16 * apart)
    other = turns if GATED else 1  # and from a turn's first block to its second: that of up, if the first is of gate
    turn = gl.program_id(0)
    step = gl.num_programs(0)

    # w: the first tiles are asked for at once
    warp, row, four = places_of_words(of_words, WARPS, ROWS, WORDS)
    at = (row // 16 * other * tiles + warp) * 16 + row % 16
    at = gl.expand_dims(gl.expand_dims(at, 2), 3) * (4 * WORDS) + four
    deep = gl.expand_dims(gl.expand_dims(warp, 2), 3) + gl.zeros_like(at)
    scale_at = scale_ptr + (row // 16 * other * gl.cdiv(tiles, GROUP) * 16 + row % 16 + gl.zeros_like(warp))
    w = (words_ptr + at, scale_at, deep, warp, tiles, apart)
    coming = ()
    for i in gl.static_range(DEEP):
        coming = coming + (_fetch(w, i, (turn, step, turns), STEPS, GROUP, SHAPE),)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()  # from here on x and the residual are there, and out may be written

    # x: where its pieces are
    of_eight: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, of_x)))
    of_lane: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, of_x)))
    of_piece: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, of_x)))
    of_warp: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, of_x)))
    x_at = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 8, layout=of_eight), 0), 1), 2)
    x_at = x_at + gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 32, layout=of_lane), 0), 1), 3) * 8
    piece = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, COLS // 2, layout=of_piece), 0), 2), 3)
    warp = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, WARPS, layout=of_warp), 1), 2), 3)
    x_at = x_ptr + (x_at + piece * 256 + warp * (TILE * COLS))
    of_sums: gl.constexpr = gl.SliceLayout(1, SUMS)
    sums_at = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, of_sums)), 1) * (2 * COLS)
    sums_at = sums_ptr + (sums_at + gl.expand_dims(gl.arange(0, COLS, layout=gl.SliceLayout(0, of_sums)), 0))
    store: gl.constexpr = gl.SliceLayout(0, merged)
    factor = gl.load(factor_ptr + gl.expand_dims(gl.arange(0, COLS, layout=gl.SliceLayout(0, store)), 0))

    nothing = gl.zeros([WARPS, ROWS, COLS], gl.float32, SUMS)
    while turn < turns:
        total = gl.zeros([WARPS, ROWS, COLS], gl.float32, SUMS)
        for i in gl.static_range(STEPS):
            words, scale = coming[0]
            x, magic, sums = _of_x(x_at, sums_at, i, SHAPE, RIGHT)
            q = gl.convert_layout(_numbers(words, SHAPE), LEFT, assert_trivial=True)
            products = mma_v2(q, x, nothing)
            scale = gl.convert_layout(scale, gl.SliceLayout(2, SUMS), assert_trivial=True)
            zero = gl.expand_dims((scale & -65536).to(gl.float32, bitcast=True), 2)
            scale = gl.expand_dims(scale.to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32), 2)
            total += scale * (products - (zero * sums + magic))
            coming = coming[1:] + (_fetch(w, i + DEEP, (turn, step, turns), STEPS, GROUP, SHAPE),)
        y = gl.sum(gl.convert_layout(total, merged), 0) * factor  # the warps' shares of k
        _end(y, bias_ptr, residual_ptr, out_ptr, turn, m, n, GATED, SHAPE, store)
        turn += step


@gluon.jit
def _end(y, bias_ptr, residual_ptr, out_ptr, turn, m, n, GATED: gl.constexpr, SHAPE: gl.constexpr, store: gl.constexpr):
    """Bias, activation and residual of a turn's sums y [ROWS, COLS], and out."""
    ROWS: gl.constexpr = SHAPE[1]
    COLS: gl.constexpr = SHAPE[2]
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(1, store)), 1)
    col = gl.expand_dims(gl.arange(0, COLS, layout=gl.SliceLayout(0, store)), 0)
    if GATED:
        of_bias = row // 16 * n + turn * 16 + row % 16
        row = turn * 16 + row % 16
    else:
        row = turn * ROWS + row
        of_bias = row
    if bias_ptr is not None:
        y += gl.load(bias_ptr + of_bias, mask=row < n, other=0.0).to(gl.float32)
    at = col * n + row
    inside = (row < n) & (col < m)
    if GATED:
        gate, up = _halves(y, COLS)
        y = gate / (1.0 + gl.exp(-gate)) * up
        at = _halves(at, COLS)[0]
        inside = _halves(inside, COLS)[0]
    if residual_ptr is not None:
        y += gl.load(residual_ptr + at, mask=inside, other=0.0).to(gl.float32)
    gl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def _halves(y, COLS: gl.constexpr):
    """[32, COLS] -> its upper and its lower 16 rows; a thread has both."""
    return gl.split(y.reshape(2, 16, COLS).permute(1, 2, 0))


# --------------------------------------------------------------------------------------------- launch

MAX_ROWS = 16


@cache
def _layouts(rows: int, cols: int, warps: int) -> tuple:
    """Of words [warps, rows, 4, WORDS], of x [warps, cols / 2, 32 lanes, 8], of sums to add up [warps, rows, cols].

    There a thread has four warps' shares of a sum, and both halves of the rows and of the columns if they are two.
    """
    of_warps = [[1 << i, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    pieces = [[0, 1 << i, 0, 0] for i in range((cols // 2).bit_length() - 1)]
    eights, lanes = [[0, 0, 0, 1 << i] for i in range(3)], [[0, 0, 1 << i, 0] for i in range(5)]
    of_x = gl.DistributedLinearLayout(eights + pieces, lanes, of_warps, [], [warps, cols // 2, 32, 8])
    registers = [[1, 0, 0], [2, 0, 0]] + [[0, 16, 0]] * (rows == 32) + [[0, 0, 8]] * (cols == 16)
    threads = [basis[:3] for basis in of_warps[2:]]
    threads += [[0, 1 << i, 0] for i in range(4)] + [[0, 0, 1 << i] for i in range(3)]
    merged = gl.DistributedLinearLayout(registers, threads[:5], threads[5:], [], [warps, rows, cols])
    return words_layout(warps, rows, WORDS.value), of_x, merged


def plan(cols: int, n: int, k: int, gated: bool) -> tuple[int, int, int, int]:
    """(WARPS, programs an SM, ROWS, DEEP) for out [<= cols, n], as measured on an H200."""
    if cols == 16 and (gated or n > 4096):
        return (8, 1, 32, 4) if gated else (4, 4, 16, 4)
    return 8, 2, 32 if gated else 16, 4 if k > 4096 or (cols == 16 and not gated) else 2


def takes(x: torch.Tensor, weight, gated: bool) -> bool:
    """Whether ``small_batch`` runs: 2 to MAX_ROWS rows, 4 bits, tiles of 128 columns; gate and up must not share a
    block of w.

    From 9 rows on reading x takes as long as reading w; of large matrices ``kernels.awq_some_rows`` reads it less.
    """
    m, n = len(x), weight.n // (1 + gated)
    fits = 2 <= m <= MAX_ROWS and weight.stored_bits == 4 and weight.tile == TILE.value and not (gated and n % 16)
    return fits and (m <= 8 or (weight.k <= 4096 and (gated or n <= 8192)))


def small_batch(x, weight, bias, residual, eps, gamma, gated, out, settings=None) -> torch.Tensor:
    """``awq_linear`` for rows for which ``takes`` holds, its arguments checked. settings: instead of ``plan``."""
    w, n, m, cols = weight, weight.n // (1 + gated), len(x), 8 if len(x) <= 8 else 16
    warps, per_sm, rows, deep = settings or plan(cols, n, w.k, gated)
    steps = triton.cdiv(w.words.shape[1], warps)
    packed, sums, factor = operand(x, steps * warps, cols, eps, gamma)
    turns = triton.cdiv(n, 16 if gated else rows)
    overlap = arch(x.device) >= 90
    _small_batch_kernel[(min(turns, per_sm * sm_count(x.device)),)](
        packed, sums, factor, w.words, w.scales, bias, residual, out, m, n, w.k,
        GATED=gated, STEPS=steps, DEEP=deep, GROUP=-(-w.group // w.tile), SHAPE=(warps, rows, cols),
        LAYOUTS=_layouts(rows, cols, warps), OVERLAP=overlap, num_warps=warps, launch_pdl=overlap,
        # Left alone, ptxas saves registers and asks for x just before it is needed: 28 us instead of 21. All the
        # registers there are for two programs cost a few words that are put aside, once a tile at most.
        maxnreg=128 if rows == 16 else None,
    )  # fmt: skip
    return out
