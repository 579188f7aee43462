"""Comparison -> one HTML file in the style of the report: curves overlaid, scores, the paired test, what was set otherwise."""

from __future__ import annotations

from pathlib import Path

from tunesmith.report.charts import overlay_charts
from tunesmith.report.compare import Comparison
from tunesmith.report.render import (
    VERDICTS,
    content_policy,
    embed_json,
    page_asset,
    page_template,
    score_text,
    score_title,
)
from tunesmith.run.writing import write_file


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Writes the page, whole or not at all; gives its path."""
    write_file(path, render_comparison(comparison).encode("utf-8", "backslashreplace"))
    return path


def render_comparison(comparison: Comparison) -> str:
    """The page."""
    charts = overlay_charts([run.curves for run in comparison.runs])
    style, script = page_asset("page.css") + page_asset("compare.css"), page_asset("page.js")
    return str(
        page_template("compare.html.j2", score=score_text, title_of=score_title).render(
            c=comparison,
            charts=charts,
            verdicts=VERDICTS,
            style=style,
            script=script,
            policy=content_policy(style, script),
            data=embed_json({chart.key: chart.data for chart in charts}),
        )
    )
