"""What the rows of a run show: each sign is a number with a stated error, relative to the best constant on the same rows.

The rows of one evaluation show how alike the answers are, how often the most confident ones are right, and which class is
ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tunesmith.diagnosis.thresholds import ERROR_RATE
from tunesmith.errors import DataError
from tunesmith.labels import Task
from tunesmith.metrics.row_evidence import RowEvidence, decode_rows
from tunesmith.runs.series import Curves, Floats


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

    def score_change(self) -> Change:
        """From the best score to the last one."""
        best = int(np.argmax(np.nan_to_num(self.scores, nan=-1.0)))
        before, after = (self.validation[k].score_parts()[1] for k in (best, -1))
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


def loss_share(rows: RowEvidence) -> float:
    """The mean loss as a share of the best constant's."""
    return finite_mean(rows.loss) / max(1e-9, finite_mean(rows.constant_loss))


def answer_spread(rows: RowEvidence) -> float:
    """How much the answers differ between rows of one label: 0 when every row gets the same."""
    if rows.task is Task.REGRESSION:
        scale = float(rows.labels.std()) or 1.0
        return float(rows.predictions.std()) / scale if np.isfinite(rows.predictions).all() else 0.0
    if not np.isfinite(rows.loss).all():
        return 0.0
    groups = np.unique(rows.labels, axis=0, return_inverse=True)[1].reshape(-1)
    inside = [rows.loss[groups == g] for g in range(int(groups.max()) + 1)]
    return float(np.sqrt(sum(((part - part.mean()) ** 2).sum() for part in inside) / len(rows)))


def sure_accuracy(rows: RowEvidence, share: float = 0.25) -> float:
    """How often the rows with the highest confidence are right; NaN where there is none."""
    if not np.isfinite(rows.confidence).all():
        return math.nan
    surest = np.argsort(-np.abs(rows.confidence), kind="stable")[: max(10, round(share * len(rows)))]
    return float(rows.hits[surest].mean())


def plateau(rows: RowEvidence) -> float:
    """The share of wrong rows among the surest ones, beside that of all rows: near 1 where confidence says nothing about being
    right, as with labels replaced at random; near 0 where a task is hard for some rows and easy for others."""
    wrong = float(1 - rows.hits.mean())
    return (1 - sure_accuracy(rows)) / wrong if wrong > 0 else 0.0


def overconfidence(rows: RowEvidence) -> float:
    """Mean confidence minus how often it is right: positive when the model is surer than that; NaN without a confidence."""
    return float(np.abs(rows.confidence).mean() - rows.hits.mean())


def describe_answers(rows: RowEvidence) -> dict[str, float]:
    """Signs of one set of rows. `top`: the confidence that one row in ten exceeds, low with labels replaced at random; `gain`:
    the score above the constant's, as a share of what a perfect one would have."""
    confidence = np.abs(rows.confidence)
    return {
        "loss": loss_share(rows),
        "gain": gain_of_score(rows).size / max(0.05, 1 - rows.constant_parts()[0]),
        "sure": sure_accuracy(rows),
        "plateau": plateau(rows),
        "over": overconfidence(rows),
        "top": float(np.quantile(confidence, 0.9)) if np.isfinite(confidence).all() else math.nan,
    }


def ignored_classes(rows: RowEvidence) -> list[tuple[int, int]]:
    """(class, its rows) of each class with at least 5 rows that is predicted for at most one in 20 of them."""
    if rows.task not in (Task.BINARY, Task.MULTICLASS):
        return []
    found = []
    for name in range(len(rows.constant.values)):
        own = rows.labels == name
        if own.sum() >= 5 and (rows.predictions[own] == name).mean() <= 0.05:
            found.append((name, int(own.sum())))
    return found


def turned(rows: RowEvidence) -> float:
    """How surely the answers mean other labels than the rows have: 1 is significant at 1% over all pairs of labels.

    Rows of another label are called "a" more often than rows of label "a" are (a test of two shares); the answers of a regression
    fall where its labels rise. Neither a hard task nor labels without meaning do that.
    """
    if rows.task is Task.REGRESSION:
        return -rows.score_parts()[0] * math.sqrt(max(1, len(rows) - 1)) / needed_z(1, ERROR_RATE)
    width = len(rows.constant.values)
    many = rows.task is Task.MULTILABEL
    has = rows.labels.astype(bool) if many else rows.labels[:, None] == np.arange(width)
    said = rows.predictions.astype(bool) if many else rows.predictions[:, None] == np.arange(width)
    best = -math.inf
    for name in range(width):
        own = said[has[:, name], name]
        for other in range(width):
            others = said[has[:, other] & ~has[:, name], name]
            if other != name and min(len(own), len(others)) >= 5:
                best = max(best, _share_z(others, own))
    return best / needed_z(width * (width - 1), ERROR_RATE)


def _share_z(one: NDArray[np.bool_], other: NDArray[np.bool_]) -> float:
    """By how many standard errors the first share is above the second."""
    both = float(np.concatenate([one, other]).mean())
    error = math.sqrt(both * (1 - both) * (1 / len(one) + 1 / len(other)))
    return float(one.mean() - other.mean()) / error if error > 0 else 0.0
