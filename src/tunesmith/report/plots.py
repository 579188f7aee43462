"""The panels of a run: their titles, lines and colors.

PNG, SVG, report and board draw these panels. Every line color has a contrast of at least 3:1 on its background.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tunesmith.files import require_plain, write_file
from tunesmith.runs.curves import Curves, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


ThemeName = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Theme:
    """`runs` are the line colors, in order; the first two are training and validation when one run is drawn."""

    background: str
    text: str
    muted: str
    grid: str
    runs: tuple[str, ...]

    def side(self, name: Literal["train", "validation"]) -> str:
        """The color of everything measured on training rows, or on validation rows."""
        return self.runs[0 if name == "train" else 1]

    def run(self, index: int) -> str:
        """The color of the run at `index`; colors come again after the last."""
        return self.runs[index % len(self.runs)]


THEMES: dict[ThemeName, Theme] = {
    "light": Theme(
        background="#ffffff",
        text="#1c2430",
        muted="#5b6675",
        grid="#e6e9ee",
        runs=("#2b6cb0", "#c2410c", "#15803d", "#7e3aac", "#a16207", "#be185d", "#0f766e", "#4b5563"),
    ),
    "dark": Theme(
        background="#161b22",
        text="#e6edf3",
        muted="#9aa7b5",
        grid="#2a323d",
        runs=("#6cb2f7", "#ff9d5c", "#5fd08a", "#c99bf2", "#e3c04f", "#f78fb8", "#4fd1c5", "#a8b3c0"),
    ),
}


def darken(svg: bytes) -> bytes:
    """A picture drawn in the light theme, in the colors of the dark one."""
    light, dark = THEMES["light"], THEMES["dark"]
    pairs = [(light.background, dark.background), (light.text, dark.text), (light.muted, dark.muted)]
    pairs += [(light.grid, dark.grid), *zip(light.runs, dark.runs, strict=True)]
    colors = {a.encode(): b.encode() for a, b in pairs}
    return re.sub(rb"#[0-9a-f]{6}\b", lambda found: colors.get(found[0], found[0]), svg)


LineKind = Literal["raw", "smooth", "points", "dashed"]
PanelSide = Literal["train", "validation"]


@dataclass(frozen=True, slots=True, eq=False)
class PanelLine:
    """One curve of a panel; `kind` says how it is drawn, `side` which rows it was measured on."""

    name: str
    kind: LineKind
    side: PanelSide
    series: Series


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """What one panel of one run shows. `metric` is the name of what an evaluation measured, "" for other quantities."""

    key: str
    title: str
    lines: tuple[PanelLine, ...]
    metric: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is no point to draw."""
        return not any(len(line.series.finite()) for line in self.lines)


def main_panels(curves: Curves, metric: str | None = None) -> list[Panel]:
    """Loss and metric, the panels to show first; `metric` is the main one unless given."""
    loss, unseen = curves.train_loss, curves.metric("validation", "loss")
    lines: tuple[PanelLine, ...] = (
        PanelLine("training", "raw", "train", loss),
        PanelLine("smoothed", "smooth", "train", loss.smoothed()),
        PanelLine("validation", "points", "validation", unseen),
    )
    panels = [Panel("loss", "Loss", lines, "loss")]
    metric = metric or curves.main_metric()
    if metric:
        seen, unseen = curves.metric("train_sample", metric), curves.metric("validation", metric)
        lines = (
            PanelLine("training sample", "dashed", "train", seen),
            PanelLine("validation", "points", "validation", unseen),
        )
        panels.append(Panel("metric", metric[:1].upper() + metric[1:].replace("_", " "), lines, metric))
    return panels


def more_panels(curves: Curves) -> list[Panel]:
    """Learning rate, gradient norm and throughput, where the journal has them."""
    panels = []
    for key, title, series, noisy in (
        ("rate", "Learning rate", curves.learning_rate, False),
        ("norm", "Gradient norm (before clipping)", curves.grad_norm, True),
        ("speed", "Real tokens per second", curves.tokens_per_second, True),
    ):
        lines = [PanelLine(title.lower(), "raw" if noisy else "smooth", "train", series)]
        if noisy:
            lines.append(PanelLine("smoothed", "smooth", "train", series.smoothed()))
        panels.append(Panel(key, title, tuple(lines)))
    return [panel for panel in panels if not panel.is_empty]


