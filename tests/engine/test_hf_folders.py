"""Hugging Face folders that transformers wrote, read here: four families, and every way a folder can be wrong."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit.engine import ModelConfig, load
from labkit.engine.staging import WAYS, load_tensors
from labkit.engine.tokenizer import byte_level_bpe
from labkit.errors import LabError
from tests.engine.tiny_models import VOCABULARY, tiny_hf

LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, rope_theta=1e4)
VARIANTS = {
    "llama, 3 queries a KV head, head size not hidden / heads": ("llama", {}),
    "mistral, no grouping": ("mistral", {}),
    "qwen2, biases, one KV head": ("qwen2", {}),
    "qwen3, query and key norms": ("qwen3", {}),
    "llama, one head, one layer": ("llama", dict(num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1)),
    "linear scaling": ("llama", dict(rope_parameters=dict(rope_type="linear", factor=3.0, rope_theta=1e4))),
    "llama3 scaling": (
        "llama",
        dict(rope_parameters=LLAMA3 | dict(original_max_position_embeddings=32, rope_theta=1e4)),
    ),
    "yarn scaling": ("qwen3", dict(rope_parameters=YARN)),
    "yarn scaling, its settings given": (
        "llama",
        dict(rope_parameters=YARN | dict(beta_fast=8.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=1.3, truncate=False)),
    ),
    "yarn scaling, its factor given": ("qwen2", dict(rope_parameters=YARN | dict(attention_factor=1.5))),
}


@pytest.fixture
def ids():
    return torch.randint(0, len(VOCABULARY), (3, 100), generator=torch.Generator().manual_seed(2))


def forward(model, ids, cache=None, start=0):
    return model.forward(ids, torch.arange(start, start + ids.shape[1]), cache, all_logits=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant, tmp_path, ids):
    family, changes = VARIANTS[variant]
    original = tiny_hf(family, **changes)
    original.save_pretrained(tmp_path)
    model, tokenizer = load(tmp_path, progress=None)
    assert tokenizer is None
    with torch.inference_mode():
        expected = original(ids).logits
    assert expected.abs().max() > 0.5, "logits near zero would agree whatever the model did"
    assert (forward(model, ids) - expected).abs().max() < 1e-4
    assert torch.equal(model.forward(ids, torch.arange(100)), forward(model, ids)[:, -1])


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_steps_of_any_size_give_the_logits_of_one_pass(family, tmp_path, ids):
    """A prompt in chunks, then single tokens, over a cache full of NaN where nothing was written yet."""
    tiny_hf(family).save_pretrained(tmp_path)
    model, _ = load(tmp_path, progress=None)
    whole, cache, start = forward(model, ids), model.new_cache(3, 100), 0
    cache.data.fill_(float("nan"))
    for n in (1, 16, 1, 1, 40, 2, 38, 1):
        got = forward(model, ids[:, start : start + n], cache, start)
        assert (got - whole[:, start : start + n]).abs().max() < 1e-4
        start += n
    assert cache.length == start == 100
    with pytest.raises(LabError, match="holds 100 of 100 tokens and cannot take 1 more"):
        forward(model, ids[:, :1], cache, 99)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_lose_no_more_than_transformers_does(dtype, tmp_path, ids):
    original = tiny_hf("llama")
    original.save_pretrained(tmp_path)
    model, _ = load(tmp_path, dtype=dtype, progress=None)
    with torch.inference_mode():
        exact = original.double()(ids).logits
        theirs = original.to(getattr(torch, dtype))(ids).logits.float()
    got = forward(model, ids)
    assert got.dtype == torch.float32 and model.new_cache(1, 8).data.dtype == getattr(torch, dtype)
    assert (got - exact).abs().mean() < 1.2 * (theirs - exact).abs().mean()


@pytest.fixture
def folder(tmp_path):
    tiny_hf("llama").save_pretrained(tmp_path)
    return tmp_path


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(Q), f"lacks the tensor {Q}, which"),
        (lambda t: [t.pop(Q), t.pop("model.norm.weight")], f"lacks the tensor {Q} and 1 more, which"),
        (
            lambda t: t.update({"model.layers.2.x.weight": torch.ones(1)}),
            "tensor model.layers.2.x.weight, which",
        ),
        (lambda t: t.update({Q: torch.ones(192, 47)}), rf"{Q} has shape \(192, 47\), and .* asks for \(192, 48\)"),
        (lambda t: t.update({Q: t[Q].to(torch.int8)}), f"{Q} is of dtype I8, and plain weights are F16, BF16, F32"),
        (lambda t: t.update({Q: t[Q].to(torch.float8_e4m3fn)}), f"{Q} is of dtype F8_E4M3, and plain weights are"),
        (lambda t: t.update({Q: t[Q].to(torch.complex64)}), f"{Q} is of dtype C64, and plain weights are"),
    ],
)
def test_a_wrong_tensor_is_named(folder, change, says):
    edit_weights(folder, change)
    with pytest.raises(LabError, match=says):
        load(folder, progress=None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_plain_weights_of_four_dtypes_are_read(folder, dtype):
    edit_weights(folder, lambda t: t.update({Q: torch.full_like(t[Q], 0.25, dtype=getattr(torch, dtype))}))
    assert (load(folder, progress=None)[0].weights.layers[1].qkv[:192] == 0.25).all()


def test_a_tensor_in_two_files_is_named(folder):
    tensors = load_file(folder / "model.safetensors")
    save_file({Q: torch.zeros_like(tensors[Q])}, folder / "old.safetensors")
    where = dict.fromkeys(tensors, "model.safetensors") | {"lm_head.weight": "old.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for read in (lambda: load(folder, progress=None), *(lambda how=how: load_tensors(folder, how) for how in WAYS)):
        with pytest.raises(LabError, match=f"both model.safetensors and old.safetensors hold the tensor {Q}"):
            read()


def test_an_index_that_is_a_folder_is_named(folder):
    (folder / "model.safetensors.index.json").mkdir()
    with pytest.raises(LabError, match=r"cannot be read \(.*Is a directory: .*model.safetensors.index.json"):
        load(folder, progress=None)


def test_spare_tensors_that_do_no_harm_are_passed_over(folder, ids):
    before = forward(load(folder, progress=None)[0], ids)
    spare = {"lm_head.weight": torch.ones(len(VOCABULARY), 48)}
    spare["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    edit_weights(folder, lambda t: t.update(spare))
    model, _ = load(folder, progress=None)
    assert torch.equal(forward(model, ids), before) and model.weights.lm_head is model.weights.embedding


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -1])
def test_a_file_cut_short_is_named(folder, keep):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(LabError, match="model.safetensors is no readable safetensors file"):
        load(folder, progress=None)


def test_missing_and_broken_files_are_named(folder):
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(LabError, match="tokenizer.json is no readable tokenizer"):
        load(folder, progress=None)
    (folder / "tokenizer.json").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-7.safetensors"}}')
    with pytest.raises(LabError, match="has no model-7.safetensors, where its weights should be"):
        load(folder, progress=None)
    index.write_text("[]")
    with pytest.raises(LabError, match="is no safetensors index"):
        load(folder, progress=None)
    index.unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(LabError, match="has no model.safetensors"):
        load(folder, progress=None)
    (folder / "config.json").write_text('{"model_type": "lla')
    with pytest.raises(LabError, match="config.json cannot be read as JSON .*; it may be incomplete"):
        load(folder, progress=None)
    (folder / "config.json").unlink()
    with pytest.raises(LabError, match="has no config.json, so it is no Hugging Face model folder"):
        load(folder, progress=None)


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("config.json", b"[]", "config.json must hold an object, got list"),
        ("config.json", b"\xff\xfe", "config.json cannot be read as JSON"),
        ("config.json", b'{"model_type": "llama", "hidden_size": "48", "num_attention_heads": 6}', "of the wrong kind"),
        ("generation_config.json", b"[1]", "of the wrong kind"),
        ("generation_config.json", b'{"eos_token_id": "end"}', "of the wrong kind"),
        ("generation_config.json", b"{", "generation_config.json cannot be read as JSON"),
        ("tokenizer_config.json", b"{", "tokenizer_config.json is no readable tokenizer configuration"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json is no readable tokenizer configuration"),
        ("tokenizer_config.json", b'{"eos_token": {}}', "tokenizer_config.json is no readable tokenizer configuration"),
        ("tokenizer_config.json", b'{"chat_template": [1]}', "tokenizer_config.json is no readable"),
        ("chat_template.jinja", b"\xff", "chat_template.jinja is no readable text"),
    ],
)
def test_a_side_file_that_is_broken_is_named(folder, name, data, says):
    byte_level_bpe(VOCABULARY, [], "gpt-2").save(str(folder / "tokenizer.json"))
    (folder / name).write_bytes(data)
    with pytest.raises(LabError, match=says) as error:
        load(folder, progress=None)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", [3, None, ["smollm2-135m"], b"smollm2-135m"])
def test_a_source_of_another_kind_is_named(source):
    with pytest.raises(LabError, match="load takes a model's name, a path or a ModelConfig, got "):
        load(source)


def test_a_config_that_is_no_file_is_refused(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(LabError, match="config.json cannot be read .*Is a directory.*; see that you may read it"):
        load(tmp_path)


def test_generation_config_decides_the_end_tokens(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert load(folder, progress=None)[0].config.eos_token_ids == (3, 4)


def test_a_config_gets_random_weights_that_depend_on_the_seed_only(ids):
    config = ModelConfig.from_hf(tiny_hf("qwen3").config.to_dict())
    first, tokenizer = load(config, seed=5)
    assert tokenizer is None and torch.equal(forward(first, ids), forward(load(config, seed=5)[0], ids))
    assert not torch.equal(forward(first, ids), forward(load(config, seed=6)[0], ids))
    w = first.weights
    assert w.lm_head is w.embedding and w.layers[0].qkv.std() == pytest.approx(0.02, rel=0.05)


def test_bad_arguments_are_named(folder):
    with pytest.raises(LabError, match="dtype 'int8' is not supported; choose one of float32, float16, bfloat16"):
        load(folder, dtype="int8")
    with pytest.raises(LabError, match="'gpu' is no device"):
        load(folder, device="gpu")
    with pytest.raises(LabError, match="device 'meta' is not supported"):
        load(folder, device="meta")
    if not torch.cuda.is_available():
        with pytest.raises(LabError, match="torch finds no CUDA GPU; use device='cpu'"):
            load(folder, device="cuda")
    model, _ = load(folder, progress=None)
    two = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(LabError, match=r"positions must be \[3\] for ids \[2, 3\], got \[4\]"):
        model.forward(two, torch.arange(4))
    with pytest.raises(LabError, match="the cache is for 1 sequences and ids has 2 rows"):
        model.forward(two, torch.arange(3), model.new_cache(1, 8))
    with pytest.raises(LabError, match="a cache of 129 tokens does not fit a model of 1 to 128 positions"):
        model.new_cache(1, 129)
    with pytest.raises(LabError, match="batch=0"):
        model.new_cache(0, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_cuda_gives_the_logits_of_the_cpu(family, tmp_path, ids):
    tiny_hf(family).save_pretrained(tmp_path)
    expected = forward(load(tmp_path, progress=None)[0], ids)
    model, _ = load(tmp_path, device="cuda", progress=None)
    cache, ids = model.new_cache(3, 100), ids.cuda()
    got = [
        model.forward(ids[:, a:b], torch.arange(a, b, device="cuda"), cache, all_logits=True)
        for a, b in ((0, 60), (60, 99), (99, 100))
    ]
    assert (torch.cat(got, 1).cpu() - expected).abs().max() < 2e-3
