"""Where a step's time goes: the parts of the host's work, and the kernels with the gaps between them.

The engine itself keeps no clocks in a step. Here its methods are wrapped for as long as one looks.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from labkit.engine.llm import LLM
from labkit.engine.result import StepResult

#: what scheduling costs the host: deciding, writing the inputs, entering the tokens
SCHEDULING = ("plan", "inputs", "commit")
_LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")


class Timeline:
    """A context: while it lasts, ``spans`` collects (part, start, end) in microseconds of the host's clock.

    plan: the scheduler decides. moves: blocks are copied. inputs: a Batch is written. copy: it is sent. launch: the
    model or a graph is started. sample: what a graph does not sample. result: tokens are sent back. wait: the host
    waits for the device. commit: tokens are entered. Parts do not overlap, but for texts and ends, which are no part.
    """

    def __init__(self, llm: LLM):
        runner, scheduler = llm.runner, llm.scheduler
        self.spans: list[tuple[str, float, float]] = []
        self._targets = [
            ("plan", scheduler, "plan"),
            ("moves", runner.kv, "move"),
            ("inputs", runner.inputs, "_fill"),
            ("copy", runner.inputs, "_send"),
            ("sample", runner, "_sample"),
            ("result", StepResult, "__init__"),
            ("wait", StepResult, "_wait"),
            ("commit", scheduler, "commit"),
            ("launch", runner.model, "forward"),
        ]
        if runner.graphs is not None:
            self._targets.append(("launch", runner.graphs, "replay"))

    def __enter__(self) -> Timeline:
        self._kept = [(owner, name, owner.__dict__.get(name)) for _, owner, name in self._targets]
        for part, owner, name in self._targets:
            setattr(owner, name, self._timed(part, getattr(owner, name)))
        return self

    def __exit__(self, *_) -> None:
        for owner, name, own in self._kept:
            if own is None:
                delattr(owner, name)  # the class's method shows again
            else:
                setattr(owner, name, own)

    def _timed(self, part: str, fn: Callable) -> Callable:
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                self.spans.append((part, 1e6 * start, 1e6 * time.perf_counter()))

        return call


def host_parts(llm: LLM, steps: int) -> dict[str, list[float]]:
    """Run ``steps`` steps -> microseconds of each part in each of them; "step" is all of ``LLM.step``, "work" that
    without the waiting."""
    parts: dict[str, list[float]] = defaultdict(list)
    for _ in range(steps):
        with Timeline(llm) as line:
            start = time.perf_counter()
            llm.step()
            whole = 1e6 * (time.perf_counter() - start)
        spent: dict[str, float] = defaultdict(float)
        for part, begin, end in line.spans:
            spent[part] += end - begin
        for part in ("plan", "moves", "inputs", "copy", "launch", "sample", "result", "wait", "commit"):
            parts[part].append(spent[part])
        parts["step"].append(whole)
        parts["work"].append(whole - spent["wait"])
    return dict(parts)


class Kernel(NamedTuple):
    """One run of a kernel on the device, in microseconds."""

    name: str
    start: float
    end: float


def profiled(llm: LLM, steps: int) -> tuple[list[Kernel], int]:
    """Run ``steps`` steps under torch's profiler -> (kernels in their order, copies left out; the host's launches)."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            llm.step()
        torch.cuda.synchronize()
    return split_events((str(e.device_type), e.name, e.time_range.start, e.time_range.end) for e in profile.events())


def split_events(events: Iterable[tuple[str, str, float, float]]) -> tuple[list[Kernel], int]:
    """(device type, name, start, end) of each event -> kernels in their order, and how often the host launched."""
    kernels, launches = [], 0
    for device, name, start, end in events:
        if device.endswith("CUDA"):
            if not name.startswith(("Memcpy", "Memset")) and end > start:
                kernels.append(Kernel(name, start, end))
        elif name.startswith("cu") and any(kind in name for kind in _LAUNCHES):
            launches += 1
    return sorted(kernels, key=lambda k: k.start), launches


def kernel_table(kernels: list[Kernel], steps: int, most: int = 15) -> str:
    """The dearest kernels of a step and the largest gaps, as text. Times are microseconds a step."""
    if not kernels:
        return "no kernel was seen: the profiler gave no events of the device"
    spent, count = defaultdict(float), defaultdict(int)
    for kernel in kernels:
        spent[kernel.name] += kernel.end - kernel.start
        count[kernel.name] += 1
    gaps, busy_to = defaultdict(list), kernels[0].end
    for before, after in zip(kernels, kernels[1:], strict=False):
        gaps[f"{short(before.name, 40)} -> {short(after.name, 40)}"].append(max(0.0, after.start - busy_to))
        busy_to = max(busy_to, after.end)
    total, idle = sum(spent.values()), sum(map(sum, gaps.values()))
    span = busy_to - kernels[0].start
    lines = [
        f"{len(kernels) / steps:.0f} kernels a step; a step {span / steps:.1f} us, in kernels {total / steps:.1f}, "
        f"between them {idle / steps:.1f} ({idle / span:.1%})",
        f"{'us a step':>10}{'share':>8}{'runs':>6}{'us each':>9}  kernel",
    ]
    for name in sorted(spent, key=spent.get, reverse=True)[:most]:
        runs, each = count[name] / steps, spent[name] / count[name]
        lines.append(f"{spent[name] / steps:10.1f}{spent[name] / total:8.1%}{runs:6.0f}{each:9.2f}  {short(name, 90)}")
    lines.append(f"{'us a step':>10}{'times':>8}{'longest':>9}  gap between")
    for pair in sorted(gaps, key=lambda pair: sum(gaps[pair]), reverse=True)[:most]:
        lines.append(f"{sum(gaps[pair]) / steps:10.1f}{len(gaps[pair]) / steps:8.1f}{max(gaps[pair]):9.1f}  {pair}")
    return "\n".join(lines)


def host_table(parts: dict[str, list[float]]) -> str:
    """The parts of the host's step with median, quartiles and share, as text."""
    step = statistics.median(parts["step"])
    lines = [f"{'us':>9}{'from':>9}{'to':>9}{'share':>8}  part of the host's step"]
    for part, values in parts.items():
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        lines.append(f"{middle:9.1f}{low:9.1f}{high:9.1f}{middle / step:8.1%}  {part}")
    return "\n".join(lines)


def short(name: str, most: int) -> str:
    """A kernel's name without its templates' arguments, cut to ``most`` characters."""
    name = name.removeprefix("void ").split("<")[0] if len(name) > most else name
    return name if len(name) <= most else name[: most - 3] + "..."
