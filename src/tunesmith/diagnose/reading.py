"""What the rules look at: the curves of a run, brought onto the steps of its evaluations, with their noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.curves.series import Curves, Floats, greater_is_better
from tunesmith.diagnose.thresholds import HIGH_RATE, LOSS_SPREAD, LOW_RATE, PAIRED


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
    rows: int
    chance_loss: float
    """Loss of knowing only the class shares."""
    chance_accuracy: float | None
    """Accuracy of always giving the most frequent class; None when unknown or when the score is another one."""
    running: bool = False
    """Whether the run goes on."""

    def __len__(self) -> int:
        return len(self.step)

    @property
    def best(self) -> int:
        """Index of the lowest validation loss."""
        return int(np.argmin(self.val_loss))

    @property
    def smooth_train(self) -> Floats:
        """The smoothed training loss, without gaps."""
        return self.curves.train_loss.finite().smoothed().value

    def loss_noise(self, loss: float) -> float:
        """One standard error of the difference of two validation losses about this high."""
        return PAIRED * LOSS_SPREAD * loss * math.sqrt(2 / max(1, self.rows))

    def score_noise(self, score: float) -> float:
        """One standard error of the difference of two validation scores about this high."""
        inside = min(max(score, 0.02), 0.98)
        return PAIRED * math.sqrt(2 * inside * (1 - inside) / max(1, self.rows))

    def at_chance(self) -> bool | None:
        """Whether the last validation score is no better than the most frequent class; None when unknown."""
        if self.chance_accuracy is None or not len(self) or not math.isfinite(self.val_score[-1]):
            return None
        inside = self.chance_accuracy * (1 - self.chance_accuracy)
        error = math.sqrt(inside / max(1, self.rows))
        return bool(self.val_score[-1] <= self.chance_accuracy + 2 * error)

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
    running: bool = False,
) -> Reading:
    """A pure function of its arguments; nothing is read from disk."""
    loss = curves.metric("validation", "loss").finite()
    metric = "accuracy" if "accuracy" in curves.metric_names else curves.main_metric()
    shares = _shares(label_counts)
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
        rows=curves.rows.get("validation", 0),
        chance_loss=_chance_loss(curves, shares, num_labels),
        chance_accuracy=float(shares.max()) if shares is not None and metric == "accuracy" else None,
        running=running,
    )


def _shares(label_counts: Mapping[str, int] | None) -> Floats | None:
    counts = np.array([c for c in (label_counts or {}).values() if c > 0], dtype=np.float64)
    return counts / counts.sum() if len(counts) >= 2 else None


def _chance_loss(curves: Curves, shares: Floats | None, num_labels: int | None) -> float:
    if shares is not None:
        return float(-(shares * np.log(shares)).sum())
    if num_labels is not None and num_labels >= 2:
        return math.log(num_labels)
    # Unknown task (regression, a journal alone): a fresh head knows nothing, so the first steps show what chance is.
    first = curves.train_loss.finite().value[: max(5, len(curves.train_loss) // 50)]
    return float(np.median(first)) if len(first) else math.log(2)


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
