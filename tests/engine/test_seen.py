"""Which tokens a text holds, kept on the device: always what a set of the text says."""

import pytest
import torch

from labkit.engine import LLM, ModelConfig, SamplingParams, load
from labkit.engine.request import PENDING, Request
from labkit.engine.seen import SeenTokens
from labkit.engine.step import Chunk

CPU, VOCAB = torch.device("cpu"), 30


def told(seen, *requests):
    """The rows after a step that samples for these requests; the host does not know their newest tokens."""
    newest = torch.tensor([r.token_ids[-1] for r in requests])
    chunks = []
    for r in requests:
        known = Request(r.id, r.token_ids)
        known.token_ids[-1] = PENDING
        chunks.append(Chunk(known, len(r.token_ids) - 1, 1, True))
    return [set(row.nonzero()[:, 0].tolist()) for row in seen.rows(chunks, newest)]


def test_a_text_grows_by_one_token_a_step():
    seen, r = SeenTokens(4, VOCAB, CPU), Request(0, [3, 3, 5])
    for token in (7, 9, 3, 29, 0):
        r.token_ids.append(token)
        assert told(seen, r) == [set(r.token_ids)]


def test_only_a_request_that_is_new_here_sends_its_text(monkeypatch):
    seen, a, b = SeenTokens(2, VOCAB, CPU), Request(0, [1, 2]), Request(1, [3])
    sent = []
    monkeypatch.setattr(seen, "_fill", lambda late, fill=seen._fill: sent.append(len(late)) or fill(late))
    for _ in range(3):
        told(seen, a, b)
        a.token_ids.append(4), b.token_ids.append(5)
    assert sent == [2]


def test_rows_are_given_to_others_and_filled_anew():
    seen = SeenTokens(2, VOCAB, CPU)
    many = [Request(i, [i, i + 1]) for i in range(6)]
    for turn in range(20):
        pair = [many[turn % 6], many[(turn * 5 + 1) % 6]]
        if pair[0] is pair[1]:
            continue
        for r in pair:
            r.token_ids.append((turn * 7 + r.id) % VOCAB)
        assert told(seen, *pair) == [set(r.token_ids) for r in pair]


def test_a_step_that_was_missed_is_made_up_for():
    """Another step sampled for the request, and this table was not asked."""
    seen, r = SeenTokens(2, VOCAB, CPU), Request(0, [1])
    told(seen, r)
    r.token_ids += [8, 9, 10]
    assert told(seen, r) == [{1, 8, 9, 10}]


SHAPE = ModelConfig(
    architecture="llama", vocab_size=90, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, max_positions=128,
)  # fmt: skip


@pytest.mark.parametrize("run_ahead", [False, True])
def test_penalised_tokens_are_those_of_a_plain_loop(run_ahead):
    """Also beside neighbours without a penalty, and after preemptions."""
    model, _ = load(SHAPE, seed=1)
    llm = LLM((model, None), block_size=4, num_blocks=16, max_num_seqs=4, max_batched_tokens=32, run_ahead=run_ahead)
    prompts = [[5, 6, 7], [8] * 12, [11, 12], [13, 14, 15, 16]]
    params = [SamplingParams(max_tokens=12, ignore_eos=True, repetition_penalty=p) for p in (1.3, 1.0, 1.7, 1.1)]
    outs = llm.generate(prompts, params)
    assert sum(o.metrics.preemptions for o in outs) > 0
    for ids, p, out in zip(prompts, params, outs, strict=True):
        text = list(ids)
        for token in out.token_ids:
            logits = model.forward(torch.tensor([text]), torch.arange(len(text)))[0].clone()
            for t in set(text):
                factor = p.repetition_penalty
                logits[t] = logits[t] / factor if logits[t] > 0 else logits[t] * factor
            assert token == int(logits.argmax())
            text.append(token)
