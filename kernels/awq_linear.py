"""W4A16: activations of 16 bits times weights of 4 (or 2, 3, 8) bits, whose groups share a scale and a zero point.

    y = x . w^T [+ bias],   w[r, k] = (code[r, k] - zero[r, k // group]) * scale[r, k // group]

At one row a product is the reading of its weights, and 4 bits are read 3.8 times as fast as 16. That holds only if
turning codes into numbers costs less than waiting for them: at 4.4 TB/s an H200's SM gets 36 weights a cycle and has
128 lanes. So a weight may take three operations, where shifting, masking, converting and subtracting take four or more.

**Codes become numbers without a conversion.** A bf16 from 128 to 256 has one unit in its last place: 0x4300 is 128, and
0x4300 | code is 128 + code. Two codes that lie 16 bits apart are masked and turned into two numbers by one logical
operation, and one addition of -(128 + zero), which is exact, leaves code - zero in both. fp16 has 0x6400 = 1024.

**Words hold what a thread multiplies.** w is the left operand of the tensor cores, with the rows of x as columns. It
is repacked once, when it is loaded, so that numbers go from the registers they are made in into the product:
``kernels.awq_packed``.

**The scale waits.** code - zero is exact in 16 bits, times the scale it is not. So the product of each group is summed
in fp32 and then scaled: w is multiplied as it was stored. With hundreds of rows of x that would take too many
registers, and there codes are scaled, and rounded, before the product.

One row is for ``kernels.awq_one_row``, up to 16 of 4 bits for ``kernels.awq_small_batch``, up to 8 of other widths for
``kernels.awq_few_rows``, up to 128 for ``kernels.awq_some_rows``. For many, where arithmetic is what takes the time,
there is ``kernels.awq_linear_hopper``; on other GPUs w is written out in 16 bits and given to cuBLAS.
"""

from __future__ import annotations

import torch

from kernels import awq_few_rows, awq_linear_hopper, awq_one_row, awq_small_batch, awq_some_rows
from kernels.awq_packed import PackedWeight, repack
from kernels.gemv import gemv_reference
from kernels.op import Case, Cost, Op
from kernels.rms_norm import rms_norm_triton
from kernels.silu_mul import silu_mul_triton

__all__ = ["FUSED", "OP", "PackedWeight", "awq_linear", "awq_linear_cost", "awq_linear_triton", "repack"]


def awq_linear_reference(x, weight, **around) -> torch.Tensor:
    """The definition, in at least fp32 and rounded once: that of ``gemv``, whose rows may be many, on what the codes
    stand for. Arguments as for ``awq_linear``."""
    return gemv_reference(x, weight.dequantise(torch.promote_types(x.dtype, torch.float32)), **around)


MANY = 128  # rows of x beyond which arithmetic takes the time
MANY_OF_WIDE = 64, 6144  # beyond so many rows of x it does so if w has so many rows, on Hopper


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
    launch: awq_some_rows.Launch | None = None,
) -> torch.Tensor:
    """x: [m, k], rows of any stride; bias: [n] -> [m, n], or [m, n / 2] if gated (weight holds gate, then up).

    residual: as the output, added; out may be the same tensor. eps: rows of x are normalised first. gamma: [k],
    multiplied into x. Up to ``awq_few_rows.MAX_ROWS`` rows they cost no launch of their own. splits, launch: for
    ``awq_some_rows.some_rows``; launch keeps other kernels out.
    Raises ValueError for shapes, dtypes or devices that do not fit.
    """
    _check(x, weight, bias, residual, gamma, gated, out)
    m, n, w = x.shape[0], weight.n // (1 + gated), weight
    out = torch.empty((m, n), device=x.device, dtype=x.dtype) if out is None else out
    if not m:
        return out
    if x.is_cuda and launch is None and awq_one_row.takes(x, w, gated):
        return awq_one_row.one_row(x, w, bias, residual, eps, gamma, gated, out)
    if x.is_cuda and launch is None and awq_small_batch.takes(x, w, gated):
        return awq_small_batch.small_batch(x, w, bias, residual, eps, gamma, gated, out)
    if x.is_cuda and launch is None and awq_few_rows.takes(x, w, gated):
        return awq_few_rows.few_rows(x, w, bias, residual, eps, gamma, gated, out)
    if residual is not None or eps is not None or gamma is not None or gated:
        return _one_by_one(x, w, bias, residual, eps, gamma, gated, out)
    many = m > MANY or (m > MANY_OF_WIDE[0] and w.n >= MANY_OF_WIDE[1])
    if many and launch is None and awq_linear_hopper.takes(x, w):
        return awq_linear_hopper.awq_linear_hopper(x, w, bias, out)
    if m > MANY and launch is None and x.is_cuda:
        written = awq_some_rows.write_out(w)
        return torch.mm(x, written.t(), out=out) if bias is None else torch.addmm(bias, x, written.t(), out=out)
    return awq_some_rows.some_rows(x, w, bias, out, splits, launch)


