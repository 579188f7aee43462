"""Folds of the training rows: each row in one of them, labels spread evenly, equal sentences together."""

from __future__ import annotations

import numpy as np
import pytest
from datasets import Dataset

from tunesmith.data.source import Part
from tunesmith.data.split import draw_fold
from tunesmith.errors import DataError
from tunesmith.labels import Task


def make_part(rows: int, classes: int = 3, repeat: int = 1) -> Part:
    texts = [f"text {i // repeat}" for i in range(rows)]
    labels = [0 if i % 10 else 1 + i % (classes - 1) for i in range(rows)]
    return Part.of(Dataset.from_dict({"text": texts, "labels": labels}))


def test_every_row_is_in_one_fold_and_labels_are_dealt_out_evenly() -> None:
    part = make_part(103)
    held_out = [draw_fold(part, folds=5, fold=k, task=Task.MULTICLASS)[1] for k in range(1, 6)]
    assert sorted(np.concatenate(held_out)) == list(range(103))
    labels = np.asarray(part.labels())
    for label in range(3):
        counts = [int((labels[rows] == label).sum()) for rows in held_out]
        assert max(counts) - min(counts) <= 1, f"label {label}: {counts}"
    train, other = draw_fold(part, folds=5, fold=1, task=Task.MULTICLASS)
    assert sorted([*train, *other]) == list(range(103))


def test_rows_that_share_a_sentence_are_in_one_fold() -> None:
    part = make_part(90, repeat=3)
    for fold in (1, 2, 3):
        _, rows = draw_fold(part, folds=3, fold=fold, task=Task.MULTICLASS, text_columns=("text",))
        assert len(rows) == 3 * len({r // 3 for r in rows})


def test_fewer_rows_than_folds_are_refused() -> None:
    with pytest.raises(DataError, match="4 rows cannot be split into 5 folds"):
        draw_fold(make_part(4), folds=5, fold=1, task=Task.MULTICLASS)
