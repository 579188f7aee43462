"""`Predictor` in a notebook: accepted inputs, results, and refused inputs."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tiny_model import save_tiny_bert, write_csv
from tunesmith.cli.main import main
from tunesmith.errors import DataError
from tunesmith.inference.model_folder import ModelFacts
from tunesmith.inference.predictor import Predictor
from tunesmith.labels import LabelMap, Task

TEXTS = ["the film was good", "a dull book", "one day"]
PAIRS = ["a bright film", "the awful book", "quite a meal"]


def make_folder(home: Path, columns: tuple[str, ...] | None, labels: LabelMap) -> Path:
    folder = save_tiny_bert(home, labels=labels.names, problem_type=labels.task.problem_type)
    if columns is not None:
        ModelFacts(labels, columns, "label", 32).write(folder)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return model folders for single texts, pairs and regression."""
    folder = tmp_path_factory.mktemp("models")
    three = LabelMap.for_classes(["bad", "fair", "good"])
    make_folder(folder / "one", ("text",), three)
    make_folder(folder / "two", ("left", "right"), three)
    make_folder(folder / "number", ("text",), LabelMap(("stars",), Task.REGRESSION))
    return folder


@pytest.fixture(scope="module")
def one(home: Path) -> Predictor:
    return Predictor.load(home / "one", use_cpu=True)


@pytest.fixture(scope="module")
def two(home: Path) -> Predictor:
    return Predictor.load(home / "two", use_cpu=True)


@pytest.mark.parametrize(
    "form",
    [tuple, pd.Series, np.array, iter, lambda t: pd.DataFrame({"text": t, "id": [1, 2, 3]}), lambda t: {"text": t}],
)
def test_predictor_accepts_series_arrays_and_tables(one: Predictor, form: Any) -> None:
    assert one.predict(form(TEXTS)) == one.predict(TEXTS)
    assert set(one.predict(TEXTS)) <= {"bad", "fair", "good"}
    assert one.predict([]) == []


def test_predict_proba_keeps_label_names_and_index(one: Predictor) -> None:
    table = one.predict_proba(pd.Series(TEXTS, index=[7, 8, 9]))
    assert list(table.columns) == ["bad", "fair", "good"]
    assert list(table.index) == [7, 8, 9]
    assert table.to_numpy().sum(axis=1) == pytest.approx([1, 1, 1])
    assert list(table.idxmax(axis=1)) == one.predict(TEXTS)


@pytest.mark.parametrize(
    "form",
    [
        lambda: (list(zip(TEXTS, PAIRS, strict=True)), None),
        lambda: (np.array([TEXTS, PAIRS]).T, None),
        lambda: (pd.DataFrame({"right": PAIRS, "left": TEXTS}), None),
        lambda: ([{"text": a, "text_pair": b} for a, b in zip(TEXTS, PAIRS, strict=True)], None),
    ],
)
def test_predictor_accepts_pairs_as_one_argument(two: Predictor, form: Any) -> None:
    assert np.allclose(two.probabilities(*form()), two.probabilities(TEXTS, PAIRS))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("a", "b")], r"expects one text \(text\), got a pair"),
        ({"text": "a", "text_pair": "b"}, "got a pair"),
        (3, r"not an int \(3\)"),
        (b"abc", r"not a bytes"),
        (None, "not None"),
        ({"a", "b"}, "not a set"),
        (["a", 2.5], r"row 2: 2\.5 is not text"),
        (pd.Series(["a", None]), "row 2: .* is not text"),
        (pd.DataFrame({"x": ["a"], "y": ["b"], "z": ["c"]}), "no column 'text', only x, y, z"),
    ],
)
def test_unreadable_input_of_single_text_model_is_named(one: Predictor, given: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        one.predict(given)


def test_two_strings_are_not_treated_as_a_pair(two: Predictor) -> None:
    with pytest.raises(DataError, match="expects text pairs"):
        two.predict(["first", "second"])
    with pytest.raises(DataError, match="2 texts but 1 pairs"):
        two.predict(["a", "b"], ["c"])


def test_several_texts_print_their_top_labels(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(home / "one"), "--text", *TEXTS, "--top_k", "2", "--use_cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert [line.split(": ")[0] for line in lines[::3]] == TEXTS
    scores = [float(line.split()[1]) for line in lines if line.startswith("  ")]
    assert all(a >= b for a, b in zip(scores[::2], scores[1::2], strict=True))
    assert main(["predict", str(home / "two"), "--text", "a", "--text_pair", "b", "--use_cpu"]) == 0
    assert main(["predict", str(home / "two"), "--text", "a", "b", "c", "--use_cpu"]) == 2
    assert main(["predict", str(home / "number"), "--text", "a", "--use_cpu"]) == 0
    assert float(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("form", ["csv", "jsonl"])
def test_predict_reads_stdin_and_writes_stdout(
    form: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [{"note": str(i), "body": text} for i, text in enumerate(TEXTS)]
    if form == "csv":
        data = write_csv(tmp_path / "x.csv", rows).read_bytes()
    else:
        data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    flags = ["--input", "-", "--output", "-", "--text_column_names", "body", "--top_k", "1", "--use_cpu"]
    assert main(["predict", str(home / "one"), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "note,body,prediction,label_1,prob_1"
    assert [line.split(",")[1] for line in lines[1:]] == TEXTS
    assert all(line.split(",")[2] == line.split(",")[3] for line in lines[1:])
