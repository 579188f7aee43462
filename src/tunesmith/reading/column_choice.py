"""The text and the label column of a table: by name where a name is sure, else by content, else one question."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from typing import Any

from tunesmith.errors import DataError
from tunesmith.reading.column_profile import SAMPLE_ROWS, ColumnProfile, is_id_name, profile_columns
from tunesmith.reading.ready_commands import train_after, train_with
from tunesmith.reading.source import Source

PAIRS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("text", "text_pair"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("sentence_a", "sentence_b"),
    ("query", "passage"),
)
SINGLES = ("text", "sentence", "review", "content", "comment", "tweet", "message", "utterance", "document", "body")
WEAK_SINGLES = ("question", "query", "title", "headline")
"""Names of a text that is often one of two."""
LABELS: tuple[str, ...] = (
    *("label", "labels", "target", "class", "category", "gold_label", "y", "kategorie", "klasse", "catégorie"),
    *("categorie", "étiquette", "etiqueta", "categoría", "categoria", "标签", "类别"),
)
WEAK_LABELS: tuple[str, ...] = (
    *("sentiment", "score", "stars", "rating", "similarity", "is_duplicate", "coarse_label", "intent", "emotion"),
    *("polarity", "topic"),
)
"""Names that a second column of labels may have as well."""
ASIDE = frozenset(
    [
        *("lang", "language", "locale", "source", "split", "set", "subset", "partition", "fold", "date", "author"),
        *("user", "username", "country", "region", "annotator", "prediction", "predicted", "truncated"),
    ]
)
"""Columns that describe a row and are rarely what is to be predicted."""
_PAIR_ENDS = ("1", "2", "a", "b", "left", "right", "first", "second", "one", "two")


def profile_source(source: Source) -> dict[str, ColumnProfile]:
    """The profiles of a source's columns, from its first rows."""
    return profile_columns(first_rows(source))


def first_rows(source: Source) -> dict[str, list[Any]]:
    """The first rows, by column."""
    rows = source.dataset.with_format(None)[: min(SAMPLE_ROWS, source.dataset.num_rows)]
    return {name: rows[name] for name in source.column_names}


def find_column(source: Source, known: Sequence[str]) -> str | None:
    """The column with the first known name, exactly or apart from case."""
    by_lower = {name.lower().strip().rpartition(".")[2]: name for name in reversed(source.column_names)}
    by_lower |= {name.lower().strip(): name for name in reversed(source.column_names)}
    for name in known:
        if name in source.column_names:
            return name
        if name in by_lower:
            return by_lower[name]
    return None


def choose_by_content(
    source: Source, text: tuple[str, ...], label: str | None
) -> tuple[tuple[str, ...], str, str | None, str]:
    """Text columns and label column with the reason for each; what is given is kept. In doubt a question is raised."""
    profiles = profile_source(source)
    sure = find_column(source, LABELS) if label is None else None
    sure = None if sure is not None and profiles[sure].kind == "text" else sure
    texts, why_text = ([text], "") if text else _text_candidates(source, profiles, label or sure)
    known = text or (texts[0] if len(texts) == 1 else ())
    taken = {name for names in texts for name in names}
    labels, why_label = ([label], "") if label else _label_candidates(source, profiles, known, taken)
    if len(texts) == 1 and len(labels) == 1:
        return texts[0], why_text, labels[0], why_label
    raise _question(source, profiles, texts, [name for name in labels if name is not None])


def _text_candidates(
    source: Source, profiles: dict[str, ColumnProfile], label: str | None
) -> tuple[list[tuple[str, ...]], str]:
    """The possible text columns; one entry when it is sure."""
    for pair in PAIRS:
        found = tuple(n for n in (find_column(source, [name]) for name in pair) if n is not None and n != label)
        if len(found) == 2 and all(holds_text(source, n) for n in found):
            return [found], f"Text: the pair {quoted(found)}, recognised by its names."
    texts = [n for n, p in profiles.items() if p.kind == "text" and n != label and holds_text(source, n)]
    named = [n for n in (find_column(source, [name]) for name in SINGLES) if n is not None and n != label]
    named = [n for n in dict.fromkeys(named) if holds_text(source, n)]
    sure = [n for n in named if n in texts] or named
    if len(sure) == 1:
        others = [n for n in texts if n != sure[0]]
        also = (
            f" Text is also in {quoted(others)}: --text_column_names {sure[0]},{others[0]} uses both." if others else ""
        )
        return [(sure[0],)], f"Text: column {sure[0]!r}, recognised by its name.{also}"
    if len(sure) > 1:
        return [(n,) for n in sure], ""
    weak = find_column(source, WEAK_SINGLES)
    if weak is not None and weak != label and holds_text(source, weak) and set(texts) <= {weak}:
        return [(weak,)], f"Text: column {weak!r}, recognised by its name."
    return _unnamed_texts(source, profiles, texts, label)


