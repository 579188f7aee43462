"""Sentences as numbers: equal after folding case and spaces = the same number. What split and audit compare by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tunesmith.errors import DataError
from tunesmith.reading.part import Part
from tunesmith.reading.source import Source


def number_sentences(parts: Mapping[str, Part], text: Sequence[str]) -> dict[str, np.ndarray[Any, Any]]:
    """For each split an int array (rows, texts) of sentence numbers, comparable between splits and columns."""
    import pyarrow as pa

    chunks: list[Any] = []
    shapes: list[tuple[str, int]] = []
    for split, part in parts.items():
        for name in text:
            chunks.extend(_fold(table.column(name).combine_chunks()) for table in part.scan([name]))
            shapes.append((split, len(part)))
    codes = pa.chunked_array(chunks, pa.large_string()).combine_chunks().dictionary_encode().indices
    flat = codes.to_numpy(zero_copy_only=False)
    columns: dict[str, list[np.ndarray[Any, Any]]] = {split: [] for split in parts}
    at = 0
    for split, rows in shapes:
        columns[split].append(flat[at : at + rows])
        at += rows
    return {split: np.stack(column, axis=1) for split, column in columns.items()}


def _fold(cells: Any) -> Any:
    """ " ".join(text.lower().split()), for a whole column."""
    import pyarrow as pa
    import pyarrow.compute as pc

    words = pc.utf8_split_whitespace(pc.utf8_trim_whitespace(pc.utf8_lower(cells)))
    return pc.binary_join(words, pa.scalar(" ", words.type.value_type)).cast(pa.large_string())


def check_texts(source: Source, text: Sequence[str], *, allow_empty_text: bool) -> None:
    """Refuses a missing text, and one that is empty or only spaces unless that is allowed; each text of a pair counts."""
    import pyarrow.compute as pc

    for start, table in source.scan(list(text)):
        for name in text:
            cells = table.column(name).combine_chunks()
            if cells.null_count:
                row = start + pc.index(pc.is_null(cells), True).as_py()
                raise DataError(
                    "the text is missing", where=source.where(row, name), fix="Fill it in or remove the row."
                )
            if allow_empty_text:
                continue
            empty = pc.equal(pc.utf8_length(pc.utf8_trim_whitespace(cells)), 0)
            if pc.any(empty).as_py():
                row = start + pc.index(empty, True).as_py()
                fix = "Fill it in or remove the row; --allow_empty_text keeps it."
                raise DataError("the text is empty", where=source.where(row, name), fix=fix)
