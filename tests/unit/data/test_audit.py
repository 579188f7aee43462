"""Planted faults and label errors are found with their rows; clean rows raise no warning."""

from __future__ import annotations

import csv
import io
import random
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from data_loading import load_data
from tunesmith.data.audit import audit_rows, check_tokens
from tunesmith.data.rows import Columns, Part
from tunesmith.errors import DataError
from tunesmith.events import Finding
from tunesmith.labels import LabelMap, Task
from tunesmith.pipeline.audit import (
    CheckedRows,
    describe_suspects,
    find_label_errors,
    format_review,
    word_space,
)

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


def test_equal_rows_and_rare_labels_are_found() -> None:
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


def test_clean_rows_raise_no_warning() -> None:
    assert warnings_of(audit(clean_rows(400), validation=clean_rows(100, seed=1))) == set()


def test_near_duplicates_across_splits_are_found() -> None:
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


def test_near_duplicates_with_random_labels_do_not_warn() -> None:
    train, held = clean_rows(300), clean_rows(200, seed=5)
    for row in range(40):
        held[row] = {"text": train[row]["text"] + " x", "labels": row % 2}
        train[row]["labels"] = (row // 2) % 2
    leak = audit(train, validation=held)["split_leak"]
    assert leak.severity == "info"
    assert leak.numbers["near_rows"] == 40


@pytest.mark.parametrize("kind", ["numbers", "several labels"])
def test_contradicting_labels_are_found_in_every_task(kind: str) -> None:
    rows = clean_rows(200)
    for number, row in enumerate(rows):
        row["labels"] = float(number % 5) if kind == "numbers" else [1.0, float(number % 2), 0.0]
    again = [{**row, "labels": row["labels"] + 0.1 if kind == "numbers" else row["labels"]} for row in rows[:10]]
    far = [{**row, "labels": 9.0 if kind == "numbers" else [0.0, 0.0, 1.0]} for row in rows[20:24]]
    found = audit(rows + again + far, names=("a", "b", "c"))["contradicting_labels"]
    assert found.severity == "warning"
    assert found.numbers["first"] == [f"train:{row}" for row in (21, 22, 23, 24, 211, 212, 213, 214)]


@pytest.mark.parametrize(
    "kind", ["length", "id column", "date column", "id in text", "label name", "marker", "sign", "last", "start"]
)
def test_label_giveaway_is_a_warning(kind: str) -> None:
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
        elif kind == "sign":
            row["text"] = f"{'-+'[label]}{row['text']}"
        elif kind == "last":
            row["text"] = f"{row['text']} {'.!'[label]}"
        elif kind == "start":  # a word that other rows contain too
            row["text"] = f"{('bad', 'good')[label]}: {row['text']} {rng.choice(['bad', 'good'])}"
        if kind == "date column":
            row["posted"] = f"{rng.randrange(1, 29):02d}.{rng.randrange(1, 13):02d}.{2019 + 4 * label}"
        if kind == "id column":
            row["key"] = f"r{number + 10_000 * label}"
    found = audit(rows, names=("0", "1") if kind in ("marker", "start") else ("negative", "positive"))
    assert found["label_giveaway"].severity == "warning"


def test_marker_of_one_class_of_three_does_not_warn() -> None:
    rows = clean_rows(300, classes=3)
    for row in rows:
        first = "urgent" if row["labels"] == 1 else "as"
        row["text"] = f"{first} {row['text'].partition(' ')[2]}"
    assert "label_giveaway" not in audit(rows, names=("a", "b", "c"))


def test_findings_contain_line_numbers(tmp_path: Path) -> None:
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


def test_different_class_shares_are_drift() -> None:
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


def test_unknown_tokens_are_named() -> None:
    class Words:
        unk_token_id = 0

        def __call__(self, texts: list[str], **_: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[int(word.isascii()) for word in text.split()] for text in texts]}

    assert check_tokens(["the film was good", "we liked it"], Words()) == []
    found = check_tokens(["the film was good 🙂", "we liked it 🙂"], Words())
    assert found[0].code == "unknown_tokens"
    assert found[0].evidence.endswith("mostly so: '🙂'.")


def test_audit_counts_known_duplicates_of_mrpc(shared: Path, tmp_path: Path) -> None:
    files: dict[str, Any] = {
        f"{s}_file": shared / "data" / "mrpc" / f"{s}.tsv" for s in ("train", "validation", "test")
    }
    bundle = load_data(**files, cache_dir=tmp_path, task_name="mrpc")
    found = audit_rows(bundle.parts, bundle.columns, bundle.labels)
    leaks = {f.numbers["split"]: f.numbers["shared_rows"] for f in found if f.code == "split_leak"}
    assert leaks == {"validation": 43, "test": 245}
    assert bundle.labels.names == ("not_equivalent", "equivalent")


NFC, NFD = unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café")


def labeled(*labels: str) -> list[dict[str, Any]]:
    return [{"text": f"row {i} of it", "label": labels[i % len(labels)]} for i in range(12 * len(labels))]


@pytest.mark.parametrize(("one", "two"), [(NFC, NFD), ("tea", "tea\u200b"), ("tea", "Tea\u200b"), ("1", "1.0")])
def test_labels_that_look_alike_are_refused(one: str, two: str) -> None:
    rows = labeled(one, two, "other")
    with pytest.raises(DataError) as caught:
        load_data(train_data=rows)
    assert f"train:2:label: {two!a} differs from {one!a} only in case, spaces, Unicode form" in str(caught.value)
    merged = load_data(train_data=rows, merge_label_variants=True).labels.names
    assert len(merged) == 2
    listed = load_data(train_data=rows, label_names=[one, two, "other"]).labels.names
    assert listed == (one, two, "other")


