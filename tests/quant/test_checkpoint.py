"""The AWQ checkpoint: what is written comes back, by the official rule too; other layouts and damage are named."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from labkit.errors import LabError
from labkit.quant.checkpoint import WEIGHTS, read_awq, write_awq
from labkit.quant.formats import Format, quantise

FMT = Format(4, 32)
NAME = "model.layers.0.mlp.down_proj"


def made(seed=0, out=24, inner=64):
    return quantise(torch.randn(out, inner, generator=torch.Generator().manual_seed(seed)), FMT)


@pytest.fixture
def folder(tmp_path):
    others = {"model.norm.weight": torch.ones(64), "lm_head.weight": torch.randn(40, 64)}
    return write_awq(tmp_path / "m", {"model_type": "llama"}, {NAME: made(), "a.b": made(1)}, others)


def test_what_is_written_comes_back(folder):
    config, products, others = read_awq(folder)
    assert config["model_type"] == "llama" and config["quantization_config"]["group_size"] == 32
    assert products.keys() == {NAME, "a.b"} and others.keys() == {"model.norm.weight", "lm_head.weight"}
    for name, q in ((NAME, made()), ("a.b", made(1))):
        got = products[name]
        assert torch.equal(got.codes, q.codes) and torch.equal(got.zeros, q.zeros) and got.format == FMT
        assert torch.equal(got.scales, q.scales) and torch.equal(got.dequantise(), q.dequantise())
    assert others["lm_head.weight"].dtype == torch.float16


def test_every_weight_by_the_rule_of_the_layout(folder):
    """Word by word, as a loader that knows nothing of this code does it."""
    with safe_open(folder / WEIGHTS, "pt") as file:
        words, zeros, scales = (file.get_tensor(f"{NAME}.{part}") for part in ("qweight", "qzeros", "scales"))
    want = made().dequantise()
    shift = [4 * i for i in (0, 4, 1, 5, 2, 6, 3, 7)]  # of logical columns 0 to 7 in a word
    for k in range(0, 64, 7):
        for n in range(24):
            code = (int(words[k, n // 8]) >> shift[n % 8]) & 15
            zero = (int(zeros[k // 32, n // 8]) >> shift[n % 8]) & 15
            assert (code - zero) * float(scales[k // 32, n]) == pytest.approx(float(want[n, k]), rel=1e-6)


def changed(folder, edit):
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))


def about(**new):
    return lambda config: config["quantization_config"].update(new)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("quantization_config"), "is not quantised"),
        (about(quant_method="gptq"), "is a GPTQ checkpoint: it packs along the inputs"),
        (about(quant_method="bitsandbytes"), "quantised by bitsandbytes"),
        (about(version="gemv"), "AWQ's version 'gemv'"),
        (about(bits=3), "says 3 bits"),
        (about(zero_point=False), "zero_point False"),
        (about(group_size=64), r"groups of 64 needs qzeros \[1, 3\] and scales \[1, 24\], got \[2, 3\] and \[2, 24\]"),
        (about(group_size=48), "groups of 48 do not divide a row of 64"),
    ],
)  # fmt: skip
def test_another_layout_is_named(folder, edit, message):
    changed(folder, edit)
    with pytest.raises(LabError, match=message):
        read_awq(folder)


def test_the_older_config_is_read(folder):
    changed(folder, lambda c: c.pop("quantization_config"))
    old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(old))
    assert read_awq(folder)[1][NAME].format == FMT


def test_a_missing_part_and_a_broken_file_are_named(folder):
    tensors = load_file(folder / WEIGHTS)
    del tensors[f"{NAME}.qzeros"]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(LabError, match=f"{NAME} lacks its qzeros"):
        read_awq(folder)
    (folder / WEIGHTS).write_bytes(b"12345678")
    with pytest.raises(LabError, match=r"model\.safetensors cannot be read"):
        read_awq(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(LabError, match=r"no \.safetensors file"):
        read_awq(folder)


def test_nothing_is_left_of_a_write_that_stops(tmp_path, monkeypatch):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("labkit.quant.checkpoint.json.dumps", stop)  # the weights are written by then
    with pytest.raises(KeyboardInterrupt):
        write_awq(tmp_path / "m", {}, {NAME: made()}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("products", "others", "message"),
    [
        ({}, {}, "share one format, got none"),
        ({"a": quantise(torch.ones(8, 32), Format(3, 32))}, {}, "holds 4 bits with zero points; this is 3 bits"),
        ({"a": quantise(torch.ones(8, 32), Format(4, 32, True))}, {}, "this is 4 bits, symmetric"),
        ({"a": made(out=12)}, {}, "a has 12 outputs; the layout packs them by 8"),
        ({"a": made()}, {"n": torch.tensor([1e6])}, r"n holds values that fp16 cannot \(up to 1e\+06\)"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(tmp_path, products, others, message):
    with pytest.raises(LabError, match=message):
        write_awq(tmp_path / "m", {}, products, others)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_there_is_not_written_over(folder):
    with pytest.raises(LabError, match="is there already"):
        write_awq(folder, {}, {NAME: made()}, {})
    read_awq(folder)
