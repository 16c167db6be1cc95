"""The operators a step is made of, by name, so that each can be replaced by one of your own.

    linear        x [n, in], weight [out, in], bias [out] or None -> [n, out]
    awq_linear    x [n, in], a PackedWeight, bias=[out] or None -> [n, out]: linear where a product's weight is packed
    rms_norm, add_rms_norm, rope, scatter, silu_mul, paged_decode, paged_extend: as the ``Op`` of that name in kernels/

On CUDA the kernels' Triton versions run; on a CPU those of cpu_ops.py, which give what the references give, faster.

A product belongs to cuBLAS, but for one row: that is reading memory, and ``kernels.gemv`` reads faster. A packed
weight goes to ``kernels.awq_linear``, whatever the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from kernels import awq_few_rows, awq_linear, kv_cache, paged_attention, paged_extend, rms_norm, rope, silu_mul
from kernels.awq_linear import PackedWeight
from kernels.gemv import gemv
from labkit.engine.cpu_ops import CpuOps
from labkit.engine.weights import Product
from labkit.errors import LabError

KERNELS = {
    op.name: op
    for op in (
        *rms_norm.OPS.values(), rope.OP, kv_cache.OP, silu_mul.OP, paged_attention.OP, paged_extend.OP, awq_linear.OP
    )
}  # fmt: skip
NAMES = ("linear", *KERNELS)
PACKED = awq_linear.OP.triton
MOST_FUSED = awq_few_rows.MAX_ROWS  # rows for which a packed product does what stands around it


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x: [n, in], weight: [out, in], on CUDA -> [n, out]; in ``out`` if given."""
    if x.shape[0] == 1:
        return gemv(x, weight, bias=bias, out=out)
    return F.linear(x, weight, bias) if out is None else torch.mm(x, weight.t(), out=out)


def by_weight(ops: Mapping[str, Callable]) -> Callable:
    """One ``linear`` for both kinds of weights: ops["awq_linear"] for packed ones, ops["linear"] for matrices."""
    plain, packed = ops["linear"], ops["awq_linear"]

    def either(x: torch.Tensor, weight: Product, bias: torch.Tensor | None = None, **more) -> torch.Tensor:
        if isinstance(weight, PackedWeight):
            return packed(x, weight, bias=bias, **more)
        return plain(x, weight, bias, **more)

    return either


def with_all(x: torch.Tensor, weight: Product, **around) -> torch.Tensor:
    """A product on CUDA with what stands around it, in one kernel: ``around`` as for ``gemv``, which takes one row.
    Packed weights take up to MOST_FUSED."""
    return (PACKED if isinstance(weight, PackedWeight) else gemv)(x, weight, **around)


# Shapes of what an operator returns, by its first two arguments.
RESULTS = {
    "linear": lambda x, weight: [(len(x), weight.shape[0])],
    "awq_linear": lambda x, weight: [(len(x), weight.shape[0])],
    "rms_norm": lambda x, _: [x.shape],
    "add_rms_norm": lambda x, _: [x.shape],
    "rope": lambda q, k: [q.shape, k.shape],
    "silu_mul": lambda x, _: [(*x.shape[:-1], x.shape[-1] // 2)],
    "paged_decode": lambda q, _: [q.shape],
    "paged_extend": lambda q, _: [q.shape],
}


def checked(name: str, fn: Callable) -> Callable:
    """``fn`` as operator ``name``, whose results are looked at: one of another shape or dtype raises LabError.

    Left alone it could go far: [1, hidden] is added to every row without a word.
    """
    if name not in RESULTS:
        return fn

    @functools.wraps(fn)
    def call(*args, **more):
        result = fn(*args, **more)
        got = result if isinstance(result, tuple | list) else (result,)
        want = RESULTS[name](args[0], args[1] if len(args) > 1 else None)
        if [(getattr(t, "shape", None), getattr(t, "dtype", None)) for t in got] != [(w, args[0].dtype) for w in want]:
            raise LabError(
                f"ops[{name!r}] must return {', '.join(_described(w, args[0].dtype) for w in want)}, "
                f"got {', '.join(_described(getattr(t, 'shape', None), getattr(t, 'dtype', type(t))) for t in got)}"
            )
        return result

    return call


def _described(shape, dtype) -> str:
    return f"{dtype}" if shape is None else f"{dtype} {list(shape)}"


def resolve_ops(own: Mapping[str, Callable] | None, device: torch.device) -> tuple[dict[str, Callable], CpuOps | None]:
    """(operators by name, the CPU operators or None): the defaults of ``device``, replaced by those of ``own``.

    Raises LabError for a name that is no operator's, or a value that cannot be called.
    """
    own = dict(own or {})
    for name, fn in own.items():
        if name not in NAMES:
            raise LabError(f"ops has no operator {name!r} to replace; the names are {', '.join(NAMES)}")
        if not callable(fn):
            raise LabError(f"ops[{name!r}] must be a function with the operator's signature, got {fn!r}")
    own = {name: checked(name, fn) for name, fn in own.items()}
    if device.type == "cpu":
        cpu = CpuOps()
        return {name: getattr(cpu, name) for name in NAMES} | own, cpu
    # The Triton function itself: asking an Op which to run costs a microsecond a call, some 300 calls a step.
    return {"linear": linear, **{name: op.triton for name, op in KERNELS.items()}} | own, None
