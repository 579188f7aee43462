"""Prediction tables: exact round trip, formulas escaped, complete or not there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunesmith.errors import ConfigError
from tunesmith.labels import LabelMap, Task
from tunesmith.predict.predictor import predicted_names, probabilities_of
from tunesmith.predict.tables import escape_formula, read_predictions, unescape_formula, write_table

HOSTILE = [
    "=cmd|' /C calc'!A0",
    "+1",
    "-1",
    "@SUM(A1)",
    "\tx",
    "'=1",
    "''+1",
    "plain",
    "",
    'quote " and, comma',
    "line\nbreak",
]


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_escaping_is_undone_exactly_and_no_escaped_cell_begins_a_formula(text: str) -> None:
    escaped = escape_formula(text)
    assert unescape_formula(escaped) == text
    assert not escaped.startswith(("=", "+", "-", "@", "\t", "\r"))


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_hostile_cells_come_back_exactly(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"out{suffix}"
    write_table(file, {"text": HOSTILE, "prob_a": [0.25] * len(HOSTILE)})
    back = read_predictions(file)
    assert back["text"] == HOSTILE
    assert back["prob_a"] == ["0.25"] * len(HOSTILE)


def test_jsonl_and_parquet_keep_values_as_they_are(tmp_path: Path) -> None:
    columns = {"text": HOSTILE, "prediction": ["a"] * len(HOSTILE), "score": [float(i) for i in range(len(HOSTILE))]}
    write_table(tmp_path / "o.jsonl", columns)
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [r["text"] for r in rows] == HOSTILE
    write_table(tmp_path / "o.parquet", columns)
    assert pq.read_table(tmp_path / "o.parquet").to_pydict() == columns


def test_another_file_type_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="xlsx"):
        write_table(tmp_path / "out.xlsx", {"a": [1]})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "out.csv"
    file.write_text("old")
    with pytest.raises(ValueError, match="zip"):
        write_table(file, {"a": [1, 2], "b": [1]})
    assert file.read_text() == "old"


def test_probabilities_follow_the_task() -> None:
    logits = np.array([[2.0, -1.0, 700.0], [0.0, 0.0, -700.0]])
    softmax = probabilities_of(logits, Task.MULTICLASS)
    assert softmax.sum(axis=-1) == pytest.approx([1.0, 1.0])
    assert predicted_names(softmax, LabelMap.for_classes(["a", "b", "c"])) == ["c", "a"]
    sigmoid = probabilities_of(logits, Task.MULTILABEL)
    assert sigmoid[0] == pytest.approx([1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(1.0)), 1.0])
    assert predicted_names(sigmoid, LabelMap(("a", "b", "c"), Task.MULTILABEL)) == [["a", "c"], ["a", "b"]]
    assert predicted_names(probabilities_of(np.array([[1.5]]), Task.REGRESSION), LabelMap(("s",), Task.REGRESSION)) == [
        1.5
    ]
