"""`tunesmith serve`: one finished model over HTTP, with health checks and metrics.

Batching is continuous: each batch takes the requests that arrived while the previous one was running, in order of arrival, up to
BATCH_CHARS characters. A request is never delayed to fill a batch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tunesmith.errors import DataError, NumericsError, TunesmithError
from tunesmith.files import folder_version
from tunesmith.inference.model_folder import model_folder_of, read_facts
from tunesmith.inference.predictor import given_columns
from tunesmith.inference.server import Service, read_json_body, retry_later
from tunesmith.inference.tables import Prediction, make_predictions, probabilities_of

log = logging.getLogger("tunesmith.requests")

MAX_TEXTS = 64
MAX_TEXT_CHARS = 50_000
MAX_WAITING = 128
"""Requests in the queue; further ones get status 429."""
BATCH_CHARS = 8_000
"""Characters of a batch, so that a short text does not wait long for it; a single request may have more."""
COUNTED_CHARS = 2_000
"""Characters of a text that count, at most: longer texts are truncated by most models."""
ANSWER_SECONDS = 30.0
"""Maximum time a request waits for its predictions."""
DRAIN_SECONDS = int(ANSWER_SECONDS) + 5
"""Maximum time from SIGTERM to the end: accepted requests are answered or time out."""
LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


# Requests


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts to classify, and the number of labels to return. `pairs` is None for a model of single texts."""

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None
    top_k: int | None = None

    @property
    def chars(self) -> int:
        """Number of characters that count for the size of a batch."""
        return sum(min(len(text), COUNTED_CHARS) for text in (*self.texts, *(self.pairs or ())))


def parse_texts(data: Any, columns: Sequence[str] = ()) -> Texts:
    """Check {"texts": [...], "pairs": [...], "top_k": 3} or {"text": "...", "text_pair": "..."}, within the limits.

    A text is an object with the `columns` of the model, if there are three or more.
    """
    if isinstance(data, dict) and "text" in data and "texts" not in data:
        pair = {} if data.get("text_pair") is None else {"pairs": [data["text_pair"]]}
        rest = {name: value for name, value in data.items() if name not in ("text", "text_pair")}
        data = {**rest, "texts": [data["text"]], **pair}
    if not isinstance(data, dict) or not {"texts"} <= data.keys() <= {"texts", "pairs", "top_k"}:
        form = 'send {"texts": ["..."]}, and "pairs": ["..."] for a model of text pairs; "top_k" is optional'
        raise HTTPException(422, form)
    if len(columns) > 2:
        try:
            (data["texts"],) = given_columns(data["texts"], None, columns)
        except DataError as error:
            raise HTTPException(422, str(error)) from None
    texts = _strings(data["texts"], "texts")
    pairs = None if data.get("pairs") is None else _strings(data["pairs"], "pairs")
    if pairs is not None and len(pairs) != len(texts):
        raise HTTPException(422, f"{len(texts)} texts but {len(pairs)} pairs")
    top_k = data.get("top_k")
    if isinstance(top_k, float) and top_k.is_integer():  # JSON does not distinguish 3.0 from 3
        top_k = int(top_k)
    if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
        raise HTTPException(422, '"top_k" must be a positive integer')
    return Texts(texts, pairs, top_k)


