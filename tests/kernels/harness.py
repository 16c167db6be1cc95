"""What every operator's test needs: all operators, guarded memory, and FlashAttention's error rule."""

from __future__ import annotations

import importlib
import pkgutil
from contextlib import contextmanager

import torch
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_map

import kernels
from kernels.awq_packed import PackedWeight
from kernels.op import Op

GUARD = 4096  # bytes before and behind every tensor; a multiple of any alignment a kernel may rely on
POISON = 0xFF  # as bytes of any float type: NaN; of a signed integer: -1

# Guards and comparisons take apart what a packed weight holds as they do tuples and lists.
register_pytree_node(
    PackedWeight,
    lambda w: ([w.words, w.more, w.scales], (w.n, w.k, w.bits, w.group, w.dtype)),
    lambda tensors, rest: PackedWeight(*tensors, *rest),
)


def all_ops() -> dict[str, Op]:
    """Every Op that is an attribute of a module in ``kernels``, by name."""
    found: dict[str, Op] = {}
    for info in pkgutil.walk_packages(kernels.__path__, "kernels."):
        for value in vars(importlib.import_module(info.name)).values():
            if isinstance(value, Op):
                known = found.setdefault(value.name, value)
                assert known is value, f"two operators are called {value.name!r}"
    return found


class Guards:
    """Hands out tensors that lie between guard bytes, and tells whether a guard was written."""

    def __init__(self):
        self.buffers: list[torch.Tensor] = []

    def bytes(self, count: int, device) -> torch.Tensor:
        """``count`` poisoned bytes between two guards."""
        buffer = torch.full((count + 2 * GUARD,), POISON, dtype=torch.uint8, device=device)
        self.buffers.append(buffer)
        return buffer[GUARD : GUARD + count]

    def copy(self, tree):
        """The same tensors in guarded memory, with their strides; tensors that share memory still do.

        A kernel that reads past an end reads NaN (or the index -1).
        """
        moved: dict[int, torch.Tensor] = {}

        def one(t):
            if not isinstance(t, torch.Tensor):
                return t
            storage = t.untyped_storage()
            if storage.data_ptr() not in moved:
                home = self.bytes(storage.nbytes(), t.device)
                home.copy_(torch.empty(0, dtype=torch.uint8, device=t.device).set_(storage))
                moved[storage.data_ptr()] = home
            home = moved[storage.data_ptr()].view(t.dtype)
            return home.as_strided(t.size(), t.stride(), home.storage_offset() + t.storage_offset())

        return tree_map(one, tree)

    def intact(self) -> bool:
        return all((b[:GUARD] == POISON).all() and (b[-GUARD:] == POISON).all() for b in self.buffers)

    @contextmanager
    def allocations(self, monkeypatch):
        """torch.empty and its relatives give poisoned, guarded memory: an unwritten output is seen as NaN."""
        empty = torch.empty

        def guarded(like: torch.Tensor) -> torch.Tensor:
            if like.device.type == "meta" or not like.is_contiguous():
                return like
            return self.bytes(like.numel() * like.element_size(), like.device).view(like.dtype).view(like.shape)

        def patch(owner, name):
            original = getattr(owner, name)
            monkeypatch.setattr(owner, name, lambda *a, **k: guarded(original(*a, **k)))

        with monkeypatch.context() as monkeypatch:
            assert empty is torch.empty, "allocations() cannot be nested"
            for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
                patch(owner, name)
            yield


def upcast(tree):
    """Floating tensors in fp64; everything else as it is."""
    return tree_map(lambda t: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, tree)


def clone(tree):
    return tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, tree)


def outputs(op: Op, fn, inputs: dict) -> list[torch.Tensor]:
    """What ``fn`` returns and what it writes in place, as one list."""
    returned = fn(**inputs)
    leaves = tree_flatten((returned, [inputs[name] for name in op.mutates]))[0]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def assert_close(got: torch.Tensor, baseline: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """FlashAttention's rule: err at most ``tolerance`` times what the same-dtype reference errs, plus four ulp.

    Infinities and NaN must stand where the definition has them; integers must be equal.
    """
    assert got.dtype == baseline.dtype and got.shape == baseline.shape and got.device == baseline.device
    if not got.is_floating_point():
        assert torch.equal(got, baseline)
        return
    eps = torch.finfo(got.dtype).eps
    got, baseline, exact = got.double(), baseline.double(), exact.double()
    finite = baseline.isfinite()
    strange = ~finite
    assert torch.equal(got[strange].nan_to_num(1.0, 2.0, 3.0), baseline[strange].nan_to_num(1.0, 2.0, 3.0))
    assert got.isfinite()[finite].all(), "NaN or infinity where the definition is finite: unwritten, or read too far"
    if finite.any():
        got, baseline, exact = got[finite], baseline[finite], exact[finite]
        allowed = tolerance * (baseline - exact).abs().max() + 4 * eps * exact.abs().max()
        error = (got - exact).abs().max()
        assert error <= allowed, f"largest error {error:.3e}, allowed {allowed:.3e}"


def compare(op: Op, case, dtype, device: str, monkeypatch, seed: int = 0) -> None:
    """``op.triton`` against ``op.reference`` on one case, in guarded and poisoned memory."""
    guards = Guards()
    inputs = guards.copy(case.make(device, dtype, torch.Generator().manual_seed(seed)))
    before = clone(inputs)
    exact = outputs(op, op.reference, upcast(clone(inputs)))
    baseline = outputs(op, op.reference, clone(inputs))
    with guards.allocations(monkeypatch):
        got = outputs(op, op.triton, inputs)
    if device == "cuda":
        torch.cuda.synchronize()
    assert len(got) == len(baseline) == len(exact)
    for g, b, e in zip(got, baseline, exact, strict=True):
        assert_close(g, b, e, op.tolerance)
    assert guards.intact(), "written outside its tensors"
    for name, value in inputs.items():
        if name not in op.mutates:
            for now, then in zip(tree_flatten(value)[0], tree_flatten(before[name])[0], strict=True):
                if isinstance(now, torch.Tensor):
                    same = torch.equal(now.contiguous().view(torch.uint8), then.contiguous().view(torch.uint8))
                    assert same if now.dim() else torch.equal(now, then), f"input {name} was changed"
