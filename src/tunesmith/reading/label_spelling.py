"""Labels that differ only in case, spaces, Unicode form or invisible characters: one question, or one class when asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tunesmith.errors import DataError
from tunesmith.reading.label_alikes import alike
from tunesmith.reading.label_survey import is_list_type, survey_labels
from tunesmith.reading.ready_commands import train_with
from tunesmith.reading.source import Source

SHOWN = 4


def spelling_of(counts: Mapping[str, int]) -> dict[str, str]:
    """Each label that has a more frequent one like it -> that one, without spaces around it."""
    by_key: dict[str, str] = {}
    for name in sorted(counts, key=lambda n: -counts[n]):
        by_key.setdefault(alike(name), name.strip() or name)
    return {name: by_key[alike(name)] for name in counts if by_key[alike(name)] != name}


def merge_variants(
    sources: Mapping[str, Source], label: str, notes: list[str], *, names: Sequence[str] = ()
) -> dict[str, Source]:
    """The sources with one spelling of each label: that of `names`, else the most frequent one of train."""
    labelled = {split: source for split, source in sources.items() if label in source.column_names}
    counts = {split: survey_labels(source, label).counts for split, source in labelled.items()}
    every = {name: 0 for found in counts.values() for name in found} | counts.get("train", {})
    most = 1 + max(every.values(), default=0)
    changed = spelling_of(every | dict.fromkeys(names, most))
    if changed:
        shown = ", ".join(f"{old!r} as {new!r}" for old, new in list(changed.items())[:SHOWN])
        more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        notes.append(f"Labels that differ only in case, spaces or form are one, as asked: {shown}{more}.")
    return {**sources, **{split: _respell(source, label, changed) for split, source in labelled.items()}}


def refuse_variants(train: Source, column: str, counts: Mapping[str, int], first_row: Mapping[str, int]) -> None:
    """Refuses labels that differ only in case or spaces, all of them at once, with the two ways out."""
    by_fold: dict[str, list[str]] = {}
    for name in sorted(counts, key=lambda n: -counts[n]):
        by_fold.setdefault(" ".join(name.casefold().split()), []).append(name)
    pairs = [(group[0], other) for group in by_fold.values() for other in group[1:]]
    if not pairs:
        return
    others = [f"{b!r} from {a!r}" for a, b in pairs[1:SHOWN]]
    shown = ", ".join([f"{pairs[0][1]!r} differs from {pairs[0][0]!r}", *others])
    more = f" and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
    merge = train_with(train.origin, "--merge_label_variants")
    raise DataError(
        f"{shown} only in case or spaces{more}",
        where=train.where(first_row[pairs[0][1]], column),
        fix=f"If they are one label: {merge}   (if not: list both in --label_names)",
    )


def _respell(source: Source, column: str, changed: Mapping[str, str]) -> Source:
    from datasets import Dataset

    field = source.dataset.features.arrow_schema.field(column)
    if not changed or "string" not in str(field.type):
        return source
    table = source.dataset.with_format("arrow")[:]
    cells: Any = table.column(column).to_pylist()
    if is_list_type(field.type):
        new = [None if row is None else list(dict.fromkeys(changed.get(v, v) for v in row)) for row in cells]
    else:
        new = [changed.get(value, value) for value in cells]
    import pyarrow as pa

    at = table.column_names.index(column)
    return replace(source, dataset=Dataset(table.set_column(at, column, pa.array(new, field.type))), table_file=None)
