"""Twenty messy files without a flag: the right columns and task, or one question with a ready answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tunesmith.errors import ConfigError, DataError
from tunesmith.reading.load import DataBundle, load_data
from unit.reading.messy_files import FILES, Messy, pick, sentence, table


def load_file(path: Path, **options: Any) -> DataBundle:
    return load_data(train_file=path, cache_dir=path.parent / "cache", **options)


@pytest.mark.parametrize("messy", FILES, ids=lambda messy: messy.name)
def test_a_messy_file_is_read_right_or_asked_about(messy: Messy, tmp_path: Path) -> None:
    path = tmp_path / messy.name
    messy.write(path)
    if messy.text is None:
        with pytest.raises(DataError) as caught:
            load_file(path)
        assert messy.ready is not None
        assert messy.ready in str(caught.value)
        assert "tunesmith train --train_file" in str(caught.value)
        return
    found = load_file(path)
    assert (found.columns.text, found.columns.label, found.labels.task.value) == (messy.text, messy.label, messy.task)


def test_there_are_twenty_messy_files() -> None:
    assert len({messy.name for messy in FILES}) == 20


def test_all_bad_rows_are_listed_at_once_and_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    texts = {3: "", 9: "  "}
    table({"text": lambda i: texts.get(i, sentence(i)), "label": lambda i: "" if i in (9, 20) else "ab"[i % 2]})(path)
    with pytest.raises(DataError) as caught:
        load_file(path)
    message = str(caught.value)
    assert "3 of 60 train rows cannot be used" in message
    assert f"{path}:5: text: the text is empty\n" in message
    assert f"{path}:11: text: the text is empty, label: the label is missing\n" in message
    found = load_file(path, skip_bad_rows=True)
    assert len(found.splits["train"]) + len(found.splits["validation"]) == 57
    assert [row.where for row in found.bad_rows] == [f"{path}:{n}" for n in (5, 11, 22)]
    assert any("3 of 60 train rows were left out" in note for note in found.notes)


def test_a_word_for_nothing_can_be_a_class_when_it_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    table({"text": sentence, "label": pick("yes", "no", "N/A")})(path)
    assert load_file(path, label_names="no,yes,N/A").labels.names == ("no", "yes", "N/A")
    assert load_file(path, skip_bad_rows=True).labels.names in (("no", "yes"), ("yes", "no"))


def test_the_positive_class_is_the_rarer_one_unless_it_is_named_or_labels_are_0_and_1(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    table({"text": sentence, "label": lambda i: "fraud" if i % 10 == 0 else "ok"})(path)
    assert load_file(path).labels.positive_name == "fraud"
    assert load_file(path, positive_label="ok").labels.positive_name == "ok"
    with pytest.raises(ConfigError, match=r"'frau' is not one of fraud, ok. Did you mean 'fraud'"):
        load_file(path, positive_label="frau")
    table({"text": sentence, "label": lambda i: int(i % 10 > 0)})(path)
    assert load_file(path).labels.positive_name == "1"


def test_a_class_without_validation_rows_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    table({"text": sentence, "label": lambda i: "rare" if i == 7 else "ab"[i % 2]})(path)
    notes = load_file(path).notes
    assert "No validation row has the label 'rare': validation scores say nothing about it." in notes


def test_ratings_say_that_regression_is_an_option_and_semicolons_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    table({"text": sentence, "stars": pick(1, 2, 3, 4, 5)}, sep=";")(path)
    notes = " ".join(load_file(path).notes)
    assert "--do_regression true predicts a number" in notes
    assert "are set apart by semicolon" in notes


def test_decimal_commas_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    table({"text": sentence, "score": lambda i: "2,5" if i % 2 else "-1,25"})(path)
    found = load_file(path, validation_split_fraction=0)
    assert found.splits["train"]["labels"][:2] == [-1.25, 2.5]


@pytest.mark.parametrize(("name", "mark"), [("x.csv", "\t"), ("x.csv", ";"), ("x.csv", "|"), ("x.tsv", ",")])
def test_a_file_with_another_delimiter_than_its_suffix_says_is_read(name: str, mark: str, tmp_path: Path) -> None:
    table({"text": sentence, "label": pick("a", "b")}, sep=mark)(tmp_path / name)
    found = load_file(tmp_path / name)
    assert found.columns.text == ("text",)
    assert any("are set apart by" in note for note in found.notes)
