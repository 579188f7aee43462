"""Evaluation examples survive encoding as one line of text; the constant baseline is optimal."""

from __future__ import annotations

import numpy as np
import pytest

from tunesmith.errors import DataError
from tunesmith.labels import Task
from tunesmith.metrics.evidence import (
    LEAST_ROWS,
    MOST_ROWS,
    BestConstant,
    decode_rows,
    describe_constant,
    encode_rows,
    infer_task,
    keep_rows,
    row_losses,
    rows_to_keep,
)
from tunesmith.metrics.table import make_suite

WIDTH = {Task.BINARY: 2, Task.MULTICLASS: 7, Task.MULTILABEL: 11, Task.REGRESSION: 1}


def make_labels(task: Task, rows: int, seed: int = 0) -> np.ndarray:
    draw, width = np.random.default_rng(seed), WIDTH[task]
    if task is Task.REGRESSION:
        return draw.normal(3.0, 1.5, rows).astype(np.float32)
    if task is Task.MULTILABEL:
        return (draw.random((rows, width)) < np.linspace(0.1, 0.6, width)).astype(np.float32)
    return draw.choice(width, rows, p=np.arange(1, width + 1) / sum(range(1, width + 1)))


@pytest.mark.parametrize("task", list(Task))
def test_evidence_survives_encoding(task: Task) -> None:
    labels = make_labels(task, 333)
    logits = np.random.default_rng(1).normal(size=(333, WIDTH[task])).astype(np.float32)
    rows = keep_rows(BestConstant.of(task, labels, WIDTH[task]), logits, labels)
    assert rows is not None
    back = decode_rows(encode_rows(rows))
    assert back.constant == rows.constant
    assert (back.n, len(back)) == (333, 333)
    np.testing.assert_array_equal(back.predictions, rows.predictions.astype(np.float32))
    np.testing.assert_allclose(back.loss, row_losses(task, logits, labels), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(back.score_parts()[1].mean(), rows.score_parts()[0], rtol=1e-6)


@pytest.mark.parametrize("task", list(Task))
def test_constant_baseline_has_the_lowest_loss(task: Task) -> None:
    labels = make_labels(task, 500)
    best = BestConstant.of(task, labels, WIDTH[task])
    cost = row_losses(task, best.logits(500), labels).mean()
    for seed in range(20):
        logits = best.logits(500) + np.random.default_rng(seed).normal(0, 0.3, WIDTH[task])
        assert row_losses(task, logits, labels).mean() > cost - 1e-4


def test_constant_baseline_reports_metrics_and_errors() -> None:
    labels = np.array([0] * 60 + [1] * 40)
    found = describe_constant(BestConstant.of(Task.BINARY, labels, 2), labels, make_suite(Task.BINARY))
    assert found["metrics"]["accuracy"] == 0.6
    assert found["errors"]["accuracy"] == pytest.approx(0.049, abs=0.003)
    assert found["metrics"]["loss"] == pytest.approx(0.673, abs=0.001)


def test_large_splits_keep_same_labeled_subset() -> None:
    labels = make_labels(Task.MULTICLASS, 50_000)
    labels[::3] = -1
    constant = BestConstant.of(Task.MULTICLASS, labels, 7)
    draw = np.random.default_rng(2)
    kept = [keep_rows(constant, draw.normal(size=(50_000, 7)), labels) for _ in range(2)]
    assert kept[0] is not None
    assert kept[1] is not None
    assert len(kept[0]) == MOST_ROWS
    assert (kept[0].labels >= 0).all()
    assert (kept[0].labels == kept[1].labels).all()
    assert len(encode_rows(kept[0])) < 12_000
    assert (rows_to_keep(5), rows_to_keep(10**6)) == (MOST_ROWS, LEAST_ROWS)
    assert keep_rows(constant, np.zeros((4, 7)), np.full(4, -1)) is None


@pytest.mark.parametrize("text", ["", "no rows", "c$@(M4E0000", encode_rows.__doc__ or ""])
def test_malformed_evidence_raises_data_error(text: str) -> None:
    with pytest.raises(DataError):
        decode_rows(text)


def test_task_is_inferred_from_array_shapes() -> None:
    ids, values = np.array([0, 1, 1]), np.array([0.5, 1.5, 2.0])
    assert infer_task(np.zeros((3, 2)), ids) is Task.BINARY
    assert infer_task(np.zeros((3, 4)), ids) is Task.MULTICLASS
    assert infer_task(np.zeros((3, 1)), values) is Task.REGRESSION
    assert infer_task(np.zeros((3, 2)), np.array([[0, 1], [1, 1], [0, 0]])) is Task.MULTILABEL
    assert infer_task(np.zeros((3, 5, 9)), np.zeros((3, 5), int)) is None
    assert infer_task(np.zeros((3, 2)), values) is None