def _unnamed_texts(
    source: Source, profiles: dict[str, ColumnProfile], texts: list[str], label: str | None
) -> tuple[list[tuple[str, ...]], str]:
    if not texts:  # few or short rows: any words, those that vary the most
        words = [n for n, p in profiles.items() if n != label and holds_text(source, n) and p.holds_words]
        varied = [n for n in words if profiles[n].different > profiles[n].values / 2]
        alone = [] if varied else _beside_labels(source, profiles, label)
        if alone:
            return [(alone[0],)], f"Text: column {alone[0]!r}, the only one beside the labels."
        texts = varied or [n for n in words if profiles[n].kind != "id"]
    if not texts:
        found = ", ".join(source.column_names)
        raise DataError(f"no text column found among: {found}", where=source.origin, fix="Give --text_column_names.")
    if len(texts) == 1:
        return [(texts[0],)], f"Text: column {texts[0]!r}, the only one of long and varied texts."
    if len(texts) == 2 and _pair_names(*texts):
        return [(texts[0], texts[1])], f"Text: the pair {quoted(texts)}, by its names and content."
    longest = sorted(texts, key=lambda n: -profiles[n].words)
    return [*[(n,) for n in longest], (texts[0], texts[1])], ""


def _beside_labels(source: Source, profiles: dict[str, ColumnProfile], label: str | None) -> list[str]:
    """The column of single words, such as addresses, that stands alone beside one whose values repeat."""
    both = [n for n, p in profiles.items() if p.kind not in ("empty", "date") and not is_id_name(n)]
    found = [n for n in both if n != label and holds_text(source, n) and profiles[n].kind in ("id", "other")]
    return (
        found if len(both) == 2 and len(found) == 1 and profiles[(set(both) - {*found}).pop()].kind == "label" else []
    )


def _label_candidates(
    source: Source, profiles: dict[str, ColumnProfile], text: tuple[str, ...], taken: set[str]
) -> tuple[list[str | None], str]:
    """The possible label columns; one entry when it is sure. 0/1 columns are joined by commas: several labels a row."""
    sure = find_column(source, LABELS)
    if sure is not None and sure not in text and profiles[sure].kind != "text":
        return [sure], f"Label: column {sure!r}, recognised by its name."
    left = {n: p for n, p in profiles.items() if n not in text and (n not in taken or p.kind == "label")}
    found = [n for n, p in left.items() if p.kind in ("label", "list", "number") and p.different != 1]
    switches = [n for n, p in left.items() if p.kind == "switch" and p.different != 1]
    hot = [n for n in switches if set(left[n].examples) <= {"0", "1", "0.0", "1.0"}]
    weak = [n for n in (find_column(source, [name]) for name in WEAK_LABELS) if n in found or n in switches]
    rivals = [
        n for n in (*found, *switches) if n not in weak and n.lower() not in ASIDE and profiles[n].kind != "number"
    ]
    if len(dict.fromkeys(weak)) == 1 and not rivals:
        return [weak[0]], f"Label: column {weak[0]!r}, recognised by its name."
    answers = [n for n in left if n.lower() == "prediction" or n.lower().startswith(("prob_", "probability_"))]
    useful = [n for n in found if n.lower() not in ASIDE and n not in answers] or found
    if len(switches) > 1 and not useful:
        return [",".join(switches)], f"Label: the 0/1 columns {', '.join(switches)}, several labels a row."
    every = [*useful, *switches] if len(hot) < 3 else [",".join(hot), *useful, *(n for n in switches if n not in hot)]
    if every and set(every) <= set(answers):
        problem = f"no label, only answers of a model: {', '.join(every)}"
        flag = f"--label_column_name {shlex.quote(every[0])}"
        fix = f"If they are what is to be learnt: {train_with(source.origin, flag)}"
        raise DataError(problem, where=source.origin, fix=fix)
    if len(every) == 1:
        number = profiles[every[0]].kind == "number"
        why = "the only one of numbers" if number else "the only one whose values repeat"
        return [every[0]], f"Label: column {every[0]!r}, {why}."
    if not every:
        return _last_resort(source, profiles, text)
    joined = [n for n in every if n not in profiles]
    rest = [n for n in every if n not in (*weak, *joined)]
    return [*weak, *joined, *sorted(rest, key=lambda n: (not _like_a_label(n), profiles[n].different))], ""


