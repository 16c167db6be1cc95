"""``labkit check``: run a notebook and say which of its exercises pass."""

from __future__ import annotations

import re
from pathlib import Path

from labkit.errors import LabError

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


def run_notebook(path: Path, timeout_s: float = 900.0):
    """Run all cells in a fresh kernel, in the notebook's folder; returns the notebook with its new outputs.

    The file itself is not changed. Raises LabError with the cell's error if one fails.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, DeadKernelError

    try:
        notebook = nbformat.read(path, as_version=4)
    except FileNotFoundError:
        raise LabError(f"There is no notebook {path}.") from None
    except Exception as error:  # nbformat raises several kinds for a file that is no notebook
        raise LabError(f"{path} is not a notebook: {error}.") from error
    client = NotebookClient(
        notebook, timeout=timeout_s, kernel_name="python3", resources={"metadata": {"path": str(path.resolve().parent)}}
    )
    try:
        client.execute()
    except (CellExecutionError, DeadKernelError) as error:
        raise LabError(f"{path.name} stopped: {error}") from error
    return notebook


def grade(path: str) -> int:
    """Print the lines of every check in the notebook; 0 if all passed, 1 if not."""
    notebook = run_notebook(Path(path))
    lines = []
    for cell in notebook.cells:
        if cell.cell_type == "code" and "exercise" in cell.metadata.get("tags", []):
            text = "".join(o.get("text", "") for o in cell.outputs)
            lines += [line for line in text.splitlines() if re.match(r"\d\d\.\d", line)]
    print("\n".join(lines) or "no exercises in this notebook")
    fine = re.compile(r": passed$|from here on$|until yours passes$|hint:")
    seen = {line.split()[0] for line in lines}
    failed = {line.split()[0] for line in lines if not fine.search(line)}
    print(f"{len(seen - failed)} exercises passed, {len(failed)} not")
    return 1 if failed else 0
