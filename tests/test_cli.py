"""The command line: what it says, and with which exit code."""

import os
import subprocess
import sys

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from labkit import cli


def test_the_model_is_fetched_verified_and_converted(monkeypatch, tmp_path, capsys):
    from labkit.engine import fetch, gguf

    asked = []
    monkeypatch.setattr(fetch, "fetch_model", lambda name: asked.append(name) or tmp_path / "m.gguf")
    monkeypatch.setattr(fetch, "verify_model", asked.append)
    monkeypatch.setattr(gguf, "converted_folder", lambda path: tmp_path / "converted")
    assert cli.main(["model"]) == 0
    assert asked == ["smollm2-135m", "smollm2-135m"]
    assert "converted" in capsys.readouterr().out


def test_an_unknown_model_is_refused_in_one_line(capsys):
    assert cli.main(["model", "gpt-9"]) == 1
    err = capsys.readouterr().err
    assert "gpt-9" in err and "smollm2-135m" in err and len(err.splitlines()) == 1


def test_recording_needs_a_gpu(monkeypatch, capsys):
    from labkit.course import record

    monkeypatch.setattr(record, "is_live", lambda: False)
    assert cli.main(["record", "00"]) == 1
    assert "Recording needs a CUDA GPU" in capsys.readouterr().err


def notebook(tmp_path, source):
    cells = [new_code_cell(source, metadata={"tags": ["exercise"]})]
    path = tmp_path / "01_mine.ipynb"
    nbformat.write(new_notebook(cells=cells), path)
    return str(path)


RIGHT = """import labkit as lab
def pin_bandwidth_gb_s(bus_bits, gbit_per_pin):
    return bus_bits * gbit_per_pin / 8
lab.check("01.1", pin_bandwidth_gb_s)"""


def test_grading_says_what_passed(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    assert cli.main(["check", notebook(tmp_path, RIGHT)]) == 0
    assert "1 of 1 exercises passed" in capsys.readouterr().out
    assert not (tmp_path / "progress").exists(), "a grader's own progress is left alone"
    assert cli.main(["check", notebook(tmp_path, RIGHT.replace("/ 8", ""))]) == 1
    assert "0 of 1 exercises passed" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "text"), [("none.ipynb", "There is no notebook"), ("bad.ipynb", "is not a notebook")])
def test_what_is_no_notebook_is_named(tmp_path, capsys, name, text):
    (tmp_path / "bad.ipynb").write_text("{")
    assert cli.main(["check", str(tmp_path / name)]) == 1
    assert text in capsys.readouterr().err


def test_a_notebook_that_stops_is_told(tmp_path, capsys):
    assert cli.main(["check", notebook(tmp_path, RIGHT + "\nprint('12.5 GB/s')\n1 / 0")]) == 1
    out = capsys.readouterr().out
    assert "01.1  RTX 4090: 384 bits, 21 Gbit/s: passed" in out and "1 of 1 exercises passed" in out
    assert "then the cell that begins with 'import labkit as lab' raised ZeroDivisionError" in out


def test_a_reader_that_has_gone_is_no_traceback():
    """As in `labkit … | head -0`: the pipe is closed before anything is written."""
    code = "from labkit import cli; cli._RUN['model'] = lambda args: print('made') or 0; exit(cli.main(['model']))"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")
