"""The path from files, tables in memory or the Hub to splits that are ready for tokenizing.

`load_data` is the story: read the sources, find the columns, refuse or skip bad rows, encode the labels, hold out validation
rows.
`read_source` reads one file or table.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from tunesmith.config.options import READ_AS_USUAL, Reading, RunConfig
from tunesmith.data.columns import infer_columns, require_text
from tunesmith.data.labels import (
    NUMBER,
    LabelRules,
    add_confidence,
    class_names,
    correct_labels,
    encode_labels,
    is_list_type,
    is_string_type,
    label_cells,
    notes_on_classes,
    survey_labels,
    unwrap_single_labels,
)
from tunesmith.data.rows import (
    BAD_COLUMN,
    LINE_COLUMN,
    MAX_GROUPED_ROWS,
    TARGETS,
    Columns,
    Part,
    Source,
    binary_errors,
    draw_fold,
    draw_split,
    fingerprint_parts,
    input_columns,
    refuse_label_copies,
    render_source,
    sample_part,
)
from tunesmith.data.text_files import (
    DELIMITER_NAMES,
    KINDS,
    MAX_ARRAY_CHARS,
    MAX_RECORD_CHARS,
    SHOWN,
    SNIFFED_LINES,
    Dialect,
    OnProgress,
    choose_dialect,
    delimited_blocks,
    has_quoted_cells,
    kind_of_file,
    open_bytes,
    readable,
    refuse_other_content,
    sniff_dialect,
    text_lines,
)
from tunesmith.errors import ConfigError, DataError, did_you_mean
from tunesmith.events import Finding
from tunesmith.files import file_version
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
    findings: tuple[Finding, ...] = ()
    """The findings of the audit; reading itself has none."""
    bad_rows: tuple[BadRow, ...] = ()
    """Rows that `skip_bad_rows` skipped."""
    gold: dict[str, Any] | None = None
    """Agreement, confusion matrix and decision of `gold_file`, as in data_summary.json."""


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
    read = partial(read_source, on_progress=on_progress, reading=Reading.of(config))
    given = {split: getattr(config, f"{split}_file") for split in ("train", "validation", "test", "gold")}
    given |= {split: rows for split, rows in (data or {}).items() if rows is not None}
    sources, notes = gather_sources(given, config, read)
    columns = infer_columns(sources, config)
    names = config.label_names
    sources = {split: render_source(source, columns.rendered) for split, source in sources.items()}
    sources = unwrap_single_labels(sources, columns)
    good, bad = remove_bad_rows(sources, columns, notes, config)
    rules = LabelRules(
        names, head_names, config.positive_label, config.label_separator, merge_variants=config.merge_label_variants
    )
    labels, encoded = encode_labels(good, columns, rules, notes)
    confidence = config.label_confidence_column_name
    if confidence is not None:
        encoded["train"] = add_confidence(good["train"], encoded["train"], confidence, labels)
        notes.append(f"Soft labels: {confidence!r} is the probability of the label. Metrics use the label.")
    if config.labels_file is not None and TARGETS in encoded["train"].column_names:
        raise ConfigError("--labels_file corrects certain labels, not probabilities", fix="Correct the training data.")
    parts = {split: Part(good[split], dataset) for split, dataset in encoded.items()}
    refuse_label_copies(parts["train"], columns, labels)
    if config.labels_file is not None:
        review = read_source(config.labels_file, name="labels")
        parts["train"], changed = correct_labels(parts["train"], review, columns.text, labels)
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
        bad_rows=tuple(bad),
    )


SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev", "eval", "devel", "development"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
"""Name of a split in cells and datasets -> our name."""


_MATCHED = {"validation_matched": "validation", "test_matched": "test"}


def gather_sources(
    given: Mapping[str, Any], config: RunConfig, read: Callable[..., Source]
) -> tuple[dict[str, Source], list[str]]:
    """Return the splits in the order train, validation, test, then others, and notes on unused splits.

    `given` are files or objects by split; they take precedence over a dataset, and that over a GLUE task's data on the Hub.
    """
    asked = {split: getattr(config, f"{split}_split_name") for split in ("train", "validation", "test")}
    split_names = {split: name for split, name in asked.items() if name is not None}
    notes: list[str] = []
    named = {split: source for split, source in given.items() if source is not None}
    whole = named.get("train")
    if isinstance(whole, Mapping) and _holds_splits(whole):
        if len(named) > 1:
            raise ConfigError("the train data is a DatasetDict with its own splits", fix="Pass no other data.")
        splits = _rename(whole, split_names, notes)
    elif whole is not None:
        splits = named
    elif config.dataset_name is not None or config.task_name is not None:
        from tunesmith.data import hub

        if config.dataset_name is not None:
            found = hub.load_by_name(config.dataset_name, config.dataset_config_name)
        else:
            found = hub.load_dataset("glue", config.task_name)
        splits = {**_rename(found, split_names, notes), **named}
    elif named:
        splits = named
    else:
        raise ConfigError("no data", fix="Set --train_file, --dataset_name or --task_name.")
    if "train" not in splits:
        fix = "Set --train_file, or name the split train."
        raise DataError(f"there is no train split, only {', '.join(splits)}", fix=fix)
    first = [s for s in ("train", "validation", "test") if s in splits]
    sources = {s: read(splits[s], name=s) for s in [*first, *(s for s in splits if s not in first)]}
    return follow_split_column(sources, config.split_column_name, notes), notes


def _holds_splits(data: Mapping[str, Any]) -> bool:
    """Return whether a mapping has one table for each split, as a DatasetDict does, and not one list for each column."""
    return bool(data) and all(
        isinstance(value, Mapping)
        or hasattr(value, "column_names")
        or hasattr(value, "columns")
        or (isinstance(value, list) and bool(value) and isinstance(value[0], Mapping))
        for value in data.values()
    )


def _rename(splits: Mapping[str, Any], asked: Mapping[str, str], notes: list[str]) -> dict[str, Any]:
    """Return splits under our names; other splits than train, validation and test are skipped with a note."""
    for ours, theirs in asked.items():
        if theirs not in splits:
            fix = did_you_mean(theirs, tuple(splits))
            raise DataError(f"--{ours}_split_name: no split {theirs!r}; found: {', '.join(splits)}", fix=fix)
    ours_by_theirs = {theirs: ours for ours, theirs in asked.items()}
    renamed: dict[str, Any] = {}
    for split, data in splits.items():
        name = ours_by_theirs.get(split) or {**SPLITS, **_MATCHED}.get(split, split)
        displaced = split not in ours_by_theirs and name in asked
        if displaced or not name.startswith(("train", "validation", "test")):
            notes.append(f"Split {split!r} is not used.")
        elif name in renamed:
            raise DataError(f"two splits are called {name}", fix="Rename one of them.")
        else:
            renamed[name] = data
    return renamed


SPLIT_COLUMNS = ("split", "set", "subset", "partition", "fold")


def follow_split_column(sources: Mapping[str, Source], asked: str | None, notes: list[str]) -> dict[str, Source]:
    """Split one file by a column: `asked`, or one with a usual name whose cells are all names of splits.

    "none": no column. A detected column is ignored if a validation or test file is set, or if other cells occur.
    """
    train = sources.get("train")
    if train is None or asked == "none":
        return dict(sources)
    if asked is not None and asked not in train.column_names:
        raise train.no_column(asked, "--split_column_name")
    if asked is not None and len(sources) > 1:
        raise ConfigError("--split_column_name requires a single file with all rows", fix="Set only --train_file.")
    name = asked or next((n for n in train.column_names if n.lower().strip() in SPLIT_COLUMNS), None)
    if name is None:
        return dict(sources)
    cells = [str(cell).strip().lower() for cell in train.dataset.with_format(None)[name]]
    found = dict.fromkeys(cells)
    unknown = [cell for cell in found if cell not in SPLITS]
    if unknown or "train" not in map(SPLITS.get, found) or len(sources) > 1:
        if asked is not None:
            what = f"has {', '.join(map(repr, unknown[:4]))}" if unknown else "has no train rows"
            fix = "Its cells say train, validation (valid, val, dev) or test."
            raise DataError(f"column {name!r} {what}", where=train.origin, fix=fix)
        if len(found) > 1 and any("train" in cell for cell in found):
            shown = ", ".join(sorted(found)[:4])
            notes.append(f"Column {name!r} ({shown}) is not used: all rows of the file are training data.")
        return dict(sources)
    if len(set(map(SPLITS.get, found))) == 1:
        return dict(sources)
    rows: dict[str, list[int]] = {split: [] for split in ("train", "validation", "test")}
    for row, cell in enumerate(cells):
        rows[SPLITS[cell]].append(row)
    counts = ", ".join(f"{len(rows[split]):,} {split}" for split in rows if rows[split])
    followed = f"Column {name!r} contains the split of each row: {counts} rows"
    notes.append(f"{followed} (--split_column_name none: not followed).")
    return {split: train.select(picked, split) for split, picked in rows.items() if picked}


def _seed(config: RunConfig) -> int:
    return config.seed if config.data_seed is None else config.data_seed


def _hold_out(
    parts: dict[str, Part], columns: Columns, labels: LabelMap, notes: list[str], config: RunConfig
) -> dict[str, Part]:
    """Take the validation split from train if there is none and one is needed."""
    fraction, seed, fold = config.validation_split_fraction, _seed(config), config.fold
    given = any(split.startswith(("validation", "gold")) for split in parts)
    if given and fold is not None:
        problem = "--folds uses training rows for validation, but there is a validation set"
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
    how, seed = "at random" if task is Task.MULTILABEL else "stratified by label", _seed(config)
    limits = {"train": config.max_train_samples, "validation": config.max_eval_samples, "test": config.max_eval_samples}
    drawn = {}
    for split, part in parts.items():
        limit = next((limits[kind] for kind in limits if split.startswith(kind)), None)
        drawn[split] = sample_part(part, limit, task=task, seed=seed)
        if len(drawn[split]) < len(part):
            used = f"{len(drawn[split]):,} of {len(part):,} {split} rows"
            notes.append(f"Sample: {used}, drawn {how} (seed {seed}).")
    return drawn


def read_unlabeled(
    source: Any,
    *,
    text: Sequence[str],
    name: str = "input",
    reading: Reading = READ_AS_USUAL,
    on_progress: OnProgress | None = None,
) -> Source:
    """Read rows to predict, with all their columns (`Source.column_names`); `text` must be there and filled in.

    Three or more text columns are rendered into one more column, `input_columns(text)`.
    """
    rows = read_source(source, name=name, reading=reading, on_progress=on_progress)
    if not reading.allow_empty_text:
        rows = _without_empty_end(rows, [])
    require_text(rows, text)
    rows = render_source(rows, text)
    found, _ = _text_reasons(rows, input_columns(text), allow_empty_text=reading.allow_empty_text)
    if found:
        _refuse_text(rows, min(found), found[min(found)][0])
    return rows


def read_labeled(
    source: Any,
    *,
    columns: Columns,
    labels: LabelMap,
    reading: Reading = READ_AS_USUAL,
    merge_label_variants: bool = False,
) -> Dataset:
    """Read rows to evaluate a trained model on. "labels" are encoded with the model's label names; -1 stays unlabeled."""
    rows = {"test": read_unlabeled(source, text=columns.text, name="test", reading=reading)}
    names = None if labels.task is Task.REGRESSION else labels.names
    rules = LabelRules(names, merge_variants=merge_label_variants, allow_single=True)
    return encode_labels(unwrap_single_labels(rows, columns), columns, rules, [])[1]["test"]


