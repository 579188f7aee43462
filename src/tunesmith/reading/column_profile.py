"""What a column holds, judged by its values and not by its name: text is long and varied, a label repeats; several labels in
one cell, or one in each of several 0/1 columns, become a column of lists.

Decimal commas and words for nothing are known.
"""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tunesmith.errors import DataError
from tunesmith.reading.source import Source

SEPARATORS = ("|", ";")
"""What sets labels apart without a doubt, once the parts are seen to repeat."""
DOUBTFUL_SEPARATORS = {",": "comma", "/": "slash", " ": "space"}
"""What is asked about: it may be part of a name."""
SEPARATOR_WORDS = {"comma": ",", "slash": "/", "pipe": "|", "semicolon": ";", "space": " ", "tab": "\t"}
MISSING_WORDS = frozenset(["n/a", "na", "nan", "#n/a", "n.a.", "null", "(null)", "-", "--", "?", "<na>", "nil"])
_OTHER_NUMBER = re.compile(r"^[+-]?\d+(,\d+|([.,]\d+)?\s?%)$")
_NUMBER = re.compile(r"^[+-]?\d+([.,]\d+)?(\s?%)?$")
CURRENCY = r"^\s*(?:[€$£¥₹]|[A-Z]{3}\b)\s?|\s?(?:[€$£¥₹]|\b[A-Z]{3})\s*$"
"""A sign or code of money before or after a number."""
_GROUPED = {
    "1.234,5": re.compile(r"^[+-]?\d{1,3}(\.\d{3})*(,\d+)?$"),
    "1,234.5": re.compile(r"^[+-]?\d{1,3}(,\d{3})*(\.\d+)?$"),
}
_BOTH = re.compile(r"\d\.\d{3},\d|\d,\d{3}\.\d|\d([.,])\d{3}\1\d{3}")
ON = frozenset(["1", "1.0", "true", "yes", "y", "ja", "oui", "si", "sí", "sim", "是"])
OFF = frozenset(["0", "0.0", "false", "no", "n", "nein", "non", "não", "否"])


def find_separator(counts: Mapping[str, int]) -> str | None:
    """What sets several labels of one cell apart: a character, "json" for lists written out, or None."""
    cells = [cell for cell in counts if cell]
    if cells and all(cell.strip().startswith("[") and cell.strip().endswith("]") for cell in cells):
        return "json"
    return next((sep for sep in (*SEPARATORS, *DOUBTFUL_SEPARATORS) if _sets_apart(sep, cells, counts)), None)


def _sets_apart(separator: str, cells: Sequence[str], counts: Mapping[str, int]) -> bool:
    """Whether the parts of cells are used again in other cells, as labels are."""
    several = [cell for cell in cells if separator in cell]
    if sum(counts[cell] for cell in several) < 2 or all(_NUMBER.match(cell) for cell in cells):
        return False
    uses: dict[str, int] = {}
    for cell in cells:
        for part in split_cell(cell, separator):
            uses[part] = uses.get(part, 0) + 1
    again = sum(1 for part in uses if uses[part] > 1)
    short = all(len(part.split()) <= 4 for part in uses) and (separator != " " or all(p[0] == "#" for p in uses))
    return short and again >= len(uses) / 2 and len(uses) < len(cells) + len(several)


def split_cell(cell: str | None, separator: str) -> list[str]:
    """The labels of one cell, without the spaces around them."""
    if cell is None or not cell.strip():
        return []
    if separator == "json":
        try:
            found = json.loads(cell)
        except ValueError:
            try:
                found = ast.literal_eval(cell)  # ['a', 'b'], as Python prints a list
            except (ValueError, SyntaxError, MemoryError, RecursionError):
                found = None
        if not isinstance(found, list) or not all(isinstance(v, (str, int)) for v in found):
            raise ValueError(f"{cell[:60]!r} is not a list of labels")
        return [str(value) for value in found]
    return [part.strip() for part in cell.split(separator) if part.strip()]


def unfold_cells(source: Source, column: str, separator: str) -> Source:
    """The source with lists of labels in the column."""
    cells = source.dataset.with_format(None)[column]
    lists = []
    for row, cell in enumerate(cells):
        try:
            lists.append(split_cell(cell, separator))
        except ValueError as error:
            raise DataError(str(error), where=source.where(row, column), fix='Write ["a", "b"].') from None
    return _with_lists(source, column, lists)


def join_switches(source: Source, columns: Sequence[str]) -> Source:
    """The source with one more column, named by the columns with commas: the names of those that hold 1, true or yes."""
    table = source.dataset.with_format(None)
    rows: list[list[str]] = [[] for _ in range(source.dataset.num_rows)]
    for name in columns:
        for row, value in enumerate(table[name]):
            word = str(value).strip().lower()
            if word in ON:
                rows[row].append(name)
            elif word not in OFF:
                raise DataError(f"{value!r} is neither 0 nor 1", where=source.where(row, name), fix="Write 0 or 1.")
    return _with_lists(source, ",".join(columns), rows)


def _with_lists(source: Source, column: str, lists: list[list[str]]) -> Source:
    import pyarrow as pa
    from datasets import Dataset

    dataset = source.dataset.remove_columns([column]) if column in source.dataset.column_names else source.dataset
    table = dataset.with_format("arrow")[:]
    wide = table.append_column(column, pa.array(lists, pa.list_(pa.string())))
    return replace(source, dataset=Dataset(wide), table_file=None)


def has_other_numbers(values: Iterable[str]) -> bool:
    """Whether the values are numbers and some are written as 3,5 or 40 %."""
    found = [value for value in values if value]
    return bool(found) and all(_NUMBER.match(v) for v in found) and any(_OTHER_NUMBER.match(v) for v in found)


