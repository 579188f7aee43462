"""Predictions as tables: csv, tsv, jsonl or parquet, input columns kept, input order always.

A spreadsheet runs a cell that begins with = + - @, a tab or a carriage return. In csv and tsv such text gets an
apostrophe in front (and text that already looks escaped gets one more), so `read_predictions` gives the exact text back.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from tunesmith.errors import ConfigError, DataError
from tunesmith.run.sealed import disk_error

FORMATS = (".csv", ".tsv", ".jsonl", ".parquet")
_DANGEROUS = re.compile(r"^'*[=+\-@\t\r]")
_ESCAPED = re.compile(r"^'+[=+\-@\t\r]")


def escape_formula(text: str) -> str:
    """The text, with an apostrophe in front when a spreadsheet would run it."""
    return f"'{text}" if _DANGEROUS.match(text) else text


def unescape_formula(text: str) -> str:
    """What `escape_formula` was given."""
    return text[1:] if _ESCAPED.match(text) else text


def check_format(path: Path) -> None:
    """A ConfigError for a file type that cannot be written."""
    if path.suffix not in FORMATS:
        raise ConfigError(
            f"cannot write {path.suffix or 'a file without a type'}", where=str(path), fix=f"Use {', '.join(FORMATS)}."
        )


def write_table(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes the columns, complete or not at all."""
    check_format(path)
    tmp = path.with_name(f".tmp-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            _write_parquet(tmp, columns)
        elif path.suffix == ".jsonl":
            _write_jsonl(tmp, columns)
        else:
            with tmp.open("w", encoding="utf-8", newline="") as out:
                write_delimited(out, columns, "\t" if path.suffix == ".tsv" else ",")
        tmp.replace(path)
    except OSError as error:
        tmp.unlink(missing_ok=True)
        raise disk_error(error, path) from error


def _rows(columns: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Any, ...]]:
    return zip(*columns.values(), strict=True)


def _write_parquet(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({name: pa.array(values) for name, values in columns.items()}), path)


def _write_jsonl(path: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    with path.open("w", encoding="utf-8") as out:
        for row in _rows(columns):
            out.write(json.dumps(dict(zip(columns, map(_plain, row), strict=True)), ensure_ascii=False) + "\n")


def write_delimited(out: TextIO, columns: Mapping[str, Sequence[Any]], delimiter: str) -> None:
    """Writes csv or tsv text. What could confuse a reader is quoted, in tsv too."""
    writer = csv.writer(out, delimiter=delimiter, lineterminator="\n")
    writer.writerow([escape_formula(str(name)) for name in columns])
    for row in _rows(columns):
        writer.writerow([_cell(v) for v in row])


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _cell(value: Any) -> Any:
    value = _plain(value)
    if value is None:
        return ""
    if isinstance(value, str):
        return escape_formula(value)
    if isinstance(value, (list, tuple, dict)):
        return escape_formula(json.dumps(value, ensure_ascii=False))
    return value


def read_predictions(path: Path) -> dict[str, list[str]]:
    """The columns of a csv or tsv that `write_table` wrote, every cell the exact text that went in."""
    delimiter = "\t" if path.suffix == ".tsv" else ","
    with path.open(encoding="utf-8", newline="") as handle:
        rows = list(csv.reader(handle, delimiter=delimiter, strict=True))
    if not rows:
        raise DataError("is empty", where=str(path))
    names = [unescape_formula(n) for n in rows[0]]
    return {name: [unescape_formula(row[i]) for row in rows[1:]] for i, name in enumerate(names)}
