# The two main commands: `make demo` shows what letkd does, `make test` runs all checks and tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LIGHTNING := $(VENV)/lightning
EXTRAS := .venv-extras
# Compiled files are kept, whatever the environment says: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test quality tests check fast browser test-extras lint types docs wheel-test bench evidence clean
.DEFAULT_GOAL := demo

demo: $(READY)
	$(BIN)/letkd demo

test: $(READY) $(LIGHTNING)/.ready browser
	$(MAKE) --no-print-directory -j 2 quality tests

# One after the other, next to the tests.
quality: $(READY)
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory types
	$(MAKE) --no-print-directory docs
	$(MAKE) --no-print-directory wheel-test

tests: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

# Quick check while working: lint, types and the tests without whole runs, in parallel.
check: $(READY)
	$(MAKE) --no-print-directory -j 3 lint types fast TYPES=src

# The other folders hold slow tests only, and importing them takes seconds.
fast: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not (slow or browser or processes or storm)" \
		tests/unit tests/oracles tests/contracts tests/paper tests/docs

# timm, torchvision and transformers are not installed in the first environment: the core must work, and is tested, without them. Ray,
# MLflow's server and wandb are large.
test-extras: $(EXTRAS)/.ready
	OMP_NUM_THREADS=1 $(EXTRAS)/bin/python -m pytest -q tests/extras

# The tests of the report open it in a real browser; without one, they say how to install it.
browser:
	@if ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get -qq update >/dev/null && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y chromium >/dev/null || true; fi

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

# Everything, or the folders in TYPES.
types: $(READY)
	$(BIN)/pyright --pythonpath $(BIN)/python $(TYPES)

# Warnings are errors, which --quiet would hide; nothing is downloaded. The pages are written to build/site.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Installs and uses the wheel in an environment without the source.
wheel-test: $(READY)
	rm -rf build/wheel
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	$(BIN)/python -m tests.support.wheel build/wheel/*.whl

bench: $(READY)
	for part in step layer teacher cache inference data training fits startup; do $(BIN)/python benchmarks/$$part.py $(BENCH) || exit 1; done

# The smallest pair of docs/evidence.md from official files: make evidence DATA=FOLDER TEACHER=FILE [SEEDS=5] [EPOCHS=6] [ROWS=ce,kd]
evidence: $(READY)
	@$(BIN)/python evidence/run.py --data "$(DATA)" --teacher "$(TEACHER)" --rows "$(ROWS)" \
		$(if $(SEEDS),--seeds $(SEEDS)) $(if $(EPOCHS),--epochs $(EPOCHS))

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $@

# Separate, because only one example needs Lightning: with it comes torchmetrics, which Fabric imports if it is installed, and every
# process of the other tests would take seconds longer to start.
$(LIGHTNING)/.ready: $(READY)
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt --target $(LIGHTNING) --upgrade \
		"pytorch-lightning>=2.4" torchmetrics tqdm pyyaml
	touch $@

$(EXTRAS)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(EXTRAS)
	$(EXTRAS)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,timm,torchvision,transformers,ray,wandb]" mlflow
	touch $@

clean:
	rm -rf $(VENV) $(EXTRAS) build dist .pytest_cache .ruff_cache .import_linter_cache
