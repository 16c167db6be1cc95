"""Set the course up: ``.venv``, pinned packages, the model; then open JupyterLab.

Runs with the system's Python and its standard library alone, before anything is installed. Each step looks at what is
there and does only what is missing, so it can be stopped and started again. What is wrong is said in one line.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "labkit-pins"  # written last: its content says which pins are installed completely
NEEDS_GB = 4.0  # CPU build of torch and everything else: 2.5 GB; the model and its converted copy: 0.7 GB
NEEDS_GB_CUDA = 11.0  # torch's CUDA libraries add about 7 GB


class Missing(SystemExit):
    """Stops the set-up with one line that says what is missing and what to do."""

    def __init__(self, text: str):
        print(f"labkit setup: {text}", file=sys.stderr)
        super().__init__(1)


def check_python(version=sys.version_info) -> None:
    if version < (3, 11):
        found = ".".join(map(str, version[:3]))
        raise Missing(
            f"Python 3.11 or newer is needed, this is {found}: install one and run `make lab PYTHON=python3.12`."
        )


def check_venv_module() -> None:
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        raise Missing(
            f"Python's venv module is missing: install it, on Debian or Ubuntu with `sudo apt install {package}`."
        ) from error


def check_disk(where: Path, needs_gb: float) -> None:
    while not where.exists():
        where = where.parent
    free_gb = shutil.disk_usage(where).free / 1e9
    if free_gb < needs_gb:
        raise Missing(
            f"{needs_gb:.0f} GB of disk are needed under {where}, {free_gb:.1f} GB are free: "
            "make room, then run it again."
        )


def pins(extra: str) -> str:
    """What must be installed, as one hash: the pins, the project's own dependencies and which extra."""
    files = b"".join((ROOT / name).read_bytes() for name in ("constraints.txt", "pyproject.toml"))
    return hashlib.sha256(files + extra.encode() + sys.version.encode()).hexdigest()


def made_by() -> str:
    """The Python, as "3.12", that ``.venv`` was made with; "" if that cannot be read."""
    try:
        return re.search(r"^version(?:_info)? = (\d+\.\d+)", (VENV / "pyvenv.cfg").read_text(), re.M)[1]
    except (OSError, TypeError):
        return ""


def torch_pin() -> str:
    text = (ROOT / "constraints.txt").read_text()
    return re.search(r"^torch==\S+", text, re.M)[0]


def run(*command: str) -> None:
    """Run a command with its progress on the terminal. A failure is explained by what it wrote to stderr."""
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    told = []
    for line in process.stderr:
        told.append(line)
        if "WARNING: Location" not in line and "notice" not in line:
            sys.stderr.write(line)
    if process.wait():
        raise Missing(explain("".join(told)) + " What is already installed stays; run it again to go on.")


def explain(stderr: str) -> str:
    """The likely cause of a failed pip call."""
    if re.search(r"No space left|Errno 28", stderr):
        return "the disk is full."
    unreachable = r"NewConnectionError|name resolution|Network is unreachable|timed out|ConnectionError|ProxyError"
    if re.search(unreachable, stderr, re.I):
        return "the package index cannot be reached: check the network, or pip's proxy and index settings."
    if re.search(r"No matching distribution|Could not find a version", stderr):
        return (
            "a pinned package is not offered to this pip: "
            "check the network, pip's index settings and the Python version."
        )
    last = [line for line in stderr.strip().splitlines() if line.strip()]
    return f"an installation step failed ({last[-1].strip() if last else 'no message'})."


def install(extra: str = "test") -> None:
    """Make ``.venv`` hold the pinned packages and the project itself, editable."""
    if STAMP.exists() and STAMP.read_text() == pins(extra) and PYTHON.exists():
        return
    check_venv_module()
    check_disk(ROOT, NEEDS_GB_CUDA if shutil.which("nvidia-smi") else NEEDS_GB)
    resumed = PYTHON.exists() and made_by() == f"{sys.version_info[0]}.{sys.version_info[1]}"
    if not resumed or subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode:
        print("labkit setup: making .venv")
        shutil.rmtree(VENV, ignore_errors=True)
        run(sys.executable, "-m", "venv", str(VENV))
    pip = (str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "-c", "constraints.txt")
    pip += ("-q",) if resumed else ()  # what is there already would be listed line by line
    # torch by its pin alone comes first: pip then takes a CPU build where its index or links offer one,
    # and no other package's range pulls in another build.
    print(f"labkit setup: 1/3 {torch_pin()} (the largest download)")
    run(*pip, torch_pin())
    print("labkit setup: 2/3 JupyterLab, Triton and the rest")
    run(*pip, "-e", f".[{extra}]")
    STAMP.write_text(pins(extra))


def model() -> None:
    """Fetch and verify the embedded model and convert it for fast loading."""
    print("labkit setup: 3/3 the model")
    if subprocess.run([PYTHON, "-m", "labkit.cli", "model", "smollm2-135m"], cwd=ROOT).returncode:
        raise SystemExit(1)  # the command has said why


def free_port(wanted: str | None) -> int:
    """``wanted`` if it is free, else the first free one from 8888. One that was asked for and is taken is refused."""
    if wanted and not (wanted.isdigit() and 1 <= int(wanted) <= 65535):
        raise Missing(f"PORT is {wanted!r}; it must be a number from 1 to 65535.")
    first = int(wanted or 8888)
    for port in range(first, first + 1 if wanted else first + 50):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise Missing(f"port {first} is taken: choose another with `make lab PORT={first + 1}`.")


def open_lab() -> None:
    """Replace this process with JupyterLab on lab 00; without a display it prints its address and stays up."""
    port = free_port(os.environ.get("PORT"))
    command = [str(PYTHON), "-m", "jupyterlab", f"--port={port}", "--ServerApp.port_retries=0"]
    # the whole project can be browsed, since the labs send readers to kernels/
    command += [f"--ServerApp.root_dir={ROOT}", "--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb"]
    # a classroom may have no network: no look-ups of news and new versions
    command += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    if not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or sys.platform == "darwin"):
        print(
            "labkit: no display here. Open the address with the token below; "
            f"from another machine, first `ssh -L {port}:localhost:{port} HOST`."
        )
        command.append("--no-browser")
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--allow-root")
    os.chdir(ROOT)
    sys.stdout.flush()
    os.execv(command[0], command)


def main(argv: list[str]) -> None:
    check_python()
    try:
        install()
        model()
    except KeyboardInterrupt:
        raise Missing("stopped. What is already there stays; run it again to go on.") from None
    print("labkit setup: ready")
    if "lab" in argv:
        open_lab()


if __name__ == "__main__":
    main(sys.argv[1:])
