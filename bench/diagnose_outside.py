"""The tasks of bench/diagnose_runs.py that are not of ../shared: SHARED_DIR names a folder that bench/outside_tasks.py wrote."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from diagnose_sources import BankTask, Group, Row, Splits, mapped, numbers, plain
from tunesmith.labels import Task

SENTENCES = ("sentence1", "sentence2")


def outside_tasks() -> Iterator[BankTask]:
    """The seven that were judged first, then those of other sources: some to choose on, the others for one look each."""
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
    """Of nine packages that no other group has, for one look."""
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
