"""Curves and report of a run. Imports no torch: another process may draw them."""

from __future__ import annotations

from importlib import import_module

from tunesmith.curves.from_journal import load_curves
from tunesmith.curves.plot import save_curves
from tunesmith.report.build import build_report
from tunesmith.report.render import write_report
from tunesmith.run.layout import RunDir


def load_pages() -> None:
    """Loads what drawing needs, before there is anything to draw."""
    for name in ("matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "matplotlib.figure", "jinja2"):
        import_module(name)


def draw_run(run: RunDir) -> None:
    """Writes curves.png and curves.svg: they need the journal alone, so they can be drawn before there are scores."""
    save_curves(load_curves(run.path), png=run.curves_png, svg=run.curves_svg)


def explain_run(run: RunDir) -> list[str]:
    """Writes the report; returns the diagnosis in lines."""
    report = build_report(run)
    write_report(report, run.report_file)
    lines = []
    for finding in report.findings:
        lines.append(f"{finding.code}{finding.doubt}: {finding.evidence}")
        lines += [f"  - {advice}" for advice in finding.advice]
    return lines
