"""Batches for fast steps: packed (the real tokens of all rows, one after the other, in one row), or padded to one of few widths.

Packed micro-batches are made from rows, cut into smaller ones, and taken apart into rows again. Batches of few widths let the
padded steps of any encoder be captured as CUDA graphs, with nothing known about the model.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.typing import NDArray
from torch import nn

from tunesmith.data.batches import Batch, Collate, Padding
from tunesmith.models.families import why_not_original


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each row lies in a packed batch. Made on the host; nothing in it needs a device sync to be used."""

    lengths: tuple[int, ...]
    """Tokens of each stretch in packed order. With a filled-up batch the last ones are the filling."""
    longest: int
    """Upper bound of `lengths`: a host number, so that a captured graph can keep it fixed."""
    bounds: torch.Tensor
    """int32 (stretches + 1): first token of each stretch, and the end."""
    starts: torch.Tensor
    """int64 (stretches): first token of each, in packed order."""
    order: torch.Tensor
    """int64 (rows): for each row as it was given, its place in packed order."""

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Its tensors."""
        return self.bounds, self.starts, self.order

    def with_parts(self, bounds: torch.Tensor, starts: torch.Tensor, order: torch.Tensor) -> Layout:
        """The same layout with its tensors elsewhere."""
        return replace(self, bounds=bounds, starts=starts, order=order)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Layout:
        """The same layout with its tensors on `device`."""
        return self.with_parts(*(part.to(device, non_blocking=non_blocking) for part in self.parts()))


def first_tokens(hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(rows, 1, width) in the order given, from (1, tokens, width), or from first tokens (1, stretches, width)."""
    rows = layout.order
    if hidden.shape[1] != layout.starts.shape[0]:  # equal when the last layer has been cut to first tokens
        rows = layout.starts.index_select(0, rows)
    return hidden[0].index_select(0, rows).unsqueeze(1)


FILLER = 0
"""The token id of what fills up a batch; its stretches are never read."""
PackedBatch = dict[str, "torch.Tensor | Layout"]


def pack(
    rows: Mapping[str, Sequence[NDArray[np.integer]]],
    *,
    first_position: int = 0,
    skipped_id: int | None = None,
    keys: Sequence[str] = ("input_ids", "token_type_ids"),
    total: int | None = None,
    longest: int | None = None,
    fillers: int = 1,
    dtype: type[np.integer] = np.int64,
) -> PackedBatch:
    """Model inputs of shape (1, tokens), `position_ids` and the `layout`, for the rows as `TokenRows.take` gives them.

    Rows are sorted by length inside the batch (equal lengths share one matrix product); the model's output is in
    the given order. With `total` the batch is filled up to that many tokens, with `fillers` stretches of their own that no
    row sees and the head never reads: every batch of a bucket then has the same shapes. `longest` is the bucket's longest
    stretch. Tokens of `skipped_id` have no position of their own (RoBERTa does not count its padding token, wherever it stands).
    `dtype` is that of the ids: for the gradient of an embedding a GPU sorts 32 bits in half the time of 64.
    """
    given = np.array([len(ids) for ids in rows["input_ids"]], dtype=np.int64)
    assert given.min(initial=0 if not given.size else 1) > 0, "a row without tokens has no first token to classify"
    sorted_rows = np.argsort(given, kind="stable")
    stretches, spare = _fill_up(given[sorted_rows], total, fillers)
    bound = int(stretches.max()) if longest is None else longest
    assert bound >= int(stretches.max()), f"a stretch of {int(stretches.max())} tokens is longer than longest={bound}"
    bounds = np.concatenate(([0], np.cumsum(stretches)))
    positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], stretches) + first_position
    if spare:
        positions[-spare:] = first_position  # the filling may be longer than the position table
    order = np.empty(len(given), dtype=np.int64)
    order[sorted_rows] = np.arange(len(given))
    if skipped_id is not None:
        ids = np.concatenate([np.asarray(rows["input_ids"][i]) for i in sorted_rows])
        positions[: len(ids)] = _positions_without(ids == skipped_id, bounds, stretches, first_position)
    batch: PackedBatch = {}
    for name in keys:
        if name in rows:
            parts = [np.asarray(rows[name][i]) for i in sorted_rows]
            parts.append(np.full(spare, FILLER))
            batch[name] = torch.from_numpy(np.concatenate(parts).astype(dtype)).unsqueeze(0)
    batch["position_ids"] = torch.from_numpy(positions.astype(dtype)).unsqueeze(0)
    batch["layout"] = Layout(
        lengths=tuple(int(n) for n in stretches),
        longest=bound,
        bounds=torch.from_numpy(bounds.astype(np.int32)),
        starts=torch.from_numpy(bounds[:-1].copy()),
        order=torch.from_numpy(order),
    )
    return batch


