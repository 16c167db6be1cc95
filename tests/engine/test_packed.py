"""Packed weights give the tokens of the same weights dequantised: every family, however made and run."""

from __future__ import annotations

import json
import shutil
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels import awq_linear
from kernels.awq_linear import PackedWeight
from labkit.engine import LLM, MODELS, ModelConfig, SamplingParams, load, quantised_model
from labkit.engine import ops as engine_ops
from labkit.engine.awq_folder import load_awq, save_awq
from labkit.engine.packed import bytes_a_weight, check_packable, random_format, round_and_pack
from labkit.engine.weights import random_weights
from labkit.errors import LabError
from labkit.quant import Format, awq, gptq, rtn
from labkit.quant.blocks import PRODUCTS, copy_of
from labkit.quant.checkpoint import WEIGHTS, read_awq
from labkit.quant.monitor import compare_layers
from labkit.quant.quality import token_losses
from tests.engine.fake_graph import CAPTURABLE, FakeCapture
from tests.engine.packed_models import EMBEDDED, FMT, HERE, made
from tests.engine.tiny_models import TINY, left_over, tiny_hf, write_gguf

PROMPTS = [[5, 6, 7], [8] * 40, [11, 12], list(range(2, 35)), [17]]
SETTINGS = dict(num_blocks=60, block_size=8, max_num_seqs=4, max_batched_tokens=32, max_model_len=100, progress=None)
SHAPE = ModelConfig(
    architecture="qwen2", vocab_size=90, hidden_size=96, intermediate_size=128, num_layers=3, num_heads=4,
    num_kv_heads=2, head_dim=16, max_positions=128, qkv_bias=True,
)  # fmt: skip


def logits(model, n=40):
    return model.forward(torch.arange(2, 2 + n)[None], torch.arange(n), all_logits=True)


def tokens(source, prompts=PROMPTS, new=8, **changes):
    llm = source if isinstance(source, LLM) else LLM(source, **(SETTINGS | changes))
    outs = llm.generate(prompts, SamplingParams(max_tokens=new, ignore_eos=True), progress=False)
    llm.scheduler.check()
    return [o.token_ids for o in outs]


def products(model):
    return [getattr(layer, name) for layer in model.weights.layers for name in PRODUCTS]


# ---- from a folder


@pytest.mark.parametrize("family", TINY)
def test_a_packed_folder_is_the_same_model(family):
    it = made(family)
    packed, plain = (load(it.folder, progress=None, quantization=q)[0] for q in ("awq", None))
    assert packed.weights.packed and not plain.weights.packed
    for weight, matrix in zip(products(packed), products(plain), strict=True):
        assert tuple(weight.shape) == tuple(matrix.shape) and weight.bits == 4 and weight.group == 32
        assert torch.equal(weight.dequantise(), matrix)
    assert torch.equal(logits(packed), logits(plain)) and torch.equal(logits(packed), logits(it.model))
    assert packed.config == plain.config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", TINY)
def test_the_engine_gives_the_tokens_of_the_dequantised_folder(family, dtype):
    it = made(family)
    llm = LLM(it.folder, dtype=dtype, quantization="awq", **SETTINGS)
    assert llm.model.weights.packed
    wanted = tokens(it.folder, dtype=dtype)
    assert tokens(llm) == wanted
    assert tokens(llm) == wanted, "over cached prefixes"
    assert len({tuple(t) for t in wanted}) > 1, "a model that says one thing only would agree whatever it did"


@pytest.mark.parametrize(
    "changes",
    [dict(max_num_seqs=1), dict(max_batched_tokens=8), dict(num_blocks=16), dict(run_ahead=True)],
    ids=["alone", "chunks of 8", "preempted", "ahead"],
)
def test_whatever_the_engine_does_the_tokens_stay(changes):
    it = made("llama")
    assert tokens(it.folder, quantization="awq", **changes) == tokens(it.folder)


def test_a_matrix_left_plain_leaves_its_stack_plain(tmp_path):
    """As checkpoints do that name some modules not to convert: k is plain, and q and v are stacked with it."""
    it = made("qwen2")
    folder = shutil.copytree(it.folder, tmp_path / "awq")
    _, held, _ = read_awq(folder)
    state = load_file(folder / WEIGHTS)
    for name in [n for n in held if n.endswith(("0.self_attn.k_proj", "1.mlp.down_proj"))]:
        for part in ("qweight", "qzeros", "scales"):
            state.pop(f"{name}.{part}")
        state[f"{name}.weight"] = held[name].dequantise().half()
    save_file(state, folder / WEIGHTS)
    model = load(folder, progress=None, quantization="awq")[0]
    first, second = model.weights.layers
    assert isinstance(first.qkv, torch.Tensor) and isinstance(second.down, torch.Tensor)
    assert isinstance(second.qkv, PackedWeight) and isinstance(first.gate_up, PackedWeight)
    assert not model.weights.packed
    assert tokens(folder, quantization="awq") == tokens(folder)


