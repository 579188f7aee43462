"""Dynamic batching for the prediction service and the board: one thread, which also owns the loaded models.

Batching is continuous: each batch takes the requests that arrived while the previous one was running, in order of arrival, up to
the amount of text that the model classifies within LATENCY_SECONDS. A request is never delayed to fill a batch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from tunesmith.errors import DataError, NumericsError, TunesmithError
from tunesmith.inference.model_folder import is_graph_folder
from tunesmith.inference.server import RETRY_SECONDS, retry_later
from tunesmith.inference.tables import predicted_names, probabilities_of
from tunesmith.labels import Task
from tunesmith.runs.folder import RunDir
from tunesmith.runs.writing import folder_version

log = logging.getLogger(__name__)

MAX_TEXTS = 64
MAX_TEXT_CHARS = 50_000
MAX_MODELS = 2
MAX_WAITING = 128
LATENCY_SECONDS = 0.25
"""The target duration of a batch: a short text waits for at most one batch."""
MAX_WAIT_SECONDS = 20.0
"""Requests that would wait longer are refused immediately."""
BATCH_CHARS = (1_000, 32_000)
"""Minimum and maximum characters of a batch, whatever the speed; a single request may have more."""
COUNTED_CHARS = 2_000
"""Characters of a text that count, at most: longer texts are truncated by most models."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts to classify, and the number of labels to return. `pairs` is None for a model of single texts."""

    texts: tuple[str, ...]
    pairs: tuple[str, ...] | None
    top_k: int | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted label of one text, with the probability of each label (empty for regression)."""

    label: Any
    probabilities: dict[str, float]

    def to_json(self, top_k: int | None) -> dict[str, Any]:
        """Return the label and the most probable labels, the best first."""
        best = sorted(self.probabilities.items(), key=lambda pair: -pair[1])[:top_k]
        return {"label": self.label, "scores": [list(pair) for pair in best]}


def parse_texts(data: Any) -> Texts:
    """Check {"texts": [...], "pairs": [...], "top_k": 3} or {"text": "...", "text_pair": "..."}, within the limits."""
    if isinstance(data, dict) and "text" in data and "texts" not in data:
        pair = {} if data.get("text_pair") is None else {"pairs": [data["text_pair"]]}
        rest = {name: value for name, value in data.items() if name not in ("text", "text_pair")}
        data = {**rest, "texts": [data["text"]], **pair}
    if not isinstance(data, dict) or not {"texts"} <= data.keys() <= {"texts", "pairs", "top_k"}:
        form = 'send {"texts": ["..."]}, and "pairs": ["..."] for a model of text pairs; "top_k" is optional'
        raise HTTPException(422, form)
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
        raise HTTPException(
            422, f"{len(values):,} {name}, at most {MAX_TEXTS} are allowed (`tunesmith predict` reads files)"
        )
    longest = max(map(len, values))
    if longest > MAX_TEXT_CHARS:
        raise HTTPException(413, f"a text has {longest:,} characters, at most {MAX_TEXT_CHARS:,} are allowed")
    if any("\ud800" <= c <= "\udfff" for v in values for c in v):
        raise HTTPException(422, f"{name} contain a lone surrogate, which is not a character")
    empty = next((i for i, value in enumerate(values) if not value.strip()), None)
    if empty is not None:
        raise HTTPException(422, f"{name}[{empty}] is empty")
    return tuple(values)


# Loaded models


def load_run_predictor(run: RunDir) -> Any:
    """Load the model of a run on the CPU; a GPU is left to training."""
    from tunesmith.inference.predictor import Predictor

    for name in ("transformers", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return Predictor.load(run.path, use_cpu=True)


def model_home(run: RunDir) -> Path:
    """Return the folder of the model: model/ of a run, or an exported folder itself."""
    return run.path if is_graph_folder(run.path) else run.model


def model_version(run: RunDir) -> tuple[tuple[Any, ...], ...]:
    """Return a value that changes when a file of the model is replaced; empty if there is no model."""
    try:
        return folder_version(model_home(run))
    except OSError:
        return ()


class LoadedModels:
    """At most two loaded models, loaded again when their files are replaced.

    With `reload_in_background`, the old model is used until the new one is loaded, and kept if that fails.
    """

    def __init__(
        self,
        load: Callable[[RunDir], Any] = load_run_predictor,
        *,
        reload_in_background: bool = False,
        on_reload: Callable[[str | None], None] = lambda problem: None,
    ) -> None:
        self._load = load
        self._in_background = reload_in_background
        self._on_reload = on_reload
        self._tried: tuple[Any, ...] = ()
        self._lock = threading.Lock()
        self._loaded: OrderedDict[Path, tuple[tuple[Any, ...], Any]] = OrderedDict()

    def get(self, run: RunDir) -> Any:
        """Return the loaded model of a run; raise a HTTPException if there is none."""
        version = model_version(run)
        with self._lock:  # concurrent requests wait for one load
            known, model = self._loaded.get(run.path, (None, None))
            if known is not None and self._in_background and version != known:
                # No version: the folder is missing, perhaps between the two renames of its replacement.
                if version not in ((), self._tried):
                    self._tried = version
                    threading.Thread(target=self._reload, args=(run, version), daemon=True).start()
                return model
            if not version:
                raise HTTPException(409, "the run has no finished model")
            if version != known:
                model = self._load(run)
            self._keep(run, version, model)
            return model

    def _reload(self, run: RunDir, version: tuple[Any, ...]) -> None:
        try:
            model = self._load(run)
        except Exception as error:
            self._on_reload(error.line() if isinstance(error, TunesmithError) else type(error).__name__)
            return
        with self._lock:
            self._keep(run, version, model)
        self._on_reload(None)

    def _keep(self, run: RunDir, version: tuple[Any, ...], model: Any) -> None:
        self._loaded[run.path] = (version, model)
        self._loaded.move_to_end(run.path)
        if len(self._loaded) > MAX_MODELS:
            self._loaded.popitem(last=False)


# Batches


@dataclass(frozen=True, slots=True)
class _Request:
    run: RunDir
    given: Texts
    answer: asyncio.Future[list[Prediction]]
    loop: asyncio.AbstractEventLoop
    chars: int

    def fits(self, other: _Request) -> bool:
        """Return whether both can be in one batch."""
        return self.run.path == other.run.path and (self.given.pairs is None) == (other.given.pairs is None)


class Batcher:
    """Classifies texts from any number of asyncio tasks. Models are loaded with their first request."""

    def __init__(self, models: LoadedModels | None = None, *, max_waiting: int = MAX_WAITING) -> None:
        self.models = models or LoadedModels()
        self._max_waiting = max_waiting
        self._queue: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._chars = 0
        self._char_seconds = 0.0
        self._timed: Any = None
        self._thread: threading.Thread | None = None
        self._ending = False

    @property
    def waiting(self) -> int:
        """Number of requests whose batch has not started."""
        return len(self._queue)

    async def respond(self, run: RunDir, given: Texts, seconds: float) -> Response:
        """Return the predictions as JSON; raise an HTTPException if there are none within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                found = await self.classify(run, given)
        except TimeoutError:
            raise retry_later(503, f"no answer within {seconds:.0f} seconds") from None
        return JSONResponse({"results": [one.to_json(given.top_k) for one in found]})

    async def classify(self, run: RunDir, given: Texts) -> list[Prediction]:
        """Return one prediction per text; raise an HTTPException if too much is waiting or the model cannot process a text."""
        loop = asyncio.get_running_loop()
        chars = sum(min(len(text), COUNTED_CHARS) for text in (*given.texts, *(given.pairs or ())))
        expected = self._chars * self._char_seconds
        if self.waiting >= self._max_waiting or expected > MAX_WAIT_SECONDS:
            raise retry_later(429, "too many requests are waiting", max(RETRY_SECONDS, math.ceil(expected)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tunesmith-batcher", daemon=True)
            self._thread.start()
        request = _Request(run, given, loop.create_future(), loop, chars)
        self._chars += chars
        with self._changed:
            self._queue.append(request)
            self._changed.notify()
        try:
            return await request.answer
        finally:
            self._chars -= chars

    def close(self) -> None:
        """End the thread after all accepted requests."""
        if self._thread is not None:
            with self._changed:
                self._ending = True
                self._changed.notify()
            self._thread.join(timeout=5)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ending)
                if not self._queue:
                    return
                batch = self._next_batch()
            if batch:
                self._predict(batch)

    def _next_batch(self) -> list[_Request]:
        """Take the next request and those after it for the same model, within LATENCY_SECONDS."""
        least, most = BATCH_CHARS
        budget = min(max(LATENCY_SECONDS / self._char_seconds, least), most) if self._char_seconds else most
        batch: list[_Request] = []
        while self._queue and (not batch or (self._queue[0].chars <= budget and self._queue[0].fits(batch[0]))):
            request = self._queue.popleft()
            if not request.answer.done():  # otherwise it timed out, or its client is gone
                batch.append(request)
                budget -= request.chars
        return batch

    def _predict(self, batch: list[_Request]) -> None:
        """Classify a batch; if that fails, each request separately, so that one bad text fails no other request."""
        alone = len(batch) == 1
        try:
            found = self._classify(batch)
        except TunesmithError as error:
            caused_by_text = isinstance(error, (DataError, NumericsError))
            problem = HTTPException(422 if caused_by_text else 409, str(error))
            alone = alone or not caused_by_text  # a model that cannot be loaded fails all of them
        except HTTPException as error:
            problem, alone = error, True
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the PanicException of a tokenizer is not an Exception
            log.warning("a text could not be classified: %s", type(error).__name__)
            problem = HTTPException(422, "the model cannot process this text")
        else:
            _reply(batch, found)
            return
        for request in batch:
            if alone:
                _reply([request], [problem])
            else:
                self._predict([request])

    def _classify(self, batch: list[_Request]) -> list[list[Prediction]]:
        model = self.models.get(batch[0].run)
        texts = [text for request in batch for text in request.given.texts]
        pairs = [text for request in batch for text in request.given.pairs or ()] or None
        start = time.perf_counter()
        found = iter(_predictions(model, model.logits(texts, pairs)))
        seconds = time.perf_counter() - start
        if model is self._timed:
            share = 0.2 if self._char_seconds else 1.0  # a moving average over about five batches
            self._char_seconds += share * (seconds / sum(request.chars for request in batch) - self._char_seconds)
        self._timed = model  # the first batch is not timed: initialization can take seconds
        return [list(islice(found, len(request.given.texts))) for request in batch]


def _reply(requests: Sequence[_Request], values: Sequence[list[Prediction] | Exception]) -> None:
    """Set the results of a batch with one call per event loop."""

    def set_results(loop: asyncio.AbstractEventLoop) -> None:
        for request, value in zip(requests, values, strict=True):
            if request.loop is loop and not request.answer.done():
                if isinstance(value, Exception):
                    request.answer.set_exception(value)
                else:
                    request.answer.set_result(value)

    for loop in {request.loop for request in requests}:
        try:
            loop.call_soon_threadsafe(set_results, loop)
        except RuntimeError:  # the server is gone
            log.debug("no request waits for this prediction anymore")


def _predictions(model: Any, logits: Any) -> list[Prediction]:
    labels = model.facts.labels
    probabilities = probabilities_of(logits, labels.task)
    names = () if labels.task is Task.REGRESSION else labels.names
    found = zip(predicted_names(probabilities, labels), probabilities.tolist(), strict=True)
    return [Prediction(label, dict(zip(names, row, strict=False))) for label, row in found]
