"""Root-mean-square normalisation (Zhang and Sennrich 2019), alone and fused with the residual addition before it.

    rms_norm      out = x / sqrt(mean(x^2) + eps) * weight
    add_rms_norm  residual += x;  out = rms_norm(residual)

One read and one write an element, if a row stays in registers between the sum of its squares and its scaling; a kernel
that reads the row twice, or a chain of elementwise kernels, moves 1.5 to 4 times as much. The fused form reads x and
residual and writes residual and out: 4 accesses an element, where two kernels need 5. A row of up to 128 KB is held by
one program; a longer one is read again in a second pass, from its end backwards, so that what is still in L2 is used
first.

Rounding: everything is fp32 until the one rounding of ``out``, as in torch's ``F.rms_norm``. Hugging Face's Llama
rounds x / rms to x's dtype before it multiplies by weight, so its 16-bit results differ in the last place from these,
which are nearer to the definition. ``residual`` is rounded to its own dtype before it is normalised: the fused form
gives what the two steps apart would give.

    x         [rows, width], any row stride; rms_norm also takes [tokens, heads, width] (a norm a head, as in Qwen3)
    residual  [rows, width], any row stride, its own dtype (fp32 residual streams beside 16-bit activations)
    weight    [width], any of the three dtypes: fp32, fp16, bf16
    out       like x
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.launch import DTYPES, vector
from kernels.op import Case, Cost, Op

WHOLE_BYTES = 131072  # longest row that a program keeps in registers: half of an SM's


@dataclass(frozen=True)
class Launch:
    """``rows`` a program takes and its warps; for long rows also the columns that it takes at once."""

    rows: int
    num_warps: int
    chunk: int = 0


# By columns, rounded up to a power of two. Measured on an H200 in bf16 at 512 MiB, as shares of torch's copy: what
# counts is the bytes in flight on an SM, which registers limit, since a program loads nothing between the sum of its
# row and its last store. 36 KB gave 0.79 (width 576, two rows in 4 warps), 44 KB 0.71 (11008, kept in fp32), 60 KB 0.92
# (6144, kept in fp32); 64 KB and more 0.97 to 1.01. These settings have 60 to 128 KB in flight (of x, or of x and
# residual) at 8 to 64 elements a thread. They get 0.97 to 1.02 from 128 to 32768 columns, powers of two and others, and
# 0.92 at 65536; with the residual 0.97 to 1.02 at all of these.
LAUNCH = {
    256: Launch(rows=4, num_warps=2),  # fewer columns: more rows
    512: Launch(rows=4, num_warps=4),
    1024: Launch(rows=2, num_warps=2),
    2048: Launch(rows=1, num_warps=2),
    4096: Launch(rows=1, num_warps=8),
    8192: Launch(rows=1, num_warps=8),
    16384: Launch(rows=1, num_warps=16),
    32768: Launch(rows=1, num_warps=32),
    65536: Launch(rows=1, num_warps=32),
}
# With the residual there are two loads and a store before the sum. Twice the warps then get 0.96 at 4096 and 8192
# columns and 0.97 at 5120, where 8 get 0.95, 0.95 and 0.98; without it 16 get only 0.88 at 4096 and 0.85 at 5120.
LAUNCH_ADD = LAUNCH | {4096: Launch(rows=1, num_warps=16), 8192: Launch(rows=1, num_warps=16)}
HALVED = 8192  # columns from which a power of two, too, is split in two: 8192 then takes 40 registers a thread, not 63

# Past WHOLE_BYTES a row is read twice. 131072 and 262144 columns get 0.67 and 0.66 (three passes in place of two are
# 0.67: the second finds nothing in L2), fused 0.87 and 0.83. Asynchronous copies ahead of the loop gave 0.73 and 0.66.
LONG = {
    "rms_norm": Launch(rows=1, num_warps=16, chunk=8192),
    "add_rms_norm": Launch(rows=1, num_warps=16, chunk=16384),
}


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """x: [..., width], weight: [width] -> like x; fp32 throughout (fp64 for fp64 x), rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.to(wide.dtype)).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> torch.Tensor:
    """residual += x in residual's dtype, in place; returns rms_norm(residual) in x's dtype."""
    wide = torch.promote_types(torch.promote_types(x.dtype, residual.dtype), torch.float32)
    residual.copy_(residual.to(wide) + x.to(wide))
    return rms_norm_reference(residual.to(wide), weight, eps).to(x.dtype)


