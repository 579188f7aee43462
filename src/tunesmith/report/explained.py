"""The predictions of one split explained: labels, confusions, reliability, distances, mistakes, slices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.labels import Task
from tunesmith.metrics.calibration import ReliabilityBin, expected_calibration_error, reliability_bins
from tunesmith.report.mistakes import Confusion, LabelCount, Mistake, count_confusions, count_labels, find_mistakes
from tunesmith.report.predictions import PredictedRows
from tunesmith.report.slices import Slice, find_slices


@dataclass(frozen=True, slots=True, eq=False)
class Explained:
    """What a model gets right and wrong on the rows of one split."""

    split: str
    rows: int
    wrong: int
    several: bool
    """Whether a row may have several labels."""
    label_counts: list[LabelCount]
    """Each label by itself, the worst first."""
    confusion: Confusion | None
    bins: tuple[ReliabilityBin, ...]
    calibration_error: float | None
    values: tuple[NDArray[np.float64], NDArray[np.float64]] | None
    """True and predicted values, in regression."""
    mistakes: list[Mistake]
    slices: list[Slice]


def explain_rows(predictions: PredictedRows) -> Explained:
    """Everything that the rows say."""
    table, labels = _decisions(predictions)
    finite = np.isfinite(predictions.predicted)
    values = predictions.labels[finite], predictions.predicted[finite]
    return Explained(
        split=predictions.split,
        rows=len(predictions),
        wrong=int((~predictions.right).sum()) if predictions.names else 0,
        several=predictions.task is Task.MULTILABEL,
        label_counts=count_labels(predictions),
        confusion=count_confusions(predictions),
        bins=reliability_bins(table, labels, num_bins=10) if table is not None else (),
        calibration_error=expected_calibration_error(table, labels) if table is not None else None,
        values=values if predictions.task is Task.REGRESSION and len(values[0]) else None,
        mistakes=find_mistakes(predictions),
        slices=find_slices(predictions) if predictions.names else [],
    )


def _decisions(predictions: PredictedRows) -> tuple[Any, Any]:
    """(probabilities, right answers) of every decision: one a row, or one for each label of a row that may have several."""
    if predictions.probabilities is None or predictions.task is not Task.MULTILABEL:
        return predictions.probabilities, predictions.labels
    yes = predictions.probabilities.ravel()
    return np.stack([1 - yes, yes], axis=1), predictions.labels.ravel()
