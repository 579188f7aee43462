"""Labels that a person reads as one and the data holds as two: each kind is one warning, with the way out."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping

from tunesmith.findings import Finding

SHOWN = 4
_FIX = "Write both the same in the data, or list both in --label_names to keep them apart."


def find_alikes(counts: Mapping[str, int]) -> list[Finding]:
    """One warning for each way in which labels look alike; `counts` has the train rows of each label."""
    findings = [_blank([name for name in counts if not visible(name).strip()], counts)]
    known: set[frozenset[str]] = set()
    for kind, key in _KEYS.items():
        groups: dict[str, list[str]] = {}
        for name in counts:
            groups.setdefault(key(name), []).append(name)
        pairs = [
            (group[0], other) for group in groups.values() for other in group[1:] if {group[0], other} not in known
        ]
        known |= {frozenset(pair) for pair in pairs}
        findings.append(_warning(kind, pairs, counts))
    return [finding for finding in findings if finding is not None]


def visible(text: str) -> str:
    """The text without characters that take no room: zero-width spaces and joiners, marks of direction."""
    return "".join(char for char in text if unicodedata.category(char) not in ("Cf", "Cc"))


def alike(name: str) -> str:
    """Equal for labels that differ only in case, spaces, Unicode form, invisible characters or the way a number is written."""
    return " ".join(_number(unicodedata.normalize("NFC", visible(name))).casefold().split())


def _number(name: str) -> str:
    try:
        return repr(float(name)) if name.strip().isascii() and "_" not in name else name
    except ValueError:
        return name


_KEYS: dict[str, Callable[[str], str]] = {
    "in their Unicode form (an accent of its own or within the letter)": lambda name: unicodedata.normalize(
        "NFC", name
    ),
    "in invisible characters": visible,
    "in the way a number is written": _number,
    "in case or spaces": lambda name: " ".join(name.casefold().split()),
    "in several of these": alike,
}
"""How they differ -> what is then equal, the narrowest first."""


def _warning(kind: str, pairs: list[tuple[str, str]], counts: Mapping[str, int]) -> Finding | None:
    if not pairs:
        return None
    shown = ", ".join(f"{a!a} ({counts[a]:,} rows) and {b!a} ({counts[b]:,})" for a, b in pairs[:SHOWN])
    more = f" and {len(pairs) - SHOWN} more" if len(pairs) > SHOWN else ""
    evidence = f"Labels that differ only {kind} are separate classes: {shown}{more}."
    return Finding("labels_alike", "warning", evidence, (_FIX,), numbers={"pairs": [list(p) for p in pairs[:SHOWN]]})


def _blank(names: list[str], counts: Mapping[str, int]) -> Finding | None:
    if not names:
        return None
    shown = ", ".join(f"{name!a} ({counts[name]:,} rows)" for name in names[:SHOWN])
    fix = "Write the label in, remove the rows, or give it a name with --label_names."
    return Finding("blank_label", "warning", f"A label is blank: {shown}.", (fix,), numbers={"labels": names[:SHOWN]})
