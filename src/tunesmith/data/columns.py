"""Which columns hold the text and the label, and what kind of task it is. Every decision says why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.data.glue_tasks import GlueTask, find_glue_task
from tunesmith.data.label_survey import class_names, is_list_type, survey_labels
from tunesmith.data.source import Source
from tunesmith.errors import ConfigError, DataError, did_you_mean
from tunesmith.labels import UNLABELLED, Task

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
SINGLES = (
    "text",
    "sentence",
    "review",
    "content",
    "comment",
    "question",
    "query",
    "tweet",
    "message",
    "utterance",
    "document",
    "body",
    "title",
    "headline",
)
LABELS = (
    "label",
    "labels",
    "target",
    "class",
    "category",
    "gold_label",
    "sentiment",
    "score",
    "stars",
    "rating",
    "similarity",
    "is_duplicate",
    "coarse_label",
    "intent",
    "emotion",
    "polarity",
    "topic",
    "y",
)
_IDS = frozenset(["id", "idx", "index", "guid", "uid", "uuid", "pairid", "rowid", "key", "docid"])
_SAMPLE_ROWS = 1_000


@dataclass(frozen=True, slots=True)
class Columns:
    """`text` is one name or two; `why` says in sentences how text, label and task were chosen."""

    text: tuple[str, ...]
    label: str | None
    task: Task
    why: tuple[str, ...] = ()


def infer_columns(
    sources: Mapping[str, Source],
    *,
    text_column_names: str | Sequence[str] | None = None,
    label_column_name: str | None = None,
    do_regression: bool | None = None,
    task_name: str | None = None,
) -> Columns:
    """The columns of the train split, checked to be in every other; what the user names is never second-guessed."""
    train = sources.get("train") or next(iter(sources.values()))
    glue = find_glue_task(task_name)
    asked = split_names(text_column_names)
    for name in asked:
        require_text(train, name)
    label, why_label = _choose_label(train, label_column_name)
    text, why_text = _choose_text(train, asked, glue, exclude=label)
    if label is None:
        _refuse_absent_header(train)
        label, why_label = _remaining_label(train, text)
    if label in text:
        raise ConfigError(f"column {label!r} cannot be both text and label")
    for split, source in sources.items():
        for name in text:
            require_text(source, name)
        if not split.startswith("test") and label not in source.column_names:
            raise _no_column(source, label, "--label_column_name")
    task, why_task = _choose_task(train, label, do_regression, glue)
    return Columns(text, label, task, (why_text, why_label, why_task))


def split_names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """One or two column names from a list or a text with commas; none for None."""
    if names is None:
        return ()
    parts = tuple(n.strip() for n in names.split(",")) if isinstance(names, str) else tuple(names)
    if not 1 <= len(parts) <= 2 or not all(parts):
        raise ConfigError(f"--text_column_names {names!r}: give one column, or two for a pair, with a comma between")
    if len(set(parts)) != len(parts):
        raise ConfigError(f"--text_column_names {names!r} names the same column twice")
    return parts


def _choose_label(source: Source, asked: str | None) -> tuple[str | None, str]:
    if asked is not None:
        if asked not in source.column_names:
            raise _no_column(source, asked, "--label_column_name")
        return asked, f"Label: column {asked!r}, as asked."
    found = _find(source, LABELS)
    return (found, f"Label: column {found!r}, known by its name.") if found else (None, "")


def _choose_text(
    source: Source, asked: tuple[str, ...], glue: GlueTask | None, *, exclude: str | None
) -> tuple[tuple[str, ...], str]:
    if asked:
        return asked, f"Text: {_join(asked)}, as asked."
    if glue is not None:
        return glue.text, f"Text: {_join(glue.text)}, the columns of GLUE {glue.name}."
    for pair in PAIRS:
        found = tuple(n for n in (_find(source, [name]) for name in pair) if n is not None and n != exclude)
        if len(found) == 2:
            return found, f"Text: the pair {_join(found)}, known by its names."
    for name in SINGLES:
        single = _find(source, [name])
        if single is not None and single != exclude and _is_text(source, single):
            return (single,), f"Text: column {single!r}, known by its name."
    return _guess_text(source, exclude)


def _guess_text(source: Source, exclude: str | None) -> tuple[tuple[str, ...], str]:
    """The first one or two columns of words."""
    if exclude is None:
        _refuse_absent_header(source)
    candidates = [n for n in source.column_names if n != exclude and not _is_id(n) and _is_text(source, n)]
    sample = _sample(source)
    wordy = [n for n in candidates if _share(sample[n], lambda v: " " in v.strip()) >= 0.5]
    chosen = tuple((wordy or [n for n in candidates if _share(sample[n], _is_number) < 0.5])[:2])
    if not chosen:
        found = ", ".join(source.column_names)
        raise DataError(f"no text column found among: {found}", where=source.origin, fix="Give --text_column_names.")
    return chosen, f"Text: {_join(chosen)}, the first column{'s' * (len(chosen) - 1)} of words in {source.origin}."


def _remaining_label(source: Source, text: tuple[str, ...]) -> tuple[str, str]:
    """The only column left when its values repeat; anything less clear is an error."""
    rest = [n for n in source.column_names if n not in text and not _is_id(n)]
    if len(rest) == 1:
        values = _sample(source)[rest[0]]
        if len(set(map(str, values))) <= max(2, len(values) // 2):
            return rest[0], f"Label: column {rest[0]!r}, the only one left and its values repeat."
    raise _no_column(source, "label", "--label_column_name")


def _choose_task(source: Source, label: str, do_regression: bool | None, glue: GlueTask | None) -> tuple[Task, str]:
    if do_regression:
        return Task.REGRESSION, "Task: regression, as asked."
    if glue is not None and glue.is_regression and do_regression is None:
        return Task.REGRESSION, f"Task: regression, as in GLUE {glue.name}."
    if is_list_type(source.dataset.features.arrow_schema.field(label).type):
        return Task.MULTILABEL, f"Task: multilabel, because {label!r} holds lists."
    survey = survey_labels(source, label)
    if do_regression is None and survey.looks_like_scores:
        return Task.REGRESSION, f"Task: regression, because {label!r} holds numbers with fractions."
    if survey.too_many:
        fix = "Give another --label_column_name, or --do_regression for scores."
        raise DataError(f"column {label!r} has over 10,000 different values", where=source.origin, fix=fix)
    names = class_names(source, label)
    count = len(names) if names else len(survey.counts.keys() - {str(UNLABELLED)})
    task = Task.BINARY if count == 2 else Task.MULTICLASS
    return task, f"Task: {task.value}, because {label!r} has {count} different value{'s' * (count != 1)}."


def _find(source: Source, known: Sequence[str]) -> str | None:
    """The column with the first known name, exactly or apart from case."""
    by_lower = {name.lower().strip(): name for name in reversed(source.column_names)}
    for name in known:
        if name in source.column_names:
            return name
        if name in by_lower:
            return by_lower[name]
    return None


def require_text(source: Source, name: str) -> None:
    """Refuses a source without this column, or with something else than text in it."""
    if name not in source.column_names:
        raise _no_column(source, name, "--text_column_names")
    if not _is_text(source, name):
        kind = source.dataset.features.arrow_schema.field(name).type
        raise DataError(f"column {name!r} holds {kind}, expected text", where=source.origin)


def _no_column(source: Source, name: str, flag: str) -> DataError:
    found = source.column_names
    fix = " ".join(filter(None, (did_you_mean(name, found), f"Name it with {flag}.")))
    where = f"{source.origin}:1" if source.lines else source.origin
    return DataError(f"no column {name!r}; found: {', '.join(found)}", where=where, fix=fix)


def _refuse_absent_header(source: Source) -> None:
    """Sure only when a "name" of the first line is also a value of its own column."""
    if not source.lines or not source.column_names:
        return
    for name, values in _sample(source).items():
        if name in values:
            line = ", ".join(source.column_names)[:80]
            problem = f"there seems to be no header: {name!r} is a value of its own column; the first line is {line!r}"
            raise DataError(problem, where=f"{source.origin}:1", fix="Add a first line with names, such as text,label.")


def _sample(source: Source) -> dict[str, list[Any]]:
    rows = source.dataset.with_format(None)[: min(_SAMPLE_ROWS, source.dataset.num_rows)]
    return {name: rows[name] for name in source.column_names}


def _share(values: Sequence[Any], test: Any) -> float:
    return sum(1 for v in values if isinstance(v, str) and test(v)) / max(len(values), 1)


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _is_id(name: str) -> bool:
    lower = name.lower().strip()
    return lower in _IDS or lower.endswith(("_id", "-id")) or lower.startswith(("unnamed_", "__index_level_"))


def _is_text(source: Source, name: str) -> bool:
    return str(source.dataset.features.arrow_schema.field(name).type) in ("string", "large_string", "string_view")


def _join(names: Sequence[str]) -> str:
    return " and ".join(map(repr, names))
