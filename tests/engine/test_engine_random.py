"""Random engines under random requests, with real arithmetic: what comes out is what each request gives alone.

The scheduler's own random run (test_scheduler_ahead) is over a fake device. Here are the inputs, the token buffer, the
table of seen tokens, the draws, the texts' ends, forks and failures, on a small model.
"""

import itertools
import random
from functools import cache

import pytest
import torch.nn.functional as F

from labkit.engine import LLM, ModelConfig, SamplingParams, load
from labkit.engine.core import Live
from labkit.errors import LabError

SHAPE = ModelConfig(
    architecture="qwen3", vocab_size=90, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4,
    num_kv_heads=2, head_dim=8, max_positions=128, qk_norm=True, eos_token_ids=(3, 77),
)  # fmt: skip
HEADS = ([5] * 9, [7, 8] * 8, [])


@cache
def model():
    return load(SHAPE, seed=4)


@cache
def alone(ids: tuple[int, ...], params: SamplingParams):
    """The completion of a request that has an engine to itself."""
    llm = LLM(model(), max_num_seqs=1, max_batched_tokens=128, num_blocks=9, prefix_caching=False, trace=False)
    return llm.generate([list(ids)], params)[0]


class Flaky:
    """silu_mul that fails, or is interrupted, in a share of its calls."""

    def __init__(self, rng: random.Random, share: float):
        self.rng, self.share, self.count = rng, share, 0

    def __call__(self, x):
        if self.rng.random() < self.share:
            self.count += 1
            raise KeyboardInterrupt if self.rng.random() < 0.5 else ArithmeticError("by chance")
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


def random_params(rng: random.Random) -> SamplingParams:
    some = dict(max_tokens=rng.randint(1, 12), ignore_eos=rng.random() < 0.5, seed=rng.randrange(2**63))
    if rng.random() < 0.4:
        some |= dict(temperature=rng.choice([0.01, 1.0, 5.0]), top_k=rng.choice([0, 1, 5, 10**30]))
        some |= dict(top_p=rng.choice([1.0, 0.5, 0.9]), min_p=rng.choice([0, 0.2]))
    if rng.random() < 0.3:
        some |= dict(repetition_penalty=rng.choice([0.5, 1.3, 10]))
    if rng.random() < 0.3:
        some |= dict(logprobs=rng.randint(1, 20))
    if rng.random() < 0.2:
        some |= dict(stop_token_ids=tuple(rng.randrange(90) for _ in range(4)))
    return SamplingParams(**some)


def random_engine(rng: random.Random, op: Flaky) -> LLM:
    swap, seqs, size = rng.random() < 0.4, rng.randint(1, 6), rng.choice([1, 2, 4, 16, 256])
    return LLM(
        model(),
        block_size=size,
        num_blocks=1 + -(-rng.choice([40, 50, 80]) // size) + rng.choice([0, 1, 5]),
        max_num_seqs=seqs,
        max_batched_tokens=seqs + rng.choice([0, 1, 3, 17, 60]),
        max_model_len=rng.choice([40, 128]),
        policy=rng.choice(["fcfs", "priority", "shortest"]),
        prefix_caching=rng.random() < 0.8,
        chunked_prefill=rng.random() < 0.7,
        run_ahead=rng.random() < 0.5,
        preemption="swap" if swap else "recompute",
        host_blocks=rng.choice([1, 3, 50]) if swap else 0,
        batching=rng.choice(["continuous"] * 4 + ["static", "bucketed"]),
        ops={"silu_mul": op},
    )


def assert_as_alone(live: Live) -> None:
    request, got = live.request, live.token_ids
    want = alone(tuple(request.prompt_ids), request.params)
    whole = live.finish_reason not in ("abort", "error")
    assert got == (want.token_ids if whole else want.token_ids[: len(got)]), f"{request.prompt_ids}, {request.params}"
    assert not whole or live.finish_reason == want.finish_reason
    assert len(live.logprobs) == (len(got) if request.params.logprobs else 0)
    for mine, theirs in zip(live.logprobs, want.logprobs, strict=False):
        assert mine.token == pytest.approx(theirs.token, abs=1e-4)
        assert [p for _, p in mine.best] == pytest.approx([p for _, p in theirs.best], abs=1e-4)


def fork(llm: LLM, live: Live, ids) -> Live:
    """A request that shares the blocks of ``live`` and goes on with the same parameters, so with the same tokens."""
    child = Live(llm.scheduler.fork(live.request.id, next(ids)), None)
    child.token_ids = child.request.output_ids
    child.logprobs = live.logprobs[: len(child.token_ids)]
    llm.engine.live[child.request.id] = child
    return child


def step(llm: LLM) -> None:
    try:
        llm.engine.step()
    except KeyboardInterrupt:
        pass
    llm.scheduler.check()


def random_run(seed: int, turns: int = 70) -> dict[str, int]:
    """-> how often what happened."""
    rng = random.Random(seed)
    op = Flaky(rng, rng.choice([0, 0, 0.03]))
    llm, lives, ids = random_engine(rng, op), [], itertools.count(10**6)
    seen = dict.fromkeys(("requests", "preemptions", "hits", "forks", "failures", "aborts"), 0)
    for _ in range(turns):
        for _ in range(rng.choice([0, 0, 1, 2])):
            prompt = rng.choice(HEADS) + [rng.randrange(90) for _ in range(rng.randint(1, 12))]
            try:
                salt = rng.choice([None, None, None, "x", ("y", 1)])
                lives.append(llm.engine.add(prompt, random_params(rng), rng.randint(-3, 3), salt))
            except LabError as refused:
                assert "need" in str(refused) or "max_model_len" in str(refused) or "chunked" in str(refused)
        if llm.engine.live and rng.random() < 0.1:
            seen["aborts"] += llm.abort(rng.choice(list(llm.engine.live)))
        if llm.engine.live and rng.random() < 0.15:
            parent = rng.choice(list(llm.engine.live.values()))
            if parent.request.num_known - parent.request.num_prompt == len(parent.token_ids):
                try:
                    lives.append(fork(llm, parent, ids))
                    seen["forks"] += 1
                except LabError as refused:
                    assert "cannot be forked" in str(refused) or "max_tokens above" in str(refused)
        step(llm)
    op.share = 0
    for _ in range(5000):
        if not llm.engine.busy:
            break
        step(llm)
    assert not llm.engine.busy and llm.pool.num_used == 0 and not llm.engine._flying
    for live in lives:
        assert_as_alone(live)
    llm.trace.replay()
    seen["requests"], seen["failures"], seen["hits"] = len(lives), op.count, llm.pool.stats.hits
    seen["preemptions"] = sum(live.request.num_preemptions for live in lives)
    return seen


def test_random_engines_give_each_request_what_it_gives_alone():
    total: dict[str, int] = {}
    for seed in range(24):
        for name, n in random_run(seed).items():
            total[name] = total.get(name, 0) + n
    print(total)
    assert total["requests"] > 1000 and all(n >= 8 for n in total.values()), f"something hardly happened: {total}"
