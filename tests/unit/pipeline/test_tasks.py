"""Every task and data source, from rows to a model folder that other tools load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tiny_model import mood, save_tiny_bert, sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.config.load import load_config
from tunesmith.errors import ConfigError
from tunesmith.inference.predictor import Predictor
from tunesmith.runs.folder import end_of


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
def test_file_trains_a_model_that_transformers_loads(case: str, train: Any, tmp_path: Path) -> None:
    make, task, names, text = CASES[case]
    rows = make()
    file = write_jsonl(tmp_path / "data.jsonl", rows)
    result, said = train(train_file=file, load_best_model_at_end=True)
    run = result.run
    for path in (run.config_file, run.environment_file, run.journal_file, run.model, run.predictions_file):
        assert path.exists(), path
    for path in (run.metrics_file, run.report_file, run.card_file, run.curves_png, run.data_summary_file):
        assert path.stat().st_size > 0, path
    assert run.checkpoints() == [], "a finished run needs only its model"
    assert end_of(run) is not None
    summary = json.loads(run.data_summary_file.read_text())
    assert (summary["task"], tuple(summary["labels"]), tuple(summary["columns"]["text"])) == (task, names, text)
    assert any(note.startswith("No validation data: ") for note in said)
    assert all(score.n > 0 for score in result.scores["validation"].values())
    assert load_config(run.config_file).train_file == str(file)

    config = json.loads((run.model / "config.json").read_text())
    assert tuple(config["id2label"].values()) == names
    agree_with_transformers(run.model, rows[:8], text, task)


def agree_with_transformers(folder: Path, rows: list[dict[str, Any]], text: tuple[str, ...], task: str) -> None:
    """Assert that `from_pretrained`, `pipeline` and `tunesmith predict` return equal probabilities."""
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


def test_soft_labels_train_from_the_command_line(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"text": text, "p_bad": round(0.2 if good else 0.7, 2), "p_good": round(0.8 if good else 0.3, 2)}
        for text, good in sentences(60)
    ]
    words = ["train", "--train_file", str(write_csv(tmp_path / "t.csv", rows)), "--label_column_name", "p_bad,p_good"]
    words += ["--model_name_or_path", str(tiny), "--output_dir", str(tmp_path / "run"), "--cache_dir", str(tmp_path)]
    assert main([*words, "--max_steps", "60", "--learning_rate", "3e-3", "--use_cpu"]) == 0
    said = "Metrics use the most probable class"
    assert said in capsys.readouterr().err
    assert said in (tmp_path / "run" / "report.html").read_text()
    model = Predictor.load(tmp_path / "run" / "model", use_cpu=True)
    assert model.facts.labels.names == ("bad", "good")
    probabilities = model.probabilities([str(row["text"]) for row in rows])
    targets = np.array([[row["p_bad"], row["p_good"]] for row in rows], dtype=float)
    assert np.abs(probabilities - targets).mean() < 0.1, "hard labels would give probabilities near 0 and 1"
    rows[3]["p_bad"] = -0.5
    write_csv(tmp_path / "t.csv", rows)
    assert main([*words, "--output_dir", str(tmp_path / "other")]) == 3
    assert "t.csv:5:p_bad: the probability -0.5 is negative" in capsys.readouterr().err


def test_unlabeled_test_rows_are_predicted_and_not_scored(train: Any, tmp_path: Path) -> None:
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


def test_scores_equal_those_of_the_exported_model(train: Any, tmp_path: Path) -> None:
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


def numbered(values: list[float], count: int = 60) -> list[dict[str, Any]]:
    return [{"text": text, "label": values[i % len(values)]} for i, (text, _) in enumerate(sentences(count))]


@pytest.mark.parametrize("values", [[1e8, -1e8], [1e-5, 2e-5]], ids=["large", "small"])
def test_regression_with_extreme_labels_trains(train: Any, values: list[float]) -> None:
    result, _ = train(train_data=numbered(values), test_data=numbered(values, 20), do_regression=True)
    assert result.run.report_file.is_file()


def as_dataset(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def test_dataset_dict_provides_splits_and_class_names(train: Any, tmp_path: Path) -> None:
    from datasets import ClassLabel, DatasetDict

    names = ClassLabel(names=["good", "bad"])
    splits = DatasetDict({"train": as_dataset(mood()), "dev": as_dataset(mood(48)[40:]), "extra": as_dataset(mood(2))})
    splits = splits.cast_column("label", names)
    result, said = train(train_data=splits)
    assert result.scores["validation"]["accuracy"].n == 8
    assert "Split 'extra' is not used." in said
    assert Predictor.load(result.run.path, use_cpu=True).facts.labels.names == ("good", "bad")
    splits.save_to_disk(str(tmp_path / "saved"))
    result, said = train(dataset_name=tmp_path / "saved", validation_split_name="extra", output_dir=tmp_path / "again")
    assert result.scores["validation"]["accuracy"].n == 2
    assert "Split 'dev' is not used." in said


def test_labels_are_numbered_as_in_the_head(train: Any, tmp_path: Path) -> None:
    model = save_tiny_bert(tmp_path / "trained", labels=("Good", "bad"))
    result, said = train(train_data=mood(), model_name_or_path=model, learning_rate=1e-12)
    assert "Labels: in the order of the model's head, good, bad." in said
    texts = [row["text"] for row in mood(6)]
    before = Predictor.load(model, use_cpu=True).probabilities(texts)
    after = Predictor.load(result.run.path, use_cpu=True)
    assert after.facts.labels.names == ("good", "bad")
    assert np.abs(after.probabilities(texts) - before).max() < 1e-5, "the head keeps its label order"


def test_labels_unknown_to_the_head_are_refused(train: Any, tmp_path: Path) -> None:
    model = save_tiny_bert(tmp_path / "trained", labels=("NEGATIVE", "POSITIVE"))
    numbers = [{"text": row["text"], "label": int(row["label"] == "good")} for row in mood()]
    with pytest.raises(ConfigError, match=r"trained for NEGATIVE, POSITIVE and the data has 0, 1.*--label_names NEG"):
        train(train_data=numbers, model_name_or_path=model)
    result, _ = train(train_data=numbers, model_name_or_path=model, label_names="NEGATIVE,POSITIVE")
    assert Predictor.load(result.run.path, use_cpu=True).facts.labels.names == ("NEGATIVE", "POSITIVE")


def test_head_for_other_labels_is_reinitialized(train: Any, tmp_path: Path) -> None:
    model = save_tiny_bert(tmp_path / "trained", labels=("NEGATIVE", "POSITIVE"))
    options = {"ignore_mismatched_sizes": True, "learning_rate": 1e-12, "pooling": "pooler"}
    result, said = train(train_data=mood(), model_name_or_path=model, **options)
    assert "The model's head was trained for NEGATIVE, POSITIVE: it is re-initialized." in said
    from safetensors.torch import load_file

    before, after = load_file(model / "model.safetensors"), load_file(result.run.model / "model.safetensors")
    assert not before["classifier.weight"].allclose(after["classifier.weight"], atol=1e-4)
    assert before["bert.pooler.dense.weight"].allclose(after["bert.pooler.dense.weight"], atol=1e-6)


def long_rows(count: int) -> list[dict[str, Any]]:
    """Return texts far longer than the model's 64 positions, whose last words determine the label."""
    return [
        {"text": " ".join(["the"] * 100) + " " + text, "label": "good" if good else "bad"}
        for text, good in sentences(count)
    ]


