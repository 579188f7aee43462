"""Which rows are in which split: as the user names them (files, objects, a saved folder, a Hub dataset, a GLUE task), as a column
of one file says, or by a draw from train: seeded, stratified, and no sentence on both sides where that is possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tunesmith.data.rows import Ints, Part
from tunesmith.errors import ConfigError, DataError
from tunesmith.labels import Task

MAX_GROUPED_ROWS = 200_000
"""Above this rows are drawn one by one: grouping is a Python loop, about 1 s for each 200,000 rows."""

_SCORE_BINS = 10


def draw_split(
    part: Part, *, val_fraction: float, seed: int, task: Task, text_columns: Sequence[str] = ()
) -> tuple[Ints, Ints, int]:
    """Row numbers (train, validation), both ascending. Every label with two rows or more is on both sides. With `text_columns`,
    rows that share a sentence stay on one side where that is possible; the last number counts the validation rows that do not.
    """
    if not 0.0 < val_fraction < 1.0:
        raise ConfigError(f"--validation_split_fraction {val_fraction} is not between 0 and 1")
    strata = strata_of(part, task)
    quota = _quota(strata, val_fraction)
    if quota.sum() == 0:
        fix = "Set --validation_file, or --validation_split_fraction 0 to train without one."
        raise DataError(f"{len(part)} rows are too few to set a validation split aside: no label has two rows", fix=fix)
    groups = _groups(part, text_columns)
    held_out = np.sort(_draw(strata, groups, quota, np.random.default_rng(seed)))
    train = np.setdiff1d(np.arange(len(part)), held_out)
    return train, held_out, 0 if groups is None else int(np.isin(groups[held_out], groups[train]).sum())


def draw_fold(part: Part, *, folds: int, fold: int, task: Task, text_columns: Sequence[str] = ()) -> tuple[Ints, Ints]:
    """(the other rows, the rows of fold `fold` of 1 to `folds`), ascending. Every row is in one fold, the same each time.

    Labels are spread evenly; rows that share a sentence are in one fold.
    """
    strata = strata_of(part, task)
    if len(part) < folds:
        raise DataError(f"{len(part)} rows cannot be split into {folds} folds", fix="Use fewer --folds.")
    groups = _groups(part, text_columns)
    order = np.random.default_rng(0).permutation(len(part))
    members = _members(order, np.arange(len(part)) if groups is None else groups)
    counts = np.zeros((folds, int(strata.max()) + 1), dtype=np.int64)
    home = np.empty(len(part), dtype=np.int64)
    for rows in sorted(members, key=len, reverse=True):
        need = np.bincount(strata[rows], minlength=counts.shape[1])
        filled = counts @ need
        best = int(np.lexsort((counts.sum(axis=1), filled))[0])
        counts[best] += need
        home[rows] = best
    return np.flatnonzero(home != fold - 1), np.flatnonzero(home == fold - 1)


def strata_of(part: Part, task: Task) -> Ints:
    """The stratum of each row, as a small number."""
    if task is Task.MULTILABEL:
        return np.zeros(len(part), dtype=np.int64)
    labels = part.labels().to_numpy(zero_copy_only=False)
    if task is Task.REGRESSION:
        bins = min(_SCORE_BINS, max(1, len(labels) // 20))
        edges = np.quantile(labels, np.linspace(0, 1, bins + 1)[1:-1])
        return np.asarray(np.searchsorted(edges, labels), dtype=np.int64)
    classes: Ints = np.unique(labels, return_inverse=True)[1].astype(np.int64)
    return classes


def _quota(strata: Ints, fraction: float) -> Ints:
    """Return the rows to hold out of each stratum: the rounded share, at least one of two, never all.

    If one row of each of many small classes would be more than twice the fraction, the largest classes have one.
    """
    sizes = np.bincount(strata)
    wanted = np.floor(sizes * fraction + 0.5).astype(np.int64)
    quota: Ints = np.where(sizes >= 2, np.clip(wanted, 1, sizes - 1), 0)
    if quota.sum() > max(2 * fraction * len(strata), 20):
        quota = np.minimum(_share_out(np.where(sizes >= 2, sizes, 0), round(fraction * len(strata))), sizes)
    return quota


def _groups(part: Part, text: Sequence[str]) -> Ints | None:
    """The group of each row: rows that share a sentence, also indirectly. None if each row is a separate group."""
    if not text or len(part) > MAX_GROUPED_ROWS:
        return None
    numbers = _number_sentences(part, text)
    same = numbers[:, 0]
    if numbers.shape[1] == 2:
        from scipy.sparse import coo_matrix
        from scipy.sparse.csgraph import connected_components

        size = int(numbers.max()) + 1
        links = coo_matrix((np.ones(len(numbers)), (numbers[:, 0], numbers[:, 1])), shape=(size, size))
        same = connected_components(links, directed=False)[1][same]
    groups: Ints = np.unique(same, return_inverse=True)[1].astype(np.int64)
    return None if groups.max() + 1 == len(groups) else groups


def _number_sentences(part: Part, text: Sequence[str]) -> Ints:
    """(rows, texts): the same number for sentences that are equal after folding case and spaces."""
    import pyarrow as pa

    cells = [_fold(table.column(name).combine_chunks()) for name in text for table in part.scan([name])]
    codes = pa.chunked_array(cells, pa.large_string()).combine_chunks().dictionary_encode().indices
    numbers: Ints = codes.to_numpy(zero_copy_only=False).reshape(len(text), len(part)).T
    return numbers


def _fold(cells: Any) -> Any:
    """ " ".join(text.lower().split()), for a whole column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(pc.utf8_lower(cells)))
    return pc.binary_join(words, pa.scalar(" ", words.type.value_type)).cast(pa.large_string())


def _members(order: Ints, groups: Ints) -> list[list[int]]:
    """The rows of each group, groups and rows in the order given."""
    members: dict[int, list[int]] = {}
    for row in order.tolist():
        members.setdefault(int(groups[row]), []).append(row)
    return list(members.values())


def _draw(strata: Ints, groups: Ints | None, quota: Ints, rng: np.random.Generator) -> list[int]:
    """Row numbers of the validation split."""
    left = quota.copy()
    order = rng.permutation(len(strata))
    if groups is None:
        return _draw_rows(order, strata, left)
    chosen: list[int] = []
    for rows in _members(order, groups):
        need = np.bincount(strata[rows], minlength=len(left))
        if (need <= left).all():
            left -= need
            chosen.extend(rows)
        if not left.any():
            break
    # Most rows of a label are in groups larger than its share: single rows rather than an evaluation by a few odd ones.
    return chosen + _draw_rows(order[~np.isin(order, chosen)], strata, left * (2 * left > quota))


def _draw_rows(order: Ints, strata: Ints, left: Ints) -> list[int]:
    chosen: list[int] = []
    for stratum in np.flatnonzero(left):
        rows = order[strata[order] == stratum]
        chosen.extend(rows[: left[stratum]].tolist())
    return chosen


def sample_part(part: Part, count: int | None, *, task: Task, seed: int) -> Part:
    """The part cut to `count` rows, in file order: every label keeps its share, and one row at least where that is possible."""
    if count is None or count >= len(part):
        return part
    strata = strata_of(part, task)
    quota = _share_out(np.bincount(strata), count)
    rows = np.sort(_draw_rows(np.random.default_rng(seed).permutation(len(part)), strata, quota))
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
