"""Access patterns made visible: a strided read of global memory, and a tile turned over and over in shared memory.

Neither computes anything useful. Each does one kind of access so often that its cost is all there is to see.

    strided  out[i] = x[i * stride]        a warp's 32 lanes read words that lie ``stride`` words apart
    turn     a 32 x 32 tile is transposed in shared memory ``turns`` times, then stored

``strided`` moves 4 bytes an element for the result, and for the read as many 32-byte sectors as the lanes touch: with a
stride of 8 words or more that is one sector a lane, 8 times the bytes that are used. ``turn`` reads columns and writes
rows of the tile; with the tile laid out row after row, all 32 words of a column lie in one bank.

Both are written in Gluon, because the point is which lane touches which address, and there the layout says so.
"""

from __future__ import annotations

import torch
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.op import Case, Cost, Op
from kernels.transpose import VARIANTS, layouts

BLOCK = 1024  # elements a program of `strided` reads
SIDE = 32  # rows and columns of a tile of `turn`
NUM_WARPS = 4


def strided_reference(x: torch.Tensor, stride: int) -> torch.Tensor:
    """x: [n * stride] -> [n], every stride-th element."""
    return x[::stride].clone()


@gluon.jit
def _strided_kernel(
    x_ptr,  # [n * stride], fp32
    out_ptr,  # [n]
    n,
    stride,
    BLOCK: gl.constexpr,
    LANES: gl.constexpr,  # one element a lane: lane i of a warp has element i
):
    i = gl.program_id(0).to(gl.int64) * BLOCK + gl.arange(0, BLOCK, layout=LANES)
    gl.store(out_ptr + i, gl.load(x_ptr + i * stride, mask=i < n), mask=i < n)


def strided_gluon(x: torch.Tensor, stride: int) -> torch.Tensor:
    """x: [n * stride] fp32, contiguous -> [n]. Raises ValueError for another rank or dtype, or a stride below 1."""
    if x.dim() != 1 or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"strided: x must be 1-D, contiguous and float32, got {tuple(x.shape)} {x.dtype}")
    if stride < 1:
        raise ValueError(f"strided: stride must be at least 1, got {stride}")
    n = cdiv(x.numel(), stride)
    out = torch.empty(n, device=x.device)
    if n:
        lanes = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
        _strided_kernel[(cdiv(n, BLOCK),)](x, out, n, stride, BLOCK=BLOCK, LANES=lanes, num_warps=NUM_WARPS)
    return out


def strided_cost(x: torch.Tensor, stride: int) -> Cost:
    """The elements that are used, read and written."""
    return Cost(bytes=8 * cdiv(x.numel(), stride), flops=0)


def turn_reference(x: torch.Tensor, turns: int, variant: str = "plain") -> torch.Tensor:
    """x: [tiles, 32, 32] -> each tile transposed ``turns`` times: itself if turns is even."""
    return (x.transpose(1, 2) if turns % 2 else x).contiguous()


@gluon.jit(do_not_specialize=["turns"])
def _turn_kernel(
    x_ptr,  # [tiles, SIDE, SIDE], fp32
    out_ptr,  # the same
    turns,
    SIDE: gl.constexpr,
    TILE: gl.constexpr,  # layout of the tile in registers: a warp's 32 lanes along a row
    SHARED: gl.constexpr,  # layout in shared memory
):
    row = gl.arange(0, SIDE, layout=gl.SliceLayout(1, TILE))[:, None]
    col = gl.arange(0, SIDE, layout=gl.SliceLayout(0, TILE))[None, :]
    at = gl.program_id(0).to(gl.int64) * (SIDE * SIDE) + row * SIDE + col
    tile = gl.load(x_ptr + at)
    shared = gl.allocate_shared_memory(gl.float32, [SIDE, SIDE], SHARED)
    for _ in range(turns):  # every turn depends on the one before, so none can be dropped or overlapped
        shared.store(tile)
        tile = shared.permute((1, 0)).load(TILE)
    gl.store(out_ptr + at, tile)


def turn_gluon(x: torch.Tensor, turns: int, variant: str = "plain") -> torch.Tensor:
    """x: [tiles, 32, 32] fp32, contiguous -> the same shape. ``variant``: the tile's layout, see kernels.transpose.

    Raises ValueError for another shape or dtype, a negative number of turns, or an unknown variant.
    """
    if x.dim() != 3 or x.shape[1:] != (SIDE, SIDE) or x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(f"turn: x must be [tiles, 32, 32], contiguous and float32, got {tuple(x.shape)} {x.dtype}")
    if turns < 0 or variant not in VARIANTS:
        raise ValueError(f"turn: turns must be at least 0, variant one of {VARIANTS}, got {turns} and {variant!r}")
    out = torch.empty_like(x)
    if x.numel():
        tile, _, shared = layouts(variant, 1, SIDE, SIDE, NUM_WARPS)
        _turn_kernel[(x.shape[0],)](x, out, turns, SIDE=SIDE, TILE=tile, SHARED=shared, num_warps=NUM_WARPS)
    return out


def turn_cost(x: torch.Tensor, turns: int, variant: str = "plain") -> Cost:
    """Device memory sees one read and one write, however often the tile is turned."""
    return Cost(bytes=2 * x.numel() * 4, flops=0)


def _strided(name: str, n: int, stride: int) -> Case:
    return Case(name, lambda device, dtype, g: {"x": torch.randn(n, generator=g).to(device, dtype), "stride": stride})


def _turn(variant: str, turns: int) -> Case:
    def make(device, dtype, generator):
        return {
            "x": torch.randn(5, SIDE, SIDE, generator=generator).to(device, dtype),
            "turns": turns,
            "variant": variant,
        }

    return Case(f"{variant}, {turns} turns", make)


STRIDED = Op(
    name="strided",
    reference=strided_reference,
    triton=strided_gluon,
    cost=strided_cost,
    cases=(_strided("contiguous", 5000, 1), _strided("every third", 5000, 3), _strided("one element", 1, 8)),
    dtypes=(torch.float32,),
    interpreted=False,
)
TURN = Op(
    name="turn",
    reference=turn_reference,
    triton=turn_gluon,
    cost=turn_cost,
    cases=tuple(_turn(variant, turns) for variant in VARIANTS for turns in (0, 1, 2, 7)),
    dtypes=(torch.float32,),
    interpreted=False,
)
