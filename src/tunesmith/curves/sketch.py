"""Curves as a few lines of terminal text, drawn with braille dots (or plain ASCII where that cannot be shown)."""

from __future__ import annotations

import numpy as np

from tunesmith.curves.panels import Panel, main_panels
from tunesmith.curves.series import Curves, Floats, Series

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
