"""Single panels for a page: the picture in both themes, and where its axes lie, so that a script can read values off it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunesmith.curves.plot import draw_legend, draw_loss, draw_metric, figure_bytes, new_figure, style_axes
from tunesmith.curves.series import Curves, Series
from tunesmith.curves.themes import THEMES, Theme, ThemeName

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Box = tuple[float, float, float, float]
Draw = Callable[["Axes", Theme], None]
WIDTH, HEIGHT = 4.9, 3.3
"""Inches. At 72 points an inch about 350 points wide: text stays readable on a phone."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Two SVG files. `box` is left, top, width, height of the axes as shares of the picture; `x` the axis limits."""

    light: bytes
    dark: bytes
    box: Box
    x: tuple[float, float]


def make_panel(draw: Draw) -> Panel:
    """The panel `draw` draws, once per theme."""
    pictures: dict[ThemeName, bytes] = {}
    box: Box = (0.0, 0.0, 1.0, 1.0)
    limits = (0.0, 1.0)
    for name, theme in THEMES.items():
        figure = new_figure(width=WIDTH, height=HEIGHT, theme=name)
        axes = figure.subplots()
        draw(axes, theme)
        pictures[name] = figure_bytes(figure, "svg")
        place = axes.get_position()
        box = (float(place.x0), float(1 - place.y1), float(place.width), float(place.height))
        low, high = axes.get_xlim()
        limits = (float(low), float(high))
    return Panel(pictures["light"], pictures["dark"], box, limits)


def loss_panel(curves: Curves) -> Panel:
    """Training and validation loss by step."""
    return make_panel(lambda axes, theme: draw_loss(axes, [curves], x="step", theme=theme))


def metric_panel(curves: Curves, metric: str) -> Panel:
    """A metric on the training sample and on validation rows by step."""

    def draw(axes: Axes, theme: Theme) -> None:
        draw_metric(axes, [curves], metric, x="step", theme=theme)
        if len(curves.train_loss):  # the same scale as the loss panel beside it
            axes.set_xlim(-0.045 * curves.last_step, 1.045 * curves.last_step)

    return make_panel(draw)


def line_panel(series: Series, title: str, *, smooth: bool = False) -> Panel:
    """One quantity by step; with `smooth` the raw values faint behind their smoothed view."""

    def draw(axes: Axes, theme: Theme) -> None:
        style_axes(axes, theme, title=title, x_label="step")
        raw = series.thinned(800)
        axes.plot(raw.step, raw.value, color=theme.train, linewidth=0.8 if smooth else 1.9, alpha=0.25 if smooth else 1)
        if smooth:
            view = series.smoothed().thinned(800)
            axes.plot(view.step, view.value, color=theme.train, linewidth=1.9)
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
        axes.yaxis.get_offset_text().set(color=theme.muted, fontsize=9)

    return make_panel(draw)


def reliability_panel(bins: Sequence[tuple[float, float, float, float, int]]) -> Panel:
    """Accuracy against confidence, each bin (confidence, accuracy, low, high, rows) with its interval."""

    def draw(axes: Axes, theme: Theme) -> None:
        style_axes(axes, theme, title="Accuracy", x_label="confidence")
        axes.plot([0, 1], [0, 1], color=theme.muted, linewidth=1.1, linestyle=(0, (4, 3)), label="perfect")
        sure, share = [b[0] for b in bins], [b[1] for b in bins]
        spread = [[b[1] - b[2] for b in bins], [b[3] - b[1] for b in bins]]
        axes.errorbar(sure, share, yerr=spread, fmt="none", ecolor=theme.validation, elinewidth=1.4, capsize=3)
        largest = max((b[4] for b in bins), default=1)
        sizes = [18 + 130 * b[4] / largest for b in bins]
        axes.scatter(sure, share, s=sizes, color=theme.validation, zorder=3, label="rows")
        axes.set_xlim(min([0.5, *sure]) - 0.04, 1.04)
        axes.set_ylim(-0.04, 1.04)
        draw_legend(axes, theme)

    return make_panel(draw)
