"""The runner on CUDA: graphs against eager steps, and what the host waits for."""

import time
from itertools import count

import pytest
import torch

from labkit.engine import SamplingParams
from labkit.engine.request import PENDING, Request
from labkit.engine.runner import Runner
from labkit.engine.step import Chunk, Step
from tests.engine.gpu_models import DTYPES, FAMILIES, model_of, prompts_of

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
MOST = 20
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
FRESH = count(100)  # seeds: a runner takes two requests of one id for one request


def runner_of(family="llama", dtype="float32", **changes) -> Runner:
    settings = dict(num_blocks=200, max_num_seqs=MOST, max_batched_tokens=512, max_model_len=120) | changes
    runner = Runner(model_of(family, dtype, DEVICE), **settings)
    runner.kv.data.fill_(float("nan"))
    assert (runner.mixed_graphs is None) == (changes.get("cuda_graphs") is False)
    return runner


@pytest.fixture(scope="module")
def shared():
    """A runner with graphs that tests share; each begins with prompts of its own, so none reads another's blocks."""
    return runner_of()


def seated(runner, batch, params=GREEDY, total=100, seed=0):
    """Requests of random prompts, with blocks for ``total`` tokens each."""
    per = -(-total // runner.kv.block_size)
    lengths = [1 + 7 * i % 60 for i in range(batch)]
    made = [Request(seed * 1000 + i, ids, params) for i, ids in enumerate(prompts_of(runner.model, lengths, seed))]
    for i, request in enumerate(made):
        request.blocks = [1 + i * per + b for b in range(per)]
    return made


def step_of(*chunks, **moves) -> Step:
    return Step(0, tuple(Chunk(r, s, n, s + n == r.num_tokens) for r, s, n in chunks), **moves)


def prefill(runner, requests):
    """Compute all prompts, in steps that the budget allows, and enter the first tokens."""
    for r in requests:
        r.token_ids += runner.run(step_of((r, 0, r.num_tokens))).token_ids()


def decode(requests) -> Step:
    return step_of(*((r, r.num_tokens - 1, 1) for r in requests))


def take(requests, result):
    for r, token in zip(requests, result.token_ids(), strict=True):
        r.token_ids.append(token)


# ---- graphs against eager steps


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8, 9, 16, 17, MOST])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_gives_what_its_step_gives_eagerly(family, dtype, batch, runners):
    """Bit for bit: the same kernels on the same inputs, padding included; and the rows of padding are finite."""
    runner = runners(family, dtype)
    requests = seated(runner, batch, seed=batch)
    prefill(runner, requests)
    before = runner.kv.data.clone()
    result = runner.run(decode(requests))
    bucket = min(b for b in runner.graphs.buckets if b >= batch)
    replayed, after = runner.graphs.logits[:bucket].clone(), runner.kv.data.clone()
    assert replayed.isfinite().all(), "a row of padding holds NaN"
    runner.kv.data.copy_(before)
    eager = torch.full_like(replayed, float("nan"))
    with torch.inference_mode():
        runner.decode_step(runner.inputs.build(decode(requests).chunks, pad_to=bucket), eager)
    assert torch.equal(eager, replayed), f"logits differ by up to {(eager - replayed).abs().max():.2e}"
    assert torch.equal(runner.tokens[:batch].long().cpu(), torch.tensor(result.token_ids()))
    assert torch.equal(runner.kv.data.nan_to_num(7.0), after.nan_to_num(7.0)), "keys and values differ"
    changed = (after.nan_to_num(7.0) != before.nan_to_num(7.0)).flatten(3).any(-1).any(0).any(0).nonzero()[:, 0]
    assert set(changed.tolist()) <= {r.blocks[(r.num_tokens - 1) // 16] for r in requests}, "foreign blocks changed"


@pytest.fixture(scope="module")
def runners():
    made = {}

    def get(family, dtype):
        if (family, dtype) not in made:
            made.clear()  # one at a time: they come in this order
            made[family, dtype] = runner_of(family, dtype)
        return made[family, dtype]

    return get


def test_a_small_batch_reads_nothing_that_a_large_one_left(shared):
    requests = seated(shared, MOST, seed=50)
    prefill(shared, requests)
    take(requests, shared.run(decode(requests)))
    few = [requests[3], requests[11], requests[7]]
    result = shared.run(decode(few))
    logits, told = result.logits.clone(), result.token_ids()
    for row, r in enumerate(few):
        alone = shared.run(decode([r]))
        assert (alone.logits[0] - logits[row]).abs().max() < 1e-3 and alone.token_ids() == [told[row]]


def test_a_decode_step_in_which_not_all_sample(shared):
    """One request's prompt is computed token by token: its row of the graph is not asked for."""
    a, b, c = seated(shared, 3, seed=51)
    c.token_ids = list(range(2, 12))
    prefill(shared, [a, b])
    shared.run(step_of((c, 0, 3)))
    result = shared.run(step_of((a, a.num_tokens - 1, 1), (c, 3, 1), (b, b.num_tokens - 1, 1)))
    assert [chunk.request for chunk in result.chunks] == [a, b]
    logits = result.logits.clone()
    for row, r in enumerate((a, b)):
        assert (shared.run(decode([r])).logits[0] - logits[row]).abs().max() < 1e-3


@pytest.mark.parametrize("chunks", [(5,), (16,), (1, 17, 40), (60, 33, 1, 1, 1), (100,), (60, 60, 60, 60)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_of_prompts_gives_what_eager_steps_give(chunks, dtype, runners):
    """Whole prompts, and the rest of prompts whose beginning is cached, padded to the next bucket. The eager step has
    other shapes, so other tiles and other roundings."""
    runner = runners("llama", dtype)
    graphs = runner.mixed_graphs
    for cached in (0, 7):
        results = []
        for runner.mixed_graphs in (None, graphs):
            requests = seated(runner, len(chunks), seed=next(FRESH))
            for i, (r, n) in enumerate(zip(requests, chunks, strict=True)):
                r.token_ids = [1 + (7 * i + at) % 90 for at in range(cached + n)]
            if cached:
                runner.run(step_of(*((r, 0, cached) for r in requests)))
            result = runner.run(step_of(*((r, cached, n) for r, n in zip(requests, chunks, strict=True))))
            results.append((result.logits.float().clone(), result.token_ids()))
        (eager, _), (replayed, told) = results
        assert replayed.isfinite().all() and told == replayed.argmax(-1).tolist()
        assert (eager - replayed).norm() <= (1e-4 if dtype == "float32" else 2e-2) * eager.norm()


def test_a_graph_of_prompts_stores_the_keys_of_its_tokens_alone(shared):
    (request,) = seated(shared, 1, seed=91)
    request.token_ids = list(range(1, 22))
    before = shared.kv.data.clone()
    shared.run(step_of((request, 0, 21)))
    changed = (shared.kv.data.nan_to_num(7.0) != before.nan_to_num(7.0)).any(-1).any(3).any(0).any(0)
    written = [(b, slot) for b in request.blocks[:2] for slot in range(16)][:21]
    assert [tuple(at) for at in changed.nonzero().tolist()] == written


# ---- what the host waits for


KINDS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(max_tokens=24, temperature=1.0),
    "drawn from the sorted": SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9),
    "penalised": SamplingParams(max_tokens=24, repetition_penalty=1.2),
    "with log-probabilities": SamplingParams(max_tokens=24, logprobs=5),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["graph", "eager", "mixed", "mixed, eager", "moves"])
def test_a_step_does_not_wait_for_the_gpu(shared, kind, what):
    """The GPU is kept busy, and ``run`` is back while it still is.

    Allowed to wait, and not part of a step's path: the first call of a kernel, which loads it; ``token_ids``; and the
    third step in a row that nobody collects, which would overwrite inputs that are still being copied.
    """
    runner = runner_of(cuda_graphs=False) if "eager" in what else shared
    if what == "moves":
        runner = runner_of(host_blocks=8)
    requests = seated(runner, 6, KINDS[kind], seed=60 + list(KINDS).index(kind))
    prefill(runner, requests)
    fresh = Request(77, list(range(2, 40)), KINDS[kind])
    fresh.blocks = list(range(190, 193))

    def step():
        if "mixed" in what:
            return step_of((fresh, 0, 38), *((r, r.num_tokens - 1, 1) for r in requests))
        if what == "moves":
            chunks = tuple(Chunk(r, r.num_tokens - 1, 1, True) for r in requests)
            return Step(0, chunks, copies=((150, 151),), swap_out=((152, 0), (153, 1)), swap_in=((2, 154), (3, 155)))
        return decode(requests)

    for _ in range(2):  # kernels are loaded and pinned memory is there
        runner.run(step()).token_ids()
    torch.cuda.synchronize()
    torch.cuda._sleep(int(1e9))  # about half a second
    torch.cuda.set_sync_debug_mode("error")
    start = time.perf_counter()
    try:
        result = runner.run(step())
    finally:
        spent = time.perf_counter() - start
        torch.cuda.set_sync_debug_mode("default")
    assert not result._event.query(), f"run took {spent:.3f} s and waited for the GPU"
    assert len(result.token_ids()) == len(requests) + ("mixed" in what)


def test_inputs_are_not_overwritten_while_they_are_copied(shared):
    """Four steps are queued behind a busy GPU; every second one uses the same pinned buffer."""
    requests = seated(shared, 5, seed=70)
    prefill(shared, requests)
    start = [list(r.token_ids) for r in requests]
    for _ in range(4):
        take(requests, shared.run(decode(requests)))
    wanted = [r.token_ids[-4:] for r in requests]
    for r, ids in zip(requests, start, strict=True):
        r.token_ids = ids
    torch.cuda.synchronize()
    results = [shared.run(decode(requests))]
    torch.cuda._sleep(int(4e8))
    for _ in range(3):
        for r in requests:
            r.token_ids.append(PENDING)
        results.append(shared.run(decode(requests)))
    assert [list(t) for t in zip(*(r.token_ids() for r in results), strict=True)] == wanted
