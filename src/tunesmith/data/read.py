"""Anything that holds rows -> a Source: files are parsed once, kept as Arrow on disk by content, and memory-mapped."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.data.blocks import (
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
from tunesmith.data.row_cache import CachedRows, RowCache, binary_errors
from tunesmith.data.source import Source, checked
from tunesmith.data.text_files import (
    DELIMITER_NAMES,
    Dialect,
    choose_dialect,
    has_quoted_cells,
    recognise_lines,
    refuse_title,
    sniff_dialect,
)
from tunesmith.errors import DataError
from tunesmith.runs.writing import cache_folder, create, hash_file

FORMAT_VERSION = 3
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
    quoting: str | bool | None = None,
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
    """The file with its format and delimiter as recognised from its first lines; lines that are not a table are refused."""
    if file.kind == "lines":
        kind, dialect = recognise_lines(_first_text(file), file.origin)
        file = replace(file, kind=kind, dialect=dialect)
    if file.kind == "json":
        from tunesmith.data.json_rows import refuse_one_object

        refuse_one_object(_first_text(file), file.origin)
    if file.dialect is not None and not file.dialect.sure:
        head = _first_text(file)
        dialect = sniff_dialect(head, file.dialect)
        refuse_title(head, dialect, file.origin)
        file = replace(file, dialect=dialect)
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


def _reading_note(file: _File) -> str | None:
    """A sentence about how the file is read, if its suffix does not already say so."""
    if file.kind == "sheet" and not file.gzipped:
        from tunesmith.data.containers import note_sheet

        return note_sheet(file.path, file.origin, file.sheet)
    if file.kind == "fasttext":
        return f"Reading: {file.origin} holds fastText lines, `__label__NAME text`."
    if file.dialect is not None and not file.dialect.quoting and has_quoted_cells(_first_text(file), file.dialect):
        return f"Reading: the quotes around cells of {file.origin} are part of the cells (--quoting rfc4180: they are not)."
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
    delimiter, lines = file.dialect.delimiter if file.dialect else ",", file.kind not in ("parquet", "arrow")
    with binary_errors("a table", file.origin):
        return Source(name, table.dataset(), file.origin, lines, table.file, _reading_note(file), delimiter)


def _make_table(file: _File, key: str, cache: RowCache) -> CachedRows | None:
    if file.kind not in ("json", "jsonl", "fasttext"):
        binary = file.kind in ("parquet", "arrow", "sheet")
        return cache.build(key, _binary_batches(file, cache.root) if binary else _text_batches(file))
    from tunesmith.data.json_rows import ColumnKinds, Widened

    kinds = ColumnKinds(file.origin, lines=True)
    while True:
        try:
            return cache.build(key, _text_batches(file, kinds))
        except Widened:
            kinds.restart()


def _text_batches(file: _File, kinds: Any = None) -> Iterator[Any]:
    """`kinds` is what is known of the columns of objects; the cells of delimited text are strings."""
    with file.open() as stream:
        blocks = text_blocks(stream, encoding=file.encoding, on_progress=file.on_progress)
        if file.dialect is not None:
            from tunesmith.data.delimited import delimited_batches

            yield from delimited_batches(blocks, origin=file.origin, dialect=file.dialect, skip_bad=file.skip_bad)
        else:
            from tunesmith.data.json_files import fasttext_batches, json_batches

            if file.kind == "fasttext":
                yield from fasttext_batches(blocks, origin=file.origin, kinds=kinds)
            else:
                yield from json_batches(blocks, origin=file.origin, kinds=kinds, array_allowed=file.kind == "json")
        if stream.sha256 != file.digest:
            fix = "Run again when it is complete."
            raise DataError("the file changed while it was read", where=file.origin, fix=fix)


def _binary_batches(file: _File, cache_dir: Path) -> Iterator[Any]:
    from tunesmith.data.containers import arrow_batches, parquet_batches, sheet_batches

    if file.gzipped:
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix=".unpacked-") as folder:
            plain = Path(folder) / "rows"
            with file.open() as stream, create(plain) as out:
                shutil.copyfileobj(stream, out, 1 << 20)
            yield from _binary_batches(replace(file, path=plain, gzipped=False), cache_dir)
    elif file.kind == "parquet":
        yield from parquet_batches(file.path, origin=file.origin, limits=file.limits)
    elif file.kind == "arrow":
        yield from arrow_batches(file.path, origin=file.origin)
    else:
        yield from sheet_batches(file.path, origin=file.origin, sheet=file.sheet)


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
        raise DataError("is a folder, but not one that save_to_disk wrote", where=origin, fix=fix)
    with binary_errors("a saved dataset", origin):
        return load_from_disk(str(path))
