"""The notebook lane: nbval with its traps disarmed, and the class tags of cells put to work.

Used as a pytest plugin (``-p tests.notebooks.lane``). Each code cell carries one class tag:

=========  ==================================  =========================================
tag        strict lane (recorded tier)         lax lane (GPU)
=========  ==================================  =========================================
check      compared                            compared
live       compared: replays are exact         run, not compared
widget     compared (words, not the picture)   run, not compared
exercise   compared                            run, not compared
=========  ==================================  =========================================

With ``LABKIT_SOLUTIONS=1`` the worked answers take the place of the stubs in exercise cells, and instead of being
compared, every check in them must pass.
"""

from __future__ import annotations

import ast
import os
import re
import time
from pathlib import Path
from queue import Empty

import nbval.kernel
import nbval.plugin
import pytest

SOLUTIONS = os.environ.get("LABKIT_SOLUTIONS") == "1"
LEARNER = f"nbval-{os.getpid()}"
TAGS = ("check", "live", "widget", "exercise")


def pytest_configure(config):
    os.environ["LABKIT_LEARNER"] = LEARNER  # the machine's owner keeps their own progress
    os.environ["PYTHONHASHSEED"] = "0"


def pytest_unconfigure(config):
    from labkit.paths import home

    for path in (home() / "progress").glob(f"{LEARNER}.json*"):
        path.unlink(missing_ok=True)


def class_tag(cell) -> str:
    tags = [t for t in cell.metadata.get("tags", []) if t in TAGS]
    return tags[0] if len(tags) == 1 else ""


def with_solutions(source: str, module: str) -> str:
    """An exercise cell in which each top-level function that ``module`` solves is imported from there."""
    import importlib

    solved = set(dir(importlib.import_module(module)))
    lines = source.splitlines()
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.FunctionDef) and node.name in solved:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lines[first - 1 : node.end_lineno] = [f"from {module} import {node.name}"]
    return "\n".join(lines)


def pytest_collection_modifyitems(items):
    for item in items:
        if not isinstance(item, nbval.plugin.IPyNbCell):
            continue
        tag = class_tag(item.cell)
        if item.config.option.nbval_lax:
            item.options["check"] = tag == "check"
        if SOLUTIONS and tag == "exercise":
            lab = re.match(r"\d\d", Path(str(item.fspath)).name)[0]
            item.cell.source = with_solutions(item.cell.source, f"solutions.lab{lab}")


_compare = nbval.plugin.IPyNbCell.compare_outputs


def _compare_or_demand_passes(self, test, ref, skip_compare=None):
    if not (SOLUTIONS and class_tag(self.cell) == "exercise"):
        return _compare(self, test, ref, skip_compare)
    printed = "".join(o.get("text", "") for o in test)
    lines = [line for line in printed.splitlines() if re.match(r"\d\d\.\d", line)]
    failed = [line for line in lines if not re.search(r": passed$|is used from here on$", line)]
    if not lines or failed:
        self.comparison_traceback = ["the worked answer must pass its check; it printed:", printed or "(nothing)"]
    return bool(lines) and not failed


nbval.plugin.IPyNbCell.compare_outputs = _compare_or_demand_passes


# nbval runs the cells after a failed one too: one fault becomes a page of NameErrors. Here the rest is skipped.
_runtest = nbval.plugin.IPyNbCell.runtest


def _run_unless_failed(self):
    earlier = getattr(self.parent, "failed_cell", None)
    if earlier is not None:
        pytest.skip(f"cell {earlier} failed before it")
    try:
        _runtest(self)
    except BaseException:
        self.parent.failed_cell = self.cell_num
        raise


nbval.plugin.IPyNbCell.runtest = _run_unless_failed


# A kernel that died (a segfault, out of memory) would cost the whole cell timeout; here it is noticed within a second.
def _await_reply(self, msg_id, timeout=None):
    end = time.monotonic() + (timeout or 600)
    while True:
        try:
            message = self.get_message(stream="shell", timeout=1)
        except Empty:
            if not self.is_alive():
                raise RuntimeError("the notebook's kernel died while running this cell") from None
            if time.monotonic() > end:
                raise
            continue
        if message["parent_header"].get("msg_id") == msg_id:
            return


nbval.kernel.RunningKernel.await_reply = _await_reply


# Without history IPython cannot see a trailing ";", and prints what Jupyter would have kept quiet.
def _execute(self, cell_input, allow_stdin=None):
    return self.kc.execute(cell_input, store_history=True, allow_stdin=allow_stdin, stop_on_error=False)


nbval.kernel.RunningKernel.execute_cell_input = _execute

# ipykernel does not capture C-level output when it sees PYTEST_CURRENT_TEST, so the kernel must not inherit it.
_start = nbval.kernel.start_new_kernel


def _start_clean(*args, **kwargs):
    current = os.environ.pop("PYTEST_CURRENT_TEST", None)
    try:
        return _start(*args, **kwargs)
    finally:
        if current is not None:
            os.environ["PYTEST_CURRENT_TEST"] = current


nbval.kernel.start_new_kernel = _start_clean
