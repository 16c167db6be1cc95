"""Codes of 2 to 8 bits to numbers of 16, exact: what ``kernels.awq_linear`` tells of 0x4300 | code, for every width.

A word's assembly gives its numbers pair after pair, and the rest is bookkeeping: they are joined, and the axes that
arise are permuted to the order of w's columns. Where layouts are such that a thread's numbers are those the tensor
cores want of it, that moves nothing. One function does it in Triton, its twin in Gluon, with one more axis for warps.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def magic_of(bits: int, dtype: torch.dtype) -> int:
    """What ``assembly`` adds to each code: the number whose last place counts in ones."""
    return 1024 if dtype == torch.float16 else 0 if bits == 8 else 128


@cache
def assembly(bits: int, dtype: torch.dtype) -> str:
    """PTX that turns a word of codes into pairs of numbers, ``magic_of`` + code, each exact.

    Operands behind the numbers: the word; for three bits, of which the word holds the lower two, that of third bits.
    """
    code = 2 if bits == 3 else bits
    pairs = 16 // code
    word, third = f"${2 * pairs}", f"${2 * pairs + 1}"
    magic, mask = (f"0x{n * 0x10001:08X}" for n in (0x6400 if dtype == torch.float16 else 0x4300, (1 << code) - 1))
    lines = ["{ .reg .b32 r, s, t; .reg .f32 f, g;"]
    for i in range(pairs):
        if bits == 8 and dtype == torch.bfloat16:  # 8 bits fill a bf16; in fp32 there is room beside 2^23
            lines += [f"prmt.b32 s, {word}, 0x4B000000, {0x7540 + i}; prmt.b32 t, {word}, 0x4B000000, {0x7542 + i};"]
            lines += ["mov.b32 f, s; mov.b32 g, t; add.f32 f, f, 0fCB000000; add.f32 g, g, 0fCB000000;"]
            lines += ["cvt.rn.bf16x2.f32 r, g, f;"]
        else:
            lines += [f"shr.b32 s, {word}, {code * i}; lop3.b32 r, s, {mask}, {magic}, 0xEA;"]  # s & mask | magic
        if bits == 3:
            lines += [
                f"shl.b32 t, {third}, 2; shr.b32 t, t, {8 * (i // 4) + i % 4}; lop3.b32 r, t, 0x00040004, r, 0xEA;"
            ]
        lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, r;"]
    return "\n".join(lines) + " }"


def types_of(bits: int, dtype: torch.dtype) -> tuple:
    """The types of the numbers that a word's assembly gives."""
    return ({torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype],) * (32 // (2 if bits == 3 else bits))


def words_layout(warps: int, rows: int, words: int) -> gl.DistributedLinearLayout:
    """Who has which word of [warps, rows, 4, words]: a lane's place is that of its numbers in the left operand.

    Lanes: 2 bits of the thread of four, then 3 of the row; registers: the words, then further eights of rows.
    """
    registers = [[0, 0, 0, 1 << i] for i in range(words.bit_length() - 1)]
    registers += [[0, 8 << i, 0, 0] for i in range((rows // 8).bit_length() - 1)]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    of_warps = [[1 << i, 0, 0, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(registers, lanes, of_warps, [], [warps, rows, 4, words])


@gluon.jit
def places_of_words(LAYOUT: gl.constexpr, WARPS: gl.constexpr, ROWS: gl.constexpr, WORDS: gl.constexpr):
    """Of a thread's words in LAYOUT, that of ``words_layout``: warp [WARPS, ROWS], row [1, ROWS], and place among the
    words of a row and tile [1, 1, 4, WORDS]."""
    flat: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT))
    of_word: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    of_four: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT)))
    row = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, flat)), 0)
    warp = gl.expand_dims(gl.arange(0, WARPS, layout=gl.SliceLayout(1, flat)), 1) + gl.zeros_like(row)
    four = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=of_four), 0), 1), 3)
    four = four * WORDS + gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.arange(0, WORDS, layout=of_word), 0), 1), 2)
    return warp, row, four


