"""Report or Comparison -> one HTML file that needs nothing else: no server, no network, no script but its own.

Every text goes through the template's autoescape. The policy in the page allows exactly one script and one style sheet, by
their hashes, and pictures in data addresses: should a text ever reach the page unescaped, it still cannot run or load.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.files import write_file
from tunesmith.report.build import Report, tone_and_title
from tunesmith.report.charts import Chart, coverage_chart, make_charts, overlay_charts, reliability_chart, value_chart
from tunesmith.report.predictions import Headline, ScoreGrid, make_grid

if TYPE_CHECKING:
    from tunesmith.report.compare import Comparison

TEXT_LIMIT = 700
"""Characters of a mistake's text shown at once; the rest unfolds."""
Charts = tuple[list[Chart], list[Chart]]


def write_report(report: Report, path: Path, charts: Charts | None = None) -> Path:
    """Write the page atomically and return its path."""
    write_file(path, render_report(report, charts).encode("utf-8", "backslashreplace"))
    return path


def report_template() -> Any:
    """The template of the page, compiled once."""
    return page_template("page.html.j2", score=score_text, title_of=score_title)


def render_report(report: Report, drawn: Charts | None = None) -> str:
    """The page, with charts of its curves that were drawn before."""
    charts, more = drawn or make_charts(report.curves)
    rows = report.explained
    reliability = reliability_chart(rows.bins) if rows and rows.bins else None
    coverage = coverage_chart(rows.coverage) if rows and rows.coverage else None
    every = [*charts, *more, *(chart for chart in (reliability, coverage) if chart is not None)]
    style, script = page_asset("page.css"), page_asset("page.js")
    grid = make_grid(report.scores)
    return str(
        report_template().render(
            r=report,
            charts=charts,
            more=more,
            reliability=reliability,
            coverage=coverage,
            values=value_chart(*rows.values) if rows and rows.values else None,
            halves=_halves(report),
            tone_and_title=tone_and_title,
            grid=grid,
            counts={s: next((one.n for one in report.scores if one.split == s and one.n), None) for s in grid.splits},
            floors=_floors(report, grid),
            evaluations=_evaluations(report),
            heat=_heat(report),
            style=style,
            script=script,
            policy=content_policy(style, script),
            data=embed_json({chart.key: chart.data for chart in every}),
            text_limit=TEXT_LIMIT,
        )
    )


def content_policy(style: str, script: str) -> str:
    """The Content-Security-Policy of the page."""
    return (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def embed_json(data: Any) -> str:
    """Return JSON for a <script> element: no text in it can end the element or begin a comment."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


@cache
def page_asset(name: str) -> str:
    """The text of a style, a script or a template."""
    return (files("tunesmith.report") / name).read_text(encoding="utf-8")


@cache
def page_template(name: str, **filters: Callable[[Any], str]) -> Any:
    """A template of this room: everything is escaped, an unknown name is an error."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(page_asset),
    )
    environment.filters |= filters
    return environment.get_template(name)


def score_text(value: float) -> str:
    """Three decimals, or four digits of a large number."""
    return f"{value:.3f}" if abs(value) < 1000 else f"{value:.4g}"


def score_title(name: str) -> str:
    """The name of a score as a heading."""
    if name in ("auroc", "mse", "rmse", "mae", "ece", "f1"):
        return name.upper()
    name = {"r2": "R²", "spearmanr": "spearman", "roc_auc": "AUROC"}.get(name, name)
    return name[:1].upper() + name[1:].replace("_", " ")


def _floors(report: Report, grid: ScoreGrid) -> list[tuple[str, list[Headline | None]]]:
    """Simpler models by the headline's metric, a score for each split of the grid."""
    lead, found = report.headline, []
    for name, scores in report.floors.items() if lead else ():
        own = {score.split: score for score in scores if lead and (score.name, score.of) == (lead.name, lead.of)}
        if own:
            found.append((name, [own.get(split) for split in grid.splits]))
    return found


def _halves(report: Report) -> tuple[str, ...]:
    """The distances within which half and nine in ten of the predicted values lie."""
    if report.explained is None or report.explained.values is None:
        return ()
    true, predicted = report.explained.values
    return tuple(f"{distance:.3g}" for distance in np.quantile(abs(predicted - true), [0.5, 0.9]))


def _evaluations(report: Report) -> dict[str, Any]:
    """The table under the curves: one row per evaluated step, one column per split and metric."""
    series = [(f"{split} {name}", s) for split, m in sorted(report.curves.evaluations.items()) for name, s in m.items()]
    rows: dict[int, list[str]] = {}
    for at, (_, one) in enumerate(series):
        for step, value in zip(one.step.tolist(), one.value.tolist(), strict=True):
            cell = f"{value:.4f}" if value == value else "NaN or inf"  # NaN differs from itself
            rows.setdefault(step, ["" for _ in series])[at] = cell
    kept = sorted(rows.items())
    return {"columns": [name for name, _ in series], "rows": kept[-200:], "left_out": max(0, len(kept) - 200)}


def _heat(report: Report) -> list[list[tuple[int, int, str]]]:
    """Confusion matrix cells: (rows, shade 0 to 10 by share of the true label, share in words)."""
    counts = report.explained.confusion.counts if report.explained and report.explained.confusion else ()
    cells = []
    for row in counts:
        total = sum(row) or 1
        cells.append([(n, round(10 * n / total), f"{n / total:.0%}") for n in row])
    return cells


def write_comparison(comparison: Comparison, path: Path) -> Path:
    """Write the page atomically and return its path."""
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
            tone_and_title=tone_and_title,
            style=style,
            script=script,
            policy=content_policy(style, script),
            data=embed_json({chart.key: chart.data for chart in charts}),
        )
    )
