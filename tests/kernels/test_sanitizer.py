"""compute-sanitizer finds nothing in any operator: nothing out of bounds, no race, no lost barrier."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.harness import all_ops

ROOT = Path(__file__).resolve().parents[2]


def run_under(tool: str, args: list[str]) -> subprocess.CompletedProcess:
    """Run ``python ARGS`` under ``tool``; each tensor is an allocation of its own."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, *args]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)


def sanitize(tool: str, args: list[str]) -> str:
    """What was printed, if nothing was found."""
    done = run_under(tool, args)
    assert done.returncode == 0, f"{tool}: {done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


# What racecheck may report of operators with a kernel for sm_90 whose groups of warps do different work: where one
# tells others of a tile, and the dispatch between the groups that the compiler puts at such a kernel's entry. Both are
# ordered by mbarriers and named barriers between groups of warps, which racecheck does not follow: see the test of the
# handover below.
HANDED_OVER = {
    "flash_attention": {
        "flash_hopper.py:_publish", "flash_hopper.py:_published", "flash_hopper.py:flash_hopper_kernel"
    },
    "awq_linear": {"awq_linear_hopper.py:awq_linear_hopper_kernel"},
}  # fmt: skip


def places(said: str) -> set[str]:
    """FILE:FUNCTION of every access that racecheck names; "unknown" for one that it names no line of."""
    found = set()
    for line in re.findall(r"(?:Race reported between )?(?:Read|Write|Atomic) access at (.*)", said):
        at = re.search(r" in (\w+\.py):(\d+)", line)
        found.add(f"{at[1]}:{_function(at[1], int(at[2]))}" if at else f"unknown: {line}")
    return found


def _function(file: str, line: int) -> str:
    path = next(p for folder in ("kernels", "tests/kernels") for p in (ROOT / folder).glob(file))
    functions = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]
    first = {n: min([n.lineno, *(d.lineno for d in n.decorator_list)]) for n in functions}
    return next((n.name for n in functions if first[n] <= line <= n.end_lineno), "?")


def test_places_of_a_report_are_functions():
    lines = (ROOT / "kernels/flash_hopper.py").read_text().splitlines()
    at = next(i for i, text in enumerate(lines, 1) if "fields.index(tiles % 2 * FIELDS + i).store" in text)
    said = f"Error: Race reported between Write access at k+0x10 in flash_hopper.py:{at}\n and Read access at k+0x20"
    assert places(said) == {"flash_hopper.py:_publish", "unknown: k+0x20"}


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not on the PATH")
def test_of_a_handover_between_groups_of_warps_racecheck_reports_no_more_than_is_allowed_of_operators():
    """In some runs it reports the handover or the kernel's entry, in others nothing: the program is right in all."""
    done = run_under("racecheck", ["-m", "tests.kernels.handover"])
    assert "handed over 7" in done.stdout
    assert places(done.stdout) <= {f"handover.py:{function}" for function in ("_writer", "_reader", "handover_kernel")}


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not on the PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("name", all_ops())
def test_no_operator_is_found_at_fault(name, tool):
    if tool == "racecheck" and name in HANDED_OVER:
        done = run_under(tool, ["-m", "tests.kernels.sanitize", name])
        assert f"{len(all_ops()[name].cases)} cases ran" in done.stdout
        assert places(done.stdout) <= HANDED_OVER[name], sorted(places(done.stdout) - HANDED_OVER[name])
        return
    said = sanitize(tool, ["-m", "tests.kernels.sanitize", name])
    assert f"{len(all_ops()[name].cases)} cases ran" in said
    assert re.search(r"(ERROR|RACECHECK) SUMMARY: 0 (errors|hazards)", said), said[-2000:]


FLAWED = """
import torch, triton, triton.language as tl
@triton.jit
def k(x): tl.store(x + 4096 + tl.arange(0, 128), 1.0)
k[(1,)](torch.empty(16, device="cuda"))
torch.cuda.synchronize()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not on the PATH")
def test_it_would_find_a_store_out_of_bounds(tmp_path):
    (tmp_path / "flawed.py").write_text(FLAWED)
    with pytest.raises(AssertionError, match="Invalid __global__ write"):
        sanitize("memcheck", [str(tmp_path / "flawed.py")])
