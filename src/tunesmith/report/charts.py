"""Charts of the report: a picture, the values that a pointer or the arrow keys read off it, and words for readers who see
neither; and the predictions of one split explained: labels, confusions, reliability, distances, mistakes, slices.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.curves.panels import Panel, main_panels, more_panels
from tunesmith.curves.pictures import Picture, agreement_picture, panel_picture, reliability_picture, residual_picture
from tunesmith.curves.series import Curves, Floats, Series
from tunesmith.labels import Task
from tunesmith.metrics.calibration import ReliabilityBin, expected_calibration_error, reliability_bins
from tunesmith.report.mistakes import (
    Confusion,
    LabelCount,
    Mistake,
    Slice,
    count_confusions,
    count_labels,
    find_mistakes,
    find_slices,
)
from tunesmith.report.predictions import PredictedRows

HOVER_POINTS = 3000
"""Runs up to this many steps can be read step by step; of longer ones each bucket's lowest and highest."""


@dataclass(frozen=True, slots=True)
class Chart:
    """`data` is what the page's script needs: axes box, x limits, series with their points; empty where nothing is read off."""

    key: str
    title: str
    alt: str
    light: str
    dark: str
    data: dict[str, Any]


def make_charts(curves: Curves) -> tuple[list[Chart], list[Chart]]:
    """The charts to show first (loss and metric) and those to unfold (rate, gradient norm, throughput)."""
    first = [_chart([curves], [panel], _words(curves, panel)) for panel in main_panels(curves) if not panel.is_empty]
    return first, [_chart([curves], [panel], _words(curves, panel)) for panel in more_panels(curves)]


def overlay_charts(runs: Sequence[Curves]) -> list[Chart]:
    """Loss and main metric with one colour a run. Values are read off the validation lines, or the smoothed training loss."""
    metric = next((m for run in runs if (m := run.main_metric())), None)
    charts = []
    for panels in zip(*(main_panels(run, metric) for run in runs), strict=True):
        for kind in ("points", "smooth"):
            lines = [(r.name, k.series) for r, p in zip(runs, panels, strict=True) for k in p.lines if k.kind == kind]
            lines = [(name, series) for name, series in lines if len(series)]
            if lines:
                ends = [(name, series.finite().value) for name, series in lines]
                words = "; ".join(f"{name} ends at {value[-1]:.3f}" for name, value in ends if len(value))
                alt = f"{panels[0].title} on validation rows by step, one line a run: {words}."
                charts.append(_chart(runs, panels, alt, lines))
                break
    return charts


def reliability_chart(bins: Sequence[ReliabilityBin]) -> Chart:
    """The reliability diagram."""
    rows = [(b.low, b.high, b.confidence, b.accuracy, b.accuracy_low, b.accuracy_high) for b in bins]
    words = "; ".join(f"at {b.confidence:.2f} it is right {b.accuracy:.2f} of the time ({b.count} rows)" for b in bins)
    step, value = np.array([b.confidence for b in bins]), np.array([b.accuracy for b in bins])
    chart = _still("reliability", "Reliability", f"Reliability diagram: {words}.", picture := reliability_picture(rows))
    return replace(chart, data=_data(picture, [("right", _points(step, value))], "confidence"))


def value_charts(true: Floats, predicted: Floats) -> list[Chart]:
    """Predicted against true values, and how far off the predictions are."""
    off = predicted - true
    ranges = [f"between {v.min():.3g} and {v.max():.3g}" for v in (predicted, true)]
    words = f"from {off.min():.3g} to {off.max():.3g}, {off.mean():.3g} on average"
    pictures = (
        ("agreement", "Predicted against true", "Predicted values lie {}, true ones {}.".format(*ranges)),
        ("residuals", "Residuals", f"Predicted minus true value of {len(off)} rows: {words}."),
    )
    drawn = (agreement_picture(true, predicted), residual_picture(off))
    return [_still(*words, picture) for words, picture in zip(pictures, drawn, strict=True)]


def _still(key: str, title: str, alt: str, picture: Picture) -> Chart:
    """A chart without values to read off."""
    return Chart(key, title, alt, _uri(picture.light), _uri(picture.dark), {})


def _chart(
    runs: Sequence[Curves], panels: Sequence[Panel], alt: str, lines: list[tuple[str, Series]] | None = None
) -> Chart:
    """`lines` can be read value by value: those of the panel unless given."""
    panel, picture = panels[0], panel_picture(runs, panels)
    if lines is None:
        lines = [(line.name, line.series) for line in panel.lines if len(line.series)]
        lines = lines[:1] if not panel.metric else lines
    most = HOVER_POINTS if len(runs) == 1 else HOVER_POINTS // 2
    read = [(name, _points(thin.step, thin.value)) for name, thin in ((n, s.thinned(most)) for n, s in lines)]
    title = panel.metric if panel.key == "metric" else panel.title
    return Chart(panel.key, title, alt, _uri(picture.light), _uri(picture.dark), _data(picture, read, "step"))


def _data(picture: Picture, lines: list[tuple[str, list[list[float | None]]]], unit: str) -> dict[str, Any]:
    box = [round(v, 5) for v in picture.box]
    return {"box": box, "x": list(picture.x), "unit": unit, "series": [{"name": n, "points": p} for n, p in lines]}


def _points(x: Any, y: Any) -> list[list[float | None]]:
    return [[_short(a), _short(b)] for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def _short(value: float) -> float | None:
    """Six digits: what a person reads; a gap is null."""
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _uri(svg: bytes) -> str:
    """A data address. In an <img> an SVG is a picture only: it runs no script and loads nothing."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")


def _words(curves: Curves, panel: Panel) -> str:
    """What the panel shows, in a sentence."""
    if panel.key == "loss":
        return _loss_words(curves)
    ends = [(line.name, line.series.finite().value) for line in panel.lines]
    ends = [(name, value) for name, value in ends if len(value)]
    if panel.metric:
        words = "; ".join(f"{name} goes from {value[0]:.3f} to {value[-1]:.3f}" for name, value in ends)
        return f"{panel.metric} by step: {words}."
    good = ends[0][1]
    return f"{panel.title} by step: between {good.min():.3g} and {good.max():.3g}, {good[-1]:.3g} at the end."


def _loss_words(curves: Curves) -> str:
    words = []
    smooth = curves.train_loss.finite().smoothed()
    if len(smooth):
        words.append(
            f"training goes from {smooth.value[0]:.2f} to {smooth.value[-1]:.2f} over {curves.last_step} steps"
        )
    unseen = curves.metric("validation", "loss").finite()
    low = unseen.best()
    if low:
        words.append(f"validation is lowest at step {low[0]} ({low[1]:.2f}) and ends at {unseen.value[-1]:.2f}")
    if curves.non_finite:
        words.append(f"{len(curves.non_finite)} steps were not finite")
    return f"Loss by step: {'; '.join(words)}."


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
