"""Dynamic batching for the prediction service and the board: one thread, which also owns the loaded models.

Batching is continuous: each batch takes the requests that arrived while the previous one was running, in order of arrival, up to
the number of tokens that the model computes within LATENCY_SECONDS. A request is never delayed to fill a batch.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from tunesmith.errors import DataError, NumericsError, TunesmithError
from tunesmith.inference.model_folder import is_graph_folder
from tunesmith.inference.server import RETRY_SECONDS, BadRequest
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
BATCH_TOKENS = (256, 8192)
"""Minimum and maximum tokens of a batch, whatever the speed; a single request may have more."""
READ_CHARS = 65_536


class Overloaded(Exception):
    """Too many requests or too much text is waiting. `seconds`: when to try again."""

    def __init__(self, seconds: int = RETRY_SECONDS) -> None:
        super().__init__(seconds)
        self.seconds = seconds


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
        raise BadRequest(422, form)
    texts = _strings(data["texts"], "texts")
    pairs = None if data.get("pairs") is None else _strings(data["pairs"], "pairs")
    if pairs is not None and len(pairs) != len(texts):
        raise BadRequest(422, f"{len(texts)} texts but {len(pairs)} pairs")
    top_k = data.get("top_k")
    if isinstance(top_k, float) and top_k.is_integer():  # JSON does not distinguish 3.0 from 3
        top_k = int(top_k)
    if top_k is not None and (not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1):
        raise BadRequest(422, '"top_k" must be a positive integer')
    return Texts(texts, pairs, top_k)


def _strings(values: Any, name: str) -> tuple[str, ...]:
    if not isinstance(values, list) or not values or not all(isinstance(v, str) for v in values):
        raise BadRequest(422, f"{name} must be a list of at least one string")
    if len(values) > MAX_TEXTS:
        raise BadRequest(
            422, f"{len(values):,} {name}, at most {MAX_TEXTS} are allowed (`tunesmith predict` reads files)"
        )
    longest = max(map(len, values))
    if longest > MAX_TEXT_CHARS:
        raise BadRequest(413, f"a text has {longest:,} characters, at most {MAX_TEXT_CHARS:,} are allowed")
    if any("\ud800" <= c <= "\udfff" for v in values for c in v):
        raise BadRequest(422, f"{name} contain a lone surrogate, which is not a character")
    empty = next((i for i, value in enumerate(values) if not value.strip()), None)
    if empty is not None:
        raise BadRequest(422, f"{name}[{empty}] is empty")
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
        self._loading: tuple[Any, ...] | None = None
        self._refused: tuple[Any, ...] | None = None
        self._lock = threading.Lock()
        self._first = threading.Lock()
        self._loaded: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    def get(self, run: RunDir) -> Any:
        """Return the loaded model of a run; raise a BadRequest if there is none."""
        version = model_version(run)
        key = (str(run.path), *version)
        with self._lock:
            before = next((model for known, model in self._loaded.items() if known[0] == key[0]), None)
            if key not in self._loaded and self._in_background and before is not None:
                # No version: the folder is missing, perhaps between the two renames of its replacement.
                if version and key not in (self._loading, self._refused):
                    self._loading = key
                    threading.Thread(target=self._reload, args=(run, key), daemon=True).start()
                return before
        if not version:
            raise BadRequest(409, "the run has no finished model")
        with self._first:  # concurrent requests wait for one load
            if key not in self._loaded:
                self._add(key, self._load(run))
            self._loaded.move_to_end(key)
            return self._loaded[key]

    def _reload(self, run: RunDir, key: tuple[Any, ...]) -> None:
        try:
            model = self._load(run)
        except Exception as error:
            self._refused = key
            self._on_reload(error.line() if isinstance(error, TunesmithError) else type(error).__name__)
        else:
            with self._lock:
                self._add(key, model)
            self._on_reload(None)
        finally:
            self._loading = None

    def _add(self, key: tuple[Any, ...], model: Any) -> None:
        for old in [k for k in self._loaded if k[0] == key[0]]:
            del self._loaded[old]
        while len(self._loaded) >= MAX_MODELS:
            self._loaded.popitem(last=False)
        self._loaded[key] = model


# Batches


@dataclass(slots=True)
class _Request:
    run: RunDir
    given: Texts
    answer: asyncio.Future[list[Prediction]]
    loop: asyncio.AbstractEventLoop
    chars: int
    model: Any = None
    rows: Sequence[Any] = ()
    """The tokenized texts, and their number of tokens."""
    tokens: int = 0


class Batcher:
    """Classifies texts from any number of asyncio tasks. Models are loaded with their first request."""

    def __init__(self, models: LoadedModels | None = None, *, max_waiting: int = MAX_WAITING) -> None:
        self.models = models or LoadedModels()
        self._max_waiting = max_waiting
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._tokenized: deque[_Request] = deque()
        self._chars = 0
        self._char_seconds = self._token_seconds = 0.0
        self._timed: Any = None
        self._thread: threading.Thread | None = None
        self._ending = False

    @property
    def waiting(self) -> int:
        """Number of requests whose batch has not started."""
        return self._queue.qsize() + len(self._tokenized)

    async def classify(self, run: RunDir, given: Texts) -> list[Prediction]:
        """Return one prediction per text; raise Overloaded, or BadRequest for texts that the model cannot process."""
        loop = asyncio.get_running_loop()
        chars = sum(map(len, (*given.texts, *(given.pairs or ()))))
        expected = self._chars * self._char_seconds
        if self.waiting >= self._max_waiting or expected > MAX_WAIT_SECONDS:
            raise Overloaded(max(RETRY_SECONDS, math.ceil(expected)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tunesmith-batcher", daemon=True)
            self._thread.start()
        request = _Request(run, given, loop.create_future(), loop, chars)
        self._chars += chars
        self._queue.put(request)
        try:
            return await request.answer
        finally:
            self._chars -= chars

    def close(self) -> None:
        """End the thread after all accepted requests."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=5)

    def _work(self) -> None:
        while True:
            while not self._ending and sum(request.tokens for request in self._tokenized) < self._budget():
                if not (fresh := self._take()):
                    break
                for _, same in groupby(fresh, key=lambda r: (str(r.run.path), r.given.pairs is None)):
                    self._try(list(same), self._tokenize)
            if batch := self._next_batch():
                self._try(batch, self._predict)
            elif self._ending:
                return

    def _budget(self) -> float:
        """Return the number of tokens that the model computes in LATENCY_SECONDS."""
        least, most = BATCH_TOKENS
        return most if not self._token_seconds else min(max(LATENCY_SECONDS / self._token_seconds, least), most)

    def _take(self) -> list[_Request]:
        """Take waiting requests, up to READ_CHARS characters; wait for the first one if there is nothing else to do."""
        fresh: list[_Request] = []
        while sum(request.chars for request in fresh) < READ_CHARS:
            try:
                request = self._queue.get(block=not fresh and not self._tokenized)
            except queue.Empty:
                break
            if request is None:
                self._ending = True
                break
            if not request.answer.done():  # otherwise it timed out, or its client is gone
                fresh.append(request)
            elif not fresh:
                break
        return fresh

    def _next_batch(self) -> list[_Request]:
        """Return the next request and those after it for the same model, within the budget."""
        batch: list[_Request] = []
        tokens = 0
        while self._tokenized and (not batch or tokens + self._tokenized[0].tokens <= self._budget()):
            if batch and self._tokenized[0].model is not batch[0].model:
                break
            request = self._tokenized.popleft()
            if not request.answer.done():
                batch.append(request)
                tokens += request.tokens
        return batch

    def _tokenize(self, requests: list[_Request]) -> None:
        """Tokenize requests for the same model together."""
        model = self.models.get(requests[0].run)
        columns = [[text for request in requests for text in request.given.texts]]
        if requests[0].given.pairs is not None:
            columns.append([text for request in requests for text in request.given.pairs or ()])
        known = model.facts.text_columns
        if known is not None and len(known) != len(columns):
            plural = "s" if len(known) > 1 else ""
            raise BadRequest(422, f"this model expects {len(known)} text{plural}: {' and '.join(known)}")
        rows = model.encode_rows(columns)
        start = 0
        for request in requests:
            request.model = model
            request.rows = rows[start : start + len(request.given.texts)]
            request.tokens = sum(len(row.ids) for row in request.rows)
            start += len(request.given.texts)
        self._tokenized.extend(requests)

    def _predict(self, batch: list[_Request]) -> None:
        start = time.perf_counter()
        model = batch[0].model
        found = _predictions(model, model.logits_of([row for request in batch for row in request.rows]))
        self._update_speed(time.perf_counter() - start, batch)
        ends = list(accumulate(len(request.rows) for request in batch))
        _reply(batch, [found[end - len(request.rows) : end] for request, end in zip(batch, ends, strict=True)])

    def _update_speed(self, seconds: float, batch: list[_Request]) -> None:
        """Update the moving average over about five batches.

        The first batch of a model is ignored: its initialization can take seconds, so requests would be refused for a while.
        """
        if batch[0].model is not self._timed:
            self._timed = batch[0].model
            return
        tokens, chars = sum(request.tokens for request in batch), sum(request.chars for request in batch)
        share = 0.2 if self._token_seconds else 1.0
        self._token_seconds += share * (seconds / max(tokens, 1) - self._token_seconds)
        self._char_seconds += share * (seconds / max(chars, 1) - self._char_seconds)

    def _try(self, requests: list[_Request], work: Callable[[list[_Request]], None]) -> None:
        """Run `work` on all requests; if it fails, on each one separately, so that one bad text fails no other request."""
        alone = len(requests) == 1
        try:
            work(requests)
            return
        except TunesmithError as error:
            caused_by_text = isinstance(error, (DataError, NumericsError))
            problem = BadRequest(422 if caused_by_text else 409, str(error))
            alone = alone or not caused_by_text  # a model that cannot be loaded fails all of them
        except BadRequest as error:
            problem, alone = error, True
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the PanicException of a tokenizer is not an Exception
            log.warning("a text could not be classified: %s", type(error).__name__)
            problem = BadRequest(422, "the model cannot process this text")
        for request in requests:
            if alone:
                _reply([request], [problem])
            else:
                self._try([request], work)


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
