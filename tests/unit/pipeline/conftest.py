"""A tiny model folder, and a function that trains it without files outside tmp_path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiny_model import mood, save_tiny_bert, write_csv
from tunesmith.pipeline.results import RunResult
from tunesmith.pipeline.train import RunObserver, finetune


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an encoder without head and dropout, so that equivalent computations can be compared."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    return save_tiny_bert(folder, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache of tables and tokens for the whole session."""
    return tmp_path_factory.mktemp("cache")


Train = Callable[..., tuple[RunResult, list[str]]]


@pytest.fixture
def train(tiny: Path, cache: Path, tmp_path: Path) -> Train:
    """Return a function that runs `finetune` with a tiny model and returns the result and its messages."""

    def run(**options: Any) -> tuple[RunResult, list[str]]:
        said: list[str] = []
        defaults: dict[str, Any] = {
            "model_name_or_path": tiny,
            "output_dir": tmp_path / "run",
            "cache_dir": cache,
            "use_cpu": True,
            "max_steps": 4,
            "learning_rate": 1e-3,
            "train_sample_size": 16,
        }
        return finetune(observer=RunObserver(log=said.append), **{**defaults, **options}), said

    return run


@pytest.fixture(scope="session")
def trained(tiny: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run of two steps with labels good and bad and the text column text."""
    folder = tmp_path_factory.mktemp("trained")
    file = write_csv(folder / "train.csv", mood())
    options: dict[str, Any] = {"model_name_or_path": tiny, "cache_dir": cache, "use_cpu": True, "max_steps": 2}
    return finetune(train_file=file, output_dir=folder / "run", **options).run.path
