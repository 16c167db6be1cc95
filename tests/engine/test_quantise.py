"""``labkit quantise``: from a model's name to a checkpoint in one line; what is refused, and what is left of it."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from labkit import cli
from labkit.engine import load
from labkit.engine import quantise as module
from labkit.engine.quantise import METHODS, quantise_folder
from labkit.errors import LabError
from labkit.quant import Format, awq, calibration_tokens, read_awq
from labkit.quant.blocks import copy_of
from tests.engine.tiny_models import left_over, tiny_hf, write_gguf

TEXTS = ["hello " * 400, "well " * 500, "All of it, in bytes. " * 60]
FMT = Format(4, 8)


@pytest.fixture
def model(tmp_path, own_home):
    """A model with a tokenizer, as a GGUF file that can be converted."""
    return write_gguf(tmp_path / "tiny.gguf", tiny_hf("llama", max_position_embeddings=512))


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def here(folder):
    """What lies beside a checkpoint, hidden files too."""
    return sorted(p.name for p in folder.parent.iterdir() if p.name not in ("home", "tiny.gguf", "texts.jsonl"))


def test_one_line_makes_a_checkpoint_that_loads(model, texts, tmp_path, capsys):
    folder = tmp_path / "awq"
    assert cli.main(["quantise", str(model), str(folder), "--group", "8", "--calibration", str(texts)]) == 0
    said = capsys.readouterr()
    assert f"wrote {folder}: 4 bits, asymmetric, groups of 8, by awq, " in said.out and "2/2" not in said.out
    assert f'run it with LLM("{folder}"), which dequantises it: packed weights' in said.out and "AWQ" in said.err
    want, tokenizer = load(model, progress=None)
    report = awq(want, FMT, calibration_tokens(TEXTS, tokenizer), progress=False)
    _, products, _ = read_awq(folder)
    down = products["model.layers.1.mlp.down_proj"]
    assert torch.equal(down.codes, report.quantised[1]["down"].codes)
    back, words = load(folder, progress=None)
    assert words.encode("hello") == tokenizer.encode("hello") and back.config == want.config
    assert here(folder) == ["awq"]


@pytest.mark.parametrize(("group", "packed"), [(-1, True), (24, False)])
def test_the_closing_line_runs_what_was_written(group, packed, model, tmp_path, capsys):
    """Kernels read groups of a multiple of 32, or a whole row."""
    folder = tmp_path / "awq"
    assert cli.main(["quantise", str(model), str(folder), "--group", str(group), "--method", "rtn"]) == 0
    said = capsys.readouterr().out
    assert (f'LLM("{folder}", quantization="awq"), on a GPU' in said) == packed
    assert ("need groups of a multiple of 32 or a whole row, and these are of 24" in said) != packed


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_written_and_they_differ(method, model, texts, tmp_path):
    folder = quantise_folder(model, tmp_path / "m", FMT, method, None if method == "rtn" else texts, progress=None)
    plain, _ = load(model, progress=None)
    rounded = copy_of(plain)
    METHODS["rtn"](rounded, FMT)
    back, _ = load(folder, progress=None)
    same = torch.equal(back.weights.layers[0].down, rounded.weights.layers[0].down)
    assert same == (method == "rtn") and back.weights.layers[0].down.shape == plain.weights.layers[0].down.shape


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(method="magic"), "there is no method 'magic'; there are awq, gptq, rtn"),
        (dict(method="rtn", calibration=["a"]), "rtn rounds to the nearest and reads no text"),
        (dict(fmt=Format(3, 8)), "holds 4 bits with zero points; this is 3 bits.*quantised_model runs without"),
        (dict(fmt=Format(4, 128)), "qkv: groups of 128 do not divide a row of 48 weights; use -1, the whole row"),
        (dict(calibration=["short"]), "the text has 5 tokens in 1 texts, and one block needs 512"),
        (dict(calibration=[]), "the text has 0 tokens in 0 texts"),
        (dict(calibration="no/such.jsonl"), r"no/such\.jsonl cannot be read"),
        (dict(source="gpt-9"), "'gpt-9' is no built-in model"),
        (dict(source="~nosuchuser/x"), "'~nosuchuser/x' is no built-in model"),
        (dict(source="x" * 300), "x' is no built-in model"),
        (dict(calibration="~nosuchuser/x.jsonl"), r"~nosuchuser/x\.jsonl cannot be read \(No such file"),
        (dict(calibration="x" * 300), r"x cannot be read \(File name too long\)"),
        (dict(folder="~nosuchuser/x"), "~nosuchuser/x cannot be written: there is no such user's home"),
    ],
)
def test_refusals_leave_nothing(changes, says, model, tmp_path):
    folder = tmp_path / "awq"
    with pytest.raises(LabError, match=says):
        quantise_folder(
            **{"source": model, "folder": folder, "fmt": FMT, "calibration": TEXTS, "progress": None} | changes
        )
    assert here(folder) == []


def test_what_can_be_refused_at_once_is(model, texts, tmp_path, own_home):
    """Before a conversion, and before minutes of search."""
    (tmp_path / "there").mkdir()
    for folder, fmt in (("there", FMT), ("new", Format(8, 8))):
        with pytest.raises(LabError, match="is there already: choose another|this is 8 bits"):
            quantise_folder(model, tmp_path / folder, fmt, "awq", texts, progress=None)
    assert left_over(own_home) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (dict(folder="x" * 241), r"a folder's name of 241 bytes is too long \(x{40}…\): take at most 240"),
        (dict(folder="ä" * 121 + "/m"), r"a folder's name of 242 bytes is too long"),
        (dict(folder="x" * 300), "a folder's name of 300 bytes is too long"),
        (dict(folder="texts.jsonl/new/m"), r"m cannot be written: .*texts\.jsonl is no folder; choose another place"),
        (dict(folder="dangling/m"), r"m cannot be written: .*dangling is no folder"),
        (dict(calibration="no/such.jsonl"), r"no/such\.jsonl cannot be read"),
    ],
)
def test_paths_are_looked_at_before_the_model(changes, says, model, texts, tmp_path, own_home):
    (tmp_path / "dangling").symlink_to("nowhere")
    given = {"folder": "m", "calibration": texts} | changes
    with pytest.raises(LabError, match=says):
        quantise_folder(model, tmp_path / given["folder"], FMT, "awq", given["calibration"], progress=None)
    assert left_over(own_home) == []


def test_a_place_that_may_not_be_written_is_named_before_the_model(model, tmp_path, own_home, monkeypatch):
    asked = []  # the tests may run as root, whom no permission bit stops
    monkeypatch.setattr("labkit.quant.checkpoint.os.access", lambda path, mode: asked.append(path))
    with pytest.raises(LabError, match="m cannot be written: you may not write in .*; choose another place"):
        quantise_folder(model, tmp_path / "new" / "m", FMT, "rtn", progress=None)
    assert asked == [tmp_path] and left_over(own_home) == []


def test_calibration_text_may_come_through_a_pipe(model, texts, tmp_path, monkeypatch):
    """What can be read once only is."""
    reads = []
    monkeypatch.setattr(module, "read_jsonl", lambda path: reads.append(path) or [{"text": text} for text in TEXTS])
    quantise_folder(model, tmp_path / "m", FMT, "gptq", texts, progress=None)
    assert reads == [texts]


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_model_of_few_positions_is_calibrated_with_what_it_has(method, tmp_path, own_home):
    model = write_gguf(tmp_path / "tiny.gguf", tiny_hf("llama", max_position_embeddings=64))
    folder = quantise_folder(model, tmp_path / "m", FMT, method, ["hello " * 40], progress=None)
    assert load(folder, progress=None)[0].config.max_positions == 64
    with pytest.raises(LabError, match=r"one block needs 64: give more text$"):
        quantise_folder(model, tmp_path / "n", FMT, method, ["hello"], progress=None)


def test_a_folder_that_is_no_model_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(LabError, match=r"empty has no config\.json, so it is no Hugging Face model folder"):
        quantise_folder(tmp_path / "empty", tmp_path / "m", FMT, "rtn", progress=None)


def test_a_chat_template_that_is_a_folder_is_named(model, tmp_path):
    folder = quantise_folder(model, tmp_path / "m", FMT, "rtn", progress=None)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").mkdir()
    with pytest.raises(LabError, match=r"chat_template\.jinja is no readable text \(.*Is a directory"):
        load(folder, progress=None)


def test_a_bad_line_is_named_and_shown_in_one_line(model, tmp_path, capsys):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "fine"}\n{"txt": "wrong key"}\n')
    assert cli.main(["quantise", str(model), str(tmp_path / "awq"), "--group", "8", "--calibration", str(path)]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("labkit quantise: ") and 'texts.jsonl, line 2 needs a string under "text"' in last


def test_what_is_quantised_already_is_not_quantised_again(model, texts, tmp_path):
    folder = quantise_folder(model, tmp_path / "one", FMT, "rtn", progress=None)
    with pytest.raises(LabError, match="one is an AWQ checkpoint already: quantise the model that it was made from"):
        quantise_folder(folder, tmp_path / "two", FMT, "rtn", progress=None)
    assert here(folder) == ["one"]


@pytest.mark.parametrize(
    ("name", "kind"), [("quant_config.json", "an AWQ checkpoint"), ("quantize_config.json", "a GPTQ checkpoint")]
)
def test_nor_is_what_says_so_in_the_older_form(name, kind, tmp_path):
    folder = tmp_path / "one"
    tiny_hf("qwen2").save_pretrained(folder)
    (folder / name).write_text("{}")
    with pytest.raises(LabError, match=f"one is {kind} already: quantise the model that it was made from"):
        quantise_folder(folder, tmp_path / "two", FMT, "rtn", progress=None)
    assert here(folder) == ["one"]


@pytest.mark.parametrize("where", [("labkit.quant.awq", "best_clip"), ("labkit.quant.checkpoint", "save_file")])
def test_ctrl_c_leaves_no_checkpoint(where, model, texts, tmp_path, monkeypatch, capsys):
    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules[where[0]], where[1], stop)  # labkit.quant.awq by name is the function
    folder = tmp_path / "awq"
    assert cli.main(["quantise", str(model), str(folder), "--group", "8", "--calibration", str(texts)]) == 130
    assert here(folder) == [] and "nothing half-written was left behind" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_can_only_be_rounded(tmp_path):
    tiny_hf("qwen2").save_pretrained(tmp_path / "plain")
    with pytest.raises(LabError, match="by the model's tokenizer, and this model came without one"):
        quantise_folder(tmp_path / "plain", tmp_path / "awq", FMT, progress=None)
    folder = quantise_folder(tmp_path / "plain", tmp_path / "awq", FMT, "rtn", progress=None)
    assert load(folder, progress=None)[1] is None
