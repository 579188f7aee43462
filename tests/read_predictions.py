"""Read CSV and TSV predictions with the exact text of every cell."""

from __future__ import annotations

import re
from pathlib import Path

from tunesmith.data.text_files import Dialect, parse_delimited

ESCAPED = re.compile(r"^'+[=+\-@＝＋－＠\t\r\n]")


def unescape_formula(text: str) -> str:
    """Undo `escape_formula`."""
    return text[1:] if ESCAPED.match(text) else text


def read_predictions(path: Path) -> dict[str, list[str]]:
    """Return the columns of a CSV or TSV file written by `write_table`."""
    header: list[str] = []
    columns: list[list[str]] = []
    with path.open(encoding="utf-8", newline="") as file:
        delimiter = "\t" if path.suffix == ".tsv" else ","
        dialect = Dialect(delimiter, quoting=True, sure=True)
        for records in parse_delimited([file.read()], origin=str(path), dialect=dialect, on_header=header.extend):
            columns = columns or [[] for _ in header]
            for column, values in zip(columns, records.columns, strict=True):
                column += map(unescape_formula, values)
    return dict(zip(map(unescape_formula, header), columns or [[] for _ in header], strict=True))
