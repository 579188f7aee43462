# make setup | demo | quick | test | long | lint | format | docs | faults | audit | clean
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# Test processes. Two fill two cores but for the tests that wait (timeouts, kills, sleeps).
WORKERS ?= 2

# Compiled files are kept, whatever the caller's environment says: else each of the many processes of a test run compiles all.
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

# One thread a worker: two workers with two threads each are slower than two with one.
test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

# What `make test` samples: the other cases of its matrices, the notebook.
long: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m long

lint: setup
	$(BIN)/ruff format --check src tests bench
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/python docs/check_prose.py

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

# Half an hour: the fault tests at their published sizes, then docs/research/faults.md.
faults: setup
	sh tests/faults/full.sh

# Needs an advisory index on the network. --strict: a package that cannot be looked up is a failure, not a pass.
audit:
	$(PYTHON) -m venv build/audit
	build/audit/bin/python -m pip install --quiet pip-audit
	build/audit/bin/pip-audit --strict --no-deps --requirement constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
