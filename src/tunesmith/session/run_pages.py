"""Curves and report of a run. Imports no torch: another process may draw them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import numpy as np

from tunesmith.curves.plot import curve_pictures, draw_nothing, write_curves
from tunesmith.curves.series import Curves, build_curves
from tunesmith.report.build import build_report
from tunesmith.report.charts import Chart, make_charts
from tunesmith.report.render import report_template, write_report
from tunesmith.run.layout import RunDir
from tunesmith.run.reader import ColumnsTail


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Pictures of the curves, made before the last lines of the journal."""

    tail: ColumnsTail
    curves: Curves
    pictures: tuple[bytes, bytes]
    charts: tuple[list[Chart], list[Chart]]

    def shows(self, curves: Curves) -> bool:
        """Whether these curves have the points that were drawn, and no others."""
        evaluated = [
            {s: {n: len(k) for n, k in m.items()} for s, m in c.evaluations.items()} for c in (self.curves, curves)
        ]
        same = np.array_equal(self.curves.train_loss.step, curves.train_loss.step) and evaluated[0] == evaluated[1]
        return same and self.curves.non_finite == curves.non_finite and self.curves.best() == curves.best()


_ahead: dict[str, _Drawn] = {}
"""By the folder of a run, what this process drew while the run was still scored and written."""


def load_pages() -> None:
    """Loads what drawing needs, before there is anything to draw."""
    import_module("jinja2")
    report_template()
    draw_nothing()


def draw_ahead(run: RunDir) -> None:
    """Draws the curves of a run that has done its last step: `draw_and_explain` in the same process uses them."""
    tail = ColumnsTail(run.journal_file)
    tail.poll()
    assert tail.columns is not None
    curves = build_curves(tail.columns, name=run.name)
    _ahead[str(run.path)] = _Drawn(tail, curves, curve_pictures(curves), make_charts(curves))


def draw_and_explain(run: RunDir) -> list[str]:
    """Writes curves and the report; returns the diagnosis in lines."""
    ahead, curves = _ahead.pop(str(run.path), None), None
    if ahead is not None:  # of the journal, only its last lines are new
        ahead.tail.poll()
        assert ahead.tail.columns is not None
        curves = build_curves(ahead.tail.columns, name=run.name)
    report = build_report(run, curves)
    known = ahead if ahead is not None and ahead.shows(report.curves) else None
    pictures, charts = (curve_pictures(report.curves), None) if known is None else (known.pictures, known.charts)
    write_curves(pictures, png=run.curves_png, svg=run.curves_svg)
    write_report(report, run.report_file, charts)
    lines = []
    for finding in report.findings:
        lines.append(f"{finding.code}{finding.doubt}: {finding.evidence}")
        lines += [f"  - {advice}" for advice in finding.advice]
    return lines
