"""Where the course keeps what it downloads, converts and remembers."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from labkit.errors import LabError


def home() -> Path:
    """``$LABKIT_HOME``, or ``~/.cache/labkit``. Models, converted weights, progress and own measurements live here.

    ``~`` in it means the user's home. Raises LabError for a relative path: it would name another folder in each
    working directory, and a notebook's is not that of the command line.
    """
    given = os.environ.get("LABKIT_HOME") or "~/.cache/labkit"
    try:
        path = Path(given).expanduser()
    except RuntimeError as error:
        raise LabError(
            f"{given} cannot be resolved, because there is no such user's home; set LABKIT_HOME to an absolute path."
        ) from error
    if not path.is_absolute():
        raise LabError(
            f"LABKIT_HOME is {given!r}, which means another folder in each working directory; "
            f"set it to an absolute path, such as {path.absolute()}."
        )
    return path


def unwritable(folder: Path, error: OSError) -> LabError:
    """The sentence for a folder below ``home()`` that cannot be made or written."""
    return LabError(
        f"{folder} cannot be written ({error.strerror or error}); make LABKIT_HOME ({home()}) a folder you may write, "
        "or set it to another one"
    )


@contextmanager
def scratch(result: Path) -> Iterator[Path]:
    """A hidden folder beside ``result``, so that the last step can be a rename; gone afterwards, whatever happens.

    It holds a lock that ends with its process: so what a killed process left behind for the same result is told from
    what another is writing, and removed first.
    """
    prefix = f".{result.name}.part-"
    for stale in result.parent.glob(f"{glob.escape(prefix)}{'?' * 8}"):
        with suppress(OSError, Timeout), FileLock(stale / "lock", timeout=0):
            shutil.rmtree(stale, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=prefix, dir=result.parent, ignore_cleanup_errors=True) as hidden,
        FileLock(Path(hidden) / "lock"),
    ):
        yield Path(hidden)


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the new one, never half of either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
