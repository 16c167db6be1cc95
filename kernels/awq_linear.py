"""W4A16: activations of 16 bits times weights of 4 (or 2, 3, 8) bits, whose groups share a scale and a zero point.

    y = x . w^T [+ bias],   w[r, k] = (code[r, k] - zero[r, k // group]) * scale[r, k // group]

At one row a product is the reading of its weights, and 4 bits are read 3.8 times as fast as 16. That holds only if
turning codes into numbers costs less than waiting for them: at 4.4 TB/s an H200's SM gets 36 weights a cycle and has
128 lanes. So a weight may take three operations, where shifting, masking, converting and subtracting take four or more.

**Codes become numbers without a conversion.** A bf16 from 128 to 256 has one unit in its last place: 0x4300 is 128, and
0x4300 | code is 128 + code. Two codes that lie 16 bits apart are masked and turned into two numbers by one logical
operation, and one addition of -(128 + zero), which is exact, leaves code - zero in both. fp16 has 0x6400 = 1024.

**Words hold what a thread multiplies.** The tensor cores' left operand of 16 bits gives thread t of four the columns
2 t, 2 t + 1, 2 t + 8, 2 t + 9 of every 16. w is that operand, with the rows of x as columns, and is repacked once, when
it is loaded: a word of a row and thread holds the codes of just those columns, and numbers go from its registers into
the product. Pair i of a word, columns 8 i + 2 t and + 1, lies in bits b i and 16 + b i.

    words  int32 [n / 16, k / TILE, 16, 4 threads, TILE / 4 codes]    TILE: 128 columns, or 64 or 32 where groups are
                                                                      so small
    scales int32 [n / 16, k / group, 16]    the scale as fp16 in the lower half, the zero point as bf16 in the upper

Sixteen rows lie together, since that is what a program reads: one run of memory, and not a piece in each of 32 places.

**The scale waits.** code - zero is exact in 16 bits, times the scale it is not. So the product of each group is summed
in fp32 and then scaled: w is multiplied as it was stored. With hundreds of rows of x that would take too many registers,
and there codes are scaled, and rounded, before the product.

One row is for ``kernels.awq_one_row``, up to 8 for ``kernels.awq_few_rows``, and here is the kernel for more. For many,
where arithmetic is what takes the time, there is ``kernels.awq_linear_hopper``; on other GPUs w is written out in 16 bits
and given to cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import awq_few_rows, awq_linear_hopper, awq_one_row
from kernels.launch import arch, shared_limit
from kernels.op import Case, Cost, Op, wide
from kernels.paged_cache import sm_count
from kernels.rms_norm import rms_norm_triton
from kernels.silu_mul import silu_mul_triton
from kernels.skinny_gemm import _counters

BITS = (2, 3, 4, 8)
PAD = 64  # rows of w come in multiples of it, so that no kernel has to ask where they end


# ------------------------------------------------------------------------------------------------------- weights


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
            codes += _unpack(self.more, 1) << 2
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
    """codes: uint8 [n, k]; scales: [n, k / group], values that fp16 holds; zeros: uint8 like scales, or None: 2^(bits-1).

    Raises ValueError for other bits or shapes, codes or zero points beyond the bits, scales beyond fp16, or groups that
    are neither a multiple of 32 nor a whole row.
    """
    if bits not in BITS or dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"awq_linear: codes of {BITS} bits for float16, bfloat16 or float32, got {bits} and {dtype}")
    if codes.dim() != 2 or scales.dim() != 2 or not codes.numel() or len(codes) != len(scales):
        raise ValueError(f"awq_linear: codes [n, k], scales [n, k / group]; got {list(codes.shape)}, {list(scales.shape)}")
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
    more = _pack(padded >> 2, tile, 1) if narrow == 2 and bits == 3 else None
    packed = torch.zeros((rows, groups), dtype=torch.int32, device=codes.device)
    zero = torch.full_like(scales, 2 ** (bits - 1)) if zeros is None else zeros
    packed[:n] = zero.float().view(torch.int32) | (scales.half().view(torch.int16).int() & 0xFFFF)
    packed = packed.view(-1, 16, groups).transpose(1, 2).contiguous()
    return PackedWeight(words, more, packed, n, k, bits, group, dtype)


def _pack(codes: torch.Tensor, tile: int, bits: int) -> torch.Tensor:
    """uint8 [rows, tiles * tile] -> int32 [blocks, tiles, 16, 4, words]."""
    pairs = 16 // bits
    c = codes.view(len(codes) // 16, 16, -1, tile // (8 * pairs), pairs, 4, 2)  # block, row, tile, word, pair, thread, half
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


# ------------------------------------------------------------------------------------------------------- reference


def awq_linear_reference(
    x, weight, *, bias=None, residual=None, eps=None, gamma=None, gated=False, out=None, **_
) -> torch.Tensor:
    """The definition, in at least fp32 and rounded once; arguments as for ``awq_linear``."""
    y = wide(x)
    if eps is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if gamma is not None:
        y = y * wide(gamma)
    y = y @ weight.dequantise(y.dtype).t()
    if bias is not None:
        y = y + wide(bias)
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    if residual is not None:
        y = y + wide(residual)
    return y.to(x.dtype) if out is None else out.copy_(y)


# ------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _numbers(
    words,  # int32 [R, 4, WORDS]
    third,  # alike: the third bits of the codes in each word, from bit 0 and bit 16 up
    ASM: tl.constexpr,  # of awq_few_rows.assembly; "": plain operations, for the interpreter
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
            at = tl.arange(0, 8)[:, None] + 16 * tl.arange(0, 2)[None, :]
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


@triton.jit
def _linear_kernel(
    x_ptr,  # [m, k], row stride stride_x
    words_ptr,  # int32 [blocks, tiles, 16, 4, WORDS]
    more_ptr,  # int32 [blocks, tiles, 16, 4, 1], or None
    scale_ptr,  # int32 [blocks, groups, 16]: scale and zero point
    bias_ptr,  # [n], or None
    out_ptr,  # [m, n]
    parts_ptr,  # fp32 [SPLITS, padded, columns of tiles * BLOCK_M]
    arrived_ptr,  # int32, zeros, and left as zeros
    m, n, k, padded, stride_x,
    BLOCK_N: tl.constexpr,  # rows of w
    BLOCK_M: tl.constexpr,  # rows of x
    TILE: tl.constexpr, WORDS: tl.constexpr, CODE: tl.constexpr, TILES_A_GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    RAGGED: tl.constexpr,  # the last tile is not full
    MAGIC: tl.constexpr,  # what the assembly adds to codes
    STAGES: tl.constexpr,
    ASM: tl.constexpr, TYPES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0) % SPLITS
    rows = tl.program_id(0) // SPLITS * BLOCK_N + tl.arange(0, BLOCK_N)
    cols = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    ks = tl.arange(0, TILE)
    threads = tl.arange(0, 4)
    of_thread = tl.arange(0, WORDS)
    tiles = tl.cdiv(k, TILE)
    at = ((rows // 16 * tiles * 16 + rows % 16)[:, None] * 4 + threads[None, :])[:, :, None]  # of tile 0
    words_at = words_ptr + at * WORDS + of_thread[None, None, :]
    if more_ptr is not None:
        more_at = more_ptr + at + tl.zeros_like(of_thread)[None, None, :]
    scale_at = scale_ptr + rows // 16 * tl.cdiv(tiles, TILES_A_GROUP) * 16 + rows % 16
    # Rows past m are the last one again; what becomes of them is not stored.
    x_at = x_ptr + tl.minimum(cols, m - 1).to(tl.int64)[None, :] * stride_x + ks[:, None]
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for tile in tl.range(tiles * split // SPLITS, tiles * (split + 1) // SPLITS, num_stages=STAGES):
        words = tl.load(words_at + tile * (16 * 4 * WORDS))
        scale = tl.load(scale_at + tile // TILES_A_GROUP * 16)
        if RAGGED:
            x = tl.load(x_at + tile * TILE, mask=(ks < k - tile * TILE)[:, None], other=0.0)
        else:
            x = tl.load(x_at + tile * TILE)
        if more_ptr is not None:
            third = tl.load(more_at + tile * (16 * 4)) >> (8 * of_thread)[None, None, :]
        else:
            third = words
        q = _numbers(words, third, ASM, TYPES, CODE, more_ptr is not None, BLOCK_N, TILE, WORDS, x.dtype)
        zero = (scale & -65536).to(tl.float32, bitcast=True) + MAGIC
        scale = scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        acc += tl.dot(q - zero.to(x.dtype)[:, None], x, input_precision="ieee") * scale[:, None]
    if SPLITS > 1:
        # As in kernels.skinny_gemm: the last part to arrive adds all of them up, in the order of the parts.
        wide_m = tl.num_programs(1) * BLOCK_M
        part_at = parts_ptr + rows.to(tl.int64)[:, None] * wide_m + cols[None, :]
        tl.store(part_at + split * padded * wide_m, acc)
        tl.debug_barrier()
        counter = arrived_ptr + tl.program_id(0) // SPLITS * tl.num_programs(1) + tl.program_id(1)
        arrived = tl.atomic_add(counter, 1, sem="acq_rel")
        if arrived < SPLITS - 1:
            return
        tl.debug_barrier()
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for i in tl.static_range(SPLITS):
            acc += tl.load(part_at + i * padded * wide_m, cache_modifier=".cg")
        tl.store(counter, 0)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)[:, None]
    out_at = out_ptr + cols.to(tl.int64)[None, :] * n + rows[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(rows < n)[:, None] & (cols < m)[None, :])


@triton.jit
def _write_out_kernel(
    words_ptr, more_ptr, scale_ptr,  # as above
    out_ptr,  # [n, k]
    n, k,
    BLOCK_N: tl.constexpr, TILE: tl.constexpr, WORDS: tl.constexpr, CODE: tl.constexpr, TILES_A_GROUP: tl.constexpr,
    ASM: tl.constexpr, TYPES: tl.constexpr, MAGIC: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    tile = tl.program_id(1)
    threads = tl.arange(0, 4)
    of_thread = tl.arange(0, WORDS)
    tiles = tl.num_programs(1)
    at = ((rows // 16 * tiles + tile) * 16 + rows % 16)[:, None] * 4 + threads[None, :]
    words = tl.load(words_ptr + at[:, :, None] * WORDS + of_thread[None, None, :])
    if more_ptr is not None:
        third = tl.load(more_ptr + at[:, :, None] + tl.zeros_like(of_thread)[None, None, :])
        third = third >> (8 * of_thread)[None, None, :]
    else:
        third = words
    scale = tl.load(
        scale_ptr + (rows // 16 * tl.cdiv(tiles, TILES_A_GROUP) + tile // TILES_A_GROUP) * 16 + rows % 16
    )
    dtype = out_ptr.dtype.element_ty
    q = _numbers(words, third, ASM, TYPES, CODE, more_ptr is not None, BLOCK_N, TILE, WORDS, dtype).to(tl.float32)
    q -= ((scale & -65536).to(tl.float32, bitcast=True) + MAGIC)[:, None]
    q *= scale.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)[:, None]
    ks = tile * TILE + tl.arange(0, TILE)
    at = out_ptr + rows.to(tl.int64)[:, None] * k + ks[None, :]
    tl.store(at, q.to(dtype), mask=(rows < n)[:, None] & (ks < k)[None, :])


# ------------------------------------------------------------------------------------------------------- launch


@dataclass(frozen=True)
class Launch:
    block_n: int
    block_m: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, tile: int, bits: int) -> int:
        """Upper bound: the pipeline's copies of x, of words and of scales."""
        return self.num_stages * (2 * tile * self.block_m + self.block_n * (tile * bits // 8 + 8))


# By the most rows of x: for w of fewer than WIDE rows, and of more. On an H200, 4 bits, microseconds and cuBLAS's on 16
# bits: 16 rows 9.5 and 13.4 (4096 x 4096), 18.2 and 32.1 (4096 x 14336), 25.7 and 56 (28672 x 4096); 64 rows 12.5 and
# 11.6, 26 and 36, 38.5 and 60.7.
WIDE = 8192
LAUNCH = {
    16: (Launch(64, 16, 4, 4), Launch(128, 16, 8, 4)),
    32: (Launch(64, 32, 4, 4), Launch(64, 32, 4, 4)),
    64: (Launch(64, 64, 4, 4), Launch(128, 64, 4, 3)),
    128: (Launch(128, 64, 4, 3), Launch(128, 64, 4, 3)),
}
MANY = 128  # rows of x beyond which arithmetic takes the time


def launch_of(m: int, n: int) -> Launch:
    return next((LAUNCH[most] for most in LAUNCH if m <= most), LAUNCH[128])[n >= WIDE]


def write_out(weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """What the codes stand for, in the weight's dtype -> [n, k]."""
    w = weight
    out = torch.empty((w.n, w.k), dtype=w.dtype, device=w.device) if out is None else out
    block = 32
    _write_out_kernel[(triton.cdiv(w.n, block), w.words.shape[1])](
        w.words, w.more, w.scales, out, w.n, w.k,
        BLOCK_N=block, TILE=w.tile, num_warps=4, **_settings(w, w.device),
    )  # fmt: skip
    return out


def _settings(w: PackedWeight, device: torch.device) -> dict:
    code = 2 if w.more is not None else w.stored_bits
    compiled = device.type == "cuda"
    return {
        "WORDS": w.words.shape[-1], "CODE": code, "TILES_A_GROUP": -(-w.group // w.tile),
        "ASM": awq_few_rows.assembly(w.stored_bits, w.dtype) if compiled else "",
        "TYPES": awq_few_rows.types_of(w.stored_bits, w.dtype) if compiled else None,
        "MAGIC": awq_few_rows.magic_of(w.stored_bits, w.dtype) if compiled else 0,
    }  # fmt: skip


def splits_of(tiles_n: int, tiles_m: int, tiles_k: int, launch: Launch, shared: int, device: torch.device) -> int:
    """Parts of k, a power of two: as many as still run all at once, each of at least two tiles."""
    resident = sm_count(device) * max(1, min((shared_limit(device) + 1024) // (shared + 1024), 16 // launch.num_warps))
    splits = 1
    while tiles_n * tiles_m * splits * 2 <= resident and splits * 4 <= tiles_k and splits < 8:
        splits *= 2
    return splits


def awq_linear_triton(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float | None = None,
    gamma: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    splits: int | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """x: [m, k], rows of any stride; bias: [n] -> [m, n], or [m, n / 2] if gated (weight holds gate, then up).

    residual: [m, n], added; out may be the same tensor. eps: rows of x are normalised first, with gamma [k] if given.
    Up to ``awq_few_rows.MAX_ROWS`` rows they cost no
    launch of their own. splits, launch: instead of ``splits_of`` and ``launch_of``.
    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    _check(x, weight)
    fused = residual is not None or eps is not None or gamma is not None or gated
    m, n = x.shape[0], weight.n // (1 + gated)
    others = ("bias", bias, (weight.n,)), ("residual", residual, (m, n)), ("gamma", gamma, (weight.k,)), ("out", out, (m, n))
    for name, t, shape in others:
        if t is not None and (t.shape != shape or t.dtype != x.dtype or t.device != x.device or not t.is_contiguous()):
            raise ValueError(
                f"awq_linear: {name} must be contiguous {x.dtype} {list(shape)} on {x.device}, "
                f"got {t.dtype} {list(t.shape)} with strides {t.stride()} on {t.device}"
            )
    if gated and weight.n % 2:
        raise ValueError(f"awq_linear: a gated weight holds gate and up, an even number of rows; got {weight.n}")
    out = torch.empty((m, n), device=x.device, dtype=x.dtype) if out is None else out
    if not m:
        return out
    if x.is_cuda and launch is None and awq_one_row.takes(x, weight, gated):
        return awq_one_row.one_row(x, weight, bias, residual, eps, gamma, gated, out)
    if x.is_cuda and launch is None and awq_few_rows.takes(x, weight, gated):
        return awq_few_rows.few_rows(x, weight, bias, residual, eps, gamma, gated, out)
    if fused:
        return _one_by_one(x, weight, bias, residual, eps, gamma, gated, out)
    if launch is None and x.is_cuda and (m > MANY or (m > 64 and weight.n >= 2 * WIDE)):
        if awq_linear_hopper.takes(x, weight):
            return awq_linear_hopper.awq_linear_hopper(x, weight, bias, out)
        if m > MANY:
            w = write_out(weight)
            return torch.mm(x, w.t(), out=out) if bias is None else torch.addmm(bias, x, w.t(), out=out)
    t, w = launch or launch_of(m, weight.n), weight
    padded, tiles = 16 * w.words.shape[0], w.words.shape[1]
    grid = triton.cdiv(w.n, t.block_n), triton.cdiv(m, t.block_m)
    if splits is None:
        splits = splits_of(*grid, tiles, t, t.shared_bytes(w.tile, w.stored_bits), x.device) if x.is_cuda else 1
    parts = arrived = out
    if splits > 1:
        parts = torch.empty(splits * padded * grid[1] * t.block_m, device=x.device, dtype=torch.float32)
        arrived = _counters(grid[0] * grid[1], x.device)
    overlap = x.is_cuda and arch(x.device) >= 90
    _linear_kernel[(grid[0] * splits, grid[1])](
        x, w.words, w.more, w.scales, bias, out, parts, arrived, m, n, w.k, padded, x.stride(0),
        BLOCK_N=t.block_n, BLOCK_M=t.block_m, TILE=w.tile, SPLITS=splits, RAGGED=w.k % w.tile > 0,
        STAGES=t.num_stages, OVERLAP=overlap, **_settings(w, x.device),
        num_warps=t.num_warps, launch_pdl=overlap,
    )  # fmt: skip
    return out


def _one_by_one(x, weight, bias, residual, eps, gamma, gated, out) -> torch.Tensor:
    """Where nothing is fused: the norm, the product and what follows it as kernels of their own."""
    if eps is not None:
        x = rms_norm_triton(x.contiguous(), torch.ones_like(x[0]) if gamma is None else gamma, eps)
    elif gamma is not None:
        x = x * gamma
    y = awq_linear_triton(x, weight, bias=bias)
    y = silu_mul_triton(y) if gated else y
    return out.copy_(y) if residual is None else torch.add(y, residual, out=out)


def _check(x: torch.Tensor, weight: PackedWeight) -> None:
    if x.dim() != 2 or x.shape[1] != weight.k:
        raise ValueError(f"awq_linear: x must be [m, {weight.k}] for a weight {list(weight.shape)}, got {list(x.shape)}")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(
            f"awq_linear: x must be {weight.dtype} on {weight.device} as the weight is, got {x.dtype} on {x.device}"
        )
    if x.is_cuda and x.dtype == torch.float32:
        raise ValueError("awq_linear: on a GPU x must be float16 or bfloat16, got torch.float32")
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"awq_linear: x's columns must be contiguous (stride 1), got stride {x.stride(1)}")


def awq_linear_cost(x, weight, *, bias=None, residual=None, gated=False, **_) -> Cost:
    """Codes, scales and zero points once, x and y once; a multiplication and an addition for each weight and row."""
    w, m = weight, x.shape[0]
    stored = w.n * w.k * w.bits // 8 + w.n * (w.k // w.group) * (16 + w.bits) // 8
    others = m * (w.k + w.n // (1 + gated)) + sum(t.numel() for t in (bias, residual) if t is not None)
    return Cost(bytes=stored + others * x.element_size(), flops=2 * m * w.n * w.k)


def awq_linear(x: torch.Tensor, weight: PackedWeight, **options) -> torch.Tensor:
    """``awq_linear_triton`` on a GPU, the definition elsewhere; arguments as there."""
    if x.is_cuda:
        return awq_linear_triton(x, weight, **options)
    _check(x, weight)
    return awq_linear_reference(x, weight, **options)


def _case(name: str, m: int, n: int, k: int, bits: int = 4, group: int = 128, scale: float = 1.0, *more: str, **options):
    """``more``: bias, residual, gamma; "symmetric": no zero points."""

    def make(device, dtype, generator):
        def random(*shape):
            return torch.randn(shape, generator=generator).to(device, dtype)

        groups = k // group if group > 0 else 1
        codes, zeros = (torch.randint(1 << bits, (n, c), generator=generator, dtype=torch.uint8) for c in (k, groups))
        scales = (torch.rand((n, groups), generator=generator) + 0.5) / (2**bits * k**0.5)
        packed = repack(codes.to(device), scales.to(device), None if "symmetric" in more else zeros.to(device), bits, dtype)
        inputs = {"x": (random(m, k).float() * scale).to(dtype), "weight": packed}
        columns = n // 2 if options.get("gated") else n
        for name, shape in (("bias", (n,)), ("residual", (m, columns)), ("gamma", (k,))):
            if name in more:
                inputs[name] = random(*shape)
        return {**inputs, **options}

    return Case(name, make)


OP = Op(
    name="awq_linear",
    reference=awq_linear_reference,
    triton=awq_linear_triton,
    cost=awq_linear_cost,
    cases=(
        _case("one row", 1, 64, 128),
        _case("ragged rows", 3, 70, 256),
        _case("split", 17, 130, 1024, splits=4),
        _case("more rows than a tile, biased", 40, 72, 256, 4, 128, 1.0, "bias"),
        _case("130 rows", 130, 72, 128),
        _case("groups of 64", 2, 72, 576, 4, 64),
        _case("groups of 32, symmetric", 5, 24, 96, 4, 32, 1.0, "symmetric"),
        _case("groups of 256", 4, 40, 512, 4, 256),
        _case("a group a row, 72 columns", 2, 24, 72, 4, -1),
        _case("8 bits", 9, 72, 384, 8),
        _case("8 bits, groups of 32", 2, 16, 64, 8, 32),
        _case("3 bits", 9, 72, 384, 3),
        _case("3 bits, groups of 64", 2, 24, 128, 3, 64),
        _case("2 bits", 9, 72, 384, 2),
        _case("2 bits, groups of 64", 2, 24, 128, 2, 64),
        _case("large values", 3, 24, 256, 4, 128, 300.0),
    ),
    dtypes=(torch.float16, torch.bfloat16),
)

FUSED = Op(
    name="awq_linear_fused",
    reference=awq_linear_reference,
    triton=awq_linear_triton,
    cost=awq_linear_cost,
    cases=(
        _case("normalised", 1, 72, 1152, eps=1e-5),
        _case("normalised, with its weight, 8 rows", 8, 72, 512, 4, 128, 1.0, "gamma", eps=1e-5),
        _case("squares overflow fp16, not fp32", 2, 24, 640, 4, 128, 300.0, eps=1e-6),
        _case("gated", 3, 144, 1152, gated=True),
        _case("gated, 3 of one row of blocks", 1, 96, 640, gated=True),
        _case("gated, with all", 1, 104, 5120, 4, 128, 1.0, "bias", "residual", "gamma", eps=1e-5, gated=True),
        _case("residual, 14 tiles a warp", 8, 40, 14336, 4, 128, 1.0, "residual"),
        _case("3 bits, gated", 1, 48, 512, 3, 128, 1.0, "gamma", eps=1e-5, gated=True),
        _case("2 bits, residual", 5, 40, 512, 2, 64, 1.0, "residual"),
        _case("8 bits, gated", 2, 48, 512, 8, 64, gated=True),
    ),
    interpreted=False,
    dtypes=(torch.float16, torch.bfloat16),
)
