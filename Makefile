# The course's commands. `make help` lists them.

PYTHON ?= python3
VENV := .venv/bin/python
# Notebooks are verified on the recorded tier, whatever the machine: their stored outputs come from it.
NBVAL := $(VENV) -m pytest -p tests.notebooks.lane --nbval-current-env --nbval-cell-timeout=180 -q notebooks

# Two workers share the cores: with two threads each, torch's threads spin while they wait for one another's turn.
ALONE := OMP_NUM_THREADS=1

# What runs from .venv says what to do where that is missing.
READY := @test -x $(VENV) || { echo "There is no .venv yet: run make setup first."; exit 1; }
# The set-up itself needs Python 3.11; an older one would stop at its syntax.
PYTHON_OK := @$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "Python 3.11 or newer is needed and $(PYTHON) is none: install one and run make with PYTHON=python3.12."; exit 1; }

.PHONY: help setup lab test gpu-test notebooks record doctor lint clean

help:  ## list the commands
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 14

setup:  ## make .venv, install the pinned packages, fetch and verify the model
	$(PYTHON_OK)
	@$(PYTHON) labkit/bootstrap.py

lab:  ## set up and open JupyterLab on lab 00 (PORT=8889 chooses the port)
	$(PYTHON_OK)
	@$(PYTHON) labkit/bootstrap.py lab

test: setup lint  ## set up and run everything that needs no GPU
	$(ALONE) $(VENV) -m pytest -m "not gpu and not serial" -n 2 --dist loadfile -q
	$(VENV) -m pytest -m "serial and not gpu" -q
	$(ALONE) LABKIT_TIER=recorded $(NBVAL) --nbval -n 2 --dist loadscope
	$(ALONE) LABKIT_TIER=recorded LABKIT_SOLUTIONS=1 $(NBVAL) --nbval -n 2 --dist loadscope

gpu-test:  ## on a machine with a GPU: kernels in bf16, timing, and the notebooks with live measurements
	$(READY)
	$(VENV) -m pytest -m gpu -q
	$(NBVAL) --nbval-lax -n 0

notebooks: setup  ## run all notebooks on the recorded tier and store their outputs
	LABKIT_TIER=recorded $(VENV) -m tests.notebooks.execute

record: setup  ## on a machine with a GPU: take the labs' measurements and write its recording
	$(VENV) -m labkit.cli record

doctor:  ## say what this machine can run, and what to do about the rest
	$(READY)
	@$(VENV) -m labkit.cli doctor

lint:  ## check style
	$(READY)
	$(VENV) -m ruff check -q .
	$(VENV) -m ruff format -q --check .

clean:  ## remove .venv and caches (not the model, not your progress)
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build *.egg-info
