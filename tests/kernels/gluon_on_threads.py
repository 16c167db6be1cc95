"""Gluon kernels on CPU threads: what the interpreter does for Triton, for as much of Gluon as Hopper kernels use.

All programs of a grid run at once, and each partition of ``warp_specialize`` in a thread of its own. Barriers count
arrivals and bytes as mbarriers do, TMA copies land after a random delay and compute their addresses modulo 2**64 bytes,
and a product reads its shared operands as late as it may: when it is waited for. So a tile that is overwritten too
early gives wrong numbers, and a barrier that nobody completes a ``TimeoutError``. Layouts, registers, and the warps
inside a partition are not modelled.
"""

from __future__ import annotations

import ast
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

TIMEOUT_S = 10.0
LAND_S, READ_S = (0.0, 0.0, 0.001), (0.0, 0.0, 0.002)  # how late copies land and products read; one is drawn each time


class Tensor(torch.Tensor):
    """Results keep the class, so that ``x.type.layout`` can be asked of every value of a kernel."""

    type = SimpleNamespace(layout=None)


def _tensor(x) -> Tensor:
    return torch.as_tensor(x).as_subclass(Tensor)


class Constant(int):
    """A number; strings are what they are."""

    value = property(int)

    def __new__(cls, value):
        return value if isinstance(value, str) else super().__new__(cls, value)


class Shared:
    """A shared-memory descriptor: views of one buffer. Barriers are elements of an object array beside it."""

    def __init__(self, data):
        self.data, self.dtype, self.shape = data, getattr(data, "dtype", None), tuple(getattr(data, "shape", ()))

    def index(self, i):
        return self.data[int(i)] if isinstance(self.data, list) else Shared(self.data[int(i)])

    def reshape(self, shape):
        return Shared(self.data.view([int(n) for n in shape]))

    def permute(self, order):
        return Shared(self.data.permute(*order))

    def store(self, value):
        self.data.copy_(value)

    def load(self, layout):
        return _tensor(self.data.clone())


class Barrier:
    def __init__(self):
        self.condition, self.phase, self.bytes = threading.Condition(), 0, 0

    def init(self, count):
        self.count = self.pending = count

    def _complete(self):
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            self.condition.notify_all()

    def arrive(self, bytes_coming=0):
        with self.condition:
            assert self.pending > 0, "more arrivals than the barrier was initialised for"
            self.pending -= 1
            self.bytes += bytes_coming
            self._complete()

    def landed(self, n):
        with self.condition:
            self.bytes -= n
            self._complete()

    def wait(self, parity):
        with self.condition:
            if not self.condition.wait_for(lambda: self.phase % 2 != int(parity), TIMEOUT_S):
                raise TimeoutError("a barrier was never completed")


class Descriptor:
    """A TMA descriptor: boxes of a strided tensor; outside ``shape`` they read as zero and are not written."""

    def __init__(self, base, shape, strides, block_shape, layout=None):
        self.shape, self.strides, self.block_shape, self.layout, self.dtype = (
            shape,
            strides,
            block_shape,
            layout,
            base.dtype,
        )
        assert all(s * base.element_size() % 16 == 0 for s in strides[:-1]) and strides[-1] == 1
        whole = torch.empty(0, dtype=base.dtype).set_(base.untyped_storage())
        self.flat, self.size = whole[base.storage_offset() :], base.element_size()
        self.block_type = SimpleNamespace(nbytes=self.size * torch.Size(block_shape).numel())

    def rows(self, where):
        """(row of the box, where it starts in memory, how many of its columns are inside), for rows inside."""
        *outer, row, column = (int(x) for x in where)
        for i in range(self.block_shape[-2]):
            at = (*outer, row + i, column)
            if all(0 <= x < limit for x, limit in zip(at, self.shape, strict=True)):
                byte = sum(x * s for x, s in zip(at, self.strides, strict=True)) * self.size % 2**64
                yield i, byte // self.size, min(self.block_shape[-1], self.shape[-1] - column)


class Product:
    """A product on its way: its shared operands are read when it is waited for."""

    type = SimpleNamespace(layout=None)

    def __init__(self, a, b, acc, use_acc):
        self.a, self.b, self.acc, self.use_acc = a, b, acc, use_acc

    def result(self):
        a = self.a.data if isinstance(self.a, Shared) else self.a
        product = a.float() @ self.b.data.float()
        return _tensor(product + self.acc if self.use_acc else product)


class Pointer:
    def __init__(self, flat, offset=0):
        self.flat, self.offset = flat, offset

    def __add__(self, more):
        return Pointer(self.flat, self.offset + more)


