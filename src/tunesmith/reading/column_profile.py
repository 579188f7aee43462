"""What a column holds, judged by its values and not by its name: text is long and varied, a label repeats."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tunesmith.reading.label_cells import OFF, ON

Kind = Literal["text", "label", "switch", "number", "id", "date", "empty", "list", "other"]
SAMPLE_ROWS = 2_000
_IDS = frozenset(["id", "idx", "index", "guid", "uid", "uuid", "pairid", "rowid", "key", "docid", "nr", "no", "编号"])
_DATE = re.compile(r"^\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([ T]\d{1,2}:\d{2}(:\d{2})?.*)?$")
_WORD_DATE = re.compile(
    r"^(?=.*\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b)(?=.*\d)[\w ,.:/+-]{5,40}$", re.IGNORECASE
)
_RECORDS = re.compile(r'^\[?\s*\{\s*"')
_NUMBER = re.compile(
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
    if _share(texts, _NUMBER) >= 0.95:
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
