"""The engine's decode rate on a CPU, beside transformers in the same process and by turns, and its own host work."""

import statistics
import time

import pytest
import torch

from labkit.engine import LLM, SamplingParams
from labkit.engine.inputs import InputBuilder, Unread
from labkit.engine.request import Request
from labkit.engine.step import Chunk

pytestmark = pytest.mark.serial
NEW = 32


def their_rate(oracle, prompt, batch) -> float:
    """Tokens a second of transformers' generate, prompt included."""
    ids = torch.tensor([prompt] * batch)
    start = time.perf_counter()
    out = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        pad_token_id=2,
    )
    assert out.shape == (batch, len(prompt) + NEW)
    return batch * NEW / (time.perf_counter() - start)


def our_rate(llm, prompt, batch) -> float:
    start = time.perf_counter()
    outs = llm.generate([prompt] * batch, SamplingParams(max_tokens=NEW, ignore_eos=True), progress=False)
    assert all(len(o.token_ids) == NEW for o in outs)
    return batch * NEW / (time.perf_counter() - start)


@pytest.mark.model
def test_decoding_beats_transformers_and_a_batch_of_8_is_worth_3_of_1(smollm, oracle):
    """Medians over alternating runs. A busy machine can spoil any one series, so one good series of three decides."""
    prompt = smollm[1].encode("The history of computing begins with")
    llm = LLM(smollm, max_num_seqs=8, max_model_len=256, prefix_caching=False)
    our_rate(llm, prompt, 8), their_rate(oracle, prompt, 1)
    for _ in range(3):
        runs = [
            (
                their_rate(oracle, prompt, 1),
                our_rate(llm, prompt, 1),
                their_rate(oracle, prompt, 8),
                our_rate(llm, prompt, 8),
            )
            for _ in range(3)
        ]
        theirs_1, ours_1, theirs_8, ours_8 = (statistics.median(rates) for rates in zip(*runs, strict=True))
        said = (
            f"batch 1: transformers {theirs_1:.1f}, engine {ours_1:.1f} tok/s; "
            f"batch 8: transformers {theirs_8:.1f}, engine {ours_8:.1f} tok/s"
        )
        print(said)
        reached = ours_1 > theirs_1 and ours_8 > theirs_8 and ours_8 >= 3 * ours_1
        if reached:
            break
    assert reached, f"no series reached the goal; the last: {said}"


def test_the_inputs_of_256_decoding_requests_cost_little():
    """Of a step of some 12 ms at this batch on a large GPU, 5 % is 0.6 ms. The best of many counts."""
    inputs = InputBuilder(16, 256, 2048, 8192, torch.device("cpu"))
    requests = [Request(i, [1] * 1000) for i in range(256)]
    for i, r in enumerate(requests):
        r.blocks = list(range(1 + 63 * i, 64 + 63 * i))
    seconds = []
    for position in range(960, 990):
        chunks = tuple(Chunk(r, position, 1, True) for r in requests)
        unread = Unread(tuple(requests), (position,) * 256)
        start = time.perf_counter()
        inputs.build(chunks, unread)
        seconds.append(time.perf_counter() - start)
    print(f"inputs of 256 decoding requests: {1e3 * min(seconds):.2f} ms")
    assert min(seconds) < 1e-3