def test_an_older_folder_is_packed_too(tmp_path):
    folder = shutil.copytree(made("llama").folder, tmp_path / "awq")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(old))
    assert torch.equal(logits(load(folder, progress=None, quantization="awq")[0]), logits(made("llama").model))


def test_only_one_product_is_unpacked_at_a_time():
    """Codes take a byte each, twice what they take packed; all of them at once would be a large model's peak."""
    it, alive = made("llama"), []
    most = 0
    unpack = awq_linear.repack

    def watched(codes, *rest):
        nonlocal most
        alive.append(weakref.ref(codes))
        most = max(most, sum(ref() is not None for ref in alive))
        return unpack(codes.clone(), *rest)  # so that nothing of it stays in what is made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("labkit.engine.packed.repack", watched)
        load_awq(it.folder, it.model.config, packed=True)
    assert len(alive) == 8 and most == 1


@pytest.mark.model
@pytest.mark.skipif(not HERE, reason="the embedded model's file is not there")
def test_the_embedded_model_in_4_bits(smollm):
    it = made(EMBEDDED)
    prompts = [smollm[1].encode(text) for text in ("The capital of France is", "def add(a, b):\n", "Water boils at")]
    settings = dict(new=4, num_blocks=None, max_batched_tokens=512, max_model_len=64)
    wanted = tokens(it.folder, prompts, **settings)
    assert tokens(it.folder, prompts, quantization="awq", **settings) == wanted
    w, c = load(it.folder, "float16", progress=None, quantization="awq")[0].weights, it.model.config
    matrices = c.num_layers * (2 * c.hidden_size * c.q_size + 2 * c.hidden_size * c.kv_size
                               + 3 * c.hidden_size * c.intermediate_size)  # fmt: skip
    rest = 2 * (c.vocab_size * c.hidden_size + (2 * c.num_layers + 1) * c.hidden_size)
    assert 4.25 <= 8 * (w.nbytes - rest) / matrices < 5.1, "bits a weight, with a scale and a zero point for 64"


# ---- from what quantisation returned


CALIBRATION = torch.randint(2, 60, (4, 32), generator=torch.Generator().manual_seed(0))
METHODS = {
    **{f"rtn {bits}": lambda m, bits=bits: rtn(m, Format(bits, 32)) for bits in (2, 3, 4, 8)},
    "rtn symmetric": lambda m: rtn(m, Format(4, 32, symmetric=True)),
    "rtn 8 symmetric, rows": lambda m: rtn(m, Format(8, -1, symmetric=True)),
    "awq 3": lambda m: awq(m, Format(3, 32), CALIBRATION, progress=False),
    "awq 4": lambda m: awq(m, FMT, CALIBRATION, progress=False),
    "gptq 4": lambda m: gptq(m, FMT, CALIBRATION, progress=False),
}


@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_returned_is_packed(method):
    model = copy_of(made("qwen2").plain)
    report = METHODS[method](model)
    packed = quantised_model(model, report)
    assert packed.weights.packed and {w.bits for w in products(packed)} == {report.format.bits}
    assert torch.equal(logits(packed), logits(model)) and not torch.equal(logits(packed), logits(made("qwen2").plain))
    assert packed.weights.embedding is model.weights.embedding and packed.weights.lm_head is model.weights.lm_head
    llm = LLM((packed, None), quantization="awq", **SETTINGS)
    assert tokens(llm) == tokens((model, None))


def test_a_tied_head_stays_tied_and_another_dtype_is_made(tmp_path):
    tiny_hf("llama", hidden_size=96, intermediate_size=96).half().save_pretrained(tmp_path)
    model = load(tmp_path, progress=None)[0]
    report = rtn(model, FMT)
    packed = quantised_model(model, report, torch.bfloat16, "cpu")
    w = packed.weights
    assert w.lm_head is w.embedding and packed.dtype == w.final_norm.dtype == w.layers[0].mlp_norm.dtype
    assert {weight.dtype for weight in products(packed)} == {torch.bfloat16}
    save_awq(model, report, tmp_path / "awq")
    back = load(tmp_path / "awq", "bfloat16", progress=None)[0]
    assert torch.equal(logits(packed), logits(back)), "codes are dequantised in fp32 and rounded once"


def test_a_packed_model_is_written_as_it_was_quantised(tmp_path):
    it = made("qwen3")
    folder = save_awq(quantised_model(it.model, it.report), it.report, tmp_path / "awq")
    want, got = load_file(it.folder / WEIGHTS), load_file(folder / WEIGHTS)
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)


