"""Where a figure comes from: the GPU, its clocks and limits, the versions, the date and the commit."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: every field a recording must carry, with what it holds
FIELDS = ("gpu", "driver", "cuda", "torch", "triton", "python", "clocks_mhz", "power_limit_w", "date", "commit")
CLOCKS = ("sm", "mem", "max_sm")
#: measurements under different values of these do not belong in one file
SAME = ("gpu", "driver", "torch", "triton")


def commit() -> str | None:
    """$LABKIT_COMMIT, else the checkout's commit, else the installed version."""
    if given := os.environ.get("LABKIT_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        try:
            done = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True)
        except OSError:
            return None
        return done.stdout.strip() or None if done.returncode == 0 else None
    try:
        return f"labkit {version('labkit')}"
    except PackageNotFoundError:
        return None


def live_provenance(load) -> dict:
    """Provenance of a measurement taken now. ``load()`` queues some work, so that the clocks are those under load.

    A field that this machine does not tell is None.
    """
    import torch

    from labkit.hardware.nvml import open_device

    index = torch.cuda.current_device()
    gpu = open_device(index, uuid=getattr(torch.cuda.get_device_properties(index), "uuid", None))
    load()
    clocks = {
        "sm": gpu.ask("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
        "mem": gpu.ask("nvmlDeviceGetClockInfo", "NVML_CLOCK_MEM"),
        "max_sm": gpu.ask("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
    }
    torch.cuda.synchronize()
    limit_mw = gpu.ask("nvmlDeviceGetEnforcedPowerLimit")
    found = {
        "gpu": torch.cuda.get_device_name(index),
        "driver": gpu.ask("nvmlSystemGetDriverVersion", on_device=False),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "clocks_mhz": clocks,
        "power_limit_w": limit_mw / 1000 if limit_mw else None,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
    }
    gpu.close()
    return found


def missing(provenance: object) -> list[str]:
    """The fields that are absent, empty or no numbers where numbers belong; empty if the provenance is whole."""
    if not isinstance(provenance, dict):
        return list(FIELDS)
    bad = []
    for name in FIELDS:
        value = provenance.get(name)
        if name == "clocks_mhz":
            clocks = value if isinstance(value, dict) else {}
            bad += [f"clocks_mhz.{c}" for c in CLOCKS if not _positive(clocks.get(c))]
        elif name == "power_limit_w":
            bad += [name] * (not _positive(value))
        elif not (isinstance(value, str) and value.strip()) or name == "date" and not _is_date(value):
            bad.append(name)
    return bad


def _positive(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_date(text: str) -> bool:
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        return False
    return True
