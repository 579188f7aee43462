"""The best constant: what a model scores that gives every row the same answer, and the error of that score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.labels import Task
from tunesmith.metrics.rows import Array
from tunesmith.metrics.suite import Suite


@dataclass(frozen=True, slots=True)
class BestConstant:
    """`values` are class shares, each label's share, or the mean: from the training labels, half a row added to each class."""

    task: Task
    values: tuple[float, ...]

    @classmethod
    def of(cls, task: Task, labels: Any, num_labels: int) -> BestConstant:
        """The constant with the lowest loss on these labels; unlabelled rows do not count."""
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
        """The loss of this constant on rows with these very shares; NaN for a mean, whose loss is the variance."""
        p = np.array(self.values)
        if self.task is Task.REGRESSION:
            return math.nan
        if self.task is Task.MULTILABEL:
            return float(-(p * np.log(p) + (1 - p) * np.log1p(-p)).mean())
        return float(-(p * np.log(p)).sum())

    def logits(self, rows: int) -> Array:
        """The outputs of a model that always gives this answer."""
        p = np.array(self.values)
        if self.task is Task.MULTILABEL:
            p = np.log(p) - np.log1p(-p)
        elif self.task is not Task.REGRESSION:
            p = np.log(p)
        return np.tile(p, (rows, 1))

    def decision(self) -> Array:
        """The class, the value, or the set of labels (as 0 and 1) with the highest micro F1 to expect."""
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
    """Loss and scores of the constant on these rows, each with one standard error where the rows give one."""
    labels = np.asarray(labels)
    logits = constant.logits(len(labels))
    found: dict[str, Any] = {"values": list(constant.values), "n": len(labels), "metrics": {}, "errors": {}}
    answers = np.tile(20.0 * constant.decision() - 10, (len(labels), 1)) if constant.task is Task.MULTILABEL else logits
    for name, score in suite.compute_with_intervals(answers, labels).items():
        found["metrics"][name] = score.value
        found["errors"][name] = _error(score.low, score.high)
    losses = row_losses(constant.task, logits, labels)
    losses = losses[np.isfinite(losses)]
    if len(losses) > 1:
        found["metrics"]["loss"] = float(losses.mean())
        found["errors"]["loss"] = float(losses.std(ddof=1) / math.sqrt(len(losses)))
    return found


def _error(low: float | None, high: float | None) -> float | None:
    return None if low is None or high is None else (high - low) / 3.92


def row_losses(task: Task, logits: Any, labels: Any) -> Array:
    """Each row's own loss without class weights or smoothing; NaN for a row without a label."""
    scores, known = np.asarray(logits, np.float64), np.asarray(labels)
    with np.errstate(invalid="ignore", over="ignore"):
        if task is Task.REGRESSION:
            return np.asarray((scores.reshape(-1) - known.reshape(-1)) ** 2, np.float64)
        if task is Task.MULTILABEL:
            parts = np.logaddexp(0.0, scores) - scores * known
            return np.asarray(parts.mean(axis=1), np.float64)
        shifted = scores - scores.max(axis=1, keepdims=True)
        whole = np.log(np.exp(shifted).sum(axis=1))
        labelled = known >= 0
        at = np.where(labelled, known, 0).astype(np.int64)
        return np.where(labelled, whole - shifted[np.arange(len(known)), at], np.nan)


def infer_task(logits: Any, labels: Any) -> Task | None:
    """The task that arrays of a Trainer belong to; None where they are not one output a row."""
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
