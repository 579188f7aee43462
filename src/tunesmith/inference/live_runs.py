"""One run as the live page shows it: its journal followed on disk, its curves thinned, its diagnosis as it changes. And which
pages watch what: one task follows a run however many pages show it, and a slow page gets the newest state only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tunesmith.errors import TunesmithError
from tunesmith.events import Evaluated, NonFinite, Note, RunEnded
from tunesmith.findings import Finding
from tunesmith.inference.runs import RunIndex, status_of
from tunesmith.inference.verdicts import with_title
from tunesmith.report.diagnosis import diagnose_with, read_run_config
from tunesmith.report.plots import PanelLine, main_panels, more_panels
from tunesmith.runs.curves import Curves, Series, build_curves
from tunesmith.runs.event_log import ColumnsTail
from tunesmith.runs.folder import RunDir, read_summary

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


log = logging.getLogger(__name__)

MAX_STREAMS = 100
HEARTBEAT_SECONDS = 15.0
INTERVAL_SECONDS = 0.7
BUSY_SHARE, LONGEST_SECONDS = 0.25, 4.0
"""The share of one core that following one run may take: a journal of a million lines is drawn less often (one update
of it takes 0.7 s), but never less often than every few seconds."""
VERDICT_SECONDS = 0.3
"""Spent at most on diagnosing runs of the list, each time it is made: 200 runs (5 s of CPU) have theirs in half a minute."""
KEEP_SECONDS = 120.0
MOST_KEPT = 6


class Channel:
    """The newest message of one source, and those who wait for the next."""

    def __init__(self, produce: Callable[[], bytes | None]) -> None:
        self._produce = produce
        self.message: bytes | None = None
        self.version = 0
        self.watchers = 0
        self.closed = False
        self.left_at = time.monotonic()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def watch(self) -> AsyncGenerator[bytes]:
        """Messages as they come, the newest first; an empty comment now and then keeps the connection known to be alive."""
        self.watchers += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._follow())
        seen = 0
        try:
            yield b"retry: 1000\n\n"
            while not self.closed:
                changed = self._changed
                if self.version > seen and self.message is not None:
                    seen = self.version
                    yield self.message
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    yield b": still here\n\n"
        finally:
            self.watchers -= 1
            self.left_at = time.monotonic()

    async def _follow(self) -> None:
        while self.watchers:
            began = time.monotonic()
            try:
                message = await asyncio.to_thread(self._produce)
            except Exception:  # a damaged file must not end the following: it may be written again
                log.exception("a run could not be read")
                message = None
            spent = time.monotonic() - began
            if message is not None:
                self.message, self.version = message, self.version + 1
                before, self._changed = self._changed, asyncio.Event()
                before.set()
            await asyncio.sleep(max(INTERVAL_SECONDS, min(spent / BUSY_SHARE, LONGEST_SECONDS)))

    async def close(self) -> None:
        """Stops following the source and ends every stream of it."""
        self.closed = True
        self._changed.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class Channels:
    """All channels: the list of runs, and one for each run that is looked at."""

    def __init__(self, index: RunIndex) -> None:
        self.index = index
        self._rows: list[dict[str, Any]] | None = None
        self._list = Channel(self._poll_list)
        self._runs: dict[str, tuple[LiveRun, Channel]] = {}

    @property
    def is_full(self) -> bool:
        """Whether another page would be one too many."""
        return sum(channel.watchers for channel in self._every()) >= MAX_STREAMS

    def live(self, run_id: str) -> LiveRun | None:
        """The followed run; None unless a page showed it in the last minutes."""
        found = self._runs.get(run_id)
        return found[0] if found else None

    def stream_list(self) -> AsyncGenerator[bytes]:
        """Messages about the list of runs."""
        return self._list.watch()

    def stream_run(self, run_id: str) -> AsyncGenerator[bytes]:
        """Messages about one run, which must exist."""
        return self._channel(run_id).watch()

    async def close(self) -> None:
        """Ends all streams, so that the server can stop."""
        for channel in self._every():
            await channel.close()

    def _every(self) -> list[Channel]:
        return [self._list, *(channel for _, channel in self._runs.values())]

    def _channel(self, run_id: str) -> Channel:
        now = time.monotonic()
        idle = sorted((c.left_at, k) for k, (_, c) in self._runs.items() if not c.watchers)
        crowd = len(idle) - MOST_KEPT
        for left_at, key in idle:
            if now - left_at > KEEP_SECONDS or crowd > 0:
                del self._runs[key]
                crowd -= 1
        if run_id not in self._runs:
            run = self.index.find(run_id)
            assert run is not None
            live = LiveRun(run)
            self._runs[run_id] = (live, Channel(lambda: _poll_run(live)))
        return self._runs[run_id][1]

    def _poll_list(self) -> bytes | None:
        rows = [row.to_json() for row in self.index.rows(seconds=VERDICT_SECONDS)]
        if rows == self._rows:
            return None
        self._rows = rows
        return encode_message("runs", rows)


def _poll_run(live: LiveRun) -> bytes | None:
    return encode_message("run", live.snapshot()) if live.poll() else None


def encode_message(kind: str, data: Any) -> bytes:
    """One Server-Sent Event. JSON is ASCII here and holds no line break, so no text can end the message."""
    return f"event: {kind}\ndata: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n".encode("ascii")
