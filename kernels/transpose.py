"""Transpose a matrix through shared memory, in Gluon, where the layout of every step is written out.

A warp reads global memory well along rows of x and writes it well along rows of out, which are columns of x. So a tile
goes through shared memory: stored by rows, loaded by columns. Shared memory has 32 banks of 4 bytes, and a warp's
access takes one pass (wavefront) for each different word it wants from the busiest bank. Three ways to lay out a tile:

    plain     row after row. A column of 32 fp32 lies in one bank: 32 wavefronts for an access instead of 1.
    padded    extra elements at the end of rows shift the next ones to other banks. Costs memory, and breaks the
              alignment that TMA and the tensor cores want.
    swizzled  element (r, c) lies at column c XOR f(r): no extra memory, and vectors stay whole.

Two tiles. "teaching" is 32 x 32 with one element a thread and access, the textbook's picture. Nsight Compute counts for
one fp32 tile on an H200: plain 1024 load wavefronts, 992 of them conflicts; padded and swizzled 32 and 0. "fast" moves
16 bytes a thread to and from global memory. With V elements in 16 bytes, a thread loads V rows of one column from
shared memory and the lanes of a warp stand V rows apart, so row r is swizzled by r / V, in units of V elements: 8 lanes
down the rows meet 8 different 16-byte chunks, which are all 32 banks.

    x [rows, cols], any row stride -> out [cols, rows]; fp32, fp16 or bf16; one read and one write an element
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from triton import cdiv
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.launch import DTYPES, fits, shared_limit, vector
from kernels.op import Case, Cost, Op

VARIANTS = ("plain", "padded", "swizzled")


@dataclass(frozen=True)
class Tile:
    """What a program moves. Sizes are in units of ``vec``, the elements a thread reads or writes at once."""

    rows_v: int
    cols_v: int
    num_warps: int
    wide: bool  # 16-byte global accesses; else one element
    group: int = 1  # tiles are taken column by column in bands of so many tile rows


# Measured on an H200, 16384 x 16384 bf16 and 8192 x 16384 fp32, as shares of torch's copy.
# fast: swizzled 0.93 and 0.94, padded the same, plain 0.73 and 0.90. Tiles of 8 x 8 vectors, 128-byte rows, get
# 0.89; 32 x 32, one program an SM, 0.79 and 0.67. 8 warps 0.91 and 0.93; 32 warps 0.93, but 0.75 in fp32. Bands of 16
# tile rows or of one make no difference that stands out from the noise (1 %).
# teaching: swizzled 0.72 and 0.89, padded 0.69 and 0.89, plain 0.37 and 0.41.
TILES = {
    "teaching": Tile(rows_v=32, cols_v=32, num_warps=4, wide=False),
    "fast": Tile(rows_v=16, cols_v=16, num_warps=16, wide=True, group=16),
}


def transpose_reference(x: torch.Tensor) -> torch.Tensor:
    """x: [rows, cols] -> [cols, rows], contiguous, the same bits."""
    return x.t().contiguous()


@gluon.jit(do_not_specialize=["rows", "cols", "x_stride_v", "out_stride_v", "tiles_m", "tiles_n"])
def _transpose_kernel(
    x_ptr,  # [rows, cols], row stride x_stride_v * VEC
    out_ptr,  # [cols, rows], row stride out_stride_v * VEC
    rows_v,  # rows / VEC
    cols_v,
    x_stride_v,
    out_stride_v,
    tiles_m,  # tiles down the rows, and along the columns
    tiles_n,
    VEC: gl.constexpr,  # divides rows, cols and strides
    M: gl.constexpr,  # rows and columns of a tile
    N: gl.constexpr,
    GROUP: gl.constexpr,
    READ: gl.constexpr,  # layout of the tile [M, N] in registers as it comes from x
    WRITE: gl.constexpr,  # layout of the tile [N, M] in registers as it goes to out
    SHARED: gl.constexpr,  # layout of the tile [M, N] in shared memory
):
    # bands of GROUP tile rows, column after column: neighbours in time are neighbours in x and in out
    pid = gl.program_id(0)
    band = pid // (GROUP * tiles_n)
    height = gl.minimum(tiles_m - band * GROUP, GROUP)
    inside = pid % (GROUP * tiles_n)
    m = (band * GROUP + inside % height) * M
    n = inside // height * N

    row = m + gl.arange(0, M, layout=gl.SliceLayout(1, READ))[:, None]
    col = n + gl.arange(0, N, layout=gl.SliceLayout(0, READ))[None, :]
    mask = (row < rows_v * VEC) & (col < cols_v * VEC)
    tile = gl.load(x_ptr + row.to(gl.int64) * (x_stride_v * VEC) + col, mask=mask)

    shared = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [M, N], SHARED)
    shared.store(tile)
    turned = shared.permute((1, 0)).load(WRITE)

    row = n + gl.arange(0, N, layout=gl.SliceLayout(1, WRITE))[:, None]
    col = m + gl.arange(0, M, layout=gl.SliceLayout(0, WRITE))[None, :]
    mask = (row < cols_v * VEC) & (col < rows_v * VEC)
    gl.store(out_ptr + row.to(gl.int64) * (out_stride_v * VEC) + col, turned, mask=mask)


@functools.cache
def layouts(variant: str, vec: int, m: int, n: int, num_warps: int) -> tuple:
    """(READ, WRITE, SHARED) for a tile of m x n elements and accesses of ``vec`` elements."""
    across = min(32, n // vec)  # lanes side by side along a row
    read = gl.BlockedLayout([1, vec], [32 // across, across], [num_warps, 1], [1, 0])
    across = min(32, m // vec) if vec == 1 else min(8, m // vec)
    write = gl.BlockedLayout([1, vec], [32 // across, across], [num_warps, 1], [1, 0])
    if variant == "padded":  # one access more after each vec rows: 8 such groups start in 8 different chunks
        shared = gl.PaddedSharedLayout.with_identity_for([[vec * n, vec]], [m, n], [1, 0])
    elif variant == "swizzled":
        shared = gl.SwizzledSharedLayout(vec=vec, per_phase=vec, max_phase=32 if vec == 1 else 8, order=[1, 0])
    else:
        shared = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
    return read, write, shared


def shared_bytes(variant: str, vec: int, m: int, n: int, element_size: int) -> int:
    """Bytes of shared memory that a tile takes."""
    return (m * n + (m * n // (vec * n) * vec if variant == "padded" else 0)) * element_size


def transpose_triton(
    x: torch.Tensor, out: torch.Tensor | None = None, variant: str = "swizzled", tile: str = "fast", **launch
) -> torch.Tensor:
    """x: [rows, cols], columns contiguous, any row stride -> [cols, rows], contiguous; to ``out`` if given.

    ``variant``: the layout in shared memory, one of ``VARIANTS``; ``tile``: one of ``TILES``, whose fields the keywords
    replace. Sizes and strides that are multiples of 16 bytes get 16-byte accesses. Raises ValueError for another rank,
    dtype, variant or tile, strided columns, an out that does not fit, or a tile too large for the GPU's shared memory.
    """
    if x.dim() != 2:
        raise ValueError(f"transpose: x must be [rows, cols], got shape {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"transpose: x must be float32, float16 or bfloat16, got {x.dtype}")
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"transpose: x's columns must be contiguous (stride 1), got stride {x.stride(1)}")
    if variant not in VARIANTS or tile not in TILES:
        raise ValueError(
            f"transpose: variant must be one of {', '.join(VARIANTS)} and tile one of {', '.join(TILES)}, "
            f"got {variant!r} and {tile!r}"
        )
    rows, cols = x.shape
    if out is None:
        out = torch.empty((cols, rows), device=x.device, dtype=x.dtype)
    elif out.shape != (cols, rows) or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise ValueError(
            f"transpose: out must be contiguous {(cols, rows)} {x.dtype} on {x.device}, "
            f"got {tuple(out.shape)} {out.dtype} on {out.device} with strides {out.stride()}"
        )
    if x.numel():
        t = replace(TILES[tile], **launch) if launch else TILES[tile]
        size = x.element_size()
        unit = 16 // size if t.wide else 1
        m, n = t.rows_v * unit, t.cols_v * unit
        vec = vector(size, rows, cols, x.stride(0)) if t.wide else 1
        if vec < unit:  # odd sizes: one element an access, whose lanes then lie side by side
            vec = 1
        need = shared_bytes(variant, vec, m, n, size)
        if not fits(need, x.device):
            raise ValueError(
                f"transpose: a {variant} tile of {m} x {n} needs {need} bytes of shared memory, a block on {x.device} "
                f"has {shared_limit(x.device)}; take a smaller tile"
            )
        read, write, shared = layouts(variant, vec, m, n, t.num_warps)
        tiles_m, tiles_n = cdiv(rows, m), cdiv(cols, n)
        _transpose_kernel[(tiles_m * tiles_n,)](
            x, out, rows // vec, cols // vec, x.stride(0) // vec, rows // vec, tiles_m, tiles_n,
            VEC=vec, M=m, N=n, GROUP=t.group, READ=read, WRITE=write, SHARED=shared, num_warps=t.num_warps,
        )  # fmt: skip
    return out


def transpose_cost(x: torch.Tensor) -> Cost:
    """One read and one write an element."""
    return Cost(bytes=2 * x.numel() * x.element_size(), flops=0)


def _case(name: str, rows: int, cols: int, slack: int = 0, **how) -> Case:
    """``slack`` extra columns make x a strided view; they hold NaN, which must not leak into the result."""

    def make(device, dtype, generator):
        x = torch.randn(rows, cols + slack, generator=generator)
        x[:, cols:] = float("nan")
        return {"x": x.to(device, dtype)[:, :cols], **how}

    return Case(name, make)


OP = Op(
    name="transpose",
    reference=transpose_reference,
    triton=transpose_triton,
    cost=transpose_cost,
    cases=(
        _case("one element", 1, 1),
        _case("no rows", 0, 5),
        _case("no columns", 5, 0),
        _case("one row", 1, 1000),
        _case("one column", 1000, 1),
        _case("whole tiles", 256, 128),
        _case("ragged, 16-byte accesses", 136, 264),
        _case("odd sizes", 129, 67),
        _case("more tiles down than a band", 1200, 72),
        _case("strided view", 64, 96, slack=3),
        _case("strided view, 16-byte accesses", 64, 96, slack=8),
    ),
    interpreted=False,
)
