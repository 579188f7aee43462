"""The panels of a run: their titles, lines and colors.

PNG, SVG, report and board draw these panels. Every line color has a contrast of at least 3:1 on its background.
"""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tunesmith.files import require_plain, write_file
from tunesmith.labels import Task
from tunesmith.metrics.calibration import (
    HeldOut,
    ReliabilityBin,
    coverage_curve,
    expected_calibration_error,
    reliability_bins,
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
from tunesmith.runs.event_log import Curves, Floats, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Theme:
    """`runs` are the line colors, in order; pictures of one run draw training and validation in the first two."""

    background: str
    text: str
    muted: str
    grid: str
    runs: tuple[str, ...]


LIGHT = Theme(
    background="#ffffff",
    text="#1c2430",
    muted="#5b6675",
    grid="#e6e9ee",
    runs=("#2b6cb0", "#c2410c", "#15803d", "#7e3aac", "#a16207", "#be185d", "#0f766e", "#4b5563"),
)
DARK = Theme(
    background="#161b22",
    text="#e6edf3",
    muted="#9aa7b5",
    grid="#2a323d",
    runs=("#6cb2f7", "#ff9d5c", "#5fd08a", "#c99bf2", "#e3c04f", "#f78fb8", "#4fd1c5", "#a8b3c0"),
)
VALIDATION = LIGHT.runs[1]


def darken(svg: bytes) -> bytes:
    """Return a picture in the dark colors; pictures are drawn in the light ones."""
    pairs = [(getattr(LIGHT, name), getattr(DARK, name)) for name in ("background", "text", "muted", "grid")]
    colors = {a.encode(): b.encode() for a, b in [*pairs, *zip(LIGHT.runs, DARK.runs, strict=True)]}
    return re.sub(rb"#[0-9a-f]{6}\b", lambda found: colors.get(found[0], found[0]), svg)


LineKind = Literal["raw", "smooth", "points", "dashed"]


@dataclass(frozen=True, slots=True, eq=False)
class PanelLine:
    """One curve of a panel. `kind`: how it is drawn; points were measured on validation examples, other lines in training."""

    name: str
    kind: LineKind
    series: Series


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """The data of one panel of one run. `metric` is the name of an evaluated metric, "" for other quantities."""

    key: str
    title: str
    lines: tuple[PanelLine, ...]
    metric: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is no point to draw."""
        return not any(len(line.series.finite()) for line in self.lines)


def main_panels(curves: Curves, metric: str | None = None) -> list[Panel]:
    """Return the panels to show first: loss and metric. `metric` defaults to the main metric."""
    loss, unseen = curves.train_loss, curves.metric("validation", "loss")
    lines: tuple[PanelLine, ...] = (
        PanelLine("training", "raw", loss),
        PanelLine("smoothed", "smooth", loss.smoothed()),
        PanelLine("validation", "points", unseen),
    )
    panels = [Panel("loss", "Loss", lines, "loss")]
    metric = metric or curves.main_metric()
    if metric:
        seen, unseen = curves.metric("train_sample", metric), curves.metric("validation", metric)
        lines = (
            PanelLine("training sample", "dashed", seen),
            PanelLine("validation", "points", unseen),
        )
        panels.append(Panel("metric", metric[:1].upper() + metric[1:].replace("_", " "), lines, metric))
    return panels


def more_panels(curves: Curves) -> list[Panel]:
    """Return panels of learning rate, gradient norm and throughput, if the event log has them."""
    panels = []
    for key, title, series, noisy in (
        ("rate", "Learning rate", curves.learning_rate, False),
        ("norm", "Gradient norm (before clipping)", curves.grad_norm, True),
        ("speed", "Real tokens per second", curves.tokens_per_second, True),
    ):
        lines = [PanelLine(title.lower(), "raw" if noisy else "smooth", series)]
        if noisy:
            lines.append(PanelLine("smoothed", "smooth", series.smoothed()))
        panels.append(Panel(key, title, tuple(lines)))
    return [panel for panel in panels if not panel.is_empty]


POINTS = 1500
"""Raw points drawn per curve: more than a picture has pixels, few enough for an SVG of 100 kB."""
OVERLAID = {"loss": "points: validation", "metric": "dashed: training sample"}
"""Text that a panel adds to the name of its x axis if it shows several runs."""
MIN_SPAN = 0.1
"""Minimum range of the y axis of a panel of scores between 0 and 1."""


def draw_curves(curves: Curves | Sequence[Curves]) -> Figure:
    """Draw loss and metric side by side. Colors are runs if there are several, else splits."""
    runs = [curves] if isinstance(curves, Curves) else list(curves)
    metric = next((m for c in runs if (m := c.main_metric())), None)
    figure = new_figure(width=11.0 if metric else 6.4, height=4.3)
    axes = figure.subplots(1, 2 if metric else 1, squeeze=False)[0]
    for place, panels in zip(axes, zip(*(main_panels(run, metric) for run in runs), strict=True), strict=True):
        draw_panel(place, runs, panels)
        place.set_xlim(axes[0].get_xlim())  # both panels have the same x axis
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    figure.suptitle(_plain(title), color=LIGHT.text, fontsize=13, fontweight="bold", x=0.02, ha="left")
    # matplotlib's own layout takes as long as the drawing.
    margin = 0.66 / figure.get_figwidth()
    figure.subplots_adjust(left=margin, right=0.988, bottom=0.125, top=0.845, wspace=0.16)
    return figure


def _import_matplotlib() -> None:
    """Import matplotlib without MPLBACKEND: only pyplot needs it, and the import fails if it names an unknown backend."""
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import_module("matplotlib")
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend


def new_figure(*, width: float, height: float) -> Figure:
    """Return an empty figure that pyplot doesn't know."""
    _import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=LIGHT.background)
    FigureCanvasAgg(figure)
    return figure


