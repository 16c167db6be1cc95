"""``labkit record``: run the labs on this GPU and write down every measurement they take."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from labkit.course.grade import NOTEBOOKS, run_notebook
from labkit.errors import LabError
from labkit.hardware.tier import is_live


def record(labs: list[str], out: str | None = None) -> int:
    """Run the notebooks of ``labs`` ("00", "01", …; all if empty) live; each ``lab.measure`` enters the recording.

    ``out`` defaults to labkit/recordings/GPU.json. Raises LabError without a GPU or for a lab that does not exist.
    """
    if not is_live():
        raise LabError("Recording needs a CUDA GPU, and torch finds none here; `labkit doctor` says why.")
    from labkit.measure import recording_path

    chosen = [p for p in sorted(NOTEBOOKS.glob("*.ipynb")) if not labs or p.name[:2] in labs]
    missing = set(labs) - {p.name[:2] for p in chosen}
    if missing:
        raise LabError(f"There is no lab {', '.join(sorted(missing))}; give numbers such as 00 01.")
    target = Path(out) if out else recording_path()
    os.environ["LABKIT_RECORD"] = str(target.resolve())
    os.environ["LABKIT_LEARNER"] = "record"
    with tempfile.TemporaryDirectory() as cold:
        os.environ["TRITON_CACHE_DIR"] = cold  # the labs time a first call: it must compile
        for path in chosen:
            print(f"recording {path.name}", flush=True)
            run_notebook(path)
    print(f"recorded in {target}")
    return 0
