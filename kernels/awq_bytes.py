"""Codes of 2 to 8 bits to bytes, the left operand of ``kernels.awq_one_row``: what masks find in words, four at once.

``kernels.awq_digits`` tells which column of w is at which place. Four words are turned at once, since bytes of a thread
count in fours: a matrix of int8 that comes of them has one byte for each word, and what is in it is put right when the
axes are permuted. No register changes its place for that.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.awq_digits import ROWS, TILE


def _bytes(bits: int) -> str:
    """PTX: four words (of 3 bits: and the words of third bits that go with them) to registers of four bytes each.

    Of ``shifts`` registers to a word, register 4 s + i holds the codes that lie from bit ``bits * s`` of every byte of
    word i up. Of 2 and 3 bits the words of row r come first, the two of row r + 8 after them.
    """
    code, shifts = (2, 4) if bits == 3 else (bits, 8 // bits)
    lines = ["{ .reg .b32 s;"]
    for s, i in ((s, i) for s in range(shifts) for i in range(4)):
        to, word, third = f"${4 * s + i}", f"${4 * shifts + i}", f"${4 * shifts + 4 + i}"
        if bits == 8:  # signed, as the instruction wants them: codes and zero points are 128 less
            lines += [f"xor.b32 {to}, {word}, 0x80808080;"]
            continue
        shift = f"shr.b32 s, {word}, {code * s}; " if s else ""
        lines += [f"{shift}and.b32 {to}, {'s' if s else word}, 0x{((1 << code) - 1) * 0x01010101:08X};"]
        if bits == 3:
            by = 4 * (i % 2) + s - 2  # from where the third bit lies to bit 2 of its byte
            lines += [
                f"{'shl' if by < 0 else 'shr'}.b32 s, {third}, {abs(by)}; lop3.b32 {to}, s, 0x04040404, {to}, 0xEA;"
            ]
    return "\n".join(lines) + " }"


BYTES = gl.constexpr(_bytes(4))
BYTES_OF_2 = gl.constexpr(_bytes(2))
BYTES_OF_3 = gl.constexpr(_bytes(3))
BYTES_OF_8 = gl.constexpr(_bytes(8))
FORM = gl.constexpr("=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r")  # &: words are read after the first bytes are written
FORM_OF_2 = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 4))
FORM_OF_3 = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 8))
FORM_OF_8 = gl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r")


@gluon.jit
def codes_of(words, third, BITS: gl.constexpr, WARPS: gl.constexpr):
    """Words, int32 [WARPS, ROWS, 4, WORDS], and third bits [WARPS, ROWS, 4] or None, of a tile a warp -> codes as int8
    [WARPS, ROWS, TILE], in the order word, shift, thread, byte. Of 8 bits they are 128 less."""
    if BITS == 8:
        a, b, c, d = gl.inline_asm_elementwise(
            BYTES_OF_8, FORM_OF_8, [words], dtype=(gl.int8,) * 4, is_pure=True, pack=4
        )
        # warp, row, thread, word's high bit, byte, word's low bits
        q = gl.join(gl.join(a, b), gl.join(c, d)).reshape(WARPS, ROWS, 4, 2, 4, 2, 2).permute(0, 1, 3, 6, 5, 2, 4)
    elif BITS == 4:
        a, b, c, d, e, f, g, h = gl.inline_asm_elementwise(
            BYTES, FORM, [words], dtype=(gl.int8,) * 8, is_pure=True, pack=4
        )
        q = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
        q = q.permute(0, 1, 5, 4, 6, 2, 3)  # from warp, row, thread, byte, word's low bit, its high bit, shift
    else:
        if BITS == 3:
            third = gl.expand_dims(third, 3).broadcast_to((WARPS, ROWS, 4, 2))
            a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = gl.inline_asm_elementwise(
                BYTES_OF_3, FORM_OF_3, [words, third], dtype=(gl.int8,) * 16, is_pure=True, pack=4
            )
        else:
            a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = gl.inline_asm_elementwise(
                BYTES_OF_2, FORM_OF_2, [words], dtype=(gl.int8,) * 16, is_pure=True, pack=4
            )
        low = gl.join(gl.join(gl.join(a, b), gl.join(c, d)), gl.join(gl.join(e, f), gl.join(g, h)))
        high = gl.join(gl.join(gl.join(i, j), gl.join(k, l)), gl.join(gl.join(m, n), gl.join(o, p)))
        # warp, byte's high bit, row % 8, thread, byte's low bit, word, row // 8, shift's low bit, its high bit
        q = gl.join(low, high).reshape(WARPS, 2, 8, 4, 2, 2, 2, 2, 2).permute(0, 6, 2, 5, 8, 7, 3, 1, 4)
    return q.reshape(WARPS, ROWS, TILE)
