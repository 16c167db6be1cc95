"""One row times a matrix: the product of a decode step at batch 1, and what stands around it, in one pass over w.

    y   = x . w^T [+ bias]                    x [1, k], w [n, k] -> [1, n]
    eps given:      x is RMS-normalised first, with the norm's weight gamma, or with gamma folded into w's columns
    gated:          w is gate and up, [2 n, k]; y = silu(gate) * up
    residual given: y is added to it and the sum returned

Each element of w is used once: 2 FLOPs for 2 bytes. So the kernel is a reading of memory with some arithmetic beside
it, tensor cores would only add their padding to 16 rows, and three things decide:

- Bytes in flight. A program has BLOCK_N rows of w and walks along them in steps of BLOCK_K; asynchronous copies run
  STAGES - 1 steps ahead of the sum.
- The beginning. A product of 32 MB ends in 8 us, and a kernel that begins when another has ended spends the first of
  them waiting for memory. w does not depend on the kernel before: programs load their first step of it, and only then
  wait for x (programmatic dependent launch, sm_90 and later).
- Launches. The norm, the activation and the addition each cost a launch to move a few kilobytes; here they cost
  nothing that w's stream does not hide. Every program sums x^2 anew: BLOCK_N elements of w stand beside each of x's.

The sums are in fp32 and each is one program's, in one order: the same inputs give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.launch import DTYPES, arch
from kernels.op import Case, Cost, Op, wide


@dataclass(frozen=True)
class Launch:
    block_n: int  # rows of w a program has at a time; as many again where gated
    block_k: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, element_size: int, gated: bool) -> int:
        """Upper bound: the pipeline's copies of w and x."""
        return self.num_stages * (self.block_n * (1 + gated) + 1) * self.block_k * element_size


# By how many rows w has at most. On an H200 in bf16, in a graph over weights that L2 does not hold, each launch
# overlapping the one before, microseconds and cuBLAS's: 6144 x 4096 12.6 and 15.9, 4096 x 4096 8.4 and 13.4,
# 4096 x 14336 26.9 and 31.1, 128256 x 4096 230 and 239; gated 28672 x 4096 54.5 and 55.5 (without silu). The first step
# must be large, since it is what a program loads while it waits: 64 elements a thread; with 32 the first three take
# 16.7, 11.7 and 31.
LAUNCH = {
    4096: Launch(block_n=8, block_k=1024, num_warps=4, num_stages=2),
    16384: Launch(block_n=8, block_k=512, num_warps=2, num_stages=4),
    2**31: Launch(block_n=8, block_k=1024, num_warps=4, num_stages=3),
}
LAUNCH_GATED = Launch(block_n=4, block_k=512, num_warps=2, num_stages=4)
# On sm_100 the compiler spills with 64 elements a thread, and the other GPUs have no launches that overlap.
ELSEWHERE = Launch(block_n=8, block_k=512, num_warps=4, num_stages=4)
ELSEWHERE_GATED = Launch(block_n=4, block_k=512, num_warps=4, num_stages=4)


def launch_of(n: int, gated: bool, architecture: int) -> Launch:
    """The settings for ``n`` rows of output on sm_``architecture``."""
    if architecture != 90:
        return ELSEWHERE_GATED if gated else ELSEWHERE
    return LAUNCH_GATED if gated else next(LAUNCH[most] for most in LAUNCH if n <= most)


def gemv_reference(x, w, *, bias=None, residual=None, eps=None, gamma=None, gated=False, out=None, **_) -> torch.Tensor:
    """The definition, in at least fp32 and rounded once; arguments as in the module's head -> [1, n], x's dtype."""
    y = wide(x)
    if eps is not None:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    if gamma is not None:
        y = y * wide(gamma)
    y = y @ wide(w).t()
    if bias is not None:
        y = y + wide(bias)
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    if residual is not None:
        y = y + wide(residual)
    return y.to(x.dtype) if out is None else out.copy_(y)


