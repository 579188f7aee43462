"""The processes beside this one: data-loader workers that die, fail or hang, streams that several ranks read, and results of an
evaluation joined over batches and ranks.

An error about a worker names it and its rows; no process is left behind.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset
from transformers.trainer_pt_utils import IterableDatasetShard, nested_concat, nested_numpify

from tunesmith.errors import WorkerError
from tunesmith.ranks.runtime import Runtime
from tunesmith.trainer.arguments import trainer_log

SECONDS = 600.0
"""How long one batch may take a worker. torch waits for ever; a batch that takes this long is not coming."""

_KILLED = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ?([0-9, ]+)\) (?:is killed by signal: (.+?)\.|exited unexpectedly)"
)
_FAILED = re.compile(r"Caught (\w+) in DataLoader worker process (\d+)\.")
_LATE = re.compile(r"DataLoader timed out after ([0-9.]+) seconds")
_FIX = "Its own output above says more. Set dataloader_num_workers=0 to read the rows in this process."


@dataclass(eq=False)
class _Reader:
    """A DataLoader with workers that is being read. Worker w reads the batches w, w + workers, ..."""

    iterator: Any
    workers: int
    ahead: int
    rows: Sequence[Any] | None
    number: int = 0

    @property
    def processes(self) -> Sequence[Any]:
        """The workers, by number. torch has no public name for them."""
        found: Sequence[Any] = getattr(self.iterator, "_workers", ())
        return found

    def explain(self, error: Exception) -> WorkerError | None:
        """The error in one line; None when it is not about a worker of this loader."""
        text = str(error)
        killed = _KILLED.search(text)
        if killed or isinstance(error, (ConnectionError, EOFError)):  # the latter where it died while it sent a batch
            pids = [int(pid) for pid in killed[1].split(",")] if killed else []
            worker = next((i for i, p in enumerate(self.processes) if p.pid in pids), None) if killed else self._dead()
            if worker is None:
                return None
            process = self.processes[worker]
            how = _how(killed[2] if killed else None, process.exitcode)
            # it may have read ahead; what it had ready is lost with it
            given = range(self.number, self.number + self.workers * self.ahead)
            return self._error(
                f"{worker} (process {process.pid}) {how}", [k for k in given if k % self.workers == worker]
            )
        if failed := _FAILED.search(text):
            reason = text.rstrip().rsplit("\n", 1)[-1]
            return self._error(f"{failed[2]} failed", [self.number], f": {reason}")
        if late := _LATE.search(text):
            worker = self.number % self.workers
            pid = f" (process {self.processes[worker].pid})" if worker < len(self.processes) else ""
            return self._error(f"{worker}{pid} gave nothing for {float(late[1]):g} s", [self.number])
        return None

    def _dead(self) -> int | None:
        """The first worker that has ended, for which it waits a moment."""
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            with contextlib.suppress(RuntimeError):  # torch's own notice of it
                for number, process in enumerate(self.processes):
                    if not process.is_alive():
                        return number
                time.sleep(0.02)
        return None

    def _error(self, what: str, batches: list[int], why: str = "") -> WorkerError:
        if self.rows is None:
            where = f"batch {' or '.join(str(k) for k in batches)}"
        else:
            shown = [[str(int(r)) for r in self.rows[k]] for k in batches if k < len(self.rows)]
            where = "rows " + " or ".join(", ".join(rows[:8]) + (", ..." if len(rows) > 8 else "") for rows in shown)
        return WorkerError(f"data-loader worker {what}, reading {where}{why}", fix=_FIX)

    def end(self) -> None:
        """Ends the workers that are left now: the error keeps the iterator alive, and them with it."""
        shut_down: Any = getattr(self.iterator, "_shutdown_workers", None)
        for _ in range(2 if shut_down is not None else 0):
            with contextlib.suppress(RuntimeError):  # torch's own notice, once more
                shut_down()


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

    It is needed around whole runs: torch's notice of a dead worker may come in the middle of any line.
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


def _how(name: str | None, code: int | None) -> str:
    if name is None and code is not None and code < 0:
        name = signal.Signals(-code).name
    return f"was killed by signal {name}" if name else "ended" if code is None else f"ended with code {code}"


class SentRows(IterableDataset[Any]):
    """A stream that rank 0 alone reads: `dispatch_batches`. The rows of each rank are those of IterableDatasetShard."""

    def __init__(self, stream: Any, batch_size: int, drop_last: bool, runtime: Runtime) -> None:
        self.dataset, self.batch_size, self.drop_last, self.runtime = stream, batch_size, drop_last, runtime

    def __len__(self) -> int:
        size = self.batch_size * self.runtime.world
        return (len(self.dataset) // size if self.drop_last else -(-len(self.dataset) // size)) * self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to the stream."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        size = self.batch_size * self.runtime.world
        rows = iter(self.dataset) if self.runtime.is_main else iter(())
        mine = slice(self.runtime.rank * self.batch_size, (self.runtime.rank + 1) * self.batch_size)
        first: list[Any] = []
        while True:
            read = list(islice(rows, size))
            chunk: list[Any] = self.runtime.gather_objects(read)[0]
            first = first or chunk
            last = len(chunk) < size
            if not chunk or (last and self.drop_last):
                return
            while len(chunk) < size:  # as in transformers: completed from the beginning
                chunk = (chunk + first)[:size]
            yield from chunk[mine]
            if last:
                return


def dealt_stream(stream: Any, batch_size: int, args: Any, runtime: Runtime) -> Any:
    """This rank's rows of a stream."""
    if runtime.world == 1:
        return stream
    if args.accelerator_config.dispatch_batches:
        return SentRows(stream, batch_size, args.dataloader_drop_last, runtime)
    return IterableDatasetShard(stream, batch_size, args.dataloader_drop_last, runtime.world, runtime.rank)


