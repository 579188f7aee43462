"""Text files whose name does not tell the format (.txt): recognised by their lines. fastText: `__label__NAME text`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from tunesmith.errors import DataError
from tunesmith.reading.blocks import describe_nul
from tunesmith.reading.json_files import text_lines
from tunesmith.reading.json_rows import ColumnKinds, Widened
from tunesmith.reading.ready_commands import train_after
from tunesmith.reading.text_files import DELIMITER_NAMES, Dialect, choose_dialect, cuts_alike, sniff_dialect

MARK = "__label__"
_ROWS = 4_096


def recognise_lines(head: str, origin: str) -> tuple[str, Dialect | None]:
    """("fasttext" | "jsonl" | "csv" | "tsv", how its cells are set apart) of a file that begins with this text."""
    if "\0" in head:
        raise describe_nul(head, origin).at(f"{origin}:1")
    lines = [line for line in head.splitlines()[:200] if line.strip()]
    if sum(line.startswith(MARK) for line in lines) * 2 > len(lines):
        return "fasttext", None
    if head.lstrip().startswith("{"):
        return "jsonl", None
    dialect = sniff_dialect(head, choose_dialect("tsv", delimiter=None, quoting=None))
    if cuts_alike(head, dialect) and len(lines) > 2:
        return ("tsv" if dialect.delimiter == "\t" else "csv"), dialect
    raise _no_columns(lines, origin)


def _no_columns(lines: list[str], origin: str) -> DataError:
    firsts = Counter(line.split(maxsplit=1)[0] for line in lines)
    problem = f"no columns seen: no {', '.join(DELIMITER_NAMES.values())} cuts all of the first lines alike"
    if len(lines) >= 10 and len(firsts) <= len(lines) / 4 and len(firsts) > 1:
        shown = ", ".join(word for word, _ in firsts.most_common(3))
        cut = train_after(r"sed -e 's/[[:space:]]\+/\t/' -e '1i label\ttext'", origin, suffix=".tsv")
        return DataError(problem, where=origin, fix=f"If the first word of a line is its label ({shown}): {cut}")
    fix = "Give --delimiter, or a file with a text and a label in each line, such as .csv, .tsv or .jsonl."
    return DataError(problem, where=origin, fix=fix)


def fasttext_batches(blocks: Iterable[str], *, origin: str, kinds: ColumnKinds) -> Iterator[Any]:
    """Record batches with the columns text and label: names, or lists of names where some line has several."""
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    for number, line in text_lines(blocks, origin):
        if not line.strip():
            continue
        names, text = split_line(line)
        several = kinds.kinds.get("label", "").startswith("list")
        if len(names) > 1 and not several:
            kinds.kinds.update(text="text", label="list:text")
            raise Widened
        rows.append({"text": text, "label": names if several else names[0] if names else None})
        numbers.append(number)
        if len(rows) == _ROWS:
            yield kinds.batch(rows, numbers)
            rows, numbers = [], []
    if rows:
        yield kinds.batch(rows, numbers)


def split_line(line: str) -> tuple[list[str], str]:
    """The labels at the start of a line and the text after them."""
    names = []
    rest = line.strip()
    while rest.startswith(MARK):
        first, _, rest = rest.partition(" ")
        names.append(first.removeprefix(MARK))
        rest = rest.lstrip()
    return names, rest