@triton.jit
def numbers_of_rows(
    words,  # int32 [R, 4, WORDS]
    third,  # alike: the third bits of the codes in each word, as awq_packed tells, from bit 0 up
    ASM: tl.constexpr,  # of ``assembly``; "": plain operations, for the interpreter
    TYPES: tl.constexpr,  # of the numbers that come of a word
    CODE: tl.constexpr,  # bits a code takes in words
    THREE: tl.constexpr,  # whether there are third bits
    R: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The codes of a tile and what the assembly adds to them, exact, in the order of w's columns -> DTYPE [R, TILE]."""
    if ASM == "":
        at = CODE * tl.arange(0, 16 // CODE)[:, None] + 16 * tl.arange(0, 2)[None, :]
        codes = (words[:, :, :, None, None] >> at[None, None, None]) & ((1 << CODE) - 1)
        if THREE:
            at = tl.arange(0, 8)[:, None] // 4 * 8 + tl.arange(0, 8)[:, None] % 4 + 16 * tl.arange(0, 2)[None, :]
            codes |= ((third[:, :, :, None, None] >> at[None, None, None]) & 1) << 2
        q = codes.to(DTYPE).permute(0, 2, 3, 1, 4)  # from row, thread, word, pair, half
    elif CODE == 8:
        a, b, c, d = tl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,r", [words], dtype=TYPES, is_pure=True, pack=1)
        q = tl.join(tl.join(a, b), tl.join(c, d)).permute(0, 2, 4, 1, 3)  # from row, thread, word, half, pair
    elif CODE == 4:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=TYPES, is_pure=True, pack=1
        )  # fmt: skip
        q = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
        q = q.permute(0, 2, 5, 4, 1, 3)  # from row, thread, word, half, low and high bit of the pair
    else:
        if THREE:
            a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = tl.inline_asm_elementwise(
                ASM, "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, third],
                dtype=TYPES, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = tl.inline_asm_elementwise(
                ASM, "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r", [words],
                dtype=TYPES, is_pure=True, pack=1,
            )  # fmt: skip
        low = tl.join(tl.join(tl.join(a, b), tl.join(c, d)), tl.join(tl.join(e, f), tl.join(g, h)))
        high = tl.join(tl.join(tl.join(i, j), tl.join(k, l)), tl.join(tl.join(m, n), tl.join(o, p)))
        q = tl.join(low, high).permute(0, 2, 6, 5, 4, 1, 3)
    return q.reshape(R, TILE)


@gluon.jit
def numbers(words, third, CODES: gl.constexpr, SHAPE: gl.constexpr):
    """As ``numbers_of_rows``, in Gluon: int32 [WARPS, ROWS, 4, WORDS] -> [WARPS, ROWS, TILE]."""
    ASM: gl.constexpr = CODES[0]
    TYPES: gl.constexpr = CODES[1]
    WARPS: gl.constexpr = SHAPE[0]
    ROWS: gl.constexpr = SHAPE[1]
    TILE: gl.constexpr = SHAPE[3]
    if CODES[3] == 8:
        a, b, c, d = gl.inline_asm_elementwise(ASM, "=h,=h,=h,=h,r", [words], dtype=TYPES, is_pure=True, pack=1)
        q = gl.join(gl.join(a, b), gl.join(c, d)).permute(0, 1, 3, 5, 2, 4)
    elif CODES[3] == 4:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r", [words], dtype=TYPES, is_pure=True, pack=1
        )
        q = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
        q = q.permute(0, 1, 3, 6, 5, 2, 4)
    else:
        if third is not None:
            a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = gl.inline_asm_elementwise(
                ASM, "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r,r", [words, third],
                dtype=TYPES, is_pure=True, pack=1,
            )  # fmt: skip
        else:
            a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = gl.inline_asm_elementwise(
                ASM, "=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,=h,r", [words],
                dtype=TYPES, is_pure=True, pack=1,
            )  # fmt: skip
        low = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
        high = gl.join(gl.join(gl.join(i, j), gl.join(k, l)), gl.join(gl.join(m, n), gl.join(o, p)))
        q = gl.join(low, high).permute(0, 1, 3, 7, 6, 5, 2, 4)
    return q.reshape(WARPS, ROWS, TILE)
