"""Fixtures for all tests: tiny models and token rows that need no network, and the folder ../shared."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from pictures import DRAWN, blank_pictures

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers with two threads each are slower than with one

IN_MEMORY = Path("/dev/shm")
"""Folder for temporary files if it has space: an fsync takes 0.1 ms instead of 2 to 15 ms, and a checkpoint needs a dozen."""
if os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

# A shell script ignores SIGINT in its background jobs, and the commands that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("no deadline", deadline=None)  # the default of 200 ms per example fails on busy machines
settings.load_profile("no deadline")

SHARED = Path(__file__).resolve().parents[2] / "shared"
TRAINS = (
    *("unit/inference/", "unit/pipeline/", "unit/trainer/", "unit/tuning/"),
    *("unit/test_estimators.py", "unit/test_finetune_data.py", "unit/training/test_resume.py"),
    *("unit/cli/test_audit.py", "unit/cli/test_folders.py", "unit/cli/test_new_user.py", "unit/cli/test_segments.py"),
    *("unit/data/test_tokenize.py", "unit/speedups/test_verify.py"),
)
"""Unit tests that take seconds, mostly because they train: part of `make test`, not of `make quick`."""
LONGEST = ("kernels/", "docs/test_wheel.py", "docs/test_docs.py", "equivalence/test_trainer_scripts.py", "distributed/")
"""The slowest tests, which start first so that both workers are busy until the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of `TRAINS`; put the slowest first."""
    for item in items:
        if place_of(item).startswith(TRAINS):
            item.add_marker("trains")
    items.sort(key=lambda item: not place_of(item).startswith(LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """Import modules without garbage collection: their objects stay, and scanning them repeatedly takes seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude imported modules from garbage collection, and skip the full collection after each run of transformers' Trainer.

    Together this saves three quarters of the CPU time of tests that train tiny models.
    """
    if memory := sys.modules.get("accelerate.utils.memory"):
        vars(memory)["gc"] = SimpleNamespace(collect=lambda: 0)
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Undo `gc.freeze`: some modules complain about leftovers at exit."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Run before all fixtures."""
    blank_pictures(not place_of(item).startswith(DRAWN))


def place_of(item: pytest.Item) -> str:
    """Return the path of a test file relative to this folder."""
    return item.path.relative_to(Path(__file__).resolve().parent).as_posix()


@pytest.fixture(autouse=True)
def library_log_levels() -> None:
    """Reset the log levels of libraries, which the command line changes."""
    for name in ("transformers", "datasets"):
        logging.getLogger(name).setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return ../shared (MRPC, TREC, small checkpoints), or skip the test if it is missing."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs ../shared (data and checkpoints of the development machines)")
    return SHARED


def tiny_bert(seed: int = 0, dropout: float = 0.0, num_labels: int = 2, layers: int = 2) -> Any:
    """Return a BERT classifier with random weights, 32 dimensions wide."""
    from transformers import BertConfig, BertForSequenceClassification, set_seed

    set_seed(seed)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=160,
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            num_labels=num_labels,
        )
    )


def token_lists(rows: int, seed: int = 0, num_labels: int = 2, longest: int = 20) -> dict[str, list[Any]]:
    """Return random token rows; the second token determines the label."""
    rng = np.random.default_rng(seed)
    ids, types, labels = [], [], []
    for _ in range(rows):
        length = int(rng.integers(4, longest))
        row = [1, *rng.integers(3, 99, length).tolist(), 2]
        ids.append(row)
        types.append([0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2))
        labels.append(int(row[1]) % num_labels)
    return {"input_ids": ids, "token_type_ids": types, "labels": labels}


@pytest.fixture(scope="session")
def synthetic() -> Any:
    """Return the module tests/synthetic_runs.py."""
    import synthetic_runs

    return synthetic_runs
