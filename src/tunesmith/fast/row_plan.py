"""How the tokens of a packed batch are laid out for the attention on a CPU: head by head, similar lengths side by side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

CALLS = 8192
"""Scores that take as long as the calls for one more cluster, forward and backward."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Stretches that share products, each laid out as long as the longest of them."""

    asked: slice
    """Where the queries lie among those of all clusters."""
    known: slice
    """The same of keys and of values."""
    weights: slice
    count: int
    queries: int
    keys: int
    mask: torch.Tensor | None
    """float32, added to scores (count, heads, queries, keys): minus infinity where no key is to be seen; None: all are."""


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Places of tokens and heads in the order (cluster, stretch, head, token of the stretch)."""

    clusters: tuple[Cluster, ...]
    into: torch.Tensor
    """int64 (places): token x heads + head of what lies there; beyond the end of a stretch it is the stretch's last token."""
    back: torch.Tensor
    """int64 (tokens x heads): the place of each."""
    real: torch.Tensor | None
    """float32 (places, 1): 0 beyond the end of a stretch, else 1; None where no stretch has such places."""

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """(places, size) from (tokens, heads, size)."""
        return x.reshape(-1, x.shape[-1]).index_select(0, self.into)

    def spread_gradient(self, x: torch.Tensor) -> torch.Tensor:
        """The same, with zero beyond the end of a stretch."""
        found = self.spread(x)
        return found if self.real is None else found.mul_(self.real)

    def gather(self, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """(tokens, heads, size) from (places, size); zero for tokens of no stretch."""
        found, missing = x.index_select(0, self.back), shape[0] * shape[1] - self.back.shape[0]
        if missing:
            found = torch.cat([found, found.new_zeros(missing, shape[2])])
        return found.view(shape)


@lru_cache(maxsize=8)
def plan_rows(lengths: tuple[int, ...], heads: int, first_only: bool, window: int | None = None) -> RowPlan:
    """For stretches of these lengths; all layers of a batch share it."""
    starts, clusters = np.concatenate(([0], np.cumsum(lengths))), list[Cluster]()
    into, real = list[NDArray[np.int64]](), list[NDArray[np.bool_]]()
    known = weights = 0
    for first, end in _bounds(lengths, heads, first_only):
        sizes, count = np.array(lengths[first:end])[:, None], end - first
        keys = int(sizes.max())
        place, queries = np.arange(keys), 1 if first_only else keys
        token, there = starts[first:end, None] + np.minimum(place, sizes - 1), place < sizes
        into.append((token[:, None] * heads + np.arange(heads)[:, None]).ravel())
        real.append(np.repeat(there[:, None], heads, axis=1).ravel())
        k_at = slice(known, known + count * heads * keys)
        q_at = slice(first * heads, end * heads) if first_only else k_at
        w_at = slice(weights, weights + count * heads * queries * keys)
        clusters.append(Cluster(q_at, k_at, w_at, count, queries, keys, _mask(there, queries, window)))
        known, weights = k_at.stop, w_at.stop
    source, is_real = np.concatenate(into), np.concatenate(real)
    back = np.empty(starts[-1] * heads, dtype=np.int64)
    back[source[is_real]] = np.flatnonzero(is_real)
    shorter = None if is_real.all() else torch.from_numpy(is_real.astype(np.float32)).unsqueeze(1)
    return RowPlan(tuple(clusters), torch.from_numpy(source), torch.from_numpy(back), shorter)


def _bounds(lengths: tuple[int, ...], heads: int, first_only: bool) -> list[tuple[int, int]]:
    """(first, end) of the stretches of each cluster. A packed batch is sorted by length, so neighbours are similar."""
    found, longest = list[tuple[int, int]](), 0
    for number in reversed(range(len(lengths))):
        keys = lengths[number]
        spare = (longest - keys) * heads * (1 if first_only else longest + keys)
        if found and found[-1][0] == number + 1 and 0 < keys <= longest and spare < CALLS:
            found[-1] = (number, found[-1][1])
        elif keys:
            found.append((number, number + 1))
            longest = keys
    return found[::-1]


def _mask(there: NDArray[np.bool_], queries: int, window: int | None) -> torch.Tensor | None:
    inside = torch.from_numpy(there)
    hidden, far = ~inside[:, None, None], too_far(queries, there.shape[1], window)
    if far is not None:  # what lies beyond the end of a stretch, and further than the window, would see no key at all
        hidden = (hidden | far) & inside[:, None, :queries, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf) if bool(hidden.any()) else None


def too_far(queries: int, keys: int, window: int | None) -> torch.Tensor | None:
    """bool (queries, keys): further apart than `window`; None where nothing is."""
    if window is None or keys - 1 <= window:
        return None
    places = torch.arange(keys)
    return (places[:queries, None] - places).abs() > window
