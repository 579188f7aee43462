"""The tasks of bench/diagnose_runs.py, by group: the datasets of ../shared, tasks derived from them, and more.

SHARED_DIR is the folder of the datasets: ../shared, or one written by bench/outside_tasks.py. Features and rules are chosen on
all groups except `sealed`, whose tasks come from packages that no other group uses.
"""

from __future__ import annotations

import csv
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from tunesmith.labels import LabelMap, Task

SHARED = Path(os.environ.get("SHARED_DIR", Path(__file__).resolve().parents[2] / "shared"))
Row = tuple[tuple[str, ...], Any]
"""One text or a pair, and the label: a class name, a number, or a tuple of class names."""
Rows = list[Row]
Splits = dict[str, Rows]
Group = Literal[
    "choose", "report", "last", "fresh", "outside", "outside_choose", "outside_first", "outside_last", "sealed"
]
"""The first four are in ../shared. A model may be fitted to all groups except the last, which is evaluated once."""
GROUPS: tuple[Group, ...] = (
    "choose",
    "report",
    "last",
    "fresh",
    "outside",
    "outside_choose",
    "outside_first",
    "outside_last",
    "sealed",
)
HELD_OUT = 400


@dataclass(frozen=True)
class BankTask:
    """One task. `length`: maximum number of tokens in a row."""

    name: str
    group: Group
    kind: Task
    read: Callable[[], Splits]
    rows: int = 1200
    length: int = 64
    most_held_out: int = 500
    """Validation rows."""


