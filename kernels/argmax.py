"""The greedy token of each row of logits, in two launches.

A row of a large vocabulary is 256 KB, too much for one SM to read quickly and, at batch 1, all there is. So a first
kernel takes chunks of rows, all at once, and leaves each chunk's largest value and where it is; a second one compares a
row's chunks. Of equal values the first wins, and NaN counts as the largest of all, as in ``torch.argmax``.

    x [rows, n] -> [rows], int32
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import DTYPES, arch
from kernels.op import Case, Cost, Op

CHUNK = 4096  # elements a program reads: 32 programs for a vocabulary of 128256, at batch 1


def argmax_reference(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x: [rows, n] -> int32 [rows]."""
    best = x.argmax(-1).to(torch.int32)
    return best if out is None else out.copy_(best)


@triton.jit(do_not_specialize=["n", "stride_x"])
def _chunk_kernel(x_ptr, values_ptr, places_ptr, n, stride_x, CHUNK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    cols = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * stride_x + cols, mask=cols < n, other=float("-inf")).to(tl.float32)
    is_nan = tl.max((x != x).to(tl.int32), 0) > 0
    value = tl.max(tl.where(x != x, float("-inf"), x), 0)
    hit = tl.where(is_nan, x != x, x == value)
    place = tl.min(tl.where(hit & (cols < n), cols, 2147483647), 0)
    at = row * tl.num_programs(1) + chunk
    tl.store(values_ptr + at, tl.where(is_nan, float("nan"), value))
    tl.store(places_ptr + at, place)


@triton.jit(do_not_specialize=["chunks"])
def _row_kernel(values_ptr, places_ptr, out_ptr, chunks, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    x = tl.load(values_ptr + row * chunks + cols, mask=cols < chunks, other=float("-inf"))
    place = tl.load(places_ptr + row * chunks + cols, mask=cols < chunks, other=2147483647)
    is_nan = tl.max((x != x).to(tl.int32), 0) > 0
    value = tl.max(tl.where(x != x, float("-inf"), x), 0)
    hit = tl.where(is_nan, x != x, x == value)
    tl.store(out_ptr + row, tl.min(tl.where(hit, place, 2147483647), 0))


def argmax(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x: [rows, n], columns contiguous, n from 1 to 2^31 - 1 -> int32 [rows], in ``out`` if given.

    Raises ValueError for another rank or dtype, no columns, strided columns, or an ``out`` that does not fit.
    """
    if x.dim() != 2 or x.dtype not in DTYPES or not x.shape[1] or (x.stride(1) != 1 and x.shape[1] > 1):
        raise ValueError(
            "argmax: x must be float32, float16 or bfloat16 [rows, n], n at least 1, columns contiguous; "
            f"got {x.dtype} {list(x.shape)} with strides {x.stride()}"
        )
    rows, n = x.shape
    out = torch.empty(rows, dtype=torch.int32, device=x.device) if out is None else out
    if out.shape != (rows,) or out.dtype != torch.int32 or out.device != x.device or not out.is_contiguous():
        raise ValueError(
            f"argmax: out must be contiguous int32 [{rows}] on {x.device}, got {out.dtype} {list(out.shape)} "
            f"on {out.device}"
        )
    if rows:
        chunks, overlap = triton.cdiv(n, CHUNK), arch(x.device) >= 90
        values = torch.empty(rows * chunks, dtype=torch.float32, device=x.device)
        places = torch.empty(rows * chunks, dtype=torch.int32, device=x.device)
        _chunk_kernel[(rows, chunks)](
            x, values, places, n, x.stride(0), CHUNK=CHUNK, OVERLAP=overlap, num_warps=4, launch_pdl=overlap
        )
        _row_kernel[(rows,)](
            values, places, out, chunks, BLOCK=triton.next_power_of_2(chunks), OVERLAP=overlap, num_warps=1,
            launch_pdl=overlap,
        )  # fmt: skip
    return out


def argmax_cost(x: torch.Tensor, out: torch.Tensor | None = None) -> Cost:
    """x once, an index a row; a comparison an element."""
    return Cost(x.numel() * x.element_size() + 4 * x.shape[0], x.numel())


def _case(name: str, rows: int, n: int, edit=None, slack: int = 0) -> Case:
    def make(device, dtype, generator):
        x = torch.randn(rows, n + slack, generator=generator)
        x[:, n:] = float("inf")
        if edit:
            edit(x)
        return {"x": x.to(device, dtype)[:, :n]}

    return Case(name, make)


def _ties(x):
    x[:, 700::1000] = 9.0


def _nan(x):
    x[0, 4500] = float("nan")
    x[1, 10] = x[1, 9000] = float("nan")
    x[1, 3] = float("inf")


OP = Op(
    name="argmax",
    reference=argmax_reference,
    triton=argmax,
    cost=argmax_cost,
    cases=(
        _case("no rows", 0, 10),
        _case("one element", 1, 1),
        _case("one chunk, ragged rows", 3, 1000, slack=3),
        _case("several chunks", 5, 9001),
        _case("of equal values the first", 2, 9001, _ties),
        _case("NaN is the largest", 3, 9001, _nan),
        _case("nothing above minus infinity", 2, 5000, lambda x: x.fill_(float("-inf"))),
    ),
)