def read_source(
    source: Any,
    *,
    name: str,
    reading: Reading = READ_AS_USUAL,
    on_progress: OnProgress | None = None,
) -> Source:
    """Read a file, a `save_to_disk` folder or a table in memory; at least one row.

    `on_progress(bytes_done, bytes_total)` is called while a text file is parsed.
    """
    if not isinstance(source, str | Path):
        from tunesmith.data.tables import read_memory

        found = read_memory(source, name)
    else:
        path, origin = Path(source).expanduser(), str(source)
        with readable(path, origin):
            if path.is_dir():
                found = _from_folder(path, name, origin)
            else:
                from datasets import Dataset

                version = file_version(path)
                kind, gzipped = kind_of_file(path, origin, reading.delimiter)
                refuse_other_content(path, kind, origin, gzipped=gzipped)
                if kind in ("parquet", "arrow", "sheet"):
                    table, note = _read_binary(path, kind, origin, reading.sheet_name)
                else:
                    with open_bytes(path, gzipped=gzipped) as stream:
                        dialect = choose_dialect(kind, reading) if kind in ("csv", "tsv") else None
                        lines = text_lines(
                            stream,
                            origin,
                            encoding=reading.encoding,
                            longest=MAX_ARRAY_CHARS if kind == "json" else MAX_RECORD_CHARS,
                            dialect=dialect,
                            on_progress=on_progress,
                        )
                        if dialect is not None:
                            table, note = _read_delimited(lines, origin, dialect, reading.skip_bad_rows)
                        else:
                            table, note = _read_json(lines, origin, kind)
                if any(column.endswith(".responses") for column in table.column_names):
                    from tunesmith.data.json_files import merge_responses

                    table, note = merge_responses(table), _export_note(origin, "Argilla")
                if file_version(path) != version:
                    fix = "Run again when it is complete."
                    raise DataError("the file changed while it was read", where=origin, fix=fix)
                with binary_errors("a table", origin):
                    # With a fingerprint, `datasets` doesn't pickle and hash the whole table.
                    mark = hashlib.sha256(repr((origin, version)).encode()).hexdigest()[:16]
                    rows = Dataset(table, fingerprint=mark)
                    found = Source(name, rows, origin, kind not in ("parquet", "arrow"), note)
    if found.dataset.num_rows == 0:
        raise DataError("there are no rows", where=found.origin, fix="It needs at least one row.")
    return found


