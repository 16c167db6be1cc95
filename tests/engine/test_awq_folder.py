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


def test_tokenizer_files_go_along(plain, tmp_path):
    quantised, source = copy_of(plain), tmp_path / "tokenizer"
    source.mkdir()
    report = rtn(quantised, FMT)
    with pytest.raises(LabError, match=r"has no tokenizer\.json to copy"):
        save_awq(quantised, report, tmp_path / "awq", source)
    assert not (tmp_path / "awq").exists()
    (source / "tokenizer.json").write_text("{}")
    assert (save_awq(quantised, report, tmp_path / "awq", source) / "tokenizer.json").read_text() == "{}"
