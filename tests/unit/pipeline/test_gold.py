"""Human labels for a machine-labeled file: agreement, correction, evaluation on gold labels only."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.pipeline.train import finetune

Rows = list[dict[str, Any]]
OPTIONS = ["--num_train_epochs", "1", "--disable_tqdm", "true", "--report_to", "none"]
WRONG = 0.4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("model"), num_hidden_layers=1)


def machine_labels(good: list[bool], wrong: float, wrong_good: float) -> list[str]:
    """Return labels of which these shares of the bad and of the good ones are wrong."""
    flipped = np.random.default_rng(0).random(len(good)) < np.where(good, wrong_good, wrong)
    return ["good" if one != flip else "bad" for one, flip in zip(good, flipped, strict=True)]


def make_files(folder: Path, *, wrong: float = WRONG, wrong_good: float = WRONG / 2, llm: bool = True) -> list[str]:
    """Write train.csv with machine labels and gold.csv; return the options that name them."""
    count, gold = 400, 120
    found = sentences(count + gold)
    texts, good = [text for text, _ in found], [one for _, one in found]
    labels = machine_labels(good, wrong, wrong_good)
    rows = [{"text": t, "label": m} for t, m in zip(texts, labels, strict=True)]
    human: Rows = [{"text": t, "label": "good" if one else "bad"} for t, one in found[count:]]
    if llm:
        human = [{**row, "llm_label": m} for row, m in zip(human, labels[count:], strict=True)]
    train, named = write_csv(folder / "train.csv", rows[:count]), write_csv(folder / "gold.csv", human)
    return ["--train_file", str(train), "--gold_file", str(named)]


def run(files: list[str], model: Path, *more: str) -> int:
    output = str(Path(files[1]).parent / "run")
    return main(["train", *files, "--model_name_or_path", str(model), "--output_dir", output, *OPTIONS, *more])


def summary_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "run" / "data_summary.json").read_text()))


def test_machine_labels_are_measured_and_corrected(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = make_files(tmp_path)
    assert run(files, model) == 0
    said, gold = capsys.readouterr().err, summary_of(tmp_path)["gold"]
    assert "Gold: 120 labels" in said
    assert "60 as validation examples and 60 as test examples" in said
    with open(tmp_path / "gold.csv", newline="") as lines:
        cells = list(csv.DictReader(lines))
    right = sum(row["label"] == row["llm_label"] for row in cells) / len(cells)
    assert gold["agreement"]["right"] == pytest.approx(right)
    assert gold["agreement"]["low"] < right < gold["agreement"]["high"]
    assert sum(part["n"] for part in gold["agreement"]["by_label"].values()) == 120
    assert f"Machine labels are right for {right:.0%}" in said
    assert gold["corrected"]
    assert "of 400 machine labels are corrected" in said
    assert gold["confusion"] == pytest.approx(np.array([[0.8, 0.2], [0.4, 0.6]]), abs=0.15)
    scores = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert {split: scores[split]["accuracy"]["n"] for split in ("validation", "test")} == {"validation": 60, "test": 60}


def test_corrected_labels_reach_the_training_examples(model: Path, tmp_path: Path) -> None:
    files = make_files(tmp_path, wrong_good=0.0)
    with open(tmp_path / "train.csv", newline="") as lines:
        given = [row["label"] for row in csv.DictReader(lines)].count("good")
    assert run(files, model) == 0
    counts = summary_of(tmp_path)["label_counts"]["train"]
    assert 200 < counts["good"] < given - 20, "half of the sentences are good"


def test_agreement_is_estimated_without_machine_labels(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(make_files(tmp_path, llm=False), model) == 0
    found = summary_of(tmp_path)["gold"]["agreement"]
    assert found["right"] == pytest.approx(1 - 0.75 * WRONG, abs=0.08)
    assert found["low"] < found["right"] < found["high"]
    assert found["n"] == 400
    assert "are right for an estimated" in capsys.readouterr().err


def test_right_machine_labels_are_kept(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make_files(tmp_path, wrong=0.0, wrong_good=0.0), model) == 0
    assert not summary_of(tmp_path)["gold"]["corrected"]
    assert "are kept" in capsys.readouterr().err
    assert summary_of(tmp_path)["label_counts"]["train"] == {"bad": 200, "good": 200}


def test_test_file_leaves_all_gold_examples_for_validation(model: Path, tmp_path: Path) -> None:
    files = make_files(tmp_path)
    rows = [{"text": f"it is {text}", "label": "good" if good else "bad"} for text, good in sentences(30, seed=9)]
    result = finetune(
        train_file=files[1],
        gold_file=files[3],
        test_file=str(write_csv(tmp_path / "test.csv", rows)),
        model_name_or_path=str(model),
        output_dir=str(tmp_path / "run"),
        num_train_epochs=1,
    )
    assert result.scores["validation"]["accuracy"].n == 120
    assert result.scores["test"]["accuracy"].n == 30


def rewrite(file: Path, change: Any) -> None:
    with open(file, newline="") as lines:
        rows = list(csv.DictReader(lines))
    change(rows)
    write_csv(file, rows)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[4].update(label="great"), ("gold.csv:6:label", "'great' is not one of")),
        (lambda rows: rows[4].update(llm_label="goood"), ("gold.csv:6:llm_label", "Did you mean 'good'?")),
        (lambda rows: rows[4].update(llm_label=""), ("gold.csv:6:llm_label", "is not one of")),
        (lambda rows: rows[4].update(label=""), ("gold.csv:6:label", "missing")),
        (lambda rows: rows.__delitem__(slice(10, None)), ("gold.csv", "10 gold examples are too few")),
    ],
)
def test_invalid_gold_file_is_refused_with_row_and_column(
    change: Any, words: tuple[str, ...], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = make_files(tmp_path)
    rewrite(tmp_path / "gold.csv", change)
    assert run(files, model) == 3
    said = capsys.readouterr().err
    assert all(word in said for word in words), said
    assert not (tmp_path / "run").exists()


def test_training_examples_in_the_gold_file_are_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = make_files(tmp_path)
    with open(tmp_path / "train.csv", newline="") as lines:
        text = list(csv.DictReader(lines))[7]["text"]
    rewrite(tmp_path / "gold.csv", lambda rows: rows[2].update(text=f" {text.upper()}  "))
    assert run(files, model) == 3
    said = capsys.readouterr().err
    assert "gold.csv:4:text: 1 of 120 gold examples are also training examples" in said
    assert "train.csv:9" in said


@pytest.mark.parametrize("more", [("--folds", "3"), ("--recipe", "best", "--time_budget", "1m")])
def test_options_that_need_other_labels_are_refused(more: tuple[str, ...], model: Path, tmp_path: Path) -> None:
    assert run(make_files(tmp_path), model, *more) == 2


def test_changed_machine_labels_of_gold_are_a_different_run(model: Path, tmp_path: Path) -> None:
    files = make_files(tmp_path)

    def fingerprint() -> str:
        from tunesmith.config.load import load_config
        from tunesmith.pipeline.inputs import read_run_data

        options = {"train_file": files[1], "gold_file": files[3], "model_name_or_path": str(model)}
        return read_run_data(load_config(None, options), {}, lambda what, done, total: None).bundle.fingerprint

    first = fingerprint()
    rewrite(tmp_path / "gold.csv", lambda rows: [row.update(llm_label="good") for row in rows])
    assert fingerprint() != first
