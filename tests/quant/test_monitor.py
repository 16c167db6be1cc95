"""The monitor: products in both models, scales undone, and that a standard deviation says little."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from labkit.errors import LabError
from labkit.quant.awq import awq, fold
from labkit.quant.blocks import PRODUCTS, Layer, copy_of, embed
from labkit.quant.formats import Format
from labkit.quant.monitor import STREAM, compare_layers
from labkit.quant.rtn import Report, rtn
from tests.quant.test_methods import FAMILIES, FMT, model_of, tokens_of


def by_place(rows):
    return {(row.layer, row.product): row for row in rows}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_beside_itself(family):
    model = model_of(family)
    rows = compare_layers(model, copy_of(model), tokens_of())
    assert [(r.layer, r.product) for r in rows] == [(i, name) for i in (0, 1) for name in (*PRODUCTS, STREAM)]
    assert all(r.error == 0 and r.cosine == pytest.approx(1) and r.std == r.other_std > 0 for r in rows)


def test_rows_are_those_of_all_tokens_at_once():
    model = model_of("biases of qkv")
    other, tokens = copy_of(model), tokens_of()
    rtn(other, FMT)
    rows = by_place(compare_layers(model, other, tokens))
    outputs, states = [], []
    for m in (model, other):
        hidden = embed(m, tokens)
        for i in range(2):
            layer = Layer(m, i, tokens.shape[1])
            inputs, hidden = layer.run(hidden)
        outputs.append(F.linear(inputs.qkv, layer.weights.qkv, layer.weights.qkv_bias).double())
        states.append(hidden.double())
    for product, (a, b) in (("qkv", outputs), (STREAM, states)):
        row = rows[1, product]
        assert row.error == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-5)
        assert row.cosine == pytest.approx(float(F.cosine_similarity(a.flatten(), b.flatten(), 0)), rel=1e-6)
        assert row.std == pytest.approx(float(a.std(correction=0)), rel=1e-5)
        assert row.other_std == pytest.approx(float(b.std(correction=0)), rel=1e-5)
    final = F.rms_norm(states[1].float(), (64,), other.weights.final_norm, other.config.rms_eps)
    want = other.forward(tokens, torch.arange(tokens.shape[1]), all_logits=True).flatten(0, 1)
    torch.testing.assert_close(F.linear(final, other.weights.lm_head), want, rtol=1e-4, atol=1e-4)  # it is the model's


def test_equal_spread_does_not_mean_equal_activations():
    model = model_of("grouped heads")
    other = copy_of(model)
    down = other.weights.layers[1].down
    down.copy_(down[torch.randperm(len(down), generator=torch.Generator().manual_seed(0))])  # the same numbers, moved
    rows = by_place(compare_layers(model, other, tokens_of()))
    moved = rows[1, "down"]
    assert moved.other_std == pytest.approx(moved.std, rel=1e-4)
    assert moved.error > 1 and abs(moved.cosine) < 0.4
    assert all(row.error == 0 for place, row in rows.items() if place[0] == 0)  # and it is found where it is


def test_fewer_bits_more_error_and_errors_build_up():
    model, tokens = model_of("grouped heads"), tokens_of()
    ends = []
    for bits in (8, 4, 2):
        other = copy_of(model)
        rtn(other, Format(bits, 32))
        ends.append(by_place(compare_layers(model, other, tokens))[1, STREAM])
    assert ends[0].error < ends[1].error / 4 < ends[1].error < ends[2].error / 2
    assert ends[0].cosine > ends[1].cosine > ends[2].cosine


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_that_were_folded_are_no_errors(family):
    model, tokens = model_of(family), tokens_of()
    other = copy_of(model)
    report = awq(other, FMT, tokens, clip=False, progress=False)
    exact = copy_of(model)
    for i in range(2):  # the same scales, unrounded weights
        for name in PRODUCTS:
            fold(Layer(exact, i, tokens.shape[1]), name, report.choices[i][name]["scale"])
    assert any(choice["scale"].std() > 0.01 for choice in report.choices[0].values())
    assert all(row.error < 2e-5 for row in compare_layers(model, exact, tokens, report))
    blind = by_place(compare_layers(model, exact, tokens))
    assert blind[0, "gate_up"].error > 0.01 and blind[0, STREAM].error < 2e-5
    assert (blind[0, "qkv"].error > 0.01) == (model.config.kv_size == model.config.q_size)


def test_the_models_stay_as_they_are():
    model = model_of("grouped heads")
    before = copy_of(model)
    compare_layers(model, model, tokens_of())
    for a, b in zip(before.weights.layers, model.weights.layers, strict=True):
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in (*PRODUCTS, "attn_norm", "mlp_norm"))


def test_a_row_prints_in_one_line_and_nothing_is_divided_by_zero():
    model = model_of("grouped heads")
    other = copy_of(model)
    model.weights.layers[0].down.zero_()
    row = by_place(compare_layers(model, other, tokens_of()))[0, "down"]
    assert row.error == float("inf") and row.cosine == 0 and row.std == 0 < row.other_std
    other.weights.layers[0].down.zero_()
    row = by_place(compare_layers(model, other, tokens_of()))[0, "down"]
    assert row.error == 0 and str(row).startswith("  0 down ") and "\n" not in str(row)


def test_refusals():
    model, tokens = model_of("grouped heads"), tokens_of()
    with pytest.raises(LabError, match="the models differ in kv_size, 32 and 64: compare a model with its quantised"):
        compare_layers(model, model_of("as many kv heads"), tokens)
    with pytest.raises(LabError, match=r"int64 \[blocks, n\], got torch.int64 \[8\]"):
        compare_layers(model, model, tokens.flatten()[:8])
    with pytest.raises(LabError, match="the report is of 1 layers and the model has 2"):
        compare_layers(model, model, tokens, Report(FMT, choices=[{"qkv": {}}]))