def _table_of(batches: Iterator[Any]) -> Any:
    import pyarrow as pa

    found = list(batches)
    return pa.Table.from_batches(found) if found else pa.table({})


def _read_delimited(lines: Iterator[str], origin: str, usual: Dialect, skip_bad: bool | None) -> tuple[Any, str | None]:
    """Return a table of strings with line numbers, and a note about quotes or the delimiter that was found."""
    import pyarrow as pa

    head = list(islice(lines, SNIFFED_LINES))
    first = "".join(head)
    dialect = sniff_dialect(first, usual)
    batches = []
    for block in delimited_blocks(chain(head, lines), origin=origin, dialect=dialect, skip_bad=skip_bad):
        columns = {name: pa.array(cells, pa.string()) for name, cells in block.columns.items()}
        columns[LINE_COLUMN] = pa.array(block.lines, pa.int64())
        if skip_bad:
            columns[BAD_COLUMN] = pa.array(map(block.bad.get, range(len(block.lines))), pa.string())
        batches.append(pa.record_batch(columns))
    note = None
    if not dialect.quoting and has_quoted_cells(first, dialect):
        note = f"Reading: quotes in {origin} are kept as text. Use --quoting minimal to parse them."
    elif dialect.delimiter != usual.delimiter:
        found = DELIMITER_NAMES.get(dialect.delimiter, repr(dialect.delimiter))
        note = f"Reading: the columns of {origin} are separated by {found}."
    return _table_of(iter(batches)), note


