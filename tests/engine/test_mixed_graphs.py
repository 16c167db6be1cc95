"""Graphs of steps that hold prompts, with captures that are recorded torch calls."""

from __future__ import annotations

import pytest
import torch

from labkit.engine import LLM, SamplingParams, load
from labkit.engine.mixed_graphs import MOST, mixed_buckets
from tests.engine.fake_graph import CAPTURABLE, FakeCapture
from tests.engine.test_graphs import PROMPTS, SHAPE, tokens

LONG = [[(7 * i + j) % 90 for j in range(n)] for i, n in enumerate((70, 3, 33, 1, 64, 20, 2, 90, 17))]


@pytest.fixture(scope="module")
def model():
    return load(SHAPE, seed=1)


def engines(model, **changes):
    settings = dict(block_size=4, num_blocks=300, max_num_seqs=9, max_batched_tokens=64, ops=CAPTURABLE) | changes
    with_graphs, plain, capture = LLM(model, **settings), LLM(model, **settings), FakeCapture()
    with_graphs.runner.capture_graphs(capture)
    decode = capture.captured
    with_graphs.runner.capture_mixed(capture)
    assert capture.captured == decode + len(with_graphs.runner.mixed_graphs.buckets)
    return with_graphs, plain


def test_buckets_are_powers_of_two_within_a_steps_tokens():
    assert mixed_buckets(64) == [16, 32, 64] and mixed_buckets(100) == [16, 32, 64] and mixed_buckets(8) == []
    assert mixed_buckets(8192)[-1] == MOST


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("budget", [16, 40, 64, 200])
def test_prompts_in_chunks_give_the_tokens_of_eager_steps(model, run_ahead, budget):
    """Budgets between buckets too, so that steps are padded, and steps larger than any bucket, which run eagerly."""
    llm, plain = engines(model, run_ahead=run_ahead, max_batched_tokens=budget)
    used, replay = [], llm.runner.mixed_graphs.replay
    llm.runner.mixed_graphs.replay = lambda bucket: used.append(bucket) or replay(bucket)
    params = [SamplingParams(max_tokens=3 + 2 * i, ignore_eos=True) for i in range(9)]
    assert tokens(llm, LONG, params) == tokens(plain, LONG, params)
    assert used and set(used) <= set(mixed_buckets(budget))


@pytest.mark.parametrize("run_ahead", [False, True])
def test_mixed_parameters(model, run_ahead):
    llm, plain = engines(model, run_ahead=run_ahead)
    kinds = [
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=9, ignore_eos=True, temperature=1.0, top_k=20),
        SamplingParams(max_tokens=15, ignore_eos=True, repetition_penalty=1.4),
        SamplingParams(max_tokens=7, ignore_eos=True, logprobs=2),
    ]
    params = [kinds[i % 4] for i in range(9)]
    assert tokens(llm, LONG, params) == tokens(plain, LONG, params)


@pytest.mark.parametrize("how", ["recompute", "swap"])
def test_preempted_requests_and_prefix_hits(model, how):
    swap = dict(preemption="swap", host_blocks=40) if how == "swap" else {}
    llm, plain = engines(model, num_blocks=30, run_ahead=True, max_batched_tokens=48, **swap)
    head = [1, 2, 3, 4, 5, 6, 7, 8]
    prompts = [head + p[:20] for p in PROMPTS]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    outs = llm.generate(prompts, params)
    assert sum(o.metrics.preemptions for o in outs) > 0 and sum(o.metrics.cached_tokens for o in outs) > 0
    assert [o.token_ids for o in outs] == tokens(plain, prompts, params)


def test_padding_stores_nothing(model):
    llm, _ = engines(model)
    llm.runner.kv.data.fill_(float("nan"))
    tokens(llm, LONG[:3], SamplingParams(max_tokens=4, ignore_eos=True))
    held = {b for p in llm.trace.plans for _, blocks in p["grown"] for b in blocks}
    written = {int(b) for b in (~llm.runner.kv.data.isnan()).flatten(3).any(-1).any(0).any(0).nonzero()[:, 0]}
    assert written == held


def test_a_padded_batch_is_the_same_batch_and_empty_sequences():
    from labkit.engine.inputs import InputBuilder
    from labkit.engine.request import Request
    from labkit.engine.step import Chunk

    made = [Request(i, list(range(10 * i, 10 * i + 9))) for i in range(2)]
    made[0].blocks, made[1].blocks = [5, 2, 3], [7, 6, 4]
    chunks = Chunk(made[0], 2, 5, True), Chunk(made[1], 8, 1, True)
    inputs = InputBuilder(block_size=4, max_seqs=3, max_tokens=32, max_model_len=18, device=torch.device("cpu"))
    full = [Request(9 + i, [1] * 9) for i in range(3)]
    for i, r in enumerate(full):
        r.blocks = [8 + 3 * i, 9 + 3 * i, 10 + 3 * i]
    inputs.build(tuple(Chunk(r, 0, 9, True) for r in full))  # so that whatever is not written anew is stale
    batch = inputs.build(chunks, pad_tokens=16)
    assert batch.ids.tolist() == [2, 3, 4, 5, 6, 18] + [0] * 10 and batch.slots.tolist()[6:] == [-1] * 10
    assert batch.bounds.tolist() == [0, 5, 6, 6] and batch.seq_lens.tolist() == [7, 9, 0]
    assert batch.rows.tolist() == [4, 5] and not batch.decode and batch.source.tolist() == [-1] * 16
    assert inputs.views(inputs._host[0], 16, 3, 3, 16, False).rows.tolist() == [4, 5, 0]
    assert batch.tables.tolist() == [[5, 2, 3, 0, 0], [7, 6, 4, 0, 0], [0] * 5]
