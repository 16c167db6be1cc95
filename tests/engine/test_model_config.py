"""Shapes: what they count, what they accept from a config.json, and what they refuse."""

import pytest

from labkit.engine import MODELS, ModelConfig
from labkit.engine.weights import tensor_shapes
from labkit.errors import LabError
from tests.engine.tiny_models import TINY, tiny_hf

LLAMA = dict(
    model_type="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=128,
    rms_norm_eps=1e-5,
)


def test_llama_3_8b_reads_15_01_gb_a_step():
    config = MODELS["llama-3-8b"]
    assert round(config.matmul_params * 2 / 1e9, 2) == 15.01
    assert config.num_params == 8_030_261_248  # the count on the model's page
    assert config.kv_bytes_per_token() == 131_072


@pytest.mark.parametrize(
    ("name", "billions"),  # as published
    [("llama-2-7b", 6.74), ("mistral-7b", 7.24), ("qwen1.5-7b", 7.72), ("qwen2-7b", 7.62), ("smollm2-135m", 0.13)],
)
def test_parameter_counts_are_the_published_ones(name, billions):
    assert round(MODELS[name].num_params / 1e9, 2) == billions


@pytest.mark.parametrize("name", MODELS)
def test_counts_agree_with_the_tensors_and_the_round_trip_is_exact(name):
    config = MODELS[name]
    sizes = {n: s[0] * (s[1] if len(s) > 1 else 1) for n, s in tensor_shapes(config).items()}
    assert config.num_params == sum(sizes.values())
    looked_up = 0 if config.tie_embeddings else sizes["model.embed_tokens.weight"]
    matrices = sum(size for n, size in sizes.items() if len(tensor_shapes(config)[n]) == 2)
    assert config.matmul_params == matrices - looked_up
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("family", TINY)
def test_transformers_counts_the_same(family):
    original = tiny_hf(family)
    config = ModelConfig.from_hf(original.config.to_dict())
    assert config.num_params == original.num_parameters()
    assert config.tie_embeddings == original.config.tie_word_embeddings


def test_both_spellings_of_the_rotary_settings_are_read():
    scaling = dict(rope_type="linear", factor=4.0)
    old = ModelConfig.from_hf(LLAMA | dict(rope_theta=5e5, rope_scaling=dict(type="linear", factor=4.0)))
    new = ModelConfig.from_hf(LLAMA | dict(rope_parameters=scaling | dict(rope_theta=5e5)))
    assert old == new and new.rope_scaling == scaling and new.rope_theta == 5e5
    assert ModelConfig.from_hf(LLAMA | dict(rope_parameters=dict(rope_type="default"))).rope_scaling is None


def test_a_sliding_window_caps_the_positions():
    mistral = LLAMA | dict(model_type="mistral", max_position_embeddings=32_768)
    assert ModelConfig.from_hf(mistral | dict(sliding_window=1_000)).max_positions == 1_000
    assert ModelConfig.from_hf(mistral | dict(sliding_window=None)).max_positions == 32_768
    assert ModelConfig.from_hf(mistral).max_positions == 4_096  # transformers' default for Mistral
    qwen = LLAMA | dict(model_type="qwen2", sliding_window=50)
    assert ModelConfig.from_hf(qwen | dict(use_sliding_window=False)).max_positions == 128
    assert ModelConfig.from_hf(qwen | dict(use_sliding_window=True)).max_positions == 50


def test_several_end_tokens_are_kept():
    assert ModelConfig.from_hf(LLAMA | dict(eos_token_id=[7, 9])).eos_token_ids == (7, 9)
    assert ModelConfig.from_hf(LLAMA | dict(eos_token_id=0)).eos_token_ids == (0,)
    assert ModelConfig.from_hf(LLAMA).eos_token_ids == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(num_key_value_heads=3), "8 query heads cannot share 3 KV heads evenly: num_heads must be a multiple"),
        (dict(model_type="gpt2"), "model_type 'gpt2' is not supported; this engine runs llama, mistral, qwen2, qwen3"),
        (dict(model_type=None), "model_type None is not supported"),
        (dict(hidden_size=None), "config.json has no 'hidden_size', which a llama model needs"),
        (dict(hidden_size=65), "hidden_size 65 is no multiple of 8 heads, and config.json has no head_dim"),
        (dict(head_dim=7), "head_dim must be even, because the rotary embedding turns pairs, got 7"),
        (dict(vocab_size=0), "vocab_size must be a whole number of at least 1, got 0"),
        (dict(num_hidden_layers=10**30), f"num_layers must be at most 10000, got {10**30}"),
        (dict(num_hidden_layers=2.0), "num_layers must be a whole number of at least 1, got 2.0"),
        (dict(rms_norm_eps=-1.0), "rms_eps must be a positive number, got -1.0"),
        (dict(attention_bias=True), "attention_bias=true is not supported"),
        (dict(mlp_bias=True), "mlp_bias=true is not supported"),
        (dict(hidden_act="gelu"), "hidden_act 'gelu' is not supported"),
        (dict(quantization_config=dict(quant_method="gptq")), "the checkpoint is quantised .gptq."),
        (dict(partial_rotary_factor=0.5), "partial_rotary_factor other than 1"),
        (dict(rope_scaling=dict(rope_type="dynamic", factor=2.0)), "rope_scaling of type 'dynamic' is not supported"),
        (dict(rope_scaling=dict(rope_type="yarn", factor=2.0)), "needs a positive 'original_max_position_embeddings'"),
        (dict(rope_scaling=dict(rope_type="linear")), "of type 'linear' needs a positive 'factor', got None"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "needs a positive 'low_freq_factor'"),
        (dict(rope_scaling=dict(rope_type="linear", factor=float("nan"))), "needs a positive 'factor', got nan"),
        (dict(rope_scaling="linear"), "rope_scaling in config.json must hold an object or null, got 'linear'"),
        (dict(num_attention_heads=0), "num_attention_heads must be a whole number of at least 1, got 0"),
        (dict(eos_token_id=[5, 100]), "special token id 100 lies outside the vocabulary of 100"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(change, says):
    with pytest.raises(LabError, match=says):
        ModelConfig.from_hf(LLAMA | change)
