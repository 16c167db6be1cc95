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
    """load and simulate are functions, and there are files load.py and simulate.py."""
    code = "import labkit.engine.load, labkit.engine.simulate; from labkit.engine import load, simulate, LLM; "
    modules = loaded_by(code + "assert callable(load) and callable(simulate), (load, simulate)")
    assert "labkit.engine.load" in modules and "labkit.engine.simulate" in modules
