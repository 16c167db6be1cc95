"""Graphs, with captures that are recorded torch calls: what a replay reads is what the step has put there."""

import warnings

import pytest
import torch

from labkit.engine import LLM, SamplingParams, load
from labkit.engine.config import ModelConfig
from labkit.engine.graphs import CaptureFailed, CudaCapture, bucket_of, decode_buckets
from labkit.engine.request import Request
from labkit.engine.step import Chunk, Step
from tests.engine.fake_graph import CAPTURABLE, FakeCapture

SHAPE = ModelConfig(
    architecture="qwen3", vocab_size=90, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, max_positions=128, qk_norm=True,
)  # fmt: skip
PROMPTS = [[5, 6, 7], [8] * 40, [11, 12], [13, 14, 15, 16], [17], [18, 19] * 9, [3] * 5, [20, 21, 22], [4, 1]]


@pytest.fixture(scope="module")
def model():
    return load(SHAPE, seed=1)


def engines(model, **changes):
    """(an engine with graphs, its captures, the same without)."""
    settings = dict(block_size=4, num_blocks=200, max_num_seqs=9, max_batched_tokens=64, ops=CAPTURABLE) | changes
    with_graphs, plain, capture = LLM(model, **settings), LLM(model, **settings), FakeCapture()
    with_graphs.runner.capture_graphs(capture)
    return with_graphs, capture, plain


def tokens(llm, prompts, params):
    outs = llm.generate(prompts, params)
    llm.scheduler.check()
    return [o.token_ids for o in outs]


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 8, 9])
def test_every_batch_gives_the_tokens_of_eager_steps(model, batch, run_ahead):
    """Requests end at different times, so that a small batch follows a large one and must not see what it left."""
    llm, capture, plain = engines(model, run_ahead=run_ahead)
    params = [SamplingParams(max_tokens=12 - i, ignore_eos=True) for i in range(batch)]
    before = capture.replayed
    assert tokens(llm, PROMPTS[:batch], params) == tokens(plain, PROMPTS[:batch], params)
    assert capture.captured == len(decode_buckets(9)) and capture.replayed >= before + 10


@pytest.mark.parametrize("run_ahead", [False, True])
def test_mixed_parameters_over_graphs(model, run_ahead):
    """Greedy rows take the graph's argmax only if all are greedy; drawn and penalised ones overwrite it in time."""
    llm, _, plain = engines(model, run_ahead=run_ahead)
    kinds = [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, top_k=20),
        SamplingParams(max_tokens=15, ignore_eos=True, repetition_penalty=1.4),
        SamplingParams(max_tokens=7, ignore_eos=True, logprobs=2),
    ]
    params = [kinds[i % 4] for i in range(9)]
    assert tokens(llm, PROMPTS, params) == tokens(plain, PROMPTS, params)


@pytest.mark.parametrize("how", ["recompute", "swap"])
@pytest.mark.parametrize("run_ahead", [False, True])
def test_preempted_requests_over_graphs(model, how, run_ahead):
    swap = dict(preemption="swap", host_blocks=40) if how == "swap" else {}
    llm, capture, plain = engines(model, num_blocks=18, run_ahead=run_ahead, max_batched_tokens=48, **swap)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    outs = llm.generate(PROMPTS, params)
    assert sum(o.metrics.preemptions for o in outs) > 0 and capture.replayed > 0
    assert [o.token_ids for o in outs] == tokens(plain, PROMPTS, params)
    assert llm.pool.num_used == 0


def test_a_row_that_does_not_sample_is_left_out(model):
    """The middle request's prompt is computed token by token: one row of the graph that nobody asks for."""
    ids = [PROMPTS[0], [7] * 9, PROMPTS[3]]
    outs = []
    for llm in engines(model)[::2]:
        requests = [Request(i, row) for i, row in enumerate(ids)]
        for i, r in enumerate(requests):
            r.blocks = list(range(1 + 5 * i, 6 + 5 * i))
        first = Chunk(requests[0], 0, 2, False), Chunk(requests[1], 0, 3, False), Chunk(requests[2], 0, 3, False)
        llm.runner.run(Step(0, first))
        second = Chunk(requests[0], 2, 1, True), Chunk(requests[1], 3, 1, False), Chunk(requests[2], 3, 1, True)
        result = llm.runner.run(Step(1, second))
        outs.append((result.logits.clone(), result.token_ids()))
    assert outs[0][1] == outs[1][1] and len(outs[0][1]) == 2 and torch.allclose(outs[0][0], outs[1][0], atol=1e-5)


def test_padding_touches_no_block_but_the_null_block(model):
    llm, _, _ = engines(model)
    runner = llm.runner
    runner.kv.data.fill_(float("nan"))  # the fake scatter rewrites the null block's own row with itself
    tokens(llm, PROMPTS[:3], SamplingParams(max_tokens=6, ignore_eos=True))
    held = {b for p in llm.trace.plans for _, blocks in p["grown"] for b in blocks}
    written = {int(b) for b in (~runner.kv.data.isnan()).flatten(3).any(-1).any(0).any(0).nonzero()[:, 0]}
    assert written == held


