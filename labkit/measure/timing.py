"""How long a callable takes on the GPU.

GPU work is asynchronous: a call returns when the kernel is queued, not when it has run. Four ways to time it:

- ``events``: a CUDA event before and after each call, both stamped by the GPU. The call's own launch must not be in the
  interval, so the GPU is kept busy until both events are queued: by the L2 flush, or by a spin kernel.
- ``graph``: many calls captured in one CUDA graph, replayed; the replay's time over their number. For kernels of a few
  microseconds, where even the gap between two events would show.
- ``wall``: the host's clock with a synchronisation on both sides: launch, kernel and synchronisation together.
- ``wall_no_sync``: the host's clock without it. This times the launch alone and is the classic mistake.

A kernel whose data still lies in L2 from the last call runs faster than it will in a model, so L2 is flushed before
each call by reading a buffer larger than it. Reading, because what was written stays in L2 as dirty lines, and the
timed call would pay for writing them back: on an H200, 256 MiB are read at 4250 GB/s after a flush by reads and at 3760
after one by writes. The flush lies outside the interval.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.errors import LabError
from labkit.measure.lock import exclusive, gpu_name

METHODS = ("events", "graph", "wall", "wall_no_sync")
WARMUP_MS = 25.0
_BUDGET_US = 200_000.0  # repeats are chosen to fill it
_MIN_REPEATS, _MAX_REPEATS = 10, 500
_REPLAY_US, _MAX_COPIES = 2_000.0, 1_000  # a replay much longer than its own launch
_SPIN_US, _HOST_BOUND_US = 50.0, 1_000.0


@dataclass(frozen=True)
class Timing:
    """``samples``: microseconds of one call each. ``starved``: samples in which the GPU waited for the host."""

    samples: tuple[float, ...]
    method: str
    flushed: bool
    starved: int = 0

    @property
    def us(self) -> float:
        """Median."""
        return statistics.median(self.samples)

    @property
    def us_low(self) -> float:
        return quartiles(self.samples)[0]

    @property
    def us_high(self) -> float:
        return quartiles(self.samples)[1]

    @property
    def repeats(self) -> int:
        return len(self.samples)


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile, interpolated between the samples that stand next to them."""
    if len(samples) == 1:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def repeats_for(one_us: float) -> int:
    """How many calls of ``one_us`` fill the time budget, within bounds."""
    return max(_MIN_REPEATS, min(_MAX_REPEATS, int(_BUDGET_US / max(one_us, 1.0))))


def copies_for(one_us: float) -> int:
    """How many calls of ``one_us`` make a graph whose replay outlasts its launch by far."""
    return max(1, min(_MAX_COPIES, math.ceil(_REPLAY_US / max(one_us, 0.1))))


class CudaGpu:
    """What timing needs of a GPU. Tests put a simulated one in its place."""

    def __init__(self):
        import torch

        self.torch = torch
        self.name = gpu_name()
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self.l2_bytes = getattr(properties, "L2_cache_size", 0) or 64 * 2**20
        self._other = None

    def now_us(self) -> float:
        return time.perf_counter_ns() / 1e3

    def sync(self) -> None:
        self.torch.cuda.synchronize()

    def free_bytes(self) -> int:
        return self.torch.cuda.mem_get_info()[0]

    def flush(self) -> None:
        """Read a buffer of four times L2: whatever its replacement rule, nothing else stays, and nothing is dirty."""
        if self._other is None:
            self._other = self.torch.ones(self.l2_bytes, device="cuda")  # 4 bytes each
        self._other.sum()

    def spin(self, us: float) -> None:
        """Keep the GPU busy, at any clock up to 2 GHz for at least ``us``, without touching memory."""
        self.torch.cuda._sleep(int(us * 2000))

    def mark(self):
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def reached(self, mark) -> bool:
        return mark.query()

    def between_us(self, start, end) -> float:
        return start.elapsed_time(end) * 1e3

    def capture(self, calls: Sequence[Callable]) -> Callable[[], None]:
        """A callable that replays ``calls`` in this order as one graph. Raises what the capture raises."""
        graph, before = self.torch.cuda.CUDAGraph(), self.torch.cuda.current_stream()
        self._rehearse(calls)
        try:
            with self.torch.cuda.graph(graph):
                for call in calls:
                    call()
        except BaseException:
            self.torch.cuda.set_stream(before)  # a capture that fails on its way out leaves its own stream current
            raise
        return graph.replay

    def _rehearse(self, calls: Sequence[Callable]) -> None:
        """Run each once, and raise RuntimeError for one that makes the host wait.

        A capture would fail on it too, but before torch 2.12 such a capture leaves the random generator and the
        allocator in disorder: torch.randn raises from then on.
        """
        cuda = self.torch.cuda
        before = cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch says that it does not find every call that waits
            cuda.set_sync_debug_mode("error")
        try:
            for call in dict.fromkeys(calls):
                call()
        finally:
            cuda.set_sync_debug_mode(before)