@triton.jit
def _take(x_ptr, residual_ptr, mask):
    """x as it is stored; with a residual, the sum in residual's dtype, which is also written there."""
    x = tl.load(x_ptr, mask=mask, other=0.0)
    if residual_ptr is not None:
        x = x.to(tl.float32) + tl.load(residual_ptr, mask=mask, other=0.0).to(tl.float32)
        x = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr, x, mask=mask)
    return x


@triton.jit
def _widen_again(x, zero):
    """x in fp32, converted a second time on purpose.

    If the compiler saw that it needs the fp32 values both before and after the sum over the row, it would keep them: 32
    bits of register for each 16-bit element, half as many rows on an SM, too few bytes in flight. ``zero`` is 0, but
    computed from the sum, so the 16-bit row is what is kept.
    """
    if x.dtype.primitive_bitwidth == 16:
        x = (x.to(tl.int16, bitcast=True) | zero).to(x.dtype, bitcast=True)
    return x.to(tl.float32)


@triton.jit(do_not_specialize=["rows", "width_v", "x_token_v", "x_head_v", "residual_v", "out_token_v", "out_head_v"])
def _rms_norm_kernel(
    x_ptr,  # [rows / heads, heads, width]
    residual_ptr,  # [rows, width], or None
    weight_ptr,  # [width]
    out_ptr,  # [rows / heads, heads, width]
    rows,
    heads,  # 1 for matrices: the compiler then drops the division below
    width_v,  # this and all strides in units of VEC
    x_token_v,
    x_head_v,
    residual_v,
    out_token_v,
    out_head_v,
    eps,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    MAIN: tl.constexpr,  # largest power of two up to width
    REST: tl.constexpr,  # power of two, at least width - MAIN; 0 if nothing is left
):
    width = width_v * VEC
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = row < rows
    token, head = (row // heads).to(tl.int64), (row % heads).to(tl.int64)
    x_ptr += token * (x_token_v * VEC) + head * (x_head_v * VEC)
    out_ptr += token * (out_token_v * VEC) + head * (out_head_v * VEC)
    if residual_ptr is not None:
        residual_ptr += row.to(tl.int64) * (residual_v * VEC)
    cols = tl.arange(0, MAIN)[None, :]
    x = _take(x_ptr + cols, None if residual_ptr is None else residual_ptr + cols, mask)
    if REST:
        tail = MAIN + tl.arange(0, REST)[None, :]
        in_tail = mask & (tail < width)
        y = _take(x_ptr + tail, None if residual_ptr is None else residual_ptr + tail, in_tail)
    wide = x.to(tl.float32)
    squares = tl.sum(wide * wide, axis=1, keep_dims=True)
    if REST:
        wide = y.to(tl.float32)
        squares += tl.sum(wide * wide, axis=1, keep_dims=True)
    scale = tl.rsqrt(squares / width + eps)
    zero = (scale < 0).to(tl.int16)
    weight = tl.load(weight_ptr + cols).to(tl.float32)
    out = (_widen_again(x, zero) * scale * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + cols, out, mask=mask)
    if REST:
        weight = tl.load(weight_ptr + tail, mask=tail < width, other=0.0).to(tl.float32)
        out = (_widen_again(y, zero) * scale * weight).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + tail, out, mask=in_tail)


