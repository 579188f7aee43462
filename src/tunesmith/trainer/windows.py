"""Where training batches come from: our DataLoader with a pure order, a DataLoader of the user, or a stream; and the workers that
read them. An error about a worker names it and its rows; no process is left behind."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
import torch

from tunesmith.data.batches import Batch, Collate, Window, make_batch, pin_batch
from tunesmith.data.tokens import TokenRows, prefetched
from tunesmith.errors import WorkerError
from tunesmith.trainer.data import EpochBatches, EpochClock
from tunesmith.trainer.run_identity import UsedRows, can_mark, marked_iterator
from tunesmith.training.state import step_seed

Indices = npt.NDArray[np.int64]


@dataclass
class TrainWindows:
    """The engine's source of windows over a DataLoader. After `end_epoch` the running epoch yields nothing more."""

    loader: Any
    accumulation: int
    seed: int
    clock: EpochClock
    rows: TokenRows | None = None
    collate: Collate | None = None
    ignore_skip: bool = False
    pinned: bool = False
    """Token rows: batches are made ahead by a thread, in pinned memory."""
    used: UsedRows | None = None
    check: Callable[[Any, Indices], None] | None = None
    """Called with the features of a batch and its row numbers before it is used."""
    _ended: bool = False

    def end_epoch(self) -> None:
        """The epoch under way stops here; the next one starts at its beginning."""
        self._ended = True

    def windows(self, epoch: int, skip: int = 0) -> Iterator[Window]:
        """The windows of an epoch from number `skip` on."""
        self._ended = False
        skip = 0 if self.ignore_skip else skip
        sampler = getattr(self.loader, "batch_sampler", None)
        known = self._known(sampler, epoch, skip) if isinstance(sampler, EpochBatches) else None
        for window in self._consumed(epoch, skip) if known is None else known:
            yield window
            if self._ended:
                return

    def _known(self, sampler: EpochBatches, epoch: int, skip: int) -> Iterator[Window]:
        """Windows of a loader of ours, whose order is pure."""
        sampler.set_epoch(epoch, skip)
        if self.rows is not None and self.collate is not None:
            wanted = sampler.windows()
            yield from prefetched(wanted, self._collated) if self.pinned else map(self._collated, wanted)
            return
        specification = list(sampler.windows())
        sampler.set_epoch(epoch, skip)
        found = self._read([piece for pieces, _, _ in specification for piece in pieces])

        def batch(piece: Indices) -> Batch:
            features, marks = next(found)
            if self.used is not None:
                self.used.note(piece, marks)
            return self._as_batch(features, piece)

        for pieces, rows, idle in specification:
            yield Window(tuple(batch(piece) for piece in pieces), rows, None, idle)

    def _read(self, rows: list[Indices] | None = None) -> Iterator[tuple[Any, bytes]]:
        """(features, marks of the rows) of each batch; no marks where the loader cannot give them."""
        if self.used is not None and self.used.wants_marks and can_mark(self.loader):
            yield from read_batches(self.loader, rows, marked_iterator)
            return
        for features in read_batches(self.loader, rows):
            yield features, b""

    def _as_batch(self, features: Any, rows: Indices) -> Batch:
        if self.check is not None:
            self.check(features, rows)
        return as_batch(features, rows)

    def _collated(self, wanted: tuple[list[Indices], Indices, bool]) -> Window:
        pieces, rows, idle = wanted
        assert self.rows is not None
        assert self.collate is not None
        batches = [make_batch(self.rows, piece, self.collate) for piece in pieces]
        return Window(tuple(pin_batch(b) for b in batches) if self.pinned else tuple(batches), rows, None, idle)

    def _consumed(self, epoch: int, skip: int) -> Iterator[Window]:
        """A loader of the user's: its shuffling is seeded from (seed, epoch), what is skipped is read and dropped."""
        torch.manual_seed(step_seed(self.seed, epoch, 2**31))
        self.clock.epoch = epoch
        parts = (self.loader, *(getattr(self.loader, n, None) for n in ("sampler", "batch_sampler", "dataset")))
        for part in parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        start, pending = 0, []
        for number, (features, marks) in enumerate(self._read()):
            if self.used is not None and marks:
                self.used.note_batch(epoch, number, marks)
            if number < skip * self.accumulation:
                start += count_rows(features)
                continue
            pending.append(self._as_batch(features, np.arange(start, start + count_rows(features))))
            start += len(pending[-1])
            if len(pending) == self.accumulation:
                yield _window(pending)
                pending = []
        if self.used is not None:
            self.used.end_epoch(epoch)
        if pending:
            yield _window(pending)


def _window(batches: list[Batch]) -> Window:
    return Window(tuple(batches), np.concatenate([b.rows for b in batches]), None)


def as_batch(features: Any, rows: Indices) -> Batch:
    """A collated batch for the engine. The features stay as they are: `compute_loss` gets what the collator made."""
    tokens, padded = count_tokens(features)
    return Batch({}, None, rows, tokens, padded, split_features, features)


def features_of(batch: Batch) -> Any:
    """What `compute_loss` gets for a micro-batch."""
    if batch.features is not None:
        return batch.features
    return batch.inputs if batch.labels is None else {**batch.inputs, "labels": batch.labels}


def split_features(batch: Batch, limit: int) -> list[Batch]:
    """Pieces of at most `limit` rows, for a batch that did not fit into memory."""
    pieces = []
    for start in range(0, len(batch), limit):
        at = slice(start, start + limit)
        features = {
            k: v[at] if isinstance(v, torch.Tensor) and v.ndim and len(v) == len(batch) else v
            for k, v in batch.features.items()
        }
        pieces.append(as_batch(features, batch.rows[at]))
    return pieces


