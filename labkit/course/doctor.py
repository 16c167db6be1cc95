"""``labkit doctor``: what this machine can run, what is missing, and what to do about it. Never raises."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import LabError
from labkit.hardware import recorded_gpu
from labkit.hardware.host import Machine

MODEL = "smollm2-135m"
GIB = 2**30
DISK_NEEDED_GIB = 1.0  # the model (0.1), its converted copy (0.6) and compiled kernels
MEMORY_NEEDED_GIB = 2.0  # torch, the model in fp32 and a notebook server
PROVENANCE = ("gpu", "driver", "date")
PORT = 8888
WIDTH = 100


@dataclass(frozen=True)
class Line:
    """One finding. ``status``: "ok", "warn" (labs run, with a limit) or "missing" (labs cannot run without it)."""

    name: str
    status: str
    finding: str
    todo: str = ""


def doctor(full: bool = False, machine: Machine | None = None) -> list[Line]:
    """Look at everything the labs need. ``full`` also reads the model's file for its checksum."""
    machine = machine or Machine()
    return [_safely(name, check, machine, full) for name, check in _CHECKS.items()]


def print_doctor(full: bool = False, machine: Machine | None = None) -> int:
    """Print the findings as a table within 100 columns. Returns 0 if the labs can run here, with or without a GPU."""
    machine = machine or Machine()
    lines = doctor(full, machine)
    width = max(len(line.name) for line in lines) + 2
    for line in lines:
        texts = [line.finding, *([f"-> {line.todo}"] if line.todo else [])]
        pieces = [piece for text in texts for piece in textwrap.wrap(text, WIDTH - 9 - width) or [""]]
        print(f"{line.status:<9}{line.name:<{width}}{pieces[0]}".rstrip())
        for piece in pieces[1:]:
            print(f"{'':<{9 + width}}{piece}")
    missing = [line.name for line in lines if line.status == "missing"]
    warnings = sum(line.status == "warn" for line in lines)
    noted = f"{warnings} warning{'' if warnings == 1 else 's'}"
    if missing:
        summary = f"The labs cannot run yet. Missing: {', '.join(missing)}; {noted}."
    else:
        summary = f"The labs can run here: {_tier(machine)}; {noted}."
    print("\n".join(textwrap.wrap(summary, WIDTH)))
    return 1 if missing else 0


def _tier(machine: Machine) -> str:
    try:
        live = machine.torch_sees_gpu() and os.environ.get("LABKIT_TIER") != "recorded"
    except Exception:
        live = False
    return "live tier (GPU)" if live else "recorded tier (no GPU: interpreter, replayed measurements)"


def _safely(name: str, check: Callable, machine: Machine, full: bool) -> Line:
    try:
        status, finding, todo = (*check(machine, full), "")[:3]
    except LabError as error:  # a setting that the learner can put right; the message says how
        return Line(name, "missing", str(error))
    except Exception as error:  # a broken installation is what the doctor is for
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return Line(
            name, "warn", f"could not be checked: {reason}", "Reinstall what it names; if the line stays, report it."
        )
    return Line(name, status, finding, todo)


def _version(text: str) -> tuple[int, ...]:
    """ "2.11.0+cu130" -> (2, 11)."""
    return tuple(int(n) for n in re.findall(r"\d+", text)[:2])


def _python(machine: Machine, full: bool):
    found = ".".join(map(str, machine.python[:3]))
    if machine.python[:2] < (3, 11):
        return "missing", f"{found}; 3.11 or newer is needed", "Make a new environment with Python 3.11 to 3.13."
    return "ok", found


def _torch(machine: Machine, full: bool):
    try:
        torch = machine.module("torch")
    except ImportError as error:
        return "missing", f"cannot be imported: {error}", "pip install -c constraints.txt torch"
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if _version(torch.__version__) < (2, 11):
        return "warn", f"{torch.__version__}, {build}; tested from 2.11 on", "pip install --upgrade 'torch>=2.11'"
    return "ok", f"{torch.__version__}, {build}"


def _triton(machine: Machine, full: bool):
    try:
        triton = machine.module("triton")
    except ImportError as error:
        return "missing", f"cannot be imported: {error}", "pip install triton (CPU builds of torch come without it)"
    if _version(triton.__version__) < (3, 6):
        return "warn", f"{triton.__version__}; tested from 3.6 on", "pip install --upgrade 'triton>=3.6'"
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not os.access(tool, os.X_OK):
        return (
            "warn",
            f"{triton.__version__}, without ptxas: no SASS from ahead-of-time compilation",
            "pip install --force-reinstall triton",
        )
    return "ok", f"{triton.__version__}, compiles ahead of time to PTX and SASS, with or without a GPU"


