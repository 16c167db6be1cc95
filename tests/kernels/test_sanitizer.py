"""compute-sanitizer finds nothing in any operator: nothing out of bounds, no race, no lost barrier."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.kernels.harness import all_ops


def sanitize(tool: str, args: list[str]) -> str:
    """Run ``python ARGS`` under ``tool`` and return what was printed; each tensor is an allocation of its own."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, *args]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, f"{tool}: {done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not on the PATH")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("name", all_ops())
def test_no_operator_is_found_at_fault(name, tool):
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