def test_an_operator_that_asks_for_a_value_leaves_the_engine_without_graphs_and_says_so(model):
    def silu_mul(x):
        gate, up = x.chunk(2, -1)
        if float(x.sum()) != float(x.sum()):
            raise ArithmeticError
        return torch.nn.functional.silu(gate) * up

    settings = dict(block_size=4, num_blocks=200, max_num_seqs=4, max_batched_tokens=64)
    llm = LLM(model, ops=CAPTURABLE | {"silu_mul": silu_mul}, **settings)
    with pytest.warns(RuntimeWarning, match="decode steps run eagerly, without CUDA graphs: .* asks for a value"):
        llm.runner.capture_graphs(FakeCapture())
    assert llm.runner.graphs is None
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert tokens(llm, PROMPTS[:3], params) == tokens(engines(model, max_num_seqs=4)[2], PROMPTS[:3], params)


def test_an_operator_that_does_not_run_at_all_is_no_matter_of_graphs(model):
    def rope(*_):
        raise ArithmeticError("broken")

    llm = LLM(model, ops=CAPTURABLE | {"rope": rope}, num_blocks=20)
    with warnings.catch_warnings(), pytest.raises(ArithmeticError, match="broken"):
        warnings.simplefilter("error")
        llm.runner.capture_graphs(FakeCapture())


class FakeCuda:
    """What CudaCapture asks of torch.cuda: streams are names, a capture that broke raises once more at its end."""

    def __init__(self):
        self.current, self.debug, self.ended, self.graph_is_open = "main", 0, [], False
        self.ends_badly = False

    def patch(self, monkeypatch):
        cuda = self

        class Stream:
            def wait_stream(self, other):
                pass

        class Graph:
            def replay(self):
                return "replayed"

        class Open:
            def __init__(self, graph, pool, stream, capture_error_mode):
                self.stream = stream

            def __enter__(self):
                cuda.before, cuda.current, cuda.graph_is_open = cuda.current, self.stream, True

            def __exit__(self, *error):
                cuda.graph_is_open = False
                if error[0] is not None and cuda.ends_badly:
                    raise RuntimeError("capture invalidated")  # and the stream stays current
                cuda.current = cuda.before

        class On:
            def __init__(self, stream):
                self.stream = stream

            def __enter__(self):
                cuda.before, cuda.current = cuda.current, self.stream

            def __exit__(self, *_):
                cuda.current = cuda.before

        def end(device, pool):
            cuda.ended.append(pool)
            if not cuda.ends_badly:
                raise RuntimeError("not currently recording to mempool")

        here = dict(
            is_available=lambda: True, Stream=Stream, CUDAGraph=Graph, graph=Open, stream=On,
            graph_pool_handle=lambda: (0, 1),
            current_stream=lambda: Stream() if cuda.current == "main" else cuda.current,
            set_stream=lambda stream: setattr(cuda, "current", "main"), current_device=lambda: 0,
            get_sync_debug_mode=lambda: cuda.debug, set_sync_debug_mode=lambda mode: setattr(cuda, "debug", mode),
        )  # fmt: skip
        for name, value in here.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        return self


@pytest.mark.parametrize("ends_badly", [False, True])
def test_a_capture_that_breaks_leaves_stream_and_allocator_as_they_were(monkeypatch, ends_badly):
    cuda = FakeCuda().patch(monkeypatch)
    cuda.ends_badly = ends_badly
    capture = CudaCapture()

    def step():
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    with pytest.raises(CaptureFailed, match="cannot be captured in a CUDA graph: operation not permitted when stream"):
        capture.capture(step)
    assert cuda.current == "main" and cuda.ended == [capture.pool] and not cuda.graph_is_open
    assert capture.capture(lambda: None)() == "replayed" and cuda.current == "main" and len(cuda.ended) == 1


def test_a_step_that_waits_is_found_before_the_capture(monkeypatch):
    cuda, runs = FakeCuda().patch(monkeypatch), []
    capture = CudaCapture()

    def step():
        runs.append(cuda.debug)
        if cuda.debug == "error":
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(CaptureFailed, match="called a synchronizing CUDA operation"):
        capture.warm_up(step)
    assert runs == [0, "error"] and cuda.debug == 0 and cuda.current == "main"
    with pytest.raises(RuntimeError, match="broken") as broken:
        capture.warm_up(lambda: (_ for _ in ()).throw(RuntimeError("broken")))
    assert not isinstance(broken.value, CaptureFailed), "a step that does not run is no matter of graphs"


def test_the_recorder_finds_what_a_graph_would_get_wrong():
    """A value read by Python, and a tensor that is replaced: both are as they were at the capture."""
    x, holder, out = torch.ones(3), {"t": torch.ones(3)}, torch.zeros(3)
    factor = [2.0]
    replay = FakeCapture().capture(lambda: out.copy_(x * factor[0] + holder["t"]))
    x.fill_(5.0)
    factor[0], holder["t"] = 3.0, torch.zeros(3)
    replay()
    assert out.tolist() == [11.0] * 3
    with pytest.raises(CaptureFailed):
        FakeCapture().capture(lambda: x.sum().item())


def test_the_smallest_bucket_is_used(model):
    llm, _, _ = engines(model)
    used = []
    replay = llm.runner.graphs.replay
    llm.runner.graphs.replay = lambda bucket: used.append(bucket) or replay(bucket)
    tokens(llm, PROMPTS[:5], SamplingParams(max_tokens=4, ignore_eos=True))
    assert used == [bucket_of(decode_buckets(9), 5)] * 3 == [8] * 3
