"""`tunesmith audit` and `plan`, and the audit at the start of `train`."""

from __future__ import annotations

import csv
import json
import random
import re
from pathlib import Path

import pytest

from tiny_model import save_tiny_bert, write_csv
from tunesmith.cli.main import main

COLD = ["snow", "ice", "frost", "winter", "blizzard", "glacier", "sledge", "hail"]
WARM = ["sun", "beach", "heat", "summer", "desert", "swim", "palm", "july"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return a training file with five wrong labels, a validation file with rows of it, and a model."""
    rng = random.Random(0)
    rows = []
    for _ in range(160):
        warm = rng.random() < 0.5
        text = " ".join(rng.choice(WARM if warm else COLD) for _ in range(6)) + f" {rng.randrange(10**6)}"
        rows.append({"text": text, "label": "warm" if warm else "cold"})
    held = [dict(row) for row in rows[:20]] + rows[120:]
    train = rows[:120]
    for row in train[100:105]:
        row["label"] = "cold" if row["label"] == "warm" else "warm"
    model = save_tiny_bert(tmp_path / "model")
    return write_csv(tmp_path / "train.csv", train), write_csv(tmp_path / "dev.csv", held), model


def test_audit_prints_findings_and_strict_data_exits_3(
    files: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, held, model = map(str, files)
    review = tmp_path / "review.csv"
    words = [
        "audit",
        held,
        train,
        "--model_name_or_path",
        model,
        "--cache_dir",
        str(tmp_path / "c"),
        "--labels",
        "words",
    ]
    assert main([*words, "--review_file", str(review)]) == 0
    out = capsys.readouterr().out
    assert "WARNING split_leak: 20 of 60 validation rows are in train: 20 equal" in out
    assert "suspicious_labels" in out
    found = {int(row["line"]) for row in csv.DictReader(review.read_text().splitlines())}
    assert len(found & set(range(102, 107))) >= 4
    assert main([*words, "--json", "--strict_data"]) == 3
    assert {"split_leak"} <= {f["code"] for f in json.loads(capsys.readouterr().out)["findings"]}
    assert main([*words, "--review_file", str(review)]) != 0, "user files are not overwritten"


def test_training_shows_data_warnings_and_reports_them(
    files: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, held, model = map(str, files)
    run = tmp_path / "run"
    words = ["train", "--train_file", train, "--validation_file", held, "--model_name_or_path", model]
    words += ["--cache_dir", str(tmp_path / "c"), "--output_dir", str(run), "--max_steps", "2", "--use_cpu"]
    assert main([*words, "--strict_data"]) == 3
    assert "split_leak" in capsys.readouterr().err
    assert not (run / "run.yaml").exists()
    review = tmp_path / "review.csv"
    audit = ["audit", train, "--model_name_or_path", model, "--cache_dir", str(tmp_path / "c"), "--labels", "words"]
    assert main([*audit, "--review_file", str(review)]) == 0
    rows = list(csv.DictReader(review.read_text().splitlines()))
    for row in rows:
        row["label"] = row["suggested_label"]
    write_csv(review, rows)
    assert main([*words, "--labels_file", str(review)]) == 0
    out, err = capsys.readouterr()
    assert f"{len(rows)} labels" in err
    assert err.index("Warning: 20 of 60 validation rows are in train") < err.index("Training:")
    assert out.index("validation scores") < out.index("before you trust these scores: ")
    assert (err.count("20 of 60"), out.count("20 of 60")) == (1, 0), "a warning is printed once"
    page = (run / "report.html").read_text()
    assert page.index("Split leak") < page.index('class="grid"')


def test_plan_measures_time_memory_and_disk(
    files: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, held, model = map(str, files)
    words = ["plan", "--train_file", train, "--model_name_or_path", model, "--cache_dir", str(tmp_path / "c")]
    assert main([*words, "--validation_file", held, "--json", "--use_cpu", "--num_train_epochs", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 30
    assert 10**8 < found["peak_bytes"] < 10**10
    assert found["disk_bytes"] > 10**5
    assert 0 < found["step_seconds"] < found["seconds"]
    assert main([*words, "--use_cpu", "--max_steps", "5", "--folds", "2", "--seeds", "2"]) == 0
    total, *parts = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"plan: .+ for 4 runs on cpu", total)
    assert parts[1].endswith("for 20 steps")
    assert main([*words, "--bf16", "--fp16", "--save_strategy", "no", "--load_best_model_at_end"]) == 2
    err = capsys.readouterr().err
    assert "fp16" in err
    assert "load_best_model_at_end" in err