def test_truncated_rows_are_reported(train: Any) -> None:
    _, said = train(train_data=long_rows(40))
    assert any(line.startswith("Recipe: long_texts head: 100.0% of the rows") for line in said)


def test_head_tail_is_kept_for_prediction(train: Any) -> None:
    result, _ = train(train_data=long_rows(60), test_data=long_rows(10), long_texts="head_tail")
    assert load_config(result.run.config_file, need_data=False).long_texts == "head_tail"
    predictor = Predictor.load(result.run.path, use_cpu=True)
    assert predictor.facts.long_texts == "head_tail"
    texts = [row["text"] for row in long_rows(10)]
    ids = predictor.network.encoder.encode([texts])[0].ids
    assert ids[-2] != ids[1]
    table = pq.read_table(result.run.predictions_file).to_pydict()
    kept = [p for p, split in zip(table["prob_good"], table["split"], strict=True) if split == "test"]
    np.testing.assert_allclose(predictor.probabilities(texts)[:, 1], kept, atol=1e-5)


@pytest.mark.parametrize("options", [{"recipe": "hf"}, {"max_seq_length": 32}, {"long_texts": "head"}])
def test_long_texts_head_is_kept_by_a_flag_and_recipe_hf(train: Any, options: dict[str, Any]) -> None:
    result, said = train(train_data=long_rows(40), **options)
    assert not [line for line in said if line.startswith("Recipe: long_texts")]
    assert load_config(result.run.config_file, need_data=False).long_texts == "head"
