"""Packed weights on CUDA: the tokens of the same weights dequantised, in graphs and without, and the memory they leave.

The reference is the plain loop over the dequantised folder. A token may differ where its logit is as good as the best
one's within what 16-bit arithmetic moves a logit, measured there against fp32 (``packed_models.ties``).
"""

from __future__ import annotations

import gc
from functools import cache

import pytest
import torch

from labkit.engine import LLM, ModelConfig, SamplingParams, generate_cached, load, quantised_model
from labkit.engine.kv import PagedKV
from labkit.engine.model import Model
from labkit.engine.request import Request
from labkit.engine.runner import Runner
from labkit.engine.step import Chunk, Step
from labkit.errors import LabError
from labkit.quant import Format, rtn
from labkit.quant.blocks import PRODUCTS
from tests.engine.gpu_models import prompts_of, ties
from tests.engine.packed_models import FAMILIES, dequantised, exact, made

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
DTYPES = ("bfloat16", "float16")
NEW = [24, 22, 20, 18, 16, 13, 10, 7, 4]
# Of products with rows that groups of 128 divide, heads of 128, and more layers than the tiny ones.
SHAPE = ModelConfig(
    architecture="llama", vocab_size=1000, hidden_size=1024, intermediate_size=2816, num_layers=4, num_heads=8,
    num_kv_heads=2, head_dim=128, max_positions=2048,
)  # fmt: skip

MATRIX = {
    "eager": dict(cuda_graphs=False),
    "graphs": dict(),
    "graphs, not ahead": dict(run_ahead=False),
    "alone": dict(max_num_seqs=1),
    "alone, eager": dict(max_num_seqs=1, cuda_graphs=False),
    "chunks of 16": dict(max_batched_tokens=16),
    "preempted": dict(num_blocks=11),
}


@cache
def wanted(family: str, dtype: str) -> list[list[int]]:
    model = dequantised(family, dtype, DEVICE)
    pairs = zip(prompts_of(model), NEW, strict=True)
    return [generate_cached(model, ids, n, ignore_eos=True).token_ids for ids, n in pairs]


@cache
def packed(family: str, dtype: str):
    return load(made(family).folder, dtype, DEVICE, progress=None, quantization="awq")


def generated(model, **changes) -> list[list[int]]:
    settings = dict(max_num_seqs=9, num_blocks=80, max_batched_tokens=128, max_model_len=120, freeze_gc=False)
    llm = LLM(model, quantization="awq", **(settings | changes))
    assert (llm.runner.graphs is not None) == changes.get("cuda_graphs", True)
    llm.runner.kv.data.fill_(float("nan"))
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in NEW]
    outs = llm.generate(prompts_of(llm.model), params, progress=False)
    llm.scheduler.check()
    assert llm.pool.num_used == 0 and (sum(o.metrics.preemptions for o in outs) > 0) == (changes == MATRIX["preempted"])
    return [o.token_ids for o in outs]


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_the_dequantised_folder(family, dtype, name):
    outs = generated(packed(family, dtype), **MATRIX[name])
    model = dequantised(family, dtype, DEVICE)
    count = ties(model, exact(family, DEVICE), prompts_of(model), wanted(family, dtype), outs)
    print(f"{family}, {dtype}, {name}: {count} of {len(NEW)} part at a near tie")
    most = len(NEW) // 2 if dtype == "float16" else len(NEW) * 2 // 3  # bf16 moves logits 8 times as far
    assert count <= most


@cache
def rounded(bits: int, symmetric: bool) -> tuple[Model, Model, Model]:
    """SHAPE at random in bf16: packed; dequantised; and what its codes stand for in fp32."""
    model = load(SHAPE, "bfloat16", DEVICE, seed=3)[0]
    report = rtn(model, Format(bits, 128, symmetric))
    true = load(SHAPE, "float32", DEVICE, seed=3)[0]
    t, w = true.weights, model.weights
    t.embedding, t.final_norm, t.lm_head = w.embedding.float(), w.final_norm.float(), w.lm_head.float()
    for layer, codes in zip(t.layers, report.quantised, strict=True):  # norms are 1 in both
        for product in PRODUCTS:
            setattr(layer, product, codes[product].dequantise())
    return quantised_model(model, report), model, true


def assert_close(it: Model, same: Model, true: Model, n: int) -> None:
    """Logits after each of n tokens: their error against fp32 is at most twice the dequantised model's."""
    ids, at = torch.arange(n, device=DEVICE)[None] % 200 + 2, torch.arange(n, device=DEVICE)
    got, plain, want = (m.forward(ids, at, all_logits=True) for m in (it, same, true))
    assert got.isfinite().all()
    assert (got - want).norm() <= 2 * (plain - want).norm() + 1e-3 * want.norm(), f"{n} tokens"


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True], ids=["zero points", "symmetric"])
def test_all_formats_multiply_as_what_their_codes_stand_for(bits, symmetric):
    it, model, true = rounded(bits, symmetric)
    for n in (1, 2, 8, 9, 17, 64, 65, 200, 700):
        assert_close(it, model, true, n)
    prompts = prompts_of(model)
    want = [generate_cached(model, ids, n, ignore_eos=True).token_ids for ids, n in zip(prompts, NEW, strict=True)]
    for graphs in (True, False):  # the logits of a random model lie close together: how many part says little
        ties(model, true, prompts, want, generated((it, None), cuda_graphs=graphs))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_forward_pass_multiplies_packed_weights(family, dtype):
    models = packed(family, dtype)[0], dequantised(family, dtype, DEVICE), exact(family, DEVICE)
    for n in (1, 2, 8, 9, 17, 64, 100):
        assert_close(*models, n)


