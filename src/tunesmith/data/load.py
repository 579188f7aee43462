"""The whole path from what the user names to splits that are ready for tokenizing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.data.audit import audit_parts
from tunesmith.data.columns import Columns, infer_columns, require_text
from tunesmith.data.encode import encode_labels
from tunesmith.data.fingerprint import fingerprint_parts
from tunesmith.data.gather import gather_sources
from tunesmith.data.glue_tasks import find_glue_task
from tunesmith.data.mapped_pages import release_pages
from tunesmith.data.part import Part
from tunesmith.data.read import read_source
from tunesmith.data.sentences import check_texts
from tunesmith.data.source import Source
from tunesmith.data.split import MAX_GROUPED_ROWS, draw_split
from tunesmith.findings import Finding
from tunesmith.labels import LabelMap, Task

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class DataBundle:
    """Splits with the column "labels" added; `notes` are the decisions made, in sentences for a person."""

    splits: dict[str, Dataset]
    columns: Columns
    labels: LabelMap
    notes: tuple[str, ...]
    findings: tuple[Finding, ...]
    fingerprint: str
    split_fingerprints: dict[str, str]


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
    seed: int = 42,
    max_train_samples: int | None = None,
    max_eval_samples: int | None = None,
    max_predict_samples: int | None = None,
    allow_single_label: bool = False,
    allow_empty_text: bool = False,
    split_names: Mapping[str, str] | None = None,
    hub_options: Mapping[str, Any] | None = None,
    head_names: Sequence[str] = (),
    **reading: Any,
) -> DataBundle:
    """Reads, checks, encodes, splits and audits. Without a validation split, one is taken from train (0 = do not).

    `head_names` are the label names of a trained model: the same names in the data are numbered as there.
    `reading`: encoding, delimiter, quoting, cache_dir, on_progress of `read_source`.
    """
    given = {
        "train": train_file if train_data is None else train_data,
        "validation": validation_file if validation_data is None else validation_data,
        "test": test_file if test_data is None else test_data,
    }
    read = partial(_read, reading)
    hub = partial(_load_hub, options=hub_options or {})
    names = {"task_name": task_name, "dataset_name": dataset_name, "dataset_config_name": dataset_config_name}
    sources, notes = gather_sources(given, **names, split_names=split_names or {}, read=read, load_hub=hub)
    asked = {"text_column_names": text_column_names, "label_column_name": label_column_name}
    columns = infer_columns(sources, **asked, do_regression=do_regression, task_name=task_name)  # type: ignore[arg-type]
    naming = {"label_names": _names(label_names), "head_names": head_names, "allow_single_label": allow_single_label}
    labels, parts = _encode(sources, columns, task_name, naming, allow_empty_text=allow_empty_text)
    parts = _hold_out(parts, columns, labels, notes, fraction=validation_split_fraction, seed=seed)
    limits = {"train": max_train_samples, "validation": max_eval_samples, "test": max_predict_samples}
    parts = {split: _cut(split, part, limits, notes) for split, part in parts.items()}
    return _bundle(parts, replace(columns, task=labels.task), labels, notes, names_given=label_names is not None)


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
    **reading: Any,
) -> Dataset:
    """Rows to evaluate a trained model on: "labels" by the names of the model's own map; -1 stays unlabelled."""
    rows = read_unlabelled(source, text=columns.text, name=name, allow_empty_text=allow_empty_text, **reading)
    names = None if labels.task is Task.REGRESSION else labels.names
    _, splits = encode_labels({name: rows}, columns, label_names=names, allow_single_label=True)
    return splits[name]


def _read(reading: Mapping[str, Any], source: Any, split: str) -> Source:
    return read_source(source, name=split, **reading)


def _load_hub(name: str, config: str | None, *, options: Mapping[str, Any]) -> Any:
    from tunesmith.data.hub import load_from_hub

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
    parts: dict[str, Part], columns: Columns, labels: LabelMap, notes: list[str], *, fraction: float, seed: int
) -> dict[str, Part]:
    """Takes the validation split from train when there is none and one is wanted."""
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
        f"No validation data given: {len(held_out):,} of {len(whole):,} train rows were set aside for it, "
        f"{how}{kept} (seed {seed})."
    )
    rest = {split: part for split, part in parts.items() if split != "train"}
    return {"train": replace(whole, rows=train), "validation": replace(whole, rows=held_out), **rest}


def _cut(split: str, part: Part, limits: Mapping[str, int | None], notes: list[str]) -> Part:
    limit = next((limits[kind] for kind in limits if split.startswith(kind)), None)
    cut = part.first(limit)
    if len(cut) < len(part):
        notes.append(f"Only the first {len(cut):,} of {len(part):,} {split} rows are used, as asked.")
    return cut


def _bundle(
    parts: Mapping[str, Part], columns: Columns, labels: LabelMap, notes: list[str], *, names_given: bool
) -> DataBundle:
    splits = {split: part.dataset() for split, part in parts.items()}
    for split, part in parts.items():
        if labels.task in (Task.BINARY, Task.MULTICLASS) and split.startswith("test"):
            missing = int((np.asarray(part.labels()) < 0).sum())
            if missing:
                notes.append(f"{missing:,} of {len(part):,} {split} rows are unlabelled (-1).")
    findings = tuple(audit_parts(parts, columns.text, labels, names_given=names_given))
    fingerprint, by_split = fingerprint_parts(parts, columns.text, labels)
    for dataset in splits.values():
        release_pages(dataset)
    return DataBundle(splits, columns, labels, (*columns.why, *notes), findings, fingerprint, by_split)
