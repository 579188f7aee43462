"""Classifies texts with finished runs: one thread takes what waits for a model together, in batches counted by tokens.

A batch is never delayed to grow: it holds what came in while the one before was computed, in the order of arrival, up to the
tokens that the model computes within the latency budget at the speed it had so far. Its rows are sorted by length.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import Any

from tunesmith.errors import DataError, NumericsError, TunesmithError
from tunesmith.inference.bodies import BadRequest, Texts
from tunesmith.inference.kept_models import KeptModels, load_run_predictor
from tunesmith.labels import Task
from tunesmith.runs.folder import RunDir

log = logging.getLogger(__name__)

MAX_WAITING = 128
LATENCY_SECONDS = 0.25
"""The longest time for one batch: a short text waits for at most one batch before its own."""
MAX_WAIT_SECONDS = 20.0
"""Requests that would wait longer are refused at once."""
BATCH_TOKENS = (256, 8192)
"""Fewest and most tokens of a batch, whatever the speed; a single request may have more."""
READ_CHARS = 65_536
RETRY_SECONDS = 2


class Overloaded(Exception):
    """Too many requests or too much text is waiting; `seconds`: when to try again."""

    def __init__(self, seconds: int = RETRY_SECONDS) -> None:
        super().__init__(seconds)
        self.seconds = seconds


@dataclass(slots=True)
class _Item:
    run: RunDir
    given: Texts
    answer: asyncio.Future[list[dict[str, Any]]]
    loop: asyncio.AbstractEventLoop
    chars: int
    model: Any = None
    rows: Sequence[Any] = field(default_factory=tuple)
    """The encoded rows, and their tokens in all, once they were read."""
    tokens: int = 0


def _reply(items: Sequence[_Item], values: Sequence[list[dict[str, Any]] | Exception]) -> None:
    """Sets the answers of a batch in one call of each event loop, which is woken once."""

    def set_answers(loop: asyncio.AbstractEventLoop) -> None:
        for item, value in zip(items, values, strict=True):
            if item.loop is loop and not item.answer.done():
                if isinstance(value, Exception):
                    item.answer.set_exception(value)
                else:
                    item.answer.set_result(value)

    for loop in {item.loop for item in items}:
        try:
            loop.call_soon_threadsafe(set_answers, loop)
        except RuntimeError:  # the server has gone
            log.debug("no request waits for this answer any more")


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
        self.models = KeptModels(load, reload_aside=reload_aside, on_reload=on_reload)
        self._max_waiting = max_waiting
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._read: deque[_Item] = deque()
        self._chars = 0
        self._char_seconds = self._token_seconds = 0.0
        self._timed: Any = None
        self._thread: threading.Thread | None = None
        self._ending = False

    @property
    def waiting(self) -> int:
        """Requests whose batch has not begun."""
        return self._queue.qsize() + len(self._read)

    async def classify(self, run: RunDir, given: Texts) -> list[dict[str, Any]]:
        """One result a text, in order; Overloaded when too much waits, BadRequest for texts the model cannot read."""
        loop = asyncio.get_running_loop()
        chars = sum(map(len, (*given.texts, *(given.pairs or ()))))
        expected = self._chars * self._char_seconds
        if self.waiting >= self._max_waiting or expected > MAX_WAIT_SECONDS:
            raise Overloaded(max(RETRY_SECONDS, math.ceil(expected)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="tunesmith-classify", daemon=True)
            self._thread.start()
        item = _Item(run, given, loop.create_future(), loop, chars)
        self._chars += chars
        self._queue.put(item)
        try:
            return await item.answer
        finally:
            self._chars -= chars

    def close(self) -> None:
        """Ends the thread after what it has accepted."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout=5)

    def _work(self) -> None:
        while True:
            while not self._ending and sum(item.tokens for item in self._read) < self._budget():
                if not (fresh := self._take()):
                    break
                self._encode(fresh)
            if batch := self._next_batch():
                self._each(batch, self._answer_together)
            elif self._ending:
                return

    def _budget(self) -> float:
        """Tokens that the model computes in LATENCY_SECONDS."""
        least, most = BATCH_TOKENS
        return most if not self._token_seconds else min(max(LATENCY_SECONDS / self._token_seconds, least), most)

    def _take(self) -> list[_Item]:
        """What waits in the queue, up to READ_CHARS characters; waits for the first when there is no other work."""
        fresh: list[_Item] = []
        while sum(item.chars for item in fresh) < READ_CHARS:
            try:
                item = self._queue.get(block=not fresh and not self._read)
            except queue.Empty:
                break
            if item is None:
                self._ending = True
                break
            if not item.answer.done():  # the time of the others is over, or their client is gone
                fresh.append(item)
            elif not fresh:
                break
        return fresh

    def _next_batch(self) -> list[_Item]:
        """The next item, and those behind it that ask the same model, within the budget."""
        batch: list[_Item] = []
        tokens = 0
        while self._read and (not batch or tokens + self._read[0].tokens <= self._budget()):
            if batch and self._read[0].model is not batch[0].model:
                break
            item = self._read.popleft()
            if not item.answer.done():
                batch.append(item)
                tokens += item.tokens
        return batch

    def _encode(self, fresh: list[_Item]) -> None:
        """Tokenizes requests to the same model together and queues those that can be read."""
        for _, same in groupby(fresh, key=lambda item: (str(item.run.path), item.given.pairs is None)):
            self._each(list(same), self._encode_alike)

    def _encode_alike(self, items: list[_Item]) -> None:
        model = self.models.get(items[0].run)
        columns = [[text for item in items for text in item.given.texts]]
        if items[0].given.pairs is not None:
            columns.append([text for item in items for text in item.given.pairs or ()])
        known = model.facts.text_columns
        if known is not None and len(known) != len(columns):
            raise BadRequest(422, f"this model reads {len(known)} text{'s'[: len(known) - 1]}: {' and '.join(known)}")
        rows = model.encode_rows(columns)
        start = 0
        for item in items:
            item.model = model
            item.rows = rows[start : start + len(item.given.texts)]
            item.tokens = sum(len(row.ids) for row in item.rows)
            start += len(item.given.texts)
        self._read.extend(items)

    def _answer_together(self, batch: list[_Item]) -> None:
        start = time.perf_counter()
        model = batch[0].model
        results = _results(model, model.logits_of([row for item in batch for row in item.rows]))
        self._learn(time.perf_counter() - start, batch)
        ends = list(accumulate(len(item.rows) for item in batch))
        _reply(batch, [results[end - len(item.rows) : end] for item, end in zip(batch, ends, strict=True)])

    def _learn(self, seconds: float, batch: list[_Item]) -> None:
        """The speed, as a moving average over some five batches.

        The first batch of a model does not count: what is loaded and arranged for it can take seconds, and thousands of
        requests would be refused until the average forgets it.
        """
        if batch[0].model is not self._timed:
            self._timed = batch[0].model
            return
        tokens, chars = sum(item.tokens for item in batch), sum(item.chars for item in batch)
        share = 0.2 if self._token_seconds else 1.0
        self._token_seconds += share * (seconds / max(tokens, 1) - self._token_seconds)
        self._char_seconds += share * (seconds / max(chars, 1) - self._char_seconds)

    def _each(self, items: list[_Item], work: Callable[[list[_Item]], None]) -> None:
        """`work` on all items together; when it fails, on each alone, so that one bad text fails no other."""
        alone = len(items) == 1
        try:
            work(items)
            return
        except TunesmithError as error:
            of_text = isinstance(error, (DataError, NumericsError))
            problem = BadRequest(422 if of_text else 409, str(error))
            alone = alone or not of_text  # a model that cannot be loaded cannot be loaded for any of them
        except BadRequest as error:
            problem, alone = error, True
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # PanicException of a tokenizer is not an Exception
            log.warning("a text could not be classified: %s", type(error).__name__)
            problem = BadRequest(422, "the model could not read this text")
        for item in items:
            if alone:
                _reply([item], [problem])
            else:
                self._each([item], work)


def _results(model: Any, logits: Any) -> list[dict[str, Any]]:
    """One result a row, with the labels of the model that answered, which may have been replaced since."""
    from tunesmith.inference.tables import predicted_names, probabilities_of

    labels = model.facts.labels
    probabilities = probabilities_of(logits, labels.task)
    chosen = predicted_names(probabilities, labels)
    value = labels.task is Task.REGRESSION
    return [
        {
            "label": label,
            "scores": [] if value else [[name, share] for name, share in zip(labels.names, row, strict=True)],
            "logits": raw,
            "labels": labels,
        }
        for label, row, raw in zip(chosen, probabilities.tolist(), logits.tolist(), strict=True)
    ]
