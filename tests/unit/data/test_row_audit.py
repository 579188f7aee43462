"""Planted faults are found, with their rows; clean rows raise no warning."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from data_loading import load_data
from tunesmith.data.audit import audit_rows, check_tokens, require_clean
from tunesmith.data.columns import Columns
from tunesmith.data.source import Part
from tunesmith.errors import DataError
from tunesmith.findings import Finding
from tunesmith.labels import LabelMap, Task

Rows = list[dict[str, Any]]
WORDS = [a + b for a in "bdfgklmnprst" for b in ("ale", "ine", "orm", "ust", "ack", "ight", "oad", "eck", "ilm", "und")]


def sentence(rng: random.Random, words: int = 9) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def clean_rows(count: int, *, seed: int = 0, classes: int = 2, words: int = 9) -> Rows:
    rng = random.Random(seed)
    return [{"text": sentence(rng, words), "labels": rng.randrange(classes)} for _ in range(count)]


def audit(train: Rows, names: tuple[str, ...] = ("no", "yes"), **more: Rows) -> dict[str, Finding]:
    parts = {name: Part.of(Dataset.from_list(data), name) for name, data in {"train": train, **more}.items()}
    text = tuple(name for name in train[0] if name in ("text", "a", "b"))
    kind = type(train[0]["labels"])
    labels = LabelMap(("label",), Task.REGRESSION) if kind is float else LabelMap.for_classes(list(names))
    labels = LabelMap(names, Task.MULTILABEL) if kind is list else labels
    found = audit_rows(parts, Columns(text, "label", labels.task), labels)
    return {finding.code: finding for finding in found}


def warnings_of(found: dict[str, Finding]) -> set[str]:
    return {code for code, finding in found.items() if finding.severity != "info"}


def test_equal_rows_contradictions_and_rare_labels_are_found() -> None:
    train = [{"a": f"first text {i * 7919}", "b": f"second one {i * 104729}", "labels": 0} for i in range(95)]
    train += [
        {**train[1], "a": train[1]["a"].upper() + " ", "labels": 1},
        {"a": train[2]["b"], "b": train[2]["a"], "labels": 0},
    ]
    held = [{"a": "something new", "b": f" {train[3]['a']}  ", "labels": 0}, {**train[4], "labels": 1}]
    found = audit(train, validation=held)
    assert found["split_leak"].numbers["equal_rows"] == 1
    assert found["contradicting_labels"].numbers["rows"] == 1
    assert found["duplicate_rows"].numbers["first"] == ["train:96"]
    assert found["rare_labels"].numbers["labels"] == {"yes": 1}
    assert found["imbalance"].numbers["share"] > 0.9
    assert found["majority_baseline"].numbers["accuracy"] == 0.5


def test_clean_rows_raise_no_warning() -> None:
    assert warnings_of(audit(clean_rows(400), validation=clean_rows(100, seed=1))) == set()


def test_nearly_equal_rows_across_splits_are_found_and_others_are_not() -> None:
    rng = random.Random(3)
    train, held = clean_rows(300, words=16), clean_rows(200, seed=5, words=16)
    for row in range(20):
        words = train[row * 3]["text"].split()
        words[rng.randrange(16)] = rng.choice(WORDS) if row % 2 else "x"
        held[row] = {"text": " ".join(words).upper() + " !", "labels": train[row * 3]["labels"]}
    leak = audit(train, validation=held)["split_leak"]
    assert leak.severity == "warning"
    assert leak.numbers["near_rows"] == 20
    assert leak.numbers["first"] == [f"validation:{row}" for row in range(1, 11)]


def test_near_rows_whose_label_differs_as_by_chance_are_no_warning() -> None:
    train, held = clean_rows(300), clean_rows(200, seed=5)
    for row in range(40):
        held[row] = {"text": train[row]["text"] + " x", "labels": row % 2}
        train[row]["labels"] = (row // 2) % 2
    leak = audit(train, validation=held)["split_leak"]
    assert leak.severity == "info"
    assert leak.numbers["near_rows"] == 40


def test_edited_long_texts_are_near_duplicates() -> None:
    train, held = clean_rows(60, words=200), clean_rows(40, seed=5, words=200)
    for row in range(10):
        words = train[row]["text"].split()
        held[row] = {"text": " ".join([*words[100:], *words[:100], "signed"]), "labels": train[row]["labels"]}
    found = audit(train, validation=held)
    assert "near_duplicate_rows" not in found
    assert found["split_leak"].numbers["near_rows"] == 10


@pytest.mark.parametrize("kind", ["numbers", "several labels"])
def test_equal_texts_contradict_each_other_in_every_task(kind: str) -> None:
    rows = clean_rows(200)
    for number, row in enumerate(rows):
        row["labels"] = float(number % 5) if kind == "numbers" else [1.0, float(number % 2), 0.0]
    again = [{**row, "labels": row["labels"] + 0.1 if kind == "numbers" else row["labels"]} for row in rows[:10]]
    far = [{**row, "labels": 9.0 if kind == "numbers" else [0.0, 0.0, 1.0]} for row in rows[20:24]]
    found = audit(rows + again + far, names=("a", "b", "c"))["contradicting_labels"]
    assert found.severity == "warning"
    assert found.numbers["first"] == [f"train:{row}" for row in (21, 22, 23, 24, 211, 212, 213, 214)]


@pytest.mark.parametrize("kind", ["length", "id column", "date column", "id in text", "label name", "marker"])
def test_what_gives_the_label_away_is_a_warning(kind: str) -> None:
    rng = random.Random(1)
    rows = clean_rows(400)
    for number, row in enumerate(rows):
        label = row["labels"]
        if kind == "length":
            row["text"] = sentence(rng, 4 + 8 * label + rng.randrange(3))
        elif kind == "id in text":
            row["text"] = f"{row['text']} {rng.randrange(1000) + 5000 * label}"
        elif kind == "label name":
            row["text"] = f"{row['text']} {('negative', 'positive')[label]}"
        elif kind == "marker":
            row["text"] = f"[{('NEG', 'POS')[label]}] {row['text']}"
        if kind == "date column":
            row["posted"] = f"{rng.randrange(1, 29):02d}.{rng.randrange(1, 13):02d}.{2019 + 4 * label}"
        if kind == "id column":
            row["key"] = f"r{number + 10_000 * label}"
    found = audit(rows, names=("0", "1") if kind == "marker" else ("negative", "positive"))
    assert found["label_giveaway"].severity == "warning"


def test_marker_of_one_class_among_three_is_no_warning() -> None:
    rows = clean_rows(300, classes=3)
    for row in rows:
        first = "urgent" if row["labels"] == 1 else "as"
        row["text"] = f"{first} {row['text'].partition(' ')[2]}"
    assert "label_giveaway" not in audit(rows, names=("a", "b", "c"))


def test_findings_about_a_held_out_split_name_the_lines_of_the_file(tmp_path: Path) -> None:
    lines = [f"{row['text']},{'ab'[row['labels']]}" for row in clean_rows(200)]
    lines[10] = lines[150]
    (tmp_path / "x.csv").write_text("text,label\n" + "\n".join(lines) + "\n")
    bundle = load_data(train_file=tmp_path / "x.csv", cache_dir=tmp_path)
    found = [f for f in audit_rows(bundle.parts, bundle.columns, bundle.labels) if f.code == "duplicate_rows"]
    assert [f.numbers["first"] for f in found] == [[f"{tmp_path / 'x.csv'}:152"]]
    assert f"(first: {tmp_path / 'x.csv'}:152)" in found[0].evidence


def test_second_label_column_is_no_warning() -> None:
    found = audit([{**row, "label_text": ("bad", "good")[row["labels"]]} for row in clean_rows(400)])
    assert found["column_repeats_label"].severity == "info"
    assert "label_giveaway" not in found


def test_different_label_shares_are_drift() -> None:
    other = [{"text": f"ein kurzer {i}", "labels": int(i % 10 == 0)} for i in range(200)]
    found = audit(clean_rows(400), validation=other)
    assert "label_drift" in warnings_of(found)


def test_empty_and_constant_texts_are_found() -> None:
    rows = clean_rows(300)
    rows[7]["text"] = "  "
    for row in rows[50:90]:
        row["text"] = "see attachment"
    found = audit(rows)
    assert found["empty_text"].numbers["first"] == ["train:8"]
    assert found["constant_text"].numbers["rows"] == 40


def test_numbers_to_predict_are_audited_too() -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"text": row["text"], "labels": float(v)} for row, v in zip(clean_rows(300), rng.normal(size=300), strict=True)
    ]
    assert warnings_of(audit(rows)) == set()


def test_strict_data_turns_warnings_into_a_data_error() -> None:
    found = [Finding("empty_text", "warning", "1 row is empty."), Finding("x", "info", "Fine.")]
    require_clean(found, strict=False)
    require_clean(found[1:], strict=True)
    with pytest.raises(DataError, match=r"1 warning.*strict_data") as caught:
        require_clean(found, strict=True)
    assert caught.value.exit_code == 3


def test_unknown_tokens_are_named() -> None:
    class Words:
        unk_token_id = 0

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[int(word.isascii()) for word in text.split()] for text in texts]}

    assert check_tokens({"train": ["the film was good", "we liked it"]}, Words()) == []
    found = check_tokens({"train": ["the film was good 🙂", "we liked it 🙂"]}, Words())
    assert found[0].code == "unknown_tokens"
    assert found[0].evidence.endswith("mostly so: '🙂'.")


def test_the_audit_counts_the_known_leaks_of_mrpc(shared: Path, tmp_path: Path) -> None:
    files: dict[str, Any] = {
        f"{s}_file": shared / "data" / "mrpc" / f"{s}.tsv" for s in ("train", "validation", "test")
    }
    bundle = load_data(**files, cache_dir=tmp_path, task_name="mrpc")
    found = audit_rows(bundle.parts, bundle.columns, bundle.labels)
    leaks = {f.numbers["split"]: f.numbers["shared_rows"] for f in found if f.code == "split_leak"}
    assert leaks == {"validation": 43, "test": 245}
    assert bundle.labels.names == ("not_equivalent", "equivalent")
