"""x as the tensor cores' right operand, once for all programs of ``kernels.awq_small_batch``.

Every program multiplies all of x, and there are hundreds of them. What can be done to x beforehand is done here, by one
program a row: the norm's factor, its weight, the change to fp16, the sums over tiles, and an order of columns in which
a thread finds what it multiplies in pieces of 16 bytes, the pieces of a warp side by side.

fp16, because 4 bits become numbers of fp16 at 5 operations for 8 codes (``kernels.awq_small_batch``), and a bf16 fits
into fp16 but for its exponent: a row is multiplied by the power of two that brings its largest number to 2^14 up to
2^15, which is exact for all that is not below 2^-25 of the largest.

The thread of four t multiplies columns 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of every 16. In odd eights of columns codes come
as 1024 + 16 code, so x is divided by 16 there:

    operand fp16 [tiles, cols / 8, 4 words, 8 cols, 4 threads, 4 pairs, 2]    column 32 word + 8 pair + 2 thread + side
    sums    fp32 [tiles, 2, cols]    of a tile's columns: 1024 times what is stored, and x itself
    factor  fp32 [cols]              what a row's product is multiplied by in the end
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import arch

TILE = tl.constexpr(128)


@triton.jit
def _operand_kernel(
    x_ptr,  # [m, k], row stride stride_x
    gamma_ptr,  # [k], or None
    operand_ptr, sums_ptr, factor_ptr,  # as above
    k, tiles, stride_x,
    eps,
    NORM: tl.constexpr, COLS: tl.constexpr,
    BLOCK: tl.constexpr,  # tiles taken at a time
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # they may ask for their first weights
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    ks = tl.arange(0, BLOCK * TILE)
    x_at = x_ptr + row.to(tl.int64) * stride_x + ks
    largest = tl.zeros([BLOCK * TILE], tl.float32)
    squares = tl.zeros([BLOCK * TILE], tl.float32)
    for first in range(0, tiles, BLOCK):
        inside = ks < k - first * TILE
        x = tl.load(x_at + first * TILE, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
        if gamma_ptr is not None:
            x *= tl.load(gamma_ptr + first * TILE + ks, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    # The exponent of the largest, less 14, is that of the factor; 254 less that is the exponent of 1 / factor.
    largest = tl.maximum(tl.max(largest, 0), 1e-30)
    exponent = (largest.to(tl.int32, bitcast=True) & 0x7F800000) - 0x07000000
    factor = exponent.to(tl.float32, bitcast=True)
    shrink = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    if NORM:
        factor *= tl.rsqrt(tl.sum(squares, 0) / k + eps)
    tl.store(factor_ptr + row, factor)

    odd = (ks & 8) > 0
    tile = tl.arange(0, BLOCK)
    word = tl.arange(0, BLOCK * 4)
    at = ((word // 4 * (COLS // 8) + row // 8) * 4 + word % 4) * 256 + row % 8 * 32
    at = (at[:, None] + tl.arange(0, 4)[None, :] * 8)[:, :, None] + tl.arange(0, 8)[None, None, :]
    for first in range(0, tiles, BLOCK):
        inside = ks < k - first * TILE
        x = tl.load(x_at + first * TILE, mask=inside, other=0.0).to(tl.float32)
        if gamma_ptr is not None:
            x *= tl.load(gamma_ptr + first * TILE + ks, mask=inside, other=0.0).to(tl.float32)
        q = (x * tl.where(odd, shrink / 16, shrink)).to(tl.float16)
        stored = q.to(tl.float32)
        sums_at = sums_ptr + (first + tile) * (2 * COLS) + row
        some = first + tile < tiles
        tl.store(sums_at, tl.sum(stored.reshape(BLOCK, TILE), 1) * 1024, mask=some)
        tl.store(sums_at + COLS, tl.sum((stored * tl.where(odd, 16.0, 1.0)).reshape(BLOCK, TILE), 1), mask=some)
        # tile and word, pair, thread, side -> thread, pair, side
        q = q.reshape(BLOCK * 4, 4, 4, 2).permute(0, 2, 1, 3).reshape(BLOCK * 4, 4, 8)
        tl.store(operand_ptr + first * (TILE * COLS) + at, q, mask=(first + word // 4 < tiles)[:, None, None])


def operand(
    x: torch.Tensor, tiles: int, cols: int, eps: float | None, gamma: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x: [m, k], m no more than cols (a multiple of 8) -> (operand, sums, factor) as above, of so many tiles.

    Tiles past k hold zeros; of the columns past m nothing is written. eps: rows are normalised, gamma [k] multiplied.
    """
    (m, k), device, overlap = x.shape, x.device, arch(x.device) >= 90
    packed = torch.empty((tiles, cols // 8, 4, 8, 4, 4, 2), device=device, dtype=torch.float16)
    sums = torch.empty((tiles, 2, cols), device=device, dtype=torch.float32)
    factor = torch.empty(cols, device=device, dtype=torch.float32)
    _operand_kernel[(m,)](
        x, gamma, packed, sums, factor, k, tiles, x.stride(0), 0.0 if eps is None else eps, NORM=eps is not None,
        COLS=cols, BLOCK=min(32, triton.next_power_of_2(tiles)), OVERLAP=overlap, num_warps=16, launch_pdl=overlap,
    )  # fmt: skip
    return packed, sums, factor
