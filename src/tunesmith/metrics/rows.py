"""Predictions and references as the metrics want them: numpy, checked, unlabelled rows taken out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from tunesmith.errors import DataError
from tunesmith.labels import UNLABELLED, Task, choose_labels

Array = npt.NDArray[Any]
Scale = Literal["logits", "probabilities"]

IGNORED_LABELS = (UNLABELLED, -100)
"""-1 as in GLUE test splits, -100 as in torch's cross entropy."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Labelled rows only. `decisions` are ids, 0/1 vectors or predicted values; `probabilities` is None without scores.

    `sound` is False when a score is NaN: no metric is then a fact.
    """

    references: Array
    decisions: Array
    probabilities: Array | None
    sound: bool = True

    def __len__(self) -> int:
        return len(self.references)


def mean_ranks(values: Array) -> Array:
    """The rank of each value, from 1; equal values have the mean of theirs. scipy's takes a second to import."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Array = (counts.cumsum() - (counts - 1) / 2)[group]
    return ranks


def to_numpy(values: Any) -> Array:
    """An array of numbers from a list, an array or a tensor of any device (duck-typed: torch is not imported)."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if "bfloat16" in str(getattr(values, "dtype", "")):
            values = values.float()
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "biuf":
        raise DataError(f"metrics need numbers, got {array.dtype} ({array.ravel()[0]!r}, ...)", fix="Pass label ids.")
    return array.astype(np.float64) if array.dtype.kind == "f" or not array.size else array


def make_rows(
    predictions: Any,
    references: Any,
    *,
    task: Task,
    scores: Scale = "logits",
    thresholds: Sequence[float] | None = None,
    decisions: Any = None,
) -> Rows:
    """Rows with a label, in input order. Lengths, shapes and label ranges that do not fit are a DataError.

    `decisions` are the labels that were given to the rows, all labelled, where not the largest score decided.
    """
    rows = _rows_of(predictions, references, task, scores, thresholds)
    return rows if decisions is None or task is Task.REGRESSION else replace(rows, decisions=np.asarray(decisions))


def _rows_of(predictions: Any, references: Any, task: Task, scores: Scale, thresholds: Sequence[float] | None) -> Rows:
    predicted, expected = to_numpy(predictions), to_numpy(references)
    if len(predicted.shape) == 0 or len(expected.shape) == 0 or len(predicted) != len(expected):
        raise DataError(
            f"predictions have shape {predicted.shape}, references {expected.shape}",
            fix="Give one prediction a reference.",
        )
    if task is Task.REGRESSION:
        return _value_rows(predicted, expected)
    if task is Task.MULTILABEL:
        return _multilabel_rows(predicted, expected, scores, thresholds)
    rows = _class_rows(predicted, expected, scores, limit=2 if task is Task.BINARY else None)
    if thresholds is None or rows.probabilities is None:
        return rows
    return replace(rows, decisions=choose_labels(rows.probabilities, task, thresholds))


def softmax(logits: Array) -> Array:
    """Probabilities along the last axis; safe for large logits."""
    with np.errstate(invalid="ignore"):
        shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: Array = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def sigmoid(logits: Array) -> Array:
    """Probability of 1; safe for large logits."""
    result: Array = 0.5 * (1.0 + np.tanh(0.5 * logits))
    return result


def _class_rows(predicted: Array, expected: Array, scores: Scale, *, limit: int | None) -> Rows:
    expected = _ids(_flat(expected), "reference")
    predicted = _flat(predicted)
    keep = ~np.isin(expected, IGNORED_LABELS)
    predicted, expected = predicted[keep], expected[keep]
    sound = not np.isnan(predicted).any()
    probabilities = None
    if predicted.ndim == 2:
        outputs = predicted.shape[1]
        limit = limit if limit is not None and outputs == limit else outputs
        decisions = predicted.argmax(axis=1) if len(predicted) else np.zeros(0, np.int64)
        if sound and len(predicted):
            probabilities = (
                softmax(predicted.astype(np.float64)) if scores == "logits" else predicted.astype(np.float64)
            )
    elif not sound:
        decisions = np.zeros(len(predicted), np.int64)
    else:
        decisions = _ids(predicted, "prediction")
    for what, ids in (("reference", expected), ("prediction", decisions)):
        if len(ids) and (ids.min() < 0 or (limit is not None and ids.max() >= limit)):
            bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
            top = f"0 to {limit - 1}" if limit is not None else "0 or more"
            raise DataError(f"{what} {bad} is not a label id ({top}; -1 = unlabelled)")
    return Rows(expected, decisions, probabilities, sound)


def _multilabel_rows(
    predicted: Array, expected: Array, scores: Scale, thresholds: Sequence[float] | None = None
) -> Rows:
    if predicted.shape != expected.shape or expected.ndim != 2:
        if expected.size == 0:
            return Rows(np.zeros((0, 1), np.int64), np.zeros((0, 1), np.int64), None)
        raise DataError(f"a multilabel task needs (rows, labels) twice, got {predicted.shape} and {expected.shape}")
    keep = ~(np.isnan(expected).any(axis=1) | (expected < 0).any(axis=1))
    predicted, expected = predicted[keep], expected[keep]
    if not np.isin(expected, (0, 1)).all():
        raise DataError("multilabel references must be 0 or 1")
    expected = expected.astype(np.int64)
    if predicted.dtype.kind in "biu":
        return Rows(expected, (predicted > 0).astype(np.int64), None)
    probabilities = sigmoid(predicted) if scores == "logits" else predicted
    chosen = choose_labels(probabilities, Task.MULTILABEL, thresholds).astype(np.int64)
    return Rows(expected, chosen, probabilities, not np.isnan(predicted).any())


def _value_rows(predicted: Array, expected: Array) -> Rows:
    predicted, expected = _flat(predicted).astype(np.float64), _flat(expected).astype(np.float64)
    if predicted.ndim != 1 or expected.ndim != 1:
        raise DataError(f"a regression task needs one value a row, got {predicted.shape} and {expected.shape}")
    keep = ~np.isnan(expected)
    predicted, expected = predicted[keep], expected[keep]
    return Rows(expected, predicted, None, bool(np.isfinite(predicted).all() and np.isfinite(expected).all()))


def _flat(array: Array) -> Array:
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _ids(array: Array, what: str) -> Array:
    if array.ndim != 1:
        raise DataError(f"{what}s must be one label id a row, got shape {array.shape}")
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), UNLABELLED, array)
        if (array != np.round(array)).any():
            raise DataError(f"{what}s must be label ids or (rows, classes) scores, got fractions in one column")
    result: Array = array.astype(np.int64)
    return result