@cache
def _table(path: str) -> tuple[dict[str, str], ...]:
    with open(SHARED / "data" / path, encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def plain(folder: str, texts: tuple[str, ...] = ("text",), label: str = "label", suffix: str = "") -> Splits:
    """Return the rows of a dataset; if there is no validation split, take one from train."""
    found: Splits = {}
    for split in ("train", "validation", "test"):
        file = f"{folder}/{split}{suffix}.tsv"
        if (SHARED / "data" / file).exists():
            found[split] = [(tuple(row[t] for t in texts), row[label]) for row in _table(file)]
    pick = random.Random(1)
    pick.shuffle(found["train"])
    if "validation" not in found:
        found["validation"], found["train"] = found["train"][:HELD_OUT], found["train"][HELD_OUT:]
    return found


def mapped(splits: Splits, change: Callable[[Row], Row | None]) -> Splits:
    """Return the rows changed by `change`, without those that it maps to None."""
    return {split: [new for row in rows if (new := change(row)) is not None] for split, rows in splits.items()}


def numbers(splits: Splits) -> Splits:
    """Return the rows with labels as numbers, for regression."""
    return mapped(splits, lambda row: (row[0], float(row[1])))


def words_of(row: Row) -> list[str]:
    """Return the words of a row's texts in lower case."""
    return re.findall(r"\w+", " ".join(row[0]).lower())


def frequent_words(rows: Rows, skip: int, count: int) -> tuple[str, ...]:
    """Return the `count` most frequent words (by rows, then alphabetically) after the first `skip`."""
    found: dict[str, int] = {}
    for row in rows:
        for word in set(words_of(row)):
            if len(word) > 2:
                found[word] = found.get(word, 0) + 1
    return tuple(sorted(found, key=lambda word: (-found[word], word))[skip : skip + count])


SENTENCES = ("sentence1", "sentence2")


def outside_tasks() -> Iterator[BankTask]:
    """Return the first seven tasks, then those from more sources: some for development, the others evaluated once."""
    two, many, several, value = Task.BINARY, Task.MULTICLASS, Task.MULTILABEL, Task.REGRESSION
    first: Group = "outside"
    yield _task("sections", first, many)
    yield _task("short_sections", first, many, 2000)
    yield _task("rare_games", first, two)
    yield _task("sizes", first, value)
    yield _task("fortunes", first, many, length=96)
    yield _task("same_source", first, two, length=96, texts=SENTENCES)
    yield _task("uses", first, several)
    chosen: Group = "outside_choose"
    yield _task("tweets", chosen, value)
    yield _task("tweets", chosen, value, 200, name="tweets_tiny", held_out=80)
    yield _task("editorials", chosen, value)
    yield _task("films", chosen, two)
    yield _task("gloss_kinds", chosen, many, 2400)
    yield _task("gloss_parts", chosen, many)
    yield _task("gloss_above", chosen, two, 2000, texts=SENTENCES)
    yield _task("joke_tags", chosen, several, 700)
    yield _task("speech_year", chosen, value, 1500, 128)
    yield _task("speech_party", chosen, two, 1500, 128)
    yield _task("emoji_groups", chosen, many, 800)
    yield _task("chat_answers", chosen, two, 1500, texts=SENTENCES)
    sealed: Group = "outside_first"
    yield _task("dutch_books", sealed, two, 1200, 128)
    yield _task("french_books", sealed, two, 200, 128, held_out=80)
    yield _task("certain", sealed, two, 1500)
    yield _task("manual_sections", sealed, many, 1200, 96)
    yield _task("manual_lengths", sealed, value, 1200, 96)
    yield _task("saying_languages", sealed, many, 1000)
    last: Group = "outside_last"
    yield _task("mail_kinds", last, many, 1500, 160)
    yield _task("term_fields", last, several, 1500, 96)
    yield _task("verse_chapters", last, many, 2000)
    yield _task("verse_places", last, value, 1500)
    yield _task("verse_moses", last, two, 1800)
    yield _task("whale_next", last, two, 2000, 128, texts=SENTENCES)
    yield _task("chinese_books", last, two, 1500, 96)
    yield from sealed_tasks()


def sealed_tasks() -> Iterator[BankTask]:
    """Return tasks from nine packages that no other group uses, evaluated once."""
    two, many, several, value = Task.BINARY, Task.MULTICLASS, Task.MULTILABEL, Task.REGRESSION
    sealed: Group = "sealed"
    yield _task("complaint_severity", sealed, many, 800)
    yield _task("script_kinds", sealed, several, 400, 96)
    yield _task("meaning_fields", sealed, many, 1500)
    yield _task("cloud_services", sealed, many, 1500)
    yield _task("cloud_arguments", sealed, value, 1500)
    yield _task("word_valence", sealed, value, 1500, 16)
    yield _task("company_countries", sealed, many, 1500, 32)
    yield _task("german_gender", sealed, many, 1500, 32)
    yield _task("german_english", sealed, two, 2000, 48, texts=SENTENCES)
    yield _task("name_gender", sealed, two, 200, 16, held_out=80)
    yield _task("license_approved", sealed, two, 1200, 96)


def _task(
    folder: str,
    group: Group,
    kind: Task,
    rows: int = 1500,
    length: int = 64,
    *,
    texts: tuple[str, ...] = ("text",),
    name: str = "",
    held_out: int = 500,
) -> BankTask:
    return BankTask(name or folder, group, kind, partial(_read, folder, kind, texts), rows, length, held_out)


def _read(folder: str, kind: Task, texts: tuple[str, ...]) -> Splits:
    if kind is Task.REGRESSION:
        return numbers(plain(folder, texts, "score"))
    found = plain(folder, texts)
    return mapped(found, _several) if kind is Task.MULTILABEL else found


def _several(row: Row) -> Row:
    return row[0], tuple(row[1].split("|"))


def _question_words(row: Row) -> Row:
    """Return a label of many classes: the type of a TREC question with its question word."""
    first = row[0][0].split()[0].lower()
    word = first if first in ("what", "who", "how", "where", "when", "which", "why", "name") else "other"
    return row[0], f"{row[1]} {word}"


def _frequent(splits: Splits, least: int) -> Splits:
    """Keep classes with at least this many training rows."""
    counts: dict[Any, int] = {}
    for _, label in splits["train"]:
        counts[label] = counts.get(label, 0) + 1
    return mapped(splits, lambda row: row if counts.get(row[1], 0) >= least else None)


def _joined(splits: Splits) -> Splits:
    """Join two rows with the labels of both, for multilabel."""
    found: Splits = {}
    for split, rows in splits.items():
        halves = zip(rows[::2], rows[1::2], strict=False)
        found[split] = [((f"{a[0][0]} {b[0][0]}",), tuple(sorted({a[1], b[1]}))) for a, b in halves]
    return found


def _is(name: str, splits: Splits, share: float | None = None) -> Splits:
    """Return two classes, one vs. the rest; with `share`, the first is that rare."""
    found = mapped(splits, lambda row: (row[0], "yes" if row[1] == name else "no"))
    if share is None:
        return found
    for split, rows in found.items():
        rest = [row for row in rows if row[1] == "no"]
        few = [row for row in rows if row[1] == "yes"][: round(len(rest) * share / (1 - share))]
        random.Random(2).shuffle(mixed := rest + few)
        found[split] = mixed
    return found


def _overlap(row: Row) -> Row:
    """Return the share of common words of two sentences, for regression."""
    one, other = (set(re.findall(r"\w+", text.lower())) for text in row[0])
    return row[0], 5 * len(one & other) / max(1, len(one | other))


def _opinion(row: Row) -> Row:
    """Return a noisy score of subjectivity and sentence length, for regression."""
    noise = random.Random(row[0][0]).gauss(0, 0.3)
    return row[0], (row[1] == "subjective") + 0.5 * math.log(max(2, len(row[0][0].split())) / 20) + noise


def _length_class(row: Row) -> Row:
    return row[0], f"{row[1]} {'long' if len(row[0][0].split()) > 120 else 'short'}"


def _length(most: int, row: Row) -> Row:
    """Return the noisy number of words, at most `most`, for regression."""
    noise = random.Random(row[0][0]).gauss(0, 0.15)
    return row[0], math.log2(max(2, min(most, len(words_of(row))))) + noise


def _letters(row: Row) -> Row:
    """Return the mean length of the first words, for regression."""
    words = words_of(row)[:90] or ["a"]
    return row[0], sum(map(len, words)) / len(words)


def _long_words(row: Row) -> Row:
    mean = _letters(row)[1]
    return row[0], "short" if mean < 4.3 else "middle" if mean < 4.9 else "long"


def _first_of(splits: Splits, skip: int, count: int, within: int) -> Splits:
    """Label rows with the first of `count` frequent words, for many classes; uses one text of a pair."""
    single = mapped(splits, lambda row: ((row[0][0],), ""))
    words = set(frequent_words(single["train"], skip, count))

    def change(row: Row) -> Row | None:
        first = next((word for word in words_of(row)[:within] if word in words), None)
        return None if first is None else (row[0], first)

    return mapped(single, change)


def _which_of(splits: Splits, skip: int, count: int, within: int) -> Splits:
    """Label rows with all of `count` frequent words that they contain, for multilabel."""
    words = frequent_words(splits["train"], skip, count)

    def change(row: Row) -> Row | None:
        own = set(words_of(row)[:within])
        found = tuple(sorted(word for word in words if word in own))
        return (row[0], found) if found else None

    return mapped(splits, change)


def _opening(row: Row) -> Row | None:
    """Return the rest of a sentence, labeled with its first word."""
    first, _, rest = row[0][0].partition(" ")
    known = {
        "the": "the",
        "a": "a",
        "an": "a",
        "it": "it",
        "in": "in",
        "he": "person",
        "she": "person",
        "they": "person",
    }
    return ((rest,), known[first]) if first in known and rest else None


def _has(words: tuple[str, ...], row: Row) -> Row:
    return row[0], "yes" if set(words) & set(words_of(row)) else "no"


def _digits(row: Row) -> Row:
    return row[0], "yes" if re.search(r"[0-9]", row[0][0]) else "no"


def _longer(row: Row) -> Row | None:
    one, other = (len(text.split()) for text in row[0])
    return None if one == other else (row[0], "first" if one > other else "second")


def _nearly_same(row: Row) -> Row:
    return row[0], "yes" if _overlap(row)[1] > 3.9 else "no"


def _one_of(names: tuple[str, ...], other: str | None, row: Row) -> Row | None:
    """Keep the named classes; the rest become one class or are excluded."""
    name = row[1] if row[1] in names else other
    return None if name is None else (row[0], name)


def _list_tasks() -> Iterator[BankTask]:
    two, many, several, value = Task.BINARY, Task.MULTICLASS, Task.MULTILABEL, Task.REGRESSION
    pair, sentences = ("premise", "hypothesis"), ("sentence1", "sentence2")
    cr, trec, subj, r8, news = (partial(plain, name) for name in ("cr", "trec", "subj", "r8", "news6"))
    sick, mrpc = partial(plain, "sick", pair, suffix="_entailment"), partial(plain, "mrpc", sentences)
    yield BankTask("cr", "choose", two, cr)
    yield BankTask("trec", "choose", many, trec)
    yield BankTask("trec_many", "choose", many, lambda: _frequent(mapped(trec(), _question_words), 25), 2000)
    yield BankTask("trec_rare", "choose", two, lambda: _is("4", trec(), 0.07))
    yield BankTask("trec_joined", "choose", several, lambda: _joined(trec()))
    yield BankTask("sick", "choose", many, sick, 2400)
    yield BankTask(
        "sick_score", "choose", value, lambda: numbers(plain("sick", sentences, "score", "_relatedness")), 2000
    )
    yield BankTask("cr_tiny", "choose", two, cr, 200, most_held_out=60)
    yield BankTask("cr_rare", "choose", two, lambda: _is("negative", cr(), 0.1), 1400)
    yield BankTask("cr_length", "choose", value, lambda: mapped(cr(), partial(_length, 60)), 1500)
    yield BankTask("sick_two", "choose", two, lambda: _is("entailment", sick()), 2000)
    yield BankTask("sick_words", "choose", many, lambda: _first_of(sick(), 4, 40, 40), 2000)
    yield BankTask("trec_words", "choose", several, lambda: _which_of(trec(), 0, 10, 40), 1500)
    yield BankTask("subj", "report", two, subj)
    yield BankTask("mrpc", "report", two, mrpc, 3000, 96)
    yield BankTask("r8", "report", many, r8, 1200, 96)
    yield BankTask("news6", "report", many, news, 1000, 160)
    yield BankTask("news_long", "report", many, lambda: mapped(news(), _length_class), 1000, 256)
    yield BankTask("r8_joined", "report", several, lambda: _joined(r8()), 1500, 160)
    yield BankTask("r8_rare", "report", two, lambda: _is("crude", r8(), 0.05), 1500, 96)
    yield BankTask("subj_score", "report", value, lambda: mapped(subj(), _opinion))
    yield BankTask("mrpc_overlap", "report", value, lambda: mapped(mrpc(), _overlap), 2000, 96)
    yield BankTask("subj_tiny", "last", two, subj, 200, most_held_out=60)
    yield BankTask("subj_opening", "last", many, lambda: mapped(subj(), _opening), 1500)
    yield BankTask("subj_three", "last", many, lambda: mapped(subj(), _long_words), 1500)
    yield BankTask("subj_words", "last", several, lambda: _which_of(subj(), 5, 8, 60), 1500)
    yield BankTask("mrpc_longer", "last", two, lambda: mapped(mrpc(), _longer), 2400, 96)
    yield BankTask("mrpc_same", "last", two, lambda: mapped(mrpc(), _nearly_same), 2400, 96)
    yield BankTask("r8_fifty", "last", many, lambda: _first_of(r8(), 20, 50, 50), 2800, 80)
    yield BankTask("r8_three", "last", many, lambda: mapped(r8(), partial(_one_of, ("earn", "acq"), "other")), 900, 96)
    yield BankTask("r8_length", "last", value, lambda: mapped(r8(), partial(_length, 70)), 1500, 96)
    yield BankTask("news_words", "last", several, lambda: _which_of(news(), 30, 8, 90), 1000, 160)
    yield BankTask(
        "news_two", "last", two, lambda: mapped(news(), partial(_one_of, ("rec.autos", "sci.space"), None)), 1000, 192
    )
    yield BankTask("news_letters", "last", value, lambda: mapped(news(), _letters), 1000, 160)
    yield from _fresh_tasks()
    yield from outside_tasks()


def _fresh_tasks() -> Iterator[BankTask]:
    """Return the tasks that were added after the third group had been evaluated."""
    two, many, several, value = Task.BINARY, Task.MULTICLASS, Task.MULTILABEL, Task.REGRESSION
    subj, r8, news = (partial(plain, name) for name in ("subj", "r8", "news6"))
    mrpc = partial(plain, "mrpc", ("sentence1", "sentence2"))
    yield BankTask("subj_rare", "fresh", two, lambda: mapped(subj(), partial(_has, ("love", "family"))), 1500)
    yield BankTask("subj_thirty", "fresh", many, lambda: _first_of(subj(), 15, 30, 60), 2000)
    yield BankTask("mrpc_digits", "fresh", two, lambda: mapped(mrpc(), _digits), 1200, 96)
    yield BankTask("mrpc_words", "fresh", several, lambda: _which_of(mrpc(), 6, 8, 60), 1500, 96)
    yield BankTask("mrpc_length", "fresh", value, lambda: mapped(mrpc(), partial(_length, 90)), 1500, 96)
    yield BankTask("r8_small", "fresh", many, lambda: mapped(r8(), partial(_one_of, R8_SMALL, None)), 800, 96)
    yield BankTask("r8_letters", "fresh", value, lambda: mapped(r8(), _letters), 1200, 96)
    yield BankTask("news_three", "fresh", many, lambda: mapped(news(), partial(_one_of, NEWS_THREE, None)), 600, 160)


R8_SMALL = ("crude", "trade", "money-fx", "interest")
NEWS_THREE = ("comp.graphics", "rec.sport.hockey", "talk.politics.guns")


TASKS = {task.name: task for task in _list_tasks()}


@cache
def read_task(name: str) -> Splits:
    """Return training, validation (at most 500) and test rows (at most 400)."""
    splits = TASKS[name].read()
    return {
        "train": splits["train"],
        "validation": splits["validation"][: TASKS[name].most_held_out],
        "test": splits["test"][:HELD_OUT],
    }


def label_map(name: str) -> LabelMap:
    """Return the classes of a task, from its training rows."""
    task = TASKS[name]
    labels = [label for _, label in read_task(name)["train"]]
    if task.kind is Task.REGRESSION:
        return LabelMap(("score",), task.kind)
    if task.kind is Task.MULTILABEL:
        labels = [part for label in labels for part in label]
    return LabelMap(tuple(sorted(set(labels))), task.kind)
