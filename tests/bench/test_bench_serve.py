"""Serving in real time: on a small model and a clock of the test's own; the command without a GPU."""

import json
from pathlib import Path

import pytest

import labkit
from labkit import cli
from labkit.bench.serve import UNITS, serve, serving_load
from labkit.engine import LLM, load
from labkit.engine.trace import Trace
from labkit.errors import LabError
from tests.bench.test_bench_engine import SHAPE

RECORDED = Path(labkit.__file__).parent / "recordings" / "nvidia-h200-serve.json.gz"


class Clock:
    """Time passes by a millisecond a look, and while somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        self.now += 1e-3
        return self.now

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds


@pytest.fixture(scope="module")
def llm():
    return LLM(load(SHAPE, seed=1), num_blocks=120, max_num_seqs=8, max_batched_tokens=256, trace=True)


def test_all_are_served_and_the_trace_does_it_again(llm, tmp_path):
    clock = Clock()
    llm.scheduler.clock = clock
    arrivals = serving_load(12, 20.0)
    found = serve(llm, arrivals, clock, clock.sleep)
    assert set(found) == set(UNITS)
    assert all(len(found[series]) == 12 for series in ("queue", "ttft", "tpot", "e2e", "cached", "prompt"))
    assert all(0 <= q < t < e for q, t, e in zip(found["queue"], found["ttft"], found["e2e"], strict=True))
    assert found["seconds"][0] >= arrivals[-1].arrival_s, "nobody is served before he comes"
    assert found["rate"][0] == sum(a.output_len for a in arrivals) / found["seconds"][0]
    assert sum(found["cached"]) > 0, "prompts share their heads"
    assert found["preemptions"][0] > 0, "the pool is too small for all"
    for name in ("t.json", "t.json.gz"):
        llm.trace.save(tmp_path / name)
        trace = Trace.load(tmp_path / name)
        _, again = trace.replay()
        assert again.to_dict()["events"] == trace.events and len(trace.plans) == llm.trace.num_steps
    assert (tmp_path / "t.json.gz").stat().st_size < (tmp_path / "t.json").stat().st_size / 3
    (tmp_path / "t.json.gz").write_bytes((tmp_path / "t.json.gz").read_bytes()[:-40])
    with pytest.raises(LabError, match=r"t\.json\.gz cannot be read as a trace"):
        Trace.load(tmp_path / "t.json.gz")


def test_the_recorded_run_is_taken_again_step_by_step():
    """1000 requests on an H200: today's scheduler decides as it did then, and the recorded latencies are of it."""
    trace, load = Trace.load(RECORDED), serving_load()
    assert trace.replay()[1].to_dict()["events"] == trace.events
    added = [e for e in trace.events if e["kind"] == "add"]
    assert [e["prompt"] for e in added] == [list(a.prompt) for a in sorted(load, key=lambda a: a.arrival_s)]
    recorded = json.loads(RECORDED.with_name("nvidia-h200.json").read_text())["readings"]
    series = {name: recorded[f"bench/serve/llama-3-8b/{name}"]["values"] for name in UNITS}
    assert len(series["ttft"]) == len(added) == 1000
    assert series["prompt"] == [len(e["prompt"]) for e in added]
    starts = {}
    for plan in trace.plans:
        for id, start in zip(plan["ids"], plan["starts"], strict=True):
            starts.setdefault(id, start)
    assert series["cached"] == [starts[e["id"]] for e in added], "a prompt begins behind its cached tokens"
    assert series["steps"][0] - len(trace.plans) in (0, 1), "the last call may only wait for what runs"
    assert not series["preemptions"][0] and not any(plan["preempted"] for plan in trace.plans)


def test_a_request_that_fails_is_no_result(llm):
    clock = Clock()
    llm.scheduler.clock = clock
    real = llm.engine.step

    def step():
        llm.engine.step = real
        live = llm.scheduler.waiting[0].id
        llm.abort(live)
        return real()

    llm.engine.step = step
    with pytest.raises(LabError, match="1 of 3 requests did not end at their length"):
        serve(llm, serving_load(3, 1e4), clock, clock.sleep)


def test_without_a_gpu_it_says_what_it_needs(capsys):
    assert cli.main(["bench", "serve", "--trace", "x.json"]) == 1
    assert "needs a CUDA GPU" in capsys.readouterr().err
    assert cli.main(["bench", "serve", "--model", "gpt-9"]) == 1
    assert "there is no model shape 'gpt-9'" in capsys.readouterr().err
    for wrong in (["--requests", "0"], ["--rate", "nan"], ["--rate", "-1"]):
        assert cli.main(["bench", "serve", *wrong]) == 1
        assert "at least 1 request at a rate above 0 a second is served, got" in capsys.readouterr().err
    assert cli.main(["bench", "serve", "--requests", "5"]) == 1
    assert "without a CUDA GPU the recorded run is shown, of 1000 requests" in capsys.readouterr().err
    assert cli.main(["bench", "serve", "rms_norm"]) == 1
    assert "bench serve takes no operators, got rms_norm" in capsys.readouterr().err
