"""Predictions and scores of a run, as the report needs them.

Rows of predictions.parquet with text, label, prediction and probabilities; headline scores from metrics.json, or from the best
evaluation in the event log while there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.labels import Task
from tunesmith.metrics.table import confusion_matrix, f1_limits, wilson_limits
from tunesmith.runs.event_log import Curves

PROBABILITY = "prob_"


@dataclass(frozen=True, slots=True, eq=False)
class PredictedRows:
    """Labeled examples of one split, in row order.

    `labels` and `predicted` are ids into `names`; values in regression; tables of 0 and 1, a column for each name, in
    multilabel tasks.
    """

    split: str
    names: tuple[str, ...]
    task: Task
    row: NDArray[np.int64]
    places: list[str]
    """`train.csv:812` for each row; its number in the split if the file is unknown."""
    texts: dict[str, list[str]]
    labels: NDArray[Any]
    predicted: NDArray[Any]
    probabilities: NDArray[np.float64] | None

    def __len__(self) -> int:
        return len(self.row)

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether each prediction equals the label, or the set of labels."""
        same = np.asarray(self.labels == self.predicted, dtype=bool)
        return np.asarray(same.all(axis=1), dtype=bool) if same.ndim == 2 else same


def labeled_splits(columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any]) -> dict[str, PredictedRows]:
    """Return the labeled examples of each split, the test split first: validation examples have selected the checkpoint."""
    used = summary.get("columns")
    wanted = used.get("text") if isinstance(used, dict) else None
    texts = {c: columns[c] for c in (wanted if isinstance(wanted, list) else ()) if c in columns}
    columns = own_columns(columns, summary)
    if not columns.get("label") or "prediction" not in columns or summary.get("task") not in tuple(Task):
        return {}
    task = Task(summary["task"])
    names = tuple(map(str, summary.get("labels") or ())) if task is not Task.REGRESSION else ()
    labels, predicted = (_values(columns[c], names, task) for c in ("label", "prediction"))
    if task is Task.MULTILABEL:
        known = np.array([value is not None for value in columns["label"]])
    else:
        known = np.isfinite(labels) if task is Task.REGRESSION else labels >= 0
    splits = np.array([str(s) for s in columns.get("split", ["predictions"] * len(labels))], dtype=object)
    index, found = columns.get("row", range(len(labels))), {}
    for split in sorted(dict.fromkeys(splits[known].tolist()), key=split_rank):
        keep = np.flatnonzero(known & (splits == split)).tolist()
        found[split] = PredictedRows(
            split=split,
            names=names,
            task=task,
            row=np.array([int(index[k]) for k in keep], dtype=np.int64),
            places=[_place(columns, index, k) for k in keep],
            texts={c: ["" if values[k] is None else str(values[k]) for k in keep] for c, values in texts.items()},
            labels=labels[keep],
            predicted=predicted[keep],
            probabilities=_probabilities(columns, names, keep),
        )
    return found


def make_predictions(columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any]) -> PredictedRows | None:
    """Return the labeled examples of the test split, or of the first split that has some."""
    return next(iter(labeled_splits(columns, summary).values()), None)


def _place(columns: Mapping[str, Sequence[Any]], index: Sequence[Any], at: int) -> str:
    if not columns.get("file") or not columns.get("line"):
        return f"row {index[at]}"
    return f"{Path(str(columns['file'][at])).name}:{columns['line'][at]}"


def own_columns(columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any]) -> Mapping[str, Sequence[Any]]:
    """Return the columns with usual names for our own, even if text columns of the data have these names."""
    moved = summary.get("prediction_columns")
    if not isinstance(moved, dict):
        return columns
    return {**columns, **{str(own): columns[name] for own, name in moved.items() if name in columns}}


def _values(values: Sequence[Any], names: tuple[str, ...], task: Task) -> NDArray[Any]:
    if task is Task.REGRESSION:
        return np.array([math.nan if v is None else float(v) for v in values], dtype=np.float64)
    if task is Task.MULTILABEL:
        sets = [{str(name) for name in value or ()} for value in values]
        return np.array([[int(name in found) for name in names] for found in sets], dtype=np.int64)
    ids = {name: i for i, name in enumerate(names)}
    return np.array([ids.get(str(v), -1) for v in values], dtype=np.int64)


def _probabilities(
    columns: Mapping[str, Sequence[Any]], names: tuple[str, ...], keep: list[int]
) -> NDArray[np.float64] | None:
    wanted = [PROBABILITY + name for name in names]
    if not names or any(c not in columns for c in wanted):
        return None
    table = np.array([[math.nan if v is None else float(v) for v in columns[c]] for c in wanted], dtype=np.float64).T
    kept = table[keep]
    return kept if np.isfinite(kept).all() else None


