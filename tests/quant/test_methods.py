"""RTN, AWQ and GPTQ over whole models: invariance, the rules of folding, what each is better at, refusals."""

from __future__ import annotations

import sys
import weakref

import pytest
import torch
import torch.nn.functional as F

from labkit.engine import ModelConfig, load
from labkit.errors import LabError
from labkit.quant.awq import CUTS, RATIOS, awq, best_clip, fold, search
from labkit.quant.blocks import PRODUCTS, Layer, copy_of, embed
from labkit.quant.formats import Format, encode, fake, grid, quantise
from labkit.quant.gptq import DAMP, gptq, round_columns
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
def test_without_rounding_the_scaled_model_is_the_model(family, monkeypatch):
    """Where nothing is rounded any scale is as good, and a search takes the first, 1; so others are folded: by hand,
    and by ``awq`` itself in place of what it would find."""
    model, tokens = model_of(family), tokens_of()
    scaled = copy_of(model)
    for index, layer in enumerate(scaled.weights.layers):
        for name in PRODUCTS:
            fold(Layer(scaled, index, 32), name, torch.linspace(0.2, 5, getattr(layer, name).shape[1]))
        assert not torch.equal(layer.gate_up, model.weights.layers[index].gate_up)
    want = logits(model, tokens)
    assert (logits(scaled, tokens) - want).abs().max() <= 1e-5 * want.abs().max()
    generator = torch.Generator().manual_seed(9)

    def drawn(layer, name, x, fmt, rounding):
        return {"scale": torch.randn(x.shape[1], generator=generator).exp(), "ratio": None, "losses": []}

    scaled = copy_of(model)
    monkeypatch.setattr(sys.modules["labkit.quant.awq"], "search", drawn)  # by name it is the function
    report = awq(scaled, FMT, tokens, clip=False, progress=False, rounding=lambda w, fmt: w)
    assert (logits(scaled, tokens) - want).abs().max() <= 1e-5 * want.abs().max() and not report.quantised
    for layer, old, found in zip(scaled.weights.layers, model.weights.layers, report.choices, strict=True):
        assert torch.allclose(layer.mlp_norm, old.mlp_norm / found["gate_up"]["scale"]), "or nothing was folded"


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


def test_gptq_is_the_best_correction_of_the_columns_to_come():
    """Column by column with the inverse of what is left of H, as the method is defined; round_columns takes all of them
    from one Cholesky factor."""
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(6, 32, generator=generator)
    x = torch.randn(40, 5, generator=generator) @ torch.randn(5, 32, generator=generator)
    x += 0.2 * torch.randn(40, 32, generator=generator)
    x[:, 9] = 0
    fmt = Format(3, 16)
    h = x.double().t() @ x.double() / len(x)
    h[9, 9] = 1
    h += DAMP * h.diagonal().mean() * torch.eye(32)
    left = w.double().clone()
    left[:, 9] = 0
    codes = torch.zeros(6, 32)
    for j in range(32):
        if j % 16 == 0:
            scale, zero = grid(left[:, j : j + 16].float(), fmt)
        inverse = torch.linalg.inv(h[j:, j:])
        code = encode(left[:, j : j + 1].float(), scale, zero, fmt)
        codes[:, j] = code[:, 0]
        off = left[:, j] - ((code - zero) * scale)[:, 0]
        left[:, j:] -= off[:, None] * inverse[0] / inverse[0, 0]
    got = round_columns(w, x, fmt)
    assert torch.equal(got.codes.float(), codes) and not torch.equal(got.codes, quantise(w, fmt).codes)


def test_gptq_calibrates_each_product_with_quantised_ones_before_it():
    model, tokens = model_of("grouped heads"), tokens_of()
    done, step = copy_of(model), copy_of(model)
    report = gptq(done, FMT, tokens, progress=False)
    hidden = embed(step, tokens)
    for index, products in enumerate(report.quantised):
        layer = Layer(step, index, 32)
        fresh = layer.run(hidden)[0]  # of this layer nothing is quantised yet
        for name in PRODUCTS:
            x = getattr(layer.run(hidden)[0], name)
            assert torch.equal(round_columns(getattr(layer.weights, name), x, FMT).codes, products[name].codes)
            if name != "qkv":
                unquantised = round_columns(getattr(layer.weights, name), getattr(fresh, name), FMT)
                assert not torch.equal(unquantised.codes, products[name].codes), "or the order could not be told"
            getattr(layer.weights, name).copy_(products[name].dequantise())
        hidden = layer.run(hidden)[1]


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
        (Format(4, 40), tokens_of(), r"qkv: groups of 40 do not divide a row of 64 .* ones 32, 64 would"),
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


