"""Classifies typed text with finished runs: one thread, a bounded queue, waiting requests of one model taken together."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import TunesmithError
from tunesmith.predict.graph_facts import is_graph_folder
from tunesmith.run.layout import RunDir
from tunesmith.run.remembered import signature
from tunesmith.serve.bodies import BadRequest, Texts

log = logging.getLogger(__name__)

MAX_WAITING = 128
MAX_BATCH_ROWS = 64
MAX_BATCH_CHARS = 32_768
"""About 8,000 tokens: a batch takes a bounded time, so that a short text behind long ones does not wait without end."""
MAX_MODELS = 2
RETRY_SECONDS = 2


class Overloaded(Exception):
    """The queue is full."""


@dataclass(frozen=True, slots=True)
class _Item:
    run: RunDir
    given: Texts
    answer: asyncio.Future[list[dict[str, Any]]]
    loop: asyncio.AbstractEventLoop

    @property
    def chars(self) -> int:
        """Characters of all its texts."""
        return sum(map(len, (*self.given.texts, *(self.given.pairs or ()))))

    def reply(self, value: list[dict[str, Any]] | Exception) -> None:
        def set_answer() -> None:
            if not self.answer.done():
                if isinstance(value, Exception):
                    self.answer.set_exception(value)
                else:
                    self.answer.set_result(value)

        try:
            self.loop.call_soon_threadsafe(set_answer)
        except RuntimeError:  # the server has gone
            log.debug("no request waits for this answer any more")


def load_run_predictor(run: RunDir) -> Any:
    """The run's model on the CPU: a GPU belongs to the training that is being watched."""
    from tunesmith.predict.predictor import Predictor

    for name in ("transformers", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return Predictor.load(run.path, use_cpu=True)


def model_home(run: RunDir) -> Path:
    """The folder with the model: model/ of a run, or an exported folder itself."""
    return run.path if is_graph_folder(run.path) else run.model


def model_marks(run: RunDir) -> tuple[tuple[Any, ...], ...]:
    """What tells the files of model/ from others under the same names; empty when there are none."""
    try:
        return signature(model_home(run))
    except OSError:
        return ()


class Classifier:
    """`classify` from any task. The thread starts with the first request and the model is loaded when it is first asked."""

    def __init__(
        self,
        load: Callable[[RunDir], Any] = load_run_predictor,
        *,
        max_waiting: int = MAX_WAITING,
        reload_aside: bool = False,
        on_reload: Callable[[str | None], None] = lambda problem: None,
    ) -> None:
        """`reload_aside`: a replaced model is loaded by a thread of its own while the old one answers."""
        self._aside = reload_aside
        self._on_reload = on_reload
        self._loading: tuple[Any, ...] | None = None
        self._refused: tuple[Any, ...] | None = None
        self._lock = threading.Lock()
        self._load = load
        self._queue: queue.Queue[_Item | None] = queue.Queue(max_waiting)
        self._kept: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._held: _Item | None = None

    async def classify(self, run: RunDir, given: Texts) -> list[dict[str, Any]]:
        """One result a text, in order; Overloaded when too many wait, BadRequest for texts the model cannot read."""
        loop = asyncio.get_running_loop()
        item = _Item(run, given, loop.create_future(), loop)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tunesmith-classify", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            raise Overloaded from None
        return await item.answer

    def close(self) -> None:
        """Ends the thread after the item it works on."""
        if self._thread is not None:
            try:
                self._queue.put(None, timeout=1)
                self._thread.join(timeout=5)
            except queue.Full:
                log.debug("the queue is full; the thread ends with the process")

    def _work(self) -> None:
        while (batch := self._take()) is not None:
            self._answer([item for item in batch if not item.answer.done()])

    def _take(self) -> list[_Item] | None:
        """The next item, and those behind it that ask the same model in the same way."""
        first = self._held or self._queue.get()
        self._held = None
        if first is None:
            return None
        batch, rows, chars = [first], len(first.given.texts), first.chars
        while rows < MAX_BATCH_ROWS and chars < MAX_BATCH_CHARS:
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            alike = item is not None and item.run.path == first.run.path
            alike = alike and item is not None and (item.given.pairs is None) == (first.given.pairs is None)
            if item is None or not alike or rows + len(item.given.texts) > MAX_BATCH_ROWS:
                if item is None:
                    self._queue.put_nowait(None)
                self._held = item
                break
            batch.append(item)
            rows += len(item.given.texts)
            chars += item.chars
        return batch

    def _answer(self, batch: list[_Item]) -> None:
        if not batch:
            return
        try:
            model = self._model(batch[0].run)
            texts = [t for item in batch for t in item.given.texts]
            paired = batch[0].given.pairs is not None
            pairs = [p for item in batch for p in item.given.pairs or ()] if paired else None
            results = _classify(model, texts, pairs)
        except TunesmithError as error:
            self._fail(batch, BadRequest(409, str(error)))
        except BadRequest as error:
            self._fail(batch, error)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # PanicException of a tokenizer is no Exception
            if len(batch) > 1:  # one of them is poison: the others shall not suffer
                for item in batch:
                    self._answer([item])
                return
            log.warning("a text could not be classified: %s", type(error).__name__)
            self._fail(batch, BadRequest(422, "the model could not read this text"))
        else:
            for item in batch:
                count = len(item.given.texts)
                item.reply(results[:count])
                results = results[count:]

    @staticmethod
    def _fail(batch: list[_Item], error: Exception) -> None:
        for item in batch:
            item.reply(error)

    def _model(self, run: RunDir) -> Any:
        """The loaded model; loaded again when its folder or a file in it was replaced meanwhile."""
        marks = model_marks(run)
        if not marks:
            raise BadRequest(409, "the run has no finished model")
        key = (str(run.path), *marks)
        with self._lock:
            before = next((model for known, model in self._kept.items() if known[0] == key[0]), None)
            if key not in self._kept and self._aside and before is not None:
                if key not in (self._loading, self._refused):
                    self._loading = key
                    threading.Thread(target=self._load_aside, args=(run, key), daemon=True).start()
                return before
        if key not in self._kept:
            self._keep(key, self._load(run))
        self._kept.move_to_end(key)
        return self._kept[key]

    def _load_aside(self, run: RunDir, key: tuple[Any, ...]) -> None:
        """Loads a replaced model; one that cannot be loaded leaves the old one in place."""
        try:
            model = self._load(run)
        except Exception as error:
            self._refused = key
            self._on_reload(error.line() if isinstance(error, TunesmithError) else type(error).__name__)
        else:
            with self._lock:
                self._keep(key, model)
            self._on_reload(None)
        finally:
            self._loading = None

    def _keep(self, key: tuple[Any, ...], model: Any) -> None:
        for old in [k for k in self._kept if k[0] == key[0]]:
            del self._kept[old]
        while len(self._kept) >= MAX_MODELS:
            self._kept.popitem(last=False)
        self._kept[key] = model

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.qsize()

    def preload(self, run: RunDir) -> None:
        """Loads the model before the first request."""
        self._model(run)


def _classify(model: Any, texts: list[str], pairs: list[str] | None) -> list[dict[str, Any]]:
    from tunesmith.labels import Task
    from tunesmith.predict.predictor import predicted_names, probabilities_of

    facts = model.facts
    wanted = len(facts.text_columns) if facts.text_columns is not None else (1 if pairs is None else 2)
    if wanted != (1 if pairs is None else 2):
        names = " and ".join(facts.text_columns)
        raise BadRequest(422, f"this model reads {wanted} text{'s' if wanted > 1 else ''}: {names}")
    logits = model.logits(texts, pairs)
    probabilities = probabilities_of(logits, facts.labels.task)
    labels = predicted_names(probabilities, facts.labels)
    value = facts.labels.task is Task.REGRESSION
    return [
        {
            "label": label,
            "scores": [] if value else [[name, float(p)] for name, p in zip(facts.labels.names, row, strict=True)],
            "logits": [float(x) for x in raw],
        }
        for label, row, raw in zip(labels, probabilities, logits, strict=True)
    ]
