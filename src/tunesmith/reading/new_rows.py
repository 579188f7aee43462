"""Rows for a trained model: to predict, or to evaluate it on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunesmith.labels import LabelMap, Task
from tunesmith.reading.columns import Columns, require_text
from tunesmith.reading.label_ids import encode_labels, unfold_labels
from tunesmith.reading.label_names import merge_variants
from tunesmith.reading.read import read_source
from tunesmith.reading.source import Source, check_texts

if TYPE_CHECKING:
    from datasets import Dataset


def read_unlabelled(
    source: Any,
    *,
    text: Sequence[str],
    name: str = "input",
    allow_empty_text: bool = False,
    **reading: Any,
) -> Source:
    """Rows to predict, with all their columns (`Source.column_names`); `text` must be there and filled in."""
    rows = read_source(source, name=name, **reading)
    for column in text:
        require_text(rows, column)
    check_texts(rows, text, allow_empty_text=allow_empty_text)
    return rows


def read_labelled(
    source: Any,
    *,
    columns: Columns,
    labels: LabelMap,
    name: str = "test",
    allow_empty_text: bool = False,
    merge_label_variants: bool = False,
    **reading: Any,
) -> Dataset:
    """Rows to evaluate a trained model on: "labels" by the names of the model's own map; -1 stays unlabelled."""
    rows = read_unlabelled(source, text=columns.text, name=name, allow_empty_text=allow_empty_text, **reading)
    names = None if labels.task is Task.REGRESSION else labels.names
    rows = unfold_labels({name: rows}, columns, None)[name]
    if merge_label_variants and names is not None and columns.label is not None:
        rows = merge_variants({name: rows}, columns.label, [], names=names)[name]
    _, splits = encode_labels({name: rows}, columns, label_names=names, allow_single_label=True)
    return splits[name]
