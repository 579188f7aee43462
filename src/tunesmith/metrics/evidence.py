"""The constant baseline (one prediction for all examples), and the loss and prediction of each example at one evaluation.

Row evidence is one line of the event log. At most `MOST_ROWS` rows are kept, evenly spread and equal at every evaluation, so
that a difference between two evaluations is a paired difference.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.errors import DataError
from tunesmith.labels import Task
from tunesmith.metrics.table import Array, Suite, sigmoid, softmax


@dataclass(frozen=True, slots=True)
class BestConstant:
    """`values` are class shares, label shares, or the mean of the training labels, with half a row added to each class."""

    task: Task
    values: tuple[float, ...]

    @classmethod
    def of(cls, task: Task, labels: Any, num_labels: int) -> BestConstant:
        """Return the constant with the lowest loss on these labels; unlabeled examples are ignored."""
        known = np.asarray(labels)
        if task is Task.REGRESSION:
            known = known.reshape(-1)[~np.isnan(known.reshape(-1))]
            return cls(task, (float(known.mean()) if len(known) else 0.0,))
        if task is Task.MULTILABEL:
            known = known.reshape(-1, num_labels)
            return cls(task, tuple(((known.sum(axis=0) + 0.5) / (len(known) + 1)).tolist()))
        counts = np.bincount(known[known >= 0].astype(np.int64), minlength=num_labels) + 0.5
        return cls(task, tuple((counts / counts.sum()).tolist()))

    @property
    def entropy(self) -> float:
        """Return the loss of this constant on rows with exactly these shares; NaN for a mean, whose loss is the variance."""
        p = np.array(self.values)
        if self.task is Task.REGRESSION:
            return math.nan
        if self.task is Task.MULTILABEL:
            return float(-(p * np.log(p) + (1 - p) * np.log1p(-p)).mean())
        return float(-(p * np.log(p)).sum())

    def logits(self, rows: int) -> Array:
        """Return the logits of a model that always predicts this constant."""
        p = np.array(self.values)
        if self.task is Task.MULTILABEL:
            p = np.log(p) - np.log1p(-p)
        elif self.task is not Task.REGRESSION:
            p = np.log(p)
        return np.tile(p, (rows, 1))

    def decision(self) -> Array:
        """Return the class, the value, or the labels (as 0 and 1) with the highest expected micro F1."""
        p = np.array(self.values)
        if self.task is Task.REGRESSION:
            return p
        if self.task is not Task.MULTILABEL:
            return np.array([int(np.argmax(p))])
        order = np.argsort(-p, kind="stable")
        f1 = 2 * np.cumsum(p[order]) / (np.arange(1, len(p) + 1) + p.sum())
        chosen = np.zeros(len(p), np.int64)
        chosen[order[: int(np.argmax(f1)) + 1]] = 1
        return chosen


def describe_constant(constant: BestConstant, labels: Any, suite: Suite) -> dict[str, Any]:
    """Return loss and scores of the constant on these rows, with standard errors if they are defined."""
    labels = np.asarray(labels)
    logits = constant.logits(len(labels))
    found: dict[str, Any] = {"values": list(constant.values), "n": len(labels), "metrics": {}, "errors": {}}
    answers = np.tile(20.0 * constant.decision() - 10, (len(labels), 1)) if constant.task is Task.MULTILABEL else logits
    for name, score in suite.compute_with_intervals(answers, labels).items():
        found["metrics"][name] = score.value
        known = score.low is not None and score.high is not None
        found["errors"][name] = (score.high - score.low) / 3.92 if known else None  # type: ignore[operator]
    losses = row_losses(constant.task, logits, labels)
    losses = losses[np.isfinite(losses)]
    if len(losses) > 1:
        found["metrics"]["loss"] = float(losses.mean())
        found["errors"]["loss"] = float(losses.std(ddof=1) / math.sqrt(len(losses)))
    return found


def row_losses(task: Task, logits: Any, labels: Any) -> Array:
    """Return the loss of each row without class weights or smoothing; NaN for a row without a label."""
    scores, known = np.asarray(logits, np.float64), np.asarray(labels)
    with np.errstate(invalid="ignore", over="ignore"):
        if task is Task.REGRESSION:
            return np.asarray((scores.reshape(-1) - known.reshape(-1)) ** 2, np.float64)
        if task is Task.MULTILABEL:
            parts = np.logaddexp(0.0, scores) - scores * known
            return np.asarray(parts.mean(axis=1), np.float64)
        shifted = scores - scores.max(axis=1, keepdims=True)
        whole = np.log(np.exp(shifted).sum(axis=1))
        labeled = known >= 0
        at = np.where(labeled, known, 0).astype(np.int64)
        return np.where(labeled, whole - shifted[np.arange(len(known)), at], np.nan)


def infer_task(logits: Any, labels: Any) -> Task | None:
    """Return the task of a Trainer's arrays; None if there isn't one output per example."""
    scores, known = np.asarray(logits), np.asarray(labels)
    if scores.dtype.kind not in "fiu" or known.dtype.kind not in "fiub" or len(scores) != len(known) or not len(known):
        return None
    if known.ndim == 2 and known.shape == scores.shape and known.shape[1] > 1:
        return Task.MULTILABEL if np.isin(known, (0, 1)).all() else None
    if known.ndim != 1 or scores.ndim > 2:
        return None
    outputs: Sequence[int] = scores.shape[1:]
    if not outputs or outputs[0] == 1:
        return Task.REGRESSION
    if known.dtype.kind == "f" or known.max() >= outputs[0]:
        return None
    return Task.BINARY if outputs[0] == 2 else Task.MULTICLASS


MOST_ROWS = 1000
"""About 8 kB of text per evaluation."""
LEAST_ROWS = 100
MOST_TEXT = 8_000_000
"""Limit of the text of a run, unless `LEAST_ROWS` need more."""
TEXT_A_ROW = 9
_MOST_BYTES = 64_000_000
"""Limit of a decompressed line, so that a foreign line can't fill the memory."""


