"""The board: pages to watch, compare, try and stop runs. Handlers look up runs by id and never build a path from a request."""

from __future__ import annotations

import asyncio
import html
import re
import time
from collections.abc import Callable, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tunesmith.errors import ConfigError
from tunesmith.inference.batcher import Batcher, parse_texts
from tunesmith.inference.live_runs import (
    VERDICT_SECONDS,
    LiveRun,
    RunIndex,
    Streams,
    encode_message,
    spark_points,
    stop_run,
)
from tunesmith.inference.security import BOARD_TOKEN
from tunesmith.inference.server import read_json_body, retry_later
from tunesmith.inference.service import model_summary
from tunesmith.report.compare import MAX_RUNS
from tunesmith.runs.folder import RunDir

ASSETS = ("page.css", "board.css", "chart.js", "list.js", "run.js")
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

    def __init__(self, runs: str | Path, batcher: Batcher | None = None) -> None:
        if not Path(runs).is_dir():
            fix = "Pass the folder that contains your run folders."
            raise ConfigError("there is no such folder", where=str(runs), fix=fix)
        self.index = RunIndex(runs)
        self.streams = Streams()
        self.batcher = batcher or Batcher()
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
        }
        acting = {"/runs/{run}/classify": self._classify, "/runs/{run}/stop": self._stop}
        return [
            *(Route(path, handler, methods=["GET"]) for path, handler in reading.items()),
            *(Route(path, handler, methods=["POST"]) for path, handler in acting.items()),
        ]

    def start(self) -> None:
        """Do nothing: models are loaded when they are first used."""

    def close(self) -> None:
        """End the streams of all watching pages."""
        self.streams.close()

    def stop(self) -> None:
        """End the thread of the models."""
        self.batcher.close()

    async def _list(self, request: Request) -> Response:
        rows = await asyncio.to_thread(self.index.rows, seconds=VERDICT_SECONDS)
        return HTMLResponse(_template("list.html.j2").render(rows=rows, root=str(self.index.root), now=time.time()))

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            raise HTTPException(404, "there is no such file")
        return Response(read_asset(name), media_type="text/css" if name.endswith(".css") else "text/javascript")

    async def _run(self, request: Request) -> Response:
        run = await self._wanted(request)
        rows = await asyncio.to_thread(self.index.rows)
        row = next((row for row in rows if row.id == request.path_params["run"]), None)
        if row is None:
            raise HTTPException(404, "there is no such run")
        return HTMLResponse(_template("run.html.j2").render(row=row, run=run, facts=model_summary(run)))

    async def _report(self, request: Request) -> Response:
        run = await self._wanted(request)
        return await self._draw(lambda: draw_report(run, request.path_params["run"]))

    async def _compare(self, request: Request) -> Response:
        wanted = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 2 <= len(wanted) <= MAX_RUNS:
            raise HTTPException(422, f"tick 2 to {MAX_RUNS} runs to compare")
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
            rows = [row.to_json() for row in self.index.rows(seconds=VERDICT_SECONDS)]
            changed, shown = rows != shown, rows
            return encode_message("runs", rows) if changed else None

        return self._stream(request, produce)

    async def _run_events(self, request: Request) -> Response:
        live = LiveRun(await self._wanted(request))
        return self._stream(request, lambda: encode_message("run", live.snapshot()) if live.poll() else None)

    def _stream(self, request: Request, produce: Callable[[], bytes | None]) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=STREAM_HEADERS)
        if self.streams.is_full:
            raise retry_later(503, "too many pages are watching")
        return StreamingResponse(self.streams.watch(produce), media_type="text/event-stream", headers=STREAM_HEADERS)

    async def _classify(self, request: Request) -> Response:
        run = await self._wanted(request)
        return await self.batcher.respond(run, parse_texts(await read_json_body(request)), CLASSIFY_SECONDS)

    async def _stop(self, request: Request) -> Response:
        run = await self._wanted(request)
        holder = await asyncio.to_thread(stop_run, run)
        return JSONResponse(
            {"pid": holder.pid, "said": "SIGTERM: it saves a checkpoint after the current step and stops"}, 202
        )

    async def _wanted(self, request: Request) -> RunDir:
        run = await asyncio.to_thread(self.index.find, request.path_params["run"])
        if run is None:
            raise HTTPException(404, "there is no such run")
        return run


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
    from tunesmith.report.build import build_report
    from tunesmith.report.render import render_report

    links = [("All runs", "/"), ("Live curves and try-it", f"/runs/{run_id}")]
    return _with_links(render_report(build_report(run)), links)


def draw_comparison(runs: Sequence[RunDir]) -> str:
    """Return the comparison of several runs."""
    from tunesmith.report.compare import compare_runs
    from tunesmith.report.render import render_comparison

    return _with_links(render_comparison(compare_runs([run.path for run in runs])), [("All runs", "/")])


def _with_links(page: str, links: Sequence[tuple[str, str]]) -> str:
    made = "".join(f'<a href="{html.escape(address)}">{html.escape(text)}</a>' for text, address in links)
    return page.replace(_BODY, f'{_BODY}<div class="top"><nav aria-label="Board">{made}</nav></div>\n', 1)


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
