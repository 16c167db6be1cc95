"""Which room may lean on which, as the design says; and what importing a room must not load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = {"labkit.paths", "labkit.errors"}
MAY_IMPORT = {
    "kernels": {"kernels"},
    "labkit/hardware": {"labkit.hardware"},
    "labkit/analysis": {"labkit.analysis", "labkit.hardware", "kernels"},
    "labkit/measure": {"labkit.measure", "labkit.hardware", "labkit.analysis", "kernels"},
    "labkit/quant": {"labkit.quant", "kernels"},
    "labkit/engine": {"labkit.engine", "labkit.quant", "kernels"},
    "labkit/bench": {
        *("labkit.bench", "labkit.engine", "labkit.measure", "labkit.analysis", "labkit.hardware", "kernels")
    },
    "solutions": {"solutions", "kernels"},
}
FILES = [(room, path) for room in MAY_IMPORT for path in sorted((ROOT / room).rglob("*.py"))]


def project_imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide which room is meant"
            # `from labkit import paths` names the module labkit.paths
            found |= {f"labkit.{a.name}" for a in node.names} if node.module == "labkit" else {node.module}
    return {name for name in found if name.split(".")[0] in ("labkit", "kernels", "solutions", "tests")}


@pytest.mark.parametrize(("room", "path"), FILES, ids=[str(p.relative_to(ROOT)) for _, p in FILES])
def test_a_room_imports_only_what_it_may(room, path):
    allowed = MAY_IMPORT[room] | (SHARED if room.startswith("labkit") else set())
    bad = {n for n in project_imports(path) if not any(n == a or n.startswith(a + ".") for a in allowed)}
    assert not bad, f"{path.relative_to(ROOT)} may not import {sorted(bad)}"


def test_the_rule_can_fail(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("from labkit.course import check\nfrom labkit import cli\nimport kernels.op")
    assert project_imports(path) == {"labkit.course", "labkit.cli", "kernels.op"}


def test_the_engine_loads_no_figures_and_no_widgets():
    heavy = "'matplotlib', 'ipywidgets', 'transformers'"
    code = f"import sys, labkit, labkit.engine; print(*[m for m in ({heavy}) if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    assert out.strip() == ""


def test_every_public_name_is_there():
    import labkit

    for name in labkit.__all__:
        assert getattr(labkit, name) is not None
    with pytest.raises(AttributeError, match="it offers"):
        labkit.nonsense  # noqa: B018


def test_measure_can_be_called_whether_or_not_its_package_was_loaded_first():
    for first in ("import labkit.measure", "pass"):
        code = f"{first}; import labkit as lab; lab.measure('no/such', None)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert "LabError" in done.stderr and "not callable" not in done.stderr
