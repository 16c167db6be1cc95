"""Matrices of 2 to 8 bits in memory, as the W4 kernels read them: ``kernels.awq_linear`` tells why.

The tensor cores' left operand of 16 bits gives thread t of four the columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of every 16.
A word of a row and thread holds the codes of just those columns. Pair i of a word, columns 8 i + 2 t and + 1, lies in
bits b i and 16 + b i, where b is the bits of a code:

    words  int32 [n / 16, k / TILE, 16, 4 threads, TILE / 4 codes]    TILE: 128 columns, or 64 or 32 where groups are
                                                                      so small
    scales int32 [n / 16, k / group, 16]    the scale as fp16 in the lower half, the zero point as bf16 in the upper

Sixteen rows lie together, since that is what a program reads: one run of memory, and not a piece in each of 32 places.
Of 3 bits, words hold the lower two, and words of their own the third: a thread's word that of all its codes of a row
and tile. With the codes of word w shifted right by 2 s, s < 4, it must be shifted by 4 w + s, and the third bit of the
code in the lower bits of a byte is the lowest of the same byte: that of pair i, lower or upper half, lies in bit
8 (i // 4) + 4 w + i % 4, or 16 more. Where tiles are too small for 2 or 3 bits to fill
a word, codes are stored in 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITS = (2, 3, 4, 8)
PAD = 128  # rows of w come in multiples of it, so that no kernel has to ask where they end


@dataclass(frozen=True)
class PackedWeight:
    """A matrix [n, k] of codes as the kernels read it, made by ``repack``. dtype: of x and y."""

    words: torch.Tensor  # int32 [blocks, tiles, 16, 4, words a thread]; blocks of 16 rows: n up to a multiple of PAD
    more: torch.Tensor | None  # the third bits, where there are three: int32 [blocks, tiles, 16, 4, 1]
    scales: torch.Tensor  # int32 [blocks, groups, 16]
    n: int
    k: int
    bits: int
    group: int
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def device(self) -> torch.device:
        return self.words.device

    @property
    def nbytes(self) -> int:
        """Bytes in memory, and those a product reads."""
        return sum(4 * t.numel() for t in (self.words, self.more, self.scales) if t is not None)

    @property
    def tile(self) -> int:
        return tile_of(self.k, self.group)

    @property
    def stored_bits(self) -> int:
        """Bits a code takes. Groups too small for the layout of few bits are stored in four."""
        return 3 if self.more is not None else 8 * 4 * self.words.shape[-1] * 4 // self.tile

    def dequantise(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """-> [n, k]: what the codes stand for, computed in fp32 and rounded to ``dtype``."""
        codes = _unpack(self.words, 2 if self.more is not None else self.stored_bits)
        if self.more is not None:
            codes += _unpack_third(self.more) << 2
        scales = self.scales.to(torch.int16).view(torch.float16).float()
        zeros = (self.scales & -65536).view(torch.float32)
        of = torch.arange(codes.shape[1], device=self.device) * self.tile // self.group
        w = (codes - zeros[:, of, :, None]) * scales[:, of, :, None]  # block, tile, row, column
        return w.transpose(1, 2).flatten(0, 1).flatten(1)[: self.n, : self.k].to(dtype)


def tile_of(k: int, group: int) -> int:
    """Columns a tile of words has: no tile lies in two groups. Raises ValueError for groups that allow none."""
    for tile in (128, 64, 32):
        if group % tile == 0:
            return tile
    if group >= k:
        return 32  # one group a row: the last tile is filled up
    raise ValueError(f"awq_linear: groups must be multiples of 32 (or a whole row), got {group} for rows of {k}")


def repack(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, dtype: torch.dtype
) -> PackedWeight:
    """codes: uint8 [n, k]; scales: [n, k / group], kept as fp16; zeros: uint8 like scales, or None: 2^(bits - 1).

    Raises ValueError for other bits or shapes, codes or zero points beyond the bits, scales beyond fp16, or groups that
    are neither a multiple of 32 nor a whole row.
    """
    if bits not in BITS or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"awq_linear: codes of {BITS} bits for float16, bfloat16 or float32, got {bits} and {dtype}")
    if codes.dim() != 2 or scales.dim() != 2 or not codes.numel() or len(codes) != len(scales):
        shapes = f"{list(codes.shape)}, {list(scales.shape)}"
        raise ValueError(f"awq_linear: codes [n, k], scales [n, k / group]; got {shapes}")
    (n, k), groups = codes.shape, scales.shape[1]
    if k % groups or (zeros is not None and zeros.shape != scales.shape):
        shape = None if zeros is None else list(zeros.shape)
        raise ValueError(f"awq_linear: {groups} groups do not divide {k} columns, or zeros {shape} differ from scales")
    for name, t in (("codes", codes), ("zeros", zeros)):
        if t is not None and (t.dtype != torch.uint8 or int(t.max()) >= 1 << bits):
            raise ValueError(f"awq_linear: {name} must be uint8 below {1 << bits}, got {t.dtype} up to {int(t.max())}")
    if not torch.isfinite(scales.half()).all():
        raise ValueError("awq_linear: scales must be finite in float16")
    group = k // groups
    tile = tile_of(k, group)
    rows, tiles = -(-n // PAD) * PAD, -(-k // tile)
    if rows * tiles * tile >= 2**32:  # with 8 bits: words are counted in int32
        raise ValueError(f"awq_linear: a matrix of {n} x {k} has more words than an int32 counts")
    padded = torch.zeros((rows, tiles * tile), dtype=torch.uint8, device=codes.device)
    padded[:n, :k] = codes
    narrow = bits if tile * bits >= 128 and bits != 3 else 2 if bits == 3 and tile == 128 else 4
    words = _pack((padded & 3) if narrow == 2 and bits == 3 else padded, tile, narrow)
    more = _pack_third(padded >> 2) if narrow == 2 and bits == 3 else None
    packed = torch.zeros((rows, groups), dtype=torch.int32, device=codes.device)
    zero = torch.full_like(scales, 2 ** (bits - 1)) if zeros is None else zeros
    packed[:n] = zero.float().view(torch.int32) | (scales.half().view(torch.int16).int() & 0xFFFF)
    packed = packed.view(-1, 16, groups).transpose(1, 2).contiguous()
    return PackedWeight(words, more, packed, n, k, bits, group, dtype)


def _pack(codes: torch.Tensor, tile: int, bits: int) -> torch.Tensor:
    """uint8 [rows, tiles * tile] -> int32 [blocks, tiles, 16, 4, words]."""
    pairs = 16 // bits
    # block, row, tile, word, pair, thread, half
    c = codes.view(len(codes) // 16, 16, -1, tile // (8 * pairs), pairs, 4, 2)
    out = torch.zeros((*c.shape[:4], 4), dtype=torch.int32, device=codes.device)
    for pair in range(pairs):
        for half in range(2):
            out |= c[:, :, :, :, pair, :, half].int() << (bits * pair + 16 * half)
    return out.permute(0, 2, 1, 4, 3).contiguous()


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [blocks, tiles, 16, 4, words] -> int32 [blocks, tiles, 16, tile], the reverse of ``_pack``."""
    pairs = 16 // bits
    at = torch.arange(pairs, device=words.device)[:, None] * bits + torch.tensor([0, 16], device=words.device)
    codes = (words[..., None, None] >> at.int()) & ((1 << bits) - 1)  # block, tile, row, thread, word, pair, half
    return codes.permute(0, 1, 2, 4, 5, 3, 6).flatten(3)


def _pack_third(bits: torch.Tensor) -> torch.Tensor:
    """uint8 [rows, tiles * 128], 0 or 1 -> int32 [blocks, tiles, 16, 4, 1]: a bit of every code of a thread."""
    # block, row, tile, word, pair // 4, pair % 4, thread, half
    b = bits.view(len(bits) // 16, 16, -1, 2, 2, 4, 4, 2).permute(0, 2, 1, 6, 7, 4, 3, 5).flatten(4).int()
    return (b << torch.arange(32, device=bits.device, dtype=torch.int32)).sum(-1, keepdim=True, dtype=torch.int32)


def _unpack_third(words: torch.Tensor) -> torch.Tensor:
    """The reverse of ``_pack_third``: int32 [blocks, tiles, 16, 4, 1] -> int32 [blocks, tiles, 16, 128]."""
    b = words >> torch.arange(32, device=words.device, dtype=torch.int32) & 1
    return b.unflatten(-1, (2, 2, 2, 4)).permute(0, 1, 2, 6, 5, 7, 3, 4).flatten(3)
