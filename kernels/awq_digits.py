"""A row of x as whole numbers: the right operand of ``kernels.awq_one_row``, made once a program.

x = unit * (d0 + 256 d1 + 65536 d2), each digit from -128 to 127, with unit = max |x| / 2^22 (of the row). What is
rounded is half a unit, and as much as fp32 rounds of x / unit, less than another half: 2^-22 of the largest |x| at
most, 2^-13 of what bf16 itself rounds of it.

**Columns.** The instruction takes 32 columns of w at once; of these thread t of four has bytes 4 t to 4 t + 3 and
16 + 4 t to 16 + 4 t + 3, two registers, and of a tile of 128 columns eight. Which columns they are is free as long as w
and x agree, so a register holds what one mask finds in a word of ``kernels.awq_packed``. Of b bits a word has SHIFTS =
8 / b such registers, ``word >> b s``, and byte 2 side + high of register c = SHIFTS word + s, at place
16 c + 4 t + 2 side + high of the operand, is column

    16 SHIFTS word + 8 SHIFTS high + 8 s + 2 t + side.

So the four bytes of a thread are two pairs of neighbours, and x is read 4 bytes at a time: once, all of it at once, and
it stays in registers while its largest value is looked for.

**Planes.** Each digit is a plane of bytes in shared memory, where a thread's eight registers lie side by side. They are
read in two loads of 16 bytes. In every other plane these change places: then 8 threads find their bytes in 32 banks.
"""

from __future__ import annotations

from functools import cache

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

ROWS = gl.constexpr(16)  # of w
COLS = gl.constexpr(8)  # of the tensor cores' instruction, of which the digits take three
TILE = gl.constexpr(128)  # columns of w
COUNTER = gl.constexpr(0x4B400000)  # the bits of 12 582 912.0 = 2^23 + 2^22, from where fp32 counts in ones
# Four integers, to which 0x808080 was added, to three words: their first bytes, their second, their third. What was
# added made the bytes' carries; taken from each byte alone, it makes them signed.
PLANES = gl.constexpr(
    "{ .reg .b32 s, t;\n"
    "prmt.b32 s, $3, $4, 0x5140; prmt.b32 t, $5, $6, 0x5140;\n"
    "prmt.b32 $0, s, t, 0x5410; prmt.b32 $1, s, t, 0x7632;\n"
    "prmt.b32 s, $3, $4, 0x0062; prmt.b32 t, $5, $6, 0x0062; prmt.b32 $2, s, t, 0x5410;\n"
    "xor.b32 $0, $0, 0x80808080; xor.b32 $1, $1, 0x80808080; xor.b32 $2, $2, 0x80808080; }"
)
PLANES_FORM = gl.constexpr("=&r,=&r,=&r,r,r,r,r")