def is_sure_label(name: str) -> bool:
    """Whether the name says that the column holds classes."""
    return name.lower().strip().rpartition(".")[2] in LABELS


def _like_a_label(name: str) -> bool:
    return any(word in name.lower() for word in (*LABELS, *WEAK_LABELS) if len(word) > 1)


def _last_resort(
    source: Source, profiles: dict[str, ColumnProfile], text: tuple[str, ...]
) -> tuple[list[str | None], str]:
    _refuse_records(source, profiles)
    rest = [n for n, p in profiles.items() if n not in text and p.kind not in ("id", "empty", "date", "other")]
    if len(rest) == 1 and profiles[rest[0]].different <= max(2, profiles[rest[0]].values // 2):
        return [rest[0]], f"Label: column {rest[0]!r}, the only one left and its values repeat."
    found = ", ".join(source.column_names)
    where = f"{source.origin}:1" if source.lines else source.origin
    raise DataError(f"no column 'label'; found: {found}", where=where, fix="Name it with --label_column_name.")


def _refuse_records(source: Source, profiles: dict[str, ColumnProfile]) -> None:
    """Where no column is a label and one holds records: how to take a label out of them."""
    for name, profile in profiles.items():
        first = profile.examples[0] if profile.kind == "other" and profile.examples else ""
        found = _first_leaf(first) if first.startswith(("[", "{")) and re.fullmatch(r"\w+", name) else None
        if found is not None:
            path, value = found
            change = f"jq -c '. + {{label: .{name}{path}}}'"
            command = train_after(change, source.origin, suffix=".jsonl")
            problem = f"no column is a label; {name!r} holds records with {value!r} at {path}"
            raise DataError(problem, where=source.origin, fix=f"If that is the label: {command}")


def _first_leaf(cell: str) -> tuple[str, str] | None:
    """(path as jq writes it, value) of the first name inside a cell of JSON text; None when there is none."""
    value: Any = json.loads(cell)
    path = ""
    while isinstance(value, (dict, list)) and value:
        if isinstance(value, list):
            path, value = f"{path}[0]", value[0]
            continue
        wanted = ("label", "labels", "choices", "choice", "class", "category", "answer", "value", "result")
        key = next((name for name in wanted if name in value), next(iter(value)))
        path, value = f"{path}.{key}", value[key]
    return (path, str(value)) if isinstance(value, (str, int)) and re.fullmatch(r"[\w.\[\]]+", path) else None


def _question(
    source: Source, profiles: dict[str, ColumnProfile], texts: list[tuple[str, ...]], labels: list[str]
) -> DataError:
    """One question for all that is unclear, with the candidates and a command that answers it."""
    asked = []
    if len(texts) > 1:
        shown = "; ".join(profiles[n].describe() for names in texts if len(names) == 1 for n in names)
        asked.append(f"which column holds the text (two for a pair)? Candidates: {shown}")
    if len(labels) > 1:
        shown = "; ".join(profiles[n].describe() if n in profiles else f"{n!r} (several labels a row)" for n in labels)
        asked.append(f"which column is the label? Candidates: {shown}")
    flags = f"--text_column_names {shlex.quote(','.join(texts[0]))} --label_column_name {shlex.quote(labels[0])}"
    command = train_with(source.origin, flags)
    return DataError("; ".join(asked), where=source.origin, fix=f"Answer for example with: {command}")


def _pair_names(first: str, second: str) -> bool:
    """Whether two names differ only in an ending such as 1 and 2."""
    one, two = first.lower().rstrip(" _-"), second.lower().rstrip(" _-")
    for a, b in zip(_PAIR_ENDS[::2], _PAIR_ENDS[1::2], strict=True):
        if one.endswith(a) and two.endswith(b) and one.removesuffix(a) == two.removesuffix(b):
            return True
    return False


def holds_text(source: Source, name: str) -> bool:
    """Whether the cells of a column are strings."""
    return str(source.dataset.features.arrow_schema.field(name).type) in ("string", "large_string", "string_view")


def quoted(names: Sequence[str]) -> str:
    """`'a' and 'b'`."""
    return " and ".join(map(repr, names))
