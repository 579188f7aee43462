"""Single panels for a page: the picture in both themes, and where its axes lie, so that a script can read values off it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunesmith.curves.panels import Panel
from tunesmith.curves.plot import draw_legend, draw_panel, figure_bytes, new_figure, style_axes
from tunesmith.curves.series import Curves
from tunesmith.curves.themes import THEMES, Theme, darken

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Box = tuple[float, float, float, float]
WIDTH, HEIGHT = 4.9, 3.3
"""Inches. At 72 points an inch about 350 points wide: text stays readable on a phone."""
BOTTOM, TOP = 0.15, 0.86
"""Shares of the height between which the axes lie. Only the labels of the y axis differ in size: matplotlib's own layout,
which measures everything twice, takes as long as the drawing."""


@dataclass(frozen=True, slots=True)
class Picture:
    """Two SVG files. `box` is left, top, width, height of the axes as shares of the picture; `x` the axis limits."""

    light: bytes
    dark: bytes
    box: Box
    x: tuple[float, float]


def _make_picture(draw: Callable[[Axes, Theme], None]) -> Picture:
    """What `draw` draws. It is drawn once: the dark picture is the light one in other colours."""
    figure = new_figure(width=WIDTH, height=HEIGHT, theme="light", layout=None)
    axes = figure.add_axes((0.1, BOTTOM, 0.87, TOP - BOTTOM))
    draw(axes, THEMES["light"])
    canvas: Any = figure.canvas
    labels = axes.yaxis.get_tightbbox(canvas.get_renderer())
    left = 0.025 + (labels.width / figure.bbox.width if labels is not None else 0.0)
    axes.set_position((left, BOTTOM, 0.975 - left, TOP - BOTTOM))
    light, (low, high) = figure_bytes(figure, "svg"), axes.get_xlim()
    box = (float(left), 1 - TOP, float(0.975 - left), TOP - BOTTOM)
    return Picture(light, darken(light), box, (float(low), float(high)))


def panel_picture(runs: Sequence[Curves], panels: Sequence[Panel]) -> Picture:
    """One panel by step; with several runs it lies over the others."""
    last = max(run.last_step for run in runs)

    def draw(axes: Axes, theme: Theme) -> None:
        draw_panel(axes, runs, panels, x="step", theme=theme)
        if panels[0].key == "metric" and last:  # the same scale as the loss panel beside it
            axes.set_xlim(-0.045 * last, 1.045 * last)

    return _make_picture(draw)


def reliability_picture(bins: Sequence[tuple[float, float, float, float, int]]) -> Picture:
    """Accuracy against confidence, each bin (confidence, accuracy, low, high, rows) with its interval."""

    def draw(axes: Axes, theme: Theme) -> None:
        style_axes(axes, theme, title="Accuracy", x_label="confidence")
        axes.plot([0, 1], [0, 1], color=theme.muted, linewidth=1.1, linestyle=(0, (4, 3)), label="perfect")
        sure, share = [b[0] for b in bins], [b[1] for b in bins]
        spread = [[b[1] - b[2] for b in bins], [b[3] - b[1] for b in bins]]
        axes.errorbar(sure, share, yerr=spread, fmt="none", ecolor=theme.side("validation"), elinewidth=1.4, capsize=3)
        largest = max((b[4] for b in bins), default=1)
        sizes = [18 + 130 * b[4] / largest for b in bins]
        axes.scatter(sure, share, s=sizes, color=theme.side("validation"), zorder=3, label="rows")
        axes.set_xlim(min([0.5, *sure]) - 0.04, 1.04)
        axes.set_ylim(-0.04, 1.04)
        draw_legend(axes, theme)

    return _make_picture(draw)
