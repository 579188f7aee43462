"""Labels that a person reads as one are two classes only with a warning, and the warning is shown."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import pytest

from data_loading import load_data
from tunesmith.data.audit import audit_rows, find_alikes
from tunesmith.errors import DataError
from tunesmith.findings import Finding

NFC, NFD = unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café")
ALIKE: dict[str, tuple[str, str, str]] = {
    "form": (NFC, NFD, r"'cafe\u0301' (12 rows) and 'caf\xe9' (12)"),
    "invisible": ("tea", "tea\u200b", r"'tea' (12 rows) and 'tea\u200b' (12)"),
    "mark": ("tea", "\ufefftea", "invisible characters"),
    "number": ("1", "1.0", "are separate classes: '1' (12 rows) and '1.0' (12)"),
    "several": ("tea", "Tea\u200b", "case, spaces"),
    "blank": ("tea", " ", "A label is blank: ' ' (12 rows). Fill in the label"),
    "invisible only": ("tea", "\u200b", r"A label is blank: '\u200b' (12 rows)"),
}


def rows(*labels: str) -> list[dict[str, Any]]:
    return [{"text": f"row {i} of it", "label": labels[i % len(labels)]} for i in range(12 * len(labels))]


def audit_loaded(**options: Any) -> list[Finding]:
    bundle = load_data(validation_split_fraction=0, **options)
    return audit_rows(bundle.parts, bundle.columns, bundle.labels, names_given=bundle.names_given)


@pytest.mark.parametrize("kind", ALIKE)
def test_labels_that_look_alike_are_one_warning(kind: str) -> None:
    one, two, said = ALIKE[kind]
    every = audit_loaded(train_data=rows(one, two, "other"))
    found = [f for f in every if f.code in ("labels_alike", "blank_label")]
    assert len(found) == 1
    assert found[0].severity == "warning"
    assert said in found[0].line()
    assert "--label_names" in found[0].line()


def test_labels_that_were_listed_are_meant() -> None:
    found = audit_loaded(train_data=rows("tea", "tea\u200b"), label_names=["tea", "tea\u200b"])
    assert [f.code for f in found if "alike" in f.code] == []


def test_labels_of_rows_with_several_are_compared_too() -> None:
    data = [{"text": f"row {i} of it", "labels": ["tea", NFC] if i % 2 else [NFD]} for i in range(30)]
    found = audit_loaded(train_data=data)
    assert [f.code for f in found if "alike" in f.code] == ["labels_alike"]


def test_labels_that_are_different_are_no_warning() -> None:
    assert find_alikes(dict.fromkeys(["a", "b", "1", "2", "1.5", "-1", "no", "none", "é", "e", "x y", "x-y"], 5)) == []


def test_a_label_of_another_form_in_the_validation_rows_says_how_it_differs() -> None:
    with pytest.raises(DataError, match=r"'cafe\\u0301' differs from 'caf\\xe9' only in its Unicode form"):
        load_data(train_data=rows(NFC, "tea"), validation_data=rows(NFD, "tea"))


def test_the_warnings_are_shown_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tiny_model import save_tiny_bert, write_csv
    from tunesmith.cli.main import main

    train = rows("tea", "tea\u200b")
    train[3]["text"] = "\u200b\u200b"
    file = write_csv(tmp_path / "train.csv", train)
    model = save_tiny_bert(tmp_path / "model")
    options = (
        f"--train_file {file} --model_name_or_path {model} --cache_dir {tmp_path / 'cache'} --max_steps 1 --use_cpu"
    )
    run = ["--output_dir", str(tmp_path / "run"), "--validation_split_fraction", "0"]
    assert main(["train", *options.split(), *run]) == 0
    said = capsys.readouterr().err
    before = said[: said.index("step 1/1")]
    assert "Warning: Labels that differ only in case, spaces, Unicode form, invisible characters" in before
    assert f"Warning: train: 1 row has no token of text (first: {file}:5)" in before
    columns = ["--text_column_names", "text", "--use_cpu"]
    assert main(["predict", str(tmp_path / "run"), "--input", str(file), *columns]) == 0
    assert "Warning: input: 1 row has no token of text (first: row 4)" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path / "run"), "--test_file", str(file), *columns]) == 0
    assert "Warning: input: 1 row has no token of text (first: row 4)" in capsys.readouterr().err
