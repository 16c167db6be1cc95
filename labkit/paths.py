"""Where the course keeps what it downloads, converts and remembers."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """``$LABKIT_HOME``, or ``~/.cache/labkit``. Models, converted weights, progress and own measurements live here."""
    return Path(os.environ.get("LABKIT_HOME") or Path.home() / ".cache" / "labkit")


def replace_file(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the new one, never half of either."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
