"""Predictions and scores of a run, as the report needs them.

Rows of predictions.parquet with text, label, prediction and probabilities; headline scores from metrics.json, else from the
predictions, else from the journal's best evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.labels import Task
from tunesmith.metrics.uncertainty import wilson_limits
from tunesmith.runs.series import Curves

KNOWN = ("row", "index", "idx", "split", "label", "prediction", "truncated", "length", "tokens")
"""Columns with a meaning of their own; the text columns are the others, unless the data summary names them."""
PROBABILITY = "prob_"


@dataclass(frozen=True, slots=True, eq=False)
class PredictedRows:
    """Labelled rows of one split, in row order.

    `labels` and `predicted` are ids into `names`; values in regression; tables of 0 and 1, a column for each name, in
    multilabel tasks.
    """

    split: str
    names: tuple[str, ...]
    task: Task
    row: NDArray[np.int64]
    texts: dict[str, list[str]]
    labels: NDArray[Any]
    predicted: NDArray[Any]
    probabilities: NDArray[np.float64] | None
    truncated: NDArray[np.bool_] | None

    def __len__(self) -> int:
        return len(self.row)

    @property
    def right(self) -> NDArray[np.bool_]:
        """Whether each row's prediction is its label (classification), or the set of its labels."""
        same = np.asarray(self.labels == self.predicted, dtype=bool)
        return np.asarray(same.all(axis=1), dtype=bool) if same.ndim == 2 else same


def make_predictions(
    columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any], *, prefer: Sequence[str] = ("test", "validation")
) -> PredictedRows | None:
    """The rows to explain: those of the first preferred split that has labels, else of the first split that has some.

    Test comes first: validation rows have chosen the checkpoint.
    """
    texts = {c: columns[c] for c in _texts(columns, summary)}
    columns = own_columns(columns, summary)
    if "label" not in columns or "prediction" not in columns or not len(columns["label"]):
        return None
    task = _task(columns, summary)
    names = _names(columns, summary) if task is not Task.REGRESSION else ()
    labels, predicted = (_values(columns[c], names, task) for c in ("label", "prediction"))
    if task is Task.MULTILABEL:
        known = np.array([value is not None for value in columns["label"]])
    else:
        known = np.isfinite(labels) if task is Task.REGRESSION else labels >= 0
    splits = [str(s) for s in columns.get("split", ["predictions"] * len(labels))]
    present = [s for s in dict.fromkeys(splits) if any(k and s == t for k, t in zip(known, splits, strict=True))]
    if not present:
        return None
    split = next((s for s in prefer if s in present), present[0])
    keep = [k for k, (labelled, own) in enumerate(zip(known, splits, strict=True)) if labelled and own == split]
    index = next((columns[c] for c in ("row", "index", "idx") if c in columns), range(len(labels)))
    cut = columns.get("truncated")
    return PredictedRows(
        split=split,
        names=names,
        task=task,
        row=np.array([int(index[k]) for k in keep], dtype=np.int64),
        texts={c: ["" if values[k] is None else str(values[k]) for k in keep] for c, values in texts.items()},
        labels=labels[keep],
        predicted=predicted[keep],
        probabilities=_probabilities(columns, names, keep),
        truncated=None if cut is None else np.array([bool(cut[k]) for k in keep]),
    )


def own_columns(columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any]) -> Mapping[str, Sequence[Any]]:
    """The columns with ours under their usual names, where text columns of the data have taken these."""
    moved = summary.get("prediction_columns")
    if not isinstance(moved, dict):
        return columns
    return {**columns, **{str(own): columns[name] for own, name in moved.items() if name in columns}}


def _task(columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any]) -> Task:
    task = summary.get("task")
    if task in tuple(Task):
        return Task(task)
    classes = sum(name.startswith(PROBABILITY) for name in columns)
    if classes:
        return Task.BINARY if classes == 2 else Task.MULTICLASS
    return Task.REGRESSION if any(isinstance(v, float) for v in columns["prediction"]) else Task.MULTICLASS


def _names(columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any]) -> tuple[str, ...]:
    labels = summary.get("labels")
    if isinstance(labels, (list, tuple)) and labels:
        return tuple(str(name) for name in labels)
    found = [name.removeprefix(PROBABILITY) for name in columns if name.startswith(PROBABILITY)]
    cells = [v if isinstance(v, (list, tuple)) else [v] for c in ("label", "prediction") for v in columns[c]]
    seen = sorted({str(v) for cell in cells for v in cell if v is not None})
    return tuple(found or seen)


