#!/bin/sh
# The fault tests at their published sizes, then docs/research/faults.md from what they found. About an hour and a half on 2 cores.
# Needs strace and root (disk and owner tests skip without). Run from the root of the checkout.
set -e
python="${PYTHON:-.venv/bin/python}"
mkdir -p build
TUNESMITH_FAULT_TRIALS="${TUNESMITH_FAULT_TRIALS:-full}" "$python" -m pytest -m '' -p no:cacheprovider tests/faults \
    --ignore=tests/faults/test_bad_data.py --junitxml=build/faults.xml || failed=1
"$python" tests/faults/fuzz.py --cases "${TUNESMITH_FUZZ_CASES:-10000}" --seed 0 || failed=1
"$python" bench/fault_table.py --junit build/faults.xml --write docs/research/faults.md
exit "${failed:-0}"