def _kernels(machine: Machine, full: bool):
    found = machine.origin("kernels")
    if found is None:
        return "missing", "the course's package `kernels` is not found", "In the course's folder: pip install -e ."
    folder = found.parent if found.name == "__init__.py" else found
    if folder.resolve() != machine.ours.resolve():
        what = "another package named `kernels` (transformers can use one) is found first"
        return (
            "missing",
            f"{what}: {folder}",
            f"Put {machine.ours.parent} first in PYTHONPATH, or: pip uninstall kernels; pip install -e .",
        )
    return "ok", f"the course's own, {folder}"


def _gpu(machine: Machine, full: bool):
    tier = os.environ.get("LABKIT_TIER", "")
    if tier not in ("", "live", "recorded"):
        return "missing", f"LABKIT_TIER is {tier!r}", "Unset LABKIT_TIER, or set it to live or recorded."
    usable, *found = _gpu_found(machine)
    if tier == "live" and not usable:
        here = "none is here" if found[0] == "ok" else found[1]
        todo = "Unset LABKIT_TIER, and measurements are replayed."
        return "missing", f"LABKIT_TIER=live asks for a GPU, but {here}", " ".join([todo, *found[2:]])
    return found


def _gpu_found(machine: Machine):
    """Whether torch can use a GPU, then status, finding and what to do."""
    gpu = machine.gpu
    name = gpu.ask("nvmlDeviceGetName")
    try:
        usable, cuda = machine.torch_sees_gpu(), machine.module("torch").version.cuda
    except ImportError:
        usable, cuda = False, None
    forced = " (LABKIT_TIER=recorded is set: it stays unused)" if os.environ.get("LABKIT_TIER") == "recorded" else ""
    if name and usable:
        return usable, "ok", f"{name}{forced}"
    if name and not cuda:
        return (
            usable,
            "warn",
            f"{name} is here, but torch is a CPU build",
            "Install a CUDA build of torch to measure on this GPU.",
        )
    if name:
        return (
            usable,
            "warn",
            f"{name} is here, but torch cannot use it",
            "Compare the driver below; check CUDA_VISIBLE_DEVICES.",
        )
    if usable:
        return (
            usable,
            "warn",
            f"torch sees a GPU, NVML does not: {gpu.problem}{forced}",
            "Without NVML there are no clocks and no power.",
        )
    return usable, "ok", "none, and none is needed: kernels run in Triton's interpreter, measurements are replayed"


