"""From several candidates to one model, judged by held-out rows: a greedy ensemble, a soup of weights, a temperature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.errors import DataError
from tunesmith.inference.predictor import Predictor
from tunesmith.inference.tables import probabilities_of
from tunesmith.labels import Task
from tunesmith.metrics.calibration import log_loss_of
from tunesmith.metrics.intervals import Score
from tunesmith.metrics.paired import PairedResult, compare_predictions
from tunesmith.metrics.rows import Array
from tunesmith.metrics.table import Suite, make_suite
from tunesmith.pipeline.folds import held_out_rows
from tunesmith.report.predictions import PredictedRows
from tunesmith.runs.folder import RunDir
from tunesmith.runs.manifest import is_sealed, write_sealed
from tunesmith.training.checkpoint import read_weights

ROUNDS = 8
"""Picks of the greedy ensemble, with repetition: weights in eighths."""
TINY = 1e-12


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Rows that a model did not see: its logits (values in regression) and their labels."""

    task: Task
    logits: Array
    gold: Array
    names: tuple[str, ...] = ()

    @property
    def positive_name(self) -> str | None:
        """The class that F1 of two classes is about."""
        return self.names[1] if self.task is Task.BINARY and len(self.names) == 2 else None

    @property
    def probabilities(self) -> Array:
        """Of each label; the value itself for regression."""
        return probabilities_of(self.logits, self.task)

    def loss(self) -> float:
        """Mean squared error for regression, else the log loss."""
        if self.task is Task.REGRESSION:
            return float(np.mean((self.logits - self.gold) ** 2))
        return log_loss_of(self.logits, self.gold)

    def score(self, metric: str) -> float:
        """Turned so that larger is better."""
        if metric == "loss":
            return -self.loss()
        suite = make_suite(self.task, names=(metric,), scores="probabilities")
        value = suite.compute(self.probabilities, self.gold)[metric]
        return -np.inf if value is None else value if suite.greater_is_better(metric) else -value

    def scores(self, suite: Suite, decisions: Array | None = None) -> dict[str, Score]:
        """Every metric of a suite of probabilities, with its interval; by these decisions where thresholds made others."""
        return suite.compute_with_intervals(self.probabilities, self.gold, decisions=decisions)


def read_held_out(folders: Sequence[Path]) -> HeldOut:
    """The held-out rows of runs on different folds, one after the other."""
    parts = [rows for rows in map(held_out_rows, folders) if rows is not None]
    if len(parts) != len(folders):
        raise DataError("a run has no predictions of its held-out rows", where=str(folders[0].parent))
    return join_folds([HeldOut(rows.task, _logits(rows), rows.labels, rows.names) for rows in parts])


def join_folds(parts: Sequence[HeldOut]) -> HeldOut:
    """The rows of several folds as one table."""
    logits, gold = (np.concatenate(tables) for tables in zip(*((p.logits, p.gold) for p in parts), strict=True))
    return HeldOut(parts[0].task, logits, gold, parts[0].names)


def _logits(rows: PredictedRows) -> Array:
    if rows.task is Task.REGRESSION or rows.probabilities is None:
        return rows.predicted.astype(np.float64)
    table = np.clip(rows.probabilities, TINY, 1.0)
    if rows.task is Task.MULTILABEL:
        return np.asarray(np.log(table) - np.log(np.clip(1 - rows.probabilities, TINY, 1.0)))
    return np.asarray(np.log(table))


def mix_answers(members: Sequence[HeldOut], weights: Sequence[float]) -> HeldOut:
    """The ensemble: the mean of the members' probabilities, or values."""
    first = members[0]
    if any(not np.array_equal(one.gold, first.gold) for one in members):
        raise DataError("the members of an ensemble were not held out from the same rows")
    mean: Array = np.sum([w * one.probabilities for w, one in zip(weights, members, strict=True)], axis=0)
    if first.task is Task.REGRESSION:
        return replace(first, logits=mean)
    odds = np.log(np.clip(mean, TINY, 1.0))
    if first.task is Task.MULTILABEL:
        odds = odds - np.log(np.clip(1 - mean, TINY, 1.0))
    return replace(first, logits=odds)