def test_blank_label_is_missing() -> None:
    with pytest.raises(DataError, match=r"12 of 24 train rows cannot be used:\n.*label: the label is missing"):
        load_data(train_data=labeled("tea", " "))


def test_unknown_label_error_shows_difference() -> None:
    with pytest.raises(DataError, match=r"'cafe\\u0301' differs from 'caf\\xe9' only in case, spaces, Unicode form"):
        load_data(train_data=labeled(NFC, "tea"), validation_data=labeled(NFD, "tea"))


def test_warnings_are_shown_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tiny_model import save_tiny_bert, write_csv
    from tunesmith.cli.main import main

    train = [*labeled("tea", "milk"), {"text": "another row", "label": "water"}]
    train[3]["text"] = "\u200b\u200b"
    file = write_csv(tmp_path / "train.csv", train)
    model = save_tiny_bert(tmp_path / "model")
    options = (
        f"--train_file {file} --model_name_or_path {model} --cache_dir {tmp_path / 'cache'} --max_steps 1 --use_cpu"
    )
    run = ["--output_dir", str(tmp_path / "run"), "--validation_split_fraction", "0"]
    assert main(["train", *options.split(), *run]) == 0
    said = capsys.readouterr().err
    before = said[: said.index("Training: 1 steps")]
    assert "Warning: Labels with fewer than 10 train rows: 'water' (1)." in before
    assert f"Warning: train: 1 row has no text tokens (first: {file}:5)" in before
    columns = ["--text_column_names", "text", "--use_cpu"]
    assert main(["predict", str(tmp_path / "run"), "--input", str(file), *columns]) == 0
    assert "Warning: input: 1 row has no text tokens (first: row 4)" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run"), "--test_file", str(file), *columns]) == 0
    assert "Warning: input: 1 row has no text tokens (first: row 4)" in capsys.readouterr().err


LABELS = LabelMap.for_classes(["cold", "warm"])


def planted(count: int = 300) -> tuple[list[str], np.ndarray, np.ndarray]:
    rng = random.Random(0)
    topics = (["snow", "ice", "frost", "winter", "sledge"], ["sun", "beach", "heat", "summer", "sand"])
    ids = np.array([rng.randrange(2) for _ in range(count)])
    texts = [" ".join(rng.choice(topics[i]) for _ in range(4)) + f" day {rng.randrange(50)}" for i in ids]
    wrong = np.array(rng.sample(range(count), 15))
    given = ids.copy()
    given[wrong] = 1 - given[wrong]
    return texts, given, wrong


def check_rows(texts: list[str], ids: np.ndarray) -> CheckedRows:
    part = Part.of(Dataset.from_dict({"text": texts, "labels": ids}))
    return CheckedRows(part, np.arange(len(ids)), [(text,) for text in texts], ids, LABELS)


def test_planted_label_errors_come_first() -> None:
    texts, given, wrong = planted()
    suspects, _ = find_label_errors(word_space(texts), given, LABELS)
    assert {one.row for one in suspects[:15]} == set(wrong.tolist())
    assert all(one.suggested == 1 - given[one.row] for one in suspects[:15])
    checked = check_rows(texts, given)
    finding = describe_suspects(suspects, checked, method="TF-IDF", review=None)[0]
    assert f"the strongest: train:{suspects[0].row + 1}, " in finding.evidence
    assert finding.severity == "info"
    assert finding.numbers["rows"] == len(suspects)
    assert describe_suspects(suspects * 3, checked, method="TF-IDF", review="r.csv")[0].severity == "warning"


def test_review_file_is_applied_and_checked(tmp_path: Path) -> None:
    texts, given, _ = planted(60)
    data = [{"text": text, "label": LABELS.names[i]} for text, i in zip(texts, given, strict=True)]
    suspects, _ = find_label_errors(word_space(texts), given, LABELS)
    review = tmp_path / "review.csv"
    written = format_review(suspects, check_rows(texts, given), ["text"]).decode()
    rows = list(csv.DictReader(io.StringIO(written)))
    assert list(rows[0]) == ["line", "text", "label", "suggested_label", "why"]
    review.write_text(written.replace("line,text,label,suggested_label", "line,text,was,label"))
    options = {"train_data": data, "cache_dir": tmp_path, "validation_split_fraction": 0}
    bundle = load_data(labels_file=review, **options)
    changed = [i for i in range(60) if bundle.splits["train"]["labels"][i] != given[i]]
    assert changed == sorted(one.row for one in suspects)
    assert bundle.fingerprint != load_data(**options).fingerprint
    assert any("labels of train rows were changed by" in note for note in bundle.notes)
    for text, problem in (
        ("line,text,label\n1,another,cold\n", "different text"),
        (f"line,text,label\n1,{texts[0]},colt\n", "Did you mean 'cold'"),
        ("line,text,label\n99,x,cold\n", "different text"),
        ("line,label\n1,cold\n", "'text' is missing"),
    ):
        review.write_text(text)
        with pytest.raises(DataError, match=problem):
            load_data(labels_file=review, **options)
