"""``labkit bench serve``: requests that arrive while others run, as users felt it, with the scheduler's whole trace.

The load is drawn from a seed: Poisson arrivals, prompts and answers of mixed lengths, and a few system prompts that
many of them share. It is served in real time: a request is given to the engine once its time has come, and its waiting
counts from then, also while a step keeps the host from looking. The pool holds a tenth of all their tokens, so blocks
kept for the prefix cache have to make way.

Each figure is a reading named bench/serve/MODEL/SERIES: one value a request, or one for the run.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from labkit.engine.arrivals import Arrival, poisson_load
from labkit.engine.llm import LLM
from labkit.engine.loader import load
from labkit.engine.metrics import Percentiles, RequestMetrics
from labkit.engine.presets import MODELS
from labkit.engine.request import SamplingParams
from labkit.errors import LabError
from labkit.hardware import is_live
from labkit.measure.lock import exclusive, gpu_name
from labkit.measure.measure import reading

REQUESTS, RATE, SEATS, BLOCKS, TOKENS_A_STEP = 1000, 40.0, 128, 3200, 2048
UNITS = {
    "queue": "ms", "ttft": "ms", "tpot": "ms", "e2e": "ms", "longest-gap": "ms", "seconds": "s", "rate": "tokens/s",
    "steps": "steps", "preemptions": "preemptions", "cached": "tokens", "prompt": "tokens",
}  # fmt: skip


def serving_load(n: int = REQUESTS, rate: float = RATE) -> list[Arrival]:
    """``n`` arrivals, ``rate`` a second: 64 to 512 prompt tokens behind one of 8 shared heads of 64, answers of 16 to
    256. The same in every run."""
    return poisson_load(n, rate, seed=0, shared_prefix=64, groups=8)


def serve(
    llm: LLM,
    arrivals: Sequence[Arrival],
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, list[float]]:
    """Serve ``arrivals`` in real time -> {series of UNITS: values}. ``clock`` is the scheduler's.

    Raises LabError if a request ended otherwise than at its length.
    """
    due, lives, steps, start = deque(sorted(arrivals, key=lambda a: a.arrival_s)), [], 0, clock()
    vocab = llm.config.vocab_size
    while due or llm.engine.busy:
        now = clock() - start
        while due and due[0].arrival_s <= now:
            a = due.popleft()
            params = SamplingParams(max_tokens=a.output_len, ignore_eos=True)
            lives.append(llm.engine.add([token % vocab for token in a.prompt], params, a.priority))
            lives[-1].request.arrival_s = start + a.arrival_s
        if llm.engine.busy:
            llm.step()
            steps += 1
        else:
            sleep(due[0].arrival_s - now)
    seconds = clock() - start
    if wrong := [live.request for live in lives if live.request.finish_reason != "length"]:
        raise LabError(f"{len(wrong)} of {len(lives)} requests did not end at their length; the first: {wrong[0]}")
    felt = [RequestMetrics.of(live.request) for live in lives]
    found = {
        name: [1e3 * getattr(m, f"{name.replace('-', '_')}_s") for m in felt]
        for name in ("queue", "ttft", "tpot", "e2e", "longest-gap")
    }
    return found | {
        "seconds": [seconds],
        "rate": [sum(a.output_len for a in arrivals) / seconds],
        "steps": [steps],
        "preemptions": [sum(m.preemptions for m in felt)],
        "cached": [m.cached_tokens for m in felt],
        "prompt": [len(a.prompt) for a in arrivals],
    }


def _measure(name: str, n: int, rate: float, trace: str | None) -> dict[str, list[float]]:
    model = load(MODELS[name], "bfloat16", "cuda", progress=None)
    settings = dict(max_num_seqs=SEATS, max_batched_tokens=TOKENS_A_STEP, num_blocks=BLOCKS, max_model_len=2048)
    llm = LLM(model, trace=True, **settings)
    with exclusive(gpu_name()):
        found = serve(llm, serving_load(n, rate))
    if trace:
        llm.trace.save(trace)
    return found


def bench_serve(name: str = "llama-3-8b", n: int = REQUESTS, rate: float = RATE, trace: str | None = None) -> int:
    """Print what users felt, and all of it in JSON as the last line. trace: a file for the scheduler's trace.

    On a GPU it is measured, without one replayed. Raises LabError for an unknown model, and where nothing is recorded.
    """
    if name not in MODELS:
        raise LabError(f"there is no model shape {name!r}; there are {', '.join(MODELS)}")
    if n < 1 or not (0 < rate < math.inf):
        raise LabError(f"at least 1 request at a rate above 0 a second is served, got {n} at {rate}")
    if (n, rate) != (REQUESTS, RATE) and not is_live():
        raise LabError(
            f"without a CUDA GPU the recorded run is shown, of {REQUESTS} requests at {RATE:g} a second; "
            "leave --requests and --rate out"
        )
    if trace and not is_live():
        raise LabError("a trace is made where requests are served, which needs a CUDA GPU; leave --trace out")
    if trace and not Path(trace).resolve().parent.is_dir():
        raise LabError(f"{trace} cannot be written: there is no folder {Path(trace).resolve().parent}")
    measured = _measure(name, n, rate, trace) if is_live() else dict.fromkeys(UNITS, ())
    found = {
        series: reading(f"bench/serve/{name}/{series}", lambda v=values: v, UNITS[series])
        for series, values in measured.items()
    }
    requests, one = len(found["ttft"].values), {s: r.value for s, r in found.items() if len(r.values) == 1}
    print(f"{name}, bf16, random weights: {requests} requests in {one['seconds']:.1f} s, {one['rate']:.0f} tokens/s")
    print(f"{'ms':12}{'p50':>10}{'p90':>10}{'p99':>10}{'mean':>10}")
    rows = {}
    for series in ("queue", "ttft", "tpot", "e2e", "longest-gap"):
        p = rows[series] = Percentiles.of(found[series].values)
        print(f"{series:12}{p.p50:10.1f}{p.p90:10.1f}{p.p99:10.1f}{p.mean:10.1f}")
    hits = sum(found["cached"].values) / sum(found["prompt"].values)
    print(f"{one['steps']:.0f} steps, {one['preemptions']:.0f} preemptions, {hits:.1%} of prompt tokens were cached")
    source = found["ttft"].source
    figures = {series: vars(p) for series, p in rows.items()}
    print(json.dumps({"model": name, "source": source, "requests": requests, **one, "hits": hits, "ms": figures}))
    return 0
