"""Messy files without flags lead to the right columns and task, or to one question with a suggested answer."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_loading import load_data
from tunesmith.data.read import DataBundle, read_unlabeled
from tunesmith.errors import ConfigError, DataError
from unit.data.messy_files import FILES, Messy, lines, pick, sentence, table


def load_file(path: Path, **options: Any) -> DataBundle:
    return load_data(train_file=path, **options)


@pytest.mark.parametrize("messy", FILES, ids=lambda messy: messy.name)
def test_messy_file_is_read_right_or_asked_about(messy: Messy, tmp_path: Path) -> None:
    path = tmp_path / messy.name
    messy.write(path)
    if messy.expected is None:
        with pytest.raises(DataError) as caught:
            load_file(path)
        assert messy.ready is not None
        assert messy.ready in str(caught.value)
        return
    found = load_file(path)
    assert (found.columns.text, found.columns.label, found.labels.task.value) == messy.expected
    assert found.labels.names == ("x", "y") or messy.name != "numpy.csv"


def test_flag_in_the_error_answers_the_question(tmp_path: Path) -> None:
    files = {messy.name: messy for messy in FILES}
    answers: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
        "spanish.csv": ({"encoding": "cp1252"}, ("buena", "mala")),
        "variants.csv": ({"merge_label_variants": True}, ("No", "Yes")),
        "books.xlsx": ({"sheet_name": "Q2"}, ("a", "b")),
    }
    for name, (options, labels) in answers.items():
        files[name].write(tmp_path / name)
        found = load_file(tmp_path / name, **options)
        assert tuple(sorted(label.strip().capitalize() for label in found.labels.names)) == tuple(
            sorted(label.capitalize() for label in labels)
        )
        assert found.labels.task.value == "binary"


def test_split_column_is_used_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    where = {5: "dev", 6: "Test "}
    table({"text": sentence, "label": pick("a", "b"), "Split": lambda i: where.get(i % 10, "train")})(path)
    found = load_file(path)
    assert {split: len(rows) for split, rows in found.splits.items()} == {"train": 48, "validation": 6, "test": 6}
    assert found.splits["test"]["text"][0] == sentence(6)
    assert "Column 'Split' contains the split of each row: 48 train, 6 validation" in " ".join(found.notes)
    unsplit = load_file(path, split_column_name="none").splits
    assert {split: len(rows) for split, rows in unsplit.items()} == {"train": 54, "validation": 6}
    table({"text": sentence, "label": pick("a", "b"), "split": pick("train", "holdout")})(path)
    notes = load_file(path).notes
    assert "Column 'split' (holdout, train) is not used: all rows of the file are training data." in notes
    with pytest.raises(DataError, match="column 'split' has 'holdout'"):
        load_file(path, split_column_name="split")


def test_bad_rows_are_listed_together_and_can_be_skipped(tmp_path: Path) -> None:
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
    assert any("3 of 60 train rows were skipped" in note for note in found.notes)


def test_positive_class_is_the_rarer_one_or_the_named_one(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    table({"text": sentence, "label": lambda i: "fraud" if i % 10 == 0 else "ok"})(path)
    assert load_file(path).labels.positive_name == "fraud"
    assert load_file(path, positive_label="ok").labels.positive_name == "ok"
    with pytest.raises(ConfigError, match=r"'frau' is not one of fraud, ok. Did you mean 'fraud'"):
        load_file(path, positive_label="frau")
    table({"text": sentence, "label": lambda i: int(i % 10 > 0)})(path)
    assert load_file(path).labels.positive_name == "1"


def test_class_without_validation_rows_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    table({"text": sentence, "label": lambda i: "rare" if i == 59 else "ab"[i % 2]})(path)
    notes = load_file(path).notes
    assert "No validation row has the label 'rare': validation scores do not measure it." in notes


@pytest.mark.parametrize(("name", "mark"), [("x.csv", ";"), ("x.tsv", ",")])
def test_delimiter_is_found_whatever_the_suffix(name: str, mark: str, tmp_path: Path) -> None:
    table({"text": sentence, "label": pick("a", "b")}, sep=mark)(tmp_path / name)
    found = load_file(tmp_path / name)
    assert found.columns.text == ("text",)
    assert any("are separated by" in note for note in found.notes)


RAGGED = "text,label\n" + "".join(f"{sentence(i).replace(',', '')},{'ab'[i % 2]}\n" for i in range(40))


RAGGED = RAGGED.replace("ticket 3 ", "ticket, 3, ").replace("floor 28,a", "floor 28") + '"x,y",b,c\n\n"a, b",b\n'


def test_ragged_rows_are_listed_together_and_can_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text(RAGGED)
    bad = [f"{path}:5: 4 fields, expected 2", f"{path}:6: 1 field, expected 2", f"{path}:42: 3 fields, expected 2"]
    with pytest.raises(DataError) as caught:
        load_file(path)
    message = str(caught.value)
    assert "4 of 43 rows do not match the header" in message
    assert all(f"  {line}\n" in message for line in bad)
    assert f"  {path}:43: an empty line, expected 2 fields" in message
    assert "set --skip_bad_rows" in message
    with pytest.raises(DataError, match="4 of 43 rows do not match the header") as in_prediction:
        read_unlabeled(path, text=("text",))
    assert "skip_bad_rows" not in str(in_prediction.value), "predict has no such option"
    found = load_file(path, skip_bad_rows=True)
    assert len(found.splits["train"]) + len(found.splits["validation"]) == 39
    assert [row.where for row in found.bad_rows] == [f"{path}:{n}" for n in (5, 6, 42, 43)]
    assert found.bad_rows[2].reasons == ('3 fields, expected 2: "x,y",b,c',)
    assert any("4 of 43 train rows were skipped" in note for note in found.notes)
    assert found.splits["train"].column_names == ["text", "label", "__line__", "labels"]


def test_missing_json_keys_are_null(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines([{"text": sentence(i), "label": "ab"[i % 2]} | ({"note": i} if i % 7 == 3 else {}) for i in range(30)])(path)
    found = load_file(path, validation_split_fraction=0).splits["train"]
    assert found["note"][:4] == [None, None, None, 3]
    lines([{"text": sentence(i)} | ({"label": "ab"[i % 2]} if i not in (4, 9) else {}) for i in range(30)])(path)
    with pytest.raises(
        DataError, match=rf"2 of 30 train rows cannot be used:\n  {path}:5: label: the label is missing"
    ):
        load_file(path)


def test_minus_one_is_a_class_when_it_is_listed(tmp_path: Path) -> None:
    table({"text": sentence, "polarity": pick(-1, 0, 1)})(path := tmp_path / "polarity.csv")
    with pytest.raises(DataError, match=r"set --label_names=-1,0,1 if -1 is a class"):
        load_file(path)
    found = load_file(path, label_names="-1,0,1")
    assert found.labels.names == ("-1", "0", "1")
    assert "Task: multiclass, because 3 labels are listed." in found.notes


def test_decimals_are_numbers_and_utf8_bytes_are_text(tmp_path: Path) -> None:
    texts, prices = [sentence(i) for i in range(60)], [Decimal(i * 7 % 500) / 100 for i in range(60)]
    pq.write_table(pa.table({"text": [text.encode() for text in texts], "price": prices}), tmp_path / "sql.parquet")
    found = load_file(tmp_path / "sql.parquet", validation_split_fraction=0)
    assert (found.columns.text, found.columns.label, found.labels.task.value) == (("text",), "price", "regression")
    assert found.splits["train"]["text"][:] == texts
    assert found.splits["train"]["labels"][:] == pytest.approx([float(price) for price in prices])
    classes = pa.array([Decimal(i % 2) for i in range(60)], pa.decimal128(10, 0))
    pq.write_table(pa.table({"text": texts, "label": classes}), tmp_path / "ids.parquet")
    assert load_file(tmp_path / "ids.parquet").labels.names == ("0", "1")


def test_undecodable_bytes_are_kept_or_refused(tmp_path: Path) -> None:
    image = [b"\x89PNG\xff\xfe"] * 60
    columns = {"text": [sentence(i) for i in range(60)], "image": image, "label": ["a", "b"] * 30}
    pq.write_table(pa.table(columns), tmp_path / "images.parquet")
    assert load_file(tmp_path / "images.parquet", validation_split_fraction=0).splits["train"]["image"][:] == image
    late = [b"good text"] * 16_384 + [b"\xff\xfe"]
    pq.write_table(pa.table({"text": late, "label": ["a"] * len(late)}), tmp_path / "late.parquet")
    with pytest.raises(DataError, match=r"late.parquet: column 'text' contains bytes that are not UTF-8 text"):
        load_file(tmp_path / "late.parquet")


def test_single_json_object_with_all_rows_is_read(tmp_path: Path) -> None:
    rows = [{"text": sentence(i), "label": "ab"[i % 2]} for i in range(60)]
    whole = {"version": "1.0", "data": rows}
    (tmp_path / "x.json").write_text(json.dumps(whole, indent=1))
    found = load_file(tmp_path / "x.json", validation_split_fraction=0)
    assert found.splits["train"]["text"][:] == [row["text"] for row in rows]


def test_quotes_of_a_tsv_file_are_kept_and_reported(tmp_path: Path) -> None:
    path = tmp_path / "quoted.tsv"
    path.write_text("text\tlabel\n" + "".join(f'"{sentence(i)}"\t{"ab"[i % 2]}\n' for i in range(60)))
    found = load_file(path, validation_split_fraction=0)
    assert found.splits["train"]["text"][0] == f'"{sentence(0)}"'
    assert any(note.endswith("are kept as text. Use --quoting minimal to parse them.") for note in found.notes)
    asked = load_file(path, validation_split_fraction=0, quoting="minimal")
    assert asked.splits["train"]["text"][0] == sentence(0)
    assert not any("quotes" in note for note in asked.notes)
    path.write_text('text\tlabel\n"two\nlines"\ta\n"x"\tb\n')
    with pytest.raises(DataError, match="Set --quoting minimal if quotes enclose cells of several lines"):
        load_file(path)
    assert load_file(path, quoting="minimal", validation_split_fraction=0).splits["train"]["text"][:] == [
        "two\nlines",
        "x",
    ]


@pytest.mark.parametrize("cell", ["", "?"])
def test_test_rows_with_empty_labels_are_unlabeled(cell: str, tmp_path: Path) -> None:
    table({"text": sentence, "label": pick("a", "b")})(tmp_path / "train.csv")
    table({"text": sentence, "label": pick(cell)})(tmp_path / "test.csv")
    found = load_file(tmp_path / "train.csv", test_file=tmp_path / "test.csv")
    assert set(found.splits["test"]["labels"][:]) == {-1}
    assert any(note.endswith("test rows are unlabeled (-1).") for note in found.notes)
    table({"text": sentence, "label": pick(cell, "a")})(tmp_path / "some.csv")
    with pytest.raises(DataError, match="test rows cannot be used"):
        load_file(tmp_path / "train.csv", test_file=tmp_path / "some.csv")


def test_frames_are_read_like_files(tmp_path: Path) -> None:
    texts = [sentence(i) for i in range(60)]
    frame = pd.DataFrame({"text": [text.encode() for text in texts], "label": pd.Categorical(["a", "b"] * 30)})
    found = load_data(train_data=frame, validation_split_fraction=0)
    assert found.splits["train"]["text"][:] == texts
    mixed = pd.DataFrame({"text": texts, "label": [i if i % 2 else str(i) for i in range(60)]})
    with pytest.raises(DataError, match=r"train: the DataFrame cannot be read .*column label.* Use one kind of value"):
        load_data(train_data=mixed)