def _positions_without(
    skipped: NDArray[np.bool_], bounds: NDArray[np.int64], stretches: NDArray[np.int64], first: int
) -> NDArray[np.int64]:
    """Positions of the rows' tokens, counted over those that are not skipped; these have the one before the first."""
    counted = np.cumsum(~skipped)
    before = np.concatenate(([0], counted))[np.minimum(bounds[:-1], len(skipped))]
    inside = counted - np.repeat(before, stretches)[: len(skipped)]
    return np.where(skipped, first - 1, first - 1 + inside)


def _fill_up(lengths: NDArray[np.int64], total: int | None, fillers: int) -> tuple[NDArray[np.int64], int]:
    """(lengths of all stretches, tokens of filling): `fillers` stretches of nearly equal length after the rows."""
    if total is None:
        return lengths, 0
    spare = total - int(lengths.sum())
    assert spare >= fillers, f"{int(lengths.sum())} tokens and {fillers} of filling do not fit into {total}"
    filling = np.full(fillers, spare // fillers, dtype=np.int64)
    filling[: spare % fillers] += 1
    return np.concatenate([lengths, filling]), spare


Tokens = dict[str, list[npt.NDArray[Any]]]


@dataclass(frozen=True)
class Packing:
    """Collates rows into one packed row: no padding at all."""

    first_position: int
    keys: tuple[str, ...]
    skipped_id: int | None = None
    """A token that positions are not counted over."""
    filled: bool = False
    """Fill batches up to one of few sizes, for steps that are captured once for each."""
    finest: int = 64
    """The smallest bound of the longest stretch in such a batch."""

    def __call__(self, tokens: Tokens) -> dict[str, Any]:
        """Model inputs of a packed batch."""
        size: dict[str, Any] = {}
        if self.filled:
            lengths = [len(ids) for ids in tokens["input_ids"]]
            total, longest, fillers = bucket_of(sum(lengths), max(lengths), self.finest)
            size = {"total": total, "longest": longest, "fillers": fillers, "dtype": np.int32}
        size |= {"first_position": self.first_position, "skipped_id": self.skipped_id}
        return dict(pack(tokens, keys=self.keys, **size))

    def split(self, batch: Batch, limit: int) -> list[Batch]:
        """Packed batches of at most `limit` rows each, from one that did not fit in memory."""
        whole = range(len(batch))
        return [collated(batch, self, whole[at : at + limit]) for at in range(0, len(batch), limit)]


def is_packed(batch: Batch) -> bool:
    """Whether its rows lie one after the other."""
    return isinstance(batch.inputs.get("layout"), Layout)


def tokens_of(batch: Batch) -> Tokens:
    """The rows of a packed or padded micro-batch, as they were before it was collated."""
    named = {n: v for n, v in batch.inputs.items() if n in ("input_ids", "token_type_ids")}
    if not is_packed(batch):
        masks = batch.inputs["attention_mask"].bool()
        return {n: [row[mask].cpu().numpy() for row, mask in zip(v, masks, strict=True)] for n, v in named.items()}
    layout: Layout = batch.inputs["layout"]
    places = layout.order.tolist()
    starts = [int(at) for at in layout.starts[layout.order].tolist()]
    spans = [slice(start, start + layout.lengths[i]) for start, i in zip(starts, places, strict=True)]
    return {n: [v[0, span].cpu().numpy() for span in spans] for n, v in named.items()}


def collated(
    batch: Batch, collate: Collate, rows: range | list[int] | None = None, longest: int | None = None
) -> Batch:
    """A micro-batch of these of its rows (all by default), collated in this way; every second row cut to `longest` tokens."""
    chosen = list(range(len(batch)) if rows is None else rows)
    tokens = {n: [some[i] for i in chosen] for n, some in tokens_of(batch).items()}
    if longest is not None:
        tokens = {n: [x[:longest] if i % 2 else x for i, x in enumerate(some)] for n, some in tokens.items()}
    inputs = collate(tokens)
    size = sum(len(ids) for ids in tokens["input_ids"])
    return Batch(
        inputs,
        None if batch.labels is None else batch.labels[torch.as_tensor(chosen)],
        np.asarray(batch.rows)[chosen],
        size,
        int(inputs["input_ids"].numel()),
        getattr(collate, "split", None),
    )


def bucket_of(tokens: int, longest: int, finest: int = 64) -> tuple[int, int, int]:
    """(tokens to fill a packed batch up to, bound of its longest stretch, stretches of filling).

    Few shapes, about an eighth of filling at most, no stretch of it longer than rows are. `finest` is the smallest bound: 128
    makes fewer shapes, where attention does not pay for the difference.
    """
    step = max(64, 2 ** (tokens.bit_length() - (5 if tokens > 4096 else 4)))
    fillers = step // 64
    total = ((tokens + fillers - 1) // step + 1) * step
    multiple = finest if longest <= 128 else 128
    return total, max(128 if step > 64 else finest, -(-longest // multiple) * multiple), fillers


class LengthBuckets:
    """The strategy as applied to one run: whether batches are padded to one of few widths."""

    def __init__(self) -> None:
        self.on = True

    def enable(self) -> None:
        """Few widths."""
        self.on = True

    def disable(self) -> None:
        """Each batch as wide as its longest row."""
        self.on = False


@dataclass(frozen=True)
class BucketPadding(Padding):
    """Pads to a multiple that grows with the length, never beyond the longest row of the data: positions end somewhere."""

    longest: int = 0
    switch: LengthBuckets = field(default_factory=LengthBuckets)

    def width(self, longest: int) -> int:
        """Columns of a batch whose longest row has `longest` tokens."""
        if not self.switch.on:
            return longest
        multiple = 16 if longest <= 128 else 32 if longest <= 256 else 64
        return max(longest, min(-(-longest // multiple) * multiple, self.longest))


def bucketed(padding: Padding, longest: int) -> BucketPadding:
    """The same padding, in buckets."""
    return BucketPadding(padding.pad_token_id, padding.pad_token_type_id, padding.side, longest=longest)


def is_too_wide(batch: Batch) -> bool:
    """Whether a padded batch has columns that no row reaches."""
    mask = batch.inputs.get("attention_mask")
    return isinstance(mask, torch.Tensor) and not (bool(mask[:, 0].any()) and bool(mask[:, -1].any()))


def why_not_captured(model: nn.Module) -> str | None:
    """Why padded steps of this model are not captured; None where they can be tried.

    Code of the user's may do what a replay would not repeat. transformers' own does so in two ways: it waits for the device,
    which ends the capture, or it draws on the host, which `no_host_randomness` notices.
    """
    if not type(model).__module__.startswith("transformers.models."):
        return f"{type(model).__name__} is not a class of transformers, and may do on the host what a replay would leave out"
    if getattr(model, "is_gradient_checkpointing", False):
        return "gradient checkpointing repeats layers"
    return why_not_original(model, ())


@contextmanager
def no_host_randomness() -> Iterator[None]:
    """Raises a RuntimeError if random numbers were drawn on the host inside: a captured step would never draw them again."""
    before = _host_generators()
    yield
    if _host_generators() != before:
        raise RuntimeError("the step draws random numbers on the host")


def _host_generators() -> tuple[bytes, str, str]:
    """Where Python's, NumPy's and torch's generators on the host stand."""
    return torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), repr(np.random.get_state())
