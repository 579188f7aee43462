"""One finished model as a service: texts in, labels and scores out, with what an operator needs around it."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from tunesmith import __version__
from tunesmith.errors import CheckpointError, ConfigError, TunesmithError
from tunesmith.inference.batcher import RETRY_SECONDS, Classifier, Overloaded
from tunesmith.inference.board import refuse_in_json
from tunesmith.inference.bodies import (
    MAX_BODY_BYTES,
    MAX_TEXT_CHARS,
    MAX_TEXTS,
    BadRequest,
    answer_in_form,
    describe_service,
    docs_page,
    parse_question,
    read_json_body,
)
from tunesmith.inference.kept_models import model_home, model_marks
from tunesmith.inference.model_folder import FACTS_FILE, read_facts
from tunesmith.inference.pages import model_facts
from tunesmith.inference.supervisor import ServiceCounters
from tunesmith.models.files import check_seal, read_config_file
from tunesmith.runs.folder import RunDir

log = logging.getLogger("tunesmith.requests")

ANSWER_SECONDS = 30.0
"""How long a request may wait for its answer."""
DRAIN_SECONDS = int(ANSWER_SECONDS) + 5
"""The longest time from SIGTERM to the end: accepted requests are answered or time out."""


class PredictionService:
    """The handlers of `tunesmith serve`."""

    how = "send the key of the service: Authorization: Bearer KEY"

    def __init__(
        self, run: RunDir, classifier: Classifier | None = None, counters: ServiceCounters | None = None
    ) -> None:
        self.run = run
        self.counters = counters or ServiceCounters()
        self.classifier = classifier or Classifier(reload_aside=True, on_reload=self._reloaded)
        home = model_home(run)
        if model_facts(run) is None:
            raise ConfigError(
                "holds no finished model", where=str(run.path), fix="Give a run that has ended, with its model/ folder."
            )
        check_seal(home)
        self._labels = read_facts(home, read_config_file(home)).labels
        self._marks = model_marks(run)
        self._problem: str | None = None

    def routes(self) -> list[Route]:
        """Every route of the service."""
        handlers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/health": self._health,
            "/ready": self._answer_ready,
            "/info": self._info,
            "/metrics": self._metrics,
            "/openapi.json": self._openapi,
            "/docs": self._docs,
        }
        routes = [Route(path, self._counted(path, handler), methods=["GET"]) for path, handler in handlers.items()]
        return [*routes, Route("/predict", self._counted("/predict", self._predict), methods=["POST"])]

    async def close(self) -> None:
        """Nothing to end: the service has no streams."""

    def stop(self) -> None:
        """Ends the model's thread."""
        self.classifier.close()

    def load(self) -> None:
        """Loads the model before the first request; /ready answers 503 until then."""
        self.classifier.models.get(self.run)
        self.counters.note(ready=True)

    def _reloaded(self, problem: str | None) -> None:
        if problem is None:
            self.counters.count_reload()
            home = model_home(self.run)
            self._labels = read_facts(home, read_config_file(home)).labels
        log.info(json.dumps({"event": "reload", "problem": problem}))

    def _counted(
        self, path: str, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[..., Awaitable[Response]]:
        """The handler, counted and logged by route, status and time; never with a text."""
        inner = refuse_in_json(handler)

        async def answer(request: Request) -> Response:
            start = time.perf_counter()
            response = await inner(request)
            seconds = time.perf_counter() - start
            rows = int(getattr(request.state, "rows", 0))
            self.counters.count_request(path, response.status_code, seconds, rows)
            self.counters.note(waiting=self.classifier.waiting)
            if path == "/predict" and log.isEnabledFor(logging.INFO):
                line = {"event": "request", "route": path, "status": response.status_code, "rows": rows}
                log.info(json.dumps({**line, "ms": round(1000 * seconds, 1)}))
            return response

        return answer

    async def _health(self, request: Request) -> Response:
        problem = await asyncio.to_thread(self._find_problem)
        if problem is not None:
            return JSONResponse({"run": self.run.name, "error": problem}, 503)
        return JSONResponse({"run": self.run.name, **(model_facts(self.run) or {})})

    async def _answer_ready(self, request: Request) -> Response:
        ready = self.counters.ready
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def _info(self, request: Request) -> Response:
        facts = model_facts(self.run) or {}
        limits = {
            "max_client_batch_size": MAX_TEXTS,
            "max_text_chars": MAX_TEXT_CHARS,
            "max_body_bytes": MAX_BODY_BYTES,
        }
        about = {"model_id": self.run.name, "task": self._labels.task.value, **facts, **limits, "version": __version__}
        ids = {str(i): name for i, name in self._labels.id2label.items()}
        return JSONResponse({**about, "model_type": {"classifier": {"id2label": ids}}})

    async def _metrics(self, request: Request) -> Response:
        return PlainTextResponse(self.counters.text(), media_type="text/plain; version=0.0.4")

    async def _openapi(self, request: Request) -> Response:
        return JSONResponse(self._document())

    async def _docs(self, request: Request) -> Response:
        return HTMLResponse(docs_page(self._document()))

    def _document(self) -> dict[str, object]:
        facts = model_facts(self.run) or {"columns": ["text"], "labels": list(self._labels.names)}
        return describe_service(facts["columns"], facts["labels"])

    def _find_problem(self) -> str | None:
        """Why the model on disk cannot be used; only files that changed since the last call are hashed."""
        marks = model_marks(self.run)
        if marks != self._marks:
            self._marks, self._problem = marks, None
            if not marks:
                self._problem = "model/ is gone"
            elif model_facts(self.run) is None:
                self._problem = f"model/{FACTS_FILE} cannot be read"
            else:
                try:
                    check_seal(model_home(self.run))
                except (CheckpointError, OSError) as error:
                    self._problem = error.line() if isinstance(error, CheckpointError) else str(error.strerror)
        return self._problem

    async def _predict(self, request: Request) -> Response:
        question = parse_question(await read_json_body(request))
        request.state.rows = len(question.given.texts)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                results = await self.classifier.classify(self.run, question.given)
        except Overloaded as error:
            return _later(429, "too many requests are waiting", error.seconds)
        except TimeoutError:
            return _later(503, f"no answer within {ANSWER_SECONDS:.0f} seconds", RETRY_SECONDS)
        self.counters.note(ready=True)
        return JSONResponse(answer_in_form(question, results))


def _later(status: int, reason: str, seconds: int) -> Response:
    return JSONResponse({"error": reason}, status, headers={"retry-after": str(seconds)})


def load_in_background(service: PredictionService) -> None:
    """Starts the loading of the model; a model that cannot be loaded is in the log, and /ready stays 503."""

    def load() -> None:
        try:
            service.load()
        except (TunesmithError, BadRequest) as error:
            log.error(json.dumps({"event": "load", "problem": str(error)}))

    threading.Thread(target=load, name="tunesmith-load", daemon=True).start()
