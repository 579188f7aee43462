"""What the rows of a dataset were when they were used: the only way to know that one which cannot be hashed has changed.

Beside each row goes a mark of 8 bytes, made where the row is read (a worker, or this process). A checkpoint keeps the marks of
at most 65,536 rows, or one mark for all rows of a stream so far. A resume reads some used rows again before its first
step, and compares every other one when it is used again; the skipped part of a stream is read anyway and compared whole.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader

from tunesmith.engine.seed import generators_untouched
from tunesmith.trainer.content import MARK_BYTES, item_mark
from tunesmith.trainer.upstream import is_arrow_dataset

MOST_MARKS = 65_536
READ_AGAIN = 256
"""Used rows read again before the first step of a resume; 1% of the rows where that is more."""
Indices = npt.NDArray[np.int64]


@dataclass
class MarkedCollate:
    """A collator whose batches travel with the marks of their rows. Runs where the rows are read."""

    collate: Any

    def __call__(self, items: Any) -> tuple[Any, bytes]:
        marks = b"".join(item_mark(item) or bytes(MARK_BYTES) for item in items)
        return self.collate(items), marks


def can_mark(loader: Any) -> bool:
    """Whether the rows of a loader can be marked as they are read. Rows in Arrow are hashed before the run instead."""
    if not isinstance(loader, DataLoader) or (loader.batch_sampler is None and loader.batch_size is None):
        return False
    keeps_workers = loader.num_workers > 0 and loader.persistent_workers
    return not keeps_workers and not is_arrow_dataset(loader.dataset)


def marked_iterator(loader: Any) -> Iterator[Any]:
    """Batches as (features, marks). The loader itself stays as its owner knows it."""
    plain = loader.collate_fn
    loader.collate_fn = MarkedCollate(plain)
    try:
        return iter(loader)
    finally:
        loader.collate_fn = plain


@dataclass
class UsedRows:
    """The marks of the rows used so far, by this process and those before it."""

    count: int | None
    """Rows of the dataset; None for a stream."""
    changed: Callable[[str, bool], None]
    """Called with what differs from before a resume, and whether that is certain."""
    varies: bool = False
    """The same row was seen with two contents within one process: rows are random, and not compared."""
    stream: tuple[int, int, str] | None = None
    """(epoch, batches of it that were used, a mark of them all)."""
    _expected: tuple[int, int, str] | None = None
    _marks: npt.NDArray[np.uint64] = field(init=False)
    _earlier: npt.NDArray[np.bool_] = field(init=False)
    """Whether a mark is from before the resume and was not compared yet."""

    def __post_init__(self) -> None:
        self._stride = max(1, -(-(self.count or 0) // MOST_MARKS))
        size = -(-(self.count or 0) // self._stride)
        self._marks, self._earlier = np.zeros(size, dtype=np.uint64), np.zeros(size, dtype=bool)

    @property
    def wants_marks(self) -> bool:
        """Whether marks of the next epoch are of use: not once every row has one and none is left to be compared."""
        done = self.count is not None and bool(self._marks.all()) and not self._earlier.any()
        return not self.varies and not done

    def note(self, rows: Indices, marks: bytes) -> None:
        """Takes the marks of rows that are about to be used, and compares them with those from before a resume."""
        found = np.frombuffer(marks, dtype=np.uint64)
        if self.varies or len(found) != len(rows):
            return
        kept = rows % self._stride == 0
        at, found = rows[kept] // self._stride, found[kept]
        differs = (self._marks[at] != 0) & (found != 0) & (self._marks[at] != found)
        if differs.any():
            self.varies = True
            old = differs & self._earlier[at]
            if old.any():
                row = int(rows[kept][old][0])
                self.changed(f"row {row} of the training data is not what it was, or depends on the epoch", False)
        self._marks[at], self._earlier[at] = found, False

    def note_batch(self, epoch: int, number: int, marks: bytes) -> None:
        """Takes the marks of batch `number` (from 0) of an epoch of a stream."""
        before = self.stream[2] if self.stream is not None and number else ""
        self.stream = (epoch, number + 1, hashlib.sha256(before.encode() + marks).hexdigest()[:32])
        if self._expected is not None and self._expected[:2] == self.stream[:2]:
            expected, self._expected = self._expected, None
            if expected != self.stream:
                self.changed(f"the {number + 1} batches before the checkpoint are not what they were", True)

    def end_epoch(self, epoch: int) -> None:
        """An epoch of a stream is over: its batches before the checkpoint must all have come."""
        if self._expected is not None and self._expected[0] == epoch:
            wanted, self._expected = self._expected[1], None
            self.changed(f"the training data ended before batch {wanted}, which the checkpoint had reached", True)

    def read_again(self, dataset: Any) -> str | None:
        """Reads used rows once more; what changed, in words. A row that differs from itself is random: nothing is said."""
        used = np.flatnonzero(self._marks)
        wanted = max(READ_AGAIN, (self.count or 0) // 100)
        for at in used[:: max(1, -(-len(used) // wanted))] if not self.varies else ():
            row = int(at) * self._stride
            mark = _number(item_mark(dataset[row]))
            if mark and mark != self._marks[at]:
                if mark == _number(item_mark(dataset[row])):
                    return f"row {row} of the training data is not what it was when it was used"
                self.varies = True
                return None
            self._earlier[at] = False
        return None

    def to_json(self) -> dict[str, Any]:
        """For a checkpoint."""
        marks = base64.b64encode(self._marks.tobytes()).decode() if self._marks.any() and not self.varies else ""
        return {"count": self.count, "varies": self.varies, "marks": marks, "stream": self.stream}

    def restore(self, stored: Mapping[str, Any], *, with_stream: bool) -> None:
        """Takes what a checkpoint kept. Marks of another number of rows are of no use: that change was reported before."""
        if stored.get("count") != self.count:
            return
        self.varies = bool(stored["varies"])
        marks = np.frombuffer(base64.b64decode(stored["marks"]), dtype=np.uint64)
        if len(marks) == len(self._marks):
            self._marks, self._earlier = marks.copy(), marks != 0
        if with_stream and stored["stream"] is not None:
            epoch, batches, mark = stored["stream"]
            self._expected = (int(epoch), int(batches), str(mark))


def _number(mark: bytes | None) -> int:
    return int(np.frombuffer(mark or bytes(MARK_BYTES), dtype=np.uint64)[0])


def compare_used_rows(
    used: UsedRows | None, stored: dict[str, Any] | None, loader: Any, *, with_stream: bool
) -> str | None:
    """Takes over the marks of a checkpoint and reads some of its rows again: what differs, if anything does."""
    if used is None or stored is None:
        return None
    used.restore(stored, with_stream=with_stream)
    if not can_mark(loader) or used.count is None:
        return None
    with generators_untouched():
        found = used.read_again(loader.dataset)
    used.varies = used.varies or found is not None
    return found
