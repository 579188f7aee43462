"""`tunesmith serve`: one finished model over HTTP, with health checks and metrics."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunesmith import __version__
from tunesmith.errors import ConfigError, TunesmithError
from tunesmith.files import read_json
from tunesmith.inference.batcher import (
    MAX_TEXT_CHARS,
    MAX_TEXTS,
    Batcher,
    LoadedModels,
    model_home,
    parse_texts,
)
from tunesmith.inference.model_folder import FACTS_FILE, read_facts
from tunesmith.inference.server import MAX_BODY_BYTES, read_json_body
from tunesmith.models.files import check_seal, read_config_file
from tunesmith.runs.folder import RunDir

log = logging.getLogger("tunesmith.requests")

ANSWER_SECONDS = 30.0
"""Maximum time a request waits for its predictions."""
DRAIN_SECONDS = int(ANSWER_SECONDS) + 5
"""Maximum time from SIGTERM to the end: accepted requests are answered or time out."""
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """Prometheus metrics. With several workers, they are summed over the files in PROMETHEUS_MULTIPROC_DIR."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        own = CollectorRegistry()
        self._registry = own
        self.requests = Counter(
            "tunesmith_requests", "Requests by route and status.", ["route", "status"], registry=own
        )
        self.seconds = Histogram(
            "tunesmith_predict_seconds", "Time to answer POST /predict.", buckets=LATENCY_BUCKETS, registry=own
        )
        self.rows = Counter("tunesmith_rows", "Classified texts.", registry=own)
        self.reloads = Counter("tunesmith_reloads", "Times the model was replaced.", registry=own)
        self.waiting = Gauge(
            "tunesmith_waiting_requests", "Requests in the queue.", registry=own, multiprocess_mode="livesum"
        )

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = self._registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return generate_latest(registry)


class PredictionService:
    """The handlers of `tunesmith serve`."""

    token_hint = "send the key of the service: Authorization: Bearer KEY"

    def __init__(self, run: RunDir, batcher: Batcher | None = None) -> None:
        self.run = run
        self.metrics = Metrics()
        self.ready = False
        models = LoadedModels(reload_in_background=True, on_reload=self._reloaded)
        self.batcher = batcher or Batcher(models)
        if model_summary(run) is None:
            fix = "Pass a finished run with its model/ folder, or an exported folder."
            raise ConfigError("contains no finished model", where=str(run.path), fix=fix)
        home = model_home(run)
        check_seal(home)
        self._labels = read_facts(home, read_config_file(home)).labels

    def routes(self) -> list[Route]:
        """Return all routes of the service."""
        reading = {
            "/health": self._health,
            "/ready": self._ready,
            "/info": self._info,
            "/metrics": self._metrics,
        }
        return [
            *(Route(path, handler) for path, handler in reading.items()),
            Route("/predict", self._predict, methods=["POST"]),
        ]

    def start(self) -> None:
        """Load the model in the background; /ready returns 503 until then."""

        def load() -> None:
            try:
                self.load()
            except (TunesmithError, HTTPException) as error:
                log.error(json.dumps({"event": "load", "problem": str(error)}))

        threading.Thread(target=load, name="tunesmith-load", daemon=True).start()

    def close(self) -> None:
        """Do nothing: there are no streams."""

    def stop(self) -> None:
        """End the thread of the model."""
        self.batcher.close()

    def load(self) -> None:
        """Load the model."""
        self.batcher.models.get(self.run)
        self.ready = True

    def _reloaded(self, problem: str | None) -> None:
        if problem is None:
            self.metrics.reloads.inc()
            home = model_home(self.run)
            self._labels = read_facts(home, read_config_file(home)).labels
        log.info(json.dumps({"event": "reload", "problem": problem}))

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"run": self.run.name, **(model_summary(self.run) or {})})

    async def _ready(self, request: Request) -> Response:
        return JSONResponse({"ready": self.ready}, 200 if self.ready else 503)

    async def _info(self, request: Request) -> Response:
        limits = {
            "max_client_batch_size": MAX_TEXTS,
            "max_text_chars": MAX_TEXT_CHARS,
            "max_body_bytes": MAX_BODY_BYTES,
        }
        about = {"model_id": self.run.name, "task": self._labels.task.value, **(model_summary(self.run) or {})}
        ids = {str(i): name for i, name in self._labels.id2label.items()}
        return JSONResponse({**about, **limits, "version": __version__, "id2label": ids})

    async def _metrics(self, request: Request) -> Response:
        self.metrics.waiting.set(self.batcher.waiting)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _predict(self, request: Request) -> Response:
        start, status, rows = time.perf_counter(), 500, 0
        try:
            given = parse_texts(await read_json_body(request))
            rows = len(given.texts)
            response = await self.batcher.respond(self.run, given, ANSWER_SECONDS)
            status, self.ready = 200, True
            return response
        except HTTPException as error:
            status = error.status_code
            raise
        finally:
            self._count(status, rows, time.perf_counter() - start)

    def _count(self, status: int, rows: int, seconds: float) -> None:
        """Count and log status and time, but never a text."""
        self.metrics.requests.labels("/predict", str(status)).inc()
        if status == 200:
            self.metrics.seconds.observe(seconds)
            self.metrics.rows.inc(rows)
        line = {"event": "request", "route": "/predict", "status": status, "rows": rows, "ms": round(1000 * seconds, 1)}
        log.info(json.dumps(line))


def model_summary(run: RunDir) -> dict[str, Any] | None:
    """Return text columns and labels of the finished model without loading it, or None if there is no model."""
    try:
        data = read_json(model_home(run) / FACTS_FILE)
        columns = data["text_columns"] or ["text"]
        return {"columns": [str(c) for c in columns][:2], "labels": [str(n) for n in data["labels"]["names"]]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
