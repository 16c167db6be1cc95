"""``labkit check``: run a notebook and say which of its exercises pass."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path

from labkit.course.exercise import exercises_of
from labkit.errors import LabError

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def run_notebook(path: Path, timeout_s: float = 900.0, stop_at_error: bool = True):
    """Run all cells in a fresh kernel, in the notebook's folder; returns the notebook with its new outputs.

    The file itself is not changed. Raises LabError, in one sentence, if it is no notebook, if a cell takes more than
    ``timeout_s`` seconds or kills the kernel, and, with ``stop_at_error``, for the first cell that raises.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    try:
        notebook = nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise LabError(f"There is no notebook {path}.") from None
    except Exception as error:  # nbformat raises several kinds for a file that is no notebook
        raise LabError(f"{path} is not a notebook: {error}.") from error
    client = NotebookClient(
        notebook,
        timeout=timeout_s,
        kernel_name="python3",
        allow_errors=not stop_at_error,
        resources={"metadata": {"path": str(path.resolve().parent)}},
        extra_arguments=["--IPKernelApp.log_level=ERROR"],  # no remark about the local connection
    )
    try:
        client.execute()
    except CellExecutionError:
        raise LabError(f"{path.name} stopped: {first_error(notebook)}") from None
    except CellTimeoutError:
        raise LabError(f"{path.name} stopped: a cell took more than {timeout_s:g} s.") from None
    except DeadKernelError:
        raise LabError(f"{path.name} stopped: a cell ended its kernel.") from None
    return notebook


def first_error(notebook) -> str:
    """The first cell that raised, as one sentence; "" if none did."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                line = next((line for line in cell.source.splitlines() if line.strip()), "")
                return f"the cell that begins with {line!r} raised {output.ename}: {output.evalue}"
    return ""


@contextmanager
def scratch_progress():
    """Progress made by the notebook belongs to its author, not to who grades it: keep it apart and forget it."""
    before = os.environ.get("LABKIT_PROGRESS")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LABKIT_PROGRESS"] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ["LABKIT_PROGRESS"]
            else:
                os.environ["LABKIT_PROGRESS"] = before


def grade(path: str) -> int:
    """Print the lines of every check in the notebook, and the first error if there was one; 0 if all passed, else 1."""
    with scratch_progress():
        notebook = run_notebook(Path(path), stop_at_error=False)
    text = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    known = {id for lab in re.findall(r"^(\d\d)\.\d+", text, re.M) for id in _ids(lab)}
    lines = [line for line in text.splitlines() if line.split("  ")[0] in known]
    lines = [line for line in lines if not re.search(r"from here on$|until yours passes$", line)]
    print("\n".join(lines) or "no exercise was checked in this notebook")
    seen = {line.split()[0] for line in lines}
    failed = {line.split()[0] for line in lines if not re.search(r": passed$", line)}
    error = first_error(notebook)
    if error:
        print(f"then {error}")
    print(f"{len(seen - failed)} of {len(seen)} exercises passed")
    return 1 if failed or error or not seen else 0


def _ids(lab: str) -> set[str]:
    try:
        return set(exercises_of(lab))
    except ModuleNotFoundError:
        return set()
