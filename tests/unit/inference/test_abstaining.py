"""`--max_error` from training to predict, Predictor, bulk prediction and serve."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from starlette.testclient import TestClient

from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith import Predictor
from tunesmith.cli.main import main
from tunesmith.errors import ConfigError
from tunesmith.inference.server import Access, make_app
from tunesmith.inference.service import PredictionService


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a trained run with 300 validation examples, some with wrong labels, and files to predict."""
    folder = tmp_path_factory.mktemp("abstain")
    rows = [{"text": text, "label": "ab"[good]} for text, good in sentences(700)]
    rng = np.random.default_rng(0)
    noisy = [{**row, "label": "ab"[rng.random() < 0.5]} if rng.random() < 0.1 else row for row in rows[400:]]
    train, validation = write_csv(folder / "train.csv", rows[:400]), write_csv(folder / "validation.csv", noisy)
    words = ["train", "--train_file", str(train), "--validation_file", str(validation), "--learning_rate", "1e-3"]
    words += ["--model_name_or_path", str(save_tiny_bert(folder / "bert")), "--output_dir", str(folder / "run")]
    assert main([*words, "--num_train_epochs", "3", "--use_cpu", "true"]) == 0
    return folder


def answered(file: Path) -> pd.Series:
    return pd.read_csv(file)["answered"]


def test_predict_adds_the_column_answered(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = home / "out.csv"
    words = ["predict", str(home / "run"), "--input", str(home / "validation.csv"), "--output", str(out)]
    assert main([*words, "--max_error", "0.12"]) == 0
    said = capsys.readouterr().err
    assert "at most 12.00% with 95% confidence" in said
    table = pd.read_csv(out)
    right = table["prediction"] == table["label"]
    assert table["answered"].sum() > 0
    assert (~right[table["answered"]]).mean() <= 0.12
    assert main([*words]) == 0
    assert "answered" not in pd.read_csv(out)


def test_impossible_limit_fails_with_the_reason(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", str(home / "run"), "--input", str(home / "validation.csv"), "--output", str(home / "no.csv")]
    assert main([*words, "--max_error", "0.001"]) == 3
    assert "at least 2,995 held-out examples are needed, and there are 300" in capsys.readouterr().err
    assert not (home / "no.csv").exists()


def test_calibration_file_replaces_the_validation_examples(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", str(home / "run"), "--input", str(home / "validation.csv"), "--output", str(home / "own.csv")]
    assert main([*words, "--max_error", "0.1", "--calibration_file", str(home / "train.csv")]) == 0
    assert "of 400 held-out examples" in capsys.readouterr().err


def test_predictor_returns_none_for_unsure_texts(home: Path) -> None:
    plain = Predictor.load(home / "run", use_cpu=True)
    careful = plain.abstaining(0.12)
    texts = pd.read_csv(home / "validation.csv")["text"].tolist()
    sure = careful.predict(texts)
    assert {name for name in sure if name is not None} <= {"a", "b"}
    assert [b for a, b in zip(sure, plain.predict(texts), strict=True) if a is not None and a != b] == []
    with pytest.raises(ConfigError, match="between 0 and 1"):
        plain.abstaining(2)


def test_bulk_job_without_the_limit_is_a_different_job(home: Path) -> None:
    parts = home / "parts"
    words = ["predict", str(home / "run"), "--input", str(home / "valid*.csv"), "--output", f"{parts}/"]
    assert main([*words, "--max_error", "0.12"]) == 0
    assert len(answered(next(parts.glob("*.csv")))) == 300
    assert main(words) == 5


def test_exported_model_and_server_match_the_run(home: Path) -> None:
    exported = home / "onnx"
    assert main(["export", str(home / "run"), "--to", "onnx", "--output", str(exported)]) == 0
    texts = pd.read_csv(home / "validation.csv")["text"].tolist()[:40]
    careful = Predictor.load(home / "run", use_cpu=True).abstaining(0.12)
    assert Predictor.load(exported).abstaining(0.12).predict(texts) == careful.predict(texts)
    for per_class in (False, True):
        careful = Predictor.load(home / "run", use_cpu=True).abstaining(0.12, per_class=per_class)
        service = PredictionService(home / "run", max_error=0.12, per_class=per_class)
        app = make_app(service, Access.for_port("k" * 32, 80))
        with TestClient(app, base_url="http://localhost:80") as client:
            headers = {"Authorization": "Bearer " + "k" * 32}
            found = client.post("/predict", json={"texts": texts}, headers=headers).json()["results"]
        assert [one["label"] if one["answered"] else None for one in found] == careful.predict(texts)


def test_report_shows_the_coverage_curve(home: Path) -> None:
    page = (home / "run" / "report.html").read_text(encoding="utf-8")
    assert "Error rate by coverage: the most confident half" in page
    assert json.loads((home / "run" / "model" / "tunesmith.json").read_text())["held_out"]["correct"]
