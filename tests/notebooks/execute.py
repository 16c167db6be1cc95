"""Run notebooks and store their outputs, cleaned: no widget views, no metadata of this run, no kernel versions."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
VIEW = "application/vnd.jupyter.widget-view+json"


def execute(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources=resources,
        store_widget_state=False,
        coalesce_streams=True,
    ).execute()
    nbformat.write(cleaned(notebook), path)


def cleaned(notebook):
    """Keep what a reader sees: a widget keeps its picture and words; its view means nothing without a kernel."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {"tags": cell.metadata.tags} if "tags" in cell.metadata else {}
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(VIEW, None)
    return notebook


if __name__ == "__main__":
    os.environ["LABKIT_LEARNER"] = f"execute-{os.getpid()}"
    names = sys.argv[1:]
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        if not names or any(path.name.startswith(name) for name in names):
            print(path.name, flush=True)
            execute(path)
    from labkit.paths import home

    for left in (home() / "progress").glob(f"{os.environ['LABKIT_LEARNER']}.json*"):
        left.unlink()
