"""``labkit bench engine``: decode steps and mixed requests beside the roofline and beside transformers, in one process.

A scenario gives several series (times a step, kernels a step, tokens a second); each is a reading named
bench/engine/MODEL/SCENARIO/SERIES. On a GPU they are measured, and recorded where ``$LABKIT_RECORD`` asks for it;
without one they are replayed, and no model is made. Some batches are decoded with weights of 4 bits too (bN-awq).

A step's time is that between two returns of ``LLM.step`` while steps follow one another: the host's work counts
wherever the GPU waits for it. Bytes are the least a step can move (``labkit.analysis.traffic``), its share is of the
read bandwidth measured in the same process.
"""

from __future__ import annotations

import gc
import json
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from labkit.analysis.traffic import decode_step
from labkit.bench import peers
from labkit.bench.scenarios import MIXED, STEPS, WARM, decode_scenario, fill, mixed_load, mixed_scenario
from labkit.bench.timeline import host_parts, host_table, kernel_table, profiled
from labkit.engine.llm import LLM
from labkit.engine.loader import load
from labkit.engine.packed import bytes_a_weight
from labkit.engine.presets import MODELS
from labkit.errors import LabError
from labkit.hardware import is_live
from labkit.measure.lock import exclusive, gpu_name
from labkit.measure.measure import ceilings, reading
from labkit.measure.measurement import Reading
from labkit.measure.timing import quartiles

BATCHES, CONTEXT, MAX_TOKENS = (1, 8, 64, 256), 512, 8192
PACKED_BATCHES = (1, 64)  # with weights of 4 bits, in groups of 128 where they divide the rows
UNITS = {
    "step": "ms", "gpu": "ms", "context": "tokens", "kernels": "kernels", "launches": "launches", "work": "us",
    "scheduling": "us", "rate": "tokens/s",
}  # fmt: skip
GOALS = {"b1": 0.88, "b64": 0.85}  # share of the read roofline
SCHEDULING_GOAL, MIXED_GOAL = 0.05, 25.0  # of a step of 256; times transformers' continuous batching
PACKED_GOAL = 2.7  # times the rate in bf16, at batch 1


# ---- what is measured, or replayed