def _read_json(lines: Iterator[str], origin: str, kind: str) -> tuple[Any, str | None]:
    from tunesmith.data.json_files import json_table

    table, tool = json_table(lines, origin, array_allowed=kind == "json")
    return table, None if tool is None else _export_note(origin, tool)


def _export_note(origin: str, tool: str) -> str:
    return f"Reading: {origin} is an export of {tool}. With several answers, the majority is the label."


def _read_binary(path: Path, kind: str, origin: str, sheet: str | None) -> tuple[Any, str | None]:
    from tunesmith.data.tables import arrow_batches, parquet_batches, sheet_batches

    if kind != "sheet":
        return _table_of((parquet_batches if kind == "parquet" else arrow_batches)(path, origin)), None
    facts: dict[str, Any] = {}
    table = _table_of(sheet_batches(path, origin=origin, sheet=sheet, facts=facts))
    others = ", ".join(facts["other_sheets"])
    return table, f"Reading: sheet {facts['sheet']!r} of {origin}; not read: {others}." if others else None


def _from_folder(path: Path, name: str, origin: str) -> Source:
    from datasets import Dataset

    saved = load_folder(path, origin)
    if isinstance(saved, Dataset):
        return Source(name, saved, origin)
    if name not in saved:
        fix = "Pass the folder of one split, or the whole folder as --dataset_name."
        raise DataError(f"contains the splits {', '.join(saved)}, none is {name!r}", where=origin, fix=fix)
    return Source(name, saved[name], origin)


