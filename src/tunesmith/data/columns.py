"""The text and the label column of a table: by name if it is unambiguous, otherwise by content; if both fail, one question.

A column is profiled by its values, not by its name: text is long and varied, a label repeats.
"""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from tunesmith.config.options import RunConfig
from tunesmith.data.labels import (
    ANY_NUMBER,
    NUMBER,
    OFF,
    ON,
    are_lists_of_one,
    class_names,
    find_separator,
    is_list_type,
    normalize_label,
    survey_labels,
)
from tunesmith.data.rows import Columns, Source, input_columns
from tunesmith.errors import ConfigError, DataError, first_few
from tunesmith.labels import UNLABELED, Task

PAIRS = (
    *(("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence")),
    *(("text", "text_pair"), ("text_a", "text_b"), ("text1", "text2"), ("sentence_a", "sentence_b")),
    ("query", "passage"),
)
SINGLES = ("text", "sentence", "review", "content", "comment", "tweet", "message", "utterance", "document", "body")
WEAK_SINGLES = ("question", "query", "title", "headline")
"""Names of a text column that is often one of a pair."""
LABELS = (
    *("label", "labels", "target", "class", "category", "gold_label", "y", "kategorie", "klasse", "catégorie"),
    *("categorie", "étiquette", "etiqueta", "categoría", "categoria", "标签", "类别"),
)
WEAK_LABELS = (
    *("sentiment", "score", "stars", "rating", "similarity", "is_duplicate", "coarse_label", "intent", "emotion"),
    *("polarity", "topic"),
)
"""Names of label columns that may occur in addition to the label column."""
ASIDE = (
    *("lang", "language", "locale", "source", "split", "set", "subset", "partition", "fold", "date", "author"),
    *("user", "username", "country", "region", "annotator", "prediction", "predicted", "truncated"),
)
"""Columns that describe a row and are rarely the label."""
_PAIR_ENDS = (("1", "2"), ("a", "b"), ("left", "right"), ("first", "second"), ("one", "two"))
_IDS = frozenset(["id", "idx", "index", "guid", "uid", "uuid", "pairid", "rowid", "key", "docid", "nr", "no", "编号"])
SAMPLE_ROWS, SAMPLE_CELLS = 2_000, 200_000
_DATE = re.compile(r"^\d{1,4}[-./]\d{1,2}[-./]\d{1,4}([ T]\d{1,2}:\d{2}(:\d{2})?.*)?$")
_RECORDS = re.compile(r'^\[?\s*\{\s*"')
Kind = Literal["text", "label", "switch", "number", "id", "date", "empty", "list", "other"]


@dataclass(frozen=True)
class ColumnProfile:
    """The kind of a column, with its evidence. `examples` are its most frequent values."""

    name: str
    kind: Kind
    values: int = 0
    different: int = 0
    words: float = 0.0
    examples: tuple[str, ...] = ()

    @property
    def holds_words(self) -> bool:
        """Return whether most of its frequent values contain letters and no digits."""
        plain = [value for value in self.examples if any(map(str.isalpha, value)) and not any(map(str.isdigit, value))]
        return self.kind in ("text", "label", "other", "id") and len(plain) * 2 > len(self.examples)

    def describe(self) -> str:
        """Format as `queue (4 values: billing, access, ...)`."""
        if self.kind == "list":
            return f"{self.name!r} (lists)"
        shown = ", ".join(text if len(text) <= 24 else f"{text[:21]}..." for text in self.examples[:3])
        return f"{self.name!r} ({self.different:,} different values: {shown}{', ...' * (self.different > 3)})"


def _profile(name: str, values: Sequence[Any]) -> ColumnProfile:
    if any(isinstance(value, (list, tuple, dict)) for value in values):
        return ColumnProfile(name, "list", len(values))
    texts = [str(value).strip() for value in values if value is not None and str(value).strip()]
    if not texts:
        return ColumnProfile(name, "empty")
    counts = Counter(texts)
    words = sum(min(_words(text), 60) for text in texts) / len(texts)
    common = tuple(text for text, _ in counts.most_common(4))
    kind = _kind(name, texts, counts, words, is_text=any(isinstance(v, str) for v in values))
    return ColumnProfile(name, kind, len(texts), len(counts), words, common)


def _is_id_name(name: str) -> bool:
    lower = name.lower().strip()
    return lower in _IDS or lower.endswith(("_id", "-id", " id")) or lower.startswith(("unnamed_", "__index_level_"))


