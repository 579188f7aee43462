"""Curves and report of a run. Imports no torch: another process may draw them."""

from __future__ import annotations

from importlib import import_module

from tunesmith.curves.plot import draw_nothing, save_curves
from tunesmith.report.build import build_report
from tunesmith.report.render import write_report
from tunesmith.run.layout import RunDir


def load_pages() -> None:
    """Loads what drawing needs, before there is anything to draw."""
    import_module("jinja2")
    draw_nothing()


def draw_and_explain(run: RunDir) -> list[str]:
    """Writes curves and the report; returns the diagnosis in lines."""
    report = build_report(run)
    save_curves(report.curves, png=run.curves_png, svg=run.curves_svg)
    write_report(report, run.report_file)
    lines = []
    for finding in report.findings:
        lines.append(f"{finding.code}{finding.doubt}: {finding.evidence}")
        lines += [f"  - {advice}" for advice in finding.advice]
    return lines
