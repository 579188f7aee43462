"""Data-loader workers that die, fail or hang: an error that names the worker and its rows, and no process left waiting."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from tunesmith.errors import WorkerError

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
