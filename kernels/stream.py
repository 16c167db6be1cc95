"""Four ways through memory: copy, scale, triad, read. They measure the bandwidth that everything else is held against.

The kernels of McCalpin's STREAM benchmark, and a read-only one, since decoding almost only reads:

    copy    out[i] = x[i]                 1 read, 1 write     0 FLOPs an element
    scale   out[i] = alpha * x[i]         1 read, 1 write     1
    triad   out[i] = a[i] + alpha * b[i]  2 reads, 1 write    2
    read    out[j] = sum of chunk j of x  1 read              1     (one fp32 partial sum for each CHUNK elements)

Nothing here can be computed faster than it is moved, so the only question is whether enough bytes are in flight.
Little's law: bandwidth x latency = bytes in flight. At 4.8 TB/s and about 700 ns, an H200 needs 3.4 MB, or 25 KB for
each of its 132 SMs, at every moment. Hence 16-byte loads and many warps: 2048 threads with one load each are 32 KB.

All tensors are 1-D and contiguous, fp32, fp16 or bf16, of any length (offsets are int64), and start at a multiple of
16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.op import Case, Cost, Op, wide

CHUNK = 8192  # elements a partial sum of `read` covers
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Launch:
    """How a kernel is laid over the GPU. ``load`` and ``store`` are eviction hints: "", "evict_first", "evict_last"."""

    block_bytes: int  # of one input, handled by a program in one go; `read` takes CHUNK elements whatever stands here
    num_warps: int
    per_sm: int = 0  # 0: as many programs as blocks; n: n programs an SM, each striding over the blocks
    load: str = ""
    store: str = ""


# Measured on an H200 at 1 GiB, as shares of torch's copy: one 16-byte load a thread and small blocks (4 KB) win with
# 1.01 for copy and 1.04 for triad; four loads a thread (16 KB blocks) get 0.91 to 0.98, and a persistent grid of one
# program an SM 0.65 to 0.82, because then an SM waits whenever its own few loads are out. Small programs retire and are
# replaced all the time, so loads and stores of many overlap. evict_first costs 3 % here: leave the hints empty.
LAUNCH = {
    "copy": Launch(block_bytes=4096, num_warps=8),
    "scale": Launch(block_bytes=4096, num_warps=8),
    "triad": Launch(block_bytes=4096, num_warps=8),
    "read": Launch(block_bytes=0, num_warps=8),  # CHUNK elements a program
}


def copy_reference(x: torch.Tensor) -> torch.Tensor:
    """x: [n] -> [n], the same bits."""
    return x.clone()


def scale_reference(x: torch.Tensor, alpha: float) -> torch.Tensor:
    """x: [n] -> alpha * x: [n], computed in fp32, rounded to x's dtype."""
    return (alpha * wide(x)).to(x.dtype)


def triad_reference(a: torch.Tensor, b: torch.Tensor, alpha: float) -> torch.Tensor:
    """a, b: [n] -> a + alpha * b: [n], computed in fp32, rounded to a's dtype."""
    return (wide(a) + alpha * wide(b)).to(a.dtype)


def read_reference(x: torch.Tensor) -> torch.Tensor:
    """x: [n] -> [ceil(n / CHUNK)], the fp32 sum of each run of CHUNK elements (the last one may be shorter)."""
    x = wide(x)
    return torch.nn.functional.pad(x, (0, -x.numel() % CHUNK)).view(-1, CHUNK).sum(-1)


# One odd element must not cost the others their 16-byte accesses. Under a mask `cols < n` the compiler may group only
# as many elements as are sure to divide n; element by element, a thread then holds an address for each (250 registers,
# one block an SM). So the mask ends at `whole`, n rounded down to a multiple of 16 bytes, and every access stays 16
# bytes wide; the up to 7 elements of `rest` are moved by the program that owns the last block.
# `start` is int64 and is added to the pointer first, so the int32 column offsets never have to hold it.


@triton.jit(do_not_specialize=["n"])
def _copy_kernel(
    x_ptr,  # [n]
    out_ptr,  # [n]
    n,
    VEC: tl.constexpr,  # elements in 16 bytes
    BLOCK: tl.constexpr,  # elements handled in one go
    LOAD: tl.constexpr,  # eviction hints
    STORE: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)
    whole = n // VEC * VEC
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        mask = cols < whole - start
        x = tl.load(x_ptr + start + cols, mask=mask, eviction_policy=LOAD)
        tl.store(out_ptr + start + cols, x, mask=mask, eviction_policy=STORE)
        if start + BLOCK >= n:
            rest = tl.arange(0, VEC)
            last = tl.load(x_ptr + whole + rest, mask=rest < n - whole)
            tl.store(out_ptr + whole + rest, last, mask=rest < n - whole)