@dataclass(frozen=True, slots=True, eq=False)
class RowEvidence:
    """Labeled examples of one evaluation, in input order. `confidence` is that of the predicted class, or of the most probable of
    several labels, negative if the row doesn't have that label; NaN for regression."""

    constant: BestConstant
    labels: Array
    predictions: Array
    loss: Array
    confidence: Array
    n: int
    """Number of rows of the whole split."""

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def task(self) -> Task:
        """The task of the rows."""
        return self.constant.task

    @property
    def hits(self) -> Array:
        """Return whether the predicted class (or the most probable label) is correct."""
        return self.confidence > 0 if self.task is Task.MULTILABEL else self.predictions == self.labels

    @property
    def constant_loss(self) -> Array:
        """Return the loss of the constant baseline per row."""
        return row_losses(self.task, self.constant.logits(len(self)), self.labels)

    def score_parts(self, predictions: Array | None = None) -> tuple[float, Array]:
        """Return accuracy, micro F1 or Pearson's r, and the influence of each row, whose mean is the score."""
        given = self.predictions if predictions is None else predictions
        if self.task is Task.REGRESSION:
            return _correlation_parts(self.labels, given)
        if self.task is Task.MULTILABEL:
            top = 2 * (given * self.labels).sum(axis=1)
            bottom = given.sum(axis=1) + self.labels.sum(axis=1)
            value = float(top.sum() / bottom.sum()) if bottom.sum() else 0.0
            mean = bottom.mean() or 1.0
            return value, np.asarray(value + (top - value * bottom) / mean)
        right = (given == self.labels).astype(np.float64)
        return float(right.mean()) if len(right) else math.nan, right

    def constant_parts(self) -> tuple[float, Array]:
        """Return the score and influences of the constant baseline."""
        if self.task is Task.REGRESSION:
            return 0.0, np.zeros(len(self))
        decision = self.constant.decision()
        if self.task is Task.MULTILABEL:
            return self.score_parts(np.tile(decision, (len(self), 1)))
        return self.score_parts(np.full(len(self), decision[0]))


