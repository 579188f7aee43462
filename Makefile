# make setup | demo | quick | test | long | lint | format | docs | faults | audit | clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Number of test processes.
WORKERS ?= 2

# Keep compiled files, or every process of a test run compiles all modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo quick test long lint format docs faults audit clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("tunesmith needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/tunesmith demo

# One thread per worker: two workers with two threads each are slower.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# Further cases of the tests in `make test`, and the notebook.
long: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m long

lint: setup
	$(BIN)/ruff format --check src tests bench
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/python docs/check_prose.py
	$(BIN)/python docs/make_reference.py --check

# Build the documentation site in build/site; warnings are errors.
docs: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

format: setup
	$(BIN)/ruff check --fix --quiet src tests bench
	$(BIN)/ruff format src tests bench

# While you work: unit tests without those that train whole runs.
quick: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m 'not trains and not slow and not long' tests/unit

# Over an hour: the fault tests at full size, then the comparison of docs/research/faults.md.
faults: setup
	TUNESMITH_FAULT_TRIALS=full $(BIN)/python -m pytest -m '' tests/faults
	$(BIN)/python bench/fault_table.py --output docs/research/measurements/faults.json

# Needs network access. --strict: a package that can't be looked up is a failure.
audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet pip-audit
	build/audit/bin/pip-audit --strict --no-deps --requirement constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
