"""The board: pages to watch and compare the runs of a folder. It only reads.

A request never becomes a path: its run id is looked up in the list of runs that were found. A run is being trained if its lock
is held.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
import logging
import os
import re
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from tunesmith.errors import CheckpointError, ConfigError, TunesmithError
from tunesmith.events import Evaluated, Finding, NonFinite, Note, RunEnded, finite_or_none
from tunesmith.files import kind_of
from tunesmith.inference.server import Service, retry_later
from tunesmith.report.build import diagnose_with, read_run_config, tone_and_title
from tunesmith.report.compare import MAX_RUNS
from tunesmith.report.plots import PanelLine, main_panels, more_panels, rounded
from tunesmith.report.predictions import choose_headline, headline_scores
from tunesmith.runs.event_log import ColumnsTail, Curves, build_curves
from tunesmith.runs.folder import RunDir, read_holder, read_metrics, read_summary

log = logging.getLogger(__name__)

ASSETS = ("page.css", "board.css", "chart.js", "list.js", "run.js")
"""All files the board serves in addition to pages."""
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">')
_SEPARATOR = re.compile(r"(?<=[_./\\:=])")
_BODY = "<body>\n"
STREAM_HEADERS = {"x-accel-buffering": "no"}
MAX_DRAWING = 20
RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FRESH_SECONDS = 60
"""A run without a lock file whose event log grew within this time counts as running: Trainer scripts may not take a lock."""
Verdict = tuple[str, str]
"""Kind (good, warn, bad, info) and title."""
POINTS = 900
"""Points per curve: a chart is about 600 pixels wide, and thinning keeps the minimum and maximum of each bucket."""
MAX_STREAMS = 32
HEARTBEAT_SECONDS = 15.0
INTERVAL_SECONDS = 0.7
FOLLOW_SHARE, LONGEST_SECONDS = 0.25, 4.0
"""Maximum share of one core for following a run, and maximum seconds between two updates: an update of a log with a million
lines takes 0.7 s."""
VERDICT_SECONDS = 0.3
"""Maximum time per update of the list for new diagnoses: 200 runs (5 s of CPU) take half a minute."""


class Board(Service):
    """The handlers of `tunesmith board`."""

    token_hint = "open the address that `tunesmith board` printed, with the token"

    def __init__(self, runs: str | Path) -> None:
        if not Path(runs).is_dir():
            fix = "Pass the folder that contains your run folders."
            raise ConfigError("there is no such folder", where=str(runs), fix=fix)
        self.index = RunIndex(runs)
        self._closed = asyncio.Event()
        self._watching = 0
        self._pen = asyncio.Lock()
        self._drawing = 0

    def routes(self) -> list[Route]:
        """Return all routes of the board."""
        pages = {
            "/": self._list,
            "/events": self._list_events,
            "/compare": self._compare,
            "/assets/{name}": self._asset,
            "/runs/{run}": self._run,
            "/runs/{run}/report": self._report,
            "/runs/{run}/events": self._run_events,
        }
        return [Route(path, handler, methods=["GET"]) for path, handler in pages.items()]

    def close(self) -> None:
        """End the streams of all watching pages."""
        self._closed.set()

    async def _list(self, request: Request) -> Response:
        return HTMLResponse(_template("list.html.j2").render(root=str(self.index.root)))

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            raise HTTPException(404, "there is no such file")
        return Response(read_asset(name), media_type="text/css" if name.endswith(".css") else "text/javascript")

    async def _run(self, request: Request) -> Response:
        run = await self._wanted(request)
        name, _ = await asyncio.to_thread(_names, run)
        page = _template("run.html.j2")
        return HTMLResponse(page.render(id=request.path_params["run"], name=name, path=str(run.path)))

    async def _report(self, request: Request) -> Response:
        run = await self._wanted(request)
        return await self._draw(lambda: draw_report(run, request.path_params["run"]))

    async def _compare(self, request: Request) -> Response:
        wanted = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(wanted) <= MAX_RUNS:
            raise HTTPException(422, f"select 2 to {MAX_RUNS} runs to compare")
        found = [await asyncio.to_thread(self.index.find, one) for one in wanted]
        runs = [run for run in found if run is not None]
        if len(runs) < len(wanted):
            raise HTTPException(404, "there is no such run")
        return await self._draw(lambda: draw_comparison(runs))

    async def _draw(self, make: Callable[[], str]) -> Response:
        """Draw a slow page, one at a time: matplotlib is not thread-safe, and the threads that look up runs stay free."""
        if self._drawing >= MAX_DRAWING:
            raise retry_later(503, "too many reports are being drawn")
        self._drawing += 1
        try:
            async with self._pen:
                return _page(await asyncio.to_thread(make))
        finally:
            self._drawing -= 1

    async def _list_events(self, request: Request) -> Response:
        shown: list[dict[str, Any]] | None = None

        def produce() -> bytes | None:
            nonlocal shown
            rows = [asdict(row) for row in self.index.rows(seconds=VERDICT_SECONDS)]
            changed, shown = rows != shown, rows
            return encode_message("runs", rows) if changed else None

        return self._stream(request, produce)

    async def _run_events(self, request: Request) -> Response:
        live = LiveRun(await self._wanted(request))
        return self._stream(request, lambda: encode_message("run", live.snapshot()) if live.poll() else None)

    def _stream(self, request: Request, produce: Callable[[], bytes | None]) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=STREAM_HEADERS)
        if self._watching >= MAX_STREAMS:
            raise retry_later(503, "too many pages are watching")
        return StreamingResponse(self._watch(produce), media_type="text/event-stream", headers=STREAM_HEADERS)

    async def _watch(self, produce: Callable[[], bytes | None]) -> AsyncGenerator[bytes]:
        """Yield every message of `produce`, which returns None if nothing changed; comments keep the connection alive."""
        self._watching += 1
        try:
            yield b"retry: 1000\n\n"
            sent = time.monotonic()
            while not self._closed.is_set():
                began = time.monotonic()
                message = None
                try:
                    message = await asyncio.to_thread(produce)
                except Exception:  # a damaged file may be written again
                    log.exception("a run could not be read")
                now = time.monotonic()
                if message is None and now - sent > HEARTBEAT_SECONDS:
                    message = b": keep-alive\n\n"
                if message is not None:
                    sent = now
                    yield message
                wait = max(INTERVAL_SECONDS, min((now - began) / FOLLOW_SHARE, LONGEST_SECONDS))
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closed.wait(), wait)
        finally:
            self._watching -= 1

    async def _wanted(self, request: Request) -> RunDir:
        run = await asyncio.to_thread(self.index.find, request.path_params["run"])
        if run is None:
            raise HTTPException(404, "there is no such run")
        return run


# Pages


def _page(text: str) -> Response:
    """Return a report. Its content security policy, one script and one style sheet by hash, is also sent as a header."""
    found = _POLICY.search(text)
    assert found is not None
    policy = html.unescape(found.group(1)) + "; frame-ancestors 'none'"
    return HTMLResponse(text.encode("utf-8", "backslashreplace"), headers={"content-security-policy": policy})


@cache
def read_asset(name: str) -> bytes:
    """Return one of ASSETS. Reports and the board share page.css."""
    folder = files("tunesmith.report") if name == "page.css" else files("tunesmith.inference") / "assets"
    return (folder / name).read_bytes()


def draw_report(run: RunDir, run_id: str) -> str:
    """Return the report of a run, with links to the board."""
    from tunesmith.report.build import build_report, render_report

    links = [("All runs", "/"), ("Live curves", f"/runs/{run_id}")]
    return _with_links(render_report(build_report(run)), links)


def draw_comparison(runs: Sequence[RunDir]) -> str:
    """Return the comparison of several runs."""
    from tunesmith.report.build import render_comparison
    from tunesmith.report.compare import compare_runs

    return _with_links(render_comparison(compare_runs([run.path for run in runs])), [("All runs", "/")])


def _with_links(page: str, links: Sequence[tuple[str, str]]) -> str:
    made = "".join(f'<a href="{html.escape(address)}">{html.escape(text)}</a>' for text, address in links)
    return page.replace(_BODY, f'{_BODY}<div class="top"><nav aria-label="Board">{made}</nav></div>\n', 1)


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["breakable"] = _breakable
    text = (files("tunesmith.inference") / "assets" / name).read_text(encoding="utf-8")
    return environment.from_string(text)


def _breakable(text: object) -> Any:
    """Allow line breaks after separators in a name; browsers only break after hyphens."""
    from markupsafe import Markup

    return Markup("<wbr>").join(_SEPARATOR.split(str(text)))


# Runs


@dataclass(frozen=True, slots=True)
class RunRow:
    """One row of the list of runs."""

    id: str
    name: str
    model: str
    status: str
    updated: float
    problem: str | None = None
    """The damage of the run folder, if any."""
    step: int = 0
    num_steps: int = 0
    loss: float | None = None
    score: tuple[str, float, float | None, float | None] | None = None
    """Name, value, and the 95% interval."""
    ended: str | None = None
    """Why the run ended; None while it runs or when it was killed."""
    verdict: Verdict | None = None
    """The first finding; None if there is none, or if the run was not diagnosed yet."""


class RunIndex:
    """The runs of a folder. Every call looks for new and removed runs."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).resolve()
        self._live: dict[str, LiveRun] = {}
        self._known: dict[str, tuple[Any, RunRow]] = {}
        self._lock = threading.Lock()

    def find_all(self) -> dict[str, RunDir]:
        """Return id -> run folder: direct subfolders with an event log, and the root itself if it is a run."""
        root = RunDir(self.root)
        found = {run_id(self.root.name): root} if os.path.lexists(root.journal_file) else {}
        try:
            with os.scandir(self.root) as listing:
                entries = list(listing)
        except OSError:
            return found
        for entry in entries:
            if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                continue
            run = RunDir(entry.path)
            if os.path.lexists(run.journal_file):
                found[run_id(entry.name)] = run
        return found

    def find(self, wanted: str) -> RunDir | None:
        """Return the run with this id; None if there is none, or if it contains links to other places."""
        if not RUN_ID.fullmatch(wanted) or set(wanted) == {"."}:
            return None
        run = self.find_all().get(wanted)
        return run if run is not None and has_no_links(run) else None

    def rows(self, *, seconds: float = 0.0) -> list[RunRow]:
        """Return all runs, the newest first. Runs without a verdict are diagnosed for about `seconds`."""
        until = time.monotonic() + seconds
        with self._lock:
            found = [row for key, run in self.find_all().items() if (row := self._row(key, run, until)) is not None]
        return sorted(found, key=lambda row: (row.status != "running", -row.updated))

    def _row(self, key: str, run: RunDir, until: float) -> RunRow | None:
        live = self._live.setdefault(key, LiveRun(run))
        live.poll(diagnose=time.monotonic() < until)
        if live.version is None:
            return None
        scored = os.lstat(run.metrics_file).st_mtime_ns if kind_of(run.metrics_file) == "a file" else 0
        if self._known.get(key, (None,))[0] != (live.version, scored):
            self._known[key] = (live.version, scored), _make_row(key, live)
        row = self._known[key][1]
        verdict = tone_and_title(live.findings[0]) if live.findings else None
        return row if row.problem else replace(row, status=live.status, verdict=verdict)


