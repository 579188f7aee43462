"""Where training batches come from: our DataLoader with a pure order, a DataLoader of the user, or a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tunesmith.engine.state import step_seed
from tunesmith.tokens.batches import Batch, Collate, Window, make_batch, pin_batch
from tunesmith.tokens.token_rows import Sampling, TokenRows, epoch_order, prefetched
from tunesmith.trainer.processes import read_batches
from tunesmith.trainer.run_identity import UsedRows, can_mark, marked_iterator

Indices = npt.NDArray[np.int64]


@dataclass
class EpochClock:
    """The epoch under way: loaders that a user wrapped in something else still follow it."""

    epoch: int = 0


@dataclass(eq=False, kw_only=True)
class EpochBatches:
    """A batch sampler whose order is a pure function of (seed, epoch): row numbers of each micro-batch of this rank."""

    num_rows: int
    batch_size: int
    accumulation: int
    seed: int
    sampling: Sampling
    lengths: npt.NDArray[Any] | None
    drop_last: bool
    rank: int
    world: int
    clock: EpochClock = field(default_factory=EpochClock)
    _skip: int = 0

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """The next iteration yields this epoch from window number `skip` on."""
        self.clock.epoch, self._skip = epoch, skip

    def __len__(self) -> int:
        size = self.batch_size * self.world
        return self.num_rows // size if self.drop_last else -(-self.num_rows // size)

    def __iter__(self) -> Iterator[list[int]]:
        for pieces, _, _ in self.windows():
            for piece in pieces:
                yield piece.tolist()

    def windows(self) -> Iterator[tuple[list[Indices], Indices, bool]]:
        """(this rank's micro-batches, all ranks' rows, whether this rank's share counts nothing) of each step."""
        step = self.batch_size * self.accumulation * self.world
        order = epoch_order(
            self.num_rows,
            seed=self.seed,
            epoch=self.clock.epoch,
            rows_per_step=step,
            sampling=self.sampling,
            lengths=self.lengths,
        ).rows
        if self.drop_last:
            # transformers drops the ragged micro-batch, not the whole window
            order = order[: len(self) * self.batch_size * self.world]
        skip, self._skip = self._skip, 0
        for start in range(skip * step, len(order), step):
            rows = order[start : start + step]
            mine = rows[self.rank :: self.world]
            idle = len(mine) == 0
            mine = rows[:1] if idle else mine
            yield [mine[i : i + self.batch_size] for i in range(0, len(mine), self.batch_size)], rows, idle


class RowBatches:
    """A batch sampler for evaluation: rows in order, or longest first; `rows` says where each result belongs."""

    def __init__(self, order: Indices, batch_size: int, drop_last: bool = False) -> None:
        self.rows, self.batch_size, self.drop_last = order, batch_size, drop_last

    def __len__(self) -> int:
        size = self.batch_size
        return len(self.rows) // size if self.drop_last else -(-len(self.rows) // size)

    def __iter__(self) -> Iterator[list[int]]:
        for index in range(len(self)):
            yield self.rows[index * self.batch_size : (index + 1) * self.batch_size].tolist()


class RecordedBatches:
    """A batch sampler of the user, with a note of the rows it handed out."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.sampler:
            self.seen.extend(int(i) for i in batch)
            yield list(batch)


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
