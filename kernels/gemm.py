"""The matrix product in four levels, each the same arithmetic with less waiting.

    naive       an output tile a program, one k at a time: a column of a times a row of b. No tensor cores, and every
                step waits for its loads.
    tiled       K in steps of BLOCK_K: tl.dot puts the step on the tensor cores.
    pipelined   the same code with num_stages copies of the tiles in shared memory: loads of later steps are under way
                while this one multiplies. Programs take tiles in groups, so that neighbours share tiles in L2.
    persistent  one program an SM takes one tile after the other; tiles come by tensor descriptors (on sm_90 and later
                the TMA unit fetches them), and a tile's store overlaps the next one's loads.

    a [m, k] @ b [k, n] -> c [m, n], accumulated in fp32. 2 m n k FLOPs; at least the three matrices move once.

A tile of BLOCK_M x BLOCK_N reads BLOCK_M + BLOCK_N values for each k and does 2 BLOCK_M BLOCK_N FLOPs with them: at
128 x 256 in 16 bits that is 85 FLOP for each byte from L2, and the larger the tile, the better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launch import DTYPES, fits, shared_limit
from kernels.op import Case, Cost, Op, wide


@dataclass(frozen=True)
class Launch:
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 1  # rows of tiles that are taken together, column after column

    def shared_bytes(self, element_size: int) -> int:
        """Shared memory for the pipeline's copies of both tiles."""
        return self.num_stages * (self.block_m + self.block_n) * self.block_k * element_size


# A larger tile re-reads less from L2, more stages hide more latency, and both live in shared memory: the first that
# fits the GPU is taken. 8 warps are two warpgroups of 64 rows each on sm_90.
LEVELS = {
    "naive": (Launch(32, 32, 1, 4, 1),),
    "tiled": (Launch(128, 128, 32, 8, 1),),
    "pipelined": (Launch(128, 256, 64, 8, 3, 8), Launch(128, 128, 32, 8, 3, 8), Launch(64, 64, 32, 4, 2, 8)),
    "persistent": (Launch(128, 256, 64, 8, 3, 8), Launch(128, 128, 32, 8, 3, 8), Launch(64, 64, 32, 4, 2, 8)),
}


def gemm_reference(a: torch.Tensor, b: torch.Tensor, level: str = "pipelined") -> torch.Tensor:
    """a: [m, k], b: [k, n] -> [m, n], accumulated in at least fp32, rounded to a's dtype."""
    return (wide(a) @ wide(b)).to(a.dtype)


