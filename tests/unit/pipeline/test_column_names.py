"""Columns of the data may have the names of ours: nothing is lost, and ours get other names, said in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tiny_model import sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.data.cache import read_prediction_columns
from tunesmith.errors import DataError
from tunesmith.inference.tables import choose_column_names, read_predictions
from tunesmith.report.compare import compare_runs
from tunesmith.report.predictions import make_predictions

OURS = ("split", "row", "prediction", "truncated", "prob_good", "label")


@pytest.mark.parametrize(
    "names", [("split", "row"), ("prediction", "truncated"), ("prob_good", "label"), ("length", "input_ids")]
)
def test_text_columns_with_names_of_ours_keep_their_text(names: tuple[str, str], train: Any, tmp_path: Path) -> None:
    texts = [text for text, _ in sentences(40)]
    rows = [{names[0]: text, names[1]: text.upper(), "mood": ("good", "bad")[i % 2]} for i, text in enumerate(texts)]
    file = write_csv(tmp_path / "train.csv", rows)
    result, said = train(train_file=file, text_column_names=names, label_column_name="mood", max_steps=1)
    table = read_prediction_columns(result.run.predictions_file)
    assert set(table[names[0]]) <= set(texts)
    assert table[names[1]] == [text.upper() for text in table[names[0]]]
    moved = [f"'tunesmith_{name}' instead of {name!r}" for name in OURS if name in names]
    lines = [line for line in said if "already has columns" in line]
    assert len(lines) == bool(moved)
    assert all(part in lines[0] for part in moved)
    found = make_predictions(table, json.loads(result.run.data_summary_file.read_text()))
    assert found is not None
    assert found.split == "validation"
    assert found.texts == {name: table[name] for name in names}
    assert found.probabilities is not None
    assert set(found.labels.tolist()) <= {0, 1}


def test_runs_whose_text_columns_have_names_of_ours_are_compared(train: Any, tmp_path: Path) -> None:
    rows = [{"split": text, "label": text, "mood": "good" if good else "bad"} for text, good in sentences(40)]
    file = write_csv(tmp_path / "train.csv", rows)
    options = {"train_file": file, "text_column_names": "split,label", "label_column_name": "mood", "max_steps": 1}
    folders = [train(**options, seed=7, data_seed=1, output_dir=tmp_path / name)[0].run.path for name in ("a", "b")]
    comparison = compare_runs(folders)
    assert [test.split for test in comparison.tests] == ["validation"]


def test_a_text_column_named_labels_is_refused_before_the_first_step(train: Any, tmp_path: Path) -> None:
    rows = [{"labels": text, "mood": "good" if good else "bad"} for text, good in sentences(40)]
    file = write_csv(tmp_path / "train.csv", rows)
    with pytest.raises(DataError, match=r"'labels'.*Rename"):
        train(train_file=file, text_column_names="labels", label_column_name="mood")


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_predicting_again_what_was_predicted_loses_no_column(
    kind: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = [{"text": text, "prob_good": str(i), "label": "x"} for i, (text, _) in enumerate(sentences(5, 9))]
    file = write_csv(tmp_path / "0.csv", first)
    sizes = []
    for turn in range(1, 4):
        output = tmp_path / f"{turn}.{kind}"
        assert main(["predict", str(trained), "--input", str(file), "--output", str(output), "--use_cpu"]) == 0
        said = capsys.readouterr().err
        assert "'tunesmith_prob_good' instead of 'prob_good'" in said or turn > 1
        file = output
        sizes.append(len(names_in(output)))
    assert sizes == [6, 9, 12]
    assert "tunesmith_prediction_2" in names_in(file)
    assert "'tunesmith_prediction_2' instead of 'prediction'" in said


def names_in(path: Path) -> list[str]:
    if path.suffix == ".jsonl":
        return list(json.loads(path.read_text().splitlines()[0]))
    return list(read_prediction_columns(path) if path.suffix == ".parquet" else read_predictions(path))


def test_free_names_are_unique_whatever_is_taken() -> None:
    ours = ["prediction", "prob_a", "prob_a"]
    taken = ["prediction", "tunesmith_prediction", "tunesmith_prediction_2", "prob_b"]
    assert choose_column_names(ours, taken) == ["tunesmith_prediction_3", "prob_a", "tunesmith_prob_a"]