def test_a_report_of_another_model_is_refused():
    it, other = made("llama"), made("qwen2")
    with pytest.raises(LabError, match=r"layer 0: the report's qkv is \(192, 128\), and the model's is \(320, 96\)"):
        quantised_model(it.model, other.report)
    with pytest.raises(LabError, match="holds codes of 0 layers and the model has 2: give what rtn, awq or gptq ret"):
        quantised_model(it.model, type(it.report)(FMT))
    lost = type(it.report)(FMT, [{k: v for k, v in it.report.quantised[0].items() if k != "down"}] * 2)
    with pytest.raises(LabError, match="the report's down is None"):
        quantised_model(it.model, lost)


# ---- at random


@pytest.mark.parametrize("seed", [0, 7])
def test_random_weights_are_those_of_the_plain_model_rounded(seed):
    packed, _ = load(SHAPE, seed=seed, quantization="awq")
    plain, _ = load(SHAPE, seed=seed)
    for layer, mine in zip(plain.weights.layers, packed.weights.layers, strict=True):
        for name in PRODUCTS:
            matrix, weight = getattr(layer, name), getattr(mine, name)
            fmt = random_format(matrix.shape[1])
            assert fmt == Format(4, {96: 32, 64: 64, 128: 128}[matrix.shape[1]])
            assert weight.group == fmt.group
            error = (weight.dequantise() - matrix).abs().view(len(matrix), -1, fmt.group)
            spread = matrix.view(len(matrix), -1, fmt.group)
            step = (spread.amax(-1) - spread.amin(-1)) / 15  # and the scale is rounded to fp16
            assert (error.amax(-1) <= 0.51 * step + 1e-6).all() and error.max() > 0
        assert torch.equal(mine.attn_norm, layer.attn_norm) and torch.equal(mine.qkv_bias, layer.qkv_bias)
    assert torch.equal(packed.weights.embedding, plain.weights.embedding)
    assert torch.equal(packed.weights.lm_head, plain.weights.lm_head)
    dequantised = copy_of(plain)
    for layer, mine in zip(dequantised.weights.layers, packed.weights.layers, strict=True):
        for name in PRODUCTS:
            setattr(layer, name, getattr(mine, name).dequantise())
    assert tokens((dequantised, None)) == tokens(LLM(SHAPE, seed=seed, quantization="awq", **SETTINGS))


def test_no_more_than_one_plain_matrix_is_there_at_a_time():
    made_, most = [], 0

    def watched(names, make):
        nonlocal most

        def watch():
            matrix = make()
            made_.append(weakref.ref(matrix))
            return matrix

        weight = round_and_pack(names, watch)
        most = max(most, sum(ref() is not None for ref in made_))
        return weight

    weights = random_weights(SHAPE, pack=watched)
    assert len(made_) == 4 * SHAPE.num_layers and weights.packed
    assert most == 0, "a matrix is gone when its product is packed"


def test_groups_that_no_kernel_multiplies_are_refused(tmp_path):
    model = copy_of(made("llama").plain)
    report = rtn(model, Format(4, 16))
    says = "a product of .320, 96. in 4 bits, asymmetric, groups of 16 cannot be packed: .*multiples of 32"
    with pytest.raises(LabError, match=says):
        quantised_model(model, report)
    folder = save_awq(model, report, tmp_path / "awq")
    with pytest.raises(LabError, match=says):
        load(folder, progress=None, quantization="awq")
    load(folder, progress=None)


def test_rows_that_no_group_divides_are_refused():
    with pytest.raises(LabError, match="none of the groups of 128, 64, 32 weights divides a row of 72"):
        load(replace(SHAPE, intermediate_size=72), quantization="awq")


def test_bytes_a_weight_are_codes_scales_and_zero_points():
    assert bytes_a_weight(MODELS["llama-3-8b"]) == pytest.approx((4 + 20 / 128) / 8)
    few = bytes_a_weight(MODELS["smollm2-135m"])  # hidden 576 in groups of 64, 1536 in groups of 128
    assert (4 + 20 / 128) / 8 < few < (4 + 20 / 64) / 8


# ---- operators, and the paths of a GPU


def test_a_function_of_ones_own_gets_the_packed_products_and_no_others():
    it, seen = made("llama"), []

    def mine(x, weight, *, bias=None):
        seen.append(tuple(weight.shape))
        return torch.nn.functional.linear(x, weight.dequantise(x.dtype), bias)

    assert tokens(it.folder, quantization="awq", ops={"awq_linear": mine}) == tokens(it.folder)
    shapes = {tuple(weight.shape) for weight in products(it.model)}
    assert set(seen) == shapes and len(seen) % 8 == 0
    seen.clear()

    def head(x, weight, bias=None):
        seen.append(tuple(weight.shape))
        return torch.nn.functional.linear(x, weight, bias)

    assert tokens(it.folder, quantization="awq", ops={"linear": head}) == tokens(it.folder)
    assert set(seen) == {(it.model.config.vocab_size, 96)}, "the output head is plain"
    tokens(it.folder, ops={"awq_linear": None.__class__})  # nothing packed, so it is never called


