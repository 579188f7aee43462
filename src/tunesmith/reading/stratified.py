"""A smaller sample of a split that keeps the shares of its labels, drawn with a seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tunesmith.labels import Task
from tunesmith.reading.part import Ints, Part
from tunesmith.reading.split import strata_of


def sample_part(part: Part, count: int | None, *, task: Task, seed: int) -> Part:
    """The part cut to `count` rows, in file order: every label keeps its share, and one row at least where that is possible."""
    if count is None or count >= len(part):
        return part
    strata = strata_of(part, task)
    quota = _share_out(np.bincount(strata), count)
    order = np.random.default_rng(seed).permutation(len(part))
    chosen = [order[strata[order] == k][: quota[k]] for k in range(len(quota))]
    rows = np.sort(np.concatenate(chosen))
    return replace(part, rows=rows if part.rows is None else part.rows[rows])


def _share_out(sizes: Ints, count: int) -> Ints:
    """Whole numbers that sum to `count`: shares rounded down, one for each where there is room, then the largest rests."""
    exact = sizes * (count / sizes.sum())
    quota: Ints = np.floor(exact).astype(np.int64)
    if count >= (sizes > 0).sum():
        quota = np.where((quota == 0) & (sizes > 0), 1, quota)
    while quota.sum() > count:
        quota[np.argmax(quota - exact + (quota > 1) * 1e-9 - (quota <= 1) * 1e9)] -= 1
    for k in np.argsort(quota - exact, kind="stable"):
        if quota.sum() == count:
            break
        quota[k] += int(quota[k] < sizes[k])
    return quota
