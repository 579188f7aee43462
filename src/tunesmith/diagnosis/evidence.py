"""What the rules look at: the curves of a run, brought onto the steps of its evaluations, with their noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.diagnosis.signs import RowSigns, read_rows
from tunesmith.diagnosis.thresholds import HIGH_RATE, LOSS_SPREAD, LOW_RATE, PAIRED
from tunesmith.errors import DataError
from tunesmith.labels import Task
from tunesmith.metrics.row_evidence import RowEvidence, decode_rows
from tunesmith.metrics.suite import greater_is_better
from tunesmith.runs.series import Curves, Floats


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One entry per evaluation with a finite validation loss, in step order. A score is NaN where there is none."""

    curves: Curves
    config: Mapping[str, Any]
    step: NDArray[np.int64]
    epoch: Floats
    val_loss: Floats
    train_loss: Floats
    metric: str | None
    val_score: Floats
    train_score: Floats
    rows_evaluated: int
    chance_loss: float
    """Loss of knowing only the class shares."""
    chance_accuracy: float | None
    """Accuracy of always giving the most frequent class; None when unknown or when the score is another one."""
    running: bool = False
    """Whether the run is still running."""
    rows: RowSigns | None = None
    """Each row's loss and prediction at these evaluations, where the run kept them."""
    chance_known: bool = True
    """Whether `chance_loss` is that of the best constant; else the first steps stand for it."""
    train_chance_loss: float = math.nan
    """The constant's loss on training rows."""
    regression: bool = False
    label_names: tuple[str, ...] = ()
    floors: tuple[tuple[str, float], ...] = ()
    """Scores of simpler models on the validation rows, by the metric of this reading."""
    probe_rows: RowEvidence | None = None
    """Training rows, and what a linear model of the frozen features that has not seen them says of them."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def best(self) -> int:
        """Index of the lowest validation loss."""
        return int(np.argmin(self.val_loss))

    @property
    def kept(self) -> int | None:
        """Index of the evaluation whose weights the run keeps; None when it keeps the last weights, whatever their score."""
        best = self.curves.best() if self.curves.tracked_metric else None
        if best is None or self.option("load_best_model_at_end", True) is False:
            return None
        return next((at for at, step in enumerate(self.step) if step == best[1]), None)

    def loss_noise(self, loss: float) -> float:
        """One standard error of the difference of two validation losses about this high."""
        return PAIRED * LOSS_SPREAD * loss * math.sqrt(2 / max(1, self.rows_evaluated))

    def score_noise(self, score: float) -> float:
        """One standard error of the difference of two validation scores about this high."""
        inside = min(max(score, 0.02), 0.98)
        return PAIRED * math.sqrt(2 * inside * (1 - inside) / max(1, self.rows_evaluated))

    @property
    def chance_score(self) -> tuple[float, float] | None:
        """The score of the best constant and its error on so many rows; None when it is not known."""
        error = math.sqrt(1 / max(1, self.rows_evaluated))
        if self.chance_accuracy is not None:
            return self.chance_accuracy, math.sqrt(self.chance_accuracy * (1 - self.chance_accuracy)) * error
        if self.metric in ("pearson", "spearmanr", "matthews_correlation", "r2"):
            return 0.0, error
        return (0.5, error / 2) if self.metric == "auroc" else None

    def label_name(self, number: int) -> str:
        """The name of a class, or its id where names are not known."""
        return self.label_names[number] if number < len(self.label_names) else f"class {number}"

    # What the run was asked to do.

    def option(self, name: str, default: Any) -> Any:
        """A value of the config; the default when it is absent or None."""
        value = self.config.get(name)
        return default if value is None else value

    @property
    def rate(self) -> float:
        """The peak learning rate: as configured, else the highest in the journal."""
        seen = self.curves.learning_rate.finite().value
        return float(self.option("learning_rate", float(seen.max()) if len(seen) else 5e-5))

    @property
    def frozen(self) -> bool:
        """Whether the encoder was not trained."""
        return any(str(part) in ("encoder", "base_model") for part in self.option("freeze", ()))

    def rate_is(self, kind: str) -> bool:
        """Whether the rate is "low", "usual" or "high" for training the whole encoder."""
        found = "low" if self.rate <= LOW_RATE else "high" if self.rate >= HIGH_RATE else "usual"
        return found == kind


def read_curves(
    curves: Curves,
    config: Mapping[str, Any],
    *,
    label_counts: Mapping[str, int] | None = None,
    num_labels: int | None = None,
    label_names: Sequence[str] = (),
    floor: float | None = None,
    floors: Mapping[str, Mapping[str, float]] | None = None,
    probe_rows: str | None = None,
    running: bool = False,
) -> Reading:
    """A pure function of its arguments. `floor` is the loss of the best constant on the validation rows, `floors` are the scores
    of simpler models there (name -> metric -> score), `probe_rows` is row evidence of the probe as text."""
    loss = curves.metric("validation", "loss").finite()
    metric = "accuracy" if "accuracy" in curves.metric_names else curves.main_metric()
    shares = _shares(label_counts)
    rows = _matching_rows(curves, loss.step)
    chance, known = _chance_loss(curves, shares, num_labels, floor)
    train_chance = chance
    if rows is not None:
        constant = rows.validation[-1].constant
        chance, known = rows.constant_loss, True
        samples = [float(part.constant_loss.mean()) for part in rows.train if part is not None]
        train_chance = (
            constant.entropy if constant.task is not Task.REGRESSION else float(np.mean([chance, *samples[:1]]))
        )
    return Reading(
        curves=curves,
        config=config,
        step=loss.step,
        epoch=loss.epoch,
        val_loss=loss.value,
        train_loss=_train_loss_at(curves, loss.step),
        metric=metric,
        val_score=_scores_at(curves, "validation", metric, loss.step),
        train_score=_scores_at(curves, "train_sample", metric, loss.step),
        rows_evaluated=curves.rows.get("validation", 0),
        chance_loss=chance,
        chance_accuracy=float(shares.max()) if shares is not None and metric == "accuracy" else None,
        running=running,
        label_names=tuple(label_names),
        floors=tuple((name, scores[metric]) for name, scores in (floors or {}).items() if metric and metric in scores),
        probe_rows=_decoded(probe_rows),
        rows=rows,
        chance_known=known,
        train_chance_loss=train_chance,
        regression=bool({"pearson", "spearmanr", "r2", "mse", "mae", "rmse"} & set(curves.metric_names)),
    )


def _matching_rows(curves: Curves, steps: NDArray[np.int64]) -> RowSigns | None:
    """The rows where every evaluation has them."""
    rows = read_rows(curves) if curves.row_texts else None
    if rows is None or not len(steps) or not set(steps.tolist()) <= set(rows.steps):
        return None
    keep = [k for k, step in enumerate(rows.steps) if step in set(steps.tolist())]
    return RowSigns(
        tuple(rows.steps[k] for k in keep),
        tuple(rows.validation[k] for k in keep),
        tuple(rows.train[k] for k in keep),
    )


def _decoded(text: str | None) -> RowEvidence | None:
    try:
        return decode_rows(text) if isinstance(text, str) else None
    except DataError:
        return None


def _shares(label_counts: Mapping[str, int] | None) -> Floats | None:
    counts = np.array([c for c in (label_counts or {}).values() if c > 0], dtype=np.float64)
    return counts / counts.sum() if len(counts) >= 2 else None


def _chance_loss(
    curves: Curves, shares: Floats | None, num_labels: int | None, floor: float | None
) -> tuple[float, bool]:
    """(loss of the best constant, whether it is that)."""
    if floor is not None:
        return floor, True
    if shares is not None:
        return float(-(shares * np.log(shares)).sum()), True
    if num_labels is not None and num_labels >= 2:
        return math.log(num_labels), True
    r2, mse = (curves.metric("validation", name).finite().value for name in ("r2", "mse"))
    if len(r2) and len(mse) and r2[-1] < 1:
        return float(mse[-1] / (1 - r2[-1])), True
    # A journal alone: a fresh head knows nothing, so the first steps show about what chance is.
    first = curves.train_loss.finite().value[: max(5, len(curves.train_loss) // 50)]
    return (float(np.median(first)) if len(first) else math.log(2)), False


def _train_loss_at(curves: Curves, steps: NDArray[np.int64]) -> Floats:
    """Loss of the training sample where it was evaluated, else the mean of the steps since half an interval before."""
    sample = curves.metric("train_sample", "loss").finite()
    raw = curves.train_loss.finite()
    found, before = [], 0
    for step in steps:
        hit = np.flatnonzero(sample.step == step)
        window = raw.value[(raw.step > (before + step) / 2) & (raw.step <= step)]
        mean = float(window.mean()) if len(window) else math.nan
        found.append(float(sample.value[hit[0]]) if len(hit) else mean)
        before = int(step)
    return np.array(found, dtype=np.float64)


def _scores_at(curves: Curves, split: str, metric: str | None, steps: NDArray[np.int64]) -> Floats:
    found = np.full(len(steps), np.nan)
    if metric is not None:
        series = curves.metric(split, metric)
        known = dict(zip(series.step.tolist(), series.value.tolist(), strict=True))
        sign = 1.0 if greater_is_better(metric) else -1.0  # a score: larger is better
        found = np.array([sign * known.get(int(s), math.nan) for s in steps], dtype=np.float64)
    return found
