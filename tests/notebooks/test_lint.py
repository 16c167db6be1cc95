"""What every notebook must be: readable, tagged, stored with clean outputs, and equal to the course's contract."""

import ast
import re
from pathlib import Path

import nbformat
import pytest

from labkit.course.claims import claims
from labkit.course.exercise import exercises_of
from tests.notebooks.lane import TAGS, class_tag

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
CASES = [pytest.param(p, id=p.name) for p in NOTEBOOKS]
NOISE = {
    "an object's address": r"\b0x[0-9a-f]{8,}",
    "a path of one machine": r"(?<![\w.])/(home|tmp|root|usr|var|work|opt)/",
    "a raw float": r"\d\.\d{9,}",
    "a kernel's temporary file": r"ipykernel_\d+",
}


def problems(notebook) -> list[str]:
    """Everything the contract forbids, with the cell's index."""
    found = []
    if notebook.metadata.get("widgets"):
        found.append("saved widget state")
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        found.append("the kernel must be python3")
    for i, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            found += [
                f"cell {i}: a picture without alt text" for _ in re.findall(r"!\[\]\(|<img(?![^>]*alt=)", cell.source)
            ]
            continue
        if cell.cell_type != "code":
            found.append(f"cell {i}: neither markdown nor code")
            continue
        if not class_tag(cell) or set(cell.metadata.get("tags", [])) - set(TAGS):
            found.append(
                f"cell {i}: needs exactly one of the tags {', '.join(TAGS)}, has {cell.metadata.get('tags', [])}"
            )
        if cell.source.rstrip().endswith(";"):
            found.append(f"cell {i}: ends in ';'")
        if re.search(r"clear_output|display_id|%pip|!pip|NBVAL_", cell.source):
            found.append(f"cell {i}: clear_output, display_id, pip or an nbval comment")
        if cell.execution_count is None:
            found.append(f"cell {i}: was not run")
        found += [f"cell {i}: {problem}" for output in cell.outputs for problem in output_problems(output)]
    return found


def output_problems(output) -> list[str]:
    if output.output_type == "error":
        return [f"stores the error {output.ename}"]
    data = output.get("data", {})
    text = output.get("text", "") + data.get("text/plain", "")
    found = [what for what, pattern in NOISE.items() if re.search(pattern, text)]
    if output.get("name") == "stderr":
        found.append(f"stderr: {text[:60]!r}")
    if "application/vnd.jupyter.widget-view+json" in data:
        found.append("a stored widget view")
    if "image/png" in data and len(output.metadata.get("image/png", {}).get("alt", "")) < 20:
        found.append("a figure without alt text")
    return found


@pytest.mark.parametrize("path", CASES)
def test_the_notebook_is_clean(path):
    assert problems(nbformat.read(path, as_version=4)) == []


@pytest.mark.parametrize("path", CASES)
def test_headings_are_in_order_and_the_first_cell_says_what_comes(path):
    notebook = nbformat.read(path, as_version=4)
    text = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    levels = [len(m) for m in re.findall(r"^(#+) ", text, re.M)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in zip(levels, levels[1:], strict=False)), "a heading level was jumped over"
    first = notebook.cells[0].source
    assert first.startswith("# Lab ") and "you can" in first and "You need" in first
    rows = [int(m) for m in re.findall(r"^\|[^|]*·[^|]*\| (\d+) \|", first, re.M)]
    total = int(re.search(r"in all \| (\d+)", first)[1])
    assert sum(rows) == total and 60 <= total <= 90, "the minutes of the sections must add up"
    headed = {int(n): int(m) for n, m in re.findall(r"^## (\d+) · .*\((\d+) minutes\)", text, re.M)}
    assert list(headed.values()) == rows, "each section's heading repeats its minutes"
    assert "lab.setup(" in next(c.source for c in notebook.cells if c.cell_type == "code")
    for closing in ("## Summary", "What changes in the engine", "When this does not hold", "Where the claims came out"):
        assert closing in text


@pytest.mark.parametrize("path", CASES)
def test_exercises_predictions_widgets_and_claims_are_complete(path):
    notebook = nbformat.read(path, as_version=4)
    lab = path.name[:2]
    code = [c for c in notebook.cells if c.cell_type == "code"]
    source = "\n".join(c.source for c in code)
    text = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    ids = re.findall(r'lab\.check\(\s*"([\d.]+)"', source)
    assert sorted(ids) == sorted(exercises_of(lab)) and len(ids) >= 3
    for id in ids:
        exercise = exercises_of(lab)[id]
        assert re.search(rf"^### Exercise {re.escape(id)} · .+ difficulty [1-5]/5 · \d+ minutes$", text, re.M), (
            f"{id} has no card"
        )
        assert f'lab.solution("{id}")' in text
        stub = next(
            n
            for n in ast.walk(ast.parse(source))
            if isinstance(n, ast.FunctionDef) and n.name == exercise.answer.__name__
        )
        assert tuple(a.arg for a in stub.args.args) == exercise.parameters, (
            f"the stub of {id} has drifted from its answer"
        )
    assert text.count("<summary>Hint 1") == text.count("<summary>Hint 2") == len(ids)
    assert len(set(re.findall(r'lab\.predict\(\s*"([^"]+)"', source))) >= 4
    assert any(class_tag(c) == "widget" for c in code)
    made = re.findall(r'lab\.claim\(\s*"(S\d-\d+)"', source)
    assert sorted(set(made)) == sorted(id for id, row in claims().items() if row["lab"] == f"L{lab}")


@pytest.mark.parametrize("path", CASES)
def test_verdicts_agree_with_what_the_authors_found(path):
    """The claims were checked by hand before; a notebook that decides otherwise computes something wrong."""
    outputs = "".join(
        o.get("text", "") for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code" for o in c.outputs
    )
    for id, verdict in re.findall(r"^(S\d-\d+)  (holds|refuted|open)", outputs, re.M):
        allowed = {"sound": {"holds"}, "wrong": {"refuted"}, "unverif": {"open"}}
        expected = claims()[id]["expected"]
        assert verdict in allowed.get(expected, {"holds", "refuted", "open"}), (
            f"{id} is {expected}, the notebook says {verdict}"
        )


def test_the_lint_can_fail():
    bad = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x;", metadata={"tags": ["chek"]})])
    bad.metadata["widgets"] = {"a": 1}
    bad.cells[0].outputs = [
        nbformat.v4.new_output("stream", text="<object at 0x7f12345678ab> 0.12345678901 in /home/me")
    ]
    assert len(problems(bad)) == 8, problems(bad)


def test_there_are_notebooks():
    assert NOTEBOOKS