@triton.jit
def _gemv_kernel(
    x_ptr,  # [k]
    w_ptr,  # [n, k], row stride stride_w; [2 n, k] if GATED
    gamma_ptr,  # [k], or None
    bias_ptr,  # like w's rows, or None
    residual_ptr,  # [n], or None
    out_ptr,  # [n]
    n, k, stride_w,
    eps,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,  # programmatic dependent launch
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    live = (rows < n)[:, None]
    w_at = w_ptr + rows.to(tl.int64)[:, None] * stride_w + ks[None, :]
    up_at = w_ptr + (rows.to(tl.int64) + n)[:, None] * stride_w + ks[None, :]
    w = tl.load(w_at, mask=live & (ks < k)[None, :], other=0.0)
    if GATED:
        up = tl.load(up_at, mask=live & (ks < k)[None, :], other=0.0)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()  # whoever comes next may load its weights as well
        tl.extra.cuda.gdc_wait()  # from here on x and the residual are there, and out may be written
    x = tl.load(x_ptr + ks, mask=ks < k, other=0.0).to(tl.float32)
    squares = x * x
    if gamma_ptr is not None:
        x *= tl.load(gamma_ptr + ks, mask=ks < k, other=0.0).to(tl.float32)
    acc = w.to(tl.float32) * x[None, :]
    if GATED:
        acc_up = up.to(tl.float32) * x[None, :]
    for start in tl.range(BLOCK_K, k, BLOCK_K, num_stages=STAGES):
        w = tl.load(w_at + start, mask=live & (ks < k - start)[None, :], other=0.0)
        x = tl.load(x_ptr + start + ks, mask=ks < k - start, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
        if gamma_ptr is not None:
            x *= tl.load(gamma_ptr + start + ks, mask=ks < k - start, other=0.0).to(tl.float32)
        acc += w.to(tl.float32) * x[None, :]
        if GATED:
            up = tl.load(up_at + start, mask=live & (ks < k - start)[None, :], other=0.0)
            acc_up += up.to(tl.float32) * x[None, :]
    y = tl.sum(acc, 1)
    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / k + eps)
        y *= scale
    if bias_ptr is not None:
        y += tl.load(bias_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    if GATED:
        z = tl.sum(acc_up, 1) * scale
        if bias_ptr is not None:
            z += tl.load(bias_ptr + n + rows, mask=rows < n, other=0.0).to(tl.float32)
        y = y / (1.0 + tl.exp(-y)) * z
    if residual_ptr is not None:
        y += tl.load(residual_ptr + rows, mask=rows < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=rows < n)


def gemv(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    eps: float | None = None,
    gamma: torch.Tensor | None = None,
    gated: bool = False,
    out: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> torch.Tensor:
    """x: [1, k], w: [n, k] ([2 n, k] if gated), rows of any stride; bias: [w's rows]; residual: [1, n] -> [1, n].

    eps: normalise x. gamma: [k], multiplied into x. out: [1, n], by default new; may be the residual. launch: instead
    of ``launch_of``.
    Raises ValueError for shapes, dtypes or devices that do not fit, or k = 0.
    """
    _check(x, w, gated)
    n, k = w.shape[0] // (1 + gated), w.shape[1]
    out = torch.empty((1, n), device=x.device, dtype=x.dtype) if out is None else out
    row = (1, n)
    others = ("bias", bias, w.shape[:1]), ("residual", residual, row), ("gamma", gamma, (k,)), ("out", out, row)
    for name, t, shape in others:
        if t is not None and (t.shape != shape or t.dtype != x.dtype or t.device != x.device or not t.is_contiguous()):
            raise ValueError(
                f"gemv: {name} must be contiguous {x.dtype} {list(shape)} on {x.device}, "
                f"got {t.dtype} {list(t.shape)} with strides {t.stride()} on {t.device}"
            )
    if n:
        t = launch or launch_of(n, gated, arch(x.device))
        overlap = arch(x.device) >= 90
        _gemv_kernel[(triton.cdiv(n, t.block_n),)](
            x, w, gamma, bias, residual, out, n, k, w.stride(0), 0.0 if eps is None else eps,
            NORM=eps is not None, GATED=gated, BLOCK_N=t.block_n, BLOCK_K=t.block_k, STAGES=t.num_stages,
            OVERLAP=overlap, num_warps=t.num_warps, launch_pdl=overlap,
        )  # fmt: skip
    return out


def _check(x: torch.Tensor, w: torch.Tensor, gated: bool) -> None:
    if x.dim() != 2 or x.shape[0] != 1 or w.dim() != 2:
        raise ValueError(f"gemv: x must be [1, k] and w [n, k], got {tuple(x.shape)} and {tuple(w.shape)}")
    if x.dtype not in DTYPES or w.dtype != x.dtype or w.device != x.device:
        raise ValueError(
            "gemv: x and w must both be float32, float16 or bfloat16 on one device, "
            f"got {x.dtype} on {x.device} and {w.dtype} on {w.device}"
        )
    if w.shape[1] != x.shape[1] or not x.shape[1]:
        raise ValueError(f"gemv: x and w must have equally many columns, at least 1; got {x.shape[1]} and {w.shape[1]}")
    for name, t in (("x", x), ("w", w)):
        if t.stride(1) != 1 and t.shape[1] > 1:
            raise ValueError(f"gemv: {name}'s columns must be contiguous (stride 1), got stride {t.stride(1)}")
    if gated and w.shape[0] % 2:
        raise ValueError(f"gemv: a gated w holds gate and up, an even number of rows; got {w.shape[0]}")


def gemv_cost(x, w, *, bias=None, residual=None, eps=None, gamma=None, gated=False, out=None) -> Cost:
    """Everything once; a multiplication and an addition for each element of w, and of x where it is normalised."""
    n = w.shape[0] // (1 + gated)
    elements = w.numel() + x.numel() + n + sum(t.numel() for t in (bias, residual, gamma) if t is not None)
    return Cost(bytes=elements * x.element_size(), flops=2 * w.numel() + (0 if eps is None else 2 * x.numel()))


def _case(name: str, n: int, k: int, scale: float = 1.0, slack: int = 0, *more: str, **options) -> Case:
    """``slack``: w is a view of rows that are longer; what lies behind them is NaN. ``more``: bias, residual, gamma."""

    def make(device, dtype, generator):
        rows = n * (2 if options.get("gated") else 1)
        w = torch.randn(rows, k + slack, generator=generator) / k**0.5
        w[:, k:] = float("nan")
        inputs = {"x": (torch.randn(1, k, generator=generator) * scale).to(device, dtype)}
        inputs["w"] = w.to(device, dtype)[:, :k]
        for name, shape in (("bias", (rows,)), ("residual", (1, n)), ("gamma", (k,))):
            if name in more:
                inputs[name] = torch.randn(shape, generator=generator).to(device, dtype)
        return {**inputs, **options}

    return Case(name, make)


def _zeros(device, dtype, generator):
    w = torch.randn(20, 40, generator=generator).to(device, dtype)
    return {"x": torch.zeros(1, 40, device=device, dtype=dtype), "w": w, "eps": 1e-6}


OP = Op(
    name="gemv",
    reference=gemv_reference,
    triton=gemv,
    cost=gemv_cost,
    cases=(
        _case("one element", 1, 1),
        _case("no rows of w", 0, 16),
        _case("one step and less", 13, 70),
        _case("several steps and a rest", 21, 1300, slack=3),
        _case("whole steps", 64, 2048),
        _case("bias and residual", 33, 600, 1.0, 0, "bias", "residual"),
        _case("normalised", 40, 1100, eps=1e-5),
        _case("normalised: squares overflow fp16, not fp32", 9, 640, scale=300.0, eps=1e-6),
        _case("normalised, with its weight", 24, 1100, 1.0, 0, "gamma", eps=1e-5),
        _case("gated", 30, 1030, gated=True),
        _case("gated, with all", 17, 520, 1.0, 0, "bias", "residual", "gamma", eps=1e-5, gated=True),
        Case("zeros, normalised", _zeros),
    ),
)
