"""Headline scores: from metrics.json, else from the predictions, else from the journal's best evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tunesmith.curves.series import Curves
from tunesmith.labels import Task
from tunesmith.metrics.uncertainty import wilson_limits
from tunesmith.report.predictions import PredictedRows

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
    for prefix, split in (
        ("eval_", "validation"),
        ("validation_", "validation"),
        ("test_", "test"),
        ("train_", "train"),
    ):
        if key.startswith(prefix):
            return split, key.removeprefix(prefix)
    return "validation", key


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
