# Two commands: `make demo` shows what it does, `make test` shows that it is right.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint types bench clean
.DEFAULT_GOAL := demo

demo: $(READY)
	$(BIN)/letkd demo

test: $(READY) lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(READY)
	$(BIN)/python benchmarks/step.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
