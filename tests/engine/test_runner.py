"""The runner on hand-made steps: logits of transformers whatever the steps, over a cache that is full of NaN."""

import pytest
import torch

from labkit.engine import ModelConfig, load
from labkit.engine.graphs import CudaCapture, bucket_of, decode_buckets
from labkit.engine.memory import blocks_that_fit, largest_step, peak_bytes, rehearsal, warm_up_steps
from labkit.engine.request import PENDING, Request, SamplingParams
from labkit.engine.runner import Runner
from labkit.engine.step import Chunk, Step
from labkit.errors import LabError
from tests.engine.tiny_models import TINY, tiny_hf

LENGTHS = (37, 1, 64, 16)


@pytest.fixture(scope="module", params=TINY)
def pair(request, tmp_path_factory):
    """(model, what transformers gives) of one family; untied, since a tied random model only repeats its input."""
    folder = tmp_path_factory.mktemp(request.param)
    original = tiny_hf(request.param, tie_word_embeddings=False)
    original.save_pretrained(folder)
    return load(folder, progress=None)[0], original


@pytest.fixture
def model(tmp_path):
    tiny_hf("llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    return load(tmp_path, progress=None)[0]


def prompts(lengths=LENGTHS, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 262, (n,), generator=generator).tolist() for n in lengths]


