"""Every kind of task, from rows to a model folder that other tools load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_model import sentences, write_csv
from tunesmith.config.load import load_config
from tunesmith.inference.predictor import Predictor
from tunesmith.pipeline.identity import is_finished


def mood(count: int = 60) -> list[dict[str, Any]]:
    return [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(count)]


def three(count: int = 60) -> list[dict[str, Any]]:
    names = ("bad", "good", "mixed")
    return [{"sentence": text, "label": names[i % 3]} for i, (text, _) in enumerate(sentences(count))]


def pairs(count: int = 60) -> list[dict[str, Any]]:
    found = sentences(2 * count)
    return [
        {"sentence1": first, "sentence2": second, "label": int(good)}
        for (first, good), (second, _) in zip(found[:count], found[count:], strict=True)
    ]


def tags(count: int = 60) -> list[dict[str, Any]]:
    return [
        {"text": text, "labels": [name for name, on in (("kind", good), ("short", len(text) < 25)) if on]}
        for text, good in sentences(count)
    ]


def scores(count: int = 60) -> list[dict[str, Any]]:
    return [{"text": text, "score": len(text) / 10} for text, _ in sentences(count)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


CASES = {
    "binary": (mood, "binary", ("bad", "good"), ("text",)),
    "multiclass": (three, "multiclass", ("bad", "good", "mixed"), ("sentence",)),
    "pair": (pairs, "binary", ("0", "1"), ("sentence1", "sentence2")),
    "multilabel": (tags, "multilabel", ("kind", "short"), ("text",)),
    "regression": (scores, "regression", ("score",), ("text",)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_becomes_a_run_folder_whose_model_other_tools_load(case: str, train: Any, tmp_path: Path) -> None:
    make, task, names, text = CASES[case]
    rows = make()
    file = write_jsonl(tmp_path / "data.jsonl", rows)
    result, said = train(train_file=file, load_best_model_at_end=True)
    run = result.run
    for path in (run.config_file, run.environment_file, run.journal_file, run.model, run.predictions_file):
        assert path.exists(), path
    for path in (run.metrics_file, run.report_file, run.card_file, run.curves_png, run.data_summary_file):
        assert path.stat().st_size > 0, path
    assert run.checkpoints() == []
    assert not run.best.exists(), "a finished run needs only its model"
    assert is_finished(run)
    summary = json.loads(run.data_summary_file.read_text())
    assert (summary["task"], tuple(summary["labels"]), tuple(summary["columns"]["text"])) == (task, names, text)
    assert any(note.startswith("No validation data: ") for note in said)
    assert all(score.n > 0 for score in result.scores["validation"].values())
    assert load_config(run.config_file).train_file == str(file)

    config = json.loads((run.model / "config.json").read_text())
    assert tuple(config["id2label"].values()) == names
    agree_with_transformers(run.model, rows[:8], text, task)


def agree_with_transformers(folder: Path, rows: list[dict[str, Any]], text: tuple[str, ...], task: str) -> None:
    """`from_pretrained` and `pipeline` give the probabilities that `tunesmith predict` gives."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

    columns = [[row[name] for row in rows] for name in text]
    predictor = Predictor.load(folder, use_cpu=True)
    ours = predictor.probabilities(columns[0], columns[1] if len(columns) == 2 else None)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        logits = model(**tokenizer(*columns, padding=True, truncation=True, return_tensors="pt")).logits
    theirs = {"regression": logits, "multilabel": logits.sigmoid()}.get(task, logits.softmax(-1)).numpy()
    assert np.abs(theirs - ours).max() < 1e-5
    classify = pipeline("text-classification", model=str(folder), device="cpu")
    inputs = [dict(zip(("text", "text_pair"), texts, strict=False)) for texts in zip(*columns, strict=True)]
    piped = [classify(one, top_k=None) for one in inputs]
    for row, found in zip(ours, piped, strict=True):
        by_name = {entry["label"]: entry["score"] for entry in found}
        assert [by_name[name] for name in predictor.facts.labels.names] == pytest.approx(row.tolist(), abs=1e-5)


def test_unlabelled_test_rows_are_predicted_and_not_scored(train: Any, tmp_path: Path) -> None:
    rows = pairs()
    test = [{**row, "label": -1} for row in rows[:5]]
    result, said = train(
        train_file=write_csv(tmp_path / "t.csv", rows), test_file=write_csv(tmp_path / "test.csv", test)
    )
    assert set(result.scores) == {"validation"}
    assert "5 of 5 test rows are unlabeled (-1)." in said
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(result.run.predictions_file).to_pylist()
    predicted = [row for row in table if row["split"] == "test"]
    assert [row["sentence1"] for row in predicted] == [row["sentence1"] for row in test]
    assert [row["label"] for row in predicted] == [None] * 5
    assert {row["prediction"] for row in predicted} <= {"0", "1"}


def test_the_scores_of_the_run_are_those_of_its_exported_model(train: Any, tmp_path: Path) -> None:
    rows = mood(80)
    test = write_csv(tmp_path / "test.csv", rows[60:])
    result, _ = train(train_data=rows[:60], test_data=rows[60:], max_steps=30)
    predictor = Predictor.load(result.run.path, use_cpu=True)
    probabilities = predictor.probabilities([row["text"] for row in rows[60:]])
    right = [predictor.facts.labels.names[i] for i in probabilities.argmax(-1)]
    accuracy = np.mean([a == row["label"] for a, row in zip(right, rows[60:], strict=True)])
    assert result.scores["test"]["accuracy"].value == pytest.approx(accuracy)
    stored = json.loads(result.run.metrics_file.read_text())
    assert stored["test"]["accuracy"]["value"] == pytest.approx(accuracy)
    assert stored["test"]["accuracy"]["n"] == 20
    assert test.is_file()