@pytest.mark.parametrize("method", [rtn, awq, gptq])
@pytest.mark.parametrize(
    ("spoil", "where"),
    [
        (lambda w: w.layers[1].down[3, 5].fill_(float("nan")), r"layer 1, down: the weight at \[3, 5\] is NaN"),
        (lambda w: w.layers[0].qkv[0, 2].fill_(float("inf")), r"layer 0, qkv: the weight at \[0, 2\] is NaN or inf"),
        (lambda w: w.layers[1].mlp_norm[7].fill_(float("nan")), r"layer 1, mlp_norm: the weight at \[7\]"),
        (lambda w: w.embedding[4, 1].fill_(float("nan")), r"the embedding: the weight at \[4, 1\]"),
        (lambda w: w.final_norm[0].fill_(float("nan")), r"the last norm: the weight at \[0\]"),
        (lambda w: w.lm_head[2, 2].fill_(float("nan")), r"the output head: the weight at \[2, 2\]"),
    ],
)
def test_nan_in_a_weight_is_named_before_anything_is_changed(method, spoil, where):
    model = model_of("grouped heads")
    spoil(model.weights)
    before = copy_of(model)
    with pytest.raises(LabError, match=where):
        method(model, FMT, *([tokens_of()] if method is not rtn else []))
    for layer, old in zip(model.weights.layers, before.weights.layers, strict=True):
        assert all(torch.equal(getattr(layer, n).nan_to_num(), getattr(old, n).nan_to_num()) for n in PRODUCTS)


@pytest.mark.parametrize("method", [awq, gptq])
def test_activations_that_overflow_are_named_and_not_searched_with(method):
    """In fp16 the loss of every scale would be NaN, and the first one would be taken without a word."""
    model, _ = load(ModelConfig(**SHAPE, **FAMILIES["grouped heads"]), "float16", seed=3)
    model.weights.layers[1].mlp_norm.fill_(6e4)
    says = "layer 1: what .* reads is NaN or infinite .* runs in float16" if method is awq else "layer 1, gate_up: GPTQ"
    with pytest.raises(LabError, match=says):
        method(model, FMT, tokens_of(), progress=False)


def test_gptq_refuses_a_scale_beyond_fp16():
    w = torch.randn(4, 32)
    w[1, 3] = 3e6
    with pytest.raises(LabError, match=r"a weight of 3e\+06 needs a scale beyond fp16's 65504 in 4 bits"):
        round_columns(w, torch.randn(50, 32), FMT)


@pytest.mark.parametrize("method", [rtn, awq, gptq])
def test_a_weight_beyond_fp16s_scales_is_named_with_its_layer_and_product(method):
    model = model_of("grouped heads")
    model.weights.layers[1].down[3, 5] = 3e6
    args = () if method is rtn else (tokens_of(),)
    with pytest.raises(LabError, match=r"^layer 1, down: .*needs a scale beyond fp16's 65504"):
        method(model, FMT, *args)


def test_an_interrupted_search_leaves_the_weight_as_it_was():
    model = model_of("grouped heads")
    layer = Layer(model, 0, 32)
    x, before, calls = layer.run(embed(model, tokens_of()))[0].gate_up, layer.weights.gate_up.clone(), []

    def stopped(w, fmt):
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return fake(w, fmt)

    with pytest.raises(KeyboardInterrupt):
        search(layer, "gate_up", x, Format(2, 32), stopped)
    assert torch.equal(layer.weights.gate_up, before)


@pytest.mark.parametrize("method", [awq, gptq])
def test_one_layers_inputs_are_held_at_a_time(method, monkeypatch):
    run, seen, most = Layer.run, [], []

    def watched(layer, hidden):
        most.append(sum(ref() is not None for ref in seen))
        inputs, after = run(layer, hidden)
        seen.extend(weakref.ref(getattr(inputs, name)) for name in PRODUCTS)
        return inputs, after

    monkeypatch.setattr(Layer, "run", watched)
    method(model_of("grouped heads"), FMT, tokens_of(), progress=False)
    assert len(most) >= 2 and max(most) == 0, "what a layer's products read is gone when the next ones are made"


@pytest.mark.parametrize(("method", "name"), [(awq, "AWQ"), (gptq, "GPTQ")])
def test_a_bar_shows_how_many_layers_are_done(method, name, capsys):
    method(model_of("grouped heads"), FMT, tokens_of())
    shown = capsys.readouterr().err
    assert f"{name}:" in shown and "0/2" in shown
    method(model_of("grouped heads"), FMT, tokens_of(), progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("method", [awq, gptq])
def test_the_same_text_gives_the_same_codes(method):
    """Nothing is drawn at random, so there is no seed to give."""
    one, two = (method(model_of("biases of qkv"), FMT, tokens_of(), progress=False) for _ in range(2))
    for a, b in zip(one.quantised, two.quantised, strict=True):
        assert all(torch.equal(a[name].codes, b[name].codes) for name in PRODUCTS)
