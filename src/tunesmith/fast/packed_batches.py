"""Packed micro-batches of a run: made from rows, cut into smaller ones, and taken apart into rows again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tunesmith.fast.graphs import bucket_of
from tunesmith.fast.packing import Layout, pack
from tunesmith.tokens.batches import Batch, Collate

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
