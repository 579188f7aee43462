"""The whole path from what the user names to splits that are ready for tokenizing; and rows for a trained model: to predict, or
to evaluate it on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.data.bad_rows import BadRow, check_texts, sort_out
from tunesmith.data.columns import Columns, infer_columns, listed_names, require_text
from tunesmith.data.label_ids import encode_labels, notes_on_classes
from tunesmith.data.read import read_source
from tunesmith.data.row_cache import release_pages
from tunesmith.data.source import Part, Source, fingerprint_parts
from tunesmith.data.split import MAX_GROUPED_ROWS, draw_fold, draw_split, gather_sources, sample_part
from tunesmith.errors import ConfigError
from tunesmith.findings import Finding
from tunesmith.labels import LabelMap, Task

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class DataBundle:
    """Splits with the column "labels" added; `notes` are sentences about the decisions made."""

    splits: dict[str, Dataset]
    columns: Columns
    labels: LabelMap
    notes: tuple[str, ...]
    fingerprint: str
    split_fingerprints: dict[str, str]
    parts: dict[str, Part]
    names_given: bool = False
    """Whether the user listed the labels."""
    findings: tuple[Finding, ...] = ()
    """The findings of the audit; reading itself has none."""
    bad_rows: tuple[BadRow, ...] = ()
    """Rows that were left out because `skip_bad_rows` asked for it."""


def load_data(
    *,
    train_file: str | Path | None = None,
    validation_file: str | Path | None = None,
    test_file: str | Path | None = None,
    train_data: Any = None,
    validation_data: Any = None,
    test_data: Any = None,
    task_name: str | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    text_column_names: str | Sequence[str] | None = None,
    label_column_name: str | None = None,
    label_names: str | Sequence[str] | None = None,
    do_regression: bool | None = None,
    validation_split_fraction: float = 0.1,
    fold: tuple[int, int] | None = None,
    seed: int = 42,
    max_train_samples: int | None = None,
    max_eval_samples: int | None = None,
    max_predict_samples: int | None = None,
    allow_single_label: bool = False,
    allow_empty_text: bool = False,
    labels_file: str | Path | None = None,
    label_separator: str | None = None,
    positive_label: str | None = None,
    merge_label_variants: bool = False,
    skip_bad_rows: bool = False,
    split_column_name: str | None = None,
    split_names: Mapping[str, str] | None = None,
    hub_options: Mapping[str, Any] | None = None,
    head_names: Sequence[str] = (),
    **reading: Any,
) -> DataBundle:
    """Reads, checks, encodes and splits. Without a validation split, a share of train is taken, or `fold` (k, of n)."""
    given = _prefer((train_data, validation_data, test_data), (train_file, validation_file, test_file))
    read = partial(read_source, skip_bad_rows=skip_bad_rows, **reading)
    named: dict[str, Any] = {"task_name": task_name, "dataset_name": dataset_name, "split_names": split_names or {}}
    named |= {"dataset_config_name": dataset_config_name, "split_column_name": split_column_name}
    sources, notes = gather_sources(given, **named, read=read, hub_options=hub_options or {})
    asked: dict[str, Any] = {"text_column_names": text_column_names, "label_column_name": label_column_name}
    asked |= {"task_name": task_name, "do_regression": do_regression, "label_separator": label_separator}
    columns = infer_columns(sources, **asked, merge_label_variants=merge_label_variants, label_names=label_names)
    naming = {"head_names": head_names, "allow_single_label": allow_single_label, "positive_label": positive_label}
    rules = (label_separator, merge_label_variants, labels_file, allow_empty_text, skip_bad_rows)
    labels, parts, bad = _label_rows(sources, columns, notes, listed_names(label_names), naming, *rules)
    parts = _hold_out(parts, columns, labels, notes, fraction=validation_split_fraction, seed=seed, fold=fold)
    parts = _cut(parts, (max_train_samples, max_eval_samples, max_predict_samples), notes, labels.task, seed)
    return replace(_bundle(parts, columns, labels, notes, bad), names_given=label_names is not None)


def _prefer(tables: Sequence[Any], files: Sequence[str | Path | None]) -> dict[str, Any]:
    """What is given for each split: the object in memory, else the file."""
    given = zip(("train", "validation", "test"), tables, files, strict=True)
    return {split: file if table is None else table for split, table, file in given}


def _label_rows(
    sources: Mapping[str, Source],
    columns: Columns,
    notes: list[str],
    names: Sequence[str] | None,
    naming: Mapping[str, Any],
    separator: str | None,
    merge: bool,
    labels_file: str | Path | None,
    allow_empty_text: bool,
    skip: bool,
) -> tuple[LabelMap, dict[str, Part], list[BadRow]]:
    """The good rows with their labels encoded and corrected, and the bad ones."""
    good, bad = sort_out(sources, columns, notes, label_names=names, allow_empty_text=allow_empty_text, skip=skip)
    if columns.task is Task.MULTILABEL and columns.label is not None:
        from tunesmith.data.label_forms import unfold_labels

        good = unfold_labels(good, columns.label, separator)
    if merge and columns.label is not None and columns.task is not Task.REGRESSION:
        from tunesmith.data.label_changes import merge_variants

        good = merge_variants(good, columns.label, notes, names=names or ())
    labels, encoded = encode_labels(good, columns, label_names=names, **naming)
    parts = {split: Part(good[split], dataset) for split, dataset in encoded.items()}
    if labels_file is not None:
        from tunesmith.data.label_changes import correct_labels

        parts["train"], changed = correct_labels(parts["train"], Path(labels_file), columns.text, labels)
        notes.append(f"{changed:,} labels of train rows were changed by {labels_file}.")
    return labels, parts, bad


def _hold_out(
    parts: dict[str, Part],
    columns: Columns,
    labels: LabelMap,
    notes: list[str],
    *,
    fraction: float,
    seed: int,
    fold: tuple[int, int] | None,
) -> dict[str, Part]:
    """Takes the validation split from train when there is none and one is wanted."""
    given = any(split.startswith("validation") for split in parts)
    if given and fold is not None:
        problem = "--folds takes its validation rows from the training rows, and there are validation rows already"
        raise ConfigError(problem, fix="Leave --folds out, or put all labelled rows into one training file.")
    if given:
        return parts
    if fraction == 0 and fold is None:
        notes.append("There is no validation split: nothing will be evaluated while training.")
        return parts
    whole = parts["train"]
    text = () if len(whole) > MAX_GROUPED_ROWS else columns.text
    if fold is not None:
        train, held_out = draw_fold(whole, fold=fold[0], folds=fold[1], task=labels.task, text_columns=text)
        note = f"Fold {fold[0]} of {fold[1]}: {len(held_out):,} of {len(whole):,} rows are held out."
    else:
        train, held_out, torn = draw_split(whole, val_fraction=fraction, seed=seed, task=labels.task, text_columns=text)
        how = "at random" if labels.task is Task.MULTILABEL else "stratified by label"
        how += ", rows that share a text kept together" if text and not torn else ""
        how += f", {torn:,} of them linked to train rows by a text, as most rows are linked" if torn else ""
        note = f"No validation data: {len(held_out):,} of {len(whole):,} train rows held out, {how} (seed {seed})."
    notes.append(note)
    rest = {split: part for split, part in parts.items() if split != "train"}
    return {"train": replace(whole, rows=train), "validation": replace(whole, rows=held_out), **rest}


def _cut(
    parts: dict[str, Part], samples: Sequence[int | None], notes: list[str], task: Task, seed: int
) -> dict[str, Part]:
    """The splits, cut to the asked numbers of train, validation and test rows."""
    how = "at random" if task is Task.MULTILABEL else "with the shares of the labels kept"
    limits = dict(zip(("train", "validation", "test"), samples, strict=True))
    cut = {}
    for split, part in parts.items():
        limit = next(limits[kind] for kind in limits if split.startswith(kind))
        cut[split] = sample_part(part, limit, task=task, seed=seed)
        if len(cut[split]) < len(part):
            used = f"{len(cut[split]):,} of {len(part):,} {split} rows"
            notes.append(f"Only {used} are used, as asked, drawn {how} (seed {seed}).")
    return cut


def _bundle(
    parts: dict[str, Part], columns: Columns, labels: LabelMap, notes: list[str], bad: list[BadRow]
) -> DataBundle:
    notes += notes_on_classes(parts, labels)
    splits = {split: part.dataset() for split, part in parts.items()}
    for split, part in parts.items():
        if labels.task in (Task.BINARY, Task.MULTICLASS) and split.startswith("test"):
            missing = int((np.asarray(part.labels()) < 0).sum())
            if missing:
                notes.append(f"{missing:,} of {len(part):,} {split} rows are unlabelled (-1).")
    fingerprint, by_split = fingerprint_parts(parts, columns.text, labels)
    for dataset in splits.values():
        release_pages(dataset)
    columns, said = replace(columns, task=labels.task), (*columns.why, *notes)
    return DataBundle(splits, columns, labels, said, fingerprint, by_split, parts, bad_rows=tuple(bad))


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
    if columns.task is Task.MULTILABEL and columns.label is not None:
        from tunesmith.data.label_forms import unfold_labels

        rows = unfold_labels({name: rows}, columns.label, None)[name]
    if merge_label_variants and names is not None and columns.label is not None:
        from tunesmith.data.label_changes import merge_variants

        rows = merge_variants({name: rows}, columns.label, [], names=names)[name]
    _, splits = encode_labels({name: rows}, columns, label_names=names, allow_single_label=True)
    return splits[name]
