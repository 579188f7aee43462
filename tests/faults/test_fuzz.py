"""A seeded subset of the fuzzer; `python tests/faults/fuzz.py --cases 10000 --seed 0` runs as many as wanted."""

from __future__ import annotations

import os
import random
import subprocess
from pathlib import Path

import pytest

from faults.hostile import dump_json, mutate, mutate_tree
from faults.trials import size
from warm import ENVIRONMENT, warm_python

FUZZ = Path(__file__).with_name("fuzz.py")


@pytest.mark.slow
def test_hostile_folders_and_files_end_with_a_code_of_the_table_and_touch_nothing_else(tmp_path: Path) -> None:
    """Each failure is printed with its case: `fuzz.py --case SEED:NUMBER` repeats it."""
    seed = os.environ.get("TUNESMITH_FAULT_SEED", "ci")
    words = [warm_python(), str(FUZZ), "--cases", str(size(full=2000, ci=50)), "--seed", seed]
    drawn = ENVIRONMENT | {"BLANK_PICTURES": ""}
    done = subprocess.run(words, cwd=tmp_path, env=drawn, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_case_is_made_by_its_seed_alone(tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        rng = random.Random("0:17")
        folder = tmp_path / name
        folder.mkdir()
        for k in range(60):
            file = folder / f"{k}.jsonl"
            file.write_bytes(dump_json(mutate_tree(rng, {"event": "StepDone", "loss": 0.5})) + b"\n")
            mutate(file, rng, tmp_path)
        made.append([(p.name, p.is_symlink(), p.is_file() and p.stat().st_size) for p in sorted(folder.iterdir())])
    assert made[0] == made[1]
