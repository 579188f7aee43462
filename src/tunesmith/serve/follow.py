"""One run as the live page shows it: its journal followed on disk, its curves thinned, its diagnosis as it changes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np

from tunesmith.curves.panels import PanelLine, main_panels, more_panels
from tunesmith.curves.series import Curves, Series, build_curves
from tunesmith.errors import TunesmithError
from tunesmith.events import Evaluated, NonFinite, Note, RunEnded
from tunesmith.findings import Finding
from tunesmith.report.diagnosis import diagnose_with, read_run_config
from tunesmith.run.layout import RunDir, read_summary
from tunesmith.run.reader import ColumnsTail
from tunesmith.serve.runs import status_of
from tunesmith.serve.verdicts import with_title

POINTS = 900
"""Points sent per curve: a chart is about 600 pixels wide, and thinning keeps every bucket's lowest and highest."""


class LiveRun:
    """`poll` reads what is new, `snapshot` says everything as JSON. One thread at a time."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.curves: Curves | None = None
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.problem: str | None = None
        self.status = ""
        self._tail = ColumnsTail(run.journal_file)
        self._diagnosed: tuple[Any, ...] = ()

    def poll(self) -> bool:
        """Reads what was appended since the last time; gives whether there is anything new to show."""
        before = (self.status, self.problem)
        changed = False
        try:
            changed = self._tail.poll()
            self.problem = None
        except (TunesmithError, OSError) as error:
            self.problem = str(error)
        if changed and self._tail.columns is not None:
            self.curves = build_curves(self._tail.columns, name=self.run.name)
        try:
            updated = os.lstat(self.run.journal_file).st_mtime
        except OSError:
            updated = 0.0
        self.status = status_of(self.run, self.curves.ended if self.curves is not None else None, updated)
        if self.curves is not None and (changed or before[0] != self.status):
            self._diagnose()
        return changed or before != (self.status, self.problem)

    def _diagnose(self) -> None:
        assert self._tail.columns is not None
        assert self.curves is not None
        others = [event for _, event in self._tail.columns.others]
        self.notes = list(dict.fromkeys(e.text for e in others if isinstance(e, Note)))[-8:]
        seen = tuple(e for e in others if isinstance(e, (Evaluated, NonFinite, RunEnded)))
        running = self.status == "running"
        mark = (len(seen), seen[-1:] and seen[-1].step, running)
        if mark != self._diagnosed or not self.findings:
            self._diagnosed = mark
            try:
                config = read_run_config(self.run.config_file)
                summary = read_summary(self.run.data_summary_file)
            except (TunesmithError, OSError):
                config, summary = {}, {}
            self.findings = diagnose_with(self.curves, config, summary, running=running)

    def snapshot(self, low: float | None = None, high: float | None = None) -> dict[str, Any]:
        """Everything the page draws; with `low` and `high` the steps between them in full detail."""
        curves = self.curves
        if curves is None:
            return {"status": self.status, "problem": self.problem, "panels": [], "findings": [], "notes": []}
        best = curves.best()
        loss = curves.train_loss
        return {
            "status": self.status,
            "problem": self.problem,
            "step": curves.last_step,
            "num_steps": curves.num_steps,
            "epoch": _short(float(loss.epoch[-1])) if len(loss) else None,
            "loss": _short(float(loss.value[-1])) if len(loss) else None,
            "seconds_left": self._seconds_left(curves),
            "speed": _short(_recent(curves.tokens_per_second)),
            "rows_speed": _short(_recent(curves.examples_per_second)),
            "best": {"metric": best[0], "step": best[1], "value": _short(best[2])} if best else None,
            "ended": curves.ended,
            "resumed_at": list(curves.resumed_at)[-20:],
            "findings": [with_title(f) for f in self.findings],
            "notes": self.notes,
            "panels": make_panels(curves, low, high),
        }

    def _seconds_left(self, curves: Curves) -> float | None:
        rate = _recent(curves.examples_per_second)
        done = curves.last_step
        if self.status != "running" or not curves.num_steps or not np.isfinite(rate) or rate <= 0 or not done:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            rows = curves.train_rows / curves.steps_per_epoch if curves.steps_per_epoch else float("nan")
        left = (curves.num_steps - done) * rows / rate
        return round(left) if np.isfinite(left) else None


def make_panels(curves: Curves, low: float | None = None, high: float | None = None) -> list[dict[str, Any]]:
    """The panels as data: title, and lines with a name, a kind (raw, smooth, points, dashed) and a colour."""
    return [
        {
            "key": panel.key,
            "title": panel.title,
            "lines": [_line(line, low, high) for line in panel.lines if len(line.series)],
        }
        for panel in (*main_panels(curves), *more_panels(curves))
    ]


def _line(line: PanelLine, low: float | None, high: float | None) -> dict[str, Any]:
    series = line.series
    if low is not None and high is not None:
        inside = (series.step >= low) & (series.step <= high)
        series = replace(series, step=series.step[inside], epoch=series.epoch[inside], value=series.value[inside])
    thin = series.thinned(POINTS)
    return {
        "name": line.name,
        "kind": line.kind,
        "color": "train" if line.side == "train" else "val",
        "x": thin.step.tolist(),
        "y": [_short(v) for v in thin.value.tolist()],
    }


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if np.isfinite(value) else None


def _recent(series: Series) -> float:
    good = series.value[-50:]
    good = good[np.isfinite(good)]
    return float(np.median(good)) if len(good) else float("nan")
