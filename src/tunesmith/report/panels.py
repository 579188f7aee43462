"""THE panels of a run: which there are, their titles, lines and colours, and a sketch of them as terminal text.

PNG, SVG, report, board and terminal draw these panels. Every line colour has a contrast of at least 3:1 on its background.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tunesmith.runs.series import Curves, Floats, Series

ThemeName = Literal["light", "dark"]


@dataclass(frozen=True, slots=True)
class Theme:
    """`runs` are the line colours, in order; the first two are training and validation when one run is drawn."""

    background: str
    text: str
    muted: str
    grid: str
    runs: tuple[str, ...]

    def side(self, name: Literal["train", "validation"]) -> str:
        """The colour of everything measured on training rows, or on validation rows."""
        return self.runs[0 if name == "train" else 1]

    def run(self, index: int) -> str:
        """The colour of the run at `index`; colours come again after the last."""
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
    """A picture drawn in the light theme, in the colours of the dark one."""
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


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bit of a braille cell by row (4) and column (2)."""


def sketch_curves(curves: Curves, *, width: int = 60, height: int = 8, ascii_only: bool = False) -> str:
    """The loss and, if there is one, the main metric, each with its scale; a letter marks an evaluation."""
    span = (int(curves.train_loss.step[0]) if len(curves.train_loss) else 0, curves.last_step)
    parts = [_draw_panel(panel, (width, height, ascii_only), span) for panel in main_panels(curves)]
    parts[0] = f"{curves.name}: {parts[0]}"
    best = curves.best()
    if best:
        parts.append(f"best: step {best[1]}, {best[0]} {best[2]:.4g}")
    return "\n".join(parts)


def _draw_panel(panel: Panel, size: tuple[int, int, bool], span: tuple[int, int]) -> str:
    width, height, ascii_only = size
    drawn = [line for line in panel.lines if line.kind != "raw"]
    legend = [f"{'line' if k.kind == 'smooth' else k.side[0]}: {panel.lines[0].name if k.kind == 'smooth' else k.name}"
              for k in drawn]  # fmt: skip
    title = f"{panel.metric}  ({', '.join(legend)})"
    every = [line.series.finite() for line in drawn if len(line.series.finite())]
    if not every:
        return f"{title}\n  (no points yet)"
    low, high = min(float(s.value.min()) for s in every), max(float(s.value.max()) for s in every)
    first, last = span
    high = high if high > low else low + max(abs(low), 1.0) * 0.01
    cells = np.zeros((height, width), dtype=np.int64)
    for line in drawn:
        if line.kind == "smooth":
            _dot(cells, line.series.finite(), (first, last), (low, high))
    rows = [[_cell(int(c), ascii_only) for c in row] for row in cells]
    for mark in (line for line in drawn if line.kind != "smooth"):
        good = mark.series.finite()
        columns = _place(good.step.astype(np.float64), first, last, width)
        for column, row in zip(columns, height - 1 - _place(good.value, low, high, height), strict=True):
            rows[row][column] = mark.side[0]
    bar = "|" if ascii_only else "│"
    labels = [f"{high:.3g}", *[""] * (height - 2), f"{low:.3g}"]
    body = [f"{label:>8} {bar}{''.join(row)}" for label, row in zip(labels, rows, strict=True)]
    scale = f"{'':>9} {first:<{width // 2}}{'step ' + str(last):>{width - width // 2}}"
    return "\n".join([title, *body, scale])


def _place(value: Floats, low: float, high: float, cells: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    span = high - low if high > low else 1.0
    return np.clip(((value - low) / span * cells).astype(np.int64), 0, cells - 1)


def _dot(
    cells: np.ndarray[tuple[int, ...], np.dtype[np.int64]], series: Series, x: tuple[int, int], y: tuple[float, float]
) -> None:
    height, width = cells.shape
    columns = _place(series.step.astype(np.float64), x[0], x[1], width * 2)
    rows = height * 4 - 1 - _place(series.value, y[0], y[1], height * 4)
    for column, row in set(zip(columns.tolist(), rows.tolist(), strict=True)):
        cells[row // 4, column // 2] |= _DOTS[row % 4][column % 2]


def _cell(bits: int, ascii_only: bool) -> str:
    if not bits:
        return " "
    return "." if ascii_only else chr(0x2800 + bits)