def is_saved_dataset(path: Path) -> bool:
    """Return whether the folder was written by `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def load_folder(path: Path, origin: str) -> Any:
    """Load the Dataset or DatasetDict that `save_to_disk` wrote."""
    from datasets import load_from_disk

    if not is_saved_dataset(path):
        files = sorted(p.name for p in path.iterdir() if p.suffix in KINDS)[:5] if os.access(path, os.R_OK) else []
        fix = f"Pass a file in it: {', '.join(files)}." if files else None
        raise DataError("is a folder that was not written by save_to_disk", where=origin, fix=fix)
    with binary_errors("a saved dataset", origin):
        return load_from_disk(str(path))


TEXT_PLACEHOLDERS = frozenset(
    ["n/a", "nan", "#n/a", "null", "(null)", "<na>", "\\n", "none", "nat", "#ref!", "#value!", "#name?", "#div/0!"]
)
"""Texts that programs write for a missing value. They are kept as text, because people write them too, but are reported."""
MISSING_WORDS = frozenset(["n/a", "na", "nan", "#n/a", "n.a.", "null", "(null)", "-", "--", "?", "<na>", "nil", "\\n"])
"""Words that spreadsheets write for a missing value."""


class Reason(NamedTuple):
    """Why a row is bad; `word` is its label, if it looks like a missing value."""

    column: str
    problem: str
    word: str | None = None

    def __str__(self) -> str:
        return f"{self.column}: {self.problem}" if self.column else self.problem


Reasons = dict[int, list[Reason]]
"""By row."""


@dataclass(frozen=True)
class BadRow:
    """A skipped row: its place, the reasons and its cells."""

    where: str
    reasons: tuple[str, ...]
    cells: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict."""
        return {"where": self.where, "reasons": list(self.reasons), "row": self.cells}


def remove_bad_rows(
    sources: Mapping[str, Source], columns: Columns, notes: list[str], config: RunConfig
) -> tuple[dict[str, Source], list[BadRow]]:
    """Return the sources without their bad rows, and those rows; their number goes to `notes`.

    Without `skip_bad_rows` they are an error.
    """
    kept: dict[str, Source] = {}
    bad: list[BadRow] = []
    skip, named = config.skip_bad_rows, config.label_names or ()
    for split, source in sources.items():
        source = _without_empty_end(source, notes)
        if split.startswith("test") and _is_unlabeled(source, columns.label, named):
            source = source.with_cells(source.dataset.remove_columns([columns.label]))
        found, placeholders = _text_reasons(source, columns.text, allow_empty_text=config.allow_empty_text)
        if placeholders and not skip:
            words = sorted({reason.word or "" for reasons in placeholders.values() for reason in reasons})
            notes.append(
                f"Warning: {len(placeholders):,} {split} texts are only {' or '.join(map(repr, words))} (first: "
                f"{source.where(min(placeholders))}). They are used as text; --skip_bad_rows skips them."
            )
        elif skip:
            found |= {row: [*found.get(row, []), *reasons] for row, reasons in placeholders.items()}
        if source.has_label(columns.label):
            _add_label_reasons(found, source, columns.label, columns.task, named)
        kept[split] = source
        if BAD_COLUMN in source.dataset.column_names:
            found |= _unread_reasons(source)
            kept[split] = source.with_cells(source.dataset.remove_columns([BAD_COLUMN]))
        if found and not skip:
            _refuse(source, found)
        elif found:
            kept[split] = _without(kept[split], found)
            rows = source.dataset.select_columns(source.column_names).with_format(None)
            bad += [BadRow(source.where(row), tuple(map(str, found[row])), rows[row]) for row in sorted(found)]
            notes.append(f"{len(found):,} of {rows.num_rows:,} {split} rows were skipped: see bad_rows.jsonl.")
    return kept, bad


def _without_empty_end(source: Source, notes: list[str]) -> Source:
    """Return the source without the rows of empty cells that spreadsheets write at the end of a file."""
    names = [name for name in source.dataset.column_names if name != LINE_COLUMN]
    rows = source.dataset.select_columns(names).with_format(None)
    whole = count = rows.num_rows
    while source.lines and count > 1 and not any(rows[count - 1].values()):
        some = rows[max(0, count - 1000) : count].values()
        filled = [any(cells) for cells in zip(*some, strict=True)]
        count -= filled[::-1].index(True) if True in filled else len(filled)
    if not 0 < count < whole:
        return source
    notes.append(f"The last {whole - count:,} {source.name} rows are empty and skipped.")
    return source.select(range(count))


def _is_missing_word(name: str) -> bool:
    return name.strip().lower() in MISSING_WORDS


def _is_unlabeled(source: Source, label: str | None, label_names: Sequence[str]) -> bool:
    """Return whether the label column exists and all of its cells are empty or words for a missing value."""
    if label is None or label not in source.column_names or is_list_type(source.type_of(label)):
        return False
    return all(_is_missing_word(name) and name not in label_names for name in survey_labels(source, label).counts)


def _unread_reasons(source: Source) -> Reasons:
    """Find rows that could not be parsed. Their empty cells are not a second reason."""
    found: Reasons = {}
    for start, table in source.scan([BAD_COLUMN]):
        cells = table.column(BAD_COLUMN).to_pylist()
        found |= {row: [Reason("", why)] for row, why in enumerate(cells, start) if why is not None}
    return found