def seated(runner, ids, seed=0, total=100):
    """Requests with blocks for ``total`` tokens each, in random order."""
    per = -(-total // runner.kv.block_size)
    order = (1 + torch.randperm(runner.kv.num_blocks - 1, generator=torch.Generator().manual_seed(seed))).tolist()
    made = [Request(i, tokens, SamplingParams(max_tokens=30)) for i, tokens in enumerate(ids)]
    for i, request in enumerate(made):
        request.blocks = order[i * per : (i + 1) * per]
    return made


def run(runner, *chunks, **moves):
    run.index = getattr(run, "index", -1) + 1
    return runner.run(Step(run.index, tuple(Chunk(r, s, n, s + n == r.num_tokens) for r, s, n in chunks), **moves))


def greedy(runner, requests, steps, ahead=False):
    """Decode; with ``ahead`` each step is run before the tokens of the one before are fetched."""
    result = run(runner, *((r, 0, r.num_tokens) for r in requests))
    for _ in range(steps - 1):
        if ahead:
            for r in requests:
                r.token_ids.append(PENDING)
            following = run(runner, *((r, r.num_tokens - 1, 1) for r in requests))
            for r, token in zip(requests, result.token_ids(), strict=True):
                r.token_ids[-1] = token
        else:
            for r, token in zip(requests, result.token_ids(), strict=True):
                r.token_ids.append(token)
            following = run(runner, *((r, r.num_tokens - 1, 1) for r in requests))
        result = following
    for r, token in zip(requests, result.token_ids(), strict=True):
        r.token_ids.append(token)
    return [r.output_ids for r in requests]


def exact_logits(original, ids):
    with torch.inference_mode():
        return [original(torch.tensor([row])).logits[0] for row in ids]


@pytest.mark.parametrize("block_size", [1, 4, 16, 64])
def test_every_step_gives_the_logits_of_transformers(pair, block_size):
    """Prompts in chunks of unequal size, beside requests that decode; unused slots hold NaN, the null block too."""
    model, original = pair
    runner = Runner(model, block_size, num_blocks=4 * (128 // block_size) + 1, max_num_seqs=4, max_batched_tokens=128)
    runner.kv.data.fill_(float("nan"))
    ids = prompts()
    want, requests = exact_logits(original, ids), seated(runner, ids, total=128)
    a, b, c, d = requests
    plan = [
        [(b, 0, 1), (a, 0, 20), (c, 0, 5)],
        [(a, 20, 17), (d, 0, 15), (c, 5, 1)],
        [(c, 6, 57), (d, 15, 1)],
        [(c, 63, 1)],
    ]
    for chunks in plan:
        result = run(runner, *chunks)
        sampled = [(r, s + n - 1) for r, s, n in chunks if s + n == r.num_tokens]
        assert [c.request for c in result.chunks] == [r for r, _ in sampled] and len(result.logits) == len(sampled)
        for row, (request, place) in zip(result.logits, sampled, strict=True):
            assert (row - want[request.id][place]).abs().max() < 1e-4
        assert result.token_ids() == [int(want[r.id][place].argmax()) for r, place in sampled]


def test_a_decode_step_in_which_not_all_sample(pair):
    model, original = pair
    runner = Runner(model, 16, num_blocks=40, max_num_seqs=4, max_batched_tokens=128)
    ids = prompts((8, 9, 5))
    want, (a, b, c) = exact_logits(original, ids), seated(runner, ids)
    run(runner, (a, 0, 7), (b, 0, 7), (c, 0, 4))
    result = run(runner, (b, 7, 1), (a, 7, 1), (c, 4, 1))
    assert [chunk.request for chunk in result.chunks] == [a, c]
    assert (result.logits[0] - want[0][7]).abs().max() < 1e-4 and (result.logits[1] - want[2][4]).abs().max() < 1e-4


def test_tokens_are_those_of_transformers_alone_together_and_ahead(pair):
    model, original = pair
    ids, outputs = prompts((5, 30, 17)), []
    for group, ahead in (([0, 1, 2], False), ([0, 1, 2], True), ([0], False), ([1], True), ([2], False)):
        runner = Runner(model, 16, num_blocks=40, max_num_seqs=3, max_batched_tokens=128)
        outputs.append(
            dict(zip(group, greedy(runner, seated(runner, [ids[i] for i in group]), 20, ahead), strict=True))
        )
    assert outputs[0] == outputs[1] == outputs[2] | outputs[3] | outputs[4]
    for row, new in outputs[0].items():
        logits = exact_logits(original, [ids[row] + new])[0]
        assert new == logits[len(ids[row]) - 1 : -1].argmax(-1).tolist()


def test_rows_of_padding_change_nothing(model):
    """What a CUDA graph of a larger bucket computes, run here as it is."""
    runner = Runner(model, 4, num_blocks=100, max_num_seqs=8, max_batched_tokens=128)
    requests = seated(runner, prompts((9, 30, 3)))
    run(runner, *((r, 0, r.num_tokens - 1) for r in requests))
    chunks = tuple(Chunk(r, r.num_tokens - 1, 1, True) for r in requests)
    before = runner.kv.data.clone()
    exact = runner.model.forward(runner.inputs.build(chunks), runner.kv, runner.tokens, None)
    after = runner.kv.data.clone()
    runner.kv.data.copy_(before)
    logits = torch.full((8, model.config.vocab_size), float("nan"))
    runner.tokens.fill_(-5)
    batch = runner.inputs.build(chunks, pad_to=8)
    runner.decode_step(batch, logits)
    assert torch.allclose(logits[:3], exact, atol=1e-5) and logits.isfinite().all()
    assert runner.tokens[:3].tolist() == exact.argmax(-1).tolist()
    assert torch.allclose(runner.kv.data, after, atol=1e-6) and not runner.kv.data[:, :, 0].any()


def test_blocks_move_before_the_step_computes(model):
    """A request is swapped out, its blocks are overwritten, it comes back elsewhere, and a copy of it goes on too."""
    ids = prompts((20, 20), seed=8)
    alone = Runner(model, 4, num_blocks=30, max_num_seqs=2, max_batched_tokens=64)
    (want,) = greedy(alone, seated(alone, ids[:1], total=40), 3)
    runner = Runner(model, 4, num_blocks=30, max_num_seqs=2, max_batched_tokens=64, host_blocks=5)
    a, other = (Request(i, row, SamplingParams()) for i, row in enumerate(ids))
    a.blocks, other.blocks = [1, 2, 3, 4, 5, 6], [5, 4, 3, 2, 1]
    a.token_ids += run(runner, (a, 0, 20)).token_ids()
    run(runner, (other, 0, 20), swap_out=tuple(zip(a.blocks, range(5), strict=False)))
    a.blocks = [11, 9, 7, 10, 8, 12]
    twin = Request(2, a.token_ids, SamplingParams())
    twin.blocks = [11, 9, 7, 10, 8, 13]
    a.token_ids += run(runner, (a, 20, 1), swap_in=tuple(zip(range(5), a.blocks, strict=False))).token_ids()
    twin.token_ids.append(a.token_ids[-1])
    result = run(runner, (twin, 21, 1), (a, 21, 1), copies=((12, 13),))
    assert a.output_ids + result.token_ids()[1:] == want and result.token_ids()[0] == want[-1]


def test_a_step_of_moves_alone_computes_nothing(model):
    runner = Runner(model, 4, num_blocks=4, max_num_seqs=2, max_batched_tokens=64, host_blocks=1)
    runner.kv.data[:, :, 2] = 3.0
    result = run(runner, swap_out=((2, 0),))
    assert result.token_ids() == [] and result.logprobs() == [] and (runner.kv.host == 3).all()


def test_every_operator_is_called_and_can_be_replaced(model):
    calls = dict.fromkeys(("linear", "rms_norm", "add_rms_norm", "rope", "scatter", "silu_mul"), 0)
    calls |= dict(paged_decode=0, paged_extend=0)
    plain = Runner(model, 16, num_blocks=40, max_num_seqs=4, max_batched_tokens=128)

    def counted(name):
        def fn(*args, **kwargs):
            calls[name] += 1
            return plain.model.ops[name](*args, **kwargs)

        return fn

    runner = Runner(
        model, 16, num_blocks=40, max_num_seqs=4, max_batched_tokens=128, ops={n: counted(n) for n in calls}
    )
    ids = prompts((5, 9))
    assert greedy(runner, seated(runner, ids), 4) == greedy(plain, seated(plain, ids), 4)
    layers, steps = model.config.num_layers, 4
    assert calls == dict(
        linear=steps * (4 * layers + 1), rms_norm=steps, add_rms_norm=steps * 2 * layers, rope=steps * layers,
        scatter=steps * layers, silu_mul=steps * layers, paged_extend=layers, paged_decode=3 * layers,
    )  # fmt: skip


def test_a_step_that_fails_leaves_no_token_for_the_next(model):
    fail = []

    def silu_mul(x):
        if fail:
            raise RuntimeError(fail.pop())
        gate, up = x.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    runner = Runner(model, 16, num_blocks=40, max_num_seqs=4, max_batched_tokens=128, ops={"silu_mul": silu_mul})
    requests = seated(runner, prompts((5, 9)))
    run(runner, *((r, 0, r.num_tokens) for r in requests))
    fail.append("once")
    for r in requests:
        r.token_ids.append(PENDING)
    with pytest.raises(RuntimeError, match="once"):
        run(runner, *((r, r.num_tokens - 1, 1) for r in requests))
    with pytest.raises(RuntimeError, match="no step before it has sampled"):
        run(runner, *((r, r.num_tokens - 1, 1) for r in requests))
    again = seated(runner, prompts((5, 9)))
    fresh = Runner(model, 16, num_blocks=40, max_num_seqs=4, max_batched_tokens=128)
    assert greedy(runner, again, 5) == greedy(fresh, seated(fresh, prompts((5, 9))), 5)


def test_draws_are_numbered_by_the_outputs_a_request_has(model):
    """Whatever the chunk: a prompt's end, one token, or prompt and outputs computed again after a preemption."""
    runner = Runner(model, 16, num_blocks=9, max_num_seqs=2, max_batched_tokens=64, seed=7)
    r = Request(4, [1] * 10, SamplingParams(temperature=1.0))
    r.token_ids += [5, 6, PENDING]
    places = [(0, 10), (9, 1), (10, 1), (11, 1), (0, 12), (8, 5)]
    draws = [runner._draw(Chunk(r, start, count, True)) for start, count in places]
    assert [d.index for d in draws] == [0, 0, 1, 2, 2, 3]
    other = runner._draw(Chunk(Request(5, [1], r.params), 0, 1, True))
    assert len({d.seed for d in draws}) == 1 and other.seed != draws[0].seed
    assert runner._draw(Chunk(Request(4, [1], SamplingParams(seed=3)), 0, 1, True)).seed == 3


def test_16_bit_models_run_and_stay_near(tmp_path):
    original = tiny_hf("llama", tie_word_embeddings=False)
    original.save_pretrained(tmp_path)
    ids = prompts((40, 7))
    want = exact_logits(original, ids)
    for dtype in ("bfloat16", "float16"):
        model, _ = load(tmp_path, dtype=dtype, progress=None)
        runner = Runner(model, 16, num_blocks=40, max_num_seqs=4, max_batched_tokens=128)
        a, b = seated(runner, ids)
        run(runner, (a, 0, 39), (b, 0, 6))
        result = run(runner, (a, 39, 1), (b, 6, 1))
        assert result.logits.dtype == model.dtype
        for row, wanted in zip(result.logits.float(), want, strict=True):
            assert (row - wanted[-1]).abs().mean() < 0.02 * wanted[-1].abs().max()


# ---- graphs: all but the capture


@pytest.mark.parametrize("most", range(1, 70))
def test_buckets_end_at_the_largest_batch_and_cover_all(most):
    buckets = decode_buckets(most)
    assert buckets == sorted(set(buckets)) and buckets[-1] == most and buckets[0] == 1
    assert all(bucket_of(buckets, n) - n < 8 for n in range(1, most + 1))
    assert bucket_of(buckets, most + 1) is None


def test_buckets_are_those_of_the_design():
    assert decode_buckets(24) == [1, 2, 4, 8, 16, 24] and decode_buckets(12) == [1, 2, 4, 8, 12]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which test_gpu.py is for")
def test_without_a_gpu_there_are_no_graphs(model):
    runner = Runner(model, 16, num_blocks=4, cuda_graphs=True)
    assert runner.graphs is None
    with pytest.raises(LabError, match="CUDA graphs need a CUDA GPU"):
        runner.capture_graphs(CudaCapture())


# ---- refusals and sizes


def test_the_number_of_blocks_fits_what_can_run(model):
    assert Runner(model, 16, max_num_seqs=3, max_model_len=100).kv.num_blocks == 3 * 7 + 1


GIB = 2**30


def test_a_gpus_room_is_what_is_free_less_what_steps_and_graphs_take():
    """80 GiB, 60 free (20 are weights and another program's), 10 % unused, 2 for a step and 2 for graphs: 48 remain."""
    assert blocks_that_fit(60 * GIB, 80 * GIB, 2 * GIB, 2**21, 0.9) == 48 * 512
    assert blocks_that_fit(8 * GIB, 80 * GIB, 2 * GIB, 2**21, 1.0) == 5 * 512, "graphs: an eighth of what is free"
    with pytest.raises(LabError, match="of 80.0 GiB 8.0 are free, a step takes 2.00, .* leaves 8.00 unused"):
        blocks_that_fit(8 * GIB, 80 * GIB, 2 * GIB, 2**21, 0.9)
    for share in (0, 1.5, -1):
        with pytest.raises(LabError, match="memory_share must be above 0 and at most 1"):
            blocks_that_fit(60 * GIB, 80 * GIB, 0, 2**21, share)


def test_the_largest_step_is_run_twice_and_its_peak_is_that_of_the_second(model, monkeypatch):
    """As on a GPU, with its counters replaced: all tokens, all sequences, and a draw that sorts."""
    runner, seen = Runner(model, 16, num_blocks=2, max_num_seqs=3, max_batched_tokens=64), []
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100 * (1 + len(seen)))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 264)
    step = rehearsal(largest_step(3, 64, 128), 16, SamplingParams(temperature=1.0, top_p=0.9))
    assert peak_bytes(lambda step: seen.append((step, runner.run(step))), step, runner.device) == 64
    for step, result in seen:
        assert step.num_tokens == 63 and len(result.token_ids()) == 3 and result.logits.isfinite().all()
    assert len(seen) == 2


@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 8, 1), (4, 4, 128), (3, 700, 128), (64, 2048, 8192), (2, 2, 2)])
def test_every_step_of_the_warm_up_can_run(model, sizes):
    seqs, tokens, length = sizes
    steps = warm_up_steps(seqs, tokens, length)
    for step in steps:
        assert 1 <= len(step) <= seqs and sum(count for _, count in step) <= tokens
        assert all(count >= 1 and start + count <= length for start, count in step)
    assert any(max(count for _, count in step) == 1 for step in steps)
    if length > 128:
        return
    runner = Runner(model, 16, num_blocks=2, max_num_seqs=seqs, max_batched_tokens=tokens, max_model_len=length)
    runner.warm_up()
    assert not runner.kv.data.any() and not runner._unread, "it leaves nothing behind"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(block_size=24), "block_size must be a power of two from 1 to 256, got 24"),
        (dict(max_num_seqs=0), "max_num_seqs must be a whole number of at least 1, got 0"),
        (dict(max_batched_tokens=2.5), "max_batched_tokens must be a whole number of at least 1, got 2.5"),
        (dict(max_model_len=129), "max_model_len must be from 1 to the model's 128 positions, got 129"),
        (dict(max_model_len=0), "max_model_len must be from 1"),
        (dict(num_blocks=1), "at least 2 blocks"),
        (dict(ops={"attention": print}), "ops has no operator 'attention'"),
    ],
)
def test_settings_that_cannot_run_are_refused(model, changes, says):
    with pytest.raises(LabError, match=says):
        Runner(model, **changes)


@pytest.mark.parametrize(
    ("heads", "says"),
    [
        (
            dict(num_heads=130, num_kv_heads=1, head_dim=2),
            "130 query heads on 1 KV heads are 130 a KV head; .* up to 128",
        ),
        (dict(num_heads=2, num_kv_heads=1, head_dim=512), "head_dim 512 is too large: .* up to 256"),
    ],
)
def test_heads_that_no_kernel_serves_are_refused(heads, says):
    shape = dict(architecture="llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1, max_positions=64)
    with pytest.raises(LabError, match=says):
        Runner(load(ModelConfig(**shape, **heads))[0])
