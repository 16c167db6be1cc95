"""Where the course keeps what it downloads, converts and remembers."""

from __future__ import annotations

import os
from pathlib import Path

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


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the new one, never half of either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
