"""Uninterrupted runs of the engine and of the command, for comparison with interrupted runs."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from faults.trials import Ended, clean, cli, damaged_checkpoints, engine, fingerprint, leftovers, memory_folder, run
from tunesmith.runs.folder import RunDir


@dataclass
class Bench:
    """Fingerprint and duration of the uninterrupted run of the engine."""

    root: Path
    whole: dict[str, Any]
    seconds: float

    def seconds_now(self) -> float:
        """Return the duration of the uninterrupted run under the current load."""
        ended = engine(self.root / "timed")
        clean(self.root / "timed")
        return ended.seconds[0]

    def same_after_kill(self, folder: Path, **options: Any) -> None:
        """Assert that no published folder is damaged and that the run resumes identically."""
        assert damaged_checkpoints(folder) == [], options.get("where")
        self.same_as_whole(folder, **options)

    def same_as_whole(self, folder: Path, *, whole: Any = None, where: str = "", **options: Any) -> None:
        """Resume the run, assert that it is bit-identical to the uninterrupted one, and remove it."""
        ended = engine(folder, options=options)
        assert ended.code == 0, f"{where}: {ended.log[-2000:]}"
        assert fingerprint(folder) == (whole or self.whole), where
        assert leftovers(folder) == [], where
        clean(folder)


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    root = memory_folder("engine", tmp_path_factory.mktemp("faults"))
    try:
        ended = engine(root / "whole")
        assert ended.code == 0, ended.log
        yield Bench(root, fingerprint(root / "whole"), ended.seconds[0])
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def folder(bench: Bench, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return a run folder that is removed after the test."""
    path = bench.root / f"run-{os.getpid()}-{abs(hash(request.node.nodeid))}"
    yield path
    clean(path)


@dataclass
class Lab:
    """Data files, a tiny model and the uninterrupted run of the command."""

    root: Path
    whole: dict[str, Any]

    def train(self, run: Path, *more: str, **job: Any) -> Ended:
        """Run `tunesmith train` in a forked child."""
        return cli(*self.words(run, *more), **job)

    def words(self, run: Path, *more: str) -> list[str]:
        """Return the arguments of the command."""
        return [
            *("train", "--train_file", str(self.root / "train.csv"), "--validation_file", str(self.root / "val.csv")),
            *("--model_name_or_path", str(self.root / "model"), "--output_dir", str(run), "--use_cpu"),
            *("--per_device_train_batch_size", "4", "--num_train_epochs", "2", "--learning_rate", "1e-3"),
            *("--load_best_model_at_end", "true"),
            *("--save_strategy", "steps", "--save_steps", "2", "--eval_strategy", "steps", "--eval_steps", "4"),
            *("--cache_dir", str(self.root / "cache"), *more),
        ]

    def same(self, run: Path) -> None:
        """Assert that the run ended like the uninterrupted one."""
        assert fingerprint(run, outcome=False) == self.whole
        assert leftovers(run) == []
        assert RunDir(run).report_file.is_file()


def write_rows(file: Path, rows: int, seed: int) -> None:
    rng = random.Random(seed)
    lines = ["text,label"]
    for _ in range(rows):
        words = [rng.randrange(99) for _ in range(rng.randrange(4, 14))]
        lines.append(f"{' '.join(f'word{w}' for w in words)},{'even' if words[0] % 2 == 0 else 'odd'}")
    file.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = memory_folder("cli", tmp_path_factory.mktemp("cli"))
    try:
        write_rows(root / "train.csv", 48, 1)
        write_rows(root / "val.csv", 20, 2)
        assert run("faults.engine_trial:write_model", str(root / "model")).code == 0
        lab = Lab(root, {})
        ended = lab.train(root / "whole")
        assert ended.code == 0, ended.log[-3000:]
        lab.whole = fingerprint(root / "whole", outcome=False)
        yield lab
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def run_folder(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Path]:
    path = lab.root / f"run-{abs(hash(request.node.nodeid))}"
    yield path
    shutil.rmtree(path, ignore_errors=True)