POINTS = 1500
"""Raw points drawn per curve: more than a picture has pixels, few enough for an SVG of 100 kB."""
OVERLAID = {"loss": "points: validation", "metric": "dashed: training sample"}
"""What a panel adds to the name of its x axis when several runs lie over each other."""
MIN_SPAN = 0.1
"""The least height of a panel of scores between 0 and 1."""


def draw_curves(curves: Curves | Sequence[Curves], *, theme: ThemeName = "light") -> Figure:
    """Loss and metric side by side. Colors are runs if there are several, else splits."""
    runs = [curves] if isinstance(curves, Curves) else list(curves)
    metric = next((m for c in runs if (m := c.main_metric())), None)
    figure = new_figure(width=11.0 if metric else 6.4, height=4.3, theme=theme)
    axes = figure.subplots(1, 2 if metric else 1, squeeze=False)[0]
    for place, panels in zip(axes, zip(*(main_panels(run, metric) for run in runs), strict=True), strict=True):
        draw_panel(place, runs, panels, THEMES[theme])
        place.set_xlim(axes[0].get_xlim())  # both panels have the same x axis
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    figure.suptitle(_plain(title), color=THEMES[theme].text, fontsize=13, fontweight="bold", x=0.02, ha="left")
    _plot_place(figure, axes)
    return figure


def _plot_place(figure: Figure, places: Sequence[Axes]) -> None:
    """Panels side by side, each behind the labels of its y axis: matplotlib's own layout takes as long as the drawing."""
    canvas: Any = figure.canvas
    slot = 1.0 / len(places)
    for index, axes in enumerate(places):
        left = index * slot + 0.012 + labels_width(axes, canvas.get_renderer())
        axes.set_position((left, 0.125, (index + 1) * slot - 0.012 - left, 0.72))


def labels_width(axes: Axes, renderer: Any) -> float:
    """Of the y axis, as a share of the picture."""
    labels = axes.yaxis.get_tightbbox(renderer)
    return 0.0 if labels is None else float(labels.width / axes.figure.bbox.width)


def _import_matplotlib() -> None:
    """Import matplotlib without MPLBACKEND: only pyplot needs it, and the import fails if it names an unknown backend."""
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        import_module("matplotlib")
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend


def new_figure(*, width: float, height: float, theme: ThemeName) -> Figure:
    """Return an empty figure that pyplot doesn't know."""
    _import_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), facecolor=THEMES[theme].background)
    FigureCanvasAgg(figure)
    return figure