@dataclass(frozen=True, slots=True)
class Headline:
    """One score. `low` and `high` are its 95% interval, None if there is none; `n` is the number of examples; `of` its class."""

    split: str
    name: str
    value: float
    low: float | None
    high: float | None
    n: int | None
    of: str | None = None


@dataclass(frozen=True, slots=True)
class ScoreGrid:
    """Scores of one metric in a row, of one split in a column."""

    splits: tuple[str, ...]
    rows: tuple[tuple[str, str | None, tuple[Headline | None, ...]], ...]
    """(metric, the class it is about, a score for each split)."""


def choose_headline(scores: list[Headline], curves: Curves) -> Headline | None:
    """Return the main score: of the first split, the metric that selected the checkpoint, else the first."""
    first = [score for score in scores if score.split == scores[0].split]
    return next((score for score in first if score.name == curves.main_metric()), first[0] if first else None)


def make_grid(scores: list[Headline]) -> ScoreGrid:
    """Return a row of scores per metric, with test and validation columns; the loss is last."""
    splits = tuple(dict.fromkeys(score.split for score in scores))
    found = {(score.name, score.of, score.split): score for score in scores}
    kinds = sorted(dict.fromkeys((name, of) for name, of, _ in found), key=lambda kind: kind[0] == "loss")
    return ScoreGrid(splits, tuple((n, of, tuple(found.get((n, of, split)) for split in splits)) for n, of in kinds))


def headline_scores(metrics: Mapping[str, Any], curves: Curves) -> list[Headline]:
    """Return scores, those of the test set before validation, the loss last."""
    found = scores_in_file(metrics) or _from_journal(curves)
    return sorted(found, key=lambda score: (split_rank(score.split), score.name == "loss"))


def split_rank(split: str) -> int:
    """Return a sort key: test before validation, because validation examples selected the checkpoint."""
    return {"test": 0, "validation": 1}.get(split, 2)


def scores_in_file(metrics: Mapping[str, Any]) -> list[Headline]:
    """Return the scores of a metrics.json by split, without values that are NaN or infinite."""
    tables = [(split, table) for split, table in metrics.items() if isinstance(table, dict)]
    found = [_headline(split, name, score) for split, table in tables for name, score in table.items()]
    return [score for score in found if score is not None]


def _headline(split: str, name: str, score: Any) -> Headline | None:
    data = score if isinstance(score, dict) else {"value": score}
    value = _number(data.get("value"))
    if value is None:
        return None
    n, of = data.get("n"), data.get("of")
    low, high = _number(data.get("low")), _number(data.get("high"))
    rows, about = n if isinstance(n, int) else None, str(of) if of is not None else None
    return Headline(split, name, value, low, high, rows, about)


def _number(value: Any) -> float | None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None


def _from_journal(curves: Curves) -> list[Headline]:
    best = curves.best()
    if best is None:
        return []
    n = curves.rows.get("validation")
    found = []
    for name in curves.metric_names:
        series = curves.metric("validation", name).finite()
        at = series.value[series.step == best[1]]
        if not len(at):
            continue
        value = float(at[0])
        limits: tuple[float | None, float | None] = (None, None)
        if name == "accuracy" and n and 0 <= value <= 1:
            low, high = wilson_limits(value, n)
            limits = (float(low), float(high))
        found.append(Headline("validation", name, value, *limits, n))
    return found


MAX_CLASSES = 40
"""A larger matrix is not readable: the most frequent confusions are listed instead."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One misclassified example. `confidence` is the probability of the wrong label, or None."""

    row: int
    place: str
    texts: tuple[tuple[str, str], ...]
    label: str
    predicted: str
    confidence: float | None


@dataclass(frozen=True, slots=True)
class ConfusedPair:
    """A confusion of two labels: examples, their share of the true label, and the most confident one."""

    true: str
    predicted: str
    rows: int
    share: float
    example: Mistake


@dataclass(frozen=True, slots=True)
class Confusion:
    """`counts[true][predicted]`, empty beyond `MAX_CLASSES`; `pairs` lists the most frequent confusions."""

    names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    pairs: tuple[ConfusedPair, ...]