def run_id(name: str) -> str:
    """Return the name of the folder if it is valid in a URL, else a name with its hash."""
    if RUN_ID.fullmatch(name) and set(name) != {"."}:
        return name
    return "run-" + hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def status_of(run: RunDir, ended: str | None, updated: float) -> str:
    """Return running, finished, stopped, failed, or interrupted (no end in the event log)."""
    if read_holder(run.lock_file) is not None:
        return "running"
    if ended is None:
        fresh = not run.lock_file.exists() and time.time() - updated < FRESH_SECONDS
        return "running" if fresh else "interrupted"
    if ended in ("completed", "early_stopping"):
        return "finished"
    by_signal = ended in ("SIGTERM", "SIGINT", "break") or ended.startswith("signal ")
    return "stopped" if by_signal else "failed"


def has_no_links(run: RunDir) -> bool:
    """Return whether the folder and all files read from it are real: a link could expose any file of this machine."""
    files = [run.path, run.journal_file, run.config_file, run.environment_file, run.data_summary_file]
    files += [run.metrics_file, run.predictions_file, run.lock_file, run.model]
    if any(os.path.islink(file) for file in files):
        return False
    return not run.model.is_dir() or not any(file.is_symlink() for file in run.model.iterdir())


def _make_row(key: str, live: LiveRun) -> RunRow:
    """Return a row whose status is "damaged" if it has a problem, else still unknown."""
    found: dict[str, Any] = {}
    run, curves, problem = live.run, live.curves, live.problem
    try:
        if os.path.islink(run.metrics_file):  # it could expose any file of this machine
            raise CheckpointError("is a link, not a file", where=str(run.metrics_file))
        metrics = read_metrics(run.metrics_file)
    except CheckpointError as error:
        problem, metrics = problem or str(error), {}
    if curves is not None:
        found = {"step": curves.last_step, "num_steps": max(0, curves.num_steps), "ended": curves.ended}
        found["loss"] = finite_or_none(float(curves.train_loss.value[-1])) if len(curves.train_loss) else None
        if (best := choose_headline(headline_scores(metrics, curves), curves)) is not None:
            found["score"] = (f"{best.split} {best.name}", best.value, best.low, best.high)
    return RunRow(key, *_names(run), "damaged" if problem else "", live.updated, problem, **found)