def time_cuda(
    fn: Callable[[], object] | Sequence[Callable[[], object]],
    *,
    method: str = "events",
    flush: bool = True,
    warmup: float = WARMUP_MS,
    repeats: int | None = None,
    copies: int | None = None,
    gpu: CudaGpu | None = None,
) -> Timing:
    """Time ``fn()``; several callables (the same work on different data) take turns.

    ``warmup``: milliseconds of untimed calls; 0 for none, so that the first sample holds compilation. ``repeats`` and,
    for graphs, ``copies`` a replay are chosen to fill about 0.2 s. In a graph, L2 is flushed before each replay but not
    between the calls of one: give enough callables that their data exceeds L2 when that matters.
    The GPU's lock is held. Raises LabError for an unknown method or a capture that fails.
    """
    if method not in METHODS:
        raise LabError(f"Unknown timing method {method!r}; it must be one of {', '.join(METHODS)}.")
    if repeats is not None and repeats < 1:
        raise LabError(f"repeats is {repeats}; it must be at least 1.")
    if warmup < 0:
        raise LabError(f"warmup is {warmup} ms; it must be 0 (none) or more.")
    fns = [fn] if callable(fn) else list(fn)
    gpu = gpu or CudaGpu()
    with exclusive(gpu.name):
        turn = _Turns(fns)
        host_us, one_us = _warm_up(gpu, turn, warmup) if warmup else (None, None)
        if method == "graph":
            return _graph(gpu, fns, turn, flush, one_us, repeats, copies)
        repeats = repeats or (_MIN_REPEATS if one_us is None else repeats_for(one_us))
        if method == "events":
            return _events(gpu, turn, flush, repeats, host_us)
        return _wall(gpu, turn, flush, repeats, sync=method == "wall")


class _Turns:
    """Calls the callables one after the other, for ever."""

    def __init__(self, fns: Sequence[Callable]):
        self.fns, self.calls = fns, 0

    def __call__(self) -> None:
        self.fns[self.calls % len(self.fns)]()
        self.calls += 1


def _warm_up(gpu: CudaGpu, turn: _Turns, ms: float) -> tuple[float, float]:
    """Call for ``ms``; return the microseconds that a call takes the host alone, and host and GPU together."""
    for _ in turn.fns:  # compilation, handles, the allocator's first blocks
        turn()
    gpu.sync()
    start, host = gpu.now_us(), []
    while True:
        before = gpu.now_us()
        turn()
        host.append(gpu.now_us() - before)
        gpu.sync()
        spent = gpu.now_us() - start
        if spent >= ms * 1e3:
            return statistics.median(host), spent / len(host)


def _events(gpu: CudaGpu, turn: _Turns, flush: bool, repeats: int, host_us: float | None) -> Timing:
    """A sample is starved if its start was reached before its end was queued: the GPU may have waited for the host.

    A spin before the start lets the host get ahead; it is lengthened while samples starve. Where the host needs more
    than a millisecond a call (an eager model), its pace is part of the figure and nothing is spun away. Without warm-up
    there is no second try either: the first call is what is wanted.
    """
    hide = host_us is not None and host_us <= _HOST_BOUND_US
    spin_us = 2 * host_us + _SPIN_US if hide else 0.0 if flush else _SPIN_US
    tries = 3 if hide else 1
    while True:
        pairs, starved = [], 0
        gpu.sync()
        for _ in range(repeats):
            if flush:
                gpu.flush()
            if spin_us:
                gpu.spin(spin_us)
            start = gpu.mark()
            turn()
            end = gpu.mark()
            starved += gpu.reached(start)
            pairs.append((start, end))
        gpu.sync()
        tries -= 1
        if starved <= repeats // 10 or not tries:
            return Timing(tuple(gpu.between_us(start, end) for start, end in pairs), "events", flush, starved)
        spin_us *= 4


def _graph(gpu: CudaGpu, fns, turn: _Turns, flush, one_us, repeats, copies) -> Timing:
    if one_us is None:
        for _ in fns:  # a capture of a kernel that was never compiled fails
            turn()
        gpu.sync()
    wanted = copies or copies_for(one_us or _REPLAY_US)
    while True:
        n = math.ceil(wanted / len(fns)) * len(fns)
        try:
            replay = gpu.capture([fns[i % len(fns)] for i in range(n)])
        except Exception as error:
            raise LabError(
                f"This callable cannot be captured in a CUDA graph ({(str(error) or repr(error)).splitlines()[0]}): "
                "it must not synchronise, copy to the host or decide on values; time it with method='events'."
            ) from error
        replay()
        first = _replays(gpu, replay, flush, 3, n)
        # one_us held the host's share too: with the device's alone known, more copies may fit
        better = copies_for(statistics.median(first))
        if copies or better < 2 * n:
            return Timing(tuple(_replays(gpu, replay, flush, repeats or 20, n)), "graph", flush)
        wanted = better


def _replays(gpu: CudaGpu, replay: Callable[[], None], flush: bool, repeats: int, copies: int) -> list[float]:
    samples = []
    for _ in range(repeats):
        gpu.sync()
        if flush:
            gpu.flush()
        gpu.spin(_SPIN_US)
        start = gpu.mark()
        replay()
        end = gpu.mark()
        gpu.sync()
        samples.append(gpu.between_us(start, end) / copies)
    return samples


def _wall(gpu: CudaGpu, turn: _Turns, flush: bool, repeats: int, sync: bool) -> Timing:
    samples = []
    for _ in range(repeats):
        if flush:
            gpu.flush()
        gpu.sync()
        start = gpu.now_us()
        turn()
        if sync:
            gpu.sync()
        samples.append(gpu.now_us() - start)
    gpu.sync()
    return Timing(tuple(samples), "wall" if sync else "wall_no_sync", flush)
