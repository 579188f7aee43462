"""Charts of the report: a picture in both themes, the values that a pointer or the arrow keys read off it, and words for readers
who see neither; and the predictions of one split explained: labels, confusions, reliability, distances, mistakes.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.labels import Task
from tunesmith.metrics.abstain import HeldOut, coverage_curve
from tunesmith.metrics.calibration import ReliabilityBin, expected_calibration_error, reliability_bins
from tunesmith.report.plots import (
    THEMES,
    Panel,
    Theme,
    darken,
    draw_legend,
    draw_panel,
    figure_bytes,
    labels_width,
    main_panels,
    more_panels,
    new_figure,
    style_axes,
)
from tunesmith.report.predictions import (
    Confusion,
    LabelCount,
    Mistake,
    PredictedRows,
    count_confusions,
    count_labels,
    find_mistakes,
)
from tunesmith.runs.curves import Curves, Floats, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 4.9, 3.3
"""Inches. At 72 points an inch about 350 points wide: text stays readable on a phone."""
BOTTOM, TOP = 0.15, 0.86
"""Shares of the height between which the axes lie. Only the labels of the y axis differ in size."""
MOST_DOTS = 1500
"""Rows drawn as dots: of more, a sample."""


HOVER_POINTS = 3000
"""Runs up to this many steps can be read step by step; of longer ones each bucket's lowest and highest."""
Lines = list[tuple[str, NDArray[Any], NDArray[Any]]]
"""(name, x, y) of the curves whose values can be read off a chart."""


@dataclass(frozen=True, slots=True)
class Chart:
    """`data` is what the page's script needs: axes box, x limits, series with their points; empty where nothing is read off."""

    key: str
    title: str
    alt: str
    light: str
    dark: str
    data: dict[str, Any]


def _make_chart(
    key: str, title: str, alt: str, draw: Callable[[Axes, Theme], None], lines: Lines | None = None, unit: str = "step"
) -> Chart:
    """Return what `draw` draws. It is drawn once: the dark picture is the light one in other colors."""
    figure = new_figure(width=WIDTH, height=HEIGHT, theme="light")
    axes = figure.add_axes((0.1, BOTTOM, 0.87, TOP - BOTTOM))
    draw(axes, THEMES["light"])
    canvas: Any = figure.canvas
    left = 0.025 + float(labels_width(axes, canvas.get_renderer()))
    axes.set_position((left, BOTTOM, 0.975 - left, TOP - BOTTOM))
    light = figure_bytes(figure, "svg")
    data: dict[str, Any] = {}
    if lines is not None:
        box = [round(v, 5) for v in (left, 1 - TOP, 0.975 - left, TOP - BOTTOM)]
        series = [
            {"name": name, "points": [[_short(a), _short(b)] for a, b in zip(x.tolist(), y.tolist(), strict=True)]}
            for name, x, y in lines
        ]
        data = {"box": box, "x": [float(end) for end in axes.get_xlim()], "unit": unit, "series": series}
    return Chart(key, title, alt, _uri(light), _uri(darken(light)), data)


def make_charts(curves: Curves) -> tuple[list[Chart], list[Chart]]:
    """The charts to show first (loss and metric) and those to unfold (rate, gradient norm, throughput)."""
    first = [_panel_chart([curves], [p], _words(curves, p)) for p in main_panels(curves) if not p.is_empty]
    return first, [_panel_chart([curves], [p], _words(curves, p)) for p in more_panels(curves)]


def overlay_charts(runs: Sequence[Curves]) -> list[Chart]:
    """Loss and main metric with one color a run. Values are read off the validation lines, or the smoothed training loss."""
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
                charts.append(_panel_chart(runs, panels, alt, lines))
                break
    return charts