def _one_by_one(x, weight, bias, residual, eps, gamma, gated, out) -> torch.Tensor:
    """Where nothing is fused: the norm, the product and what follows it as kernels of their own."""
    if eps is not None:
        x = rms_norm_triton(x.contiguous(), torch.ones_like(x[0]) if gamma is None else gamma, eps)
    elif gamma is not None:
        x = x * gamma
    y = awq_linear_triton(x, weight, bias=bias)
    y = silu_mul_triton(y) if gated else y
    return out.copy_(y) if residual is None else torch.add(y, residual, out=out)


def _check(x, weight, bias, residual, gamma, gated, out) -> None:
    n, k = weight.shape
    if x.dim() != 2 or x.shape[1] != k:
        raise ValueError(f"awq_linear: x must be [m, {k}] for a weight [{n}, {k}], got {list(x.shape)}")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(
            f"awq_linear: x must be {weight.dtype} on {weight.device} as the weight is, got {x.dtype} on {x.device}"
        )
    if x.is_cuda and x.dtype == torch.float32:
        raise ValueError("awq_linear: on a GPU x must be float16 or bfloat16, got torch.float32")
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(f"awq_linear: x's columns must be contiguous (stride 1), got stride {x.stride(1)}")
    if gated and n % 2:
        raise ValueError(f"awq_linear: a gated weight holds gate and up, an even number of rows; got {n}")
    y = x.shape[0], n // (1 + gated)
    others = ("bias", bias, (n,)), ("residual", residual, y), ("gamma", gamma, (k,)), ("out", out, y)
    for name, t, shape in others:
        if t is not None and (t.shape != shape or t.dtype != x.dtype or t.device != x.device or not t.is_contiguous()):
            raise ValueError(
                f"awq_linear: {name} must be contiguous {x.dtype} {list(shape)} on {x.device}, "
                f"got {t.dtype} {list(t.shape)} with strides {t.stride()} on {t.device}"
            )


def awq_linear_cost(x, weight, *, bias=None, residual=None, gated=False, **_) -> Cost:
    """Codes, scales and zero points once, x and y once; a multiplication and an addition for each weight and row."""
    w, m = weight, x.shape[0]
    stored = w.n * w.k * w.bits // 8 + w.n * (w.k // w.group) * (16 + w.bits) // 8
    others = m * (w.k + w.n // (1 + gated)) + sum(t.numel() for t in (bias, residual) if t is not None)
    return Cost(bytes=stored + others * x.element_size(), flops=2 * m * w.n * w.k)


def awq_linear(
    x, weight, *, bias=None, residual=None, eps=None, gamma=None, gated=False, out=None, **options
) -> torch.Tensor:
    """``awq_linear_triton`` on a GPU, the definition elsewhere; arguments and errors as there."""
    around = {"bias": bias, "residual": residual, "gamma": gamma, "gated": gated, "out": out}
    if x.is_cuda:
        return awq_linear_triton(x, weight, eps=eps, **around, **options)
    _check(x, weight, **around)
    return awq_linear_reference(x, weight, eps=eps, **around)


def _case(
    name: str, m: int, n: int, k: int, bits: int = 4, group: int = 128, scale: float = 1.0, *more: str, **options
):
    """``more``: bias, residual, gamma; "symmetric": no zero points."""

    def make(device, dtype, generator):
        def random(*shape):
            return torch.randn(shape, generator=generator).to(device, dtype)

        groups = k // group if group > 0 else 1
        codes, zeros = (torch.randint(1 << bits, (n, c), generator=generator, dtype=torch.uint8) for c in (k, groups))
        scales = (torch.rand((n, groups), generator=generator) + 0.5) / (2**bits * k**0.5)
        zeros = None if "symmetric" in more else zeros.to(device)
        packed = repack(codes.to(device), scales.to(device), zeros, bits, dtype)
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
        _case("100 rows, half a tile of w past the end", 100, 72, 256),
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