# ---- graphs


def seated(runner: Runner, batch: int) -> list[Request]:
    per = -(-120 // runner.kv.block_size)
    lengths = [1 + 7 * i % 60 for i in range(batch)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    requests = [
        Request(1000 * batch + i, ids, params) for i, ids in enumerate(prompts_of(runner.model, lengths, batch))
    ]
    for i, request in enumerate(requests):
        request.blocks = [1 + i * per + b for b in range(per)]
    return requests


def step_of(*chunks) -> Step:
    return Step(0, tuple(Chunk(r, start, count, True) for r, start, count in chunks))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_gives_what_its_step_gives_eagerly(dtype):
    """Bit for bit, padding included: up to 8 rows products do what stands around them, from 9 on they stand alone."""
    for model in (packed("qwen3", dtype)[0], load(SHAPE, dtype, DEVICE, quantization="awq")[0]):
        runner = Runner(model, num_blocks=400, max_num_seqs=20, max_batched_tokens=512, max_model_len=120)
        assert runner.graphs is not None and runner.mixed_graphs is not None
        runner.kv.data.fill_(float("nan"))
        for batch in (1, 2, 3, 4, 7, 8, 9, 16, 17, 20):
            requests = seated(runner, batch)
            for r in requests:
                r.token_ids += runner.run(step_of((r, 0, r.num_tokens))).token_ids()
            before, decode = runner.kv.data.clone(), step_of(*((r, r.num_tokens - 1, 1) for r in requests))
            runner.run(decode)
            bucket = min(b for b in runner.graphs.buckets if b >= batch)
            replayed = runner.graphs.logits[:bucket].clone()
            assert replayed.isfinite().all(), "a row of padding holds NaN"
            runner.kv.data.copy_(before)
            eager = torch.full_like(replayed, float("nan"))
            with torch.inference_mode():
                runner.decode_step(runner.inputs.build(decode.chunks, pad_to=bucket), eager)
            assert torch.equal(eager, replayed), f"{batch}: logits differ by up to {(eager - replayed).abs().max():.2e}"


def test_a_step_waits_for_nothing():
    """What synchronises or decides on values cannot be captured; it is found in eager steps too."""
    llm = LLM(SHAPE, "bfloat16", DEVICE, quantization="awq", cuda_graphs=False, num_blocks=200, max_num_seqs=20,
              max_batched_tokens=256, freeze_gc=False)  # fmt: skip
    runner, requests = llm.runner, seated(llm.runner, 20)
    steps = [step_of(*((r, 0, r.num_tokens) for r in requests[:n])) for n in (1, 4, 8)]
    steps += [step_of(*((r, 0, 1) for r in requests[:n])) for n in (1, 8, 20)]
    for step in steps:
        runner.run(step).token_ids()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [runner.run(step) for step in steps]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [len(result.token_ids()) for result in results] == [len(step.chunks) for step in steps]


# ---- memory


def wide(layers: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama", vocab_size=1000, hidden_size=4096, intermediate_size=11008, num_layers=layers,
        num_heads=32, num_kv_heads=32, head_dim=128, max_positions=65_536,
    )  # fmt: skip


def test_the_room_that_packing_leaves_goes_to_the_cache():
    """The number of blocks is measured: of the same share, the packed model gets as many more as it is smaller."""
    shape = wide(8)
    held = {}
    for quantization in (None, "awq"):
        gc.collect()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        share = min(1.0, 1 - free / total + 0.06)  # 6 % of the GPU, whatever others hold
        llm = LLM(shape, "bfloat16", DEVICE, quantization=quantization, memory_share=share, max_num_seqs=16,
                  max_batched_tokens=64, block_size=64, freeze_gc=False, trace=False)  # fmt: skip
        size = PagedKV.block_bytes(shape, 64, torch.bfloat16)
        held[quantization] = llm.model.weights.nbytes, llm.runner.kv.num_blocks * size
        del llm
    (plain, fewer), (small, more) = held[None], held["awq"]
    products = 8 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert abs((plain - small) / products - (2 - (4 + 32 / 128) / 8)) < 0.01, "bytes a weight that are saved"
    saved, gained = plain - small, more - fewer
    print(f"weights {plain / 2**30:.2f} and {small / 2**30:.2f} GiB, cache {fewer / 2**30:.2f} and {more / 2**30:.2f}")
    assert abs(gained - saved) < 0.15 * saved, (saved, gained)


def test_random_weights_are_packed_one_product_at_a_time():
    shape = wide(24)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = load(shape, "bfloat16", DEVICE, quantization="awq")[0]
    peak, held = torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
    gate_up = 2 * 11008 * 4096
    print(f"held {held / 2**20:.0f} MiB, peak {peak / 2**20:.0f} MiB")
    assert held < 1.05 * model.weights.nbytes
    assert peak - held < 32 * gate_up < held * 3.7 / 2, "some fp32 copies of the largest product, and never the model"


def test_fp32_is_refused_before_anything_is_read():
    with pytest.raises(LabError, match="in 16 bits: give dtype 'float16' or 'bfloat16', got 'float32'"):
        LLM("/nowhere", "float32", DEVICE, quantization="awq")
    it = made("llama")
    with pytest.raises(LabError, match="in 16 bits"):
        quantised_model(it.model, it.report, torch.float32, DEVICE)
