"""Rows of csv, tsv and JSON lines as plain Python columns, block by block: needs neither pyarrow nor `datasets`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from io import BytesIO
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tunesmith.data.csv_files import Dialect, check_header, choose_dialect, parse_delimited, sniff_dialect
from tunesmith.data.files import CountedBytes, DecompressionLimits, UnreadableText, readable, text_blocks
from tunesmith.data.json_files import BATCH_ROWS, convert_export, flatten_record, line_records
from tunesmith.errors import ConfigError, DataError

TEXT_KINDS = ("csv", "tsv", "jsonl")


def kind_of_rows(path: Path) -> tuple[str, bool]:
    """("csv" | "tsv" | "jsonl" | "parquet", whether it is gzipped), from the name of a file."""
    gzipped = path.suffix.lower() == ".gz"
    kind = (path.with_suffix("") if gzipped else path).suffix.lower().removeprefix(".")
    kind = {"ndjson": "jsonl", "json": "jsonl", "tab": "tsv", "pq": "parquet"}.get(kind, kind)
    if kind not in (*TEXT_KINDS, "parquet") or (gzipped and kind == "parquet"):
        fix = "Use .csv, .tsv, .jsonl, each also .gz, or .parquet."
        raise ConfigError("cannot be read as rows", where=str(path), fix=fix)
    return kind, gzipped


def column_blocks(
    path: Path,
    *,
    kind: str,
    gzipped: bool = False,
    encoding: str | None = None,
    delimiter: str | None = None,
    quoting: str | None = None,
) -> Iterator[dict[str, list[Any]]]:
    """Columns of the next rows, in order. A JSON object without a key of its block has None there."""
    origin = str(path)
    with (
        readable(path, origin),
        CountedBytes(path, origin=origin, gzipped=gzipped, limits=DecompressionLimits()) as file,
    ):
        dialect = None if kind == "jsonl" else choose_dialect(kind, delimiter=delimiter, quoting=quoting)
        yield from _column_blocks(text_blocks(file, encoding=encoding), origin, dialect)


def read_stdin(*, encoding: str | None, delimiter: str | None, quoting: str | None) -> dict[str, list[Any]]:
    """All columns of the csv or JSON lines on stdin; text that starts with a brace is JSON."""
    data = sys.stdin.buffer.read()
    stream: Any = SimpleNamespace(read=BytesIO(data).read, origin="stdin")
    is_json = data.lstrip()[:1] == b"{"
    dialect = None if is_json else choose_dialect("csv", delimiter=delimiter, quoting=quoting)
    columns = next(fixed_runs(_column_blocks(text_blocks(stream, encoding=encoding), "stdin", dialect)), None)
    if columns is None:
        raise DataError("has no rows", where="stdin", fix="It needs a header line and at least one row.")
    return columns


def fixed_runs(blocks: Iterator[dict[str, list[Any]]], size: int = sys.maxsize) -> Iterator[dict[str, list[Any]]]:
    """The same rows in runs of `size`, however the reader cut them."""
    held: dict[str, list[Any]] = {}
    rows = 0
    for block in blocks:
        count = len(next(iter(block.values()), []))
        for name in {**held, **block}:
            held.setdefault(name, [None] * rows).extend(block.get(name, [None] * count))
        rows += count
        while rows >= size:
            yield {name: values[:size] for name, values in held.items()}
            held = {name: values[size:] for name, values in held.items()}
            rows -= size
    if rows:
        yield held


def _column_blocks(blocks: Iterator[str], origin: str, dialect: Dialect | None) -> Iterator[dict[str, list[Any]]]:
    if dialect is None:
        _, records = convert_export(line_records(blocks, origin))
        while some := [flatten_record(row) for _, row in islice(records, BATCH_ROWS)]:
            yield {name: [row.get(name) for row in some] for name in dict.fromkeys(chain.from_iterable(some))}
        return
    try:
        head = next(blocks, "")
    except UnreadableText as fault:
        raise fault.at(f"{origin}:1:1") from None
    dialect = sniff_dialect(head, dialect)
    names: list[str] = []

    def on_header(header: list[str]) -> None:
        names.extend(check_header(header, origin=origin, dialect=dialect))

    for found in parse_delimited(chain([head], blocks), origin=origin, dialect=dialect, on_header=on_header):
        yield dict(zip(names, found.columns, strict=True))
