"""The lane catches what it should: changed outputs, dead kernels, wrong answers; and says so quickly and once."""

import os
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

from tests.notebooks.execute import cleaned
from tests.notebooks.lane import with_solutions

ROOT = Path(__file__).resolve().parents[2]


def cell(source, text="", tag="check"):
    outputs = [new_output("stream", name="stdout", text=text)] if text else []
    return new_code_cell(source, execution_count=1, outputs=outputs, metadata={"tags": [tag]})


def run(tmp_path, *cells, options=("--nbval",), **environment):
    path = tmp_path / "01_probe.ipynb"
    nbformat.write(cleaned(new_notebook(cells=list(cells))), path)
    command = [sys.executable, "-m", "pytest", "-p", "tests.notebooks.lane", "-p", "no:cacheprovider", "-q", "-rs"]
    command += ["--nbval-current-env", "--nbval-cell-timeout=30", *options, str(path)]
    start = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"LABKIT_TIER": "recorded"} | environment
    )
    return done.stdout, time.monotonic() - start


def test_equal_output_passes_and_a_trailing_semicolon_keeps_quiet(tmp_path):
    out, _ = run(tmp_path, cell("print(1 + 1)", "2\n"), cell("3;"))
    assert "2 passed" in out, out


def test_another_output_fails_and_the_cells_after_it_are_skipped_with_the_reason(tmp_path):
    out, _ = run(tmp_path, cell("x = 1\nprint(x)", "2\n"), cell("print(x)", "1\n"))
    assert "1 failed, 1 skipped" in out and "cell 0 failed before it" in out, out


def test_a_dead_kernel_is_noticed_at_once(tmp_path):
    out, seconds = run(tmp_path, cell("import os; os._exit(1)"), cell("print(1)", "1\n"))
    assert "the notebook's kernel died" in out and seconds < 25, (seconds, out)


def test_output_written_by_c_code_is_seen(tmp_path):
    """With PYTEST_CURRENT_TEST in its environment, ipykernel would lose it."""
    out, _ = run(tmp_path, cell("import os; _ = os.write(1, b'from C\\n')", "from C\n"))
    assert "1 passed" in out, out


@pytest.mark.parametrize(("tag", "passes"), [("check", False), ("live", True), ("widget", True), ("exercise", True)])
def test_the_lax_lane_compares_check_cells_only(tmp_path, tag, passes):
    out, _ = run(tmp_path, cell("print(1)", "2\n", tag), options=("--nbval-lax",))
    assert ("1 passed" in out) is passes, out


STUB = """import labkit as lab

def pin_bandwidth_gb_s(bus_bits, gbit_per_pin):
    raise lab.Todo

lab.check("01.1", pin_bandwidth_gb_s)"""


def test_solutions_take_the_stubs_place_and_must_pass(tmp_path):
    shipped = cell(STUB, "01.1  not tried yet\n", "exercise")
    assert "1 passed" in run(tmp_path, shipped)[0]
    assert "1 passed" in run(tmp_path, shipped, LABKIT_SOLUTIONS="1")[0]
    wrong = cell(STUB.replace("def pin", "def my_pin").replace('"01.1", pin', '"01.1", my_pin'), "", "exercise")
    out, _ = run(tmp_path, wrong, LABKIT_SOLUTIONS="1")
    assert "1 failed" in out and "the worked answer must pass its check" in out, out


def test_only_functions_that_are_solved_are_replaced():
    source = with_solutions("def helper():\n    return 1\n\n" + STUB, "solutions.lab01")
    assert "def helper" in source and "def pin_bandwidth_gb_s" not in source
    assert "from solutions.lab01 import pin_bandwidth_gb_s" in source
