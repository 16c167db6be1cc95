"""Codes of 4 bits to numbers of 16, where Hopper's tensor cores take them: in the registers of a warpgroup's 64 rows.

A number is (code - zero) * scale, rounded once to 16 bits, as it would be written out. ``kernels.awq_packed`` tells how
words hold codes, and ``kernels.awq_linear`` why ``word & mask | magic`` is a pair of numbers, magic + code. Minus a
pair of magic + zero this is the difference, exactly. In fp16 one multiplication follows. A scale, though, is an fp16 of
11 bits, of which a bf16 holds 8: it is split into a bf16 and the rest, and q * scale = fma(q, scale, q * rest).

So two numbers take a shift, a mask, a subtraction, and one or two operations more. Pairs are written out in PTX, since
from single numbers the compiler does not always make them.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@cache
def scale_assembly(dtype: torch.dtype) -> str:
    """PTX: a scale (fp16) and zero point (bf16) in a word -> pairs of magic + zero, of the scale, and of its rest."""
    lines = ["{ .reg .f32 f, g; .reg .b16 h, i; .reg .b32 r, s;"]
    if dtype == torch.float16:
        lines += ["and.b32 s, $3, 0xFFFF0000; mov.b32 f, s; add.f32 f, f, 0f44800000; cvt.rn.f16x2.f32 $0, f, f;"]
        lines += ["prmt.b32 $1, $3, $3, 0x1010; mov.b32 $2, 0;"]
    else:
        lines += ["prmt.b32 s, $3, $3, 0x3232; mov.b32 r, 0x43004300; add.rn.bf16x2 $0, s, r;"]
        lines += ["mov.b32 {h, i}, $3; cvt.f32.f16 f, h; cvt.rn.bf16x2.f32 $1, f, f;"]
        lines += ["and.b32 s, $1, 0xFFFF0000; mov.b32 g, s; sub.f32 g, f, g; cvt.rn.bf16x2.f32 $2, g, g;"]
    return "\n".join(lines) + " }"


@cache
def number_assembly(dtype: torch.dtype) -> str:
    """PTX: a word of 4-bit codes and what ``scale_assembly`` gives -> its 8 numbers, code pair after code pair."""
    kind, magic = ("f16x2", "0x64006400") if dtype == torch.float16 else ("bf16x2", "0x43004300")
    lines = ["{ .reg .b32 q, r;"]
    for i in range(4):
        lines += [f"shr.b32 q, $8, {4 * i}; lop3.b32 q, q, 0x000F000F, {magic}, 0xEA;"]  # q & mask | magic
        lines += [f"sub.rn.{kind} q, q, $9;"]
        if dtype == torch.float16:
            lines += ["mul.rn.f16x2 q, q, $10;"]
        else:
            lines += ["mul.rn.bf16x2 r, q, $11; fma.rn.bf16x2 q, q, $10, r;"]
        lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, q;"]
    return "\n".join(lines) + " }"


@cache
def layouts() -> tuple:
    """Who has which word of [4, 16 rows, 16], which scale of [4, 1, 16 rows], and which word of a half, [64, 4, 2].

    A lane's place is that of its numbers in the left operand: 2 bits of the thread of four, then 3 of the row. Rows 8
    apart are in the same lane, and each warp has its own 16.
    """
    linear = gl.DistributedLinearLayout
    lanes, warps = (1, 2, 4), ([1, 0, 0], [2, 0, 0])
    places = [[0, 0, 4], [0, 0, 8], *([0, r, 0] for r in lanes)]
    words = linear([[0, 0, 1], [0, 0, 2], [0, 8, 0]], places, [*warps], [], [4, 16, 16])
    scales = linear([[0, 0, 8]], [[0, 0, 0], [0, 0, 0], *([0, 0, r] for r in lanes)], [*warps], [], [4, 1, 16])
    places = [[0, 1, 0], [0, 2, 0], *([r, 0, 0] for r in lanes)]
    return words, scales, linear([[0, 0, 1], [8, 0, 0]], places, [[16, 0, 0], [32, 0, 0]], [], [64, 4, 2])


@gluon.jit
def pairs_of_scales(packed, CODES: gl.constexpr):
    """int32 [4, 1, 16], scales and zero points -> pairs as ``number_assembly`` takes them, each [64, 1, 1]."""
    of_half: gl.constexpr = CODES[2][2]
    packed = gl.convert_layout(packed.reshape([64]), gl.SliceLayout(1, gl.SliceLayout(2, of_half)), assert_trivial=True)
    zero, scale, rest = gl.inline_asm_elementwise(
        CODES[0], "=&r,=&r,=&r,r", [packed], dtype=(gl.int32, gl.int32, gl.int32), is_pure=True, pack=1
    )
    zero = gl.expand_dims(gl.expand_dims(zero, 1), 2)
    scale = gl.expand_dims(gl.expand_dims(scale, 1), 2)
    return zero, scale, gl.expand_dims(gl.expand_dims(rest, 1), 2)


@gluon.jit
def halves(words, CODES: gl.constexpr):
    """int32 [4, 16, 16] -> the words of its first and of its last 64 columns, [64, 4, 2] each."""
    low, high = gl.split(words.reshape([64, 4, 2, 2]).permute(0, 1, 3, 2))  # from row, thread, half, word
    of_half: gl.constexpr = CODES[2][2]
    low = gl.convert_layout(low, of_half, assert_trivial=True)
    return low, gl.convert_layout(high, of_half, assert_trivial=True)


@gluon.jit
def numbers(words, scales, CODES: gl.constexpr, A: gl.constexpr):
    """int32 [64, 4, 2] -> what its codes stand for, [64, 64], as the tensor cores want it."""
    zero, scale, rest = scales
    a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
        CODES[1], "=&h,=&h,=&h,=&h,=&h,=&h,=&h,=&h,r,r,r,r", [words, zero, scale, rest],
        dtype=CODES[3], is_pure=True, pack=1,
    )  # fmt: skip
    q = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
    q = q.permute(0, 2, 5, 4, 1, 3).reshape([64, 64])  # from row, thread, word, half, low and high bit of the pair
    return gl.convert_layout(q, A, assert_trivial=True)