PARTS = ("loss", "predictions", "labels", "inputs")
PADDING = -100
"""What shorter rows are filled up with where results of different width meet."""


class Gathered:
    """Collects the parts of batches; `concatenate=False` keeps them as lists of batches."""

    def __init__(self, *, concatenate: bool) -> None:
        self._concatenate = concatenate
        self._waiting: dict[str, list[Any]] = {name: [] for name in PARTS}
        self._arrays: dict[str, list[Any]] = {name: [] for name in PARTS}
        self._rows = 0

    def add(self, part: dict[str, Any]) -> None:
        """Keeps one batch's results, on the device they are on."""
        self._rows += part["rows"]
        for name in PARTS:
            if part[name] is not None:
                self._waiting[name].append(part[name])

    def to_cpu(self) -> None:
        """Moves what was kept so far to host memory."""
        for name, values in self._waiting.items():
            self._arrays[name] += [nested_numpify(v) for v in values]
            values.clear()

    def over_ranks(self, runtime: Runtime, rows: npt.NDArray[np.int64] | None) -> dict[str, Any]:
        """Each part over all ranks, in the order of the dataset where the rows are known; None for a part that is missing."""
        self.to_cpu()
        parts = runtime.gather_objects((self._arrays, rows, self._rows))
        out: dict[str, Any] = {"rows": sum(count for _, _, count in parts)}
        known = [r for _, r, _ in parts]
        order = None if any(r is None for r in known) else np.concatenate([np.asarray(r) for r in known])
        for name in PARTS:
            batches = [b for arrays, _, _ in parts for b in arrays[name]]
            if not batches:
                out[name] = None
            elif name == "loss":
                out[name] = reordered(np.concatenate(batches), order)
            elif not self._concatenate:
                out[name] = batches
            else:
                out[name] = reordered(_joined(batches), order)
        return out


def _joined(batches: list[Any]) -> Any:
    """All batches as one; pairwise, so that a set of n batches is not copied n times."""
    while len(batches) > 1:
        pairs = range(0, len(batches) - 1, 2)
        joined = [nested_concat(batches[i], batches[i + 1], padding_index=PADDING) for i in pairs]
        batches = joined + batches[len(joined) * 2 :]
    return batches[0]


def reordered(values: Any, order: npt.NDArray[np.int64] | None) -> Any:
    """Results in the order of the dataset; left as they are when the rows were not each fetched once."""
    if order is None or not np.array_equal(np.sort(order), np.arange(len(order))):
        return values
    if isinstance(values, (list, tuple)):
        return type(values)(reordered(v, order) for v in values)
    if isinstance(values, dict):
        return {k: reordered(v, order) for k, v in values.items()}
    if len(values) != len(order):
        return values
    out = np.empty_like(values)
    out[order] = values
    return out


def warn_of_nan(predictions: Any) -> None:
    """Warns of rows whose answer is not a number: as in transformers they are returned, and argmax makes them class 0."""
    if not isinstance(predictions, np.ndarray) or predictions.dtype.kind != "f" or not len(predictions):
        return
    bad = np.flatnonzero(np.isnan(predictions.reshape(len(predictions), -1)).any(axis=1))
    if len(bad):
        trainer_log.warning(
            "the model's answer is not a number for %d of %d rows, the first at %d", len(bad), len(predictions), bad[0]
        )
