"""Which columns hold the text and the label, and what kind of task it is. Every decision has a stated reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from tunesmith.data.column_choice import ColumnChooser, first_rows, is_sure_label, quoted
from tunesmith.data.label_survey import (
    DOUBTFUL_SEPARATORS,
    Survey,
    alike,
    class_names,
    find_separator,
    has_other_numbers,
    is_list_type,
    looks_like_thousands,
    number_style,
    survey_labels,
)
from tunesmith.data.ready_commands import train_with, train_with_header
from tunesmith.data.source import Source
from tunesmith.errors import ConfigError, DataError, did_you_mean
from tunesmith.labels import UNLABELLED, Task

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


def find_glue_task(name: str | None) -> str | None:
    """The task by its usual name, or None for None; an unknown name is a ConfigError with the nearest one."""
    if name is None:
        return None
    task = name.lower().replace("-", "").replace("sts_b", "stsb").replace("sst_2", "sst2")
    if task not in GLUE_TASKS:
        known = tuple(GLUE_TASKS)
        raise ConfigError(f"--task_name {name!r} is not one of {', '.join(known)}", fix=did_you_mean(name, known))
    return task


@dataclass(frozen=True, slots=True)
class Columns:
    """`text` is one name or two; `why` says in sentences how text, label and task were chosen.

    `default_names` are those of the label ids of a GLUE task.
    """

    text: tuple[str, ...]
    label: str | None
    task: Task
    why: tuple[str, ...] = ()
    default_names: tuple[str, ...] = ()


def infer_columns(
    sources: Mapping[str, Source],
    *,
    text_column_names: str | Sequence[str] | None = None,
    label_column_name: str | None = None,
    do_regression: bool | None = None,
    task_name: str | None = None,
    label_separator: str | None = None,
    merge_label_variants: bool = False,
    label_names: str | Sequence[str] | None = None,
) -> Columns:
    """The columns of the train split, checked to be in every other; what the user names is never second-guessed."""
    train = sources.get("train") or next(iter(sources.values()))
    glue = find_glue_task(task_name)
    glue_text, glue_labels = GLUE_TASKS[glue] if glue is not None else ((), ())
    text = split_names(text_column_names)
    for name in text:
        require_text(train, name)
    why_text = f"Text: {quoted(text)}, as asked." if text else ""
    if not text and glue is not None:
        text, why_text = glue_text, f"Text: {quoted(glue_text)}, the columns of GLUE {glue}."
    chooser = ColumnChooser(train)
    if label_column_name is not None:
        _require_label(train, label_column_name)
    elif not text:
        _refuse_absent_header(chooser)
    text, by_text, label, by_label = chooser.choose(text, label_column_name)
    why_text, why_label = why_text or by_text, by_label or f"Label: column {label!r}, as asked."
    if label in text:
        raise ConfigError(f"column {label!r} cannot be both text and label")
    for split, source in sources.items():
        for name in text:
            require_text(source, name)
        if not split.startswith("test") or has_label(source, label):
            _require_label(source, label)
    if glue is not None and not glue_labels and do_regression is None:
        task, why_task = Task.REGRESSION, f"Task: regression, as in GLUE {glue}."
    else:
        task, why_task = _choose_task(train, label, do_regression, label_separator, merge=merge_label_variants)
    listed = listed_names(label_names)
    if listed is not None and task in (Task.BINARY, Task.MULTICLASS):
        task = Task.BINARY if len(listed) == 2 else Task.MULTICLASS
        why_task = f"Task: {task.value}, because {len(listed)} label{'s' * (len(listed) != 1)} are listed."
    notes = dict.fromkeys(source.note for source in sources.values() if source.note is not None)
    return Columns(text, label, task, (*notes, why_text, why_label, why_task), glue_labels)


def label_parts(source: Source, label: str) -> tuple[str, ...]:
    """The 0/1 columns that a label name with commas stands for; none for a plain column."""
    parts = tuple(part.strip() for part in label.split(","))
    return parts if label not in source.column_names and len(parts) > 1 else ()


def has_label(source: Source, label: str) -> bool:
    """Whether the label column, or all of its 0/1 columns, are there."""
    return set(label_parts(source, label) or (label,)) <= set(source.column_names)


def _require_label(source: Source, label: str) -> None:
    missing = [part for part in label_parts(source, label) or (label,) if part not in source.column_names]
    if missing:
        raise source.no_column(missing[0], "--label_column_name")


def listed_names(names: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Label names from a list or a text with commas; None for None."""
    if names is None:
        return None
    return tuple(n.strip() for n in names.split(",")) if isinstance(names, str) else tuple(names)


def split_names(names: str | Sequence[str] | None) -> tuple[str, ...]:
    """One or two column names from a list or a text with commas; none for None."""
    parts = listed_names(names)
    if parts is None:
        return ()
    if not 1 <= len(parts) <= 2 or not all(parts):
        raise ConfigError(f"--text_column_names {names!r}: give one column, or two for a pair, with a comma between")
    if len(set(parts)) != len(parts):
        raise ConfigError(f"--text_column_names {names!r} names the same column twice")
    return parts