def _driver(machine: Machine, full: bool):
    gpu = machine.gpu
    if gpu.problem:
        return "ok", "no NVIDIA driver, as there is no GPU"
    driver = gpu.ask("nvmlSystemGetDriverVersion", on_device=False)
    number = gpu.ask("nvmlSystemGetCudaDriverVersion", on_device=False)
    if number is None:
        return "warn", f"{driver}; it does not say which CUDA it supports", "Update the driver."
    supports = (number // 1000, number % 1000 // 10)
    text = f"{driver}, supports CUDA {supports[0]}.{supports[1]}"
    wanted = machine.module("torch").version.cuda
    # Within one major version a newer toolkit runs on an older driver (CUDA minor version compatibility).
    if wanted and supports[0] < _version(wanted)[0]:
        return (
            "warn",
            f"{text}; torch was built for CUDA {wanted}",
            "Update the driver, or install torch built for an older CUDA.",
        )
    return "ok", text


def _gpu_memory(machine: Machine, full: bool):
    memory = machine.gpu.ask("nvmlDeviceGetMemoryInfo")
    if memory is None:
        return "ok", "no GPU memory to look at"
    text = f"{memory.free / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.free < 0.5 * memory.total:
        return "warn", f"{text}: something else uses this GPU, and timings will suffer", "See who, with nvidia-smi."
    return "ok", text


def _disk(machine: Machine, full: bool):
    folder = machine.home
    todo = "Set LABKIT_HOME to a folder of yours."
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not there.is_dir():
        return "missing", f"{folder} is not a writable folder: {there} is a file", todo
    if not (os.access(there, os.W_OK) and os.access(there, os.X_OK)):
        return "missing", f"{folder} is not a writable folder: this user may not write in {there}", todo
    free = machine.free_disk_bytes(folder) / GIB
    text = f"{free:.1f} GiB free at {folder}"
    if free < DISK_NEEDED_GIB:
        return "warn", f"{text}; {DISK_NEEDED_GIB:.0f} is needed", "Make room, or set LABKIT_HOME to another disk."
    return "ok", text


def _memory(machine: Machine, full: bool):
    available, total = machine.memory_bytes()
    text = f"{available / GIB:.1f} of {total / GIB:.1f} GiB available"
    if available < MEMORY_NEEDED_GIB * GIB:
        return "warn", f"{text}; {MEMORY_NEEDED_GIB:.0f} are needed", "Close other programs and notebooks."
    return "ok", text


def _profiler(machine: Machine, full: bool):
    parameters = machine.profiler_parameters()
    if parameters is None:
        return "ok", "no driver parameters here; counters are shown from recordings"
    # The driver lists the module option NVreg_RestrictProfilingToAdminUsers under the name RmProfilingAdminOnly.
    match = re.search(
        r"(?:RmProfilingAdminOnly|NVreg_RestrictProfilingToAdminUsers|RestrictProfilingToAdminUsers)\s*[:=]\s*(\d)",
        parameters,
    )
    tool = "ncu found" if machine.which("ncu") else "ncu not found"
    if match and match[1] == "1" and not machine.is_root():
        return (
            "warn",
            f"hardware counters are for the administrator only; {tool}",
            "Run ncu with sudo, or put `options nvidia NVreg_RestrictProfilingToAdminUsers=0` in /etc/modprobe.d "
            "and restart.",
        )
    who = "root may read hardware counters" if match and match[1] == "1" else "every user may read hardware counters"
    if tool == "ncu not found":
        return (
            "warn",
            f"{who}, but Nsight Compute's ncu is not found",
            "Install Nsight Compute, or use the recorded counters.",
        )
    return "ok", f"{who}; {tool}"


def _model(machine: Machine, full: bool):
    from labkit.engine.fetch import BUILTIN, sha256_of

    known = BUILTIN[MODEL]
    path = machine.home / "models" / known.file
    if not path.is_file():
        return "missing", f"{MODEL} is not in {path.parent}", f"labkit model {MODEL} (98 MB)"
    size = path.stat().st_size
    again = f"Delete {path}, then: labkit model {MODEL}"
    if size != known.size:
        return "missing", f"{path.name} has {size:,} bytes, expected {known.size:,}", again
    if full and (got := sha256_of(path)) != known.sha256:
        return "missing", f"{path.name} was altered: SHA-256 {got[:12]}..., expected {known.sha256[:12]}...", again
    return (
        "ok",
        f"{path.name}, {size / 1e6:.1f} MB{', checksum right' if full else ' (checksum: labkit doctor --full)'}",
    )


def _recordings(machine: Machine, full: bool):
    files = sorted(machine.recordings.glob("*.json"))
    if not files:
        live = _tier(machine).startswith("live")
        return (
            "warn" if live else "missing",
            "none: nothing can be replayed",
            "Get the course's folder again, or `labkit record` on a GPU.",
        )
    recorded_gpu(machine.recordings)  # $LABKIT_RECORDED_GPU may name one that is not among them
    good, bad = [], []
    for file in files:
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            stated = {str(key).lower() for key, value in data.get("provenance", {}).items() if value}
            lacking = [key for key in PROVENANCE if not any(name.startswith(key) for name in stated)]
        except (ValueError, AttributeError, OSError) as error:
            lacking = [f"readable content ({error})"]
        if lacking:
            bad.append(f"{file.name} lacks {', '.join(lacking)}")
        else:
            good.append(file.stem)
    if bad:
        return "warn" if good else "missing", "; ".join(bad), "Take it again with `labkit record`, or restore the file."
    return "ok", f"{', '.join(good)}, each with its provenance"


def _jupyter(machine: Machine, full: bool):
    lacking = [name for name in ("jupyterlab", "ipykernel", "ipywidgets", "matplotlib") if machine.origin(name) is None]
    if lacking:
        return "missing", f"not installed: {', '.join(lacking)}", "In the course's folder: pip install -e ."
    return "ok", "JupyterLab, ipykernel, ipywidgets and matplotlib are installed"


def _port(machine: Machine, full: bool):
    if machine.port_is_free(PORT):
        return "ok", f"{PORT} is free for JupyterLab"
    return "warn", f"{PORT} is taken, perhaps by a JupyterLab that runs already", f"make lab PORT={PORT + 1}"


_CHECKS = {
    "Python": _python,
    "torch": _torch,
    "Triton": _triton,
    "kernels package": _kernels,
    "GPU": _gpu,
    "driver": _driver,
    "GPU memory": _gpu_memory,
    "disk": _disk,
    "memory": _memory,
    "profiler": _profiler,
    "model": _model,
    "recordings": _recordings,
    "Jupyter": _jupyter,
    "port": _port,
}
