"""Importing the engine is cheap: nothing of the notebook, nothing of the oracle."""

import json
import subprocess
import sys

HEAVY = ("matplotlib", "ipywidgets", "transformers", "IPython")


def loaded_by(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys, json; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout))


def test_importing_the_engine_loads_no_notebook_library():
    modules = loaded_by("import labkit.engine")
    assert "labkit.engine" in modules and not modules & {*HEAVY, "torch"}


def test_using_every_name_loads_none_either():
    modules = loaded_by("import labkit.engine as e; [getattr(e, name) for name in e.__all__]")
    assert {"labkit.engine.loader", "torch"} <= modules and not modules & set(HEAVY)


def test_a_name_stays_what_it_is_when_a_file_of_that_name_is_imported():
    """simulate is a function, and there is a file simulate.py."""
    code = "import labkit.engine.simulate; from labkit.engine import simulate; "
    assert "labkit.engine.simulate" in loaded_by(code + "assert callable(simulate), simulate")


def test_the_control_half_comes_without_torch():
    """Scheduling and simulation are plain Python, for a machine that has nothing else."""
    names = (
        "Scheduler, BlockPool, Trace, TraceView, simulate, CostModel, Arrival, poisson_load, gamma_load, on_off_load"
    )
    modules = loaded_by(f"from labkit.engine import {names}, replayed_load, with_lengths, with_priorities")
    assert "labkit.engine.scheduler" in modules and "torch" not in modules
