"""One matrix: whatever the engine does with a request, its greedy tokens are those of the plain cached loop.

The embedded model in fp32. Sums are taken in another order in another batch, so where the two best logits lie less than
GAP apart a token may differ; the comparison of that request then ends, and such near ties must be few.
"""

import pytest
import torch

from labkit.engine import LLM, SamplingParams, generate_cached

pytestmark = pytest.mark.model

NEW, GAP = 16, 1e-3
SHARED = "You are a careful assistant. Answer in one short sentence, and name your source if you have one. "
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    SHARED + "Why is the sky blue?",
    SHARED + "Why is the sea salty?",
    "東京は日本の",
    "The quick brown fox jumps over the lazy dog. " * 5,
]
LENGTH = 80  # of the longest, outputs included

MATRIX = {
    "alone": dict(max_num_seqs=1),
    "batched": dict(),
    "batched, one step ahead": dict(run_ahead=True),
    "chunks of 16": dict(max_batched_tokens=16),
    "chunks of 33, one step ahead": dict(max_batched_tokens=33, run_ahead=True),
    "no chunks": dict(chunked_prefill=False, max_batched_tokens=80),
    "no prefix cache": dict(prefix_caching=False),
    "blocks of 1": dict(block_size=1),
    "blocks of 8": dict(block_size=8),
    "blocks of 256": dict(block_size=256),
    "preempted": dict(tight=True),
    "preempted, one step ahead": dict(tight=True, run_ahead=True),
    "preempted, chunks of 16, no prefix cache": dict(tight=True, max_batched_tokens=16, prefix_caching=False),
    "swapped": dict(tight=True, preemption="swap", host_blocks=64),
    "swapped, one step ahead, chunks of 33": dict(
        tight=True, preemption="swap", host_blocks=64, run_ahead=True, max_batched_tokens=33
    ),
    "shortest first": dict(policy="shortest", max_num_seqs=3),
    "by priority": dict(policy="priority", max_num_seqs=3),
    "static batches": dict(batching="static", max_num_seqs=3),
    "bucketed batches": dict(batching="bucketed", max_num_seqs=3),
}


@pytest.fixture(scope="module")
def prompts(smollm):
    prompts = [smollm[1].encode(text) for text in TEXTS]
    assert max(map(len, prompts)) + NEW <= LENGTH
    return prompts


@pytest.fixture(scope="module")
def wanted(smollm, prompts):
    return [generate_cached(smollm[0], ids, NEW, ignore_eos=True).token_ids for ids in prompts]


def assert_equal_or_near_tie(model, prompts, wanted, outs):
    """Equal tokens; up to the first that differs if its logit is within GAP of the best, for one request at most."""
    ties = 0
    for ids, want, out in zip(prompts, wanted, outs, strict=True):
        got = out.token_ids
        assert len(got) == NEW and out.finish_reason == "length"
        place = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
        if place is None:
            continue
        text = torch.tensor([ids + want[:place]])
        logits = model.forward(text, torch.arange(text.shape[1]))[0]
        gap = float(logits.max() - logits[got[place]])
        assert gap < GAP, f"prompt of {len(ids)}: token {place} is {got[place]}, not {want[place]}; {gap:.4f} below"
        ties += 1
    assert ties <= 1


@pytest.mark.parametrize("name", MATRIX)
def test_greedy_tokens_are_those_of_the_plain_loop(name, smollm, prompts, wanted):
    changes = dict(MATRIX[name])
    block_size = changes.setdefault("block_size", 16)
    per_request = -(-LENGTH // block_size)
    blocks = per_request + 2 if changes.pop("tight", False) else 7 * per_request
    llm = LLM(smollm, num_blocks=1 + blocks, max_model_len=256, **changes)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    outs = llm.generate(prompts, params, priority=[i % 3 for i in range(len(prompts))])
    assert_equal_or_near_tie(smollm[0], prompts, wanted, outs)
    llm.scheduler.check()
    assert llm.pool.num_used == 0
    preempted = sum(o.metrics.preemptions for o in outs)
    assert (preempted > 0) == (("preempted" in name) or ("swapped" in name)), f"{preempted} preemptions"


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_prefix_hit_changes_no_token(smollm, prompts, wanted, run_ahead):
    """Every prompt twice: the second time all its full blocks are found, but never its last token."""
    llm = LLM(smollm, num_blocks=120, max_model_len=256, run_ahead=run_ahead)
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    for again in (False, True):
        outs = llm.generate(prompts, params)
        assert_equal_or_near_tie(smollm[0], prompts, wanted, outs)
        for ids, out in zip(prompts, outs, strict=True):
            assert out.metrics.cached_tokens == ((len(ids) - 1) // 16 * 16) or not again
    assert outs[2].metrics.cached_tokens >= 16


def test_two_prompts_of_one_step_do_not_hit_what_is_not_computed_yet(smollm, prompts, wanted):
    llm = LLM(smollm, num_blocks=120, max_model_len=256)
    outs = llm.generate([prompts[2]] * 3, SamplingParams(max_tokens=NEW, ignore_eos=True))
    assert_equal_or_near_tie(smollm[0], [prompts[2]] * 3, [wanted[2]] * 3, outs)


@pytest.mark.parametrize("block_size", [8, 16])
def test_a_prompt_of_whole_blocks_and_one_token_more_or_less(smollm, block_size):
    """len = k * block_size is where a block for the first new token is forgotten, and where a hit leaves nothing."""
    model, tokenizer = smollm
    text = tokenizer.encode(SHARED * 2)
    prompts = [text[: 2 * block_size + d] for d in (-1, 0, 1)]
    wanted = [generate_cached(model, ids, NEW, ignore_eos=True).token_ids for ids in prompts]
    llm = LLM(smollm, block_size=block_size, num_blocks=60, max_model_len=256, max_batched_tokens=block_size)
    for _ in range(2):
        outs = llm.generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True))
        assert_equal_or_near_tie(model, prompts, wanted, outs)


def test_a_cache_full_of_nan_changes_no_token(smollm, prompts, wanted):
    llm = LLM(smollm, num_blocks=60, max_model_len=256, max_batched_tokens=33)
    llm.runner.kv.data.fill_(float("nan"))
    outs = llm.generate(prompts, SamplingParams(max_tokens=NEW, ignore_eos=True))
    assert_equal_or_near_tie(smollm[0], prompts, wanted, outs)
