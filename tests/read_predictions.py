"""Read CSV and TSV predictions with the exact text of every cell."""

from __future__ import annotations

import csv
import re
from pathlib import Path

csv.field_size_limit(1 << 20)
ESCAPED = re.compile(r"^'+[=+\-@＝＋－＠\t\r\n]")


def unescape_formula(text: str) -> str:
    """Undo `escape_formula`."""
    return text[1:] if ESCAPED.match(text) else text


def read_predictions(path: Path) -> dict[str, list[str]]:
    """Return the columns of a CSV or TSV file written by `write_table`."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ",", strict=True)
        header, *cells = [list(map(unescape_formula, row)) for row in rows]
    return {name: [row[k] for row in cells] for k, name in enumerate(header)}
