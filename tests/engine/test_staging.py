"""Four ways from safetensors files to the device: the same tensors, the memory each takes, and what is refused."""

from __future__ import annotations

import json
import mmap
import os
import struct

import pytest
import torch
from safetensors.torch import save_file

from labkit.engine import load
from labkit.engine.safetensors_file import places
from labkit.engine.staging import WAYS, Stager, load_tensors, measure_loading, resident
from labkit.errors import LabError
from tests.engine.tiny_models import tiny_hf

MB = 1 << 20


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    real = {
        f"{dtype}".removeprefix("torch."): torch.randn(37, 5, generator=generator).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    return real | {
        "int32": torch.randint(-(2**31), 2**31 - 1, (8, 3), generator=generator, dtype=torch.int32),
        "uint8": torch.randint(0, 255, (7,), generator=generator, dtype=torch.uint8),
        "bool": torch.rand(9, generator=generator) > 0.5,
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def same(got: dict, want: dict) -> bool:
    return got.keys() == want.keys() and all(
        got[n].dtype == t.dtype
        and got[n].shape == t.shape
        and torch.equal(got[n].cpu().reshape(-1).view(torch.uint8), t.reshape(-1).view(torch.uint8))
        for n, t in want.items()
    )


@pytest.fixture
def folder(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("how", WAYS)
def test_every_way_gives_the_tensors_that_were_written(how, folder):
    assert same(load_tensors(folder, how), tensors())


@pytest.mark.parametrize("how", WAYS)
def test_the_tensors_have_memory_of_their_own(how, folder):
    """A view of a mapped file would change with the file."""
    got = load_tensors(folder, how)
    path = folder / "model.safetensors"
    with open(path, "r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert same(got, tensors())
    got.pop("float32").fill_(1)  # and writing to one is no error and reaches nothing else
    assert same(got, {name: t for name, t in tensors().items() if name != "float32"})


@pytest.mark.parametrize("how", WAYS)
def test_all_files_of_an_index_are_read(how, tmp_path):
    want = tensors()
    for i, name in enumerate(want):
        save_file({name: want[name]}, tmp_path / f"model-{i}.safetensors")
    index = {"weight_map": {name: f"model-{i}.safetensors" for i, name in enumerate(want)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"stray": torch.zeros(3)}, tmp_path / "other.safetensors")  # no part of the model
    assert same(load_tensors(tmp_path, how), want)


def written(path, held: dict[str, tuple[str, list[int], bytes]]) -> None:
    """A safetensors file by hand, in the order given and with nothing aligned."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in held.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("how", ["read", "mmap", "pinned"])
@pytest.mark.parametrize("before", range(1, 5))
def test_a_tensor_need_not_be_aligned(how, before, tmp_path):
    values = torch.tensor([1.5, -2.0, 3.25])
    written(
        tmp_path / "model.safetensors",
        {"odd": ("U8", [before], b"x" * before), "values": ("F32", [3], values.numpy().tobytes())},
    )
    assert torch.equal(load_tensors(tmp_path, how)["values"], values)


# ---- the two buffers


@pytest.mark.parametrize("chunk", [1, 7, 64, 100_000])
def test_a_tensor_goes_through_the_buffers_in_chunks(chunk):
    stager, want = Stager("cpu", chunk), tensors()
    assert not stager.pinned
    for _ in range(2):  # a second time over buffers that are full of the first
        for source in want.values():
            out = torch.full_like(source, 1)
            stager.copy(source, out)
            assert same({"": out}, {"": source})


def test_another_dtype_is_converted_and_rows_go_to_their_place():
    stager, source = Stager("cpu", 20), torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).double()
    out = torch.full((10, 5), 9.0)
    stager.copy(source, out[2:8])
    assert torch.equal(out[2:8], source.float()) and (out[:2] == 9).all() and (out[8:] == 9).all()
    columns = torch.full((5, 8), 9.0, dtype=torch.float64)
    stager.copy(source, columns.t()[1:7])  # a place whose rows are not neighbours in memory
    assert torch.equal(columns.t()[1:7], source) and (columns[:, 0] == 9).all() and (columns[:, 7] == 9).all()
    stager.copy(source.t(), (turned := torch.empty(5, 6, dtype=torch.float64)))
    assert torch.equal(turned, source.t())


def test_without_cuda_pinned_says_that_it_is_not(folder):
    said: list[str] = []
    load_tensors(folder, "pinned", "cpu", said.append)
    assert said == ["on cpu there is no page-locked memory to copy from: the two buffers are ordinary memory"]
    for how in ("read", "mmap", "direct"):
        load_tensors(folder, how, "cpu", said.append)
    assert len(said) == 1


# ---- what it takes


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """64 MB in 8 tensors."""
    folder = tmp_path_factory.mktemp("large")
    save_file({f"t{i}": torch.full((2 * MB,), float(i)) for i in range(8)}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def costs(large):
    return {how: measure_loading(large, how) for how in WAYS}


def test_what_is_measured_is_what_is_loaded(costs):
    for how, cost in costs.items():
        assert (cost.how, cost.device, cost.bytes) == (how, "cpu", 64 * MB)
        assert 0 < cost.seconds < 60 and cost.gb_s == pytest.approx(64 * MB / cost.seconds / 1e9)
        assert cost.peak_shared_bytes == 0
        assert bool(cost.note) == (how == "pinned")


def test_reading_holds_the_file_twice_and_mapping_lends_it(costs):
    """On a CPU: 64 MB of tensors, and beside them the file, as memory of the process or as pages of the cache."""
    close = 6 * MB
    assert abs(costs["read"].peak_anon_bytes - 128 * MB) < close and costs["read"].peak_file_bytes < close
    for how in ("mmap", "direct"):
        assert abs(costs[how].peak_anon_bytes - 64 * MB) < close, costs[how]
        assert abs(costs[how].peak_file_bytes - 64 * MB) < close, costs[how]
    assert abs(costs["pinned"].peak_anon_bytes - 80 * MB) < close, "of two buffers of 16 MB a tensor touches 8 each"
    for cost in costs.values():
        apart = cost.peak_anon_bytes + cost.peak_file_bytes
        assert abs(cost.peak_host_bytes - apart) < close, "the high-water mark is of both together"


def test_a_cold_start_loads_the_same(large):
    assert measure_loading(large, "mmap", cold=True).bytes == 64 * MB


@pytest.mark.parametrize(("kind", "flags"), [("RssAnon", mmap.MAP_PRIVATE), ("RssShmem", mmap.MAP_SHARED)])
def test_resident_memory_is_told_apart(kind, flags):
    before = resident("self")
    with mmap.mmap(-1, 32 * MB, flags=flags | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * (32 * MB))
        after = resident("self")
    grown = {name: after[name] - before[name] for name in before}
    assert abs(grown.pop(kind) - 32 * MB) < 4 * MB
    assert set(before) == {"RssAnon", "RssFile", "RssShmem"} and before["RssFile"] > 0
    assert abs(grown["RssFile"]) < 4 * MB


# ---- what is refused


@pytest.mark.parametrize("call", [load_tensors, measure_loading])
def test_what_cannot_be_loaded_is_named(call, folder, tmp_path):
    with pytest.raises(LabError, match="there is no way 'teleport' of loading weights; there are read, mmap, pinned,"):
        call(folder, "teleport")
    with pytest.raises(LabError, match="there is no folder .*nowhere"):
        call(tmp_path / "nowhere")
    with pytest.raises(LabError, match="there is no folder .*model.safetensors"):
        call(folder / "model.safetensors")  # a file
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(LabError, match=r"empty has no model\.safetensors, where its weights should be"):
        call(empty)
    (empty / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(LabError, match=r"empty has no gone\.safetensors"):
        call(empty)
    for names in ({}, {"a": 5}, {"a": "gone.safetensors", "b": None}):
        (empty / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        with pytest.raises(LabError, match=r"index\.json is no safetensors index"):
            call(empty)
    (empty / "model.safetensors.index.json").write_text('{"weight_map": {"a": "."}}')
    with pytest.raises(LabError, match=r"empty has no \., where"):
        call(empty)
    (empty / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x" * 300}}))
    with pytest.raises(LabError, match=r"empty cannot be read \(.*File name too long"):
        call(empty)
    (empty / "model.safetensors.index.json").unlink()
    (empty / "model.safetensors.index.json").mkdir()
    with pytest.raises(LabError, match=r"empty cannot be read \(.*Is a directory"):
        call(empty)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(LabError, match=r"cannot be read \(.*Is a directory"):
        places(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("how", WAYS)
def test_what_one_may_not_read_is_named(how, folder):
    (folder / "model.safetensors").chmod(0)
    with pytest.raises(LabError, match=r"model\.safetensors cannot be read \(.*Permission denied"):
        load_tensors(folder, how)
    folder.chmod(0)
    try:
        with pytest.raises(LabError, match=r"cannot be read \(.*Permission denied"):
            load_tensors(folder, how)
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("teapot", "'teapot' is no device; use 'cpu', 'cuda'"),
        (None, "None is no device"),
        ("meta", "'meta' is not sup"),
    ],
)
def test_a_device_that_is_none_is_named(device, says, folder):
    with pytest.raises(LabError, match=says):
        load_tensors(folder, "read", device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is there")
def test_a_gpu_that_is_not_there_is_named(folder):
    with pytest.raises(LabError, match="torch finds no CUDA GPU; use device='cpu'"):
        load_tensors(folder, "read", "cuda")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("keep", [0, 5, 8, 100, 0.9, -1])
def test_a_file_cut_short_is_named_before_anything_is_loaded(how, keep, folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(LabError, match=r"model\.safetensors is (cut short|no safetensors file)"):
        load_tensors(folder, how)


def header_of(**changes) -> dict:
    return {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (b"<html>not found</html>  ", "its header cannot be read"),
        (b"[1, 2]", "its header cannot be read"),
        (b"[" * 100_000, "its header cannot be read"),
        ({"a": 5}, "its header cannot be read"),
        (header_of(data_offsets=["0", "8"]), "its header cannot be read"),
        (header_of(data_offsets=[0, 8, 8]), "its header cannot be read"),
        (header_of(data_offsets=[0.0, 8.0]), "its header cannot be read"),
        (header_of(shape=[-1, -2]), "its header cannot be read"),
        (header_of(shape=[2.0]), "its header cannot be read"),
        (header_of(dtype=["F32"]), "its header cannot be read"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "its header cannot be read"),
        (header_of(dtype="F4"), "holds tensors of dtype 'F4'; BOOL, U8,"),
        (header_of(shape=[3]), "damaged: the place of a does not fit its shape .3."),
        (header_of(data_offsets=[-8, 0]), "damaged: the place of a does not fit"),
        (header_of(data_offsets=[8, 16]), "damaged: the place of a does not fit, as it begins at 8 and .* ends at 0"),
        (header_of() | {"b": header_of()["a"]}, "damaged: the place of b does not fit, as it begins at 0 .* ends at 8"),
        (header_of(shape=[1], data_offsets=[4, 8]), "damaged: the place of a does not fit, as it begins at 4"),
        (header_of() | {"__metadata__": 5}, "its header cannot be read .*__metadata__: 5"),
        (header_of() | {"__metadata__": {"a": 5}}, "its header cannot be read .*__metadata__: .'a': 5"),
        (header_of() | header_of(shape=[2**62, 4, 0], data_offsets=[0, 0]), "its header cannot be read"),
        (header_of() | header_of(shape=[2**70, 0], data_offsets=[0, 0]), "its header cannot be read"),
        (header_of(shape=[4], data_offsets=[0, 16]), "cut short or damaged: it has .* bytes, and its header promises"),
    ],
)
def test_a_header_that_lies_is_refused(header, says, tmp_path):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))
    with pytest.raises(LabError, match=says):
        load_tensors(tmp_path)


def test_the_places_are_those_of_safetensors(folder):
    from safetensors import safe_open

    found = places(folder / "model.safetensors")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert found.keys() == set(file.keys())
        for name, place in found.items():
            assert list(place.shape) == file.get_slice(name).get_shape()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is there")
def test_a_process_that_fails_says_why(folder):
    with pytest.raises(LabError, match="loading .* by 'mmap' to cuda failed: .*(CUDA|NVIDIA)"):
        measure_loading(folder, "mmap", "cuda")


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("how", WAYS)
def test_every_way_reaches_the_gpu(how, folder, large):
    said: list[str] = []
    got = load_tensors(folder, how, "cuda", said.append)
    assert all(t.is_cuda for t in got.values()) and same(got, tensors()) and said == []
    many = load_tensors(large, how, "cuda")
    assert all((many[f"t{i}"] == i).all() for i in range(8))


@pytest.mark.gpu
def test_the_buffers_are_not_filled_before_they_are_sent():
    """While the GPU is busy with something else, many chunks wait in the queue; two buffers must be enough."""
    stager, source = Stager("cuda", 1 << 16), torch.arange(1 << 22, dtype=torch.int32)
    out = torch.zeros_like(source, device="cuda")
    torch.cuda._sleep(200_000_000)
    stager.copy(source, out)
    half = torch.zeros(source.shape, dtype=torch.int64, device="cuda")
    stager.copy(source, half)
    assert torch.equal(out.cpu(), source) and torch.equal(half.cpu(), source.long())


@pytest.mark.gpu
def test_on_a_gpu_only_reading_takes_memory_of_the_size_of_the_file(large):
    costs = {how: measure_loading(large, how, "cuda") for how in WAYS}
    print(costs)
    assert costs["read"].peak_anon_bytes > 60 * MB
    for how in ("mmap", "pinned"):
        assert costs[how].peak_anon_bytes < 32 * MB and costs[how].peak_file_bytes > 50 * MB, costs[how]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_on_a_gpu_has_the_weights_of_its_folder(dtype, tmp_path):
    tiny_hf("qwen2").save_pretrained(tmp_path / "model")
    here, there = (load(tmp_path / "model", dtype, device, progress=None)[0].weights for device in ("cpu", "cuda"))
    for a, b in ((here.embedding, there.embedding), (here.lm_head, there.lm_head), (here.final_norm, there.final_norm)):
        assert torch.equal(a, b.cpu())
    for a, b in zip(here.layers, there.layers, strict=True):
        for name in ("attn_norm", "qkv", "qkv_bias", "attn_out", "mlp_norm", "gate_up", "down"):
            assert torch.equal(getattr(a, name), getattr(b, name).cpu())
