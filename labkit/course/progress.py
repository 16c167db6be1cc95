"""What a learner has predicted, measured, solved and judged, kept in one JSON file.

The file is ``$LABKIT_HOME/progress/<learner>.json`` (``$LABKIT_PROGRESS`` names another folder); ``$LABKIT_LEARNER``
names the learner where several share an account. It is replaced whole under a lock, so two notebooks can write at once
and a crash leaves the old file. A file that cannot be read is set aside under another name, never overwritten.
"""

from __future__ import annotations

import getpass
import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock

from labkit.paths import home, replace_file

SECTIONS = ("predictions", "scores", "checks", "claims")


def learner() -> str:
    name = os.environ.get("LABKIT_LEARNER")
    if not name:
        try:
            name = getpass.getuser()
        except (KeyError, OSError):  # a container whose user id has no name
            name = "learner"
    return re.sub(r"[^\w.-]", "_", name)


def progress_file() -> Path:
    folder = os.environ.get("LABKIT_PROGRESS")
    return (Path(folder) if folder else home() / "progress") / f"{learner()}.json"


def load() -> dict[str, dict]:
    """The learner's progress: a dict for each of ``SECTIONS``, keyed by prediction, exercise or claim id."""
    path = progress_file()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(data, dict) or not all(isinstance(data.get(s, {}), dict) for s in SECTIONS):
            raise ValueError("it does not hold predictions, scores, checks and claims")
    except FileNotFoundError:
        data = {}
    except (ValueError, RecursionError) as error:
        aside = path.with_name(f"{path.stem}.damaged-{datetime.now(UTC):%Y%m%dT%H%M%S%f}.json")
        os.replace(path, aside)
        print(
            f"The progress file {path.name} could not be read ({error}). It is kept as {aside.name}; a new one begins."
        )
        data = {}
    return data | {section: data.get(section, {}) for section in SECTIONS}  # what else is there stays


def keep(section: str, key: str, entry: dict) -> None:
    """Store ``entry`` under ``section`` and ``key``, with the time in UTC. A disk that is full is told, not raised."""
    path = progress_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=10):
            data = load()
            data[section][key] = entry | {"at": datetime.now(UTC).isoformat(timespec="seconds")}
            replace_file(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        why = error.strerror or error
        print(f"Your progress could not be saved under {path.parent} ({why}); the lab goes on without it.")
