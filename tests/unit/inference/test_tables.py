"""Prediction tables read back exactly, formulas are escaped, and files are complete or absent."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from read_predictions import read_predictions, unescape_formula
from tunesmith.config.options import Reading
from tunesmith.data.read import read_source
from tunesmith.errors import ConfigError, DataError, ResourceError
from tunesmith.inference.tables import (
    check_cells,
    escape_formula,
    predicted_names,
    probabilities_of,
    remove_leftovers,
    write_table,
)
from tunesmith.labels import LabelMap, Task
from tunesmith.metrics.table import make_rows

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


STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")
"""First characters that make a spreadsheet treat a cell as a formula."""
CONTROLS = [chr(c) for c in (*range(1, 32), 0x7F, *range(0x80, 0xA0), 0x2028, 0x2029, 0xFEFF)]
PIECES = st.sampled_from([*CONTROLS, "\r\n", '"', '""', "'", ",", ";", "\t", " ", "  ", "a", "é", "😀", "NA", *STARTS])
CELLS = st.lists(PIECES, max_size=5).map("".join)


def read_by_every_reader(file: Path, cache: Path) -> dict[str, list[list[str]]]:
    """Return the columns from each reader; formula escapes are undone for readers that don't know them."""
    comma = "," if file.suffix == ".csv" else "\t"
    with file.open(encoding="utf-8", newline="") as lines:
        rows = list(csv.reader(lines, delimiter=comma, strict=True))[1:]
    frame = pd.read_csv(file, sep=comma, dtype=str, keep_default_na=False, encoding="utf-8")
    mine = read_source(file, name="t", reading=Reading(quoting="minimal")).dataset
    found: dict[str, Any] = {
        "csv": [list(column) for column in zip(*rows, strict=True)],
        "pandas": [frame[name].tolist() for name in frame.columns],
        "the data reader": [mine[name][:] for name in frame.columns],
    }
    found = {name: [[unescape_formula(cell) for cell in column] for column in table] for name, table in found.items()}
    return found | {"read_predictions": list(read_predictions(file).values())}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=4), st.sampled_from([".csv", ".tsv"]))
def test_every_cell_reads_back_equal_in_every_reader(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], suffix: str
) -> None:
    folder = tmp_path_factory.mktemp("tables")
    columns = {"first": [a for a, _ in rows], "second": [b for _, b in rows], "prob": [0.5] * len(rows)}
    write_table(folder / f"out{suffix}", columns)
    wanted = [columns["first"], columns["second"], ["0.5"] * len(rows)]
    for reader, found in read_by_every_reader(folder / f"out{suffix}", folder).items():
        assert found == wanted, reader


@pytest.mark.parametrize("cell", [*CONTROLS, *STARTS, "\r\n", '"', "a\rb", "", " a ", "\ufeffa", "x" * 200_000])
def test_single_column_table_reads_back_equal(tmp_path: Path, cell: str) -> None:
    for name in ("out.csv", "out.tsv"):
        write_table(tmp_path / name, {"only": [cell, "b", cell]})
        assert read_predictions(tmp_path / name) == {"only": [cell, "b", cell]}


def test_unrepresentable_cell_is_refused_by_name(tmp_path: Path) -> None:
    columns = {"text": ["a", "b\0c"], "n": [1, 2]}
    with pytest.raises(DataError, match=r"row 2: column 'text' contains a NUL character.*\.jsonl") as caught:
        write_table(tmp_path / "out.csv", columns)
    assert caught.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []
    check_cells(tmp_path / "out.jsonl", columns)


def test_table_is_not_written_through_link_or_into_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    out = tmp_path / "out.csv"
    out.symlink_to(tmp_path / "mine.txt")
    with pytest.raises(ResourceError, match="is a link"):
        write_table(out, {"a": [1]})
    out.unlink()
    out.mkdir()
    with pytest.raises(ResourceError, match="is a folder"):
        write_table(out, {"a": [1]})
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["mine.txt", out.name])


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_formula_escaping_is_safe_and_reversible(text: str) -> None:
    escaped = escape_formula(text)
    assert unescape_formula(escaped) == text
    assert not escaped.startswith(STARTS)


def test_jsonl_and_parquet_keep_values_as_they_are(tmp_path: Path) -> None:
    columns = {"text": HOSTILE, "prediction": ["a"] * len(HOSTILE), "score": [float(i) for i in range(len(HOSTILE))]}
    write_table(tmp_path / "o.jsonl", columns)
    rows = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [r["text"] for r in rows] == HOSTILE
    write_table(tmp_path / "o.parquet", columns)
    assert pq.read_table(tmp_path / "o.parquet").to_pydict() == columns


def test_unsupported_file_type_is_refused_before_writing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="xlsx"):
        write_table(tmp_path / "out.xlsx", {"a": [1]})
    assert list(tmp_path.iterdir()) == []


def test_probabilities_follow_the_task() -> None:
    logits = np.array([[2.0, -1.0, 700.0], [0.0, 0.0, -700.0]])
    softmax = probabilities_of(logits, Task.MULTICLASS)
    assert softmax.sum(axis=-1) == pytest.approx([1.0, 1.0])
    assert predicted_names(softmax, LabelMap.for_classes(["a", "b", "c"])) == ["c", "a"]
    sigmoid = probabilities_of(logits, Task.MULTILABEL)
    assert sigmoid[0] == pytest.approx([1 / (1 + np.exp(-2.0)), 1 / (1 + np.exp(1.0)), 1.0])
    assert predicted_names(sigmoid, LabelMap(("a", "b", "c"), Task.MULTILABEL)) == [["a", "c"], []]
    decided = make_rows(logits, np.ones_like(logits), task=Task.MULTILABEL).decisions
    assert decided.tolist() == [[1, 0, 1], [0, 0, 0]], "metrics and predictions agree on the threshold one half"
    assert predicted_names(probabilities_of(np.array([[1.5]]), Task.REGRESSION), LabelMap(("s",), Task.REGRESSION)) == [
        1.5
    ]


def test_folder_moved_aside_by_a_killed_process_is_restored(tmp_path: Path) -> None:
    (tmp_path / ".tmp-old-onnx-999999999").mkdir()
    remove_leftovers(tmp_path / "onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["onnx"]
