"""One timing at a time on a GPU: two kernels that share it share its bandwidth, and both figures are worthless."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from filelock import FileLock, Timeout

from labkit.errors import LabError
from labkit.paths import home

DEFAULT_TIMEOUT_S = 600.0


def gpu_name() -> str:
    """What tells this process's current GPU from the machine's others: its UUID, or its index where there is none."""
    import torch

    index = torch.cuda.current_device()
    return str(getattr(torch.cuda.get_device_properties(index), "uuid", "") or f"gpu-{index}")


@cache
def _lock(path: str) -> FileLock:
    return FileLock(path)  # one object a process and file: it counts, so that a timing inside a timing does not wait


def _timeout() -> float:
    text = os.environ.get("LABKIT_LOCK_TIMEOUT", "")
    try:
        return float(text) if text else DEFAULT_TIMEOUT_S
    except ValueError:
        raise LabError(f"LABKIT_LOCK_TIMEOUT is {text!r}; it must be a number of seconds.") from None


def lock_folder() -> Path:
    """``$LABKIT_HOME/locks``; where that cannot be written, a folder of this user's among the temporary files.

    Every process with the same $LABKIT_HOME gets the same answer, so they still wait for each other.
    """
    for folder in (home() / "locks", Path(tempfile.gettempdir()) / f"labkit-locks-{os.getuid()}"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise LabError(
        f"Neither {home() / 'locks'} nor {folder} can be written; set LABKIT_HOME to a folder that you may write."
    )


@contextmanager
def exclusive(name: str, timeout_s: float | None = None):
    """Hold the lock of GPU ``name`` (NAME.lock in ``lock_folder()``) against every other process of this user.

    Prints one line if it has to wait. Raises LabError after ``timeout_s`` (default: $LABKIT_LOCK_TIMEOUT, or 600).
    """
    timeout_s = _timeout() if timeout_s is None else timeout_s
    path = lock_folder() / f"{re.sub(r'[^A-Za-z0-9-]', '_', name)}.lock"
    lock = _lock(str(path))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"waiting: another process is timing on this GPU ({name})", flush=True)
        try:
            lock.acquire(timeout=timeout_s)
        except Timeout:
            raise LabError(
                f"Another process has been timing on GPU {name} for {timeout_s:g} s. `nvidia-smi` lists the processes: "
                "end the one you do not need, or wait longer with LABKIT_LOCK_TIMEOUT=SECONDS."
            ) from None
    try:
        yield
    finally:
        lock.release()