def _kind(name: str, texts: Sequence[str], counts: Counter[str], words: float, *, is_text: bool) -> Kind:
    def mostly(pattern: re.Pattern[str]) -> bool:
        return sum(1 for text in texts if pattern.match(text)) >= 0.95 * len(texts)

    varied = len(counts) / len(texts)
    if _is_id_name(name):
        return "id"
    if {text.lower() for text in counts} <= ON | OFF:
        return "switch"
    if mostly(_DATE):
        return "date"
    if mostly(_RECORDS):
        return "other"
    if mostly(ANY_NUMBER):
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
    """Count words; in scripts without spaces between words, two characters count as one word."""
    wide = sum(1 for char in text if unicodedata.east_asian_width(char) in "WF" or "\u0e00" <= char <= "\u0e7f")
    return len(text.split()) if wide < len(text) / 4 else max(len(text.split()), wide / 2)


class ColumnChooser:
    """Chooses the text and label columns of a source from the names and values of its columns."""

    def __init__(self, source: Source) -> None:
        count = min(SAMPLE_ROWS, max(200, SAMPLE_CELLS // len(source.column_names)), source.dataset.num_rows)
        rows = source.dataset.with_format(None)[:count]
        self.source = source
        self.first_rows = {name: rows[name] for name in source.column_names}
        self.profiles = {name: _profile(name, values) for name, values in self.first_rows.items()}

    def choose(self, text: tuple[str, ...], label: str | None) -> tuple[tuple[str, ...], str, str, str]:
        """Return text and label columns with reasons. Columns that the user set are kept; in doubt, a question is raised."""
        sure = self._sure_label() if label is None else None
        texts, why_text = ([text], "") if text else self._text_candidates(label or sure)
        known = texts[0] if len(texts) == 1 else ()
        taken = {name for names in texts for name in names}
        labels, why_label = ([label], "") if label else self._label_candidates(known, taken)
        if len(texts) == 1 and len(labels) == 1:
            return texts[0], why_text, labels[0], why_label
        raise self._question(texts, labels)

    def _find(self, known: Sequence[str]) -> list[str]:
        """Return the columns with these names, ignoring case, in the order of the names."""
        names = self.source.column_names
        by_lower = {name.lower().strip().rpartition(".")[2]: name for name in reversed(names)}
        by_lower |= {name.lower().strip(): name for name in reversed(names)}
        found = (name if name in names else by_lower.get(name) for name in known)
        return [name for name in dict.fromkeys(found) if name is not None]

    def _sure_label(self) -> str | None:
        found = self._find(LABELS)
        return found[0] if found and self.profiles[found[0]].kind != "text" else None

    def _text_candidates(self, label: str | None) -> tuple[list[tuple[str, ...]], str]:
        """Return the possible text columns; one entry if there is no doubt."""
        readable = [n for n in self.profiles if n != label and self.source.holds_text(n)]
        for pair in PAIRS:
            found = tuple(n for n in self._find(pair) if n in readable)
            if len(found) == 2:
                return [found], f"Text: the pair {quoted(found)}, recognized by their names."
        texts = [n for n in readable if self.profiles[n].kind == "text"]
        named = [n for n in self._find(SINGLES) if n in readable]
        sure = [n for n in named if n in texts] or named
        if len(sure) == 1:
            why = f"Text: column {sure[0]!r}, recognized by its name."
            others = [n for n in texts if n != sure[0]]
            if others:
                both = f"--text_column_names {sure[0]},{others[0]}"
                why += f" Text is also in {quoted(others)}: {both} uses both."
            return [(sure[0],)], why
        if sure:
            return [(n,) for n in sure], ""
        weak = self._find(WEAK_SINGLES)[:1]
        if weak and weak[0] in readable and set(texts) <= {*weak}:
            return [(weak[0],)], f"Text: column {weak[0]!r}, recognized by its name."
        return self._unnamed_texts(texts, readable)

    def _unnamed_texts(self, texts: list[str], readable: list[str]) -> tuple[list[tuple[str, ...]], str]:
        if not texts:  # few or short rows: any words, those that vary the most
            words = [n for n in readable if self.profiles[n].holds_words]
            varied = [n for n in words if self.profiles[n].different > self.profiles[n].values / 2]
            texts = varied or [n for n in words if self.profiles[n].kind != "id"]
        if not texts:
            problem = f"no text column found among: {first_few(self.source.column_names, 20)}"
            raise DataError(problem, where=self.source.origin, fix="Set --text_column_names.")
        if len(texts) == 1:
            return [(texts[0],)], f"Text: column {texts[0]!r}, the only one of long and varied texts."
        if len(texts) == 2 and _pair_names(*texts):
            return [(texts[0], texts[1])], f"Text: the pair {quoted(texts)}, recognized by names and content."
        longest = sorted(texts, key=lambda n: -self.profiles[n].words)
        return [*[(n,) for n in longest], (texts[0], texts[1])], ""

    def _label_candidates(self, text: tuple[str, ...], taken: set[str]) -> tuple[list[str], str]:
        """Return the possible label columns; one if there is no doubt. 0/1 columns (several labels) are joined by commas."""
        sure = self._sure_label()
        if sure is not None and sure not in text:
            return [sure], f"Label: column {sure!r}, recognized by its name."
        left = {n: p for n, p in self.profiles.items() if n not in text and (n not in taken or p.kind == "label")}
        kinds = ("label", "list", "number", "switch")
        possible = [n for n, p in left.items() if p.kind in kinds and p.different != 1]
        possible = possible or [n for n, p in left.items() if p.kind in kinds]
        found = [n for n in possible if left[n].kind != "switch"]
        switches = [n for n in possible if left[n].kind == "switch"]
        hot = [n for n in switches if set(left[n].examples) <= {"0", "1", "0.0", "1.0"}]
        weak = [n for n in self._find(WEAK_LABELS) if n in found or n in switches]
        classes = [n for n in (*found, *switches) if left[n].kind != "number"]
        if len(weak) == 1 and not [n for n in classes if n not in weak and n.lower() not in ASIDE]:
            return [weak[0]], f"Label: column {weak[0]!r}, recognized by its name."
        useful = [n for n in found if n.lower() not in ASIDE] or found
        if len(switches) > 1 and not useful:
            return [",".join(switches)], f"Label: the 0/1 columns {', '.join(switches)}, several labels per row."
        joined = [",".join(hot)] if len(hot) >= 3 else []
        every = [*joined, *useful, *(n for n in switches if not joined or n not in hot)]
        if len(every) == 1:
            why = "the only one of numbers" if left[every[0]].kind == "number" else "the only one whose values repeat"
            return [every[0]], f"Label: column {every[0]!r}, {why}."
        empty = [name for name, profile in self.profiles.items() if profile.kind == "empty"]
        if not every and empty:
            problem = f"no label column found, and {quoted(empty[:3])} has no values"
            fix = "Fill it in (formulas of a sheet: save the values), or set --label_column_name."
            raise DataError(problem, where=self.source.origin, fix=fix)
        if not every:
            raise self.source.no_column("label", "--label_column_name")
        words = [word for word in (*LABELS, *WEAK_LABELS) if len(word) > 1]
        rest = [n for n in every if n not in (*weak, *joined)]
        rest.sort(key=lambda n: (not any(word in n.lower() for word in words), left[n].different))
        return [*weak, *joined, *rest], ""

    def _question(self, texts: list[tuple[str, ...]], labels: list[str]) -> DataError:
        """Return one question for everything that is unclear, with candidates and flags that answer it."""
        known = {name: profile.describe() for name, profile in self.profiles.items()}
        asked = []
        if len(texts) > 1:
            shown = "; ".join(known[names[0]] for names in texts if len(names) == 1)
            asked.append(f"which column contains the text (two for a pair)? Candidates: {shown}")
        if len(labels) > 1:
            shown = "; ".join(known.get(n, f"{n!r} (several labels per row)") for n in labels)
            asked.append(f"which column is the label? Candidates: {shown}")
        flags = f"--text_column_names {shlex.quote(','.join(texts[0]))} --label_column_name {shlex.quote(labels[0])}"
        return DataError("; ".join(asked), where=self.source.origin, fix=f"Set for example {flags}.")


def _pair_names(first: str, second: str) -> bool:
    """Return whether two names differ only in an ending such as 1 and 2."""
    one, two = first.lower().rstrip(" _-"), second.lower().rstrip(" _-")
    ends = [(a, b) for a, b in _PAIR_ENDS if one.endswith(a) and two.endswith(b)]
    return any(one.removesuffix(a) == two.removesuffix(b) for a, b in ends)


def quoted(names: Sequence[str]) -> str:
    """Format names as `'a', 'b' and 'c'`."""
    *first, last = map(repr, names)
    return f"{', '.join(first)} and {last}" if first else last


GLUE_TASKS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cola": (("sentence",), ("unacceptable", "acceptable")),
    "mnli": (("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
    "mrpc": (("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
    "qnli": (("question", "sentence"), ("entailment", "not_entailment")),
    "qqp": (("question1", "question2"), ("not_duplicate", "duplicate")),
    "rte": (("sentence1", "sentence2"), ("entailment", "not_entailment")),
    "sst2": (("sentence",), ("negative", "positive")),
    "stsb": (("sentence1", "sentence2"), ()),
    "wnli": (("sentence1", "sentence2"), ("not_entailment", "entailment")),
}
"""Task -> its text columns, and its label names in id order: none for a score."""


def infer_columns(sources: Mapping[str, Source], config: RunConfig | None = None) -> Columns:
    """Return the columns of the train split, which every other split must have. Columns that the user sets are always used."""
    config = config or RunConfig()
    label_column_name, do_regression = config.label_column_name, config.do_regression
    train = sources.get("train") or next(iter(sources.values()))
    glue = config.task_name
    glue_text, glue_labels = GLUE_TASKS[glue] if glue is not None else ((), ())
    text = config.text_column_names or ()
    require_text(train, text)
    why_text = f"Text: {quoted(text)}{', rendered into one text' * (len(text) > 2)}, as requested." if text else ""
    if not text and glue is not None:
        text, why_text = glue_text, f"Text: {quoted(glue_text)}, the columns of GLUE {glue}."
    chooser = ColumnChooser(train)
    if label_column_name is not None:
        _require_label(train, label_column_name)
    elif not text:
        _refuse_absent_header(chooser)
    text, by_text, label, by_label = chooser.choose(text, label_column_name)
    why_text, why_label = why_text or by_text, by_label or f"Label: column {label!r}, as requested."
    if label in text:
        raise ConfigError(f"column {label!r} cannot be both text and label")
    for split, source in sources.items():
        require_text(source, text)
        if not split.startswith("test") or source.has_label(label):
            _require_label(source, label)
    if glue is not None and not glue_labels and do_regression is None:
        task, why_task = Task.REGRESSION, f"Task: regression, as in GLUE {glue}."
    else:
        task, why_task = _choose_task(
            sources, label, do_regression, config.label_separator, merge=config.merge_label_variants
        )
    listed = config.label_names
    if listed is not None and task in (Task.BINARY, Task.MULTICLASS):
        task = Task.BINARY if len(listed) == 2 else Task.MULTICLASS
        why_task = f"Task: {task.value}, because {len(listed)} label{'s' * (len(listed) != 1)} are listed."
    notes = dict.fromkeys(source.note for source in sources.values() if source.note is not None)
    used = {*text, label, *train.label_parts(label), config.label_confidence_column_name}
    unused = [name for name in train.column_names if name not in used]
    hint = "tunesmith audit measures whether a column helps"
    why_unused = (f"Not used: {first_few(list(map(repr, unused)), 8)} ({hint}).",) if unused else ()
    why = (*notes, why_text, why_label, why_task, *why_unused)
    return Columns(input_columns(text), label, task, why, glue_labels, text if len(text) > 2 else ())


def _require_label(source: Source, label: str) -> None:
    missing = [part for part in source.label_parts(label) or (label,) if part not in source.column_names]
    if missing:
        raise source.no_column(missing[0], "--label_column_name")


def _choose_task(
    sources: Mapping[str, Source], label: str, do_regression: bool | None, separator: str | None, *, merge: bool
) -> tuple[Task, str]:
    source = sources.get("train") or next(iter(sources.values()))
    if do_regression:
        return Task.REGRESSION, "Task: regression, as requested."
    parts = source.label_parts(label)
    if any(survey_labels(source, part).fractions for part in parts):
        why = (
            f"the columns {', '.join(parts)} contain the probability of each class. Metrics use the most probable class"
        )
        return Task.BINARY if len(parts) == 2 else Task.MULTICLASS, f"Soft labels: {why}."
    if parts:
        return Task.MULTILABEL, "Task: multilabel, because each of these columns is a label."
    single = False
    if is_list_type(source.type_of(label)):
        lengths = set().union(*(survey_labels(s, label).lengths for s in sources.values() if label in s.column_names))
        plain = class_names(source, label) is None
        if plain and lengths == {0, 1} and separator is None:
            question = f"no list of {label!r} has two labels, and some are empty: can a row have several labels?"
            _ask(source, question, "--label_separator json")
        single = plain and (lengths == {1} or (lengths == {0, 1} and separator == "none"))
        if not single:
            return Task.MULTILABEL, f"Task: multilabel, because {label!r} contains lists."
    survey = survey_labels(source, label)
    if separator is not None and separator != "none":
        return Task.MULTILABEL, f"Task: multilabel, labels of a cell are separated by {separator!r}, as requested."
    found = None if separator == "none" or class_names(source, label) else find_separator(survey.counts)
    if found == ",":
        _ask(source, f"do cells of {label!r} contain several labels separated by comma?", "--label_separator comma")
    single = single or are_lists_of_one(survey.counts)
    if found is not None and not single:
        what = "lists" if found == "json" else f"labels separated by {found!r} (--label_separator none: one label)"
        return Task.MULTILABEL, f"Task: multilabel, because cells of {label!r} contain {what}."
    if do_regression is None and survey.looks_like_scores:
        return Task.REGRESSION, f"Task: regression, because {label!r} contains numbers with fractions."
    if do_regression is None and survey.counts and all(ANY_NUMBER.match(value) for value in survey.counts):
        other = next((value for value in survey.counts if not re.match(NUMBER, value)), None)
        if other is not None:
            fix = "Write plain numbers such as 1234.5, or set --do_regression false if they are classes."
            raise DataError(f"column {label!r} contains numbers such as {other!r}", where=source.origin, fix=fix)
    if survey.counts and all(re.match(r"\s*\{.*\}\s*$", value, re.DOTALL) for value in survey.counts):
        problem = f"column {label!r} contains objects such as {next(iter(survey.counts))[:60]}, not labels"
        raise DataError(problem, where=source.origin, fix="Export the data as JSON, or write plain labels.")
    if survey.too_many:
        fix = "Set a different --label_column_name, or --do_regression true for scores."
        raise DataError(f"column {label!r} has over 10,000 different values", where=source.origin, fix=fix)
    names = class_names(source, label)
    values = {normalize_label(value) if merge else value for value in survey.counts.keys() - {str(UNLABELED)}}
    count = len(names or values)
    many = count > (max(30, survey.rows // 2) if label.lower().strip().rpartition(".")[2] in LABELS else 12)
    if do_regression is None and names is None and many and survey.numbers == survey.rows:
        question = f"{label!r} has {count:,} different integers: is it a number to predict?"
        _ask(source, question, "--do_regression true")
    task = Task.BINARY if count == 2 else Task.MULTICLASS
    why = f"Task: {task.value}, because {label!r} has {count} different value{'s' * (count != 1)}."
    return task, f"{why} Each list has one label." if single else why


def _ask(source: Source, question: str, flag: str) -> NoReturn:
    other = "--label_separator none" if "separator" in flag else "--do_regression false"
    raise DataError(question, where=source.origin, fix=f"If yes, set {flag}; if not, {other}.")


def require_text(source: Source, names: Sequence[str]) -> None:
    """Refuse a source without one of these columns, and columns that cannot be read as text."""
    for name in names:
        if name not in source.column_names:
            raise source.no_column(name, "--text_column_names")
        kind = source.type_of(name)
        if not source.holds_text(name) if len(names) <= 2 else is_list_type(kind) or "binary" in str(kind):
            expected = "text" if len(names) <= 2 else "text, numbers, true/false or dates"
            raise DataError(f"column {name!r} contains {kind}, expected {expected}", where=source.origin)


def _refuse_absent_header(chooser: ColumnChooser) -> None:
    """Refuse a file whose first line is a row: a name that is also a value of the column, or a number in a column of numbers."""
    source = chooser.source
    for name, cells in (chooser.first_rows if source.lines else {}).items():
        numbers = chooser.profiles[name].kind in ("number", "label", "switch", "id") and ANY_NUMBER.match(name)
        if name in cells or numbers:
            why = "is also a value of the column" if name in cells else "is a number"
            problem = f"the file seems to have no header: {name[:40]!r} in the first line {why}"
            fix = (
                "Add a first line with column names, such as text,label. If it is the header, set --label_column_name."
            )
            raise DataError(problem, where=f"{source.origin}:1", fix=fix)