def _panel_chart(
    runs: Sequence[Curves], panels: Sequence[Panel], alt: str, lines: list[tuple[str, Series]] | None = None
) -> Chart:
    """One panel by step, of several runs on top of each other. `lines` can be read value by value: by default the panel's."""
    panel, last = panels[0], max(run.last_step for run in runs)
    if lines is None:
        lines = [(line.name, line.series) for line in panel.lines if len(line.series)]
        lines = lines[:1] if not panel.metric else lines

    def draw(axes: Axes, theme: Theme) -> None:
        draw_panel(axes, runs, panels, theme)
        if panel.key == "metric" and last:  # the same scale as the loss panel next to it
            axes.set_xlim(-0.045 * last, 1.045 * last)

    thin = [(name, series.thinned(HOVER_POINTS if len(runs) == 1 else HOVER_POINTS // 2)) for name, series in lines]
    title = panel.metric if panel.key == "metric" else panel.title
    return _make_chart(panel.key, title, alt, draw, [(name, one.step, one.value) for name, one in thin])


def reliability_chart(bins: Sequence[ReliabilityBin]) -> Chart:
    """How often each bin is right: bars side by side, each with its interval."""

    def draw(axes: Axes, theme: Theme) -> None:
        style_axes(axes, theme, title="Share that is right", x_label="confidence")
        color, middle = theme.side("validation"), [(b.low + b.high) / 2 for b in bins]
        height, wide = [b.accuracy for b in bins], [0.84 * (b.high - b.low) for b in bins]
        axes.bar(middle, height, width=wide, color=color, alpha=0.3, linewidth=0)
        spread = [[b.accuracy - b.accuracy_low for b in bins], [b.accuracy_high - b.accuracy for b in bins]]
        look: dict[str, Any] = {"fmt": "o", "ms": 4.5, "elinewidth": 1.4, "capsize": 3}
        axes.errorbar(middle, height, yerr=spread, color=color, label="right", **look)
        ends = [(x - w / 2, x + w / 2) for x, w in zip(middle, wide, strict=True)]
        sure = [b.confidence for b in bins]
        axes.hlines(sure, *zip(*ends, strict=True), color=theme.text, linewidth=1.8, label="confidence")
        axes.set_xlim(min([0.5, *(b.low for b in bins)]) - 0.02, 1.02)
        axes.set_ylim(0, 1.04)
        draw_legend(axes, theme)

    words = "; ".join(f"at {b.confidence:.2f} it is right {b.accuracy:.2f} of the time ({b.count} rows)" for b in bins)
    lines = [("right", np.array([b.confidence for b in bins]), np.array([b.accuracy for b in bins]))]
    return _make_chart("reliability", "Reliability", f"Reliability diagram: {words}.", draw, lines, "confidence")


def coverage_chart(curve: Sequence[tuple[float, float]]) -> Chart:
    """Error rate of the answered examples by their share, from the most confident example to all."""
    share, error = (np.array(values) for values in zip(*curve, strict=True))

    def draw(axes: Axes, theme: Theme) -> None:
        style_axes(axes, theme, title="Error rate of answered examples", x_label="share of answered examples")
        axes.plot(share, error, color=theme.side("validation"), linewidth=1.8)
        axes.set_xlim(0, 1.02)
        axes.set_ylim(bottom=0)

    at_half = float(error[np.searchsorted(share, 0.5)])
    words = f"the most confident half has an error rate of {at_half:.3f}, all examples {error[-1]:.3f}"
    some = np.unique(np.linspace(0, len(share) - 1, HOVER_POINTS).astype(int))
    lines = [("error rate", share[some], error[some])]
    return _make_chart("coverage", "Coverage", f"Error rate by coverage: {words}.", draw, lines, "share answered")


def value_chart(true: Floats, predicted: Floats) -> Chart:
    """Predicted against true values; the line is where both are equal."""
    some = np.random.default_rng(0).permutation(len(true))[:MOST_DOTS]
    ends = [float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))]

    def draw(axes: Axes, theme: Theme) -> None:
        style_axes(axes, theme, title="Predicted", x_label="true value")
        faint, color = max(0.15, min(0.7, 60 / len(some))), theme.side("validation")
        axes.scatter(true[some], predicted[some], s=14, color=color, alpha=faint, linewidths=0)
        axes.plot(ends, ends, color=theme.muted, linewidth=1.3, linestyle=(0, (4, 3)), label="equal")
        draw_legend(axes, theme)

    lie, are = (f"between {v.min():.3g} and {v.max():.3g}" for v in (predicted, true))
    return _make_chart("agreement", "Predicted against true", f"Predicted values are {lie}, true ones {are}.", draw)


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
    smooth = curves.train_loss.finite().smoothed().value
    if len(smooth):
        words.append(f"training goes from {smooth[0]:.2f} to {smooth[-1]:.2f} over {curves.last_step} steps")
    unseen = curves.metric("validation", "loss").finite()
    low = unseen.best()
    if low:
        words.append(f"validation is lowest at step {low[0]} ({low[1]:.2f}) and ends at {unseen.value[-1]:.2f}")
    if curves.non_finite:
        words.append(f"{len(curves.non_finite)} steps were NaN or infinite")
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
    coverage: list[tuple[float, float]]
    """(share of answered examples, their error rate), as `--max_error` trades them; empty unless examples have one class."""
    values: tuple[Floats, Floats] | None
    """True and predicted values, in regression."""
    mistakes: list[Mistake]


def explain_rows(predictions: PredictedRows) -> Explained:
    """Everything that the rows say."""
    table, labels = _decisions(predictions)
    finite = np.isfinite(predictions.predicted)
    values = predictions.labels[finite], predictions.predicted[finite]
    confident = (
        table is not None and predictions.task in (Task.BINARY, Task.MULTICLASS) and (predictions.predicted >= 0).all()
    )
    return Explained(
        split=predictions.split,
        rows=len(predictions),
        wrong=int((~predictions.right).sum()) if predictions.names else 0,
        several=predictions.task is Task.MULTILABEL,
        label_counts=count_labels(predictions),
        confusion=count_confusions(predictions),
        bins=reliability_bins(table, labels, num_bins=10) if table is not None else (),
        calibration_error=expected_calibration_error(table, labels) if table is not None else None,
        coverage=coverage_curve(HeldOut.of(table, predictions.predicted, labels)) if confident else [],
        values=values if predictions.task is Task.REGRESSION and len(values[0]) else None,
        mistakes=find_mistakes(predictions),
    )


def _decisions(predictions: PredictedRows) -> tuple[Any, Any]:
    """(probabilities, right answers) of every decision: one a row, or one for each label of a row that may have several."""
    if predictions.probabilities is None or predictions.task is not Task.MULTILABEL:
        return predictions.probabilities, predictions.labels
    yes = predictions.probabilities.ravel()
    return np.stack([1 - yes, yes], axis=1), predictions.labels.ravel()
