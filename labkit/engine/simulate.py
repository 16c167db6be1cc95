"""The real scheduler under a load, with a cost model for a clock: what a policy does to latency, in seconds on a CPU.

Every decision is the engine's own. Only the time a step takes is computed, from the bytes it moves and the arithmetic
it does, so the figures say how schedules compare, and as much about a GPU as the cost model does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.engine.arrivals import EOS, Arrival
from labkit.engine.config import ModelConfig
from labkit.engine.pool import BlockPool
from labkit.engine.request import Request, SamplingParams
from labkit.engine.scheduler import Scheduler
from labkit.engine.step import Step
from labkit.engine.trace import Trace
from labkit.errors import LabError


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step. Bytes and arithmetic overlap, so the longer of the two counts.

    weight_bytes: read once a step. kv_bytes_per_token: read for each token attended to, written for each computed.
    flops_per_token: of the products with weights. flops_per_pair: of attention, for each pair of query and key.
    bandwidth_bytes_s, flops_s: what the device reaches, not its data sheet. launch_s: a step's fixed time on it.
    host_s: planning and preparing a step; running ahead hides it behind the step before. swap_bytes_s: to and from
    host memory.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    flops_per_token: float
    flops_per_pair: float
    bandwidth_bytes_s: float
    flops_s: float
    launch_s: float = 0.0
    host_s: float = 0.0
    swap_bytes_s: float = 50e9

    def __post_init__(self):
        for name in ("kv_bytes_per_token", "flops_per_token", "flops_per_pair", "launch_s", "host_s"):
            if not getattr(self, name) >= 0:
                raise LabError(f"{name} must be at least 0, got {getattr(self, name)!r}")
        for name in ("weight_bytes", "bandwidth_bytes_s", "flops_s", "swap_bytes_s"):
            if not getattr(self, name) > 0:
                raise LabError(f"{name} must be positive, got {getattr(self, name)!r}")

    @classmethod
    def of_model(
        cls,
        config: ModelConfig,
        bandwidth_gb_s: float,
        tflops: float,
        weight_bits: float = 16,
        kv_bits: float = 16,
        **rest,
    ) -> CostModel:
        """From a model's shape, and the bandwidth (GB/s) and arithmetic (TFLOP/s) that a device reaches."""
        return cls(
            weight_bytes=config.matmul_params * weight_bits / 8,
            kv_bytes_per_token=config.kv_bytes_per_token(1) * kv_bits / 8,
            flops_per_token=2 * config.matmul_params,
            flops_per_pair=4 * config.num_layers * config.q_size,
            bandwidth_bytes_s=bandwidth_gb_s * 1e9,
            flops_s=tflops * 1e12,
            **rest,
        )

    def seconds(self, chunks: Sequence[tuple[int, int]], swapped_tokens: int = 0) -> float:
        """chunks: (start, count) of each request: tokens [start, start + count) attend to all before and themselves."""
        if not chunks and not swapped_tokens:
            return 0.0
        tokens = sum(count for _, count in chunks)
        context = sum(start + count for start, count in chunks)
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in chunks)
        moved = (self.weight_bytes if chunks else 0) + self.kv_bytes_per_token * (context + tokens)
        work = self.flops_per_token * tokens + self.flops_per_pair * pairs
        swap_s = self.kv_bytes_per_token * swapped_tokens / self.swap_bytes_s
        return max(moved / self.bandwidth_bytes_s, work / self.flops_s) + self.launch_s + swap_s


