"""What the board answers. A handler finds its run by id in the index; no handler builds a path from a request."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tunesmith.errors import TunesmithError
from tunesmith.inference.batcher import RETRY_SECONDS, Classifier, Overloaded
from tunesmith.inference.bodies import BadRequest, parse_texts, read_json_body
from tunesmith.inference.live_runs import VERDICT_SECONDS, Channels, LiveRun
from tunesmith.inference.pages import ASSETS, PageCache, list_page, model_facts, policy_of, read_asset, run_page
from tunesmith.inference.runs import RunIndex, stop_run
from tunesmith.inference.security import BOARD_TOKEN
from tunesmith.report.compare import MAX_RUNS
from tunesmith.runs.folder import RunDir

STREAM_HEADERS = {"x-accel-buffering": "no"}
CLASSIFY_SECONDS = 120.0
MAX_DRAWING = 20
Handler = Callable[[Request], Awaitable[Response]]


class Board:
    """The handlers, over one index of runs."""

    how = BOARD_TOKEN

    def __init__(self, index: RunIndex, classifier: Classifier | None = None) -> None:
        self.index = index
        self.channels = Channels(index)
        self.classifier = classifier or Classifier()
        self.pages = PageCache()
        self._pen = asyncio.Lock()
        self._drawing = 0

    def routes(self) -> list[Route]:
        """Every route of the board."""
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
        return [Route(path, refuse_in_json(handler), methods=[method]) for path, handler, method in found]

    async def close(self) -> None:
        """Ends the streams of all watching pages."""
        await self.channels.close()

    def stop(self) -> None:
        """Ends the model's thread."""
        self.classifier.close()

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
        return HTMLResponse(run_page(row, run, model_facts(run)))

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
        """Draws a slow page, one at a time, so that the threads that look up runs stay free."""
        if self._drawing >= MAX_DRAWING:
            return _busy("too many reports are being drawn")
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
            return _busy("too many pages are watching")
        return StreamingResponse(messages, media_type="text/event-stream", headers=STREAM_HEADERS)

    async def _curves(self, request: Request) -> Response:
        run = await self._wanted(request)
        low, high = (_number(request, name) for name in ("low", "high"))
        live = self.channels.live(request.path_params["run"]) or LiveRun(run)
        return JSONResponse(await asyncio.to_thread(_zoom, live, low, high))

    async def _classify(self, request: Request) -> Response:
        return await answer_texts(request, await self._wanted(request), self.classifier)

    async def _stop(self, request: Request) -> Response:
        run = await self._wanted(request)
        try:
            holder = await asyncio.to_thread(stop_run, run)
        except TunesmithError as error:
            raise BadRequest(409, str(error)) from None
        return JSONResponse({"pid": holder.pid, "said": "SIGTERM: it saves at the next safe point and stops"}, 202)

    async def _wanted(self, request: Request) -> RunDir:
        run = await asyncio.to_thread(self.index.find, request.path_params["run"])
        if run is None:
            raise BadRequest(404, "there is no such run")
        return run


async def answer_texts(request: Request, run: RunDir, classifier: Classifier) -> Response:
    """Classifies the texts in the body; 503 when too many wait."""
    given = parse_texts(await read_json_body(request))
    try:
        async with asyncio.timeout(CLASSIFY_SECONDS):
            found = await classifier.classify(run, given)
            return JSONResponse({"results": [{"label": one["label"], "scores": one["scores"]} for one in found]})
    except (Overloaded, TimeoutError):
        return _busy("too many texts are waiting")


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


def _busy(reason: str) -> Response:
    return JSONResponse({"error": reason}, 503, headers={"retry-after": str(RETRY_SECONDS)})


def refuse_in_json(handler: Handler) -> Handler:
    """The handler, with refusals and errors of this package as JSON."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except BadRequest as error:
            return JSONResponse({"error": error.reason}, error.status)
        except TunesmithError as error:
            return JSONResponse({"error": str(error)}, 409)

    return answer
