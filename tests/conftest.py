"""Fixtures shared by all tests: tiny models and rows that need no network, and the shared folder beside the checkout."""

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
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two workers with two threads each are slower than two with one

IN_MEMORY = Path("/dev/shm")
"""A kill sees the page cache either way; here an fsync takes 0.1 ms, on a disk 2 to 15, and a checkpoint makes a dozen."""
if os.access(IN_MEMORY, os.W_OK) and shutil.disk_usage(IN_MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(IN_MEMORY))

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # in the background of a script; commands that tests start inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("busy machines", deadline=None)  # a limit of 200 ms an example says how busy the machine is
settings.load_profile("busy machines")

SHARED = Path(__file__).resolve().parents[2] / "shared"
TRAINS = (
    *("unit/inference/", "unit/pipeline/", "unit/trainer/", "unit/tuning/"),
    *("unit/test_estimators.py", "unit/test_finetune_data.py", "unit/training/test_resume.py"),
    *("unit/cli/test_audit.py", "unit/cli/test_folders.py", "unit/cli/test_new_user.py", "unit/cli/test_segments.py"),
    *("unit/data/test_tokenize.py", "unit/speedups/test_verify.py"),
)
"""Unit tests that train whole runs, or take seconds for other reasons: `make quick` leaves them to `make test`."""
LONGEST = ("kernels/", "docs/test_wheel.py", "docs/test_docs.py", "equivalence/test_trainer_scripts.py", "distributed/")
"""Tests of up to half a minute each: they come first, so that none of them is left for one worker alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of `TRAINS`; puts the longest first."""
    for item in items:
        if place_of(item).startswith(TRAINS):
            item.add_marker("trains")
    items.sort(key=lambda item: not place_of(item).startswith(LONGEST))


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    """While modules are imported: what they make stays, and looking through it again and again takes seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From now on only what tests make is collected, and not after each tiny run of transformers' Trainer."""
    if memory := sys.modules.get("accelerate.utils.memory"):
        vars(memory)["gc"] = SimpleNamespace(collect=lambda: 0)
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """The modules end as they would have: some complain of what is left over."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures of a test, those of its module among them."""
    blank_pictures(not place_of(item).startswith(DRAWN))


def place_of(item: pytest.Item) -> str:
    """The file of a test, below this folder."""
    return item.path.relative_to(Path(__file__).resolve().parent).as_posix()


@pytest.fixture(autouse=True)
def levels_of_libraries() -> None:
    """The command line quietens transformers and datasets, maybe in a fixture of another module; this test hears them."""
    for name in ("transformers", "datasets"):
        logging.getLogger(name).setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def shared() -> Path:
    """../shared with MRPC, TREC and small checkpoints; absent on a user's machine."""
    if not (SHARED / "data").is_dir():
        pytest.skip("needs ../shared (data and checkpoints of the development machines)")
    return SHARED


def tiny_bert(seed: int = 0, dropout: float = 0.0, num_labels: int = 2, layers: int = 2) -> Any:
    """A random BERT classifier of 2 layers and 32 dimensions."""
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
    """Random token rows whose label can be learned: it is the class of the second token."""
    rng = np.random.default_rng(seed)
    ids, types, labels = [], [], []
    for _ in range(rows):
        length = int(rng.integers(4, longest))
        row = [1, *rng.integers(3, 99, length).tolist(), 2]
        ids.append(row)
        types.append([0] * (len(row) // 2) + [1] * (len(row) - len(row) // 2))
        labels.append(int(row[1]) % num_labels)
    return {"input_ids": ids, "token_type_ids": types, "labels": labels}