@triton.jit
def place(pid, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """The tile (row, column) of program pid: bands of GROUP tile rows, each band column after column."""
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    band = pid // (GROUP * tiles_n)
    height = tl.minimum(tiles_m - band * GROUP, GROUP)
    inside = pid % (GROUP * tiles_n)
    return band * GROUP + inside % height, inside // height


@triton.jit
def _naive_kernel(
    a_ptr,  # [m, k], row stride stride_am
    b_ptr,  # [k, n], row stride stride_bk
    c_ptr,  # [m, n], contiguous
    m, n, k,
    stride_am, stride_bk,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in range(0, k):
        a = tl.load(a_ptr + rows * stride_am + i, mask=rows < m, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + i * stride_bk + cols, mask=cols < n, other=0.0).to(tl.float32)
        acc += a[:, None] * b[None, :]
    at = c_ptr + rows[:, None] * n + cols[None, :]
    tl.store(at, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < m) & (cols[None, :] < n))


@triton.jit
def _tiled_kernel(
    a_ptr,  # [m, k], row stride stride_am
    b_ptr,  # [k, n], row stride stride_bk
    c_ptr,  # [m, n], contiguous
    m, n, k,
    stride_am, stride_bk,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,  # "ieee" for fp32, whose default would be TF32
):  # fmt: skip
    tile_m, tile_n = place(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP)
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    a_at = a_ptr + rows[:, None] * stride_am + ks[None, :]
    b_at = b_ptr + ks[:, None].to(tl.int64) * stride_bk + cols[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        a = tl.load(a_at, mask=(rows[:, None] < m) & (ks[None, :] < k - start), other=0.0)
        b = tl.load(b_at, mask=(ks[:, None] < k - start) & (cols[None, :] < n), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_at += BLOCK_K
        b_at += BLOCK_K * stride_bk
    at = c_ptr + rows[:, None] * n + cols[None, :]
    tl.store(at, acc.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < m) & (cols[None, :] < n))


@triton.jit
def _persistent_kernel(
    a_desc,  # tiles [BLOCK_M, BLOCK_K] of a [m, k]
    b_desc,  # tiles [BLOCK_K, BLOCK_N] of b [k, n]
    c_desc,  # tiles [BLOCK_M, BLOCK_N] of c [m, n]
    m, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    for pid in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile_m, tile_n = place(pid, m, n, BLOCK_M, BLOCK_N, GROUP)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, k, BLOCK_K):  # a descriptor fills what lies outside its matrix with zeros
            a = a_desc.load([tile_m * BLOCK_M, start])
            b = b_desc.load([start, tile_n * BLOCK_N])
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        c_desc.store([tile_m * BLOCK_M, tile_n * BLOCK_N], acc.to(c_desc.dtype))


def _check(a: torch.Tensor, b: torch.Tensor, level: str) -> None:
    for name, t in (("a", a), ("b", b)):
        if t.dim() != 2:
            raise ValueError(f"gemm: {name} must be a matrix, got shape {tuple(t.shape)}")
        if t.dtype not in DTYPES or t.dtype != a.dtype or t.device != a.device:
            raise ValueError(
                f"gemm: a and b must both be float32, float16 or bfloat16 on one device, "
                f"got {a.dtype} on {a.device} and {b.dtype} on {b.device}"
            )
        if t.stride(1) != 1 and t.shape[1] > 1:
            raise ValueError(f"gemm: {name}'s columns must be contiguous (stride 1), got stride {t.stride(1)}")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"gemm: a has {a.shape[1]} columns and b {b.shape[0]} rows; they must be equal")
    if level not in LEVELS:
        raise ValueError(f"gemm: level must be one of {', '.join(LEVELS)}, got {level!r}")


def launch_for(level: str, element_size: int, device: torch.device) -> Launch:
    """The first setting of ``level`` that fits the device. Raises ValueError if none does."""
    for launch in LEVELS[level]:
        if fits(launch.shared_bytes(element_size), device):
            return launch
    need = min(launch.shared_bytes(element_size) for launch in LEVELS[level])
    raise ValueError(
        f"gemm: the smallest {level} tile needs {need} bytes of shared memory, {device} has {shared_limit(device)}"
    )


def gemm_triton(a: torch.Tensor, b: torch.Tensor, level: str = "pipelined") -> torch.Tensor:
    """a: [m, k], b: [k, n], columns contiguous, any row strides -> [m, n]. ``level``: one of ``LEVELS``.

    Raises ValueError for tensors that do not fit together, strided columns, an unknown level, or, at level persistent,
    rows that do not start at multiples of 16 bytes, which tensor descriptors need.
    """
    _check(a, b, level)
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    if not c.numel() or not k:
        return c.zero_()
    t = launch_for(level, a.element_size(), a.device)
    precision = "ieee" if a.dtype == torch.float32 else "tf32"
    blocks = {"BLOCK_M": t.block_m, "BLOCK_N": t.block_n}
    options = {"num_warps": t.num_warps, "num_stages": t.num_stages}
    if level == "naive":
        grid = (triton.cdiv(m, t.block_m), triton.cdiv(n, t.block_n))
        _naive_kernel[grid](a, b, c, m, n, k, a.stride(0), b.stride(0), **blocks, **options)
        return c
    blocks |= {"BLOCK_K": t.block_k, "GROUP": t.group, "PRECISION": precision}
    tiles = triton.cdiv(m, t.block_m) * triton.cdiv(n, t.block_n)
    if level == "persistent":
        for name, matrix in (("a", a), ("b", b), ("c", c)):
            if matrix.stride(0) * matrix.element_size() % 16 or matrix.data_ptr() % 16:
                raise ValueError(
                    f"gemm: at level persistent, {name}'s rows must start at multiples of 16 bytes; "
                    f"got a row stride of {matrix.stride(0)} elements of {matrix.element_size()} bytes"
                )
        descriptors = [
            TensorDescriptor.from_tensor(a, [t.block_m, t.block_k]),
            TensorDescriptor.from_tensor(b, [t.block_k, t.block_n]),
            TensorDescriptor.from_tensor(c, [t.block_m, t.block_n]),
        ]
        sms = torch.cuda.get_device_properties(a.device).multi_processor_count if a.is_cuda else 2
        _persistent_kernel[(min(sms, tiles),)](*descriptors, m, n, k, **blocks, **options)
    else:
        _tiled_kernel[(tiles,)](a, b, c, m, n, k, a.stride(0), b.stride(0), **blocks, **options)
    return c


def gemm_cost(a: torch.Tensor, b: torch.Tensor, level: str = "pipelined") -> Cost:
    """Each matrix once; a multiplication and an addition for each of the m n k pairs."""
    (m, k), n = a.shape, b.shape[1]
    return Cost(bytes=(m * k + k * n + m * n) * a.element_size(), flops=2 * m * n * k)


def _case(name: str, level: str, m: int, n: int, k: int, slack: int = 0) -> Case:
    """``slack`` extra columns make both operands strided views; they hold NaN, which must not leak."""

    def make(device, dtype, generator):
        a = torch.randn(m, k + slack, generator=generator)
        b = torch.randn(k, n + slack, generator=generator)
        a[:, k:] = b[:, n:] = float("nan")
        return {"a": a.to(device, dtype)[:, :k], "b": b.to(device, dtype)[:, :n], "level": level}

    return Case(f"{level}: {name}", make)


OP = Op(
    name="gemm",
    reference=gemm_reference,
    triton=gemm_triton,
    cost=gemm_cost,
    cases=(
        _case("one element", "naive", 1, 1, 1),
        _case("ragged", "naive", 33, 17, 5, slack=3),
        _case("nothing to sum", "tiled", 3, 4, 0),
        _case("no rows", "tiled", 0, 4, 8),
        _case("ragged", "tiled", 130, 129, 35, slack=3),
        _case("one row", "pipelined", 1, 300, 70),
        _case("more tile rows than a group", "pipelined", 600, 65, 33, slack=5),
        _case("ragged, rows of 16 bytes", "persistent", 136, 264, 72, slack=8),
        _case("more tiles than programs", "persistent", 300, 400, 40),
    ),
)
