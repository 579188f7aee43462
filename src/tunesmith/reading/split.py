"""A validation split taken from train (seeded, stratified, and no sentence on both sides where that is possible), a smaller
sample of a split that keeps the shares of its labels, and a column that assigns each row of one file to a split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from tunesmith.errors import ConfigError, DataError, did_you_mean
from tunesmith.labels import Task
from tunesmith.reading.source import Ints, Part, Source, number_sentences

MAX_GROUPED_ROWS = 200_000
"""Above this rows are drawn one by one: grouping is a Python loop, about 1 s for each 200,000 rows."""

_SCORE_BINS = 10


def draw_split(
    part: Part, *, val_fraction: float, seed: int, task: Task, text_columns: Sequence[str] = ()
) -> tuple[Ints, Ints]:
    """Row numbers (train, validation), both ascending. Every label with two rows or more is on both sides.

    With `text_columns`, rows that share a sentence stay on one side, as far as the size of the split allows.
    """
    if not 0.0 < val_fraction < 1.0:
        raise ConfigError(f"--validation_split_fraction {val_fraction} is not between 0 and 1")
    strata = strata_of(part, task)
    quota = _quota(strata, val_fraction)
    if quota.sum() == 0:
        raise DataError(
            f"{len(part)} rows are too few to set a validation split aside: no label has two rows",
            fix="Give --validation_file, or --validation_split_fraction 0 to train without one.",
        )
    chosen = _draw(strata, _groups(part, text_columns), quota, np.random.default_rng(seed))
    held_out = np.zeros(len(part), dtype=bool)
    held_out[chosen] = True
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def draw_fold(part: Part, *, folds: int, fold: int, task: Task, text_columns: Sequence[str] = ()) -> tuple[Ints, Ints]:
    """(the other rows, the rows of fold `fold` of 1 to `folds`), ascending. Every row is in one fold, the same each time.

    Labels are spread evenly; rows that share a sentence are in one fold.
    """
    strata = strata_of(part, task)
    if len(part) < folds:
        raise DataError(f"{len(part)} rows cannot be split into {folds} folds", fix="Give fewer --folds.")
    groups = _groups(part, text_columns)
    order = np.random.default_rng(0).permutation(len(part))
    members: dict[int, list[int]] = {}
    for row in order.tolist():
        members.setdefault(row if groups is None else int(groups[row]), []).append(row)
    counts = np.zeros((folds, int(strata.max()) + 1), dtype=np.int64)
    home = np.empty(len(part), dtype=np.int64)
    for rows in sorted(members.values(), key=len, reverse=True):
        need = np.bincount(strata[rows], minlength=counts.shape[1])
        filled = counts @ need
        best = int(np.lexsort((counts.sum(axis=1), filled))[0])
        counts[best] += need
        home[rows] = best
    return np.flatnonzero(home != fold - 1), np.flatnonzero(home == fold - 1)


def strata_of(part: Part, task: Task) -> Ints:
    """A small number for each row: rows with the same one are drawn in proportion."""
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
    """Rows to hold out of each stratum: the rounded share, at least one of two, never all."""
    sizes = np.bincount(strata)
    wanted = np.floor(sizes * fraction + 0.5).astype(np.int64)
    quota: Ints = np.where(sizes >= 2, np.clip(wanted, 1, sizes - 1), 0)
    return quota


def _groups(part: Part, text: Sequence[str]) -> Ints | None:
    """A number for each row, the same for rows linked by a sentence; None where each row stands alone."""
    if not text or len(part) > MAX_GROUPED_ROWS:
        return None
    numbers = number_sentences({"train": part}, text)["train"]
    parent = list(range(int(numbers.max()) + 1))

    def root(node: int) -> int:
        while parent[node] != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    if numbers.shape[1] == 2:
        for first, second in numbers.tolist():
            parent[root(first)] = root(second)
    roots = np.fromiter((root(node) for node in numbers[:, 0].tolist()), dtype=np.int64, count=len(numbers))
    groups: Ints = np.unique(roots, return_inverse=True)[1].astype(np.int64)
    return None if groups.max() + 1 == len(groups) else groups


def _draw(strata: Ints, groups: Ints | None, quota: Ints, rng: np.random.Generator) -> list[int]:
    """Row numbers of the validation split."""
    left = quota.copy()
    order = rng.permutation(len(strata))
    if groups is None:
        return _draw_rows(order, strata, left)
    members: dict[int, list[int]] = {}
    for row in order.tolist():
        members.setdefault(int(groups[row]), []).append(row)
    chosen: list[int] = []
    for rows in members.values():
        need = np.bincount(strata[rows], minlength=len(left))
        if (need <= left).all():
            left -= need
            chosen.extend(rows)
        if not left.any():
            break
    # A label that only occurs in groups larger than its share: single rows rather than an evaluation without the label.
    missing = left * ((quota - left) == 0)
    return chosen + _draw_rows(order, strata, missing)


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


NAMES = ("split", "set", "subset", "partition", "fold")
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "devel", "development"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""What a cell says -> our split."""