@triton.jit(do_not_specialize=["n"])
def _scale_kernel(
    x_ptr,  # [n]
    out_ptr,  # [n]
    n,
    alpha,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)
    whole = n // VEC * VEC
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        mask = cols < whole - start
        x = tl.load(x_ptr + start + cols, mask=mask, eviction_policy=LOAD).to(tl.float32)
        out = (alpha * x).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + start + cols, out, mask=mask, eviction_policy=STORE)
        if start + BLOCK >= n:
            rest = tl.arange(0, VEC)
            last = alpha * tl.load(x_ptr + whole + rest, mask=rest < n - whole).to(tl.float32)
            tl.store(out_ptr + whole + rest, last.to(out_ptr.dtype.element_ty), mask=rest < n - whole)


@triton.jit(do_not_specialize=["n"])
def _triad_kernel(
    a_ptr,  # [n]
    b_ptr,  # [n]
    out_ptr,  # [n]
    n,
    alpha,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    LOAD: tl.constexpr,
    STORE: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)
    whole = n // VEC * VEC
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        mask = cols < whole - start
        a = tl.load(a_ptr + start + cols, mask=mask, eviction_policy=LOAD).to(tl.float32)
        b = tl.load(b_ptr + start + cols, mask=mask, eviction_policy=LOAD).to(tl.float32)
        out = (a + alpha * b).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + start + cols, out, mask=mask, eviction_policy=STORE)
        if start + BLOCK >= n:
            rest = tl.arange(0, VEC)
            last = tl.load(a_ptr + whole + rest, mask=rest < n - whole).to(tl.float32)
            last += alpha * tl.load(b_ptr + whole + rest, mask=rest < n - whole).to(tl.float32)
            tl.store(out_ptr + whole + rest, last.to(out_ptr.dtype.element_ty), mask=rest < n - whole)


