"""The board: pages to watch, compare, try and stop runs. Handlers look up runs by id and never build a path from a request."""

from __future__ import annotations

import asyncio
import html
import math
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tunesmith.errors import ConfigError, TunesmithError
from tunesmith.inference.batcher import Batcher, Overloaded, parse_texts
from tunesmith.inference.live_runs import VERDICT_SECONDS, Channels, LiveRun, RunIndex, RunRow, spark_points, stop_run
from tunesmith.inference.security import BOARD_TOKEN
from tunesmith.inference.server import BadRequest, json_errors, read_json_body, retry_later
from tunesmith.inference.service import model_summary
from tunesmith.report.compare import MAX_RUNS
from tunesmith.runs.folder import RunDir

ASSETS = {
    "page.css": "text/css; charset=utf-8",
    "board.css": "text/css; charset=utf-8",
    "chart.js": "text/javascript; charset=utf-8",
    "list.js": "text/javascript; charset=utf-8",
    "run.js": "text/javascript; charset=utf-8",
}
"""All files the board serves in addition to pages."""
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">')
_SEPARATOR = re.compile(r"(?<=[_./\\:=])")
_BODY = "<body>\n"
STREAM_HEADERS = {"x-accel-buffering": "no"}
CLASSIFY_SECONDS = 120.0
MAX_DRAWING = 20


class Board:
    """The handlers of `tunesmith board`."""

    token_hint = BOARD_TOKEN
    public: tuple[str, ...] = ()

    def __init__(self, runs: str | Path, batcher: Batcher | None = None) -> None:
        if not Path(runs).is_dir():
            fix = "Pass the folder that contains your run folders."
            raise ConfigError("there is no such folder", where=str(runs), fix=fix)
        self.index = RunIndex(runs)
        self.channels = Channels(self.index)
        self.batcher = batcher or Batcher()
        self.pages = PageCache()
        self._pen = asyncio.Lock()
        self._drawing = 0

    def routes(self) -> list[Route]:
        """Return all routes of the board."""
        reading = {
            "/": self._list,
            "/events": self._list_events,
            "/compare": self._compare,
            "/assets/{name}": self._asset,
            "/runs/{run}": self._run,
            "/runs/{run}/report": self._report,
            "/runs/{run}/events": self._run_events,
            "/runs/{run}/curves": self._curves,
        }
        acting = {"/runs/{run}/classify": self._classify, "/runs/{run}/stop": self._stop}
        found = [(path, handler, "GET") for path, handler in reading.items()]
        found += [(path, handler, "POST") for path, handler in acting.items()]
        return [Route(path, json_errors(handler), methods=[method]) for path, handler, method in found]

    def start(self) -> None:
        """Do nothing: models are loaded when they are first used."""

    async def close(self) -> None:
        """End the streams of all watching pages."""
        await self.channels.close()

    def stop(self) -> None:
        """End the thread of the models."""
        self.batcher.close()

    async def _list(self, request: Request) -> Response:
        rows = await asyncio.to_thread(self.index.rows, seconds=VERDICT_SECONDS)
        return HTMLResponse(list_page(rows, str(self.index.root)))

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            raise BadRequest(404, "there is no such file")
        return Response(read_asset(name), media_type=ASSETS[name])

    async def _run(self, request: Request) -> Response:
        run = await self._wanted(request)
        rows = await asyncio.to_thread(self.index.rows)
        row = next((row for row in rows if row.id == request.path_params["run"]), None)
        if row is None:
            raise BadRequest(404, "there is no such run")
        return HTMLResponse(run_page(row, run, model_summary(run)))

    async def _report(self, request: Request) -> Response:
        run = await self._wanted(request)
        return await self._draw(lambda: self.pages.report(run, request.path_params["run"]))

    async def _compare(self, request: Request) -> Response:
        wanted = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(wanted) <= MAX_RUNS:
            raise BadRequest(422, f"tick 2 to {MAX_RUNS} runs to compare")
        found = [await asyncio.to_thread(self.index.find, one) for one in wanted]
        runs = [run for run in found if run is not None]
        if len(runs) < len(wanted):
            raise BadRequest(404, "there is no such run")
        return await self._draw(lambda: self.pages.comparison(runs))

    async def _draw(self, make: Callable[[], str]) -> Response:
        """Draw a slow page, one at a time, so that the threads that look up runs stay free."""
        if self._drawing >= MAX_DRAWING:
            return retry_later(503, "too many reports are being drawn")
        self._drawing += 1
        try:
            async with self._pen:
                return _page(await asyncio.to_thread(make))
        finally:
            self._drawing -= 1

    async def _list_events(self, request: Request) -> Response:
        return self._stream(request, self.channels.stream_list())

    async def _run_events(self, request: Request) -> Response:
        await self._wanted(request)
        return self._stream(request, self.channels.stream_run(request.path_params["run"]))

    def _stream(self, request: Request, messages: AsyncGenerator[bytes]) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=STREAM_HEADERS)
        if self.channels.is_full:
            return retry_later(503, "too many pages are watching")
        return StreamingResponse(messages, media_type="text/event-stream", headers=STREAM_HEADERS)

    async def _curves(self, request: Request) -> Response:
        run = await self._wanted(request)
        low, high = (_number(request, name) for name in ("low", "high"))
        live = self.channels.live(request.path_params["run"]) or LiveRun(run)
        return JSONResponse(await asyncio.to_thread(_zoom, live, low, high))

    async def _classify(self, request: Request) -> Response:
        run = await self._wanted(request)
        given = parse_texts(await read_json_body(request))
        try:
            async with asyncio.timeout(CLASSIFY_SECONDS):
                found = await self.batcher.classify(run, given)
        except (Overloaded, TimeoutError):
            return retry_later(503, "too many texts are waiting")
        return JSONResponse({"results": [{"label": p.label, "scores": list(p.probabilities.items())} for p in found]})

    async def _stop(self, request: Request) -> Response:
        run = await self._wanted(request)
        try:
            holder = await asyncio.to_thread(stop_run, run)
        except TunesmithError as error:
            raise BadRequest(409, str(error)) from None
        return JSONResponse(
            {"pid": holder.pid, "said": "SIGTERM: it saves a checkpoint after the current step and stops"}, 202
        )

    async def _wanted(self, request: Request) -> RunDir:
        run = await asyncio.to_thread(self.index.find, request.path_params["run"])
        if run is None:
            raise BadRequest(404, "there is no such run")
        return run