def _choose_task(
    source: Source, label: str, do_regression: bool | None, separator: str | None, *, merge: bool
) -> tuple[Task, str]:
    if do_regression:
        return Task.REGRESSION, "Task: regression, as asked."
    if label_parts(source, label):
        return Task.MULTILABEL, "Task: multilabel, because each of these columns is a label of its own."
    if is_list_type(source.type_of(label)):
        from tunesmith.data.label_forms import holds_places

        places = ", a 0 or 1 for each label (--label_names names them)" if holds_places(source, label) else ""
        return Task.MULTILABEL, f"Task: multilabel, because {label!r} holds lists{places}."
    survey = survey_labels(source, label)
    if separator is not None and separator != "none":
        return Task.MULTILABEL, f"Task: multilabel, labels of a cell set apart by {separator!r}, as asked."
    found = None if separator == "none" or class_names(source, label) else find_separator(survey.counts)
    if found in DOUBTFUL_SEPARATORS:
        word = DOUBTFUL_SEPARATORS[found]
        _ask(source, f"do cells of {label!r} hold several labels with a {word} between?", f"--label_separator {word}")
    if found is not None:
        what = "lists" if found == "json" else f"labels set apart by {found!r} (--label_separator none: one label)"
        return Task.MULTILABEL, f"Task: multilabel, because cells of {label!r} hold {what}."
    if do_regression is None:
        numbers = _kind_of_numbers(source, label, survey)
        if numbers is not None:
            return Task.REGRESSION, f"Task: regression, because {label!r} holds numbers {numbers}."
    if survey.too_many:
        fix = "Give another --label_column_name, or --do_regression for scores."
        raise DataError(f"column {label!r} has over 10,000 different values", where=source.origin, fix=fix)
    return _class_task(source, label, survey, do_regression, merge=merge)


def _kind_of_numbers(source: Source, label: str, survey: Survey) -> str | None:
    """How the numbers to predict are written; None where labels are classes."""
    style = number_style(survey.counts)
    if style is not None:
        return f"such as {style}"
    if has_other_numbers(survey.counts):
        if looks_like_thousands(survey.counts):
            _ask(source, f"are numbers of {label!r} such as 1,234 decimals?", "--do_regression true")
        return "with decimal commas or percent signs"
    return "with fractions" if survey.looks_like_scores else None


def _class_task(
    source: Source, label: str, survey: Survey, do_regression: bool | None, *, merge: bool
) -> tuple[Task, str]:
    names = class_names(source, label)
    values = {alike(value) if merge else value for value in survey.counts.keys() - {str(UNLABELLED)}}
    count = len(names) if names else len(values)
    many = count > (max(30, survey.rows // 2) if is_sure_label(label) else 12)
    if do_regression is None and names is None and many and survey.numbers == survey.rows:
        question = f"{label!r} holds {count:,} different whole numbers: is it a number to predict?"
        _ask(source, question, "--do_regression true")
    task = Task.BINARY if count == 2 else Task.MULTICLASS
    steps = do_regression is None and count >= 3 and all(v.isdigit() for v in values) and not names
    steps = bool(steps and (count > 11 or all(int(v) <= 10 for v in values)))
    rating = " If they are ratings, --do_regression true predicts a number, which knows that 4 is near 5." * steps
    return task, f"Task: {task.value}, because {label!r} has {count} different value{'s' * (count != 1)}.{rating}"


def _ask(source: Source, question: str, flag: str) -> NoReturn:
    command = train_with(source.origin, flag)
    other = "--label_separator none" if "separator" in flag else "--do_regression false"
    raise DataError(question, where=source.origin, fix=f"If yes: {command}   (if not: {other})")


def require_text(source: Source, name: str) -> None:
    """Refuses a source that lacks this column or whose column does not hold text."""
    if name not in source.column_names:
        raise source.no_column(name, "--text_column_names")
    if not source.holds_text(name):
        raise DataError(f"column {name!r} holds {source.type_of(name)}, expected text", where=source.origin)


_HEADERS = {"text": "text", "id": "id", "date": "date", "empty": "empty", "list": "list", "other": "other"}
"""The name given to a column without one, by its kind; all other kinds may be labels."""


def _refuse_absent_header(chooser: ColumnChooser) -> None:
    """Refuses a file whose first line is a value of its own column, or reads like a row: a long text as a column name."""
    source = chooser.source
    sample = first_rows(source) if source.lines else {}
    kinds = {name: profile.kind for name, profile in chooser.profiles.items()}
    for name, cells in sample.items():
        if name in cells or (kinds[name] == "text" and len(name.split()) > 4):
            names = [_HEADERS.get(kind, "label") for kind in kinds.values()]
            names = [n if names.count(n) == 1 else f"{n}_{k}" for k, n in enumerate(names, start=1)]
            why = "is a value of its own column" if name in cells else "reads like a text"
            line = ", ".join(sample)[:80]
            problem = f"there seems to be no header: {name[:40]!r} {why}; the first line is {line!r}"
            named = train_with_header(names, source.delimiter, source.origin, replace=False)
            fix = f"Add a first line with names, such as text,label: {named}"
            raise DataError(problem, where=f"{source.origin}:1", fix=fix)