class Kernel:
    """What ``gluon.jit`` returns. ``kernel[grid](...)`` runs the programs side by side."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self, *args, **kwargs):
        return self.fn(*args, **kwargs)

    def __getitem__(self, grid):
        def run(*args, num_warps, **constants):
            arguments = [Pointer(a.reshape(-1)) if isinstance(a, torch.Tensor) else a for a in args]
            programs = int(grid[0])
            _side_by_side([(p, programs, self.fn, arguments, constants) for p in range(programs)], "program")

        return run


here = threading.local()  # program and programs of the calling thread
_atomic = threading.Lock()


def _side_by_side(work, what):
    """Call every (program, programs, function, arguments, constants) in a thread of its own."""
    errors = []

    def guarded(program, programs, fn, args, constants):
        here.program, here.programs = program, programs
        try:
            fn(*args, **constants)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=w, daemon=True) for w in work]
    for t in threads:
        t.start()
    for t in threads:
        t.join(3 * TIMEOUT_S)
    if errors:
        raise errors[0]
    assert not any(t.is_alive() for t in threads), f"a {what} does not end"


def _warp_specialize(partitions, worker_num_warps, worker_num_regs):
    _side_by_side([(here.program, here.programs, fn, args, {}) for fn, args in partitions], "partition")


def _allocate(dtype, shape, layout):
    if dtype is torch.int64:
        return Shared([Barrier() for _ in range(int(shape[0]))])
    unwritten = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    return Shared(torch.full([int(n) for n in shape], unwritten, dtype=dtype))


def _copy_in(desc, where, barrier, smem):
    def land():
        time.sleep(random.choice(LAND_S))
        box = smem.data.view(-1, desc.block_shape[-1])
        box.zero_()
        for i, start, columns in desc.rows(where):
            box[i, :columns] = desc.flat[start : start + columns]
        barrier.landed(desc.block_type.nbytes)

    threading.Thread(target=land, daemon=True).start()


def _copy_out(desc, where, smem):
    for i, start, columns in desc.rows(where):
        desc.flat[start : start + columns] = smem.data.view(-1, desc.block_shape[-1])[i, :columns]


def _load(pointer):
    return _tensor(pointer.flat[int(pointer.offset)])


def _atomic_add(pointer, value, sem):
    with _atomic:
        before = _tensor(pointer.flat[int(pointer.offset)].clone())
        pointer.flat[int(pointer.offset)] += value
    return before


def _store(pointer, value, mask):
    at = pointer.offset[mask].long()
    assert ((at >= 0) & (at < len(pointer.flat))).all(), "a store outside its tensor"
    pointer.flat[at] = value[mask].to(pointer.flat.dtype).as_subclass(torch.Tensor)


def _wait(num_outstanding, deps):
    assert num_outstanding == 0
    time.sleep(random.choice(READ_S))
    results = [d.result() if isinstance(d, Product) else d for d in deps]
    return results[0] if len(results) == 1 else tuple(results)


def _arrive(barrier, count=1, pred=True):
    if pred:
        barrier.arrive()


def _ignored(*args, **kwargs):
    return None


def _language() -> dict:
    """The names that a kernel module takes from triton.experimental.gluon."""
    layouts = ("NVMMADistributed", "Slice", "DotOperand", "Blocked", "SwizzledShared")
    gl = SimpleNamespace(
        **{f"{name}Layout": _ignored for name in layouts},
        NVMMASharedLayout=SimpleNamespace(get_default_for=_ignored),
        constexpr=Constant,
        int32=torch.int32,
        int64=torch.int64,
        float32=torch.float32,
        float16=torch.float16,
        bfloat16=torch.bfloat16,
        static_range=range,
        program_id=lambda axis: _tensor(here.program),
        num_programs=lambda axis: _tensor(here.programs),
        cdiv=lambda a, b: -(-a // b),
        arange=lambda start, stop, layout: _tensor(torch.arange(int(start), int(stop))),
        zeros=lambda shape, dtype, layout: _tensor(torch.zeros([int(n) for n in shape], dtype=dtype)),
        full=lambda shape, value, dtype, layout: _tensor(torch.full([int(n) for n in shape], value, dtype=dtype)),
        where=lambda c, a, b: torch.where(c, _tensor(a), _tensor(b)),
        maximum=lambda a, b: torch.maximum(_tensor(a), _tensor(b)),
        minimum=lambda a, b: torch.minimum(_tensor(a), _tensor(b)),
        max=lambda x, axis: x.amax(axis),
        sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2,
        log2=torch.log2,
        rsqrt=torch.rsqrt,
        convert_layout=lambda x, layout: x,
        allocate_shared_memory=_allocate,
        warp_specialize=_warp_specialize,
        load=_load,
        store=_store,
        atomic_add=_atomic_add,
    )
    return {
        "gl": gl,
        "gluon": SimpleNamespace(jit=Kernel),
        "TensorDescriptor": Descriptor,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=_ignored,
            init=lambda barrier, count: barrier.init(int(count)),
            arrive=_arrive,
            expect=lambda barrier, nbytes: barrier.arrive(nbytes),
            wait=lambda barrier, phase: barrier.wait(phase),
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=_copy_in, async_copy_shared_to_global=_copy_out, store_wait=_ignored
        ),
        "fence_async_shared": _ignored,
        "warpgroup_mma": lambda a, b, acc, use_acc=True, is_async=False: Product(a, b, acc, use_acc),
        "warpgroup_mma_wait": _wait,
    }


def load_on_threads(module: ModuleType, edit: Callable[[str], str] = str) -> ModuleType:
    """A copy of a kernel module whose Gluon kernels run on threads. ``edit`` may change its source."""
    path = Path(module.__file__)
    tree = ast.parse(edit(path.read_text(encoding="utf-8")))
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton.experimental"))
    ]
    copy = ModuleType(f"{module.__name__}_on_threads")
    copy.__dict__.update(_language(), __file__=str(path))
    sys.modules[copy.__name__] = copy  # where dataclasses look for it
    exec(compile(tree, str(path), "exec"), copy.__dict__)
    return copy