def _strings(values: Any, name: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
        raise HTTPException(422, f"{name} must be a list of at least one string")
    if len(values) > MAX_TEXTS:
        problem = f"{len(values):,} {name}, at most {MAX_TEXTS} are allowed (`tunesmith predict` reads files)"
        raise HTTPException(422, problem)
    longest = max(map(len, values))
    if longest > MAX_TEXT_CHARS:
        raise HTTPException(413, f"a text has {longest:,} characters, at most {MAX_TEXT_CHARS:,} are allowed")
    if any("\ud800" <= c <= "\udfff" for v in values for c in v):
        raise HTTPException(422, f"{name} contain a lone surrogate, which is not a character")
    empty = next((i for i, value in enumerate(values) if not value.strip()), None)
    if empty is not None:
        raise HTTPException(422, f"{name}[{empty}] is empty")
    return tuple(values)


# Model


def load_on_cpu(folder: Path, max_error: float | None = None, per_class: bool = False) -> Any:
    """Load a model on the CPU; a GPU is left to training. With `max_error`, it abstains."""
    from tunesmith.inference.predictor import Predictor

    for name in ("transformers", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    model = Predictor.load(folder, use_cpu=True)
    return model if max_error is None else model.abstaining(max_error, per_class=per_class)


class LiveModel:
    """The model of a folder. When its files are replaced, it is loaded again in the background.

    The old model answers until the new one is loaded, and stays if that fails. `on_reload` receives the problem, or None.
    """

    def __init__(
        self,
        folder: Path,
        load: Callable[[Path], Any] = load_on_cpu,
        *,
        on_reload: Callable[[str | None], None] = lambda problem: None,
    ) -> None:
        self.folder, self._load = folder, load
        self._on_reload = on_reload
        self._lock = threading.Lock()
        self._model: Any = None
        self._seen: tuple[Any, ...] = ()

    def get(self) -> Any:
        """Return the loaded model, which the first call loads."""
        try:
            version = folder_version(self.folder)
        except OSError:
            version = ()  # the folder is missing, perhaps between the two renames of its replacement
        with self._lock:  # concurrent requests wait for one load
            if self._model is None:
                self._model, self._seen = self._load(self.folder), version
            elif version not in ((), self._seen):
                self._seen = version
                threading.Thread(target=self._reload, daemon=True).start()
            return self._model

    def _reload(self) -> None:
        try:
            model = self._load(self.folder)
        except Exception as error:
            self._on_reload(error.line() if isinstance(error, TunesmithError) else type(error).__name__)
            return
        with self._lock:
            self._model = model
        self._on_reload(None)


# Batches


@dataclass(frozen=True, slots=True)
class _Waiting:
    given: Texts
    answer: asyncio.Future[list[Prediction]]


class Batcher:
    """Classifies the texts of concurrent requests, one batch at a time in one thread."""

    def __init__(self, model: LiveModel, *, max_waiting: int = MAX_WAITING) -> None:
        self.model = model
        self._max_waiting = max_waiting
        self._queue: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tunesmith-batcher")
        self._worker: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """Number of requests whose batch has not started."""
        return len(self._queue)

    async def respond(self, given: Texts) -> Response:
        """Return the predictions as JSON; raise an HTTPException if there are none within ANSWER_SECONDS."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                found = await self.classify(given)
        except TimeoutError:
            raise retry_later(503, f"no answer within {ANSWER_SECONDS:.0f} seconds") from None
        results = [{"label": one.label, "scores": one.best(given.top_k), "answered": one.answered} for one in found]
        return JSONResponse({"results": [{k: v for k, v in one.items() if v is not None} for one in results]})

    async def classify(self, given: Texts) -> list[Prediction]:
        """Return one prediction per text; raise an HTTPException if the queue is full or the model cannot process a text."""
        if self.waiting >= self._max_waiting:
            raise retry_later(429, "too many requests are waiting")
        request = _Waiting(given, asyncio.get_running_loop().create_future())
        self._queue.append(request)
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await request.answer

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue:
            batch = self._next_batch()
            if batch:
                found = await loop.run_in_executor(self._thread, self._predict, batch)
                for request, value in zip(batch, found, strict=True):
                    if request.answer.done():  # it timed out, or its client is gone
                        continue
                    if isinstance(value, HTTPException):
                        request.answer.set_exception(value)
                    else:
                        request.answer.set_result(value)

    def _next_batch(self) -> list[_Waiting]:
        """Take the next requests, up to BATCH_CHARS, either single texts or pairs."""
        batch: list[_Waiting] = []
        left = BATCH_CHARS
        while self._queue:
            given = self._queue[0].given
            if batch and (given.chars > left or (given.pairs is None) != (batch[0].given.pairs is None)):
                break
            request = self._queue.popleft()
            if not request.answer.done():
                batch.append(request)
                left -= request.given.chars
        return batch

    def _predict(self, batch: list[_Waiting]) -> list[list[Prediction] | HTTPException]:
        """Classify a batch; if that fails, each request separately, so that one bad text fails no other request."""
        try:
            model = self.model.get()
            texts = [text for request in batch for text in request.given.texts]
            pairs = [text for request in batch for text in request.given.pairs or ()] or None
            labels = model.facts.labels
            found = iter(make_predictions(probabilities_of(model.logits(texts, pairs), labels.task), labels))
            return [list(islice(found, len(request.given.texts))) for request in batch]
        except TunesmithError as error:
            if not isinstance(error, (DataError, NumericsError)):  # a model that cannot be loaded fails all of them
                return [HTTPException(409, str(error))] * len(batch)
            problem = HTTPException(422, str(error))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the PanicException of a tokenizer is not an Exception
            log.warning("a text could not be classified: %s", type(error).__name__)
            problem = HTTPException(422, "the model cannot process this text")
        return [problem] if len(batch) == 1 else [found for request in batch for found in self._predict([request])]


# Service


class Metrics:
    """Prometheus metrics. With several workers, they are summed over the files in PROMETHEUS_MULTIPROC_DIR."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        from prometheus_client.multiprocess import MultiProcessCollector

        own = self.registry = CollectorRegistry()
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            self.registry = CollectorRegistry()
            MultiProcessCollector(self.registry)  # type: ignore[no-untyped-call]
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


class PredictionService(Service):
    """The handlers of `tunesmith serve`."""

    token_hint = "send the key of the service: Authorization: Bearer KEY"

    def __init__(
        self,
        path: str | Path,
        batcher: Batcher | None = None,
        *,
        max_error: float | None = None,
        per_class: bool = False,
    ) -> None:
        self.name = Path(path).resolve().name
        self.folder = model_folder_of(path).folder
        self.facts = read_facts(self.folder)
        if max_error is not None:
            # A limit that cannot be kept is reported before the server starts.
            self.facts.abstaining(max_error, per_class=per_class)
        self.metrics = Metrics()
        self.ready = False
        load = partial(load_on_cpu, max_error=max_error, per_class=per_class)
        self.batcher = batcher or Batcher(LiveModel(self.folder, load, on_reload=self._reloaded))

    def routes(self) -> list[Route]:
        """Return all routes of the service."""
        return [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/predict", self._predict, methods=["POST"]),
        ]

    def start(self) -> None:
        """Load the model in the background; /ready returns 503 until then."""

        def load() -> None:
            try:
                self.load()
            except TunesmithError as error:
                log.error(json.dumps({"event": "load", "problem": str(error)}))

        threading.Thread(target=load, name="tunesmith-load", daemon=True).start()

    def load(self) -> None:
        """Load the model."""
        self.batcher.model.get()
        self.ready = True

    def _reloaded(self, problem: str | None) -> None:
        if problem is None:
            self.metrics.reloads.inc()
            self.facts = read_facts(self.folder)
        log.info(json.dumps({"event": "reload", "problem": problem}))

    async def _health(self, request: Request) -> Response:
        columns, labels = self.facts.text_columns or ("text",), self.facts.labels.names
        return JSONResponse({"run": self.name, "columns": columns, "labels": labels})

    async def _ready(self, request: Request) -> Response:
        return JSONResponse({"ready": self.ready}, 200 if self.ready else 503)

    async def _metrics(self, request: Request) -> Response:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        self.metrics.waiting.set(self.batcher.waiting)
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def _predict(self, request: Request) -> Response:
        start, status, rows = time.perf_counter(), 500, 0
        try:
            given = parse_texts(await read_json_body(request), self.facts.text_columns or ())
            rows = len(given.texts)
            response = await self.batcher.respond(given)
            status, self.ready = 200, True
            return response
        except HTTPException as error:
            status = error.status_code
            raise
        finally:
            seconds = time.perf_counter() - start
            self.metrics.requests.labels("/predict", str(status)).inc()
            if status == 200:
                self.metrics.seconds.observe(seconds)
                self.metrics.rows.inc(rows)
            timed = {"status": status, "rows": rows, "ms": round(1000 * seconds, 1)}  # but never a text
            log.info(json.dumps({"event": "request", "route": "/predict", **timed}))