def _names(run: RunDir) -> tuple[str, str]:
    """Return the names of the run and of its model."""
    try:
        config = read_run_config(run.config_file)
    except (TunesmithError, OSError):
        config = {}
    return str(config.get("run_name") or run.name)[:200], Path(str(config.get("model_name_or_path") or "")).name[:200]


def with_title(finding: Finding) -> dict[str, object]:
    """Return a finding as the page of a run shows it."""
    kind, title = tone_and_title(finding)
    return finding.to_json() | {"numbers": {}, "kind": kind, "title": title + finding.doubt}


# Live updates


class LiveRun:
    """A run that is followed: `poll` reads new events, `snapshot` returns everything as JSON. Not thread-safe."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.curves: Curves | None = None
        self.findings: list[Finding] = []
        self.notes: list[str] = []
        self.problem: str | None = None
        self.status = ""
        self.version: tuple[int, ...] | None = None
        """Changes with the event log; None if there is none."""
        self.updated = 0.0
        self._tail = ColumnsTail(run.journal_file)
        self._diagnosed: tuple[Any, ...] = ()
        self._is_new, self._has_more = True, False

    def poll(self, *, diagnose: bool = True) -> bool:
        """Read new events; return whether there is anything new to show."""
        before, changed = (self.status, self.problem), False
        try:
            info = os.lstat(self.run.journal_file)
            version, self.updated = (info.st_ino, info.st_size, info.st_mtime_ns), info.st_mtime
        except OSError:
            version, self.updated = None, 0.0
        if version != self.version or self._has_more:
            self.version, self.problem = version, None
            try:
                changed = self._tail.poll()
            except (TunesmithError, OSError) as error:
                self.problem = str(error)
        self._has_more = changed  # a poll reads a part of a long log
        if changed and self._tail.columns is not None:
            self.curves = build_curves(self._tail.columns, name=self.run.name)
        self.status = status_of(self.run, self.curves.ended if self.curves is not None else None, self.updated)
        self._is_new |= changed or before[0] != self.status
        if diagnose and self._is_new and self.curves is not None and has_no_links(self.run):
            self._is_new = False
            self._diagnose()
        return changed or before != (self.status, self.problem)

    def _diagnose(self) -> None:
        assert self._tail.columns is not None
        assert self.curves is not None
        others = self._tail.columns.others
        self.notes = list(dict.fromkeys(e.text for e in others if isinstance(e, Note)))[-8:]
        seen = tuple(e for e in others if isinstance(e, (Evaluated, NonFinite, RunEnded)))
        running = self.status == "running"
        mark = (len(seen), seen[-1:] and seen[-1].step, running)
        if mark != self._diagnosed or not self.findings:
            self._diagnosed = mark
            try:
                config = read_run_config(self.run.config_file)
                summary = read_summary(self.run.data_summary_file)
            except (ValueError, OSError):
                config, summary = {}, {}
            with suppress(ValueError):
                self.findings = diagnose_with(self.curves, config, summary, running=running)

    def snapshot(self) -> dict[str, Any]:
        """Return everything the page draws."""
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
            "epoch": rounded(float(loss.epoch[-1])) if len(loss) else None,
            "loss": rounded(float(loss.value[-1])) if len(loss) else None,
            "seconds_left": self._seconds_left(curves),
            "best": {"metric": best[0], "step": best[1], "value": rounded(best[2])} if best else None,
            "ended": curves.ended,
            "resumed_at": list(curves.resumed_at)[-20:],
            "findings": [with_title(f) for f in self.findings],
            "notes": self.notes,
            "panels": make_panels(curves),
        }

    def _seconds_left(self, curves: Curves) -> float | None:
        recent = curves.examples_per_second.finite().value[-50:]
        rate = float(np.median(recent)) if len(recent) else 0.0
        done = curves.last_step
        if self.status != "running" or not curves.num_steps or rate <= 0 or not done:
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            rows = curves.train_rows / curves.steps_per_epoch if curves.steps_per_epoch else float("nan")
        left = (curves.num_steps - done) * rows / rate
        return round(left) if np.isfinite(left) else None


def make_panels(curves: Curves) -> list[dict[str, Any]]:
    """Return the charts as data: title, and lines with a name, a kind (raw, smooth, points, dashed) and a color."""
    return [
        {"key": panel.key, "title": panel.title, "lines": [_line(line) for line in panel.lines if len(line.series)]}
        for panel in (*main_panels(curves), *more_panels(curves))
    ]


def _line(line: PanelLine) -> dict[str, Any]:
    thin = line.series.thinned(POINTS)
    return {
        "name": line.name,
        "kind": line.kind,
        "color": "val" if line.kind == "points" else "train",
        "x": thin.step.tolist(),
        "y": [rounded(v) for v in thin.value.tolist()],
    }


def encode_message(kind: str, data: Any) -> bytes:
    """Return one Server-Sent Event. The JSON is ASCII without line breaks, so no text can end the message."""
    return f"event: {kind}\ndata: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n".encode("ascii")
