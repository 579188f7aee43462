"""The whole path from what the user names to splits that are ready for tokenizing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.errors import ConfigError
from tunesmith.findings import Finding
from tunesmith.labels import LabelMap, Task
from tunesmith.reading.bad_rows import BadRow, correct_labels, sort_out
from tunesmith.reading.columns import Columns, find_glue_task, infer_columns
from tunesmith.reading.gather import gather_sources
from tunesmith.reading.label_ids import encode_labels, notes_on_classes, unfold_labels
from tunesmith.reading.label_names import merge_variants
from tunesmith.reading.read import read_source
from tunesmith.reading.source import Part, Source, check_texts, fingerprint_parts
from tunesmith.reading.split import MAX_GROUPED_ROWS, draw_fold, draw_split, sample_part
from tunesmith.tokens.token_cache import release_pages

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class DataBundle:
    """Splits with the column "labels" added; `notes` are the decisions made, in sentences for a person."""

    splits: dict[str, Dataset]
    columns: Columns
    labels: LabelMap
    notes: tuple[str, ...]
    fingerprint: str
    split_fingerprints: dict[str, str]
    parts: dict[str, Part]
    names_given: bool = False
    """A person listed the labels."""
    findings: tuple[Finding, ...] = ()
    """What the audit found; reading itself finds nothing."""
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
    read, hub = partial(_read, reading, skip_bad_rows), partial(_load_hub, options=hub_options or {})
    names = {"task_name": task_name, "dataset_name": dataset_name, "dataset_config_name": dataset_config_name}
    named = {"split_names": split_names or {}, "split_column_name": split_column_name}
    sources, notes = gather_sources(given, **names, **named, read=read, load_hub=hub)  # type: ignore[arg-type]
    asked: dict[str, Any] = {"text_column_names": text_column_names, "label_column_name": label_column_name}
    asked |= {"task_name": task_name, "do_regression": do_regression, "label_separator": label_separator}
    columns = infer_columns(sources, **asked, merge_label_variants=merge_label_variants)
    naming = {"head_names": head_names, "allow_single_label": allow_single_label, "positive_label": positive_label}
    rules = _Rules(task_name, label_separator, merge_label_variants, labels_file, allow_empty_text, skip_bad_rows)
    labels, parts, bad = _label_rows(sources, columns, notes, rules, {**naming, "label_names": _names(label_names)})
    limits = {"train": max_train_samples, "validation": max_eval_samples, "test": max_predict_samples}
    parts = _split_rows(parts, columns, labels, notes, limits, fraction=validation_split_fraction, seed=seed, fold=fold)
    return _bundle(parts, columns, labels, notes, bad, names_given=label_names is not None)


def _prefer(tables: Sequence[Any], files: Sequence[str | Path | None]) -> dict[str, Any]:
    """What is given for each split: the object in memory, else the file."""
    given = zip(("train", "validation", "test"), tables, files, strict=True)
    return {split: file if table is None else table for split, table, file in given}


@dataclass(frozen=True)
class _Rules:
    """How rows become labelled rows."""

    task_name: str | None
    separator: str | None
    merge: bool
    labels_file: str | Path | None
    empty: bool
    skip: bool


def _label_rows(
    sources: Mapping[str, Source], columns: Columns, notes: list[str], rules: _Rules, naming: Mapping[str, Any]
) -> tuple[LabelMap, dict[str, Part], list[BadRow]]:
    """The good rows with their labels encoded and corrected, and the bad ones."""
    listed, empty = naming["label_names"], rules.empty
    good, bad = sort_out(sources, columns, notes, label_names=listed, allow_empty_text=empty, skip=rules.skip)
    good = unfold_labels(good, columns, rules.separator)
    if rules.merge and columns.label is not None and columns.task is not Task.REGRESSION:
        good = merge_variants(good, columns.label, notes, names=listed or ())
    labels, parts = _encode(good, columns, rules.task_name, naming, allow_empty_text=empty)
    return labels, parts | _corrected(parts, rules.labels_file, columns, labels, notes), bad


def _split_rows(
    parts: dict[str, Part],
    columns: Columns,
    labels: LabelMap,
    notes: list[str],
    limits: Mapping[str, int | None],
    *,
    fraction: float,
    seed: int,
    fold: tuple[int, int] | None,
) -> dict[str, Part]:
    """The splits, each with as many rows as asked for."""
    parts = _hold_out(parts, columns, labels, notes, fraction=fraction, seed=seed, fold=fold)
    return {split: _cut(split, part, limits, notes, labels.task, seed) for split, part in parts.items()}


def _corrected(
    parts: Mapping[str, Part], file: str | Path | None, columns: Columns, labels: LabelMap, notes: list[str]
) -> dict[str, Part]:
    """Train with the labels of a review file."""
    if file is None:
        return {}
    train, changed = correct_labels(parts["train"], Path(file), columns.text, labels)
    notes.append(f"{changed:,} labels of train rows were changed by {file}.")
    return {"train": train}


def _read(reading: Mapping[str, Any], skip_bad_rows: bool, source: Any, split: str) -> Source:
    return read_source(source, name=split, skip_bad_rows=skip_bad_rows, **reading)


def _load_hub(name: str, config: str | None, *, options: Mapping[str, Any]) -> Any:
    from tunesmith.reading.gather import load_from_hub

    return load_from_hub(name, config, **options)


def _names(label_names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if label_names is None:
        return None
    return tuple(n.strip() for n in label_names.split(",")) if isinstance(label_names, str) else tuple(label_names)


def _encode(
    sources: Mapping[str, Source],
    columns: Columns,
    task_name: str | None,
    options: Mapping[str, Any],
    *,
    allow_empty_text: bool,
) -> tuple[LabelMap, dict[str, Part]]:
    for source in sources.values():
        check_texts(source, columns.text, allow_empty_text=allow_empty_text)
    glue = find_glue_task(task_name)
    labels, encoded = encode_labels(sources, columns, default_names=glue.labels if glue else (), **options)
    return labels, {split: Part(sources[split], dataset) for split, dataset in encoded.items()}


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
    if fold is not None:
        return _hold_out_fold(parts, columns, labels, notes, fold=fold[0], folds=fold[1])
    if any(split.startswith("validation") for split in parts):
        return parts
    if fraction == 0:
        notes.append("There is no validation split: nothing will be evaluated while training.")
        return parts
    whole = parts["train"]
    text = () if len(whole) > MAX_GROUPED_ROWS else columns.text
    train, held_out = draw_split(whole, val_fraction=fraction, seed=seed, task=labels.task, text_columns=text)
    how = "at random" if labels.task is Task.MULTILABEL else "stratified by label"
    kept = ", rows that share a text kept together" if text else ""
    notes.append(
        f"No validation data: {len(held_out):,} of {len(whole):,} train rows held out, {how}{kept} (seed {seed})."
    )
    rest = {split: part for split, part in parts.items() if split != "train"}
    return {"train": replace(whole, rows=train), "validation": replace(whole, rows=held_out), **rest}


def _hold_out_fold(
    parts: dict[str, Part], columns: Columns, labels: LabelMap, notes: list[str], *, folds: int, fold: int
) -> dict[str, Part]:
    given = next((split for split in parts if split.startswith("validation")), None)
    if given is not None:
        raise ConfigError(
            "--folds takes its validation rows from the training rows, and there are validation rows already",
            fix="Leave --folds out, or put all labelled rows into one training file.",
        )
    whole = parts["train"]
    text = () if len(whole) > MAX_GROUPED_ROWS else columns.text
    train, held_out = draw_fold(whole, folds=folds, fold=fold, task=labels.task, text_columns=text)
    notes.append(f"Fold {fold} of {folds}: {len(held_out):,} of {len(whole):,} rows are held out.")
    rest = {split: part for split, part in parts.items() if split != "train"}
    return {"train": replace(whole, rows=train), "validation": replace(whole, rows=held_out), **rest}


def _cut(split: str, part: Part, limits: Mapping[str, int | None], notes: list[str], task: Task, seed: int) -> Part:
    limit = next((limits[kind] for kind in limits if split.startswith(kind)), None)
    cut = sample_part(part, limit, task=task, seed=seed)
    if len(cut) < len(part):
        how = "at random" if task is Task.MULTILABEL else "with the shares of the labels kept"
        notes.append(f"Only {len(cut):,} of {len(part):,} {split} rows are used, as asked, drawn {how} (seed {seed}).")
    return cut


def _bundle(
    parts: Mapping[str, Part],
    columns: Columns,
    labels: LabelMap,
    notes: list[str],
    bad: Sequence[BadRow],
    *,
    names_given: bool,
) -> DataBundle:
    columns = replace(columns, task=labels.task)
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
    told = (*columns.why, *notes)
    made = DataBundle(splits, columns, labels, told, fingerprint, by_split, dict(parts), names_given=names_given)
    return replace(made, bad_rows=tuple(bad))