def _values(values: Sequence[Any], names: tuple[str, ...], task: Task) -> NDArray[Any]:
    if task is Task.REGRESSION:
        return np.array([math.nan if v is None else float(v) for v in values], dtype=np.float64)
    if task is Task.MULTILABEL:
        sets = [{str(name) for name in value or ()} for value in values]
        return np.array([[int(name in found) for name in names] for found in sets], dtype=np.int64)
    ids = {name: i for i, name in enumerate(names)}
    inside = range(len(names))

    def id_of(value: Any) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and str(value) not in ids:
            return value if value in inside else -1
        return ids.get(str(value), -1)

    return np.array([id_of(v) for v in values], dtype=np.int64)


def _texts(columns: Mapping[str, Sequence[Any]], summary: Mapping[str, Any]) -> list[str]:
    used = summary.get("columns")
    wanted = used.get("text") if isinstance(used, dict) else None
    if isinstance(wanted, (list, tuple)):
        return [str(c) for c in wanted if c in columns]
    others = [c for c in columns if c not in KNOWN and not c.startswith(PROBABILITY)]
    return [c for c in others if any(isinstance(v, str) for v in columns[c])][:2]


def _probabilities(
    columns: Mapping[str, Sequence[Any]], names: tuple[str, ...], keep: list[int]
) -> NDArray[np.float64] | None:
    wanted = [PROBABILITY + name for name in names]
    if not names or any(c not in columns for c in wanted):
        return None
    table = np.array([[math.nan if v is None else float(v) for v in columns[c]] for c in wanted], dtype=np.float64).T
    kept = table[keep]
    return kept if np.isfinite(kept).all() else None


NOT_SCORES = (
    "runtime",
    "samples_per_second",
    "steps_per_second",
    "epoch",
    "total_flos",
    "n",
    "rows",
    "step",
    "seconds",
)


@dataclass(frozen=True, slots=True)
class Headline:
    """One score. `low` and `high` are its 95% interval, None where there is none; `n` the rows it rests on; `of` its class."""

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
    """The one score to read: of the first split, the metric that the run was steered by, else the first."""
    first = [score for score in scores if score.split == scores[0].split]
    return next((score for score in first if score.name == curves.main_metric()), first[0] if first else None)


def make_grid(scores: list[Headline]) -> ScoreGrid:
    """Test and validation side by side; the loss last."""
    splits = tuple(dict.fromkeys(score.split for score in scores))
    found = {(score.name, score.of, score.split): score for score in scores}
    kinds = sorted(dict.fromkeys((name, of) for name, of, _ in found), key=lambda kind: kind[0] == "loss")
    return ScoreGrid(splits, tuple((n, of, tuple(found.get((n, of, split)) for split in splits)) for n, of in kinds))


def headline_scores(metrics: Mapping[str, Any], predictions: PredictedRows | None, curves: Curves) -> list[Headline]:
    """Scores in the order to be read: the test set before validation, the loss last."""
    found = scores_in_file(metrics)
    if not found and predictions is not None:
        found = _from_predictions(predictions)
    found = found or _from_journal(curves)
    return sorted(found, key=lambda score: (split_rank(score.split), score.name == "loss"))


def split_rank(split: str) -> int:
    """The test set before validation: validation rows have chosen the checkpoint."""
    return {"test": 0, "validation": 1}.get(split, 2)


def scores_in_file(metrics: Mapping[str, Any]) -> list[Headline]:
    """The scores of a metrics.json, ours or one of another tool. What is not a finite number is left out."""
    found = []
    for key, value in metrics.items():
        if isinstance(value, dict) and "value" not in value:
            found += [_headline(str(key), str(name), score) for name, score in value.items()]
        else:
            split, name = _split_prefix(str(key))
            found.append(_headline(split, name, value))
    return [score for score in found if score is not None and score.name not in NOT_SCORES]


def _split_prefix(key: str) -> tuple[str, str]:
    first, _, name = key.partition("_")
    split = {"eval": "validation", "validation": "validation", "test": "test", "train": "train"}.get(first)
    return (split, name) if split and name else ("validation", key)


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


def _from_predictions(predictions: PredictedRows) -> list[Headline]:
    from tunesmith.metrics.suite import make_suite

    if predictions.task is Task.REGRESSION:
        suite, given = make_suite(Task.REGRESSION), predictions.predicted
    elif predictions.probabilities is not None:
        suite, given = make_suite(predictions.task, scores="probabilities"), predictions.probabilities
    else:
        rows, share = len(predictions), float(predictions.right.mean())
        low, high = wilson_limits(share, rows)
        name = "subset_accuracy" if predictions.task is Task.MULTILABEL else "accuracy"
        return [Headline(predictions.split, name, share, float(low), float(high), rows)]
    scores = suite.compute_with_intervals(given, predictions.labels, decisions=predictions.predicted)
    made = [_headline(predictions.split, name, score.to_json()) for name, score in scores.items()]
    return [score for score in made if score is not None]


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