@dataclass(frozen=True, slots=True)
class LabelCount:
    """Counts of one label: examples, true positives, false positives; `low` and `high` are limits of its F1."""

    name: str
    rows: int
    found: int
    extra: int
    low: float
    high: float

    @property
    def precision(self) -> float | None:
        """Precision; None if the label is never predicted."""
        return self.found / (self.found + self.extra) if self.found + self.extra else None

    @property
    def recall(self) -> float | None:
        """Recall; None if no example has the label."""
        return self.found / self.rows if self.rows else None

    @property
    def f1(self) -> float | None:
        """Harmonic mean of both; None if no example has the label and none is predicted as it."""
        return 2 * self.found / (self.rows + self.found + self.extra) if self.rows + self.extra else None


def count_labels(predictions: PredictedRows) -> list[LabelCount]:
    """Return counts of each label, the lowest F1 first, labels without examples last; [] in regression."""
    if predictions.task is Task.REGRESSION:
        return []
    ids = np.arange(len(predictions.names))
    several = predictions.task is Task.MULTILABEL
    true, given = (v == 1 if several else v[:, None] == ids for v in (predictions.labels, predictions.predicted))
    rows, found, extra = true.sum(axis=0), (true & given).sum(axis=0), (given & ~true).sum(axis=0)
    limits = f1_limits(found / np.maximum(1, rows + extra), np.maximum(1, rows + extra))
    columns = (column.tolist() for column in (rows, found, extra, *limits))
    counts = [LabelCount(*one) for one in zip(predictions.names, *columns, strict=True)]
    return sorted(counts, key=lambda one: (not one.rows, one.f1 or 0.0, -one.rows))


def count_confusions(predictions: PredictedRows, *, most: int = 12) -> Confusion | None:
    """Return the confusion matrix; None in regression and multilabel tasks."""
    if predictions.task in (Task.REGRESSION, Task.MULTILABEL) or not len(predictions):
        return None
    inside, names = predictions.predicted >= 0, predictions.names
    table = confusion_matrix(predictions.labels[inside], predictions.predicted[inside], num_classes=len(names)).astype(
        int
    )
    wrong = table.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    pairs = [divmod(int(k), len(names)) for k in order if wrong.flat[k]]
    found = tuple(
        ConfusedPair(names[a], names[b], int(wrong[a, b]), wrong[a, b] / table[a].sum(), _surest(predictions, a, b))
        for a, b in pairs
    )
    counts = tuple(tuple(int(n) for n in row) for row in table) if len(table) <= MAX_CLASSES else ()
    return Confusion(names, counts, found)


def _surest(predictions: PredictedRows, true: int, said: int) -> Mistake:
    """Return the most confident one of the examples of one label that were predicted as another."""
    rows = np.flatnonzero((predictions.labels == true) & (predictions.predicted == said))
    table = predictions.probabilities
    at = int(rows[0] if table is None else rows[np.argmax(table[rows, said])])
    return _mistake(predictions, at, None if table is None else float(table[at, said]))


def find_mistakes(predictions: PredictedRows, *, most: int = 20) -> list[Mistake]:
    """Return the most confident mistakes first (in regression: the largest errors); ties in row order."""
    if predictions.task is Task.REGRESSION:
        sure = np.abs(predictions.predicted - predictions.labels)
        order = np.argsort(-sure, kind="stable")[:most]
        return [_mistake(predictions, int(k), None) for k in order]
    wrong = np.flatnonzero(~predictions.right)
    table = predictions.probabilities
    if table is None:
        return [_mistake(predictions, int(k), None) for k in wrong[:most]]
    if predictions.task is Task.MULTILABEL:  # the probability of the label of a row that it was most wrong about
        against = np.where(predictions.labels[wrong] == 1, 1 - table[wrong], table[wrong])
        sure = np.where(predictions.labels[wrong] == predictions.predicted[wrong], 0.0, against).max(axis=1, initial=0)
    else:
        sure = table[wrong, predictions.predicted[wrong]]
    order = np.argsort(-sure, kind="stable")[:most]
    return [_mistake(predictions, int(wrong[k]), float(sure[k])) for k in order]


def _mistake(predictions: PredictedRows, at: int, confidence: float | None) -> Mistake:
    texts = tuple((column, values[at]) for column, values in predictions.texts.items())
    label, predicted = (_name(predictions, values[at]) for values in (predictions.labels, predictions.predicted))
    return Mistake(int(predictions.row[at]), predictions.places[at], texts, label, predicted, confidence)


def _name(predictions: PredictedRows, value: Any) -> str:
    if predictions.task is Task.REGRESSION:
        return f"{value:.4g}"
    if predictions.task is Task.MULTILABEL:
        return ", ".join(predictions.names[k] for k in np.flatnonzero(value)) or "none"
    return predictions.names[int(value)] if 0 <= int(value) < len(predictions.names) else "?"
