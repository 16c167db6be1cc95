"""A value handed from one warp to others through shared memory and an mbarrier, as right as can be, and nothing else.

compute-sanitizer --tool racecheck python -m tests.kernels.handover
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def _writer(slot, told):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slot.store(gl.full([1], 7, gl.int32, layout))
    mbarrier.arrive(told, count=1)


@gluon.jit
def _reader(slot, told, out_ptr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(told, 0)
    gl.store(out_ptr, gl.max(slot.load(layout), 0))


@gluon.jit
def handover_kernel(out_ptr):
    slot = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(told, count=1)
    gl.warp_specialize([(_reader, (slot, told, out_ptr)), (_writer, (slot, told))], [1], [24])


if __name__ == "__main__":
    out = torch.zeros(1, dtype=torch.int32, device="cuda")
    handover_kernel[(1,)](out, num_warps=4)
    print("handed over", int(out))