@triton.jit(do_not_specialize=["n"])
def _read_kernel(
    x_ptr,  # [n]
    out_ptr,  # [ceil(n / BLOCK)], fp32
    n,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    LOAD: tl.constexpr,
):
    cols = tl.arange(0, BLOCK)
    whole = n // VEC * VEC
    first = tl.program_id(0).to(tl.int64) * BLOCK
    for start in range(first, n, tl.num_programs(0).to(tl.int64) * BLOCK):
        x = tl.load(x_ptr + start + cols, mask=cols < whole - start, other=0.0, eviction_policy=LOAD)
        total = tl.sum(x.to(tl.float32))
        if start + BLOCK >= n:
            rest = tl.arange(0, VEC)
            total += tl.sum(tl.load(x_ptr + whole + rest, mask=rest < n - whole, other=0.0).to(tl.float32))
        tl.store(out_ptr + start // BLOCK, total)


def _check(op: str, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless all are 1-D, contiguous, 16-byte aligned, and alike in length, dtype and device."""
    first_name, first = next(iter(tensors.items()))
    for name, t in tensors.items():
        if t.dim() != 1:
            raise ValueError(f"{op}: {name} must be 1-D, got shape {tuple(t.shape)}; call .reshape(-1) first")
        if t.dtype not in DTYPES:
            raise ValueError(f"{op}: {name} must be float32, float16 or bfloat16, got {t.dtype}")
        if not t.is_contiguous():
            raise ValueError(f"{op}: {name} must be contiguous, got stride {t.stride(0)}; call .contiguous() first")
        if t.data_ptr() % 16:
            raise ValueError(
                f"{op}: {name} must start at a multiple of 16 bytes, it is {t.data_ptr() % 16} past one; "
                "call .clone(), or slice it at a multiple of 16 bytes"
            )
        for what, got, needed in (
            ("length", t.shape[0], first.shape[0]),
            ("dtype", t.dtype, first.dtype),
            ("device", t.device, first.device),
        ):
            if got != needed:
                raise ValueError(f"{op}: {name} must have {first_name}'s {what} {needed}, got {got}")


def _plan(op: str, x: torch.Tensor, overrides: dict) -> tuple[tuple[int], dict]:
    """Grid and compile-time arguments for a non-empty x."""
    launch = replace(LAUNCH[op], **overrides)
    block = CHUNK if op == "read" else launch.block_bytes // x.element_size()
    blocks = triton.cdiv(x.numel(), block)
    sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1  # interpreter: one
    settings = {"VEC": 16 // x.element_size(), "BLOCK": block, "LOAD": launch.load, "num_warps": launch.num_warps}
    if op != "read":
        settings["STORE"] = launch.store
    return (min(blocks, launch.per_sm * sms or blocks),), settings


def copy_triton(x: torch.Tensor, out: torch.Tensor | None = None, **launch) -> torch.Tensor:
    """x: [n] -> [n], written to ``out`` if given. Keywords replace fields of ``LAUNCH["copy"]``.

    Raises ValueError for tensors that are not 1-D, contiguous, aligned to 16 bytes, or not alike.
    """
    out = torch.empty_like(x) if out is None else out
    _check("copy", x=x, out=out)
    if n := x.numel():
        grid, settings = _plan("copy", x, launch)
        _copy_kernel[grid](x, out, n, **settings)
    return out


def scale_triton(x: torch.Tensor, alpha: float, out: torch.Tensor | None = None, **launch) -> torch.Tensor:
    """x: [n] -> alpha * x: [n], written to ``out`` if given. Keywords replace fields of ``LAUNCH["scale"]``.

    Raises ValueError for tensors that are not 1-D, contiguous, aligned to 16 bytes, or not alike.
    """
    out = torch.empty_like(x) if out is None else out
    _check("scale", x=x, out=out)
    if n := x.numel():
        grid, settings = _plan("scale", x, launch)
        _scale_kernel[grid](x, out, n, alpha, **settings)
    return out


def triad_triton(
    a: torch.Tensor, b: torch.Tensor, alpha: float, out: torch.Tensor | None = None, **launch
) -> torch.Tensor:
    """a, b: [n] -> a + alpha * b: [n], written to ``out`` if given. Keywords replace fields of ``LAUNCH["triad"]``.

    Raises ValueError for tensors that are not 1-D, contiguous, aligned to 16 bytes, or not alike.
    """
    out = torch.empty_like(a) if out is None else out
    _check("triad", a=a, b=b, out=out)
    if n := a.numel():
        grid, settings = _plan("triad", a, launch)
        _triad_kernel[grid](a, b, out, n, alpha, **settings)
    return out


def read_triton(x: torch.Tensor, **launch) -> torch.Tensor:
    """x: [n] -> [ceil(n / CHUNK)], the fp32 sum of each CHUNK elements. Keywords replace fields of ``LAUNCH["read"]``.

    The order of the additions inside a chunk is the compiler's. Raises ValueError as ``copy_triton`` does.
    """
    _check("read", x=x)
    out = torch.empty(triton.cdiv(x.numel(), CHUNK), device=x.device, dtype=torch.float32)
    if n := x.numel():
        grid, settings = _plan("read", x, launch)
        _read_kernel[grid](x, out, n, **settings)
    return out


def copy_cost(x: torch.Tensor) -> Cost:
    """One read and one write an element."""
    return Cost(bytes=2 * x.numel() * x.element_size(), flops=0)


def scale_cost(x: torch.Tensor, alpha: float) -> Cost:
    """One read, one write, one multiplication an element."""
    return Cost(bytes=2 * x.numel() * x.element_size(), flops=x.numel())


def triad_cost(a: torch.Tensor, b: torch.Tensor, alpha: float) -> Cost:
    """Two reads, one write, one multiplication and one addition an element."""
    return Cost(bytes=3 * a.numel() * a.element_size(), flops=2 * a.numel())


def read_cost(x: torch.Tensor) -> Cost:
    """One read and one addition an element, and the 4-byte partial sums."""
    return Cost(bytes=x.numel() * x.element_size() + 4 * triton.cdiv(x.numel(), CHUNK), flops=x.numel())


_SIZES = {
    "no elements": 0,
    "one element": 1,
    "shorter than one 16-byte access": 3,
    "one chunk": CHUNK,
    "one past a chunk": CHUNK + 1,
    "several blocks and an odd tail": 3 * CHUNK + 4097,
}


def _cases(names: tuple[str, ...], alpha: float | None = None) -> tuple[Case, ...]:
    """Every size, and values at the ends of the range; ``names`` are the tensor arguments."""

    def case(name: str, n: int, special: tuple[float, ...] = ()) -> Case:
        def make(device, dtype, generator):
            inputs = {}
            for key in names:
                x = torch.randn(n, generator=generator)
                x[: len(special)] = torch.tensor(special)
                inputs[key] = x.to(device, dtype)
            return inputs if alpha is None else {**inputs, "alpha": alpha}

        return Case(name, make)

    tiny = 2.0**-24  # fp16's smallest subnormal
    extremes = case("infinities, subnormals, signed zero", 100, (float("inf"), -tiny, tiny, -0.0, 60000.0))
    return (*(case(name, n) for name, n in _SIZES.items()), extremes)


COPY = Op("copy", copy_reference, copy_triton, copy_cost, _cases(("x",)))
SCALE = Op("scale", scale_reference, scale_triton, scale_cost, _cases(("x",), alpha=-0.3))
TRIAD = Op("triad", triad_reference, triad_triton, triad_cost, _cases(("a", "b"), alpha=0.7))
READ = Op("read", read_reference, read_triton, read_cost, _cases(("x",)))
OPS = {op.name: op for op in (COPY, SCALE, TRIAD, READ)}
