"""RTN, AWQ and GPTQ over whole models: invariance, the rules of folding, what each is better at, refusals."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from labkit.engine import ModelConfig, load
from labkit.errors import LabError
from labkit.quant.awq import CUTS, RATIOS, awq, best_clip, fold, search
from labkit.quant.blocks import PRODUCTS, Layer, copy_of, embed
from labkit.quant.formats import Format, fake, quantise
from labkit.quant.gptq import gptq, round_columns
from labkit.quant.rtn import rtn

SHAPE = dict(
    vocab_size=90, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=4, head_dim=16, max_positions=128
)
FAMILIES = {
    "grouped heads": dict(architecture="llama", num_kv_heads=2),
    "as many kv heads": dict(architecture="llama", num_kv_heads=4),
    "biases of qkv": dict(architecture="qwen2", num_kv_heads=4, qkv_bias=True),
    "norms of q and k": dict(architecture="qwen3", num_kv_heads=2, qk_norm=True),
}
FMT = Format(4, 32)


def model_of(family: str):
    model, _ = load(ModelConfig(**SHAPE, **FAMILIES[family]), seed=3)
    generator = torch.Generator().manual_seed(7)
    for layer in model.weights.layers:  # a few loud channels, as trained models have them
        for norm in (layer.attn_norm, layer.mlp_norm):
            norm[torch.randperm(64, generator=generator)[:3]] *= 12
        if layer.qkv_bias is not None:
            layer.qkv_bias.copy_(torch.randn(layer.qkv_bias.shape, generator=generator))
    return model


def tokens_of(blocks=4, n=32):
    return torch.randint(0, 90, (blocks, n), generator=torch.Generator().manual_seed(5))


def logits(model, tokens):
    return model.forward(tokens, torch.arange(tokens.shape[1]), all_logits=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_rounding_the_scaled_model_is_the_model(family):
    """Where nothing is rounded any scale is as good, so larger ones than a search would find are folded by hand."""
    model, tokens = model_of(family), tokens_of()
    scaled = copy_of(model)
    for index, layer in enumerate(scaled.weights.layers):
        for name in PRODUCTS:
            fold(Layer(scaled, index, 32), name, torch.linspace(0.2, 5, getattr(layer, name).shape[1]))
        assert not torch.equal(layer.gate_up, model.weights.layers[index].gate_up)
    want = logits(model, tokens)
    assert (logits(scaled, tokens) - want).abs().max() <= 1e-5 * want.abs().max()
    report = awq(scaled, FMT, tokens, clip=False, progress=False, rounding=lambda w, fmt: w)
    assert (logits(scaled, tokens) - want).abs().max() <= 1e-5 * want.abs().max() and not report.quantised


@pytest.mark.parametrize(("family", "folds"), [("grouped heads", False), ("as many kv heads", True)])
def test_attn_out_has_a_scale_only_where_each_row_of_v_feeds_one_column(family, folds):
    model = model_of(family)
    layer = Layer(model, 0, 32)
    inputs, _ = layer.run(embed(model, tokens_of()))
    found = search(layer, "attn_out", inputs.attn_out, FMT)
    assert (found["ratio"] is not None) == folds and len(found["losses"]) == (len(RATIOS) if folds else 0)
    before = layer.weights.attn_out.clone()
    fold(layer, "attn_out", torch.full((64,), 2.0))
    assert torch.equal(before, layer.weights.attn_out) != folds


@pytest.mark.parametrize("name", ["qkv", "gate_up", "down"])
def test_the_search_takes_the_smallest_loss_of_the_block_and_changes_nothing(name):
    model = model_of("grouped heads")
    layer = Layer(model, 0, 32)
    inputs, _ = layer.run(embed(model, tokens_of()))
    x, weight = getattr(inputs, name), getattr(layer.weights, name)
    before = weight.clone()
    found = search(layer, name, x, Format(3, 32))
    assert torch.equal(weight, before) and len(found["losses"]) == 20
    assert found["ratio"] == RATIOS[min(range(20), key=found["losses"].__getitem__)]
    block = {"qkv": layer.attention, "gate_up": layer.mlp}.get(name, lambda y: F.linear(y, weight))
    want = block(x)
    for at in (0, 7, 19):
        scale = x.abs().mean(0).pow(RATIOS[at]).clamp(min=1e-4)
        scale /= (scale.max() * scale.min()).sqrt()
        weight.copy_(fake(before * scale, Format(3, 32)) / scale)
        assert found["losses"][at] == pytest.approx(float((block(x) - want).square().mean()), rel=1e-4)
        weight.copy_(before)


def test_a_cut_is_the_best_of_ten_for_each_group_by_the_tokens_themselves():
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(6, 64, generator=generator), torch.randn(50, 64, generator=generator)
    w[:, ::16] *= 6
    got = best_clip(w, x, Format(3, 32))
    for row in range(6):
        for group in (slice(0, 32), slice(32, 64)):
            part, losses = w[row : row + 1, group], []
            for cut in CUTS:
                clipped = part.clamp(-cut * part.abs().max(), cut * part.abs().max())
                losses.append((float(((fake(clipped, Format(3, 32)) - part) @ x[:, group].t()).square().mean()), cut))
            cut = min(losses)[1]
            torch.testing.assert_close(
                got[row : row + 1, group], part.clamp(-cut * part.abs().max(), cut * part.abs().max())
            )
    assert not torch.equal(got, w)


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_become_what_the_codes_stand_for_and_the_rest_stays(method, family):
    model, tokens = model_of(family), tokens_of()
    changed = copy_of(model)
    report = (
        rtn(changed, FMT)
        if method == "rtn"
        else {"awq": awq, "gptq": gptq}[method](changed, FMT, tokens, progress=False)
    )
    assert len(report.quantised) == 2 and report.format == FMT
    for layer, products in zip(changed.weights.layers, report.quantised, strict=True):
        for name in PRODUCTS:
            assert torch.equal(getattr(layer, name), products[name].dequantise())
    assert torch.equal(changed.weights.embedding, model.weights.embedding)
    off = (logits(changed, tokens) - logits(model, tokens)).norm() / logits(model, tokens).norm()
    assert 0 < off < 0.3


def test_awq_and_gptq_are_better_than_rounding_on_tokens_they_have_not_seen():
    model, seen, other = model_of("grouped heads"), tokens_of(16), tokens_of(40)[20:]
    want, off = logits(model, other), {}
    for method in (rtn, awq, gptq):
        changed = copy_of(model)
        method(
            changed,
            Format(3, 32),
            *([seen] if method is not rtn else []),
            **({} if method is rtn else {"progress": False}),
        )
        off[method] = float((logits(changed, other) - want).norm() / want.norm())
    assert off[awq] < 0.9 * off[rtn] and off[gptq] < 0.9 * off[rtn], off


def test_gptq_with_uncorrelated_inputs_is_rounding():
    """H is then diagonal: no column can make up for another."""
    w = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    q = round_columns(w, torch.eye(32) * 3, Format(4, 32))
    assert torch.equal(q.codes, quantise(w, Format(4, 32)).codes)


def test_gptq_uses_what_correlation_offers():
    generator = torch.Generator().manual_seed(0)
    w, base = torch.randn(16, 64, generator=generator), torch.randn(400, 8, generator=generator)
    x = base @ torch.randn(8, 64, generator=generator) + 0.1 * torch.randn(400, 64, generator=generator)
    x[:, 5] = 0  # a channel that never speaks
    fmt = Format(3, 32)
    off = [float(((q.dequantise() - w) @ x.t()).norm()) for q in (round_columns(w, x, fmt), quantise(w, fmt))]
    assert off[0] < 0.5 * off[1]


@pytest.mark.parametrize("method", [awq, gptq])
@pytest.mark.parametrize(
    ("fmt", "tokens", "message"),
    [
        (Format(4, 40), tokens_of(), r"qkv: groups of 40 do not divide a row of 64 weights; .* 16, 32, 64 would"),
        (FMT, tokens_of()[0], r"int64 \[blocks, n\], got torch\.int64 \[32\]"),
        (FMT, tokens_of()[:, :0], r"got torch\.int64 \[4, 0\]"),
        (FMT, tokens_of() + 90, r"the vocabulary has 90: were they made by another tokenizer\?"),
        (FMT, tokens_of(1, 129), r"blocks of 129 tokens are longer than the model's 128"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_changed(method, fmt, tokens, message):
    model = model_of("grouped heads")
    before = copy_of(model)
    with pytest.raises(LabError, match=message):
        method(model, fmt, tokens, progress=False)
    for layer, old in zip(model.weights.layers, before.weights.layers, strict=True):
        assert all(torch.equal(getattr(layer, name), getattr(old, name)) for name in PRODUCTS)


def test_nan_in_a_weight_stops_all_methods():
    for method in (rtn, awq, gptq):
        model = model_of("grouped heads")
        model.weights.layers[1].down[3, 3] = float("nan")
        with pytest.raises(LabError, match="NaN or infinity"):
            method(model, FMT, *([tokens_of()] if method is not rtn else []))
