"""Single panels for a page: the picture in both themes, and where its axes lie, so that a script can read values off it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.curves.panels import THEMES, Panel, Theme, darken
from tunesmith.curves.plot import draw_legend, draw_panel, figure_bytes, new_figure, style_axes
from tunesmith.curves.series import Curves, Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Box = tuple[float, float, float, float]
WIDTH, HEIGHT = 4.9, 3.3
"""Inches. At 72 points an inch about 350 points wide: text stays readable on a phone."""
BOTTOM, TOP = 0.15, 0.86
"""Shares of the height between which the axes lie. Only the labels of the y axis differ in size: matplotlib's own layout,
which measures everything twice, takes as long as the drawing."""

MOST_DOTS = 1500
"""Rows drawn as dots: of more, a sample."""


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


def reliability_picture(bins: Sequence[tuple[float, float, float, float, float, float]]) -> Picture:
    """How often each bin (from, to, mean confidence, accuracy, low, high) is right: bars side by side, each with its interval."""

    def draw(axes: Axes, theme: Theme) -> None:
        style_axes(axes, theme, title="Share that is right", x_label="confidence")
        color, middle = theme.side("validation"), [(b[0] + b[1]) / 2 for b in bins]
        height, wide = [b[3] for b in bins], [0.84 * (b[1] - b[0]) for b in bins]
        axes.bar(middle, height, width=wide, color=color, alpha=0.3, linewidth=0)
        spread = [[b[3] - b[4] for b in bins], [b[5] - b[3] for b in bins]]
        axes.errorbar(
            middle, height, yerr=spread, fmt="o", ms=4.5, color=color, elinewidth=1.4, capsize=3, label="right"
        )
        ends = [(x - w / 2, x + w / 2) for x, w in zip(middle, wide, strict=True)]
        axes.hlines([b[2] for b in bins], *zip(*ends, strict=True), color=theme.text, linewidth=1.8, label="confidence")
        axes.set_xlim(min([0.5, *(b[0] for b in bins)]) - 0.02, 1.02)
        axes.set_ylim(0, 1.04)
        draw_legend(axes, theme)

    return _make_picture(draw)


def agreement_picture(true: Floats, predicted: Floats) -> Picture:
    """Predicted against true values; the line is where both are equal."""
    some = np.random.default_rng(0).permutation(len(true))[:MOST_DOTS]
    ends = [float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))]

    def draw(axes: Axes, theme: Theme) -> None:
        style_axes(axes, theme, title="Predicted", x_label="true value")
        faint, color = max(0.15, min(0.7, 60 / len(some))), theme.side("validation")
        axes.scatter(true[some], predicted[some], s=14, color=color, alpha=faint, linewidths=0)
        axes.plot(ends, ends, color=theme.muted, linewidth=1.3, linestyle=(0, (4, 3)), label="equal")
        draw_legend(axes, theme)

    return _make_picture(draw)


def residual_picture(residuals: Floats) -> Picture:
    """How many rows are how far off, in bars side by side."""

    def draw(axes: Axes, theme: Theme) -> None:
        style_axes(axes, theme, title="Rows", x_label="predicted minus true value")
        axes.hist(
            residuals, bins=min(31, max(5, round(len(residuals) ** 0.5))), color=theme.side("validation"), rwidth=0.88
        )
        axes.axvline(0, color=theme.muted, linewidth=1.3, linestyle=(0, (4, 3)), label="equal")
        mean = float(residuals.mean())
        axes.axvline(mean, color=theme.text, linewidth=1.5, label=f"mean {mean:+.2g}")
        draw_legend(axes, theme)

    return _make_picture(draw)