@dataclass
class SimResult:
    """What came of it. All arrays are [requests], in seconds, in the order of arrival; nan where there is none.

    queue_s: arrival to first step. ttft_s: arrival to first token. tpot_s: between tokens, mean of a request; nan for
    one token. e2e_s: arrival to end. gap_s: the longest wait between two tokens of the request.
    """

    queue_s: np.ndarray
    ttft_s: np.ndarray
    tpot_s: np.ndarray
    e2e_s: np.ndarray
    gap_s: np.ndarray
    output_tokens: int
    makespan_s: float
    steps: int
    preemptions: int
    prefix_hit_rate: float
    trace: Trace

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the time from the first arrival to the last token."""
        return self.output_tokens / self.makespan_s

    @property
    def longest_gap_s(self) -> float:
        """The longest that anyone waited between two tokens; nan if nobody got two."""
        return float(np.nanmax(self.gap_s)) if not np.isnan(self.gap_s).all() else float("nan")

    def percentiles(self, name: str, q: Sequence[float] = (50, 90, 99)) -> dict[str, float]:
        """{"p50": …} of "queue", "ttft", "tpot", "e2e" or "gap", over the requests that have one."""
        if name not in ("queue", "ttft", "tpot", "e2e", "gap"):
            raise LabError(f"percentiles are kept of queue, ttft, tpot, e2e and gap, not of {name!r}")
        values = getattr(self, f"{name}_s")
        values = values[~np.isnan(values)]
        return {f"p{p:g}": float(np.percentile(values, p)) if len(values) else float("nan") for p in q}

    def goodput(self, ttft_s: float = float("inf"), tpot_s: float = float("inf")) -> float:
        """Requests a second whose first token came within ttft_s and whose tokens came within tpot_s on average."""
        good = (self.ttft_s <= ttft_s) & ~(self.tpot_s > tpot_s)  # one token has no tpot, and cannot break it
        return float(good.sum()) / self.makespan_s


def simulate(
    options: dict,
    load: Sequence[Arrival],
    cost: CostModel,
    num_blocks: int = 4096,
    block_size: int = 16,
    prefix_caching: bool = True,
    run_ahead: bool = True,
) -> SimResult:
    """Serve ``load`` with ``Scheduler(**options)``. Raises LabError if the load is empty or holds what cannot run.

    run_ahead: each step is planned while the one before runs, as the engine does on a GPU; it hides ``host_s``, and
    costs a step for each request that ends by itself. With batching "static" and "bucketed" each step costs what a
    rectangle costs: all rows of the batch, ended ones too, as long as the longest.
    """
    if not load:
        raise LabError("there is nothing to serve: the load is empty")
    now, trace = 0.0, Trace()
    pool = BlockPool(num_blocks, block_size, prefix_caching)
    scheduler = Scheduler(pool, clock=lambda: now, trace=trace, **{"eos_token_ids": (EOS,), **options})
    coming = sorted(load, key=lambda arrival: arrival.arrival_s)
    requests: list[Request] = []
    flight: list[tuple[Step, float]] = []  # (step, when it ends): steps run one after another
    ahead = 2 if run_ahead else 1
    free_s = 0.0  # when the device is free
    batch: dict[int, Request] = {}
    while len(requests) < len(coming) or scheduler.has_unfinished():
        while len(requests) < len(coming) and coming[len(requests)].arrival_s <= now:
            requests.append(_request(len(requests), coming[len(requests)]))
            scheduler.add(requests[-1], requests[-1].data.arrival_s)
        step = scheduler.plan() if len(flight) < ahead else None
        if step is not None:
            if scheduler.options.batching == "continuous":
                rows = [(c.start, c.count) for c in step.chunks]
            else:
                rows = _rectangle(step, batch)
            swapped = (len(step.swap_out) + len(step.swap_in)) * block_size
            ready_s = now + cost.host_s  # the device starts when the host is ready and the step before has ended
            free_s = max(free_s, ready_s) + cost.seconds(rows, swapped)
            flight.append((step, free_s))
            now = ready_s
        elif flight:
            step, end_s = flight.pop(0)
            now = max(now, end_s)
            scheduler.commit(step, [_token(c.request) for c in step.sampling])
        else:
            now = max(now, coming[len(requests)].arrival_s)
    return _result(requests, scheduler, trace)


def _request(id: int, arrival: Arrival) -> Request:
    request = Request(id, arrival.prompt, SamplingParams(max_tokens=arrival.max_tokens), arrival.priority)
    request.data = arrival
    return request


def _token(request: Request) -> int:
    """The next token: the end token where the answer ends, before that whatever (its own number, which is no EOS)."""
    made = len(request.token_times_s) + 1
    return EOS if made >= request.data.output_len else made % EOS


def _rectangle(step: Step, batch: dict[int, Request]) -> list[tuple[int, int]]:
    """A static batch as its kernels see it: as many rows as it had at first, each as long as the longest. ``batch``
    holds its members from step to step."""
    if all(request.finished for request in batch.values()):
        batch.clear()
    batch.update((c.request.id, c.request) for c in step.chunks)
    count = max((c.count for c in step.chunks), default=0)
    end = max((c.start + c.count for c in step.chunks), default=0)
    return [(end - count, count)] * len(batch) if count else []


def _result(requests: list[Request], scheduler: Scheduler, trace: Trace) -> SimResult:
    def column(value) -> np.ndarray:
        return np.array([value(r) for r in requests], dtype=np.float64)

    def gaps(r: Request) -> np.ndarray:
        return np.diff(r.token_times_s)

    nan = float("nan")
    return SimResult(
        queue_s=column(lambda r: r.first_scheduled_s - r.arrival_s),
        ttft_s=column(lambda r: r.first_token_s - r.arrival_s),
        tpot_s=column(lambda r: gaps(r).mean() if len(gaps(r)) else nan),
        e2e_s=column(lambda r: r.finish_s - r.arrival_s),
        gap_s=column(lambda r: gaps(r).max() if len(gaps(r)) else nan),
        output_tokens=sum(len(r.output_ids) for r in requests),
        makespan_s=max(r.finish_s for r in requests) - min(r.arrival_s for r in requests),
        steps=scheduler.next_index,
        preemptions=sum(r.num_preemptions for r in requests),
        prefix_hit_rate=scheduler.pool.stats.hit_rate,
        trace=trace,
    )
