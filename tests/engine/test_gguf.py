"""GGUF files: converted right for three families and several block types, and refused in one sentence when bad."""

import os
import re
import shutil

import gguf
import numpy as np
import pytest
import torch

from labkit.engine import gguf as convert
from labkit.engine import load
from labkit.engine.fetch import BUILTIN, Builtin, sha256_of
from labkit.errors import LabError
from tests.engine.tiny_models import EOS, VOCABULARY, left_over, tiny_hf, write_gguf

Type = gguf.GGMLQuantizationType


def logits_of(model, ids):
    return model.forward(ids, torch.arange(ids.shape[1]), all_logits=True)


@pytest.fixture
def ids():
    return torch.randint(0, len(VOCABULARY), (2, 23), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_a_converted_model_gives_the_logits_of_the_original(family, tmp_path, own_home, ids):
    original = tiny_hf(family)
    model, tokenizer = load(write_gguf(tmp_path / "tiny.gguf", original), progress=None)
    with torch.inference_mode():
        assert (logits_of(model, ids) - original(ids).logits).abs().max() < 1e-4
    assert model.config.eos_token_ids == (EOS,)
    assert tokenizer.decode(tokenizer.encode("hello 12")) == "hello 12"


@pytest.mark.parametrize(
    "quant", [Type.Q4_0, Type.Q4_1, Type.Q5_1, Type.Q8_0, Type.BF16, Type.F16], ids=lambda t: t.name
)
def test_quantised_blocks_are_read_as_the_values_they_stand_for(quant, tmp_path, own_home, ids):
    original = tiny_hf("llama", hidden_size=96, intermediate_size=96)
    path = write_gguf(tmp_path / "tiny.gguf", original, quant=quant)
    with torch.no_grad():  # round the original's matrices in the same way; rows keep their values when permuted
        for tensor in {id(p): p for p in original.parameters()}.values():
            if tensor.dim() == 2:
                rounded = gguf.dequantize(gguf.quantize(tensor.numpy(), quant), quant)
                assert quant in (Type.BF16, Type.F16) or not np.array_equal(rounded, tensor.numpy())
                tensor.copy_(torch.from_numpy(np.array(rounded)))
    model, _ = load(path, progress=None)
    with torch.inference_mode():
        assert (logits_of(model, ids) - original(ids).logits).abs().max() < 1e-4


def test_a_second_start_reuses_the_folder_and_a_changed_file_does_not(tmp_path, own_home, ids):
    path, said = write_gguf(tmp_path / "tiny.gguf", tiny_hf("llama")), []
    first, _ = load(path, progress=said.append)
    load(path, progress=said.append)
    assert len(said) == 1 and said[0].startswith("converting tiny.gguf to fp32 safetensors, once (")
    write_gguf(path, tiny_hf("llama", seed=1))
    os.utime(path, ns=(1, 1))
    second, _ = load(path, progress=said.append)
    assert len(said) == 2
    assert not torch.allclose(logits_of(first, ids), logits_of(second, ids))


def test_two_files_of_one_name_size_and_time_are_told_apart(tmp_path, own_home, ids):
    paths = [tmp_path / name / "tiny.gguf" for name in "ab"]
    for seed, path in enumerate(paths):
        path.parent.mkdir()
        write_gguf(path, tiny_hf("llama", seed=seed))
        os.utime(path, ns=(1, 1))
    assert paths[0].stat().st_size == paths[1].stat().st_size
    first, second = (load(path, progress=None)[0] for path in paths)
    assert not torch.allclose(logits_of(first, ids), logits_of(second, ids))


TYPE, FACTOR, OLDER = (f"llama.rope.{key}" for key in ("scaling.type", "scaling.factor", "scale_linear"))


@pytest.mark.parametrize(
    ("meta", "factor"),
    [
        ({OLDER: 4.0}, 4.0),
        ({OLDER: 4.0, FACTOR: 2.0}, 2.0),
        ({OLDER: 4.0, TYPE: "none"}, None),
        ({OLDER: 1.0}, None),
        ({OLDER: 0.0}, None),
        ({FACTOR: 2.0}, 2.0),
        ({FACTOR: 2.0, TYPE: "linear"}, 2.0),
    ],
)
def test_linear_scaling_is_read_as_llama_cpp_reads_it(meta, factor, tmp_path, own_home, ids):
    scaled = dict(rope_type="linear", factor=factor) if factor else dict(rope_type="default")
    original = tiny_hf("llama", rope_parameters=scaled | dict(rope_theta=1e4))
    model, _ = load(write_gguf(tmp_path / "tiny.gguf", original, meta=meta), progress=None)
    with torch.inference_mode():
        assert (logits_of(model, ids) - original(ids).logits).abs().max() < 1e-4


def test_shards_with_an_index_are_written_and_read(tmp_path, own_home, ids, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", tiny_hf("qwen2"))
    whole, _ = load(path, progress=None)
    shutil.rmtree(own_home)
    monkeypatch.setattr(convert, "SHARD_BYTES", 40_000)
    sharded, _ = load(path, progress=None)
    folder = convert.converted_folder(path)
    assert len(list(folder.glob("model-*.safetensors"))) > 2 and not (folder / "model.safetensors").exists()
    assert torch.equal(logits_of(whole, ids), logits_of(sharded, ids))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "good.gguf", tiny_hf("llama"))


@pytest.mark.parametrize("keep", [0, 3, 4, 7, 8, 20, 100, 2000, 0.5, 0.9, 0.999, -1])
def test_a_file_cut_short_is_refused_wherever_the_cut(keep, good, tmp_path, own_home):
    data = good.read_bytes()
    cut = keep if isinstance(keep, int) else int(keep * len(data))
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[:cut])
    with pytest.raises(LabError, match="cut.gguf is (truncated or damaged|no GGUF file)") as caught:
        load(path, progress=None)
    assert "\n" not in str(caught.value)
    assert left_over(own_home) == []