def greedy_weights(members: Mapping[str, HeldOut], metric: str) -> dict[str, float]:
    """The weights of an ensemble: members are added with repetition, each time the one that helps most, while one helps.

    Of mixtures with the same score the one with the smaller loss is taken.
    """
    names = list(members)
    counts = dict.fromkeys(names, 0)
    best: tuple[float, float] = (-np.inf, -np.inf)
    for _ in range(ROUNDS):
        found = {}
        for name in names:
            tried = {**counts, name: counts[name] + 1}
            total = sum(tried.values())
            mixed = mix_answers(list(members.values()), [tried[n] / total for n in names])
            found[name] = (mixed.score(metric), -mixed.loss())
        chosen = max(names, key=lambda name: found[name])
        if found[chosen] <= best:
            break
        best = found[chosen]
        counts[chosen] += 1
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items() if count}


def compare_held_out(a: HeldOut, b: HeldOut, metric: str) -> PairedResult:
    """B against A by a paired test."""
    name = metric if metric != "loss" else make_suite(a.task).metric_for_best_model
    return compare_predictions(
        a.probabilities, b.probabilities, a.gold, task=a.task, metric=name, scores="probabilities"
    )


def shown_worse(tested: PairedResult, a: HeldOut, b: HeldOut) -> bool:
    """Whether B should not stand in for A: the test says so, or without a verdict score and loss both do."""
    difference, p_value = tested.difference, tested.p_value
    if difference is None or p_value is None:
        return b.loss() > a.loss()
    from tunesmith.metrics.table import greater_is_better

    behind = difference < 0 if greater_is_better(tested.metric) else difference > 0
    return behind and (p_value <= 0.05 or b.loss() > a.loss())


def average_weights(folders: Sequence[Path], weights: Sequence[float]) -> dict[str, Any] | None:
    """The weighted mean of the models in these folders; None where they do not fit each other."""
    tables = [read_weights(folder) for folder in folders]
    first = tables[0]
    if any({k: v.shape for k, v in one.items()} != {k: v.shape for k, v in first.items()} for one in tables):
        return None
    return {
        name: sum(w * one[name].float() for w, one in zip(weights, tables, strict=True)).to(tensor.dtype)  # type: ignore[union-attr]
        if tensor.is_floating_point()
        else tensor
        for name, tensor in first.items()
    }


def cook_fold(target: Path, runs: Sequence[Path], weights: Sequence[float], *, use_cpu: bool) -> HeldOut | None:
    """The held-out rows of a fold, predicted by the soup of the models that were trained without them."""
    models = [RunDir(run).model for run in runs]
    if not is_sealed(target):
        mean = average_weights(models, weights)
        if mean is None:
            return None
        write_sealed(target, lambda folder: _fill(folder, models[0], mean), {"kind": "model"})
    rows = held_out_rows(runs[0])
    assert rows is not None
    columns = list(rows.texts.values())
    predictor = Predictor.load(target, use_cpu=use_cpu)
    logits = predictor.logits(columns[0], columns[1] if len(columns) == 2 else None).astype(np.float64)
    logits = logits[:, 0] if rows.task is Task.REGRESSION else logits
    return HeldOut(rows.task, logits, rows.labels, rows.names)


def _fill(folder: Path, like: Path, weights: Mapping[str, Any]) -> dict[str, Future[str]]:
    from tunesmith.runs.manifest import MANIFEST
    from tunesmith.runs.writing import write_new
    from tunesmith.training.checkpoint import WEIGHTS, write_tensors

    for file in like.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != MANIFEST:
            write_new(folder / file.name, file.read_bytes())
    return {WEIGHTS: write_tensors(folder / WEIGHTS, dict(weights), metadata={"format": "pt"})}
