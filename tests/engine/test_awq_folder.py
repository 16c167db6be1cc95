"""AWQ folders: what was quantised and written is read as the same model, every family; what is wrong is named."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit.engine import LLM, SamplingParams, load
from labkit.engine.awq_folder import save_awq
from labkit.errors import LabError
from labkit.quant import Format, awq, rtn
from labkit.quant.blocks import copy_of
from labkit.quant.checkpoint import WEIGHTS
from tests.engine.tiny_models import TINY, tiny_hf

FMT = Format(4, 8)


@pytest.fixture
def plain(tmp_path, request):
    family = getattr(request, "param", "llama")
    tiny_hf(family).half().save_pretrained(tmp_path / "plain")  # fp16, which is what the layout keeps the rest in
    return load(tmp_path / "plain", progress=None)[0]


def logits(model):
    tokens = torch.arange(2, 42)[None]
    return model.forward(tokens, torch.arange(40), all_logits=True)


@pytest.mark.parametrize("plain", TINY, indirect=True)
def test_a_written_model_is_read_as_the_same_model(plain, tmp_path):
    quantised = copy_of(plain)
    folder = save_awq(quantised, rtn(quantised, FMT), tmp_path / "awq")
    back, _ = load(folder, progress=None)
    assert back.config == plain.config
    assert torch.equal(logits(back), logits(quantised)) and not torch.equal(logits(back), logits(plain))


def test_folded_scales_survive_writing(plain, tmp_path):
    quantised = copy_of(plain)
    tokens = torch.randint(2, 60, (4, 32), generator=torch.Generator().manual_seed(0))
    folder = save_awq(quantised, awq(quantised, FMT, tokens, progress=False), tmp_path / "awq")
    off = (logits(load(folder, progress=None)[0]) - logits(quantised)).norm() / logits(quantised).norm()
    assert off < 2e-3  # norms that took a scale in are rounded to fp16


def test_plain_transformers_computes_the_same_from_what_the_codes_stand_for(plain, tmp_path):
    import transformers

    quantised = copy_of(plain)
    folder = save_awq(quantised, rtn(quantised, FMT), tmp_path / "awq")
    back, _ = load(folder, progress=None)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    c, state = back.config, reference.state_dict()
    for i, layer in enumerate(back.weights.layers):
        p = f"model.layers.{i}."
        rows = layer.qkv.split([c.q_size, c.kv_size, c.kv_size])
        for n, part in zip("qkv", rows, strict=True):
            state[f"{p}self_attn.{n}_proj.weight"].copy_(part)
        for n, part in zip(("gate", "up"), layer.gate_up.chunk(2), strict=True):
            state[f"{p}mlp.{n}_proj.weight"].copy_(part)
        state[f"{p}self_attn.o_proj.weight"].copy_(layer.attn_out)
        state[f"{p}mlp.down_proj.weight"].copy_(layer.down)
    with torch.no_grad():
        want = reference(torch.arange(2, 42)[None]).logits
    torch.testing.assert_close(logits(back), want, rtol=1e-3, atol=1e-3)


def test_the_engine_serves_it(plain, tmp_path):
    quantised = copy_of(plain)
    folder = save_awq(quantised, rtn(quantised, FMT), tmp_path / "awq")
    prompts, params = [[5, 6, 7], [9] * 20], SamplingParams(max_tokens=6, ignore_eos=True)
    outs = [
        LLM(source, num_blocks=20, progress=None).generate(prompts, params) for source in (folder, (quantised, None))
    ]
    assert [o.token_ids for o in outs[0]] == [o.token_ids for o in outs[1]]


def test_an_older_folder_tells_its_format_in_a_file_of_its_own(plain, tmp_path):
    quantised = copy_of(plain)
    folder = save_awq(quantised, rtn(quantised, FMT), tmp_path / "awq")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    old = {"zero_point": True, "q_group_size": 8, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(old))
    assert torch.equal(logits(load(folder, progress=None)[0]), logits(quantised))


def test_what_does_not_fit_is_named(plain, tmp_path):
    quantised = copy_of(plain)
    folder = save_awq(quantised, rtn(quantised, FMT), tmp_path / "awq")
    tensors = load_file(folder / WEIGHTS)
    lost = {n: t for n, t in tensors.items() if not n.startswith("model.layers.1.mlp.up_proj")}
    save_file(lost, folder / WEIGHTS)
    with pytest.raises(LabError, match=r"lacks the tensor model\.layers\.1\.mlp\.up_proj\.weight, plain or quantised"):
        load(folder, progress=None)
    save_file(tensors, folder / WEIGHTS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    with pytest.raises(LabError, match=r"has shape \(72, 48\), and its config\.json asks for \(80, 48\)"):
        load(folder, progress=None)
    config["quantization_config"]["version"] = "gemv"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(LabError, match="AWQ's version 'gemv'"):
        load(folder, progress=None)


@pytest.mark.parametrize("packed", [False, True])
def test_a_plain_tensor_that_is_no_floating_number_is_named(plain, tmp_path, packed):
    quantised, name = copy_of(plain), "model.norm.weight"
    folder = save_awq(quantised, rtn(quantised, FMT), tmp_path / "awq")
    save_file(load_file(folder / WEIGHTS) | {name: torch.ones(48, dtype=torch.int8)}, folder / WEIGHTS)
    with pytest.raises(LabError, match=f"{name} is of dtype I8, and plain weights are F16, BF16, F32, F64"):
        load(folder, progress=None, quantization="awq" if packed else None)


def test_tokenizer_files_go_along(plain, tmp_path):
    quantised, source = copy_of(plain), tmp_path / "tokenizer"
    source.mkdir()
    report = rtn(quantised, FMT)
    with pytest.raises(LabError, match=r"has no tokenizer\.json to copy"):
        save_awq(quantised, report, tmp_path / "awq", source)
    assert not (tmp_path / "awq").exists()
    (source / "tokenizer.json").write_text("{}")
    (source / "special_tokens_map.json").write_text("[]")
    folder = save_awq(quantised, report, tmp_path / "awq", source)
    assert [(folder / name).read_text() for name in ("tokenizer.json", "special_tokens_map.json")] == ["{}", "[]"]


def test_no_folder_is_there_before_its_tokenizer_is(plain, tmp_path, monkeypatch):
    def stop(*args):
        raise KeyboardInterrupt

    quantised, source = copy_of(plain), tmp_path / "tokenizer"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    report = rtn(quantised, FMT)
    monkeypatch.setattr("shutil.copyfile", stop)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        save_awq(quantised, report, tmp_path / "awq", source)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("fmt", "says"),
    [(Format(3, 8), "this is 3 bits, asymmetric"), (Format(4, 8, symmetric=True), "this is 4 bits, symmetric")],
)
def test_what_the_layout_cannot_hold_is_refused_with_what_can_run_it(plain, tmp_path, fmt, says):
    quantised = copy_of(plain)
    with pytest.raises(LabError, match=f"{says}.*labkit.engine.quantised_model runs without a checkpoint"):
        save_awq(quantised, rtn(quantised, fmt), tmp_path / "awq")
    assert not (tmp_path / "awq").exists()


def test_a_report_of_another_model_is_refused(plain, tmp_path):
    tiny_hf("qwen2").half().save_pretrained(tmp_path / "other")
    report = rtn(load(tmp_path / "other", progress=None)[0], FMT)
    with pytest.raises(LabError, match=r"layer 0: the report's qkv is \(96, 64\), and the model's is"):
        save_awq(plain, report, tmp_path / "awq")
    report.quantised.pop()
    with pytest.raises(LabError, match="the report holds codes of 1 layers and the model has 2"):
        save_awq(plain, report, tmp_path / "awq")


@pytest.mark.parametrize("quantization", [None, "awq"])
def test_a_tensor_of_no_use_is_named(plain, tmp_path, quantization):
    """A bias that the engine does not add, or the scale that other models put behind their activation: a model that
    runs without them runs wrongly."""
    quantised = copy_of(plain)
    folder = save_awq(quantised, rtn(quantised, FMT), tmp_path / "awq")
    state = load_file(folder / WEIGHTS)
    o_proj, down = "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"
    more = {part: state[f"{down}.{part}"].clone() for part in ("qweight", "qzeros", "scales")}
    for names in (
        {f"{o_proj}.bias": torch.ones(48)},
        {"model.layers.2.input_layernorm.weight": torch.ones(48)},
        {f"model.layers.2.mlp.down_proj.{part}": t for part, t in more.items()},
    ):
        save_file(state | names, folder / WEIGHTS)
        first = next(iter(names)).replace("qweight", "weight").replace(".", r"\.")
        with pytest.raises(LabError, match=f"holds the tensor {first}, for which a model of its config.json has no"):
            load(folder, progress=None, quantization=quantization)
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(16) for i in range(2)}
    save_file(state | tables | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}, folder / WEIGHTS)
    assert torch.equal(logits(load(folder, progress=None)[0]), logits(quantised)), "old tables, and a tied head's copy"


@pytest.mark.parametrize("quantization", [None, "awq"])
def test_an_older_gptq_folder_is_not_read_as_a_plain_one(plain, tmp_path, quantization):
    quantised = copy_of(plain)
    folder = save_awq(quantised, rtn(quantised, FMT), tmp_path / "awq")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 8}))
    with pytest.raises(LabError, match="is a GPTQ checkpoint: it packs along the inputs"):
        load(folder, progress=None, quantization=quantization)


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_in_several_files_is_the_same_model(packed, tmp_path):
    from tests.engine.packed_models import made

    it = made("qwen3")
    folder = tmp_path / "shards"
    folder.mkdir()
    state = load_file(it.folder / WEIGHTS)
    files = [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    where = {name: files[i % 3] for i, name in enumerate(sorted(state))}
    for file in files:
        save_file({name: state[name] for name, at in where.items() if at == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_bytes((it.folder / "config.json").read_bytes())
    back = load(folder, progress=None, quantization="awq" if packed else None)[0]
    assert back.weights.packed == packed and torch.equal(logits(back), logits(it.model))
    (folder / files[1]).unlink()
    with pytest.raises(LabError, match=f"has no {files[1]}, which its index lists"):
        load(folder, progress=None)