def _zoom(live: LiveRun, low: float, high: float) -> dict[str, Any]:
    if live.curves is None:
        live.poll()
    return live.snapshot(low, high)


def _number(request: Request, name: str) -> float:
    try:
        value = float(request.query_params.get(name, ""))
    except ValueError:
        raise BadRequest(422, f"{name} must be a step") from None
    if not math.isfinite(value):
        raise BadRequest(422, f"{name} must be a step")
    return value


def _page(text: str) -> Response:
    body = text.encode("utf-8", "backslashreplace")
    return HTMLResponse(body, headers={"content-security-policy": policy_of(text)})


@cache
def read_asset(name: str) -> bytes:
    """Return one of ASSETS. Reports and the board share page.css."""
    folder = files("tunesmith.report") if name == "page.css" else files("tunesmith.inference") / "assets"
    return (folder / name).read_bytes()


def list_page(rows: Sequence[RunRow], root: str) -> str:
    """Return the list of runs, which works without scripts."""
    return str(_template("list.html.j2").render(rows=rows, root=root, now=time.time()))


def run_page(row: RunRow, run: RunDir, facts: dict[str, Any] | None) -> str:
    """Return the page of one run; its curves are streamed."""
    return str(_template("run.html.j2").render(row=row, run=run, facts=facts))


class PageCache:
    """Reports and comparisons, which take a second to draw, cached until a file of their runs changes."""

    def __init__(self, size: int = 12) -> None:
        self._size = size
        self._kept: OrderedDict[Hashable, str] = OrderedDict()
        self._lock = threading.Lock()

    def report(self, run: RunDir, run_id: str) -> str:
        """Return the report of a run, with links to the board."""
        from tunesmith.report.build import build_report
        from tunesmith.report.render import render_report

        back = [("All runs", "/"), ("Live curves and try-it", f"/runs/{run_id}")]
        return self._get(("report", *_marks(run)), lambda: _with_links(render_report(build_report(run)), back))

    def comparison(self, runs: Sequence[RunDir]) -> str:
        """Return the comparison of several runs."""
        from tunesmith.report.compare import compare_runs
        from tunesmith.report.render import render_comparison

        marks = tuple(_marks(run) for run in runs)
        return self._get(
            ("compare", *marks),
            lambda: _with_links(render_comparison(compare_runs([run.path for run in runs])), [("All runs", "/")]),
        )

    def _get(self, key: Hashable, make: Callable[[], str]) -> str:
        with self._lock:  # matplotlib is not thread-safe
            if key not in self._kept:
                self._kept[key] = make()
                while len(self._kept) > self._size:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]


def policy_of(page: str) -> str:
    """Return the content security policy of a report, as a header: one script and one style sheet, by hash."""
    found = _POLICY.search(page)
    assert found is not None
    return html.unescape(found.group(1)) + "; frame-ancestors 'none'"


def _with_links(page: str, links: Sequence[tuple[str, str]]) -> str:
    made = "".join(f'<a href="{html.escape(address)}">{html.escape(text)}</a>' for text, address in links)
    return page.replace(_BODY, f'{_BODY}<div class="top"><nav aria-label="Board">{made}</nav></div>\n', 1)


def _marks(run: RunDir) -> tuple[Any, ...]:
    watched = (run.journal_file, run.config_file, run.metrics_file, run.predictions_file, run.data_summary_file)
    found = []
    for file in watched:
        try:
            info = os.lstat(file)
            found.append((info.st_ino, info.st_size, info.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
    return (str(run.path), *found)


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"ago": _ago, "spark": spark_points, "short": lambda v: f"{v:.3f}", "breakable": _breakable}
    text = (files("tunesmith.inference") / "assets" / name).read_text(encoding="utf-8")
    return environment.from_string(text)


def _ago(seconds: float) -> str:
    for limit, unit, name in ((90, 1, "second"), (5400, 60, "minute"), (129_600, 3600, "hour")):
        if seconds < limit:
            count = max(0, round(seconds / unit))
            return f"{count} {name}{'' if count == 1 else 's'} ago"
    return f"{round(seconds / 86_400)} days ago"


def _breakable(text: object) -> Any:
    """Allow line breaks after separators in a name; browsers only break after hyphens."""
    from markupsafe import Markup

    return Markup("<wbr>").join(_SEPARATOR.split(str(text)))
