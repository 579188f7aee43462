"""What the rows of a run show: each sign is a number with a stated error, relative to the best constant on the same rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tunesmith.curves.series import Curves, Floats
from tunesmith.errors import DataError
from tunesmith.labels import Task
from tunesmith.metrics.row_evidence import RowEvidence, decode_rows


@dataclass(frozen=True, slots=True)
class Change:
    """A paired difference over the same rows: its mean, its standard error, and the mean before it."""

    size: float
    error: float
    before: float = 0.0

    @property
    def z(self) -> float:
        """The difference in standard errors; 0 where rows do not differ at all."""
        if self.error > 0:
            return self.size / self.error
        return 0.0 if self.size == 0 or not math.isfinite(self.size) else math.copysign(99.0, self.size)


def change_between(before: Floats, after: Floats) -> Change:
    """The mean of `after - before` with its exact standard error; rows where one is not finite do not count."""
    gap = after - before
    good = np.isfinite(gap)
    gap = gap[good]
    if len(gap) < 2:
        return Change(math.nan, math.nan)
    return Change(float(gap.mean()), float(gap.std(ddof=1) / math.sqrt(len(gap))), float(before[good].mean()))


def needed_z(comparisons: int, error_rate: float = 0.01) -> float:
    """The z that one of so many comparisons exceeds by chance with this probability in all (Bonferroni, one-sided)."""
    share = error_rate / max(1, comparisons)
    low, high = 0.0, 12.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 0.5 * math.erfc(middle / math.sqrt(2)) > share else (low, middle)
    return high


@dataclass(frozen=True, slots=True, eq=False)
class RowSigns:
    """The evaluations of a run with rows, in step order. Losses are plain ones: no smoothing, no class weights."""

    steps: tuple[int, ...]
    validation: tuple[RowEvidence, ...]
    train: tuple[RowEvidence | None, ...]

    @property
    def task(self) -> Task:
        """The task of the rows."""
        return self.validation[-1].task

    @property
    def losses(self) -> Floats:
        """Mean validation loss by evaluation; infinite where a row's loss is not finite."""
        return np.array([finite_mean(rows.loss) for rows in self.validation])

    @property
    def scores(self) -> Floats:
        """Accuracy, micro F1 or Pearson's r by evaluation."""
        return np.array([rows.score_parts()[0] for rows in self.validation])

    @property
    def best(self) -> int:
        """The evaluation with the lowest validation loss."""
        return int(np.argmin(self.losses))

    @property
    def constant_loss(self) -> float:
        """What the best constant costs on the validation rows."""
        return finite_mean(self.validation[-1].constant_loss)

    @property
    def constant_score(self) -> float:
        """What the best constant scores on the validation rows."""
        return self.validation[-1].constant_parts()[0]

    def gain(self, at: int = -1) -> Change:
        """By how much the loss is below that of the constant."""
        rows = self.validation[at]
        return change_between(rows.loss, rows.constant_loss)

    def score_gain(self, at: int = -1) -> Change:
        """By how much the score is above that of the constant."""
        return gain_of_score(self.validation[at])

    def rise(self) -> Change:
        """From the lowest validation loss to the last."""
        return change_between(self.validation[self.best].loss, self.validation[-1].loss)

    def score_change(self, since: int) -> Change:
        """From an evaluation's score to the last one."""
        before, after = (self.validation[k].score_parts()[1] for k in (since, -1))
        return change_between(before, after)


def finite_mean(values: Floats) -> float:
    return float(values.mean()) if len(values) and np.isfinite(values).all() else math.inf


def gain_of_score(rows: RowEvidence) -> Change:
    """Pearson's r of answers that do not differ is 0 with the error of unrelated rows."""
    (own, parts), (_, constant) = rows.score_parts(), rows.constant_parts()
    change = change_between(constant, parts)
    if rows.task is Task.REGRESSION:
        return Change(own, max(change.error, (1 - own**2) / math.sqrt(max(2, len(rows) - 1))))
    return change


def read_rows(curves: Curves) -> RowSigns | None:
    """The rows of the validation split, and of the training sample beside them; None when the run has none."""
    texts = curves.row_texts.get("validation", {})
    beside = curves.row_texts.get("train_sample", {})
    found: list[tuple[int, RowEvidence, RowEvidence | None]] = []
    try:
        for step in sorted(texts):
            sample = decode_rows(beside[step]) if step in beside else None
            found.append((step, decode_rows(texts[step]), sample))
    except DataError:
        return None
    if not found or any(len(rows) != len(found[0][1]) or rows.task is not found[0][1].task for _, rows, _ in found):
        return None
    steps, validation, train = zip(*found, strict=True)
    return RowSigns(tuple(steps), tuple(validation), tuple(train))