def follow_split_column(sources: Mapping[str, Source], asked: str | None, notes: list[str]) -> dict[str, Source]:
    """The splits of one file by its own column: `asked`, or one with a usual name whose cells are all names of splits.

    "none" follows no column. Where a validation or test file is given, or cells are something else, nothing is followed.
    """
    train = sources.get("train")
    if train is None or asked == "none":
        return dict(sources)
    if asked is not None and asked not in train.column_names:
        problem = f"--split_column_name: no column {asked!r}; found: {', '.join(train.column_names)}"
        raise DataError(problem, where=train.origin, fix=did_you_mean(asked, train.column_names))
    if asked is not None and len(sources) > 1:
        raise ConfigError("--split_column_name is about one file with all rows", fix="Give --train_file alone.")
    name = asked or next((n for n in train.column_names if n.lower().strip() in NAMES), None)
    if name is None:
        return dict(sources)
    cells = [str(cell).strip().lower() for cell in train.dataset.with_format(None)[name]]
    found = dict.fromkeys(cells)
    unknown = [cell for cell in found if cell not in SPLITS]
    if unknown or "train" not in {SPLITS.get(cell) for cell in found} or len(sources) > 1:
        return _leave(sources, name, found, unknown, notes, asked=asked is not None)
    if len({SPLITS[cell] for cell in found}) == 1:
        return dict(sources)
    rows: dict[str, list[int]] = {split: [] for split in ("train", "validation", "test")}
    for row, cell in enumerate(cells):
        rows[SPLITS[cell]].append(row)
    counts = ", ".join(f"{len(rows[split]):,} {split}" for split in rows if rows[split])
    notes.append(
        f"Column {name!r} gives the split of each row: {counts} rows (--split_column_name none: not followed)."
    )
    return {split: _select(train, split, picked) for split, picked in rows.items() if picked}


def _leave(
    sources: Mapping[str, Source],
    name: str,
    found: Mapping[str, None],
    unknown: list[str],
    notes: list[str],
    *,
    asked: bool,
) -> dict[str, Source]:
    """The sources as they are, with a sentence where the column looks like splits."""
    if asked:
        what = f"has {', '.join(map(repr, unknown[:4]))}" if unknown else "has no train rows"
        fix = "Its cells say train, validation (valid, val, dev) or test."
        raise DataError(f"column {name!r} {what}", where=sources["train"].origin, fix=fix)
    if len(found) > 1 and any("train" in cell for cell in found):
        shown = ", ".join(sorted(found)[:4])
        notes.append(f"Column {name!r} ({shown}) is not followed: all rows of the file are training data.")
    return dict(sources)


def _select(source: Source, split: str, rows: list[int]) -> Source:
    return replace(source, name=split, dataset=source.dataset.select(rows), table_file=None)
