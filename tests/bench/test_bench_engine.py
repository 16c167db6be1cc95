"""The engine's benchmark: its scenarios on a small model, its figures by hand, and its replay without a GPU."""

import gc
import json
import weakref
from statistics import median

import pytest
import torch

from labkit import cli
from labkit.analysis.traffic import decode_step
from labkit.bench import engine as bench_module
from labkit.bench import peers
from labkit.bench.engine import BATCHES, UNITS, Bench, bench_engine
from labkit.bench.scenarios import decode_scenario, fill, mixed_load, mixed_scenario
from labkit.bench.timeline import Timeline, host_parts, host_table, kernel_table, short, split_events
from labkit.engine import LLM, ModelConfig, load
from labkit.engine.presets import MODELS
from labkit.engine.result import StepResult
from labkit.errors import LabError
from labkit.measure.measurement import Ceilings, Reading

SHAPE = ModelConfig(
    architecture="llama", vocab_size=90, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, max_positions=1024,
)  # fmt: skip
TOP = Ceilings(copy_gb_s=4000.0, read_gb_s=4500.0, matmul_tflop_s=700.0)


@pytest.fixture(scope="module")
def model():
    return load(SHAPE, seed=1)


@pytest.fixture(params=[False, True], ids=["plain", "ahead"])
def llm(model, request):
    return LLM(model, num_blocks=400, max_num_seqs=8, max_batched_tokens=64, run_ahead=request.param, trace=False)


# ---- scenarios


def test_decoding_requests_are_as_long_as_asked_for_and_none_ends(llm):
    found = decode_scenario(llm, batch=5, context=100, steps=20, warm=3)
    assert len(found["step"]) == 20 and all(t > 0 for t in found["step"])
    assert abs(found["context"][0] - 100) <= 20
    assert len(found["work"]) == len(found["scheduling"]) == 20
    assert all(0 < s < w for s, w in zip(found["scheduling"], found["work"], strict=True))
    llm.scheduler.check()
    assert not llm.engine.busy and llm.pool.num_used == 0


def test_every_measured_step_decodes_the_whole_batch(llm):
    seen = []
    plan = llm.scheduler.plan
    lives = fill(llm, 6, 80, 30)
    llm.scheduler.plan = lambda: seen.append(step := plan()) or step
    for _ in range(30):
        llm.step()
    assert all(len(s.chunks) == 6 and all(c.count == 1 for c in s.chunks) for s in seen[:-1])
    assert not any(live.done for live in lives)


def test_mixed_requests_are_the_same_in_every_run_and_all_come_through(model):
    prompts, lengths = mixed_load(90)
    assert (prompts, lengths) == mixed_load(90) and len(prompts) == len(lengths) == 128
    assert min(map(len, prompts)) >= 64 and max(map(len, prompts)) <= 512 and 16 <= min(lengths) <= max(lengths) <= 256
    llm = LLM(model, num_blocks=400, max_num_seqs=8, max_batched_tokens=256, trace=False)
    rates = mixed_scenario(llm, n=4, runs=2)["rate"]
    assert len(rates) == 2 and min(rates) > 0 and llm.pool.num_used == 0


# ---- the timeline


def test_the_parts_of_a_step_are_named_and_make_up_most_of_it(llm):
    lives = fill(llm, 8, 60, 30)
    parts = host_parts(llm, 15)
    for part in ("plan", "inputs", "launch", "result", "commit"):
        assert len(parts[part]) == 15 and min(parts[part]) > 0, part
    assert median(parts["moves"]) < median(parts["launch"]) and "launch" in host_table(parts)
    total = [sum(parts[p][i] for p in parts if p not in ("step", "work")) for i in range(15)]
    shares = [t / whole for t, whole in zip(total, parts["step"], strict=True)]
    assert max(shares) <= 1 and median(shares) > 0.6
    for live in lives:
        llm.abort(live.request.id)


def test_the_timeline_leaves_no_trace(llm):
    init, wait = StepResult.__init__, StepResult._wait
    with pytest.raises(ArithmeticError), Timeline(llm):
        assert StepResult.__init__ is not init
        raise ArithmeticError
    assert StepResult.__init__ is init and StepResult._wait is wait
    for owner in (llm.scheduler, llm.runner, llm.runner.kv, llm.runner.inputs, llm.runner.model):
        assert not {"plan", "commit", "move", "_fill", "_send", "_sample", "forward"} & set(vars(owner))