@cache
def layouts(warps: int, shifts: int) -> tuple:
    """Who has which column of x [warps * TILE]; how planes lie in memory, as words [warps, 4, TILE / 4] and as bytes
    [warps, 4, TILE]; who reads which of them, [warps, TILE, 2, 4], and has which of their sums, [warps, 8, COLS]."""
    others = [[b] for b in (8, 16, 32, 64) if b != 8 * shifts]
    of_warps = [1 << i for i in range(warps.bit_length() - 1)]
    columns = gl.DistributedLinearLayout(
        [[1], [8 * shifts]], [[2], [4], *others], [[TILE.value * w] for w in of_warps], [], [warps * TILE.value]
    )
    places = [[0, 0, b] for b in (1, 2, 16, 32, 64, 4, 8)]
    after = [[0, 1, 64], [0, 2, 0], *([w, 0, 0] for w in of_warps)]
    planes = gl.SharedLinearLayout([*places, *after])
    in_words = gl.SharedLinearLayout([[w, d, b // 4] for w, d, b in [*places[2:], *after]])
    registers = [[0, b, 0, 0] for b in (1, 2, 16, 32, 64)]
    lanes = [[0, 4, 0, 0], [0, 8, 0, 0], [0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0]]
    places = gl.DistributedLinearLayout(registers, lanes, [[w, 0, 0, 0] for w in of_warps], [], [warps, 128, 2, 4])
    sums = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    sums = gl.DistributedLinearLayout([[0, 0, 1]], sums, [[w, 0, 0] for w in of_warps], [], [warps, 8, COLS.value])
    return columns, in_words, planes, places, sums


@gluon.jit
def load_row(ptr, k, STEPS: gl.constexpr, WARPS: gl.constexpr, COLUMNS: gl.constexpr):
    """A row's columns, a tile a warp and step; 0 past k."""
    ks = gl.arange(0, WARPS * TILE, layout=COLUMNS)
    row = ()
    for i in gl.static_range(STEPS):
        row = row + (gl.load(ptr + ks + i * (WARPS * TILE), mask=ks < k - i * (WARPS * TILE), other=0.0),)
    return row


@gluon.jit
def measured(
    row, gamma, k, eps, NORM: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr, COLUMNS: gl.constexpr
):  # fmt: skip
    """-> x times gamma in fp32, 1 / unit, and unit, divided by x's root mean square if NORM.

    The warps' results meet in shared memory, with one barrier; every thread goes through all of them. A NaN is the
    largest value of all, and so of the result.
    """
    x = ()
    largest = gl.full([WARPS * TILE], 1e-30, gl.float32, COLUMNS)
    squares = gl.zeros([WARPS * TILE], gl.float32, COLUMNS)
    for i in gl.static_range(STEPS):
        a = row[i].to(gl.float32)
        if NORM:
            squares += a * a
        if gamma is not None:
            a = a * gamma[i].to(gl.float32)
        x = x + (a,)
        largest = gl.maximum(largest, gl.abs(a), propagate_nan=tl.PropagateNan.ALL)
    everywhere: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])
    parts = gl.allocate_shared_memory(gl.int32, [2, WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # As integers, of which a warp finds the largest in one instruction: numbers of one sign are in the same order.
    parts.index(0).store(gl.max(largest.to(gl.int32, bitcast=True).reshape(WARPS, TILE), 1))
    if NORM:
        parts.index(1).store(gl.sum(squares.reshape(WARPS, TILE), 1).to(gl.int32, bitcast=True))
    largest = gl.max(parts.index(0).load(everywhere), 0).to(gl.float32, bitcast=True)
    factor = largest * (1.0 / 4194304)
    if NORM:
        factor = factor * gl.rsqrt(gl.sum(parts.index(1).load(everywhere).to(gl.float32, bitcast=True), 0) / k + eps)
    return x, 4194304 / largest, factor


@gluon.jit
def digits_of(x, per_unit, WARPS: gl.constexpr, SHIFTS: gl.constexpr):
    """fp32 [WARPS * TILE] -> planes in words, int32 [WARPS, 4, TILE / 4]; the last is the third again."""
    # Rounded to an integer by adding 3 * 2^22.
    q = (x * per_unit + 12582912.0).to(gl.int32, bitcast=True) - (COUNTER - 0x808080)
    # word, high, s, thread, side -> word, s, thread, side, high
    q = q.reshape(WARPS, 8 // SHIFTS, 2, SHIFTS, 4, 2).permute(0, 1, 3, 4, 5, 2).reshape(WARPS, TILE // 4, 2, 2)
    low, high = gl.split(q)
    first, third = gl.split(low)
    second, fourth = gl.split(high)
    a, b, c = gl.inline_asm_elementwise(
        PLANES, PLANES_FORM, [first, second, third, fourth], dtype=(gl.int32,) * 3, is_pure=True, pack=1
    )
    return gl.join(gl.join(a, b), gl.join(c, c)).permute(0, 3, 2, 1).reshape(WARPS, 4, TILE // 4)


@gluon.jit
def digits_in(planes, WARPS: gl.constexpr, LAYOUTS: gl.constexpr, SUMS: gl.constexpr):
    """A step's planes in memory -> int8 [WARPS, TILE, COLS]; the last four columns are the first four again."""
    planes = planes._reinterpret(gl.int8, [WARPS, 4, TILE], LAYOUTS[2])
    x = planes.permute((0, 2, 1)).load(gl.SliceLayout(2, LAYOUTS[3]))
    x = gl.expand_dims(x, 2).broadcast_to((WARPS, TILE, 2, 4)).reshape(WARPS, TILE, COLS)
    return gl.convert_layout(x, gl.DotOperandLayout(1, SUMS, 4), assert_trivial=True)


@gluon.jit
def sums_of(x, WARPS: gl.constexpr, LAYOUTS: gl.constexpr, SUMS: gl.constexpr):
    """int8 [WARPS, TILE, COLS] -> fp32 [WARPS, 8, COLS], the sums of columns, for each thread those that it needs.

    They are a product with ones: all 16 rows are alike, and of the two that are a thread's one is dropped.
    """
    ones = gl.full([WARPS, ROWS, TILE], 1, gl.int8, gl.DotOperandLayout(0, SUMS, 4))
    counter = gl.full([WARPS, ROWS, COLS], COUNTER, gl.int32, SUMS)
    sums = mma_v2(ones, x, counter).to(gl.float32, bitcast=True) - 12582912.0
    sums, _same = gl.split(sums.reshape(WARPS, 2, 8, COLS).permute(0, 2, 3, 1))
    return gl.convert_layout(sums, LAYOUTS[4], assert_trivial=True)


@gluon.jit
def operand(planes, sums, WARPS: gl.constexpr, LAYOUTS: gl.constexpr, SUMS: gl.constexpr):
    """A step's planes and sums in memory -> digits, int8 [WARPS, TILE, COLS], and sums, fp32 [WARPS, ROWS, COLS]."""
    sums = sums.load(LAYOUTS[4])
    sums = gl.join(sums, sums).permute(0, 3, 1, 2).reshape(WARPS, ROWS, COLS)
    return digits_in(planes, WARPS, LAYOUTS, SUMS), gl.convert_layout(sums, SUMS, assert_trivial=True)