def _correlation_parts(x: Array, y: Array) -> tuple[float, Array]:
    """Return Pearson's r and its influence per row (mean r)."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        a, b = (x - x.mean()) / x.std(), (y - y.mean()) / y.std()
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return 0.0, np.zeros(len(x))
    r = float((a * b).mean())
    return r, np.asarray(r + a * b - 0.5 * r * (a**2 + b**2))


def rows_to_keep(planned_evaluations: int) -> int:
    """Return how many rows of a split to keep, so that the event log stays small with many evaluations."""
    return int(np.clip(MOST_TEXT // (TEXT_A_ROW * max(1, planned_evaluations)), LEAST_ROWS, MOST_ROWS))


def keep_rows(constant: BestConstant, logits: Any, labels: Any, most: int = MOST_ROWS) -> RowEvidence | None:
    """Return the evidence of these rows; None if none has a label."""
    scores, known = np.asarray(logits, np.float64), np.asarray(labels)
    task = constant.task
    labeled = np.isfinite(known.reshape(len(known), -1).astype(np.float64)).all(axis=1)
    labeled &= (known.reshape(len(known), -1) >= 0).all(axis=1) | (task is Task.REGRESSION)
    at = np.flatnonzero(labeled)
    if not len(at):
        return None
    if len(at) > most:
        at = at[np.linspace(0, len(at) - 1, most).round().astype(np.int64)]
    scores, known = scores[at], known[at]
    confidence = np.full(len(at), np.nan)
    if task is Task.REGRESSION:
        known = known.reshape(-1).astype(np.float64)
        predictions: Array = scores.reshape(-1)
    elif task is Task.MULTILABEL:
        predictions = (scores > 0).astype(np.int64)  # a probability above one half
        top = np.arange(len(at)), np.argmax(np.nan_to_num(scores), axis=1)
        confidence = np.where(known[top] > 0, 1.0, -1.0) * sigmoid(scores[top])
    else:
        confidence = softmax(scores).max(axis=1)
        predictions = np.argmax(np.nan_to_num(scores), axis=1)
    return RowEvidence(constant, known, predictions, row_losses(task, scores, known), confidence, int(labeled.sum()))


def _columns(task: Task) -> dict[str, str]:
    """Return the number format of each column of a line."""
    whole = {Task.REGRESSION: "<f4", Task.MULTILABEL: "u1"}.get(task, "<i4")
    return {"labels": whole, "predictions": whole, "loss": "<f4", "confidence": "<f2"}


def encode_rows(rows: RowEvidence) -> str:
    """Return one line of text."""
    head = {"task": rows.task.value, "constant": list(rows.constant.values), "rows": len(rows), "n": rows.n}
    columns = [getattr(rows, name).astype(kind).tobytes() for name, kind in _columns(rows.task).items()]
    data = json.dumps(head).encode() + b"\n" + b"".join(columns)
    return base64.b85encode(zlib.compress(data, 6)).decode("ascii")


def decode_rows(text: str) -> RowEvidence:
    """Return what `encode_rows` wrote; a DataError for anything else."""
    try:
        data = zlib.decompressobj().decompress(base64.b85decode(text), _MOST_BYTES)
        line, data = data.split(b"\n", 1)
        head = json.loads(line)
        constant = BestConstant(Task(head["task"]), tuple(float(v) for v in head["constant"]))
        count, width, columns = int(head["rows"]), len(constant.values), {}
        if not 0 < count <= MOST_ROWS:
            raise ValueError(f"{count} rows, at most {MOST_ROWS} are written")
        for name, kind in _columns(constant.task).items():
            wide = constant.task is Task.MULTILABEL and kind == "u1"
            found = np.frombuffer(data, kind, count * width if wide else count)
            data = data[found.nbytes :]
            columns[name] = (found.reshape(count, width) if wide else found).astype(
                np.int64 if found.dtype.kind in "iu" else np.float64
            )
        single = constant.task in (Task.BINARY, Task.MULTICLASS)
        if data or (single and not 0 <= columns["labels"].min() <= columns["labels"].max() < width):
            raise ValueError("unexpected columns")
        return RowEvidence(constant, **columns, n=int(head["n"]))
    except (ValueError, KeyError, TypeError, zlib.error, OverflowError) as error:
        raise DataError(f"row evidence cannot be read ({error})", fix="Train again to have it.") from None
