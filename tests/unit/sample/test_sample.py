"""The bundled sample data is complete and balanced, has no leaks, and can't be solved by counting shared words."""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tunesmith.sample import SPLITS, sample_file

BENCH = Path(__file__).resolve().parents[3] / "bench"
Row = dict[str, str]


def load_bench(name: str) -> ModuleType:
    """Import a module of the bench folder, which is not a package."""
    spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read(split: str) -> list[Row]:
    """Return the rows of one split."""
    with sample_file(split).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    """Return all rows by split."""
    return {split: read(split) for split in SPLITS}


def sentences(rows: list[Row]) -> set[str]:
    """Return the distinct sentences of some rows, in lower case with single spaces."""
    return {" ".join(row[side].casefold().split()) for row in rows for side in ("sentence1", "sentence2")}


def overlap_data(rows: dict[str, list[Row]], overlap: ModuleType, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return overlap features and 0/1 targets of a split."""
    pairs = [(row["sentence1"], row["sentence2"]) for row in rows[split]]
    return overlap.overlap_features(pairs), np.asarray([int(row["label"] == "equivalent") for row in rows[split]])


def test_sentences_do_not_cross_splits(rows: dict[str, list[Row]]) -> None:
    train, validation, test = (sentences(rows[split]) for split in SPLITS)
    assert not train & validation
    assert not train & test
    assert not validation & test


@pytest.mark.parametrize("split", SPLITS)
def test_both_labels_are_equally_frequent(rows: dict[str, list[Row]], split: str) -> None:
    counts = Counter(row["label"] for row in rows[split])
    assert set(counts) == {"equivalent", "not_equivalent"}
    assert counts["equivalent"] == counts["not_equivalent"]


def test_csv_files_match_the_authored_groups(rows: dict[str, list[Row]]) -> None:
    builder = load_bench("build_sample")
    for split, pairs in builder.build().items():
        assert sample_file(split).read_bytes() == builder.to_csv(pairs).encode()


def test_word_overlap_baseline_is_below_seventy_percent(rows: dict[str, list[Row]]) -> None:
    overlap = load_bench("word_overlap")
    train, test = overlap_data(rows, overlap, "train"), overlap_data(rows, overlap, "test")
    threshold, _, _ = overlap.best_threshold(train, test)
    assert threshold < 0.70
    assert overlap.logistic_accuracy(train, test) < 0.70


def test_unknown_split_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="dev"):
        sample_file("dev")