def number_style(values: Iterable[str]) -> str | None:
    """ "1.234,5" or "1,234.5" where all values are numbers of that form and some show which one; None for anything else."""
    found = [re.sub(CURRENCY, "", value).strip() for value in values if value]
    money = any(re.search(CURRENCY, value) for value in values if value)
    styles = [name for name, form in _GROUPED.items() if found and all(form.match(value) for value in found)]
    shown = any(_BOTH.search(value) for value in found) or (money and len(styles) == 1)
    return styles[0] if len(styles) == 1 and shown else None


def looks_like_thousands(values: Iterable[str]) -> bool:
    """Whether every comma stands before exactly three digits: 1,234 may be a thousand and more."""
    commas = [value for value in values if "," in value]
    return bool(commas) and all(len(value.rpartition(",")[2]) == 3 for value in commas)


def is_missing_word(name: str) -> bool:
    """Whether a label is a word that spreadsheets write for no value."""
    return name.strip().lower() in MISSING_WORDS


Kind = Literal["text", "label", "switch", "number", "id", "date", "empty", "list", "other"]
SAMPLE_ROWS = 2_000
_IDS = frozenset(["id", "idx", "index", "guid", "uid", "uuid", "pairid", "rowid", "key", "docid", "nr", "no", "编号"])
_DATE = re.compile(r"^\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([ T]\d{1,2}:\d{2}(:\d{2})?.*)?$")
_WORD_DATE = re.compile(
    r"^(?=.*\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b)(?=.*\d)[\w ,.:/+-]{5,40}$", re.IGNORECASE
)
_RECORDS = re.compile(r'^\[?\s*\{\s*"')
_ANY_NUMBER = re.compile(
    r"^[€$£¥₹]?\s?[+-]?(\d{1,3}(\.\d{3})+(,\d+)?|\d{1,3}(,\d{3})+(\.\d+)?|\d+([.,]\d+)?|[.,]\d+)([eE][+-]?\d+)?(\s?[%€$£¥₹])?$"
)


@dataclass(frozen=True)
class ColumnProfile:
    """The kind of a column with what it rests on. `examples` are its most frequent values."""

    name: str
    kind: Kind
    values: int
    different: int
    words: float
    examples: tuple[str, ...]

    @property
    def holds_words(self) -> bool:
        """Whether most of its frequent values are written with letters and no digit."""
        plain = [value for value in self.examples if any(map(str.isalpha, value)) and not any(map(str.isdigit, value))]
        return self.kind in ("text", "label", "other", "id") and len(plain) * 2 > len(self.examples)

    def describe(self) -> str:
        """`queue (4 values: billing, access, ...)`."""
        shown = ", ".join(_short(value) for value in self.examples[:3])
        more = ", ..." if self.different > 3 else ""
        return f"{self.name!r} ({self.different:,} different values: {shown}{more})"


def profile_columns(sample: dict[str, list[Any]]) -> dict[str, ColumnProfile]:
    """The profile of each column, from a sample of its values."""
    return {name: profile_column(name, values) for name, values in sample.items()}


def profile_column(name: str, values: Sequence[Any]) -> ColumnProfile:
    """What one column holds."""
    if any(isinstance(value, (list, tuple, dict)) for value in values):
        return ColumnProfile(name, "list", len(values), 0, 0.0, ())
    texts = [str(value).strip() for value in values if value is not None and str(value).strip()]
    if not texts:
        return ColumnProfile(name, "empty", 0, 0, 0.0, ())
    counts = Counter(texts)
    words = sum(min(_words(text), 60) for text in texts) / len(texts)
    common = tuple(text for text, _ in counts.most_common(4))
    kind = _kind(name, texts, counts, words, is_text=any(isinstance(v, str) for v in values))
    return ColumnProfile(name, kind, len(texts), len(counts), words, common)


def is_id_name(name: str) -> bool:
    """Whether a column is named like a row number or key."""
    lower = name.lower().strip()
    return lower in _IDS or lower.endswith(("_id", "-id", " id")) or lower.startswith(("unnamed_", "__index_level_"))


def _kind(name: str, texts: Sequence[str], counts: Counter[str], words: float, *, is_text: bool) -> Kind:
    varied = len(counts) / len(texts)
    if is_id_name(name):
        return "id"
    if {text.lower() for text in counts} <= ON | OFF:
        return "switch"
    if _share(texts, _DATE) >= 0.95 or _share(texts, _WORD_DATE) >= 0.95:
        return "date"
    if _share(texts, _RECORDS) >= 0.95:
        return "other"
    if _share(texts, _ANY_NUMBER) >= 0.95:
        whole = all(text.lstrip("+-").isdigit() for text in texts)
        if whole and varied > 0.9 and len(texts) > 5:
            return "id"
        few = len(counts) <= max(12, len(texts) // 10) and len(counts) <= 50
        return "label" if whole and few else "number"
    if not is_text:
        return "other"
    if words >= 3 and varied >= 0.4:
        return "text"
    if varied > 0.9 and len(texts) > 5:
        return "text" if words >= 1.8 else "id"
    return "label" if len(counts) <= max(2, len(texts) // 2) else "text" if words >= 2 else "other"


def _words(text: str) -> float:
    """Words; in scripts that write none apart, two characters count as one."""
    wide = sum(1 for char in text if unicodedata.east_asian_width(char) in "WF" or "\u0e00" <= char <= "\u0e7f")
    return len(text.split()) if wide < len(text) / 4 else max(len(text.split()), wide / 2)


def _share(texts: Sequence[str], pattern: re.Pattern[str]) -> float:
    return sum(1 for text in texts if pattern.match(text)) / len(texts)


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:21]}..."
