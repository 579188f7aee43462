"""Batches as tensors: dynamic padding, fixed shapes where asked, and the windows of an epoch for one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tunesmith.data.tokens import EpochOrder, Sampling, TokenRows, epoch_order, length_batches, pad_rows, prefetched

Split = Callable[["Batch", int], "list[Batch]"]


@dataclass(frozen=True)
class Batch:
    """One micro-batch. `inputs` go to the model by name; `labels` never do. `rows` are row numbers of the split."""

    inputs: dict[str, Any]
    labels: torch.Tensor | None
    rows: npt.NDArray[np.int64]
    tokens: int
    padded_tokens: int
    split: Split | None = None
    """Splits a batch that is not simply padded into pieces of at most this many rows."""
    features: Any = None
    """The batch as the user's own collator made it, for a loss function of the user."""
    block: torch.Tensor | None = None
    """The block of memory that holds all tensors, if there is one."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Window:
    """All of one optimizer step: this rank's micro-batches, and the labels of all ranks' rows (for the divisor)."""

    micro_batches: tuple[Batch, ...]
    rows: npt.NDArray[np.int64]
    labels: npt.NDArray[Any] | None
    idle: bool = False
    """This rank has no row here: it computes one with weight 0, because the other ranks wait for it."""


class Collate(Protocol):
    """Rows of tokens -> model inputs."""

    def __call__(self, tokens: dict[str, list[npt.NDArray[Any]]]) -> dict[str, Any]:
        """Tensors by input name."""
        ...


@dataclass(frozen=True)
class Padding:
    """Pads to the longest row of the batch, to a multiple, or to a fixed length, on the tokenizer's side."""

    pad_token_id: int = 0
    pad_token_type_id: int = 0
    side: str = "right"
    multiple_of: int | None = None
    fixed_length: int | None = None

    def width(self, longest: int) -> int:
        """Columns of a batch whose longest row has `longest` tokens."""
        if self.fixed_length is not None:
            return max(self.fixed_length, longest)
        if self.multiple_of:
            return -(-longest // self.multiple_of) * self.multiple_of
        return longest

    def __call__(self, tokens: dict[str, list[npt.NDArray[Any]]]) -> dict[str, Any]:
        """Rectangular int64 tensors and the attention mask."""
        width = self.width(max((len(r) for r in tokens["input_ids"]), default=1))
        fill = {"input_ids": self.pad_token_id, "token_type_ids": self.pad_token_type_id}
        return {name: torch.from_numpy(array) for name, array in pad_rows(tokens, width, fill, self.side).items()}


def padding_of(tokenizer: Any, *, multiple_of: int | None = None, fixed_length: int | None = None) -> Padding:
    """The tokenizer's padding."""
    return Padding(
        int(tokenizer.pad_token_id),
        int(getattr(tokenizer, "pad_token_type_id", 0) or 0),
        str(getattr(tokenizer, "padding_side", "right")),
        multiple_of,
        fixed_length,
    )


def make_batch(rows: TokenRows, indices: npt.NDArray[np.int64], collate: Collate) -> Batch:
    """The micro-batch of these rows."""
    inputs = collate(rows.take(indices))
    labels = None if rows.labels is None else torch.from_numpy(np.ascontiguousarray(rows.labels[indices]))
    size = int(rows.lengths[indices].sum()), int(inputs["input_ids"].numel())
    return Batch(inputs, labels, indices, *size, getattr(collate, "split", None))


def tensors_of(batch: Batch) -> list[torch.Tensor]:
    """All tensors of a batch, in the order of the input names; the labels last."""
    found: list[torch.Tensor] = []
    for _, value in sorted(batch.inputs.items()):
        found += value.parts() if hasattr(value, "parts") else [value]
    return found if batch.labels is None else [*found, batch.labels]


def with_tensors(batch: Batch, tensors: Sequence[torch.Tensor], block: torch.Tensor | None = None) -> Batch:
    """The same batch with other tensors, in the order of `tensors_of`."""
    left = list(tensors)
    inputs: dict[str, Any] = {}
    for name, value in sorted(batch.inputs.items()):
        parts = [left.pop(0) for _ in (value.parts() if hasattr(value, "parts") else [value])]
        inputs[name] = value.with_parts(*parts) if hasattr(value, "parts") else parts[0]
    labels = None if batch.labels is None else left.pop(0)
    return replace(batch, inputs=inputs, labels=labels, block=batch.block if block is None else block)


def views_of(block: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors like those given, one after the other in a block of bytes."""
    views, at = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        views.append(block[at : at + size].view(tensor.dtype).view(tensor.shape))
        at += -(-size // 16) * 16
    return views


def pin_batch(batch: Batch) -> Batch:
    """The same batch in one block of pinned memory: one copy takes it to a GPU."""
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
    shuffle_window: int = 50
    token_budget: int | None = None
    drop_last: bool = False
    rank: int = 0
    world: int = 1
    ahead: int = 0
    """Number of windows that a thread prepares in advance; the windows and their order stay the same."""
    pinned: bool = False
    """Put batches into pinned memory, from where a copy to a GPU does not block the host."""

    @property
    def rows_per_step(self) -> int:
        """Rows of one full optimizer step over all micro-batches and ranks."""
        return self.batch_size * self.accumulation * self.world

    def order(self, epoch: int) -> EpochOrder:
        """The windows of an epoch, the same on every rank."""
        return epoch_order(
            len(self.rows),
            seed=self.seed,
            epoch=epoch,
            rows_per_step=self.rows_per_step,
            sampling=self.sampling,
            lengths=self.rows.lengths,
            shuffle_window=self.shuffle_window,
            token_budget=self.token_budget,
            drop_last=self.drop_last,
        )

    def steps_in_epoch(self, epoch: int) -> int:
        """Optimizer steps of an epoch; only a token budget makes them differ between epochs."""
        if self.token_budget is not None:
            return len(self.order(epoch))
        full, tail = divmod(len(self.rows), self.rows_per_step)
        return full + (1 if tail and not self.drop_last else 0)

    def windows(self, epoch: int, skip: int = 0) -> Iterator[Window]:
        """The windows of an epoch from number `skip` on."""
        order = self.order(epoch)
        wanted = (order.window(index) for index in range(skip, len(order)))
        yield from prefetched(wanted, self.window, self.ahead) if self.ahead else map(self.window, wanted)

    def window(self, all_rows: npt.NDArray[np.int64]) -> Window:
        """This rank's share of a window."""
        mine = all_rows[self.rank :: self.world]
        idle = len(mine) == 0
        if idle:
            mine = all_rows[:1]
        size = self.batch_size if self.token_budget is None else max(len(mine), 1)
        pieces = [mine[i : i + size] for i in range(0, len(mine), size)]
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
    """Batches sorted by length, longest first (an out-of-memory shows at once); `Batch.rows` says where each result belongs.

    No batch has more than `max_rows` rows, nor more than `max_tokens` tokens with its padding (one row at least).
    """
    for indices in length_batches(rows.lengths, max_rows=max_rows, max_tokens=max_tokens, rank=rank, world=world):
        yield make_batch(rows, indices, collate)
