"""Tokenized rows, the order in which an epoch sees them, and padded batches of them as tensors.

The order of an epoch is a pure function of (seed, epoch): nothing to save. Imports torch only when tensors are made.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

IntArray = npt.NDArray[np.int64]
TOKEN_COLUMNS = ("input_ids", "token_type_ids")
"""Columns with one value per token. The attention mask is not stored: it is all ones before padding."""


@dataclass(frozen=True)
class Ragged:
    """A column of rows of different lengths: row i is `values[offsets[i] : offsets[i + 1]]`."""

    values: npt.NDArray[Any]
    offsets: npt.NDArray[Any]

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[int]], dtype: type[np.signedinteger[Any]] = np.int32) -> Ragged:
        """Copy the rows."""
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum([len(r) for r in rows], out=offsets[1:])
        return cls(np.fromiter(chain.from_iterable(rows), dtype=dtype, count=int(offsets[-1])), offsets)

    @classmethod
    def from_arrow(cls, column: Any) -> Ragged:
        """Make a view of a pyarrow list column; several chunks are copied."""
        whole = column.combine_chunks()
        return cls(whole.values.to_numpy(), whole.offsets.to_numpy())

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self) -> npt.NDArray[np.int32]:
        """Return the number of tokens of each row."""
        return np.diff(self.offsets).astype(np.int32)

    def take(self, indices: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """Return the rows at these indices as views."""
        return [self.values[self.offsets[i] : self.offsets[i + 1]] for i in indices]


@dataclass(frozen=True)
class TokenRows:
    """The rows of one split: token columns, their lengths, and labels, if there are any."""

    columns: dict[str, Ragged]
    lengths: npt.NDArray[np.int32]
    labels: npt.NDArray[Any] | None

    @classmethod
    def from_lists(cls, data: Mapping[str, Sequence[Any]]) -> TokenRows:
        """Build from plain lists, as a tokenizer returns them; "labels" or "label" is optional."""
        columns = {name: Ragged.from_lists(data[name]) for name in TOKEN_COLUMNS if name in data}
        return cls(columns, columns["input_ids"].lengths(), _label_array(data.get("labels", data.get("label"))))

    @classmethod
    def from_arrow(cls, table: Any) -> TokenRows:
        """Build from a pyarrow table."""
        columns = {name: Ragged.from_arrow(table.column(name)) for name in TOKEN_COLUMNS if name in table.column_names}
        labels = table.column("labels") if "labels" in table.column_names else None
        return cls(columns, columns["input_ids"].lengths(), None if labels is None else labels_from_arrow(labels))

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, indices: npt.NDArray[Any]) -> dict[str, list[npt.NDArray[Any]]]:
        """Return the token columns of these rows, in this order."""
        return {name: column.take(indices) for name, column in self.columns.items()}

    def select(self, indices: npt.NDArray[Any]) -> TokenRows:
        """Return a copy of some rows, in this order."""
        columns = {name: Ragged.from_lists([list(r) for r in col.take(indices)]) for name, col in self.columns.items()}
        labels = None if self.labels is None else self.labels[indices]
        return TokenRows(columns, self.lengths[indices], labels)

    def used_ids(self, vocabulary_size: int) -> IntArray:
        """Return the token ids that occur, sorted."""
        ids, seen = self.columns["input_ids"], np.zeros(vocabulary_size, dtype=bool)
        seen[ids.values[ids.offsets[0] : ids.offsets[-1]]] = True
        return np.flatnonzero(seen)


def labels_from_arrow(column: Any) -> npt.NDArray[Any] | None:
    """Return a pyarrow column of labels, or of lists of labels, as an array."""
    nested = str(column.type).startswith(("list", "large_list", "fixed_size_list"))
    return _label_array(column.to_pylist() if nested else column.to_numpy())


def _label_array(labels: Any) -> npt.NDArray[Any] | None:
    if labels is None:
        return None
    array = np.asarray(labels)
    return array.astype(np.float32 if array.dtype.kind == "f" or array.ndim == 2 else np.int64)


def pad_rows(
    tokens: Mapping[str, Sequence[npt.NDArray[Any]]], width: int, fill: Mapping[str, int], side: str
) -> dict[str, IntArray]:
    """Return padded arrays and the attention mask; `fill` is the padding value of each column."""
    rows = tokens["input_ids"]
    mask = np.zeros((len(rows), width), dtype=np.int64)
    out = {name: np.full((len(rows), width), fill[name], dtype=np.int64) for name in TOKEN_COLUMNS if name in tokens}
    for i, row in enumerate(rows):
        at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        mask[i, at] = 1
        for name, array in out.items():
            array[i, at] = tokens[name][i]
    return {**out, "attention_mask": mask}


Sampling = Literal["random", "sequential", "group_by_length"]
SORTED_STEPS = 50
"""Number of optimizer steps whose rows are sorted together by length."""


@dataclass(frozen=True)
class EpochOrder:
    """Window i contains `rows[starts[i]:starts[i + 1]]`: all rows of one optimizer step, over all micro-batches and ranks."""

    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def window(self, index: int) -> npt.NDArray[np.int64]:
        """Return the rows of one optimizer step."""
        return self.rows[self.starts[index] : self.starts[index + 1]]


def epoch_order(
    num_rows: int,
    *,
    seed: int,
    epoch: int,
    rows_per_step: int,
    sampling: Sampling = "random",
    lengths: npt.NDArray[Any] | None = None,
) -> EpochOrder:
    """Return the windows of one epoch. Every row occurs once.

    With `group_by_length`, rows of similar length share a step. Sorting spans SORTED_STEPS steps, not the
    epoch: sorting the whole epoch makes the loss curve saw-tooth.
    """
    rng = np.random.Generator(np.random.Philox(key=[seed & (2**63 - 1), epoch]))
    rows = np.arange(num_rows) if sampling == "sequential" else rng.permutation(num_rows)
    if sampling == "group_by_length":
        assert lengths is not None
        span = max(rows_per_step, 1) * SORTED_STEPS
        for start in range(0, num_rows, span):
            part = rows[start : start + span]
            rows[start : start + span] = part[np.argsort(-lengths[part], kind="stable")]
        # Shuffle the full windows within their span; the incomplete window stays last.
        full = num_rows // rows_per_step
        grid = rows[: full * rows_per_step].reshape(full, rows_per_step)
        for start in range(0, full, SORTED_STEPS):
            part = grid[start : start + SORTED_STEPS]
            grid[start : start + SORTED_STEPS] = part[rng.permutation(len(part))]
    starts = np.append(np.arange(0, num_rows, rows_per_step), num_rows).astype(np.int64)
    return EpochOrder(rows, starts)


def length_batches(
    lengths: npt.NDArray[Any],
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield row numbers of batches sorted by length, longest first, within the limits of `evaluation_batches`."""
    order = np.argsort(-lengths, kind="stable")[rank::world]
    start = 0
    while start < len(order):
        size = len(order) if max_rows is None else max_rows
        if max_tokens is not None:
            size = max(1, min(size, max_tokens // max(int(lengths[order[start]]), 1)))
        yield order[start : start + size]
        start += size


def prefetched(items: Iterator[Any], prepare: Callable[[Any], Any], ahead: int = 2) -> Iterator[Any]:
    """Yield items that a thread prepares up to `ahead` items in advance. An error is raised in place of its item."""
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=ahead)
    stopped = threading.Event()

    def put(message: tuple[str, Any]) -> None:
        while not stopped.is_set():
            with suppress(queue.Full):
                ready.put(message, timeout=0.1)
                return

    def work() -> None:
        try:
            for item in items:
                if stopped.is_set():
                    return
                put(("item", prepare(item)))
            put(("end", None))
        except BaseException as error:
            put(("error", error))

    thread = threading.Thread(target=work, name="tunesmith-prefetch", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value
    finally:
        stopped.set()
        thread.join(timeout=5)


Split = Callable[["Batch", int], "list[Batch]"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch. `inputs` go to the model by name; `labels` don't. `rows` are row numbers of the split."""

    inputs: dict[str, Any]
    labels: torch.Tensor | None
    rows: npt.NDArray[np.int64]
    tokens: int
    padded_tokens: int
    split: Split | None = None
    """Splits a packed batch into pieces of at most this many rows."""
    block: torch.Tensor | None = None
    """The memory block of all tensors, if they share one."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Window:
    """One optimizer step: this rank's micro-batches, and the labels of the rows of all ranks (for the divisor)."""

    micro_batches: tuple[Batch, ...]
    rows: npt.NDArray[np.int64]
    labels: npt.NDArray[Any] | None
    idle: bool = False
    """True if this rank has no row: it computes one with weight 0, because the other ranks wait for it."""


Collate = Callable[[dict[str, list[npt.NDArray[Any]]]], dict[str, Any]]
"""Turns token rows into tensors by input name."""


@dataclass(frozen=True)
class Padding:
    """Pads to the longest row of the batch, or to a multiple, on the tokenizer's side."""

    pad_token_id: int = 0
    pad_token_type_id: int = 0
    side: str = "right"
    multiple_of: int | None = None

    def width(self, longest: int) -> int:
        """Return the width of a batch whose longest row has `longest` tokens."""
        if self.multiple_of:
            return -(-longest // self.multiple_of) * self.multiple_of
        return longest

    def __call__(self, tokens: dict[str, list[npt.NDArray[Any]]]) -> dict[str, Any]:
        """Return padded int64 tensors and the attention mask."""
        import torch

        width = self.width(max((len(r) for r in tokens["input_ids"]), default=1))
        fill = {"input_ids": self.pad_token_id, "token_type_ids": self.pad_token_type_id}
        return {name: torch.from_numpy(array) for name, array in pad_rows(tokens, width, fill, self.side).items()}


def padding_of(tokenizer: Any) -> Padding:
    """Return the padding of a tokenizer."""
    return Padding(
        int(tokenizer.pad_token_id),
        int(getattr(tokenizer, "pad_token_type_id", 0) or 0),
        str(getattr(tokenizer, "padding_side", "right")),
    )


def make_batch(rows: TokenRows, indices: npt.NDArray[np.int64], collate: Collate) -> Batch:
    """Return the micro-batch of these rows."""
    import torch

    inputs = collate(rows.take(indices))
    labels = None if rows.labels is None else torch.from_numpy(np.ascontiguousarray(rows.labels[indices]))
    size = int(rows.lengths[indices].sum()), int(inputs["input_ids"].numel())
    return Batch(inputs, labels, indices, *size, getattr(collate, "split", None))


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """Return all tensors of a batch, in the order of the input names, labels last."""
    found: list[torch.Tensor] = []
    for _, value in sorted(batch.inputs.items()):
        found += value.parts() if hasattr(value, "parts") else [value]
    return found if batch.labels is None else [*found, batch.labels]


def with_tensors(batch: Batch, tensors: Sequence[torch.Tensor], block: torch.Tensor | None = None) -> Batch:
    """Return the batch with different tensors, in the order of `tensors_of`."""
    left = list(tensors)
    inputs: dict[str, Any] = {}
    for name, value in sorted(batch.inputs.items()):
        parts = [left.pop(0) for _ in (value.parts() if hasattr(value, "parts") else [value])]
        inputs[name] = value.with_parts(*parts) if hasattr(value, "parts") else parts[0]
    labels = None if batch.labels is None else left.pop(0)
    return replace(batch, inputs=inputs, labels=labels, block=batch.block if block is None else block)


def views_of(block: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of the same shapes and types, one after the other in a block of bytes."""
    views, at = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        views.append(block[at : at + size].view(tensor.dtype).view(tensor.shape))
        at += -(-size // 16) * 16
    return views


def pin_batch(batch: Batch) -> Batch:
    """Return the batch in one block of pinned memory, which one copy moves to a GPU."""
    import torch

    tensors = tensors_of(batch)
    size = sum(-(-t.numel() * t.element_size() // 16) * 16 for t in tensors)
    block = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    views = views_of(block, tensors)
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)
    return with_tensors(batch, views, block=block)


@dataclass(frozen=True)
class Batches:
    """The training batches of one rank. `windows(epoch, skip)` starts at any window; skipped windows cost nothing."""

    rows: TokenRows
    collate: Collate
    batch_size: int
    seed: int
    accumulation: int = 1
    sampling: Sampling = "random"
    rank: int = 0
    world: int = 1
    ahead: int = 0
    """Number of windows that a thread prepares in advance; the windows and their order stay the same."""
    pinned: bool = False
    """Put batches into pinned memory, so that copies to a GPU don't block the host."""

    @property
    def rows_per_step(self) -> int:
        """Return the number of rows of a full optimizer step, over all micro-batches and ranks."""
        return self.batch_size * self.accumulation * self.world

    def order(self, epoch: int) -> EpochOrder:
        """Return the windows of an epoch, the same on every rank."""
        return epoch_order(
            len(self.rows),
            seed=self.seed,
            epoch=epoch,
            rows_per_step=self.rows_per_step,
            sampling=self.sampling,
            lengths=self.rows.lengths,
        )

    def steps_in_epoch(self, epoch: int) -> int:
        """Return the number of optimizer steps of an epoch."""
        return -(-len(self.rows) // self.rows_per_step)

    def windows(self, epoch: int, skip: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch, without the first `skip`."""
        order = self.order(epoch)
        wanted = (order.window(index) for index in range(skip, len(order)))
        yield from prefetched(wanted, self.window, self.ahead) if self.ahead else map(self.window, wanted)

    def window(self, all_rows: npt.NDArray[np.int64]) -> Window:
        """Return this rank's share of a window."""
        mine = all_rows[self.rank :: self.world]
        idle = len(mine) == 0
        if idle:
            mine = all_rows[:1]
        pieces = [mine[i : i + self.batch_size] for i in range(0, len(mine), self.batch_size)]
        micro = [make_batch(self.rows, piece, self.collate) for piece in pieces]
        if self.pinned:
            micro = [pin_batch(batch) for batch in micro]
        labels = None if self.rows.labels is None else self.rows.labels[all_rows]
        return Window(tuple(micro), all_rows, labels, idle)


def evaluation_batches(
    rows: TokenRows,
    collate: Collate,
    *,
    max_rows: int | None = None,
    max_tokens: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> Iterator[Batch]:
    """Batches sorted by length, longest first, so that out-of-memory errors come early. `Batch.rows` has the row numbers.

    No batch has more than `max_rows` rows, or more than `max_tokens` tokens including padding (but at least one row).
    """
    for indices in length_batches(rows.lengths, max_rows=max_rows, max_tokens=max_tokens, rank=rank, world=world):
        yield make_batch(rows, indices, collate)
