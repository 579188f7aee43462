"""Three or more columns are one text with the name of each column: in training, prediction, serving and export."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset
from starlette.testclient import TestClient
from transformers import pipeline

from data_loading import load_data
from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith import Predictor, finetune
from tunesmith.cli.main import main
from tunesmith.data.audit import audit_rows
from tunesmith.data.rows import Columns, render_rows
from tunesmith.data.tokenize import tokenize
from tunesmith.errors import ConfigError, DataError
from tunesmith.inference.server import Access, make_app
from tunesmith.inference.service import PredictionService
from tunesmith.labels import Task
from tunesmith.models.files import load_tokenizer
from tunesmith.sklearn import TextClassifier

NAMES = ("one", "day", "x")
TOKEN = "t" * 43


def rows_of(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows whose third column contains the mood; some cells are missing."""
    rng = np.random.default_rng(seed)
    return [
        {
            "one": "" if i % 7 == 0 else "the film was a film",
            "day": int(rng.integers(10)),
            "x": text,
            "label": "good" if good else "bad",
        }
        for i, (text, good) in enumerate(sentences(count, seed))
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trained run, its ONNX export and new rows."""
    folder = tmp_path_factory.mktemp("columns")
    file = write_csv(folder / "train.csv", rows_of(200))
    words = ["train", "--train_file", str(file), "--text_column_names", *NAMES, "--output_dir", str(folder / "run")]
    words += ["--model_name_or_path", str(save_tiny_bert(folder / "tiny")), "--learning_rate", "3e-3"]
    assert main([*words, "--num_train_epochs", "6", "--use_cpu", "--recipe", "hf"]) == 0
    assert main(["export", str(folder / "run"), "--to", "onnx"]) == 0
    write_csv(folder / "new.csv", rows_of(30, 5))
    return folder


def read_probabilities(file: Path) -> list[float]:
    with file.open(newline="") as lines:
        return [float(row["prob_good"]) for row in csv.DictReader(lines)]


def test_every_entry_point_returns_the_same_predictions(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(30, 5)
    predictor = Predictor.load(home / "run", use_cpu=True)
    expected = predictor.probabilities(rows)[:, 1]
    assert (np.array(predictor.predict(rows)) == [row["label"] for row in rows]).mean() > 0.9
    frame = pd.DataFrame(rows).replace({"one": {"": None}})
    assert predictor.probabilities(frame)[:, 1] == pytest.approx(expected, abs=1e-6)
    nulls = [{**row, "one": row["one"] or None, "unused": 1} for row in rows]
    assert predictor.probabilities(nulls)[:, 1] == pytest.approx(expected, abs=1e-6)
    assert Predictor.load(home / "run" / "export" / "onnx").probabilities(rows)[:, 1] == pytest.approx(
        expected, abs=1e-4
    )
    (home / "new.jsonl").write_text("".join(json.dumps(row) + "\n" for row in nulls))
    pd.DataFrame(nulls).to_parquet(home / "new.parquet")
    for source in ("new.csv", "new.jsonl", "new.parquet"):
        out = home / f"out-{source}.csv"
        words = ["--input", str(home / source), "--output", str(out), "--use_cpu"]
        assert main(["predict", str(home / "run"), *words]) == 0
        assert read_probabilities(out) == pytest.approx(expected, abs=1e-5)
        assert main(["predict", str(home / "run" / "export" / "onnx"), *words]) == 0
        assert read_probabilities(out) == pytest.approx(expected, abs=1e-4)
    with (home / "out-new.csv.csv").open() as lines:
        assert lines.readline().strip() == "one,day,x,label,prediction,prob_bad,prob_good"
    many = ["--input", str(home / "new.c*"), "--output", f"{home / 'many'}/", "--use_cpu"]
    assert main(["predict", str(home / "run"), *many]) == 0
    assert read_probabilities(home / "many" / "new-00000.csv") == pytest.approx(expected, abs=1e-5)
    capsys.readouterr()
    assert main(["evaluate", str(home / "run"), "--test_file", str(home / "new.csv"), "--use_cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"]["value"] > 0.9


def test_model_folder_works_in_a_transformers_pipeline(home: Path) -> None:
    row = rows_of(3, 5)[2]
    (text,) = render_rows(NAMES, [[row[name]] for name in NAMES])
    assert text == f"one: the film was a film\nday: {row['day']}\nx: {row['x']}"
    found = pipeline("text-classification", str(home / "run" / "model"), device="cpu")(text)[0]
    predictor = Predictor.load(home / "run", use_cpu=True)
    assert found["score"] == pytest.approx(predictor.probabilities([row]).max(), abs=1e-5)
    assert predictor.probabilities(text) == pytest.approx(predictor.probabilities([row]))
    stored = json.loads((home / "run" / "model" / "tunesmith.json").read_text())
    assert stored["text_columns"] == list(NAMES)
    assert 'classify({"text": "one: ...\\nday: ...\\nx: ..."})' in (home / "run" / "model" / "README.md").read_text()


def test_service_accepts_objects_and_names_a_missing_column(home: Path) -> None:
    app = make_app(PredictionService(home / "run"), Access.for_port(TOKEN, 80))
    rows, headers = rows_of(4, 5), {"Authorization": f"Bearer {TOKEN}"}
    expected = Predictor.load(home / "run", use_cpu=True).predict(rows)
    with TestClient(app, base_url="http://localhost:80", headers=headers) as client:
        reply = client.post("/predict", json={"texts": rows})
        assert [one["label"] for one in reply.json()["results"]] == expected
        assert client.post("/predict", json={"text": rows[0]}).json()["results"][0]["label"] == expected[0]
        del rows[1]["day"]
        reply = client.post("/predict", json={"texts": rows})
        assert (reply.status_code, "row 2 has no 'day'" in reply.text) == (422, True)
        reply = client.post("/predict", json={"texts": ["a plain text"]})
        assert (reply.status_code, "the model reads the columns one, day, x" in reply.text) == (422, True)


def test_estimator_and_finetune_read_named_columns(home: Path, tmp_path: Path) -> None:
    frame = pd.DataFrame(rows_of(60))
    options = {"model_name_or_path": str(home / "tiny"), "max_steps": 2, "options": {"use_cpu": True}}
    model = TextClassifier(**options).fit(frame[[*NAMES]], frame["label"])
    assert model.predict(frame[[*NAMES]]).shape == (60,)
    more = {"model_name_or_path": home / "tiny", "max_steps": 2, "use_cpu": True, "cache_dir": tmp_path}
    run = finetune(frame, text_column_names=[*NAMES], output_dir=tmp_path / "run", **more)
    assert run.predictor.facts.text_columns == NAMES
    assert run.predict(frame) == run.predictor.predict(frame)
    assert run.evaluate(frame)["accuracy"].n == 60


def test_longest_column_is_truncated_first(home: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(home / "tiny")
    columns = Columns(("a,b,c",), "label", Task.BINARY, rendered=("a", "b", "c"))
    (text,) = render_rows(("a", "book", "x"), [["film " * 20], ["song " * 50], [None]])
    (short,) = render_rows(("a", "book", "x"), [["film " * 20], ["day"], ["good"]])
    data = Dataset.from_dict({"a,b,c": [text, short]})
    found = tokenize(data, tokenizer, columns, max_length=20, cache_dir=tmp_path)
    one, two = (tokenizer.convert_ids_to_tokens(row) for row in found.rows.take(np.arange(2))["input_ids"])
    assert [one.count(word) for word in ("film", "song")] == [7, 7]
    assert (one[1], one[one.index("book")], len(one)) == ("a", "book", 20)
    assert two[-2] == "good"
    assert found.truncated.rows_cut == 2


@pytest.mark.parametrize(
    ("names", "change", "problem"),
    [
        (
            "one,x,copy",
            {"copy": lambda row: row["label"].upper()},
            "train.csv:2:copy: column 'copy' duplicates the label in all 40 rows",
        ),
        (
            "x,copy",
            {"copy": lambda row: "NY"[row["label"] == "good"]},
            "train.csv:2:copy: column 'copy' duplicates the label in all 40 rows",
        ),
        ("one,x,copy", {"x": lambda row: "", "one": lambda row: "", "copy": lambda row: ""}, "the text is empty"),
    ],
)
def test_useless_training_columns_are_refused(
    names: str, change: Any, problem: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{**row, **{name: make(row) for name, make in change.items()}} for row in rows_of(40)]
    file = write_csv(tmp_path / "train.csv", rows)
    words = ["train", "--train_file", str(file), "--model_name_or_path", str(home / "tiny"), "--use_cpu"]
    words += ["--text_column_names", names, "--output_dir", str(tmp_path / "run")]
    assert main(words) == 3
    assert problem in capsys.readouterr().err


def test_missing_column_at_prediction_is_named(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{name: row[name] for name in ("one", "x")} for row in rows_of(5)]
    file = write_csv(tmp_path / "new.csv", rows)
    for model in ("run", "run/export/onnx"):
        assert main(["predict", str(home / model), "--input", str(file), "--use_cpu"]) == 3
        assert "no column 'day'" in capsys.readouterr().err
    predictor = Predictor.load(home / "run", use_cpu=True)
    with pytest.raises(DataError, match="row 1 has no 'day'"):
        predictor.predict(rows)
    with pytest.raises(DataError, match="the table has no column 'day'"):
        predictor.predict(pd.DataFrame(rows))
    with pytest.raises(DataError, match=r"row 1 is a str .* reads the columns one, day, x"):
        predictor.predict(["a plain text"])
    with pytest.raises(DataError, match="pairs were passed, and the model reads the columns"):
        predictor.predict(rows, ["a"] * len(rows))
    with pytest.raises(DataError, match="row 1: column 'x' contains list, expected text"):
        predictor.predict([{"one": "a", "day": 1, "x": ["a"]}])
    assert main(["predict", str(home / "run"), "--text", "a plain text"]) == 2
    assert main(["predict", str(home / "run"), "--input", str(file), "--text_column_names", "one", "x"]) == 2


def test_cells_are_written_by_one_rule() -> None:
    cells = [3.0, 2.5, True, float("nan"), None, pd.NaT, pd.Timestamp("2024-05-01"), " a\n b ", "007", np.int64(4)]
    texts = render_rows(["n"], [cells])
    assert texts == ["n: 3", "n: 2.5", "n: true", "", "", "", "n: 2024-05-01T00:00:00", "n: a b", "n: 007", "n: 4"]


def test_decimal_numbers_keep_three_significant_digits() -> None:
    cells = [30.685861, "-105.017928", 12345.67, -0.00012345, "1.10", 0.5, "0.0000", 123456, "1.2.3", "v 1.2345", 1e-5]
    cells += [99.96, 30.0001, 10120.4, np.float32(0.1), "3.0"]
    (text,) = render_rows([str(n) for n in range(len(cells))], [[cell] for cell in cells])
    found = [line.partition(": ")[2] for line in text.split("\n")]
    kept = ["1.10", "0.5", "0.0000", "123456", "1.2.3", "v 1.2345", "1e-05"]
    assert found == ["30.7", "-105", "12346", "-0.000123", *kept, "100", "30", "10120", "0.1", "3.0"]


def test_numbers_are_rounded_in_every_entry_point(home: Path, tmp_path: Path) -> None:
    rows = [{"one": "a film", "day": 30.685861, "x": "good"}]
    rounded = "one: a film\nday: 30.7\nx: good"
    for folder in (home / "run", home / "run" / "export" / "onnx"):
        predictor = Predictor.load(folder, use_cpu=True)
        assert predictor.probabilities(rows) == pytest.approx(predictor.probabilities(rounded), abs=1e-6)
    out = tmp_path / "out.csv"
    words = ["--input", str(write_csv(tmp_path / "new.csv", rows)), "--output", str(out), "--use_cpu"]
    assert main(["predict", str(home / "run"), *words]) == 0
    expected = Predictor.load(home / "run", use_cpu=True).probabilities(rounded)[:, 1]
    assert read_probabilities(out) == pytest.approx(expected, abs=1e-5)
    bundle = load_data(train_data=[{**rows[0], "label": name} for name in "ab" * 5], text_column_names=NAMES)
    assert bundle.parts["train"].source.dataset[0][",".join(NAMES)] == rounded


def test_repeated_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'a' is named twice"):
        finetune(train_data=rows_of(20), text_column_names="a,x,a", output_dir=tmp_path / "run")


def test_next_examples_have_all_columns(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", str(home / "run"), "--unlabeled", str(home / "new.csv"), "--next", "3", "--json"]
    assert main(words) == 0
    for one in json.loads(capsys.readouterr().out)["examples"]:
        assert list(one["columns"]) == [*NAMES, "label"]


def test_column_names_do_not_make_rows_near_duplicates(tmp_path: Path) -> None:
    words = [f"{a}{b}" for a in "bdfgk" for b in ("ale", "orm", "ust", "eck", "ight")]
    rng = np.random.default_rng(0)
    rows = [
        {**{f"a long name of column {n}": rng.choice(words) for n in range(3)}, "label": "ab"[i % 2]} for i in range(80)
    ]
    bundle = load_data(train_data=rows, text_column_names=list(rows[0])[:3], label_column_name="label")
    found = audit_rows(bundle.parts, bundle.columns, bundle.labels)
    assert not {"near_duplicate_rows", "split_leak"} & {finding.code for finding in found}


def test_audit_suggests_the_unused_column_that_helps(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = [{**row, "copy": f"a {row['label']} one"} for row in rows_of(200)]
    words = ["audit", str(write_csv(tmp_path / "train.csv", copies)), "--text_column_names", "one", "--labels", "off"]
    words += ["--model_name_or_path", str(home / "tiny"), "--label_column_name", "label", "--json"]
    assert main(words) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    (found,) = [finding for finding in findings if finding["code"] == "unused_column"]
    assert found["numbers"]["column"] == "x"
    assert 0 < found["numbers"]["low"] < found["numbers"]["difference"] < found["numbers"]["high"]
    assert (
        "in 5-fold cross-validation on 200 train rows (2 columns tried). Your model was not measured."
        in found["evidence"]
    )
    assert found["advice"] == ["Try --text_column_names one,x."]