@triton.jit(do_not_specialize=["width_v", "x_token_v", "x_head_v", "residual_v", "out_token_v", "out_head_v"])
def _rms_norm_long_kernel(
    x_ptr,  # as above
    residual_ptr,
    weight_ptr,
    out_ptr,
    heads,
    width_v,
    x_token_v,
    x_head_v,
    residual_v,
    out_token_v,
    out_head_v,
    eps,
    VEC: tl.constexpr,
    CHUNK: tl.constexpr,  # columns handled in one go
):
    width = width_v * VEC
    row = tl.program_id(0).to(tl.int64)
    token, head = row // heads, row % heads
    x_ptr += token * (x_token_v * VEC) + head * (x_head_v * VEC)
    out_ptr += token * (out_token_v * VEC) + head * (out_head_v * VEC)
    cols = tl.arange(0, CHUNK)
    squares = tl.zeros((CHUNK,), dtype=tl.float32)
    if residual_ptr is not None:
        residual_ptr += row * (residual_v * VEC)
    for start in range(0, width, CHUNK):
        mask = cols < width - start
        x = _take(x_ptr + start + cols, None if residual_ptr is None else residual_ptr + start + cols, mask)
        x = x.to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares) / width + eps)
    tl.debug_barrier()  # the sums that other threads have written must be there to be read
    for back in range(0, width, CHUNK):
        start = (width - 1) // CHUNK * CHUNK - back
        mask = cols < width - start
        if residual_ptr is not None:
            x = tl.load(residual_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
        else:
            x = tl.load(x_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + start + cols, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + start + cols, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def _check(op: str, x: torch.Tensor, ranks: tuple[int, ...], **others: torch.Tensor) -> None:
    """Raise ValueError unless all are float tensors on x's device with contiguous columns, and alike in width."""
    if x.dim() not in ranks:
        shapes = " or ".join(("[rows, width]", "[tokens, heads, width]")[: len(ranks)])
        raise ValueError(f"{op}: x must be {shapes}, got shape {tuple(x.shape)}")
    for name, t in (("x", x), *others.items()):
        if t.dtype not in DTYPES:
            raise ValueError(f"{op}: {name} must be float32, float16 or bfloat16, got {t.dtype}")
        if t.device != x.device:
            raise ValueError(f"{op}: {name} must be on x's device {x.device}, got {t.device}")
        needed = x.shape[-1:] if name == "weight" else x.shape
        if t.shape != needed:
            raise ValueError(
                f"{op}: {name} must have shape {tuple(needed)} for x {tuple(x.shape)}, got {tuple(t.shape)}"
            )
        if t.stride(-1) != 1 and t.shape[-1] > 1:
            raise ValueError(
                f"{op}: {name}'s last dimension must be contiguous (stride 1), got stride {t.stride(-1)}; "
                "call .contiguous() first"
            )
    if others["out"].dtype != x.dtype:
        raise ValueError(f"{op}: out must have x's dtype {x.dtype}, got {others['out'].dtype}")
    if x.shape[-1] and x.numel() // x.shape[-1] >= 2**31:
        raise ValueError(f"{op}: x has {x.numel() // x.shape[-1]} rows, at most {2**31 - 1} can be launched; split it")


def _launch(x, residual, weight, out, eps: float, overrides: dict) -> torch.Tensor:
    width = x.shape[-1]
    if not x.numel():
        return out
    heads = x.shape[1] if x.dim() == 3 else 1
    # a matrix is [rows, 1, width]; its head stride is never used
    strides = (x.stride(0), x.stride(1), 0 if residual is None else residual.stride(0), out.stride(0), out.stride(1))
    if heads == 1:
        strides = (strides[0], 0, strides[2], strides[3], 0)
    tensors = (x, out) if residual is None else (x, out, residual)
    vec = vector(min(t.element_size() for t in tensors), width, *strides)
    ints = (width // vec, *(s // vec for s in strides))
    rows, cols = x.numel() // width, triton.next_power_of_2(width)
    if cols * max(t.element_size() for t in tensors) > WHOLE_BYTES:
        settings = LONG["rms_norm" if residual is None else "add_rms_norm"]
        settings = replace(settings, **overrides) if overrides else settings
        _rms_norm_long_kernel[(rows,)](
            x, residual, weight, out, heads, *ints, eps,
            VEC=vec, CHUNK=settings.chunk, num_warps=settings.num_warps,
        )  # fmt: skip
    else:
        narrow = (LAUNCH if residual is None else LAUNCH_ADD)[max(cols, 256)]
        settings = replace(narrow, **overrides) if overrides else narrow
        take = settings.rows if cols >= 256 else settings.rows * 256 // cols
        main = cols if cols == width and cols < HALVED else cols // 2
        _rms_norm_kernel[(triton.cdiv(rows, take),)](
            x, residual, weight, out, rows, heads, *ints, eps,
            VEC=vec, ROWS=take, MAIN=main, REST=triton.next_power_of_2(width - main), num_warps=settings.num_warps,
        )  # fmt: skip
    return out


def rms_norm_triton(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None, **launch
) -> torch.Tensor:
    """x: [rows, width] or [tokens, heads, width] -> like x, contiguous; to ``out`` if given, which may be x itself.

    Keywords replace fields of the row's ``LAUNCH``. Strides and widths that are multiples of 16 bytes get 16-byte
    accesses. Raises ValueError for other ranks, dtypes or devices, unlike widths, or columns that are not contiguous.
    """
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype) if out is None else out
    _check("rms_norm", x, (2, 3), weight=weight, out=out)
    return _launch(x, None, weight, out, eps, launch)


def add_rms_norm_triton(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    **launch,
) -> torch.Tensor:
    """residual += x in place, then rms_norm(residual) in x's dtype; to ``out`` if given, which may be x itself.

    x, residual: [rows, width]. They may be one tensor (it is doubled); ``out`` must not be residual, which is kept, and
    partly overlapping tensors are undefined. Raises ValueError as ``rms_norm_triton`` does, and if out is residual.
    """
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype) if out is None else out
    _check("add_rms_norm", x, (2,), residual=residual, weight=weight, out=out)
    if out.data_ptr() == residual.data_ptr() and out.numel():
        raise ValueError(
            "add_rms_norm: out and residual are the same memory, but residual must keep the sum; pass another"
        )
    return _launch(x, residual, weight, out, eps, launch)


def rms_norm_cost(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Cost:
    """One read and one write an element, and weight once; square, add, and two multiplications an element."""
    n = x.numel()
    return Cost(bytes=2 * n * x.element_size() + weight.numel() * weight.element_size(), flops=4 * n)


def add_rms_norm_cost(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Cost:
    """x read, residual read and written, out written, and weight once; one addition more an element."""
    n = x.numel()
    moved = 2 * n * (x.element_size() + residual.element_size())
    return Cost(bytes=moved + weight.numel() * weight.element_size(), flops=5 * n)


def _inputs(rows, width, scale, slack, weight_dtype, heads, device, dtype, generator):
    shape = (rows, width + slack) if heads is None else (rows, heads, width + slack)
    x = torch.randn(shape, generator=generator) * scale
    x[..., width:] = float("nan")  # what lies beside a strided view must not leak in
    weight = 1 + 0.5 * torch.randn(width, generator=generator)
    return x.to(device, dtype)[..., :width], weight.to(device, weight_dtype or dtype)


def _norm_case(name, rows, width, scale=1.0, slack=0, weight_dtype=None, heads=None, eps=1e-6) -> Case:
    def make(device, dtype, generator):
        x, weight = _inputs(rows, width, scale, slack, weight_dtype, heads, device, dtype, generator)
        return {"x": x, "weight": weight, "eps": eps}

    return Case(name, make)


def _add_case(name, rows, width, scale=1.0, slack=0, weight_dtype=None, residual_dtype=None) -> Case:
    def make(device, dtype, generator):
        x, weight = _inputs(rows, width, scale, slack, weight_dtype, None, device, dtype, generator)
        residual, _ = _inputs(rows, width, scale, slack, None, None, device, residual_dtype or dtype, generator)
        return {"x": x, "residual": residual, "weight": weight, "eps": 1e-5}

    return Case(name, make)


def _shared_cases(case) -> tuple[Case, ...]:
    return (
        case("one element", 1, 1),
        case("no rows", 0, 64),
        case("no columns", 2, 0),
        case("rows packed into programs, the last not full", 37, 7),
        case("odd width", 5, 123),
        case("width is no power of two", 3, 576),
        case("width a multiple of 8 but not of 16", 3, 1000),
        case("more than 65535 rows", 65_537, 3),
        case("the longest 32-bit row held whole", 1, 32_768),
        case("one past it", 1, 32_769),
        case("the longest 16-bit row held whole", 1, 65_536),
        case("a long row in chunks", 2, 70_008),
        case("an odd long row in chunks", 1, 81_919),
        case("strided rows", 5, 64, slack=7),
        case("strided rows, 16-byte accesses", 5, 512, slack=16),
        case("rows of zeros: out is 0, not NaN", 3, 100, scale=0.0),
        case("squares overflow fp16", 3, 300, scale=300.0),
        case("values so small that eps decides", 3, 300, scale=1e-4),
        case("fp32 weight", 3, 256, weight_dtype=torch.float32),
        case("fp16 weight", 3, 256, weight_dtype=torch.float16),
    )


RMS_NORM = Op(
    name="rms_norm",
    reference=rms_norm_reference,
    triton=rms_norm_triton,
    cost=rms_norm_cost,
    cases=(
        *_shared_cases(_norm_case),
        _norm_case("large eps", 3, 64, eps=10.0),
        _norm_case("one norm a head", 3, 128, heads=5),
        _norm_case("one norm a head, strided", 4, 64, heads=3, slack=8),
        _norm_case("long rows a head", 2, 65_544, heads=2),
    ),
)
ADD_RMS_NORM = Op(
    name="add_rms_norm",
    reference=add_rms_norm_reference,
    triton=add_rms_norm_triton,
    cost=add_rms_norm_cost,
    cases=(
        *_shared_cases(_add_case),
        _add_case("fp32 residual", 3, 576, residual_dtype=torch.float32),
        _add_case("fp16 residual", 3, 577, residual_dtype=torch.float16),
        _add_case("fp32 residual of a long row", 1, 65_544, residual_dtype=torch.float32),
    ),
    mutates=("residual",),
)
OPS = {op.name: op for op in (RMS_NORM, ADD_RMS_NORM)}