def _text_reasons(source: Source, text: Sequence[str], *, allow_empty_text: bool) -> tuple[Reasons, Reasons]:
    """Find missing and empty texts, and texts that are only a word for a missing value; each text of a pair counts."""
    import pyarrow as pa
    import pyarrow.compute as pc

    found: Reasons = {}
    placeholders: Reasons = {}
    words = pa.array(sorted(TEXT_PLACEHOLDERS))
    for start, table in source.scan(list(text)):
        for name in text:
            cells = pc.utf8_trim_whitespace(table.column(name).combine_chunks()).cast(pa.large_string())
            _mark(found, start, pc.is_null(cells), Reason(name, "the text is missing"))
            if not allow_empty_text:
                _mark(found, start, pc.equal(cells, ""), Reason(name, "the text is empty"))
            cells = pc.utf8_lower(cells)
            for word in pc.unique(cells.filter(pc.is_in(cells, value_set=words.cast(cells.type)))).to_pylist():
                _mark(placeholders, start, pc.equal(cells, word), Reason(name, f"the text is {word!r}", word))
    return found, placeholders


def _add_label_reasons(found: Reasons, source: Source, label: str, task: Task, label_names: Sequence[str]) -> None:
    import pyarrow.compute as pc

    if source.label_parts(label) or class_names(source, label) or task is Task.MULTILABEL:
        return
    kind = source.type_of(label)
    if is_list_type(kind):
        return
    missing = Reason(label, "the label is missing")
    for start, table in source.scan([label]):
        cells = label_cells(table.column(label))
        if not is_string_type(kind):
            _mark(found, start, pc.is_null(cells, nan_is_null=True), missing)
            continue
        blank = pc.or_(pc.is_null(cells), pc.fill_null(pc.equal(pc.utf8_trim_whitespace(cells), ""), False))
        _mark(found, start, blank, missing)
        if task is Task.REGRESSION:
            number = pc.match_substring_regex(cells, NUMBER)
            _mark(found, start, pc.and_(pc.invert(number), pc.invert(blank)), Reason(label, "not a number"))
            continue
        for value in pc.unique(cells.drop_null()).to_pylist():
            if _is_missing_word(value) and value not in label_names:
                _mark(found, start, pc.equal(cells, value), Reason(label, f"the label is {value!r}", value))


def _mark(found: Reasons, start: int, bad: Any, reason: Reason) -> None:
    """Add a reason to all rows for which the Arrow array `bad` is true; null counts as false."""
    for row in np.flatnonzero(bad.fill_null(False).to_numpy(zero_copy_only=False)).tolist():
        found.setdefault(start + row, []).append(reason)


def _refuse(source: Source, found: Reasons) -> None:
    """Raise an error that lists bad rows or words for missing values. A single missing label is refused during encoding."""
    words = sorted({reason.word for reasons in found.values() for reason in reasons if reason.word is not None})
    if len(found) == 1 and not words:
        [(row, reasons)] = found.items()
        if reasons[0].problem.startswith("the text is "):
            _refuse_text(source, row, reasons[0])
        return
    lines = [f"  {source.where(row)}: {', '.join(map(str, found[row]))}" for row in sorted(found)[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(f"  and {len(found) - SHOWN:,} more")
    what = "\n".join([f"{len(found):,} of {source.dataset.num_rows:,} {source.name} rows cannot be used:", *lines])
    fix = "Correct them, or set --skip_bad_rows to skip them (bad_rows.jsonl in the run folder lists them)."
    if words:
        fix += f" If {' and '.join(map(repr, words))} is a class, list all classes in --label_names."
    raise DataError(what, where=source.origin, fix=f"\n{fix}")


def _refuse_text(source: Source, row: int, reason: Reason) -> NoReturn:
    fix = "Fill it in or remove the row"
    fix += "; --allow_empty_text keeps it." if reason.problem.endswith("empty") else "."
    raise DataError(reason.problem, where=source.where(row, reason.column), fix=fix)


def _without(source: Source, found: Reasons) -> Source:
    good = np.setdiff1d(np.arange(source.dataset.num_rows), np.fromiter(found, dtype=np.int64))
    if not len(good):
        fix = "Check --text_column_names and --label_column_name."
        raise DataError(f"all {len(found):,} {source.name} rows are bad", where=source.origin, fix=fix)
    return source.select(good)
