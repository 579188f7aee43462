"""Labels of whole splits: lists for a multilabel task whatever the file holds, and what is to be said about the classes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tunesmith.labels import LabelMap, Task
from tunesmith.reading.columns import Columns, has_label, label_parts
from tunesmith.reading.label_cells import SEPARATOR_WORDS, find_separator, join_switches, unfold_cells
from tunesmith.reading.label_survey import is_list_type, survey_labels
from tunesmith.reading.part import Part
from tunesmith.reading.source import Source


def unfold_labels(sources: Mapping[str, Source], columns: Columns, separator: str | None) -> dict[str, Source]:
    """Sources in which the labels of a multilabel task are lists, whatever form they have in the files."""
    if columns.task is not Task.MULTILABEL or columns.label is None:
        return dict(sources)
    label = columns.label
    train = sources.get("train") or next(iter(sources.values()))
    if label_parts(train, label):
        return {k: join_switches(s, label_parts(s, label)) if has_label(s, label) else s for k, s in sources.items()}
    if is_list_type(train.dataset.features.arrow_schema.field(label).type):
        return dict(sources)
    found = SEPARATOR_WORDS.get(separator or "", separator) or find_separator(survey_labels(train, label).counts) or "|"
    return {k: unfold_cells(s, label, found) if label in s.column_names else s for k, s in sources.items()}


def notes_on_classes(parts: Mapping[str, Part], labels: LabelMap) -> list[str]:
    """Which class F1 is about, and each evaluated split without a row of some class: no score tells how well it is found."""
    if labels.task not in (Task.BINARY, Task.MULTICLASS):
        return []
    one = f"F1, precision and recall are those of the class {labels.positive_name!r}; --positive_label names another."
    notes = [one] if labels.positive_name is not None else []
    for split, part in parts.items():
        ids = np.asarray(part.labels())
        missing = [name for i, name in enumerate(labels.names) if not (ids == i).any()]
        if split.startswith(("validation", "test")) and missing and (ids >= 0).any():
            shown = ", ".join(map(repr, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
            notes.append(f"No {split} row has the label {shown}: {split} scores say nothing about it.")
    return notes
