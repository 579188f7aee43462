"""Packed batches: the real tokens of all rows, one after the other, in one row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray


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