@pytest.mark.parametrize(
    ("offset", "value"),
    [(4, 0xFF), (15, 0xFF), (23, 0xFF), (31, 0xFF), (24, 0x7F), (60, 0xEE)],
    ids=["version", "tensor count", "key count", "key length", "key length, low byte", "a value"],
)
def test_a_flipped_byte_in_the_header_is_refused(offset, value, good, tmp_path, own_home):
    data = bytearray(good.read_bytes())
    data[offset] = value
    path = tmp_path / "flipped.gguf"
    path.write_bytes(data)
    with pytest.raises(LabError, match="flipped.gguf"):
        load(path, progress=None)
    assert left_over(own_home) == []


def test_bad_magic_is_shown(tmp_path, own_home):
    path = tmp_path / "page.gguf"
    path.write_text("<html>not found</html>")
    with pytest.raises(LabError, match=r"page.gguf is no GGUF file: it begins with b'<htm', expected b'GGUF'"):
        load(path, progress=None)
    assert left_over(own_home) == []


EXTRA = {"blk.0.attn_qkv.weight": (np.zeros((2, 32), np.float32), Type.F32)}
INTS = {"blk.0.ffn_down.weight": (np.zeros((48, 72), np.int32), Type.I32)}
BAD = {
    "architecture": (dict(arch="gemma2"), "has the architecture 'gemma2'; this engine runs llama, qwen2, qwen3"),
    "missing tensor": (
        dict(skip=["blk.1.ffn_up.weight"]),
        "lacks the tensor for model.layers.1.mlp.up_proj.weight$",
    ),
    "no embedding": (dict(skip=["token_embd.weight"]), "lacks the tensor token_embd.weight"),
    "unexpected tensor": (dict(extra=EXTRA), "holds the tensor blk.0.attn_qkv.weight, for which"),
    "type": (dict(skip=list(INTS), extra=INTS), "blk.0.ffn_down.weight has the unsupported type I32"),
    "missing setting": (dict(meta={"llama.block_count": None}), "lacks the metadata llama.block_count"),
    "wrong setting": (dict(meta={"llama.feed_forward_length": 71}), r"ffn_gate.weight has shape \(72, 48\), expected"),
    "heads": (dict(meta={"llama.attention.head_count_kv": 4}), "6 query heads cannot share 4 KV heads evenly"),
    "not finite": (dict(poison="blk.1.attn_v.weight"), "blk.1.attn_v.weight holds values that are not finite"),
    "yarn": (dict(meta={"llama.rope.scaling.type": "yarn"}), "rotary scaling of type 'yarn' is not supported"),
    "partial rotary": (dict(meta={"llama.rope.dimension_count": 16}), "rotary in full"),
    "sentencepiece": (dict(meta={"tokenizer.ggml.model": "llama"}), "tokenizer model 'llama' is not supported"),
    "pre-tokeniser": (dict(meta={"tokenizer.ggml.pre": "tekken"}), "pre-tokeniser 'tekken' is not supported"),
    "no heads": (
        dict(meta={"llama.attention.head_count": 0, "llama.attention.key_length": None}),
        "bad.gguf: its settings cannot be read .ZeroDivisionError: ",
    ),
    "window": (
        dict(meta={"llama.attention.sliding_window": "x"}),
        "bad.gguf: its settings cannot be read .TypeError: .* get it again, or use the model's safetensors folder",
    ),
    "embedding": (
        dict(skip=["token_embd.weight"], extra={"token_embd.weight": (np.ones(48, np.float32), Type.F32)}),
        "bad.gguf: its settings cannot be read .IndexError: ",
    ),
    "end token": (dict(meta={"tokenizer.ggml.eos_token_id": 5000}), "special token id 5000 lies outside"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_this_engine_would_run_wrongly_is_refused(case, tmp_path, own_home):
    change, says = BAD[case]
    path = write_gguf(tmp_path / "bad.gguf", tiny_hf("llama"), **change)
    with pytest.raises(LabError, match=says) as caught:
        load(path, progress=None)
    assert "\n" not in str(caught.value)
    assert left_over(own_home) == []


@pytest.mark.parametrize(
    ("key", "values"), [("llama.attention.head_count", [6, 6]), ("tokenizer.ggml.eos_token_id", [0, 1])]
)
def test_an_array_where_a_number_belongs_is_refused(key, values, tmp_path, own_home, monkeypatch):
    write = gguf.GGUFWriter.write_header_to_file
    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", lambda w: (w.add_array(key, values), write(w)))
    meta = {key: None, "llama.attention.key_length": None}  # so that the heads' size is computed
    path = write_gguf(tmp_path / "bad.gguf", tiny_hf("llama", head_dim=8), meta=meta)
    with pytest.raises(LabError, match="bad.gguf: its settings cannot be read .TypeError: "):
        load(path, progress=None)
    assert left_over(own_home) == []


def test_a_damaged_byte_in_a_string_is_refused(good, tmp_path, own_home):
    path = tmp_path / "bad.gguf"
    path.write_bytes(good.read_bytes().replace(b"smollm", b"smoll\xff"))
    with pytest.raises(LabError, match="bad.gguf: its tokenizer cannot be read .UnicodeDecodeError: .*get it again"):
        load(path, progress=None)
    assert left_over(own_home) == []


def test_a_built_in_file_is_hashed_before_it_is_converted(good, own_home, monkeypatch):
    model = Builtin("none", "1", "good.gguf", sha256_of(good), good.stat().st_size, "none")
    monkeypatch.setitem(BUILTIN, "tiny", model)
    path = own_home / "models" / "good.gguf"
    path.parent.mkdir(parents=True)
    data = bytearray(good.read_bytes())
    data[-5] ^= 1  # in the weights: the size is right, and every number is still finite
    path.write_bytes(data)
    with pytest.raises(LabError, match="good.gguf was altered: its SHA-256 is .*; delete it to fetch it again"):
        load("tiny", progress=None)
    assert left_over(own_home) == ["good.gguf"]
    path.write_bytes(good.read_bytes())
    load("tiny", progress=None)
    assert f"good-{model.sha256[:12]}.v{convert.FORMAT}" in left_over(own_home)


def test_a_conversion_that_dies_leaves_nothing_and_the_next_one_cleans_up(good, own_home, monkeypatch):
    def die(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert, "save_file", die)
        with pytest.raises(KeyboardInterrupt):
            load(good, progress=None)
    assert left_over(own_home) == []
    folder = convert.converted_folder(good, progress=None)
    killed = folder.with_name(f".{folder.name}.part-killed00")  # what SIGKILL would leave
    killed.mkdir()
    shutil.rmtree(folder)
    assert convert.converted_folder(good, progress=None) == folder and left_over(own_home) == [folder.name]


DAMAGES = {
    "weights cut short": ("model.safetensors", lambda data: data[:-1], "has .* bytes, expected"),
    "weights emptied": ("model.safetensors", lambda data: bytes(len(data)), "was altered"),
    "weights gone": ("model.safetensors", None, "is missing"),
    "config cut short": ("config.json", lambda data: data[:20], "has 20 bytes, expected"),
    "config gone": ("config.json", None, "is missing"),
    "tokenizer altered": ("tokenizer.json", lambda data: b"?" + data[1:], "was altered"),
    "tokenizer gone": ("tokenizer.json", None, "is missing"),
    "tokenizer settings altered": ("tokenizer_config.json", lambda data: b"[" + data[1:], "was altered"),
    "manifest cut short": ("manifest.json", lambda data: data[:20], "cannot be read"),
    "manifest of another kind": ("manifest.json", lambda data: b"[]", "cannot be read"),
    "no manifest": ("manifest.json", None, "is missing"),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_copy_is_made_again(case, good, own_home, ids):
    name, change, says = DAMAGES[case]
    before = logits_of(load(good, progress=None)[0], ids)
    folder = convert.converted_folder(good)
    data = (folder / name).read_bytes()
    if change is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(change(data))
    said = []
    model, tokenizer = load(good, progress=said.append)
    assert torch.equal(logits_of(model, ids), before) and tokenizer.encode("hello")
    assert len(said) == 2 and re.search(rf"{name} {says}|it {says}", said[0]) and said[1].startswith("converting")
    assert (folder / name).read_bytes() == data and left_over(own_home) == [folder.name]
    load(good, progress=said.append)
    assert len(said) == 2


def test_a_damaged_copy_stays_if_it_cannot_be_made_again(good, own_home, monkeypatch):
    folder = convert.converted_folder(good, progress=None)
    (folder / "config.json").unlink()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(LabError, match="has 0 MB free"):
        load(good, progress=None)
    assert (folder / "model.safetensors").exists() and left_over(own_home) == [folder.name]


def test_a_home_that_cannot_be_written_is_said(good, own_home):
    own_home.write_text("")
    with pytest.raises(
        LabError, match=r"home/converted cannot be written \(Not a directory\); make LABKIT_HOME"
    ) as error:
        load(good, progress=None)
    assert "\n" not in str(error.value)


def test_no_room_for_the_conversion_is_said_before_it_starts(good, own_home, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 5_000_000))
    with pytest.raises(LabError, match="converting good.gguf to fp32 needs 67 MB and .* has 5 MB free"):
        load(good, progress=None)
    assert left_over(own_home) == []


def test_a_file_that_is_not_there(own_home, tmp_path):
    with pytest.raises(LabError, match="'nothing.gguf' is no built-in model .smollm2-135m., and no GGUF file"):
        load("nothing.gguf", progress=None)
    with pytest.raises(LabError, match="there is no file"):
        convert.converted_folder(tmp_path / "nothing.gguf")
