"""Hardware counters from Nsight Compute, as numbers a notebook can compare with a model's prediction.

``ncu`` runs a script of its own, because it must start the process it looks into, and replays each kernel as often as
the counters need. Clocks are left alone, so times under it mean little; counts do not depend on the clock.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from labkit.errors import LabError

#: short names for the counters the labs use
COUNTERS = {
    "load requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "load sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "shared load wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "shared load conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "shared store wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "DRAM bytes read": "dram__bytes_read.sum",
    "DRAM bytes written": "dram__bytes_write.sum",
    "warps active %": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
_SCALE = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def ncu(script: str, counters: list[str], kernel: str, timeout_s: float = 300) -> list[dict[str, float]]:
    """Run Python source under ncu; one dict of counters a launch of a kernel whose name matches ``kernel``, in order.

    counters: keys of ``COUNTERS`` or ncu's own metric names. kernel: a regular expression. Bytes come in bytes.
    Raises LabError if ncu is missing, may not read counters, knows no such metric, or no kernel matched.
    """
    program = shutil.which("ncu")
    if program is None:
        raise LabError("ncu is not on the PATH: install Nsight Compute, which the CUDA toolkit brings along.")
    metrics = {COUNTERS.get(name, name): name for name in counters}
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTEST_CURRENT_TEST")}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profiled.py"
        path.write_text(script, encoding="utf-8")
        command = [program, "--csv", "--clock-control", "none", "--metrics", ",".join(metrics)]
        command += ["--kernel-name", f"regex:{kernel}", sys.executable, str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)
        except subprocess.TimeoutExpired as error:
            raise LabError(f"ncu did not finish within {timeout_s:g} s; profile less.") from error
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        raise LabError("This user may not read hardware counters; `labkit doctor` says how to allow it.")
    found = parse(done.stdout, metrics)
    if done.returncode or not found:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise LabError(f"ncu counted nothing for a kernel named {kernel!r}: {said[-1] if said else 'no message'}")
    return found


def parse(text: str, metrics: dict[str, str]) -> list[dict[str, float]]:
    """ncu's CSV (one row a launch and metric) -> one dict a launch, in the order of the launches."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    launches: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines[start:]):
        if row.get("Metric Name") in metrics:
            value = float(row["Metric Value"].replace(",", ""))
            launches.setdefault(row["ID"], {})[metrics[row["Metric Name"]]] = value * _SCALE.get(row["Metric Unit"], 1)
    return list(launches.values())
