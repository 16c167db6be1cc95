"""Few rows times a matrix: the product of a decode step at batch 2 to 64, with the norm before it folded in or not.

    x [m, k], w [n, k] -> [m, n] = x . w^T,   rows scaled by 1 / sqrt(mean(x^2) + eps) where eps is given

It is w that must be read, as in ``gemv``, but each element is now used m times, which is work for tensor cores. Their
instruction on sm_90 takes 64 rows of one matrix and 8 or more columns of the other, so w is the one with the rows: the
kernel computes out^T = w . x^T, and 16 rows of x are 16 columns, where the other way round three quarters of each
instruction would be padding.

Every program reads the rows of x along its part of k. Tiles of BLOCK_N = 64 rows of w keep that small: a quarter of
w's bytes at 16 rows of x. Then a matrix of 4096 rows has 64 tiles for 132 SMs, so k is cut into ``splits`` parts too.
Each part leaves its sums in fp32; the last program of a tile to arrive, which a counter tells, adds them up in the
order of the parts. Which one is last changes from run to run, the order of the additions does not: same inputs, same
bits.

For the norm each program sums x^2 along its part. Up to 32 rows it does so in registers. At 64 the tile of x is too
large to be taken there, and the tensor cores do it instead: the diagonal of x . x^T.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.launch import arch, shared_limit
from kernels.op import Case, Cost, Op, wide
from kernels.paged_cache import sm_count

MAX_ROWS = 64


@dataclass(frozen=True)
class Launch:
    block_n: int = 64
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 4

    def shared_bytes(self, block_m: int) -> int:
        """Shared memory for the pipeline's copies of both tiles, of 2 bytes an element."""
        return self.num_stages * (self.block_n + block_m) * self.block_k * 2


# On an H200 in bf16, against cuBLAS, without and with the norm folded in: at 16 rows 1.05 and 0.98 (6144 x 4096), 1.16
# and 1.08 (4096 x 4096), 1.00 and 0.97 (28672 x 4096), 1.02 and 0.97 (4096 x 14336).
LAUNCH = Launch()


def skinny_gemm_reference(x: torch.Tensor, w: torch.Tensor, eps: float | None = None, **_) -> torch.Tensor:
    """x: [m, k], w: [n, k] -> [m, n], in at least fp32, rounded to x's dtype. Settings of the launch change nothing."""
    y = wide(x)
    if eps is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y @ wide(w).t()).to(x.dtype)