def figure_bytes(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """Return the content of a picture file. SVG text is drawn as shapes, so it looks the same everywhere."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    kinds: dict[str, Any] = {"png": FigureCanvasAgg, "svg": FigureCanvasSVG}
    figure.set_dpi(150)
    out = io.BytesIO()
    canvas = kinds[kind](figure)  # `savefig` would draw twice
    canvas.print_svg(out, metadata={"Date": None}) if kind == "svg" else canvas.print_png(out)
    return out.getvalue()


def write_curves(curves: Curves, *, png: Path, svg: Path) -> None:
    """Write loss and metric as two pictures, or neither if one of them would replace a file of the user."""
    for file in (png, svg):
        require_plain(file)
    figure = draw_curves(curves)
    write_file(png, figure_bytes(figure, "png"))
    write_file(svg, figure_bytes(figure, "svg"))


def style_axes(axes: Axes, *, title: str, x_label: str) -> None:
    """Apply the style of all panels: no box, a light grid, a title on the left."""
    axes.set_facecolor(LIGHT.background)
    axes.set_title(_plain(title), loc="left", color=LIGHT.text, fontsize=11, pad=9)
    axes.set_xlabel(x_label, color=LIGHT.muted, fontsize=10)
    axes.tick_params(colors=LIGHT.muted, labelsize=9.5, length=0, pad=6)
    axes.grid(True, color=LIGHT.grid, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
    axes.yaxis.get_offset_text().set(color=LIGHT.muted, fontsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LIGHT.grid)


def draw_panel(axes: Axes, runs: Sequence[Curves], panels: Sequence[Panel]) -> None:
    """Draw one panel of each run. Colors are runs if there are several, else splits."""
    alone, (key, title, metric) = len(runs) == 1, (panels[0].key, panels[0].title, panels[0].metric)
    style_axes(axes, title=title, x_label="step" if alone or key not in OVERLAID else f"step ({OVERLAID[key]})")
    for index, (run, panel) in enumerate(zip(runs, panels, strict=True)):
        for line in panel.lines:
            color = LIGHT.runs[line.kind == "points" if alone else index % len(LIGHT.runs)]
            label = None
            if not alone:
                label = run.name if line.kind == "points" else None
            elif panel.metric and line.kind != "raw":  # a panel with several lines to tell apart
                label = f"{panel.lines[0].name}, {line.name}" if line.kind == "smooth" else line.name
            if line.kind != "raw" or len(runs) <= 3:
                _draw_line(axes, line, color, label, crowded=not alone)
        if key == "loss":
            _mark_gaps(axes, run)
        if alone and metric:
            _mark_best(axes, run, metric)
    if key == "loss":
        _limit_loss(axes, runs)
    elif key == "metric":
        axes.margins(y=0.12)
        low, high = axes.get_ylim()
        if low >= 0 and high <= 1.1 and high - low < MIN_SPAN:  # a change of half a point must not look like a cliff
            axes.set_ylim((low + high - MIN_SPAN) / 2, (low + high + MIN_SPAN) / 2)
    else:
        axes.set_ylim(bottom=0)
    draw_legend(axes)


def _draw_line(axes: Axes, line: PanelLine, color: str, label: str | None, *, crowded: bool) -> None:
    """Draw raw values faint, smoothed ones bold, and evaluations as points, dashed on training examples."""
    series = line.series
    look: dict[str, Any] = {"color": color, "linewidth": 1.9}
    if not len(series):
        return
    if line.kind in ("raw", "smooth"):
        series = series.thinned(POINTS)
        look |= {"linewidth": 0.8, "alpha": 0.13 if crowded else 0.22} if line.kind == "raw" else {}
    else:
        dashed = line.kind == "dashed"
        look |= {"linestyle": (0, (4, 2)) if dashed else "-", "marker": None if len(series) > 60 else "o"}
        look |= {"markersize": 5, "markerfacecolor": axes.get_facecolor() if dashed else color}
    axes.plot(series.step, series.value, label=None if label is None else _plain(label), **look)


def _mark_best(axes: Axes, run: Curves, metric: str) -> None:
    best = run.best()
    if best is None:
        return
    series = run.metric("validation", metric)
    at = np.flatnonzero((series.step == best[1]) & np.isfinite(series.value))
    if not len(at):
        return
    where, value = float(series.step[at[0]]), float(series.value[at[0]])
    axes.axvline(where, color=LIGHT.muted, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
    axes.plot([where], [value], "o", ms=11, markerfacecolor="none", markeredgecolor=LIGHT.text, markeredgewidth=1.3)
    # Under the axes, at the end of the line that names them: a note inside would cover points.
    axes.annotate(
        f"best: step {best[1]}, {value:.3f}",
        (1, 0),
        xytext=(0, -25),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=9.5,
        color=LIGHT.text,
    )


def _mark_gaps(axes: Axes, run: Curves) -> None:
    """Draw a cross on the axis at steps with a NaN or infinite loss or gradient."""
    bad = np.isin(run.train_loss.step, run.non_finite) | ~np.isfinite(run.train_loss.value)
    if len(at := run.train_loss.step[bad][:200]):
        look: dict[str, Any] = {"color": VALIDATION, "transform": axes.get_xaxis_transform(), "clip_on": False}
        axes.plot(at, [0.02] * len(at), "x", label="NaN or infinite", **look)


def _limit_loss(axes: Axes, runs: Sequence[Curves]) -> None:
    """Set limits from 0 to slightly above nearly all points, so that one spike doesn't flatten the curve."""
    values = np.concatenate([run.train_loss.finite().value for run in runs])
    shown = [run.metric("validation", "loss").finite().value for run in runs]
    top = max([float(np.quantile(values, 0.995)) if len(values) else 0.0, *(float(s.max()) for s in shown if len(s))])
    if top > 0:
        axes.set_ylim(0, top * 1.12)


def draw_legend(axes: Axes) -> None:
    """Draw the legend next to the title, or inside the panel if there are many runs."""
    lines, names = axes.get_legend_handles_labels()
    if not lines:
        return
    outside = sum(map(len, names)) <= 48
    place: dict[str, Any] = {"loc": "best"}
    if outside:
        place = {"loc": "lower right", "bbox_to_anchor": (1.01, 0.99), "ncols": len(names)}
    legend = axes.legend(
        fontsize=9,
        labelcolor=LIGHT.text,
        borderpad=0.3,
        columnspacing=1.2,
        handlelength=1.6,
        borderaxespad=0.2,
        **place,
    )
    legend.get_frame().set(facecolor=LIGHT.background, edgecolor="none", alpha=0.0 if outside else 0.85)


def _plain(text: str) -> str:
    """Return the text without mathematics ($) and control characters of matplotlib."""
    shown = "".join(c if c.isprintable() else "·" for c in text)
    return (shown if len(shown) <= 60 else shown[:59] + "…").replace("$", r"\$")


# --- charts of the page -----------------------------------------------------------------------------------------------

WIDTH, HEIGHT = 4.9, 3.3
"""Inches. At 72 points per inch, a chart is about 350 points wide, so text is readable on a phone."""
AXES = (0.125, 0.15, 0.85, 0.71)
"""Left, bottom, width and height of the axes, as shares of the picture."""
MOST_DOTS = 1500
"""Maximum number of examples drawn as dots; of more, a sample is drawn."""


HOVER_POINTS = 3000
"""Runs up to this many steps can be read step by step; of longer ones each bucket's lowest and highest."""
Lines = list[tuple[str, NDArray[Any], NDArray[Any]]]
"""(name, x, y) of the curves whose values can be read off a chart."""


@dataclass(frozen=True, slots=True)
class Chart:
    """`data` is for the page's script: axes box, x limits, series with their points; empty if the chart has no tooltips."""

    key: str
    title: str
    alt: str
    light: str
    dark: str
    data: dict[str, Any]


def _make_chart(
    key: str, title: str, alt: str, draw: Callable[[Axes], None], lines: Lines | None = None, unit: str = "step"
) -> Chart:
    """Return what `draw` draws. It is drawn once: the dark picture is the light one in other colors."""
    figure = new_figure(width=WIDTH, height=HEIGHT)
    draw(figure.add_axes(AXES))
    light = figure_bytes(figure, "svg")
    data: dict[str, Any] = {}
    if lines is not None:
        left, bottom, width, height = AXES
        box = [left, round(1 - bottom - height, 5), width, height]
        series = [
            {"name": name, "points": [[rounded(a), rounded(b)] for a, b in zip(x.tolist(), y.tolist(), strict=True)]}
            for name, x, y in lines
        ]
        data = {"box": box, "x": [float(end) for end in figure.axes[0].get_xlim()], "unit": unit, "series": series}
    return Chart(key, title, alt, _uri(light), _uri(darken(light)), data)


def make_charts(curves: Curves) -> tuple[list[Chart], list[Chart]]:
    """Return the charts to show first (loss, metric) and those to unfold (learning rate, gradient norm, throughput)."""
    first = [_panel_chart([curves], [p], _words(curves, p)) for p in main_panels(curves) if not p.is_empty]
    return first, [_panel_chart([curves], [p], _words(curves, p)) for p in more_panels(curves)]


def overlay_charts(runs: Sequence[Curves]) -> list[Chart]:
    """Return loss and main metric of several runs. Tooltips show validation values, or the smoothed training loss."""
    metric = next((m for run in runs if (m := run.main_metric())), None)
    charts = []
    for panels in zip(*(main_panels(run, metric) for run in runs), strict=True):
        for kind in ("points", "smooth"):
            lines = [(r.name, k.series) for r, p in zip(runs, panels, strict=True) for k in p.lines if k.kind == kind]
            lines = [(name, series) for name, series in lines if len(series)]
            if lines:
                ends = [(name, series.finite().value) for name, series in lines]
                words = "; ".join(f"{name} ends at {value[-1]:.3f}" for name, value in ends if len(value))
                alt = f"{panels[0].title} on validation rows by step, one line per run: {words}."
                charts.append(_panel_chart(runs, panels, alt, lines))
                break
    return charts


def _panel_chart(
    runs: Sequence[Curves], panels: Sequence[Panel], alt: str, lines: list[tuple[str, Series]] | None = None
) -> Chart:
    """Return one panel of several runs by step. `lines` have tooltips; by default all lines of the panel."""
    panel, last = panels[0], max(run.last_step for run in runs)
    if lines is None:
        lines = [(line.name, line.series) for line in panel.lines if len(line.series)]
        lines = lines[:1] if not panel.metric else lines

    def draw(axes: Axes) -> None:
        draw_panel(axes, runs, panels)
        if panel.key == "metric" and last:  # the same scale as the loss panel next to it
            axes.set_xlim(-0.045 * last, 1.045 * last)

    thin = [(name, series.thinned(HOVER_POINTS if len(runs) == 1 else HOVER_POINTS // 2)) for name, series in lines]
    title = panel.metric if panel.key == "metric" else panel.title
    return _make_chart(panel.key, title, alt, draw, [(name, one.step, one.value) for name, one in thin])


def reliability_chart(bins: Sequence[ReliabilityBin]) -> Chart:
    """Return a bar chart of the accuracy of each confidence bin, with intervals."""

    def draw(axes: Axes) -> None:
        style_axes(axes, title="Accuracy", x_label="confidence")
        color, middle = VALIDATION, [(b.low + b.high) / 2 for b in bins]
        height, wide = [b.accuracy for b in bins], [0.84 * (b.high - b.low) for b in bins]
        axes.bar(middle, height, width=wide, color=color, alpha=0.3, linewidth=0)
        spread = [[b.accuracy - b.accuracy_low for b in bins], [b.accuracy_high - b.accuracy for b in bins]]
        look: dict[str, Any] = {"fmt": "o", "ms": 4.5, "elinewidth": 1.4, "capsize": 3}
        axes.errorbar(middle, height, yerr=spread, color=color, label="accuracy", **look)
        ends = [(x - w / 2, x + w / 2) for x, w in zip(middle, wide, strict=True)]
        sure = [b.confidence for b in bins]
        axes.hlines(sure, *zip(*ends, strict=True), color=LIGHT.text, linewidth=1.8, label="confidence")
        axes.set_xlim(min([0.5, *(b.low for b in bins)]) - 0.02, 1.02)
        axes.set_ylim(0, 1.04)
        draw_legend(axes)

    words = "; ".join(f"confidence {b.confidence:.2f}, accuracy {b.accuracy:.2f} ({b.count} rows)" for b in bins)
    lines = [("accuracy", np.array([b.confidence for b in bins]), np.array([b.accuracy for b in bins]))]
    return _make_chart("reliability", "Reliability", f"Reliability diagram: {words}.", draw, lines, "confidence")


def coverage_chart(curve: Sequence[tuple[float, float]]) -> Chart:
    """Return a chart of the error rate of answered examples by coverage."""
    share, error = (np.array(values) for values in zip(*curve, strict=True))

    def draw(axes: Axes) -> None:
        style_axes(axes, title="Error rate of answered examples", x_label="share of answered examples")
        axes.plot(share, error, color=VALIDATION, linewidth=1.8)
        axes.set_xlim(0, 1.02)
        axes.set_ylim(bottom=0)

    at_half = float(error[np.searchsorted(share, 0.5)])
    words = f"the most confident half has an error rate of {at_half:.3f}, all examples {error[-1]:.3f}"
    some = np.unique(np.linspace(0, len(share) - 1, HOVER_POINTS).astype(int))
    lines = [("error rate", share[some], error[some])]
    return _make_chart("coverage", "Coverage", f"Error rate by coverage: {words}.", draw, lines, "share answered")


def value_chart(true: Floats, predicted: Floats) -> Chart:
    """Return a scatter chart of predicted and true values, with the line on which both are equal."""
    some = np.random.default_rng(0).permutation(len(true))[:MOST_DOTS]
    ends = [float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))]

    def draw(axes: Axes) -> None:
        style_axes(axes, title="Predicted", x_label="true value")
        faint, color = max(0.15, min(0.7, 60 / len(some))), VALIDATION
        axes.scatter(true[some], predicted[some], s=14, color=color, alpha=faint, linewidths=0)
        axes.plot(ends, ends, color=LIGHT.muted, linewidth=1.3, linestyle=(0, (4, 3)), label="equal")
        draw_legend(axes)

    lie, are = (f"between {v.min():.3g} and {v.max():.3g}" for v in (predicted, true))
    return _make_chart("agreement", "Predicted against true", f"Predicted values are {lie}, true ones {are}.", draw)


def rounded(value: float) -> float | None:
    """Return the value with six digits; None if it is NaN or infinite."""
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _uri(svg: bytes) -> str:
    """Return a data URL. An SVG in an <img> runs no script and loads nothing."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")


def _words(curves: Curves, panel: Panel) -> str:
    """Describe the panel in a sentence, for readers who don't see the picture."""
    words = []
    for line in panel.lines:
        series = line.series.finite()
        if len(series) and line.kind != "raw":
            best = series.best() if panel.key == "loss" else None
            lowest = f", lowest at step {best[0]} ({best[1]:.3g})" if best and line.kind == "points" else ""
            words.append(f"{line.name} goes from {series.value[0]:.3g} to {series.value[-1]:.3g}{lowest}")
    if panel.key == "loss" and curves.non_finite:
        words.append(f"{len(curves.non_finite)} steps were NaN or infinite")
    return f"{panel.title} by step: {'; '.join(words)}."


@dataclass(frozen=True, slots=True, eq=False)
class Explained:
    """Plot correct and wrong predictions on the rows of one split."""

    split: str
    rows: int
    wrong: int
    several: bool
    """Whether a row may have several labels."""
    label_counts: list[LabelCount]
    """Counts of each label, the lowest F1 first."""
    confusion: Confusion | None
    bins: tuple[ReliabilityBin, ...]
    calibration_error: float | None
    coverage: list[tuple[float, float]]
    """(coverage, error rate) at each threshold of `--max_error`; empty unless examples have one class."""
    values: tuple[Floats, Floats] | None
    """True and predicted values, in regression."""
    mistakes: list[Mistake]


def explain_rows(predictions: PredictedRows) -> Explained:
    """Return what the examples show."""
    task, table, labels = predictions.task, predictions.probabilities, predictions.labels
    finite = np.isfinite(predictions.predicted)
    values = labels[finite], predictions.predicted[finite]
    confident = table is not None and task in (Task.BINARY, Task.MULTICLASS) and (predictions.predicted >= 0).all()
    coverage = coverage_curve(HeldOut.of(table, predictions.predicted, labels)) if confident else []  # type: ignore[arg-type]
    if task is Task.MULTILABEL and table is not None:  # one decision per label
        table, labels = table.ravel(), labels.ravel()
    return Explained(
        split=predictions.split,
        rows=len(predictions),
        wrong=int((~predictions.right).sum()) if predictions.names else 0,
        several=task is Task.MULTILABEL,
        label_counts=count_labels(predictions),
        confusion=count_confusions(predictions),
        bins=reliability_bins(table, labels, num_bins=10) if table is not None else (),
        calibration_error=expected_calibration_error(table, labels) if table is not None else None,
        coverage=coverage,
        values=values if task is Task.REGRESSION and len(values[0]) else None,
        mistakes=find_mistakes(predictions),
    )