def figure_bytes(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    """The picture as a file's content. SVG text is drawn as shapes: it looks the same everywhere."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    kinds: dict[str, Any] = {"png": FigureCanvasAgg, "svg": FigureCanvasSVG}
    figure.set_dpi(150)
    out = io.BytesIO()
    canvas = kinds[kind](figure)  # `savefig` would draw twice
    canvas.print_svg(out, metadata={"Date": None}) if kind == "svg" else canvas.print_png(out)
    return out.getvalue()


def curve_pictures(curves: Curves) -> tuple[bytes, bytes]:
    """Loss and metric as PNG and as SVG."""
    figure = draw_curves(curves)
    return figure_bytes(figure, "png"), figure_bytes(figure, "svg")


def write_curves(pictures: tuple[bytes, bytes], *, png: Path, svg: Path) -> None:
    """Writes both pictures, or neither where one of them would replace a file of the user."""
    for file in (png, svg):
        require_plain(file)
    for file, picture in zip((png, svg), pictures, strict=True):
        write_file(file, picture)


def style_axes(axes: Axes, theme: Theme, *, title: str, x_label: str) -> None:
    """The look shared by every panel: no box, a quiet grid, a title on the left."""
    axes.set_facecolor(theme.background)
    axes.set_title(_plain(title), loc="left", color=theme.text, fontsize=11, pad=9)
    axes.set_xlabel(x_label, color=theme.muted, fontsize=10)
    axes.tick_params(colors=theme.muted, labelsize=9.5, length=0)
    axes.grid(True, color=theme.grid, linewidth=0.9)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(theme.grid)


def draw_panel(axes: Axes, runs: Sequence[Curves], panels: Sequence[Panel], theme: Theme) -> None:
    """One panel of each run. Colors are runs if there are several, else splits."""
    alone, (key, title, metric) = len(runs) == 1, (panels[0].key, panels[0].title, panels[0].metric)
    style_axes(axes, theme, title=title, x_label="step" if alone or key not in OVERLAID else f"step ({OVERLAID[key]})")
    for index, (run, panel) in enumerate(zip(runs, panels, strict=True)):
        for line in panel.lines:
            color = theme.side(line.side) if alone else theme.run(index)
            label = run.name if line.kind == "points" and not alone else _label(panel, line) if alone else None
            if line.kind != "raw" or len(runs) <= 3:
                _draw_line(axes, line, color, label, crowded=not alone)
        if key == "loss":
            _mark_gaps(axes, run, theme)
        if alone and metric:
            _mark_best(axes, run, metric, theme)
    if key == "loss":
        _limit_loss(axes, runs)
    elif key == "metric":
        axes.margins(y=0.12)
        low, high = axes.get_ylim()
        if low >= 0 and high <= 1.1 and high - low < MIN_SPAN:  # a change of half a point must not look like a cliff
            axes.set_ylim((low + high - MIN_SPAN) / 2, (low + high + MIN_SPAN) / 2)
    else:
        axes.set_ylim(bottom=0)
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
        axes.yaxis.get_offset_text().set(color=theme.muted, fontsize=9)
    draw_legend(axes, theme)


def _label(panel: Panel, line: PanelLine) -> str | None:
    """The name in the legend of a panel that has several lines to tell apart."""
    if not panel.metric or line.kind == "raw":
        return None
    return f"{panel.lines[0].name}, {line.name}" if line.kind == "smooth" else line.name


def _draw_line(axes: Axes, line: PanelLine, color: str, label: str | None, *, crowded: bool) -> None:
    """Raw values faint, smoothed ones strong, evaluations as points; dashed are those on training rows."""
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


def _mark_best(axes: Axes, run: Curves, metric: str, theme: Theme) -> None:
    best = run.best()
    if best is None:
        return
    series = run.metric("validation", metric)
    at = np.flatnonzero((series.step == best[1]) & np.isfinite(series.value))
    if not len(at):
        return
    where, value = float(series.step[at[0]]), float(series.value[at[0]])
    axes.axvline(where, color=theme.muted, linewidth=0.9, linestyle=(0, (2, 3)), zorder=1)
    axes.plot([where], [value], "o", ms=11, markerfacecolor="none", markeredgecolor=theme.text, markeredgewidth=1.3)
    # Under the axes, at the end of the line that names them: a note inside would lie on points.
    axes.annotate(
        f"best: step {best[1]}, {value:.3f}",
        (1, 0),
        xytext=(0, -25),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="center",
        fontsize=9.5,
        color=theme.text,
    )


def _mark_gaps(axes: Axes, run: Curves, theme: Theme) -> None:
    """A cross on the axis where the loss or the gradient was NaN or infinite."""
    bad = np.isin(run.train_loss.step, run.non_finite) | ~np.isfinite(run.train_loss.value)
    if bad.any():
        at = run.train_loss.step[bad][:200]
        line = axes.get_xaxis_transform()
        axes.plot(
            at,
            [0.02] * len(at),
            "x",
            color=theme.side("validation"),
            transform=line,
            label="NaN or infinite",
            clip_on=False,
        )


def _limit_loss(axes: Axes, runs: Sequence[Curves]) -> None:
    """Limits from 0 to a little above nearly all points: one spike of 40 must not flatten the curve."""
    values = np.concatenate([run.train_loss.finite().value for run in runs])
    shown = [run.metric("validation", "loss").finite().value for run in runs]
    top = max([float(np.quantile(values, 0.995)) if len(values) else 0.0, *(float(s.max()) for s in shown if len(s))])
    if top > 0:
        axes.set_ylim(0, top * 1.12)


def draw_legend(axes: Axes, theme: Theme) -> None:
    """Next to the title, where it hides no curve; inside the panel when there are many runs."""
    lines, names = axes.get_legend_handles_labels()
    if not lines:
        return
    outside = sum(map(len, names)) <= 48
    place: dict[str, Any] = {"loc": "best"}
    if outside:
        place = {"loc": "lower right", "bbox_to_anchor": (1.01, 0.99), "ncols": len(names)}
    legend = axes.legend(
        fontsize=9,
        labelcolor=theme.text,
        borderpad=0.3,
        columnspacing=1.2,
        handlelength=1.6,
        borderaxespad=0.2,
        **place,
    )
    legend.get_frame().set(facecolor=theme.background, edgecolor="none", alpha=0.0 if outside else 0.85)


def _plain(text: str) -> str:
    """The text escaped for matplotlib: a dollar sign is not mathematics, a control character is not drawn."""
    shown = "".join(c if c.isprintable() else "·" for c in text)
    return (shown if len(shown) <= 60 else shown[:59] + "…").replace("$", r"\$")
