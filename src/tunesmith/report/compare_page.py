"""Comparison -> one HTML file in the style of the report: curves overlaid, scores, the paired test, what was set otherwise."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.curves.panels import Draw, make_panel
from tunesmith.curves.plot import draw_loss, draw_metric
from tunesmith.curves.series import Curves, Series
from tunesmith.curves.themes import Theme
from tunesmith.report.charts import Chart
from tunesmith.report.compare import Comparison
from tunesmith.report.render import VERDICTS, content_policy, embed_json
from tunesmith.run.writing import write_file

HOVER_POINTS = 1500


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Writes the page, whole or not at all; gives its path."""
    write_file(path, render_comparison(comparison).encode("utf-8", "backslashreplace"))
    return path


def render_comparison(comparison: Comparison) -> str:
    """The page."""
    charts = overlay_charts([run.curves for run in comparison.runs])
    style, script = _asset("page.css") + _asset("compare.css"), _asset("page.js")
    return str(
        _template().render(
            c=comparison,
            charts=charts,
            verdicts=VERDICTS,
            style=style,
            script=script,
            policy=content_policy(style, script),
            data=embed_json({chart.key: chart.data for chart in charts}),
        )
    )


def comparison_policy() -> str:
    """The Content-Security-Policy of the page, for a server that sends it as a header."""
    return content_policy(_asset("page.css") + _asset("compare.css"), _asset("page.js"))


def overlay_charts(runs: Sequence[Curves]) -> list[Chart]:
    """Loss and main metric with one colour a run."""
    charts = []
    if any(len(run.train_loss) or len(run.metric("validation", "loss")) for run in runs):
        lines = [(run.name, run.metric("validation", "loss")) for run in runs]
        lines = [(name, s) for name, s in lines if len(s)] or [(run.name, run.train_loss.smoothed()) for run in runs]
        charts.append(_chart("loss", "Loss", lambda axes, t: draw_loss(axes, runs, x="step", theme=t), lines))
    metric = next((m for run in runs if (m := run.main_metric())), None)
    if metric:
        lines = [(run.name, run.metric("validation", metric)) for run in runs]
        charts.append(_chart("metric", metric, _draw_metric(runs, metric), lines))
    return charts


def _draw_metric(runs: Sequence[Curves], metric: str) -> Draw:
    last = max(run.last_step for run in runs)

    def draw(axes: Any, theme: Theme) -> None:
        draw_metric(axes, runs, metric, x="step", theme=theme)
        if last:  # the same scale as the loss panel beside it
            axes.set_xlim(-0.045 * last, 1.045 * last)

    return draw


def _chart(key: str, title: str, draw: Draw, lines: Sequence[tuple[str, Series]]) -> Chart:
    panel = make_panel(draw)
    known = [(name, series.thinned(HOVER_POINTS)) for name, series in lines if len(series)]
    words = "; ".join(f"{name} ends at {s.finite().value[-1]:.3f}" for name, s in known if len(s.finite()))
    data: dict[str, Any] = {
        "box": [round(v, 5) for v in panel.box],
        "x": list(panel.x),
        "unit": "step",
        "series": [{"name": name, "points": _points(series)} for name, series in known],
    }
    alt = f"{title} on validation rows by step, one line a run: {words}."
    return Chart(key, title, alt, _uri(panel.light), _uri(panel.dark), data)


def _points(series: Series) -> list[list[float | None]]:
    pairs = zip(series.step.tolist(), series.value.tolist(), strict=True)
    return [[step, float(f"{value:.6g}") if np.isfinite(value) else None] for step, value in pairs]


def _uri(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")


@cache
def _asset(name: str) -> str:
    return (files("tunesmith.report") / name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"score": lambda v: f"{v:.3f}" if abs(v) < 1000 else f"{v:.4g}"}
    return environment.from_string(_asset("compare.html.j2"))