@triton.jit
def _skinny_kernel(
    x_desc,  # tiles [BLOCK_M, BLOCK_K] of x [m, k]
    w_desc,  # tiles [BLOCK_N, BLOCK_K] of w [n, k]
    out_ptr,  # [m, n]
    parts_ptr,  # fp32 [SPLITS, tiles * BLOCK_N, BLOCK_M], then x^2 [tiles, SPLITS, BLOCK_M]
    arrived_ptr,  # int32 [tiles], zeros, and left as zeros
    m, n, k,
    eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    NORM: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    steps = tl.cdiv(k, BLOCK_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    products = tl.zeros((BLOCK_M, BLOCK_M), tl.float32)
    for step in tl.range(steps * split // SPLITS, steps * (split + 1) // SPLITS, num_stages=STAGES):
        w = w_desc.load([tile * BLOCK_N, step * BLOCK_K])
        x = x_desc.load([0, step * BLOCK_K])  # rows past m and columns past k come as zeros
        acc = tl.dot(w, x.T, acc)
        if NORM:
            if BLOCK_M >= 64:
                products = tl.dot(x, x.T, products)
            else:
                x32 = x.to(tl.float32)
                squares += tl.sum(x32 * x32, 1)
    rows = tl.arange(0, BLOCK_M)
    cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if NORM and BLOCK_M >= 64:
        squares = tl.sum(tl.where(rows[:, None] == rows[None, :], products, 0.0), 0)
    if SPLITS > 1:
        padded = tl.num_programs(0) // SPLITS * BLOCK_N
        part_at = parts_ptr + cols[:, None] * BLOCK_M + rows[None, :]
        squares_at = parts_ptr + SPLITS * padded * BLOCK_M + tile * SPLITS * BLOCK_M + rows
        tl.store(part_at + split * padded * BLOCK_M, acc)
        if NORM:
            tl.store(squares_at + split * BLOCK_M, squares)
        tl.debug_barrier()  # all threads have stored before one of them says so
        arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel")
        if arrived < SPLITS - 1:
            return
        tl.debug_barrier()  # no thread reads before that one knows that the others have stored
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        squares = tl.zeros((BLOCK_M,), tl.float32)
        for i in tl.static_range(SPLITS):  # from L2: other SMs have written them
            acc += tl.load(part_at + i * padded * BLOCK_M, cache_modifier=".cg")
            if NORM:
                squares += tl.load(squares_at + i * BLOCK_M, cache_modifier=".cg")
        tl.store(arrived_ptr + tile, 0)
    if NORM:
        acc *= tl.rsqrt(squares / k + eps)[None, :]
    out_at = out_ptr + rows[None, :] * n + cols[:, None]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=(cols[:, None] < n) & (rows[None, :] < m))


_arrived: dict = {}


def _counters(tiles: int, device: torch.device) -> torch.Tensor:
    """Zeros, one a tile. Every launch leaves them as zeros, and launches of one stream follow one another."""
    key = device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    counters = _arrived.get(key)
    if counters is None or counters.numel() < tiles:
        counters = torch.zeros(max(tiles, 4096), dtype=torch.int32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return counters  # zeroed by each replay; whoever runs without the graph must not find these
        _arrived[key] = counters
    return counters


def takes(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether ``skinny_gemm`` runs: on sm_90, 1 to MAX_ROWS rows of 16 bits that start at multiples of 16 bytes (TMA).

    sm_100 multiplies by other instructions, on which this was not tried; others lack TMA or shared memory.
    """
    if not (x.is_cuda and arch(x.device) == 90 and 0 < x.shape[0] <= MAX_ROWS and x.element_size() == 2):
        return False
    return all(t.stride(0) > 0 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (x, w))


def _block_m(m: int) -> int:
    return max(16, triton.next_power_of_2(m))


def splits_of(n: int, k: int, block_m: int, device: torch.device, launch: Launch = LAUNCH) -> int:
    """Parts of k, a power of two: as many as still run all at once, and no more than there are steps."""
    resident = sm_count(device) * max(1, (shared_limit(device) + 1024) // (launch.shared_bytes(block_m) + 1024))
    tiles, splits = triton.cdiv(n, launch.block_n), 1
    while tiles * splits * 2 <= resident and splits * 2 <= triton.cdiv(k, launch.block_k) and splits < 8:
        splits *= 2
    return splits


def skinny_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    eps: float | None = None,
    out: torch.Tensor | None = None,
    splits: int | None = None,
    launch: Launch = LAUNCH,
) -> torch.Tensor:
    """x: [m, k], w: [n, k], 16 bits, for which ``takes`` holds -> [m, n]. eps: scale rows as RMSNorm does.

    splits: parts of k, by default ``splits_of``. The caller has checked the arguments.
    """
    (m, k), n = x.shape, w.shape[0]
    block_m = _block_m(m)
    splits = splits or splits_of(n, k, block_m, x.device, launch)
    out = torch.empty((m, n), device=x.device, dtype=x.dtype) if out is None else out
    tiles = triton.cdiv(n, launch.block_n)
    parts = out
    arrived = None
    if splits > 1:
        parts = torch.empty(tiles * splits * (launch.block_n + 1) * block_m, device=x.device, dtype=torch.float32)
        arrived = _counters(tiles, x.device)
    overlap = arch(x.device) >= 90
    _skinny_kernel[(tiles * splits,)](
        TensorDescriptor.from_tensor(x, [block_m, launch.block_k]),
        TensorDescriptor.from_tensor(w, [launch.block_n, launch.block_k]),
        out, parts, arrived, m, n, k, 0.0 if eps is None else eps,
        BLOCK_M=block_m, BLOCK_N=launch.block_n, BLOCK_K=launch.block_k, SPLITS=splits, NORM=eps is not None,
        STAGES=launch.num_stages, OVERLAP=overlap, num_warps=launch.num_warps, launch_pdl=overlap,
    )  # fmt: skip
    return out


def skinny_gemm_cost(x: torch.Tensor, w: torch.Tensor, eps: float | None = None, **_) -> Cost:
    """Each matrix once; the product, and a square and an addition for each element of x where rows are scaled."""
    (m, k), n = x.shape, w.shape[0]
    return Cost((m * k + n * k + m * n) * x.element_size(), 2 * m * n * k + (0 if eps is None else 2 * m * k))


def _case(name: str, m: int, n: int, k: int, scale: float = 1.0, slack: int = 0, **options) -> Case:
    """``slack`` extra columns make both operands strided views; they hold NaN, which must not leak."""

    def make(device, dtype, generator):
        x = torch.randn(m, k + slack, generator=generator) * scale
        w = torch.randn(n, k + slack, generator=generator) / k**0.5
        x[:, k:] = w[:, k:] = float("nan")
        return {"x": x.to(device, dtype)[:, :k], "w": w.to(device, dtype)[:, :k], **options}

    return Case(name, make)


OP = Op(
    name="skinny_gemm",
    reference=skinny_gemm_reference,
    triton=skinny_gemm,
    cost=skinny_gemm_cost,
    cases=(
        _case("one row", 1, 64, 128),
        _case("ragged", 3, 70, 200, slack=8, splits=1),
        _case("split, ragged", 17, 130, 520, slack=16, splits=4),
        _case("more splits than steps", 2, 64, 136, splits=8),
        _case("normalised", 16, 72, 1024, eps=1e-5, splits=1),
        _case("normalised, 32 rows", 32, 64, 1040, eps=1e-5, splits=2),
        _case("normalised, 64 rows", 64, 200, 1000, eps=1e-5, splits=1),
        _case("normalised, 33 rows, split", 33, 72, 1288, slack=8, eps=1e-5, splits=4),
        _case("normalised: squares overflow fp16, not fp32", 5, 16, 640, scale=300.0, eps=1e-6, splits=2),
    ),
    dtypes=(torch.float16, torch.bfloat16),
)