class Bench:
    """The scenarios of one model. ``results``: {scenario: {series: Reading}} of all that was measured or replayed."""

    def __init__(self, name: str, say: Callable[[str], None] = print):
        if name not in MODELS:
            raise LabError(f"there is no model shape {name!r}; there are {', '.join(MODELS)}")
        self.name, self.config, self.say = name, MODELS[name], say
        self.results: dict[str, dict[str, Reading]] = {}
        self.top = ceilings()  # first of all: it wants the memory to itself
        self._model = self._llm = None
        self._made = (True, None)  # what the engine at hand was made for: graphs, quantization

    def run(self, batches=BATCHES, eager: bool = True, peer: bool = True) -> None:
        for graphs in (True, False) if eager else (True,):
            for batch in batches:
                scenario = f"b{batch}" if graphs else f"b{batch}-eager"
                self._take(scenario, partial(self._decode, graphs, batch))
            if graphs:
                self._take("mixed", lambda: mixed_scenario(self.llm(True)))
        for batch in PACKED_BATCHES:
            if batch in batches:
                self._take(f"b{batch}-awq", partial(self._decode, True, batch, "awq"))
        self.close()
        for attention in ("sdpa", "eager") if peer else ():
            if is_live():
                self._peer(attention)
            else:
                for scenario in (*(f"transformers-{attention}-b{b}" for b in (1, 8)), "transformers-continuous"):
                    self._take(scenario, None)

    def llm(self, graphs: bool, quantization: str | None = None) -> LLM:
        """The engine, with or without graphs, in bf16 or in 4 bits; one at a time. Those in bf16 have the same weights,
        and those in 4 bits have these, rounded."""
        if self._llm is None or self._made != (graphs, quantization):
            if self._made[1] != quantization:
                self._model = None
            self._llm, self._made = None, (graphs, quantization)
            gc.collect()
            torch.cuda.empty_cache()
            if self._model is None:
                self._model = load(self.config, "bfloat16", "cuda", progress=None, quantization=quantization)
            tokens = CONTEXT + 2 * (STEPS + WARM + 64)
            blocks = 1 + max(BATCHES) * -(-tokens // 16)
            settings = dict(max_num_seqs=max(BATCHES), max_batched_tokens=MAX_TOKENS, num_blocks=blocks, trace=False)
            start = time.perf_counter()
            self._llm = LLM(self._model, max_model_len=2048, cuda_graphs=graphs, **settings)
            if graphs and self._llm.runner.graphs is None:
                raise LabError("the engine's own decode step could not be captured; run the GPU tests")
            kind = f"{'' if graphs else ' without graphs'}{' in 4 bits' if quantization else ''}"
            self.say(f"engine{kind} ready in {time.perf_counter() - start:.1f} s")
        return self._llm

    def close(self) -> None:
        """Give the GPU's memory back."""
        self._llm = self._model = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _decode(self, graphs: bool, batch: int, quantization: str | None = None) -> dict:
        return decode_scenario(self.llm(graphs, quantization), batch, CONTEXT)

    def _take(self, scenario: str, run: Callable[[], dict] | None) -> None:
        """Every series of a scenario; one that cannot be had is left out, and a line says so."""
        id = f"bench/engine/{self.name}/{scenario}"
        found: dict[str, Reading] = {}
        try:
            if is_live():
                for series, values in run().items():
                    found[series] = reading(f"{id}/{series}", lambda v=values: v, UNITS[series])
        except Exception as error:  # what one scenario breaks on, the others need not
            self.say(
                f"{scenario} left out: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            )
        if not is_live():
            for series, unit in UNITS.items():
                try:
                    found[series] = reading(f"{id}/{series}", lambda: 0.0, unit)
                except LabError:
                    continue  # it was not recorded; what a table needs is checked when it is made
        if found:
            self.results.setdefault(scenario, {}).update(found)
            self.say(self.line(scenario))

    def _peer(self, attention: str) -> None:
        model = None
        try:
            model = peers.transformers_model(self.config, torch.bfloat16, "cuda", attention)
            prompt = np.random.default_rng(1).integers(0, self.config.vocab_size, CONTEXT - 32).tolist()
            for batch in (1, 8):
                rates = partial(self._rates, model, prompt, batch)
                self._take(f"transformers-{attention}-b{batch}", rates)
            if attention == "sdpa":
                prompts, lengths = mixed_load(self.config.vocab_size)
                run = partial(peers.continuous_rate, model, prompts, lengths)
                self._take("transformers-continuous", lambda: {"rate": [run()]})
        except LabError as error:
            self.say(f"transformers left out: {error}")
        finally:
            model = None
            self.close()

    @staticmethod
    def _rates(model, prompt, batch) -> dict:
        peers.generate_rate(model, prompt, batch, 4)
        return {"rate": [peers.generate_rate(model, prompt, batch, 64) for _ in range(3)]}

    # ---- what it says

    def figures(self, scenario: str) -> dict:
        """The scenario's figures, as the last line of JSON has them; a series that is missing is left out."""
        found = self.results[scenario]
        out: dict = {"scenario": scenario}
        for series, r in found.items():
            low, high = quartiles(r.values)
            out[f"{series}_{UNITS[series].replace('/', '_per_')}"] = round(r.value, 4)
            if len(r.values) > 1:
                out[f"{series}_quartiles"] = [round(low, 4), round(high, 4)]
        if "step" in found and "context" in found:
            batch, packed = int(re.match(r"b(\d+)", scenario)[1]), scenario.endswith("-awq")
            width = bytes_a_weight(self.config) if packed else 2
            cost = decode_step(self.config, batch, round(found["context"].value), width, lm_head_bytes=2).cost
            seconds = found["step"].value / 1e3
            plain = self.results.get(f"b{batch}", {})
            if packed and "step" in plain:
                out["times_bf16"] = round(plain["step"].value / found["step"].value, 4)
            out |= {"bytes": cost.bytes, "tokens_per_s": round(batch / seconds, 1)}
            out["share_of_read"] = round(cost.bytes / seconds / 1e9 / self.top.read_gb_s, 4)
            if "gpu" in found:
                out["gpu_share_of_read"] = round(cost.bytes / found["gpu"].value / 1e6 / self.top.read_gb_s, 4)
            if "scheduling" in found:
                out["scheduling_share"] = round(found["scheduling"].value / 1e3 / found["step"].value, 4)
        return out

    def goals(self) -> list[tuple[str, float, float, bool]]:
        """(what, reached figure, goal, whether it is met) of every goal whose scenarios are there."""
        rows = []
        for scenario, goal in GOALS.items():
            if scenario in self.results:
                got = self.figures(scenario).get("share_of_read", 0.0)
                rows.append((f"{scenario}: share of the read roofline", got, goal, got >= goal))
        if "times_bf16" in (packed := self.figures("b1-awq") if "b1-awq" in self.results else {}):
            got = packed["times_bf16"]
            rows.append(("b1 in 4 bits: times the rate in bf16", got, PACKED_GOAL, got >= PACKED_GOAL))
        if "scheduling_share" in (big := self.figures("b256") if "b256" in self.results else {}):
            got = big["scheduling_share"]
            rows.append(("b256: scheduling's share of a step", got, SCHEDULING_GOAL, got < SCHEDULING_GOAL))
        if {"mixed", "transformers-continuous"} <= self.results.keys():
            got = self.results["mixed"]["rate"].value / self.results["transformers-continuous"]["rate"].value
            rows.append((f"{MIXED} mixed requests: times transformers", got, MIXED_GOAL, got >= MIXED_GOAL))
        return rows

    def line(self, scenario: str) -> str:
        """One row of the table, with fixed rounding."""
        f = self.figures(scenario)
        if "tokens_per_s" not in f:
            low, high = f.get("rate_quartiles", (f["rate_tokens_per_s"],) * 2)
            return f"{scenario:26}{'':27}{f['rate_tokens_per_s']:10.0f}  [{low:.0f} to {high:.0f}]"
        low, high = f.get("step_quartiles", (f["step_ms"],) * 2)
        spread = f"[{low:.2f} to {high:.2f}]"
        gpu = f"{f['gpu_ms']:8.3f}" if "gpu_ms" in f else f"{'-':>8}"
        counts = [
            f"{f[k]:8.0f}" if k in f else f"{'-':>8}" for k in ("kernels_kernels", "launches_launches", "work_us")
        ]
        sched = f"{f['scheduling_share']:8.1%}" if "scheduling_share" in f else f"{'-':>8}"
        return (
            f"{scenario:26}{f['step_ms']:9.3f}{spread:>18}{f['tokens_per_s']:10.0f}{f['bytes'] / 1e9:8.2f}"
            f"{f['share_of_read']:8.1%}{gpu}{''.join(counts)}{sched}"
            + (f"  {f['times_bf16']:.2f} x bf16" if "times_bf16" in f else "")
        )


HEAD = (
    f"{'scenario':26}{'ms a step':>9}{'quartiles':>18}{'tokens/s':>10}{'GB':>8}{'of read':>8}{'gpu ms':>8}"
    f"{'kernels':>8}{'launch':>8}{'host us':>8}{'sched':>8}"
)


def bench_engine(name: str = "llama-3-8b", batches=BATCHES, eager: bool = True, peer: bool = True) -> int:
    """Print the table, the goals, and all of it in JSON as the last line. 0 if every goal was met, else 1.

    Raises LabError for an unknown model, and where there is no GPU and nothing is recorded.
    """
    bench = Bench(name)
    print(f"{name}, bf16, random weights, context {CONTEXT}; read {bench.top.read_gb_s:.0f} GB/s")
    print(HEAD)
    with exclusive(gpu_name()) if is_live() else nullcontext():  # nobody else times on this GPU meanwhile
        bench.run(batches, eager, peer)
    if not bench.results:
        raise LabError(f"nothing was measured of {name}, and nothing is recorded: run this on a GPU with --record")
    goals = bench.goals()
    for what, got, goal, met in goals:
        print(f"{what}: {got:.3f}, goal {goal:g}: {'reached' if met else 'missed'}")
    source = next(iter(next(iter(bench.results.values())).values())).source
    print(f"{sum(g[3] for g in goals)} of {len(goals)} goals reached; {source}")
    rows = [bench.figures(scenario) for scenario in bench.results]
    asked = [{"what": w, "got": round(got, 4), "goal": goal, "reached": met} for w, got, goal, met in goals]
    print(json.dumps({"model": name, "source": source, "ceilings": vars(bench.top), "goals": asked, "rows": rows}))
    return 0 if all(g[3] for g in goals) else 1


def profile_engine(
    name: str = "llama-3-8b", batches=(1, 64), graphs: bool = True, steps: int = 5, quantization: str | None = None
) -> int:
    """Print the dearest kernels and gaps of a decode step, and the host's timeline of one. Needs a GPU."""
    if not is_live():
        raise LabError("a profile needs a CUDA GPU: it looks at this machine's kernels, and none is recorded")
    bench = Bench(name)
    llm = bench.llm(graphs, quantization)
    for batch in batches:
        lives = fill(llm, batch, CONTEXT, WARM + steps + 30)
        for _ in range(WARM):
            llm.step()
        parts = host_parts(llm, 30)
        kernels, launches = profiled(llm, steps)
        print(f"\n== {name}, batch {batch}, context {CONTEXT}, {'graphs' if graphs else 'eager'}")
        print(kernel_table(kernels, steps))
        print(f"{launches / steps:.1f} launches and copies a step by the host")
        print(host_table(parts))
        for live in lives:
            llm.abort(live.request.id)
    return 0
