r"""Three or more columns as one text per row: `title: Great phone\nbody: ...\nprice: 12.5`.

Training and every kind of prediction call `render_rows`, so that a model always reads what it was trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, time
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.errors import DataError

if TYPE_CHECKING:
    from tunesmith.data.rows import Columns, Part, Source
    from tunesmith.labels import LabelMap

LINE = "\n"
"""Ends a column in a rendered text; line breaks in cells become spaces."""
FEWEST_ROWS = 10
"""With fewer rows, a column can match the labels by chance."""
FIRST_ROWS = 1_000
"""All rows of a column are compared with the labels only if these match."""


def input_columns(names: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that the model reads: these one or two, or the column that three or more are rendered into."""
    return tuple(names) if len(names) <= 2 else (",".join(names),)


def cell_text(value: Any) -> str:
    """Return a cell as text: numbers without a final .0, true or false, ISO dates; empty if it is missing (None or NaN).

    Raises a TypeError for lists and objects.
    """
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, (list, tuple, set, dict, bytes, np.ndarray)):
        raise TypeError(f"{type(value).__name__}, expected text, a number, true/false or a date")
    if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    return value.isoformat() if isinstance(value, (datetime, date, time)) else str(value)


def render_rows(names: Sequence[str], columns: Sequence[Sequence[Any]], where: str = "") -> list[str]:
    """Return one text per row with a line `name: cell` for each column. Missing and blank cells are omitted."""
    heads = [" ".join(name.split()) for name in names]
    texts = []
    for number, row in enumerate(zip(*columns, strict=True), start=1):
        lines = []
        for name, head, value in zip(names, heads, row, strict=True):
            try:
                cell = " ".join(cell_text(value).split())
            except TypeError as error:
                raise DataError(f"column {name!r} contains {error}", where=f"{where} row {number}".strip()) from None
            if cell:
                lines.append(f"{head}: {cell}")
        texts.append(LINE.join(lines))
    return texts


def is_rendered(text: str, names: Sequence[str]) -> bool:
    """Return whether a text consists of lines as `render_rows` writes them for these columns."""
    heads = tuple(f"{' '.join(name.split())}: " for name in names)
    return all(line.startswith(heads) for line in text.split(LINE))


def render_source(source: Source, names: Sequence[str]) -> Source:
    """Return the source with the column of `input_columns` added, if there are three or more names."""
    if len(names) <= 2:
        return source
    import pyarrow as pa

    from tunesmith.data.labels import add_column

    texts: list[str] = []
    for _, table in source.scan(names):
        texts += render_rows(names, [table.column(name).to_pylist() for name in names], source.origin)
    return source.with_cells(add_column(source.dataset, ",".join(names), pa.array(texts, pa.large_string())))


def refuse_label_copies(part: Part, columns: Columns, labels: LabelMap) -> None:
    """Refuse one of several columns if it equals the labels or renames them: the model would read the answer."""
    names = columns.named
    ids = part.labels().to_pylist()
    if len(ids) < FEWEST_ROWS or len(names) == 1 or len(set(ids)) == 1:
        return
    targets = [cell_text(value) for value in ids] if len(labels) == 1 else list(map(str, ids))
    cells = part.source.dataset.select_columns(list(names)).with_format(None)
    for name in names:
        if all(_is_copy(cells[:count][name], targets[:count], len(labels)) for count in (FIRST_ROWS, len(targets))):
            problem = f"column {name!r} duplicates the label in all {len(targets):,} rows"
            fix = f"Omit it: --text_column_names {','.join(other for other in names if other != name)}"
            raise DataError(problem, where=part.source.where(0, name), fix=fix)


def _is_copy(values: Sequence[Any], targets: Sequence[str], classes: int) -> bool:
    cells = list(map(cell_text, values))
    pairs = set(zip(cells, targets, strict=True))
    return cells == targets or (classes > 1 and len(pairs) == len(set(cells)) == len(set(targets)))
