"""A column that says which split a row belongs to: one file becomes train, validation and test, with a line that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tunesmith.errors import ConfigError, DataError, did_you_mean
from tunesmith.reading.source import Source

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
    notes.append(f"Column {name!r} says the split of each row: {counts} rows (--split_column_name none: not followed).")
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
