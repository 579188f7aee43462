"""The path from files, tables in memory or the Hub to splits that are ready for tokenizing.

`load_data` is the story: read the sources, find the columns, refuse or skip bad rows, encode the labels, hold out validation
rows.
`read_source` reads one file or table: files are parsed once, stored as Arrow by content, and memory-mapped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.config.options import RunConfig
from tunesmith.data.bad_rows import BadRow, check_texts, sort_out
from tunesmith.data.cache import CachedRows, RowCache, binary_errors
from tunesmith.data.columns import Columns, infer_columns, listed_names, require_text
from tunesmith.data.csv_files import (
    DELIMITER_NAMES,
    Dialect,
    choose_dialect,
    has_quoted_cells,
    recognise_lines,
    sniff_dialect,
)
from tunesmith.data.files import (
    KINDS,
    CountedBytes,
    DecompressionLimits,
    OnProgress,
    check_encoding,
    choose_codec,
    kind_of_file,
    readable,
    text_blocks,
)
from tunesmith.data.in_memory import read_memory
from tunesmith.data.labels import (
    correct_labels,
    encode_labels,
    merge_variants,
    notes_on_classes,
    unfold_labels,
    unwrap_single_labels,
)
from tunesmith.data.source import Part, Source, checked, fingerprint_parts
from tunesmith.data.split import MAX_GROUPED_ROWS, draw_fold, draw_split, gather_sources, sample_part
from tunesmith.errors import ConfigError, DataError
from tunesmith.findings import Finding
from tunesmith.labels import LabelMap, Task
from tunesmith.runs.writing import cache_folder, create, hash_file

if TYPE_CHECKING:
    from datasets import Dataset

    from tunesmith.data.json_files import ColumnKinds


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
    """Rows that were left out because of `skip_bad_rows`."""


def load_data(
    config: RunConfig,
    data: Mapping[str, Any] | None = None,
    *,
    head_names: Sequence[str] = (),
    on_progress: OnProgress | None = None,
) -> DataBundle:
    """Read, check, encode and split. Without a validation split, hold out a share of train, or one of the folds.

    `data`: rows in memory by split, used instead of the files of the config. `head_names`: labels of the model's head, in order.
    """
    options = ("encoding", "delimiter", "quoting", "sheet_name", "cache_dir", "skip_bad_rows")
    read = partial(read_source, on_progress=on_progress, **{name: getattr(config, name) for name in options})
    given = {split: getattr(config, f"{split}_file") for split in ("train", "validation", "test")}
    given |= {split: rows for split, rows in (data or {}).items() if rows is not None}
    sources, notes = gather_sources(given, config, read)
    columns = infer_columns(sources, config)
    names = listed_names(config.label_names)
    sources = unwrap_single_labels(sources, columns)
    good, bad = sort_out(
        sources, columns, notes, names, allow_empty_text=config.allow_empty_text, skip=config.skip_bad_rows
    )
    if columns.task is Task.MULTILABEL and columns.label is not None:
        good = unfold_labels(good, columns.label, config.label_separator)
    if config.merge_label_variants and columns.label is not None and columns.task is not Task.REGRESSION:
        good = merge_variants(good, columns.label, notes, names=names or ())
    labels, encoded = encode_labels(
        good,
        columns,
        label_names=names,
        head_names=head_names,
        allow_single_label=config.allow_single_label,
        positive_label=config.positive_label,
    )
    parts = {split: Part(good[split], dataset) for split, dataset in encoded.items()}
    if config.labels_file is not None:
        parts["train"], changed = correct_labels(parts["train"], Path(config.labels_file), columns.text, labels)
        notes.append(f"{changed:,} labels of train rows were changed by {config.labels_file}.")
    parts = _hold_out(parts, columns, labels, notes, config)
    parts = _sample(parts, notes, labels.task, config)
    notes += notes_on_classes(parts, labels)
    fingerprint, by_split = fingerprint_parts(parts, columns.text, labels)
    return DataBundle(
        splits={split: part.dataset() for split, part in parts.items()},
        columns=replace(columns, task=labels.task),
        labels=labels,
        notes=(*columns.why, *notes),
        fingerprint=fingerprint,
        split_fingerprints=by_split,
        parts=parts,
        names_given=names is not None,
        bad_rows=tuple(bad),
    )


def _seed(config: RunConfig) -> int:
    return config.seed if config.data_seed is None else config.data_seed


def _hold_out(
    parts: dict[str, Part], columns: Columns, labels: LabelMap, notes: list[str], config: RunConfig
) -> dict[str, Part]:
    """Take the validation split from train if there is none and one is wanted."""
    fraction, seed, fold = config.validation_split_fraction, _seed(config), config.fold
    given = any(split.startswith("validation") for split in parts)
    if given and fold is not None:
        problem = "--folds takes its validation rows from the training rows, and there are validation rows already"
        raise ConfigError(problem, fix="Omit --folds, or put all labeled rows into one training file.")
    if given:
        return parts
    if fraction == 0 and fold is None:
        notes.append("There is no validation split: nothing will be evaluated while training.")
        return parts
    whole = parts["train"]
    text = () if len(whole) > MAX_GROUPED_ROWS else columns.text
    if fold is not None:
        folds = config.folds or fold
        train, held_out = draw_fold(whole, fold=fold, folds=folds, task=labels.task, text_columns=text)
        note = f"Fold {fold} of {folds}: {len(held_out):,} of {len(whole):,} rows are held out."
    else:
        train, held_out, torn = draw_split(whole, val_fraction=fraction, seed=seed, task=labels.task, text_columns=text)
        how = "at random" if labels.task is Task.MULTILABEL else "stratified by label"
        how += ", rows that share a text kept together" if text and not torn else ""
        how += f", {torn:,} of them linked to train rows by a text, as most rows are linked" if torn else ""
        note = f"No validation data: {len(held_out):,} of {len(whole):,} train rows held out, {how} (seed {seed})."
    notes.append(note)
    rest = {split: part for split, part in parts.items() if split != "train"}
    return {"train": replace(whole, rows=train), "validation": replace(whole, rows=held_out), **rest}


def _sample(parts: dict[str, Part], notes: list[str], task: Task, config: RunConfig) -> dict[str, Part]:
    """Draw the requested numbers of train, validation and test rows."""
    how, seed = "at random" if task is Task.MULTILABEL else "with the shares of the labels kept", _seed(config)
    samples = (config.max_train_samples, config.max_eval_samples, config.max_predict_samples)
    limits = dict(zip(("train", "validation", "test"), samples, strict=True))
    drawn = {}
    for split, part in parts.items():
        limit = next(limits[kind] for kind in limits if split.startswith(kind))
        drawn[split] = sample_part(part, limit, task=task, seed=seed)
        if len(drawn[split]) < len(part):
            used = f"{len(drawn[split]):,} of {len(part):,} {split} rows"
            notes.append(f"Only {used} are used, as requested, drawn {how} (seed {seed}).")
    return drawn


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
    rows = unwrap_single_labels({name: rows}, columns)[name]
    if columns.task is Task.MULTILABEL and columns.label is not None:
        rows = unfold_labels({name: rows}, columns.label, None)[name]
    if merge_label_variants and names is not None and columns.label is not None:
        rows = merge_variants({name: rows}, columns.label, [], names=names)[name]
    _, splits = encode_labels({name: rows}, columns, label_names=names, allow_single_label=True)
    return splits[name]


FORMAT_VERSION = 4
"""Part of every cache key: raise it when a reader gives other rows for the same bytes."""

_HEAD_BYTES = 1 << 16
"""Enough for the first lines of a file, by which its delimiter is known."""


@dataclass(frozen=True, slots=True)
class _File:
    """One file and how to read it."""

    path: Path
    digest: str
    origin: str
    kind: str
    gzipped: bool
    encoding: str | None
    dialect: Dialect | None
    limits: DecompressionLimits
    on_progress: OnProgress | None
    skip_bad: bool
    sheet: str | None

    def open(self) -> CountedBytes:
        return CountedBytes(self.path, origin=self.origin, gzipped=self.gzipped, limits=self.limits)

    def key(self) -> str:
        """Names the table: the bytes and everything that changes how they are read."""
        parts = [FORMAT_VERSION, self.digest, self.kind, self.gzipped, self.encoding, repr(self.dialect)]
        parts += ["skip_bad"] if self.skip_bad and self.dialect is not None else []
        parts += [self.sheet] if self.sheet is not None else []
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:40]


def read_source(
    source: Any,
    *,
    name: str,
    encoding: str | None = None,
    delimiter: str | None = None,
    quoting: str | None = None,
    cache_dir: str | Path | None = None,
    limits: DecompressionLimits | None = None,
    on_progress: OnProgress | None = None,
    skip_bad_rows: bool = False,
    sheet_name: str | None = None,
) -> Source:
    """The rows of a file, a `save_to_disk` folder or a table in memory; at least one row.

    `on_progress(bytes_done, bytes_total)` is called while a text file is parsed, not when its table is on disk already.
    """
    if not isinstance(source, str | Path):
        return read_memory(source, name)
    path = Path(source).expanduser()
    origin = str(source)
    with readable(path, origin):
        if path.is_dir():
            return checked(_from_folder(path, name, origin))
        kind, gzipped = kind_of_file(path, origin, delimiter)
        _refuse_no_content(path, origin)
        dialect = choose_dialect(kind, delimiter=delimiter, quoting=quoting) if kind in ("csv", "tsv") else None
        how = (kind, gzipped, check_encoding(encoding), dialect, limits or DecompressionLimits())
        file = _recognised(_File(path, hash_file(path), origin, *how, on_progress, skip_bad_rows, sheet_name))
        return _from_file(file, name, RowCache(Path(cache_dir) if cache_dir is not None else cache_folder() / "tables"))


def _refuse_no_content(path: Path, origin: str) -> None:
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise DataError("is a pipe or a device, not a file", where=origin, fix="Write the rows to a file first.")
    if found.st_size == 0:
        raise DataError("the file is empty (0 bytes)", where=origin, fix="It needs at least one row.")
    if found.st_size > 10**8:  # a copy that was never completed: hashing a terabyte of zeros would take hours
        with path.open("rb") as file:
            if not any(file.read(1 << 20)):
                raise DataError("begins with a million zero bytes", where=origin, fix="Copy the file again.")


def _recognised(file: _File) -> _File:
    """The file with its format and delimiter as recognized from its first lines; lines that are not a table are refused."""
    if file.kind == "lines":
        kind, dialect = recognise_lines(_first_text(file), file.origin)
        file = replace(file, kind=kind, dialect=dialect)
    if file.dialect is not None and not file.dialect.sure:
        file = replace(file, dialect=sniff_dialect(_first_text(file), file.dialect))
    return file


def _first_text(file: _File) -> str:
    """The beginning of a text file; empty if it cannot be decoded, which is reported when the file is read."""
    try:
        with file.open() as stream:
            head = stream.read(_HEAD_BYTES)
        codec, skip = choose_codec(head, file.encoding, file.origin)
        return head[skip:].decode(codec, errors="ignore")
    except DataError:
        return ""


def _reading_note(file: _File, facts: Mapping[str, Any]) -> str | None:
    """Return a sentence about how the file is read, if its suffix does not say so."""
    if facts.get("other_sheets"):
        return f"Reading: sheet {facts['sheet']!r} of {file.origin}; not read: {', '.join(facts['other_sheets'])}."
    if facts.get("export"):
        return f"Reading: {file.origin} is an export of {facts['export']}. With several answers, the majority is the label."
    if file.dialect is not None and not file.dialect.quoting and has_quoted_cells(_first_text(file), file.dialect):
        return f"Reading: quotes in {file.origin} are kept as text. Use --quoting minimal to parse them."
    if file.dialect is None or file.dialect.delimiter == ("\t" if file.kind == "tsv" else ","):
        return None
    name = DELIMITER_NAMES.get(file.dialect.delimiter, repr(file.dialect.delimiter))
    return f"Reading: the columns of {file.origin} are separated by {name}."


def _from_file(file: _File, name: str, cache: RowCache) -> Source:
    key = file.key()
    table = cache.open(key) or _make_table(file, key, cache)
    if table is None:
        what = "a header but no rows" if file.kind in ("csv", "tsv", "sheet") else "no rows"
        raise DataError(f"the file has {what}", where=file.origin, fix="It needs at least one row.")
    lines = file.kind not in ("parquet", "arrow")
    with binary_errors("a table", file.origin):
        return Source(name, table.dataset(), file.origin, lines, _reading_note(file, table.facts))


def _make_table(file: _File, key: str, cache: RowCache) -> CachedRows | None:
    from tunesmith.data.json_files import ColumnKinds, Widened

    facts: dict[str, Any] = {}
    if file.kind in ("parquet", "arrow", "sheet"):
        return cache.build(key, _binary_batches(file, cache.root, facts), lambda: facts)
    kinds = ColumnKinds(file.origin, lines=True)
    while True:
        try:
            return cache.build(key, _text_batches(file, kinds), lambda: {"export": kinds.export})
        except Widened:
            kinds.restart()


def _text_batches(file: _File, kinds: ColumnKinds) -> Iterator[Any]:
    """`kinds` has the types of the columns of objects; the cells of delimited text are strings."""
    from tunesmith.data.csv_files import delimited_batches
    from tunesmith.data.json_files import json_batches

    with file.open() as stream:
        blocks = text_blocks(stream, encoding=file.encoding, on_progress=file.on_progress)
        if file.dialect is not None:
            yield from delimited_batches(blocks, origin=file.origin, dialect=file.dialect, skip_bad=file.skip_bad)
        else:
            yield from json_batches(blocks, origin=file.origin, kinds=kinds, array_allowed=file.kind == "json")
        if stream.sha256 != file.digest:
            fix = "Run again when it is complete."
            raise DataError("the file changed while it was read", where=file.origin, fix=fix)


def _binary_batches(file: _File, cache_dir: Path, facts: dict[str, Any]) -> Iterator[Any]:
    from tunesmith.data.arrow_files import arrow_batches, parquet_batches
    from tunesmith.data.spreadsheets import sheet_batches

    if file.gzipped:
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".unpacked-") as folder:
            plain = Path(folder) / "rows"
            with file.open() as stream, create(plain) as out:
                shutil.copyfileobj(stream, out, 1 << 20)
            yield from _binary_batches(replace(file, path=plain, gzipped=False), cache_dir, facts)
    elif file.kind == "parquet":
        yield from parquet_batches(file.path, origin=file.origin, limits=file.limits)
    elif file.kind == "arrow":
        yield from arrow_batches(file.path, origin=file.origin, limits=file.limits)
    else:
        yield from sheet_batches(file.path, origin=file.origin, sheet=file.sheet, facts=facts)


def _from_folder(path: Path, name: str, origin: str) -> Source:
    from datasets import Dataset

    saved = load_folder(path, origin)
    if isinstance(saved, Dataset):
        return Source(name, saved, origin)
    if name not in saved:
        fix = "Give the folder of one split, or the whole folder as --dataset_name."
        raise DataError(f"holds the splits {', '.join(saved)}, none is {name!r}", where=origin, fix=fix)
    return Source(name, saved[name], origin)


def is_saved_dataset(path: Path) -> bool:
    """Whether the folder was written by `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def load_folder(path: Path, origin: str) -> Any:
    """The Dataset or DatasetDict that `save_to_disk` wrote."""
    from datasets import load_from_disk

    if not is_saved_dataset(path):
        files = sorted(p.name for p in path.iterdir() if p.suffix in KINDS)[:5] if os.access(path, os.R_OK) else []
        fix = f"Give a file in it: {', '.join(files)}." if files else None
        raise DataError("is a folder that was not written by save_to_disk", where=origin, fix=fix)
    with binary_errors("a saved dataset", origin):
        return load_from_disk(str(path))