EVENTS = [
    ("DeviceType.CUDA", "void gemm<float, 3>(float*, float const*, int, int, int)", 10.0, 40.0),
    ("DeviceType.CPU", "cudaGraphLaunch", 0.0, 5.0),
    ("DeviceType.CUDA", "norm", 42.0, 45.0),
    ("DeviceType.CUDA", "Memcpy HtoD (Pinned -> Device)", 1.0, 2.0),
    ("DeviceType.CPU", "aten::mm", 0.0, 9.0),
    ("DeviceType.CPU", "cuLaunchKernelEx", 6.0, 7.0),
    ("DeviceType.CUDA", "norm", 44.0, 52.0),  # begins before the one before has ended
    ("DeviceType.CUDA", "norm", 60.0, 62.0),
]


def test_kernels_and_gaps_are_counted_a_step():
    kernels, launches = split_events(EVENTS)
    assert [k.name.split("<")[0] for k in kernels] == ["void gemm", "norm", "norm", "norm"] and launches == 2
    text = kernel_table(kernels, steps=2)
    assert text.startswith("2 kernels a step; a step 26.0 us, in kernels 21.5, between them 5.0 (19.2%)")
    assert "      15.0   69.8%     0    30.00  void gemm<float" in text
    assert "       4.0     1.0      8.0  norm -> norm" in text
    assert short("void gemm<float, 3>(float*, float const*)", 12) == "gemm" and short("a" * 9, 6) == "aaa..."
    assert "no kernel was seen" in kernel_table([], 1)


# ---- figures, goals, replay


def recorded(scale=1.0):
    """{id: (values, unit)} as a recording would hold them, for Llama-3-8B."""
    cost = {b: decode_step(MODELS["llama-3-8b"], b, 512).cost.bytes / 4.5e9 for b in BATCHES}  # ms at the roofline
    share = {1: 0.9, 8: 0.9, 64: 0.8, 256: 0.8}
    held = {}
    for b in BATCHES:
        step = scale * cost[b] / share[b]
        held |= {f"b{b}/step": [0.9 * step, step, 1.2 * step], f"b{b}/context": [512.0], f"b{b}/gpu": [cost[b]]}
        held |= {f"b{b}/kernels": [290.0], f"b{b}/launches": [3.0], f"b{b}/work": [900.0], f"b{b}/scheduling": [300.0]}
    for b, times in ((1, 2.8), (64, 1.1)):
        held |= {f"b{b}-awq/step": [held[f"b{b}/step"][1] / times], f"b{b}-awq/context": [512.0]}
    held |= {"mixed/rate": [10_000.0, 11_500.0, 11_000.0], "transformers-continuous/rate": [440.0]}
    held |= {"transformers-sdpa-b1/rate": [14.0, 15.0, 14.5]}
    return {f"bench/engine/llama-3-8b/{k}": v for k, v in held.items()}


@pytest.fixture
def replay(monkeypatch):
    held = recorded()

    def reading(id, fn, unit):
        if id not in held:
            raise LabError(f"there is no {id}")
        assert unit == UNITS[id.split("/")[-1]]
        return Reading(id, tuple(held[id]), unit, "recorded: X")

    monkeypatch.setattr(bench_module, "reading", reading)
    monkeypatch.setattr(bench_module, "ceilings", lambda: TOP)
    monkeypatch.setattr(bench_module, "is_live", lambda: False)
    return held


def test_a_replay_needs_no_gpu_and_says_what_was_measured(replay, capsys):
    assert cli.main(["bench", "engine"]) == 1, "batch 64 misses its goal"
    lines = capsys.readouterr().out.splitlines()
    data = json.loads(lines[-1])
    rows = {row["scenario"]: row for row in data["rows"]}
    assert list(rows) == [
        "b1", "b8", "b64", "b256", "mixed", "b1-awq", "b64-awq", "transformers-sdpa-b1", "transformers-continuous",
    ]  # fmt: skip
    assert rows["b1"]["bytes"] == decode_step(MODELS["llama-3-8b"], 1, 512).cost.bytes
    assert rows["b1"]["share_of_read"] == pytest.approx(0.9, abs=1e-4) and rows["b1"]["gpu_share_of_read"] == 1.0
    assert rows["b1"]["tokens_per_s"] == pytest.approx(1e3 / rows["b1"]["step_ms"], rel=1e-3)
    assert rows["b1"]["step_quartiles"][0] < rows["b1"]["step_ms"] < rows["b1"]["step_quartiles"][1]
    met = {goal["what"]: (goal["got"], goal["reached"]) for goal in data["goals"]}
    assert met["b1: share of the read roofline"][1] and not met["b64: share of the read roofline"][1]
    assert met["128 mixed requests: times transformers"] == (25.0, True)
    assert met["b256: scheduling's share of a step"][1] and "4 of 5 goals reached; recorded: X" in lines
    assert any(line.startswith("b64 ") and "80.0%" in line for line in lines)
    assert met["b1 in 4 bits: times the rate in bf16"] == (2.8, True)
    assert any(line.startswith("b64-awq ") and line.endswith("  1.10 x bf16") for line in lines)
    c = MODELS["llama-3-8b"]
    fewer = (2 - (4 + 20 / 128) / 8) * (c.matmul_params - c.hidden_size * c.vocab_size)  # the head stays as it is
    assert rows["b1-awq"]["bytes"] == pytest.approx(rows["b1"]["bytes"] - fewer, rel=1e-6)


