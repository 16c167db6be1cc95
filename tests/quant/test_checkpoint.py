"""The AWQ checkpoint: what is written comes back, by the official rule too; other layouts and damage are named."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from labkit.errors import LabError
from labkit.paths import scratch
from labkit.quant.checkpoint import INDEX, LONGEST, WEIGHTS, AwqFiles, new_folder, read_awq, write_awq
from labkit.quant.formats import Format, quantise

ROOT = Path(__file__).parents[2]
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
        (about(version="marlin"), "AWQ's version 'marlin'"),
        (about(bits=3), "says 3 bits"),
        (about(bits="4"), "says '4' bits"),
        (about(bits=None), "says None bits"),
        (about(group_size=None), "m: a group is a number of weights from 1 up, .* got None"),
        (about(group_size="32"), "m: a group is a number of weights from 1 up, .* got '32'"),
        (lambda c: c.update(quantization_config=["awq"]), r"what describes the quantisation is no JSON object: \['awq"),
        (about(zero_point=False), "zero_point False"),
        (about(group_size=64), r"groups of 64 needs qzeros \[1, 3\] and scales \[1, 24\], got \[2, 3\] and \[2, 24\]"),
        (about(group_size=48), f"{NAME}|a.b: groups of 48 do not divide a row of 64"),
    ],
)  # fmt: skip
def test_another_layout_is_named(folder, edit, message):
    changed(folder, edit)
    with pytest.raises(LabError, match=message):
        read_awq(folder)


@pytest.mark.parametrize(
    "without", [lambda c: c.pop("quantization_config"), lambda c: c.update(quantization_config=None)]
)
def test_the_older_config_is_read(folder, without):
    changed(folder, without)
    old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(old))
    assert read_awq(folder)[1][NAME].format == FMT
    (folder / "quant_config.json").write_text(json.dumps({**old, "version": "GEMV"}))
    with pytest.raises(LabError, match="AWQ's version 'gemv'"):
        read_awq(folder)
    for text, says in (("[4]", r"quant_config\.json holds no JSON object, but \[4\]"), ("{", "no readable quant_conf")):
        (folder / "quant_config.json").write_text(text)
        with pytest.raises(LabError, match=says):
            read_awq(folder)


def test_an_older_gptq_checkpoint_is_told_by_its_file(folder):
    changed(folder, lambda c: c.pop("quantization_config"))
    (folder / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32, "desc_act": False}))
    with pytest.raises(LabError, match="is a GPTQ checkpoint: it packs along the inputs"):
        read_awq(folder)


@pytest.mark.parametrize("text", ["[1]", '"awq"', "{", "[" * 100_000])
def test_a_config_that_is_none_is_named(folder, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(LabError, match=r"config\.json"):
        read_awq(folder)


def put(folder, **parts):
    """Parts of NAME written anew."""
    save_file(load_file(folder / WEIGHTS) | {f"{NAME}.{part}": t for part, t in parts.items()}, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda q: dict(qweight=q.long()), "qweight and qzeros are int32 and scales fp16, got I64, I32, F16"),
        (lambda q: dict(scales=torch.ones(2, 24, dtype=torch.int32)), "got I32, I32, I32"),
        (lambda q: dict(qweight=q.flatten()), r"qweight is a matrix \[inputs, outputs / 8\], got shape \[192\]"),
        (lambda q: dict(qweight=q[None]), r"got shape \[1, 64, 3\]"),
        (lambda q: dict(qweight=q[:, :2].contiguous()), r"needs qzeros \[2, 2\] and scales \[2, 16\]"),
        (lambda q: dict(qweight=q[:0]), r"qweight is a matrix .*, got shape \[0, 3\]"),
        (lambda q: dict(g_idx=torch.zeros(64, dtype=torch.int32)), "g_idx, which GPTQ's checkpoints have and AWQ's do"),
    ],
)
def test_parts_of_another_kind_are_named_before_any_is_read(folder, edit, message):
    put(folder, **edit(load_file(folder / WEIGHTS)[f"{NAME}.qweight"]))
    with pytest.raises(LabError, match=message):
        AwqFiles(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_number_is_named(folder, value):
    scales = load_file(folder / WEIGHTS)[f"{NAME}.scales"]
    scales[1, 3] = value
    put(folder, scales=scales)
    with pytest.raises(LabError, match=f"{NAME} has scales that are NaN or infinite"):
        read_awq(folder)


def test_a_checkpoint_in_several_files_is_read_by_its_index(folder):
    """The parts of one product lie in both files, and a stray file with a tensor of the same name is left alone."""
    want, tensors = read_awq(folder), load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    names = sorted(tensors)
    shards = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, folder / file)
    without = read_awq(folder)
    save_file({"lm_head.weight": torch.zeros(40, 64)}, folder / "zzz.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {n: file for file, held in shards.items() for n in held}}))
    for _, products, others in (without, read_awq(folder)):
        assert products.keys() == want[1].keys() and torch.equal(others["lm_head.weight"], want[2]["lm_head.weight"])
        assert all(torch.equal(products[n].dequantise(), want[1][n].dequantise()) for n in products)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(LabError, match=r"has no model-2\.safetensors, which its index lists"):
        read_awq(folder)
    for listed in ({}, {"a": ["b"]}):
        (folder / INDEX).write_text(json.dumps({"weight_map": listed}))
        with pytest.raises(LabError, match="its weight_map names no files"):
            read_awq(folder)
    (folder / INDEX).unlink()
    (folder / INDEX).mkdir()
    with pytest.raises(LabError, match=r"m has no readable model\.safetensors\.index\.json .*Is a directory"):
        read_awq(folder)


def test_a_tensor_in_two_files_is_named(folder):
    save_file({"lm_head.weight": torch.zeros(40, 64)}, folder / "old.safetensors")
    with pytest.raises(LabError, match=r"both model\.safetensors and old\.safetensors hold the tensor lm_head\.weight"):
        read_awq(folder)


def test_a_product_without_inputs_is_named_where_a_group_is_a_row(folder):
    changed(folder, about(group_size=-1))
    empty = {part: torch.zeros(0, 3, dtype=torch.int32) for part in ("qweight", "qzeros")}
    put(folder, **empty, scales=torch.ones(0, 24).half())
    save_file({n: t for n, t in load_file(folder / WEIGHTS).items() if not n.startswith("a.b.")}, folder / WEIGHTS)
    with pytest.raises(LabError, match=rf"{NAME}: qweight is a matrix .*, got shape \[0, 3\]"):
        read_awq(folder)


def test_transformers_takes_our_config_for_awq(folder):
    from transformers import AutoConfig, AwqConfig

    changed(folder, lambda c: c.update(hidden_size=64, num_attention_heads=4, intermediate_size=64))
    about = AutoConfig.from_pretrained(folder).quantization_config
    got = AwqConfig.from_dict(about)
    assert (got.quant_method.value, got.bits, got.group_size, got.zero_point) == ("awq", 4, 32, True)


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


def test_files_along_are_there_when_the_folder_is_or_nothing_is(tmp_path):
    good, gone = tmp_path / "tokenizer.json", tmp_path / "gone.json"
    good.write_text("{}")
    with pytest.raises(LabError, match=r"m cannot be written, and nothing is left of it .*gone\.json"):
        write_awq(tmp_path / "m", {}, {NAME: made()}, {}, [good, gone])
    assert list(tmp_path.iterdir()) == [good]
    folder = write_awq(tmp_path / "m", {}, {NAME: made()}, {}, [good])
    assert (folder / "tokenizer.json").read_text() == "{}"
    assert {oct(p.stat().st_mode & 0o777) for p in folder.iterdir()} <= {"0o644", "0o664"}, "others may read it"


@contextmanager
def files_of_at_most(size):
    """As on a disk that is full: the system refuses every byte beyond."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_said_and_nothing_is_left(tmp_path):
    with files_of_at_most(4096), pytest.raises(LabError, match="m cannot be written, and nothing is left of it"):
        write_awq(tmp_path / "m", {}, {NAME: made()}, {"big": torch.zeros(100_000)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("where", ["file/m", "file/deeper/m"])
def test_a_place_that_cannot_be_written_is_named(tmp_path, where):
    (tmp_path / "file").write_text("x")
    with pytest.raises(LabError, match="m cannot be written: .*file is no folder; choose another place"):
        write_awq(tmp_path / where, {}, {NAME: made()}, {})
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_appears_meanwhile_is_left_alone(tmp_path, monkeypatch):
    """By another process: the last step finds it, and what was made here goes."""

    def meanwhile(*args, **kwargs):
        (tmp_path / "m").mkdir()
        (tmp_path / "m" / "theirs").write_text("x")
        return "{}"

    monkeypatch.setattr("labkit.quant.checkpoint.json.dumps", meanwhile)
    with pytest.raises(LabError, match="m cannot be written"):
        write_awq(tmp_path / "m", {}, {NAME: made()}, {})
    assert [p.name for p in tmp_path.rglob("*")] == ["m", "theirs"]


def test_what_a_killed_process_left_goes_and_what_another_is_writing_stays(tmp_path):
    """Names that only look like it stay, too."""
    target, others = tmp_path / "m[1]", {".m[1].part-mine", ".m[1]-abcdefgh", ".m1.part-abcdefgh"}
    for name in others:
        (tmp_path / name).mkdir()
    code = (
        "import os, signal, sys; from pathlib import Path; from labkit.paths import scratch\n"
        "with scratch(Path(sys.argv[1])) as made:\n"
        "    (made / 'half').write_text('x'); os.kill(os.getpid(), signal.SIGTERM)"
    )
    assert subprocess.run([sys.executable, "-c", code, target], cwd=ROOT).returncode == -signal.SIGTERM
    (left,) = {p.name for p in tmp_path.iterdir()} - others
    assert left.startswith(".m[1].part-")
    with scratch(target) as theirs:
        assert not (tmp_path / left).exists()
        write_awq(target, {}, {NAME: made()}, {})
        assert theirs.is_dir()
    assert {p.name for p in tmp_path.iterdir()} == {"m[1]"} | others


def test_the_longest_name_that_is_taken_can_be_written(tmp_path):
    write_awq(tmp_path / ("ä" * (LONGEST // 2)), {}, {NAME: made()}, {})
    with pytest.raises(LabError, match=f"a folder's name of {LONGEST + 1} bytes is too long"):
        new_folder(tmp_path / ("x" * (LONGEST + 1)))


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


def test_a_tilde_is_the_home_folder_as_it_is_for_reading(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert write_awq("~/m", {}, {NAME: made()}, {}) == tmp_path / "m"


def test_a_folder_that_is_there_is_not_written_over(folder):
    with pytest.raises(LabError, match="is there already"):
        write_awq(folder, {}, {NAME: made()}, {})
    read_awq(folder)
