"""SwiGLU's activation, ``silu(gate) * up``, in one pass.

Separate kernels move each element through memory five times: read gate, write silu, read it back, read up, write the
product. One kernel needs three: read gate, read up, write. The work is 5 FLOPs an element against 6 bytes in 16-bit, so
memory decides, and fusing buys at most 5/3.

The two halves come as one matrix, gate first, because the projection that makes them is one product:

    x   [rows, 2 * width]   gate = x[:, :width], up = x[:, width:]
    out [rows, width]       silu(g) = g * sigmoid(g) = g / (1 + exp(-g))

fp32, fp16 or bf16; computed in fp32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.launch import DTYPES, vector
from kernels.op import Case, Cost, Op, wide


@dataclass(frozen=True)
class Launch:
    """How the matrix is cut into programs."""

    block_bytes: int  # of gate, and as much of up; narrow matrices fill it with several rows
    num_warps: int


# Measured on an H200 in bf16, widths 1024 to 32768, as shares of torch's copy: 1.04 to 1.05 (two reads for each write
# are easier on the memory than one). 2 KB with 4 warps, 4 KB with 8 and 8 KB with 16 are alike: one 16-byte load of
# each half a thread. Two of each lose up to 1 %.
LAUNCH = Launch(block_bytes=4096, num_warps=8)


def silu_mul_reference(x: torch.Tensor) -> torch.Tensor:
    """x: [rows, 2 * width] -> [rows, width], computed in fp32 (fp64 for fp64), rounded to x's dtype."""
    gate, up = wide(x).chunk(2, dim=-1)
    return (gate * torch.sigmoid(gate) * up).to(x.dtype)


@triton.jit(do_not_specialize=["rows", "width_v", "stride_v", "tiles"])
def _silu_mul_kernel(
    x_ptr,  # [rows, 2 * width], row stride stride_v * VEC
    out_ptr,  # [rows, width], contiguous
    rows,
    width_v,  # width / VEC
    stride_v,
    tiles,  # blocks a row
    VEC: tl.constexpr,  # divides width and stride, so that every access can be VEC elements wide
    ROWS: tl.constexpr,  # rows a program handles
    BLOCK: tl.constexpr,  # columns a program handles
):
    width = width_v * VEC
    row = tl.program_id(0) // tiles * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(0) % tiles * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (cols < width)[None, :]
    row = row.to(tl.int64)[:, None]  # row * stride passes 2**31 for long batches
    gate_ptr = x_ptr + row * (stride_v * VEC) + cols[None, :]
    gate = tl.load(gate_ptr, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + width, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row * width + cols[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul_triton(x: torch.Tensor, out: torch.Tensor | None = None, **launch) -> torch.Tensor:
    """x: [rows, 2 * width], columns contiguous, any row stride -> [rows, width], contiguous; to ``out`` if given.

    Keywords replace fields of ``LAUNCH``. Widths and strides that are multiples of 16 bytes get 16-byte accesses.
    Raises ValueError if x is not a float matrix with an even number of contiguous columns, or out does not fit it.
    """
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"silu_mul: x must be [rows, 2 * width], gate and up side by side, got shape {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise ValueError(f"silu_mul: x must be float32, float16 or bfloat16, got {x.dtype}")
    if x.stride(1) != 1 and x.shape[1] > 1:
        raise ValueError(
            f"silu_mul: x's columns must be contiguous (stride 1), got stride {x.stride(1)}; call .contiguous() first"
        )
    rows, width = x.shape[0], x.shape[1] // 2
    if out is None:
        out = torch.empty((rows, width), device=x.device, dtype=x.dtype)
    elif out.shape != (rows, width) or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise ValueError(
            f"silu_mul: out must be contiguous {(rows, width)} {x.dtype} on {x.device}, "
            f"got {tuple(out.shape)} {out.dtype} on {out.device} with strides {out.stride()}"
        )
    if out.numel():
        settings = LAUNCH if not launch else replace(LAUNCH, **launch)
        in_all = settings.block_bytes // x.element_size()
        block = min(in_all, triton.next_power_of_2(width))
        per_program, tiles = in_all // block, triton.cdiv(width, block)
        vec = vector(x.element_size(), width, x.stride(0))
        _silu_mul_kernel[(triton.cdiv(rows, per_program) * tiles,)](
            x, out, rows, width // vec, x.stride(0) // vec, tiles,
            VEC=vec, ROWS=per_program, BLOCK=block, num_warps=settings.num_warps,
        )  # fmt: skip
    return out


def silu_mul_cost(x: torch.Tensor) -> Cost:
    """Two reads and one write an element; silu is 4 FLOPs (exp, add, divide, multiply), the product one."""
    n = x.numel() // 2
    return Cost(bytes=3 * n * x.element_size(), flops=5 * n)


def _case(name: str, rows: int, width: int, scale: float = 1.0, slack: int = 0, special: tuple = ()) -> Case:
    """``slack`` extra columns make x a strided view; they hold NaN, which must not leak into the result."""

    def make(device, dtype, generator):
        x = torch.randn(rows, 2 * width + slack, generator=generator) * scale
        x[:, 2 * width :] = float("nan")
        if special:
            x[0, : len(special)] = torch.tensor(special)
        return {"x": x.to(device, dtype)[:, : 2 * width]}

    return Case(name, make)


OP = Op(
    name="silu_mul",
    reference=silu_mul_reference,
    triton=silu_mul_triton,
    cost=silu_mul_cost,
    cases=(
        _case("one element", 1, 1),
        _case("no rows", 0, 64),
        _case("no columns", 3, 0),
        _case("many narrow rows share a program", 70, 7),
        _case("width is no power of two", 3, 1536),
        _case("one past a block", 2, 2049),
        _case("more than 65535 rows", 65_537, 3),
        _case("strided view of a wider matrix", 5, 100, slack=7),
        _case("strided view, 16-byte accesses", 5, 4096, slack=8),
        _case("large gates: sigmoid saturates, no overflow", 4, 64, scale=60.0),
        _case("gates at the ends of the range", 2, 16, special=(6e4, -6e4, float("inf"), -0.0, 88.0, -88.0)),
    ),
)
