"""What the engine's benchmark runs: batches that decode, and mixed requests. On a GPU, and on a CPU as well.

Each scenario returns {series: values}; the units are in ``labkit.bench.engine``.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from labkit.bench.timeline import SCHEDULING, host_parts, profiled
from labkit.engine.arrivals import with_lengths
from labkit.engine.llm import LLM
from labkit.engine.request import SamplingParams

STEPS, WARM, MIXED = 60, 10, 128


def fill(llm: LLM, batch: int, context: int, steps: int, seed: int = 0) -> list:
    """Let ``batch`` requests decode, so that in the middle of the ``steps`` to come each attends to some ``context``
    tokens. -> the requests; none ends before those steps are done."""
    prompt = max(1, context - steps // 2)
    prefills = -(-batch * prompt // llm.runner.max_batched_tokens)  # meanwhile the first ones decode already
    rng = np.random.default_rng([seed, batch, context])
    params = SamplingParams(max_tokens=prefills + steps + 8, ignore_eos=True)
    top = llm.config.vocab_size
    lives = [llm.engine.add(rng.integers(0, top, prompt).tolist(), params) for _ in range(batch)]
    while not all(live.token_ids for live in lives):
        llm.step()
    return lives


def settle(llm: LLM) -> None:
    if llm.model.device.type == "cuda":
        torch.cuda.synchronize()


def decode_scenario(llm: LLM, batch: int, context: int, steps: int = STEPS, warm: int = WARM) -> dict[str, list[float]]:
    """step: ms between two steps; context: mean tokens attended to; work and scheduling: us of the host a step; on a
    GPU also gpu: ms of a graph's replay, kernels and launches a step."""
    seen, others = 3, 20  # steps under the profiler, and under the host's clocks
    lives = fill(llm, batch, context, warm + steps + others + seen)
    try:
        for _ in range(warm):
            llm.step()
        settle(llm)
        times, tokens, last = [], [], time.perf_counter()
        for _ in range(steps):
            llm.step()
            now = time.perf_counter()
            times.append(1e3 * (now - last))
            last = now
            tokens.append(sum(live.request.num_tokens for live in lives) / batch)
        assert not any(live.done for live in lives)
        found = {"step": times, "context": [statistics.mean(tokens)]}
        parts = host_parts(llm, others)
        found["work"] = parts["work"]
        found["scheduling"] = [sum(spent) for spent in zip(*(parts[name] for name in SCHEDULING), strict=True)]
        if llm.model.device.type == "cuda":
            kernels, launches = profiled(llm, seen)
            found["kernels"], found["launches"] = [len(kernels) / seen], [launches / seen]
            if llm.runner.graphs is not None:
                found["gpu"] = replay_ms(llm, batch)
        return found
    finally:
        for live in lives:
            llm.abort(live.request.id)
        settle(llm)


def replay_ms(llm: LLM, batch: int, repeats: int = 20) -> list[float]:
    """Milliseconds of a graph's replay by the GPU's own clock: the step without the host. What it computes is void."""
    graphs, marks = llm.runner.graphs, []
    bucket = next(b for b in graphs.buckets if b >= batch)
    settle(llm)
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs.replay(bucket)
        end.record()
        marks.append((start, end))
    settle(llm)
    return [start.elapsed_time(end) for start, end in marks]


def mixed_load(vocab: int, n: int = MIXED) -> tuple[list[list[int]], list[int]]:
    """(prompts of 64 to 512 tokens, lengths of the answers from 16 to 256), the same in every run."""
    load_ = with_lengths([0.0] * n, seed=0)
    return [[token % vocab for token in a.prompt] for a in load_], [a.output_len for a in load_]


def mixed_scenario(llm: LLM, n: int = MIXED, runs: int = 3) -> dict[str, list[float]]:
    """rate: new tokens a second from the first request's arrival to the last one's end, in each of ``runs``."""
    prompts, lengths = mixed_load(llm.config.vocab_size, n)
    params = [SamplingParams(max_tokens=length, ignore_eos=True) for length in lengths]
    rates = []
    for _ in range(runs + 1):
        llm.pool.reset_prefix_cache()
        settle(llm)
        start = time.perf_counter()
        llm.generate(prompts, params, progress=False)
        rates.append(sum(lengths) / (time.perf_counter() - start))
    return {"rate": rates[1:]}  # the first one warms up