def count_rows(features: Any) -> int:
    """Rows of a collated batch: the length of the first tensor in it."""
    values = features.values() if isinstance(features, Mapping) else features
    if isinstance(features, torch.Tensor):
        return len(features)
    for value in values if isinstance(values, (list, tuple)) or isinstance(features, Mapping) else ():
        if isinstance(value, torch.Tensor) and value.ndim:
            return len(value)
        if isinstance(value, (list, tuple, Mapping)) and (found := count_rows(value)):
            return found
    return 1


def count_tokens(features: Any) -> tuple[int, int]:
    """(real tokens, tokens with padding) of a batch; both 0 where there is no `input_ids`."""
    ids = features.get("input_ids") if isinstance(features, Mapping) else None
    if not isinstance(ids, torch.Tensor):
        return 0, 0
    mask = features.get("attention_mask")
    padded = int(ids.numel())
    return (int(mask.sum()) if isinstance(mask, torch.Tensor) and mask.device.type == "cpu" else padded), padded


SECONDS = 600.0
"""How long a worker may take for one batch. torch itself would wait forever."""
_FAILED = re.compile(r"Caught \w+ in DataLoader worker process (\d+)\.")
_LATE = re.compile(r"DataLoader timed out after ([0-9.]+) seconds")
_FIX = "See its own output above. Set dataloader_num_workers=0 to read the rows in this process."


@dataclass(eq=False)
class _Reader:
    """A DataLoader with workers that is being read. Worker w reads the batches w, w + workers, ..."""

    iterator: Any
    workers: int
    ahead: int
    rows: Sequence[Any] | None
    number: int = 0

    def explain(self, error: Exception) -> WorkerError | None:
        """The error in one line; None when it is not about a worker of this loader."""
        text = str(error)
        processes: Sequence[Any] = getattr(self.iterator, "_workers", ())  # torch has no public name for them
        if failed := _FAILED.search(text):
            return self._error(f"{failed[1]} failed", [self.number], f": {text.rstrip().rsplit(chr(10), 1)[-1]}")
        if late := _LATE.search(text):
            worker = self.number % self.workers
            what = f"{worker} (process {processes[worker].pid}) gave nothing for {float(late[1]):g} s"
            return self._error(what, [self.number])
        dead = None
        if "DataLoader worker" in text or isinstance(
            error, (ConnectionError, EOFError)
        ):  # it died while it sent a batch
            dead = _first_dead(processes)
        if dead is None:
            return None
        code = processes[dead].exitcode
        how = f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        # it may have read ahead; what it had ready is lost with it
        given = range(self.number, self.number + self.workers * self.ahead)
        lost = [k for k in given if k % self.workers == dead]
        return self._error(f"{dead} (process {processes[dead].pid}) {how}", lost)

    def _error(self, what: str, batches: list[int], why: str = "") -> WorkerError:
        if self.rows is None:
            where = f"batch {' or '.join(str(k) for k in batches)}"
        else:
            shown = [[str(int(r)) for r in self.rows[k]] for k in batches if k < len(self.rows)]
            where = "rows " + " or ".join(", ".join(rows[:8]) + (", ..." if len(rows) > 8 else "") for rows in shown)
        return WorkerError(f"data-loader worker {what}, reading {where}{why}", fix=_FIX)

    def end(self) -> None:
        """Ends the other workers now: the error keeps the iterator alive, and its workers with it."""
        shut_down: Any = getattr(self.iterator, "_shutdown_workers", None)
        for _ in range(2 if shut_down is not None else 0):
            with contextlib.suppress(RuntimeError):  # torch's own notice, once more
                shut_down()


def _first_dead(processes: Sequence[Any]) -> int | None:
    """The number of the first process that has ended, for which it waits a moment."""
    until = time.monotonic() + 2.0
    while time.monotonic() < until:
        with contextlib.suppress(RuntimeError):  # torch's own notice of it
            for number, process in enumerate(processes):
                if not process.is_alive():
                    return number
            time.sleep(0.02)
    return None


_READERS: WeakSet[_Reader] = WeakSet()


def read_batches(
    loader: Any, rows: Sequence[Any] | None = None, start: Callable[[Any], Iterator[Any]] = iter
) -> Iterator[Any]:
    """The batches of a DataLoader. `rows[k]` are the row numbers of batch k, where they are known, for the error."""
    workers = int(getattr(loader, "num_workers", 0) or 0)
    iterator = start(loader)
    if workers == 0:
        yield from iterator
        return
    sampler: Any = getattr(loader, "batch_sampler", None)
    known = list(sampler) if rows is None and hasattr(sampler, "rows") else rows
    reader = _Reader(iterator, workers, int(getattr(loader, "prefetch_factor", None) or 2), known)
    _READERS.add(reader)
    with naming_workers(reader):
        for features in iterator:
            yield features
            reader.number += 1
    _READERS.discard(reader)


@contextlib.contextmanager
def naming_workers(reader: _Reader | None = None) -> Iterator[None]:
    """Inside, the end of a worker (of any loader, or of this one) becomes a WorkerError.

    It is needed around whole runs: torch raises the error of a dead worker in whatever line is running.
    """
    try:
        yield
    except WorkerError:
        raise
    except Exception as error:
        for candidate in list(_READERS) if reader is None else [reader]:
            lost = candidate.explain(error)
            if lost is not None:
                candidate.end()
                _READERS.discard(candidate)
                raise lost from error
        raise
