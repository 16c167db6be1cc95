"""What an operator is: the maths, the kernel, the least work it needs, and the inputs that break bad versions.

One ``Op`` has five readers: the tests compare ``triton`` with ``reference`` over ``cases``; the benchmarks turn
``cost`` into a share of the roofline; the exercise checker puts a learner's function where ``triton`` stands;
notebooks plot it; the engine calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cost:
    """Least device-memory traffic (bytes) and arithmetic (FLOPs) any implementation needs."""

    bytes: int
    flops: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOP per byte; infinite for work that moves nothing."""
        return self.flops / self.bytes if self.bytes else float("inf")


@dataclass(frozen=True)
class Case:
    """One input worth trying. ``make(device, dtype, generator)`` returns the operator's keyword arguments."""

    name: str
    make: Callable[[str, torch.dtype, torch.Generator], dict]


@dataclass(frozen=True)
class Op:
    """``tolerance`` is how many times the same-dtype reference's own error a kernel may err (FlashAttention's rule).

    ``mutates`` names the arguments written in place (a KV cache); every other input must come back unchanged.
    ``dtypes`` are those ``cases`` can be made in. ``interpreted`` is False for kernels that Triton's interpreter cannot
    run (Gluon); they are tested on a GPU only.
    """

    name: str
    reference: Callable
    triton: Callable
    cost: Callable[..., Cost]
    cases: tuple[Case, ...]
    tolerance: float = 2.0
    mutates: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    interpreted: bool = True

    def __call__(self, *args, **kwargs):
        """Run Triton on CUDA tensors and the reference elsewhere."""
        first = next(a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor))
        return (self.triton if first.is_cuda else self.reference)(*args, **kwargs)


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in at least fp32 (fp64 stays fp64, so that a reference on fp64 inputs is exact enough to judge by)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
