"""Charts of the report: a picture, the values a pointer or the arrow keys read off it, and words for those who see neither."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.curves.panels import Panel, line_panel, loss_panel, metric_panel, reliability_panel
from tunesmith.curves.series import Curves, Series
from tunesmith.metrics.calibration import ReliabilityBin

HOVER_POINTS = 3000
"""Runs up to this many steps can be read step by step; of longer ones each bucket's lowest and highest."""


@dataclass(frozen=True, slots=True)
class Chart:
    """`data` is what the page's script needs: axes box, x limits, series with their points."""

    key: str
    title: str
    alt: str
    light: str
    dark: str
    data: dict[str, Any]


def make_charts(curves: Curves) -> tuple[list[Chart], list[Chart]]:
    """The charts to show first (loss and metric) and those to unfold (rate, gradient norm, throughput)."""
    first: list[Chart] = []
    if len(curves.train_loss) or len(curves.metric("validation", "loss")):
        smooth = curves.train_loss.smoothed()
        unseen = curves.metric("validation", "loss")
        lines = [("training", curves.train_loss), ("smoothed", smooth), ("validation", unseen)]
        first.append(_chart("loss", "Loss", loss_panel(curves), lines, _loss_words(curves)))
    metric = curves.main_metric()
    if metric:
        seen, unseen = curves.metric("train_sample", metric), curves.metric("validation", metric)
        lines = [("training sample", seen), ("validation", unseen)]
        first.append(_chart("metric", metric, metric_panel(curves, metric), lines, _metric_words(metric, seen, unseen)))
    more = []
    for key, title, series, smooth_view in (
        ("rate", "Learning rate", curves.learning_rate, False),
        ("norm", "Gradient norm (before clipping)", curves.grad_norm, True),
        ("speed", "Real tokens per second", curves.tokens_per_second, True),
    ):
        if len(series.finite()):
            panel = line_panel(series, title, smooth=smooth_view)
            more.append(_chart(key, title, panel, [(title.lower(), series)], _range_words(title, series)))
    return first, more


def reliability_chart(bins: Sequence[ReliabilityBin]) -> Chart:
    """The reliability diagram."""
    rows = [(b.confidence, b.accuracy, b.accuracy_low, b.accuracy_high, b.count) for b in bins]
    words = "; ".join(f"at {b.confidence:.2f} it is right {b.accuracy:.2f} of the time ({b.count} rows)" for b in bins)
    panel = reliability_panel(rows)
    step, value = np.array([b.confidence for b in bins]), np.array([b.accuracy for b in bins])
    data = _data(panel, [("right", _points(step, value))], "confidence")
    return Chart(
        "reliability", "Reliability", f"Reliability diagram: {words}.", _uri(panel.light), _uri(panel.dark), data
    )


def _chart(key: str, title: str, panel: Panel, lines: list[tuple[str, Series]], alt: str) -> Chart:
    read = [(name, _points(*_xy(series.thinned(HOVER_POINTS)))) for name, series in lines if len(series)]
    return Chart(key, title, alt, _uri(panel.light), _uri(panel.dark), _data(panel, read, "step"))


def _data(panel: Panel, lines: list[tuple[str, list[list[float | None]]]], unit: str) -> dict[str, Any]:
    box = [round(v, 5) for v in panel.box]
    return {"box": box, "x": list(panel.x), "unit": unit, "series": [{"name": n, "points": p} for n, p in lines]}


def _xy(series: Series) -> tuple[Any, Any]:
    return series.step, series.value


def _points(x: Any, y: Any) -> list[list[float | None]]:
    return [[_short(a), _short(b)] for a, b in zip(x.tolist(), y.tolist(), strict=True)]


def _short(value: float) -> float | None:
    """Six digits: what a person reads; a gap is null."""
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _uri(svg: bytes) -> str:
    """A data address. In an <img> an SVG is a picture only: it runs no script and loads nothing."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")


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


def _metric_words(metric: str, seen: Series, unseen: Series) -> str:
    words = []
    for name, series in (("training sample", seen.finite()), ("validation", unseen.finite())):
        if len(series):
            words.append(f"{name} goes from {series.value[0]:.3f} to {series.value[-1]:.3f}")
    return f"{metric} by step: {'; '.join(words)}."


def _range_words(title: str, series: Series) -> str:
    good = series.finite().value
    return f"{title} by step: between {good.min():.3g} and {good.max():.3g}, {good[-1]:.3g} at the end."