@pytest.mark.parametrize("most", [1, 2, 16])
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_products_that_do_what_stands_around_them_give_the_same_tokens(family, most, monkeypatch):
    """What a GPU does with few rows, with the definitions of its kernels."""
    from kernels.gemv import gemv_reference

    it, rows = made(family), []

    def packed(x, weight, **around):
        rows.append(len(x))
        return awq_linear.OP.reference(x, weight, **around)

    llm = LLM(it.folder, quantization="awq", **SETTINGS | dict(max_batched_tokens=12))
    monkeypatch.setattr(engine_ops, "gemv", lambda x, w, ahead=False, **around: gemv_reference(x, w, **around))
    monkeypatch.setattr(engine_ops, "PACKED", packed)
    llm.runner.model._most_fused = most
    assert tokens(llm, new=10) == tokens(it.folder, new=10)
    assert rows and max(rows) <= most and {1, most} & set(rows)
    if most == 16:
        assert {1, 4} <= set(rows) and max(rows) > 4, "decode steps of several, and chunks of prompts"


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_packed_weights_in_graphs(batch):
    it = made("qwen2")
    settings = SETTINGS | dict(ops=CAPTURABLE)
    with_graphs, capture = LLM(it.folder, quantization="awq", **settings), FakeCapture()
    with_graphs.runner.capture_graphs(capture)
    assert tokens(with_graphs, PROMPTS[:batch]) == tokens(it.folder, PROMPTS[:batch], ops=CAPTURABLE)
    assert capture.replayed > 0


# ---- what is refused


def test_only_quantised_weights_are_run_as_such(tmp_path, own_home):
    tiny_hf("llama").save_pretrained(tmp_path / "plain")
    gguf = write_gguf(tmp_path / "tiny.gguf", tiny_hf("llama"))
    how = r"make a checkpoint with `labkit quantise MODEL FOLDER` \(in Python: labkit.engine.save_awq\), and load that"
    for source, what in (
        ("smollm2-135m", "and the built-in 'smollm2-135m' is converted to fp32"),
        (gguf, "and the file .*tiny.gguf is converted to fp32"),
        (tmp_path / "plain", "and the weights of .*plain are not quantised"),
    ):
        with pytest.raises(
            LabError, match=f"quantization='awq' runs weights that are quantised already, {what}; {how}"
        ):
            LLM(source, quantization="awq", progress=None)
    assert left_over(own_home) == [], "nothing was fetched or converted for it"
    with pytest.raises(LabError, match="'nowhere' is no built-in model"):
        LLM("nowhere", quantization="awq", progress=None)
    with pytest.raises(LabError, match="the weights of this model are not packed; .*quantised_model packs what rtn"):
        LLM((made("llama").plain, None), quantization="awq")


@pytest.mark.parametrize("name", ["gptq", "AWQ", "", 4, True])
def test_an_unknown_quantization_is_refused_with_the_known_ones(name):
    for call in (lambda: LLM(SHAPE, quantization=name), lambda: load(SHAPE, quantization=name)):
        with pytest.raises(LabError, match=rf"quantization must be None or one of 'awq', got {name!r}"):
            call()


def test_a_gpu_multiplies_them_in_16_bits():
    cuda = torch.device("cuda")
    with pytest.raises(LabError, match="in 16 bits: give dtype 'float16' or 'bfloat16', got 'float32'"):
        check_packable(torch.float32, cuda)
    check_packable(torch.bfloat16, cuda)
    check_packable(torch.float16, cuda)
    check_packable(torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "call",
    [
        copy_of,
        lambda m: rtn(m, FMT),
        lambda m: awq(m, FMT, CALIBRATION, progress=False),
        lambda m: gptq(m, FMT, CALIBRATION, progress=False),
        lambda m: compare_layers(m, m, CALIBRATION),
    ],
    ids=["copy_of", "rtn", "awq", "gptq", "compare_layers"],
)
def test_what_wants_matrices_refuses_packed_ones(call):
    it = made("llama")
    packed = quantised_model(it.model, it.report)
    with pytest.raises(LabError, match="the products of this model are packed to 4 bits, and this needs matrices"):
        call(packed)


def test_quality_is_measured_of_packed_models_too():
    it = made("llama")
    packed = quantised_model(it.model, it.report)
    text = torch.randint(2, 60, (200,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(token_losses(packed, text, 50), token_losses(it.model, text, 50))
