"""Abstain when unsure: a confidence threshold that keeps the error rate of the answered examples below a limit.

The threshold is chosen on held-out examples (the validation examples of a run). It is the lowest one whose answered examples
pass an exact binomial test of "the error rate is above the limit". Because the lowest of many thresholds is taken, each test
has half the allowed risk; bench/abstain.py measures how often the limit is exceeded on new examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tunesmith.errors import DataError

CONFIDENCE = 0.95
MOST_EXAMPLES = 20_000
"""Held-out examples that are stored with a model."""


@dataclass(frozen=True)
class HeldOut:
    """The confidence (largest probability), predicted class and correctness of held-out examples."""

    confidence: npt.NDArray[np.float64]
    predicted: npt.NDArray[np.int64]
    correct: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, probabilities: npt.NDArray[Any], predicted: npt.NDArray[Any], labels: npt.NDArray[Any]) -> HeldOut:
        """Take the labeled examples (label ids of at least 0) of a table of probabilities, one column per class."""
        known = np.flatnonzero(labels >= 0)[:MOST_EXAMPLES]
        table = np.asarray(probabilities, dtype=np.float64)[known]
        predicted = np.asarray(predicted, dtype=np.int64)[known]
        return cls(confidence_of(table, predicted), predicted, predicted == labels[known])

    def to_json(self) -> dict[str, list[Any]]:
        """Return plain lists."""
        return {
            "confidence": [round(float(value), 7) for value in self.confidence],
            "predicted": self.predicted.tolist(),
            "correct": self.correct.astype(int).tolist(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> HeldOut:
        """Return the object that `to_json` described."""
        columns = [np.asarray(data[name]) for name in ("confidence", "predicted", "correct")]
        if len({len(column) for column in columns}) != 1 or any(column.ndim != 1 for column in columns):
            raise ValueError("the columns have different lengths")
        return cls(columns[0].astype(np.float64), columns[1].astype(np.int64), columns[2].astype(bool))


def confidence_of(probabilities: npt.NDArray[Any], predicted: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the probability of the predicted class of each example, rounded so that equal inputs compare equal."""
    table = np.asarray(probabilities, dtype=np.float64)
    found: npt.NDArray[np.float64] = np.round(np.take_along_axis(table, predicted[:, None], axis=1)[:, 0], 7)
    return found


@dataclass(frozen=True)
class Abstention:
    """An example is answered if its confidence is at least the threshold of its predicted class."""

    max_error: float
    thresholds: tuple[float, ...]
    """One per class; infinity: this class is never answered."""
    answered: int
    errors: int
    examples: int
    """Held-out examples, and how many of them are answered and answered wrongly."""

    def answers(self, probabilities: npt.NDArray[Any], predicted: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which examples to answer."""
        limits = np.asarray(self.thresholds)[predicted]
        found: npt.NDArray[np.bool_] = confidence_of(np.asarray(probabilities), predicted) >= limits
        return found

    def line(self) -> str:
        """Describe the choice in one sentence."""
        share = self.answered / self.examples
        values = sorted({f"{t:.4f}" for t in self.thresholds if math.isfinite(t)})
        return (
            f"Abstaining: confidence of at least {' to '.join(values[:: max(1, len(values) - 1)])} answers {share:.1%} of "
            f"{self.examples:,} held-out examples with {self.errors} errors; the error rate of answered examples is at most "
            f"{self.max_error:.2%} with {CONFIDENCE:.0%} confidence."
        )


def choose_thresholds(
    held_out: HeldOut, max_error: float, names: Sequence[str], *, per_class: bool = False
) -> Abstention:
    """Return the lowest threshold (per class: of each predicted class) whose error bound is at most `max_error`.

    Raises a DataError with the reason if there is none.
    """
    groups = (
        [held_out.predicted == k for k in range(len(names))] if per_class else [np.full(len(held_out.predicted), True)]
    )
    found = [_lowest(held_out.confidence[group], held_out.correct[group], max_error) for group in groups]
    thresholds = tuple(found if per_class else found * len(names))
    answered = held_out.confidence >= np.asarray(thresholds)[held_out.predicted]
    if not answered.any():
        raise _impossible(held_out, max_error, per_class=per_class)
    errors = int((answered & ~held_out.correct).sum())
    return Abstention(max_error, thresholds, int(answered.sum()), errors, len(held_out.correct))


def coverage_curve(held_out: HeldOut) -> list[tuple[float, float]]:
    """Return (share of answered examples, their error rate) for every threshold, strictest first."""
    count, errors, _ = _by_threshold(held_out.confidence, held_out.correct)
    return [(k / len(held_out.correct), e / k) for k, e in zip(count.tolist(), errors.tolist(), strict=True)]


def _by_threshold(confidence: Any, correct: Any) -> tuple[Any, Any, Any]:
    """Return answered examples, errors and threshold of every distinct confidence, highest first."""
    order = np.argsort(-confidence, kind="stable")
    ordered = confidence[order]
    last = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True)) if len(ordered) else np.zeros(0, dtype=int)
    return last + 1, np.cumsum(~correct[order])[last], ordered[last]


def _lowest(confidence: Any, correct: Any, max_error: float) -> float:
    count, errors, thresholds = _by_threshold(confidence, correct)
    log_factorial = np.append(0.0, np.cumsum(np.log(np.arange(1, len(confidence) + 1))))
    for k, e, threshold in zip(count[::-1].tolist(), errors[::-1].tolist(), thresholds[::-1].tolist(), strict=True):
        if e > max_error * k:
            continue
        j = np.arange(
            e + 1
        )  # P(at most e errors in k examples) if the error rate is max_error; the runtime has no scipy
        logs = log_factorial[k] - log_factorial[j] - log_factorial[k - j] + j * math.log(max_error)
        if np.exp(logs + (k - j) * math.log1p(-max_error)).sum() <= (1 - CONFIDENCE) / 2:
            return float(threshold)
    return math.inf


def _impossible(held_out: HeldOut, max_error: float, *, per_class: bool) -> DataError:
    needed = math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log1p(-max_error))
    examples, kind = len(held_out.correct), " of one class" if per_class else ""
    if examples < needed:
        reason = f"that takes at least {needed:,} held-out examples{kind}, and there are {examples:,}"
    else:
        lowest = min(error for share, error in coverage_curve(held_out) if share * examples >= needed)
        reason = (
            f"the lowest error rate of {needed:,} or more of the {examples:,} held-out examples{kind} is {lowest:.2%}"
        )
    problem = (
        f"no threshold keeps the error rate at {max_error:.2%} or below with {CONFIDENCE:.0%} confidence: {reason}"
    )
    return DataError(
        problem, fix="Allow a larger --max_error, or set --calibration_file to a file with more labeled examples."
    )
