"""Gluon kernels of one warpgroup on the CPU: blocks are tensors, programs run one after the other.

For the kernels that ``gluon_on_threads`` does not reach, since they have no partitions: pointers with masks, inline
assembly, the tensor cores' ``mma_v2``, and asynchronous copies, which land at once or only when they are waited for, as
chance will have it. What lies outside a tensor is neither read nor written. Layouts are not modelled: they say where
values are, and the compiler checks what ``assert_trivial`` claims of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import torch

from tests.kernels import gluon_on_threads, ptx_on_tensors
from tests.kernels.gluon_on_threads import here, load_on_threads


class Block(gluon_on_threads.Tensor):
    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)


def block(x) -> Block:
    return torch.as_tensor(x).as_subclass(Block)


def plain(x) -> torch.Tensor:
    return torch.as_tensor(x).as_subclass(torch.Tensor)


class Pointer:
    """An address, or a block of them, in the memory of a tensor."""

    def __init__(self, flat: torch.Tensor, offset=0):
        self.flat, self.offset, self.dtype = flat, offset, SimpleNamespace(element_ty=flat.dtype)

    def __add__(self, more):
        return Pointer(self.flat, self.offset + more)

    def inside(self, mask) -> tuple[torch.Tensor, torch.Tensor]:
        at, mask = torch.broadcast_tensors(plain(self.offset).long(), plain(mask))
        assert ((at >= 0) & (at < len(self.flat)))[mask].all(), "an access outside its tensor"
        return torch.where(mask, at, 0), mask

    def load(self, mask=True, other=0) -> Block:
        at, mask = self.inside(mask)
        return block(torch.where(mask, self.flat[at], torch.tensor(other, dtype=self.flat.dtype)))

    def store(self, value, mask) -> None:
        at, mask = self.inside(mask)
        self.flat[at[mask]] = plain(value)[mask].to(self.flat.dtype)


class Shared(gluon_on_threads.Shared):
    def index(self, i):
        return Shared(self.data[int(i)])

    def permute(self, order):
        return Shared(self.data.permute(*order))

    def _reinterpret(self, dtype, shape, layout):
        return Shared(self.data.contiguous().view(dtype).view([int(n) for n in shape]))

    def load(self, layout):
        return block(self.data.clone())


class Copies:
    """cp.async: where a mask is false, zeros are written."""

    def __init__(self):
        self.open, self.groups = [], []

    def async_copy_global_to_shared(self, smem, pointer, mask):
        value = pointer.load(mask)
        if random.random() < 0.5:
            smem.store(value)
        else:
            self.open.append((smem, value))

    def commit_group(self):
        self.groups.append(self.open)
        self.open = []

    def wait_group(self, outstanding):
        while len(self.groups) > int(outstanding):
            for smem, value in self.groups.pop(0):
                smem.store(value)


def inline_asm(assembly, constraints, arguments, dtype, is_pure, pack):
    """With pack 4 a register holds four bytes, of four values that a thread has in a row.

    Of words [warps, rows, 4, words] these are a row's, and then those of the row 8 further on.
    """
    words, kinds = [plain(a) for a in arguments], dtype if isinstance(dtype, tuple) else (dtype,)
    words = [w.to(torch.int32) if w.dtype == torch.int64 else w for w in words]  # a number of Python's
    if pack == 4:
        shape = words[0].shape
        if len(shape) == 4:
            words = [w.unflatten(1, (2, -1)).movedim(1, 3).flatten(3) for w in words]
        fours = [w.unflatten(-1, (-1, 4)) for w in words]
        outputs = ptx_on_tensors.run(assembly, constraints, [w for f in fours for w in f.unbind(-1)])
        outputs = [out.contiguous().unsqueeze(-1).view(torch.int8).flatten(-2) for out in outputs]
        if len(shape) == 4:
            outputs = [out.unflatten(-1, (2, -1)).movedim(3, 1).flatten(1, 2) for out in outputs]
    else:
        outputs = ptx_on_tensors.run(assembly, constraints, words)
        outputs = [out.contiguous().view(kind) for out, kind in zip(outputs, kinds, strict=True)]
    outputs = [block(out) for out in outputs]
    return outputs if isinstance(dtype, tuple) else outputs[0]


def mma_v2(a, b, acc):
    wide = torch.float32 if a.dtype.is_floating_point else torch.int64
    product = plain(a).to(wide) @ plain(b).to(wide)
    return block(product.to(acc.dtype) + plain(acc))


class Kernel:
    def __init__(self, fn, copies: Copies):
        self.fn, self.copies = fn, copies

    def __getitem__(self, grid):
        def run(*args, num_warps, launch_pdl=False, maxnreg=None, **constants):
            def argument(a):
                if not isinstance(a, torch.Tensor):
                    return a
                return Pointer(torch.empty(0, dtype=a.dtype).set_(a.untyped_storage())[a.storage_offset() :])

            for here.program in range(grid[0]):
                here.programs = grid[0]
                self.copies.__init__()
                self.fn(*map(argument, args), **constants)

        return run


def _allocate(dtype, shape, layout):
    unwritten = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return Shared(torch.full([int(n) for n in shape], unwritten, dtype=dtype))


def _language(gl: SimpleNamespace) -> dict:
    """What ``gl`` has here beyond what it has on threads."""
    names = ("arange", "zeros", "full", "where", "minimum")

    def of_blocks(fn):
        return lambda *args, **options: block(fn(*args, **options))

    return {name: of_blocks(getattr(gl, name)) for name in names} | dict(
        int8=torch.int8,
        int16=torch.int16,
        program_id=lambda axis: here.program,
        num_programs=lambda axis: here.programs,
        zeros_like=torch.zeros_like,
        abs=torch.abs,
        exp=torch.exp,
        expand_dims=lambda x, axis: x.unsqueeze(axis),
        join=lambda a, b: torch.stack([a, b], -1),
        split=lambda x: x.unbind(-1),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        maximum=lambda a, b, propagate_nan: torch.maximum(a, b),
        DistributedLinearLayout=lambda *args: None,
        SharedLinearLayout=lambda *args: None,
        allocate_shared_memory=_allocate,
        load=lambda pointer, mask=True, other=0: pointer.load(mask, other),
        store=lambda pointer, value, mask: pointer.store(value, mask),
        inline_asm_elementwise=inline_asm,
    )


def load_on_tensors(module: ModuleType, *others: ModuleType, edit: Callable[[str], str] = str) -> ModuleType:
    """A copy of a kernel module whose Gluon kernel runs on tensors, and so does what it imports from ``others``.

    ``edit`` may change its source.
    """

    def load(of: ModuleType, edit: Callable[[str], str]) -> ModuleType:
        copy = load_on_threads(of, edit)
        vars(copy.gl).update(_language(copy.gl))
        vars(copy).update(mma_v2=mma_v2)
        return copy

    copy = load(module, edit)
    for other in others:
        vars(copy).update({name: value for name, value in vars(load(other, str)).items() if name in vars(copy)})
    vars(copy).update(
        __name__=module.__name__, async_copy=Copies(), gdc_wait=lambda: None,
        gdc_launch_dependents=lambda: None, sm_count=lambda device: 3, arch=lambda device: 90,
    )  # fmt: skip
    for name in [name for name in vars(copy) if name.endswith("_kernel")]:
        setattr(copy, name, Kernel(getattr(copy, name).fn, copy.async_copy))
    return copy