def test_no_goal_is_met_by_what_was_not_measured(replay):
    del replay["bench/engine/llama-3-8b/transformers-continuous/rate"]
    bench = Bench("llama-3-8b", say=lambda line: None)
    bench.run(batches=(8,))
    assert bench.goals() == []
    for id in [id for id in replay if "/b1/" in id]:
        del replay[id]  # 4 bits with nothing to compare with
    bench.run(batches=(1,))
    assert "b1-awq" in bench.results and [what for what, *_ in bench.goals() if "4 bits" in what] == []


def test_without_a_recording_it_says_what_to_do(replay, capsys):
    replay.clear()
    assert cli.main(["bench", "engine"]) == 1
    assert "nothing is recorded: run this on a GPU with --record" in capsys.readouterr().err
    assert cli.main(["bench", "engine", "--profile"]) == 1
    assert "a profile needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "gpt-9"], "there is no model shape 'gpt-9'"),
        (["--batches", "7"], "there is no batch of 7 among those measured: 1, 8, 64, 256"),
        (["rope"], "bench engine takes no operators, got rope"),
    ],
)
def test_what_is_not_there_is_refused(replay, capsys, arguments, says):
    assert cli.main(["bench", "engine", *arguments]) == 1
    assert says in capsys.readouterr().err


def test_a_scenario_that_fails_is_left_out_and_the_others_go_on(replay, monkeypatch, capsys):
    """As on a GPU, with the engine replaced: what is measured is kept, and what raises is named."""
    kept = {}
    monkeypatch.setattr(bench_module, "is_live", lambda: True)
    monkeypatch.setattr(
        bench_module, "reading", lambda id, fn, unit: kept.setdefault(id, Reading(id, tuple(fn()), unit, "live: X"))
    )

    def decode(self, graphs, batch, quantization=None):
        if batch == 8:
            raise RuntimeError("out of memory\nand more")
        return {"step": [4.0, 5.0], "context": [512.0]}

    monkeypatch.setattr(bench_module, "gpu_name", lambda: "simulated")
    monkeypatch.setattr(Bench, "_decode", decode)
    monkeypatch.setattr(Bench, "llm", lambda self, graphs, quantization=None: None)
    monkeypatch.setattr(bench_module, "mixed_scenario", lambda llm: {"rate": [1.0]})
    monkeypatch.setattr(peers, "transformers_model", lambda *_: (_ for _ in ()).throw(LabError("not installed")))
    assert bench_engine(batches=(1, 8, 64), eager=False) == 1
    out = capsys.readouterr().out
    assert "b8 left out: RuntimeError: out of memory\n" in out and "transformers left out: not installed" in out
    assert {id.removeprefix("bench/engine/llama-3-8b/") for id in kept} == {
        "b1/step", "b1/context", "b64/step", "b64/context", "mixed/rate",
        "b1-awq/step", "b1-awq/context", "b64-awq/step", "b64-awq/context",
    }  # fmt: skip


# ---- the peer, and memory


def test_transformers_runs_the_same_shape():
    theirs = peers.transformers_model(SHAPE, torch.float32, "cpu")
    ours = load(SHAPE)[0].weights
    count = sum(p.numel() for p in theirs.parameters())
    layers = sum(t.numel() for layer in ours.layers for t in (
        layer.attn_norm, layer.qkv, layer.attn_out, layer.mlp_norm, layer.gate_up, layer.down))  # fmt: skip
    assert count == layers + ours.embedding.numel() + ours.final_norm.numel() + ours.lm_head.numel()
    assert peers.generate_rate(theirs, [1, 2, 3], batch=2, new=5) > 0
    with pytest.raises(LabError, match="has no continuous batching"):
        peers.continuous_rate(object(), [[1]], [2])


def test_an_engine_that_is_dropped_is_gone_without_a_collection(model):
    """On a GPU its cache must be free for the next engine at once."""
    llm = LLM(model, num_blocks=50, max_num_seqs=4, max_batched_tokens=64)
    fill(llm, 3, 20, 5)
    host_parts(llm, 2)
    gone = weakref.ref(llm.runner)
    gc.collect()
    gc.disable()
    try:
        del llm
        assert gone() is None
    finally:
        gc.enable()
