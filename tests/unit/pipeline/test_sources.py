"""Data as Python objects, as saved folders, and labels that a model already knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_model import save_tiny_bert, sentences
from tunesmith.errors import ConfigError, DataError
from tunesmith.inference.predictor import Predictor


def mood(count: int = 40) -> list[dict[str, Any]]:
    return [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(count)]


def as_dataset(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def as_frame(rows: list[dict[str, Any]]) -> Any:
    import pandas

    return pandas.DataFrame(rows)


@pytest.mark.parametrize("make", [list, as_dataset, as_frame])
def test_rows_come_as_python_objects(make: Any, train: Any) -> None:
    result, said = train(train_data=make(mood(40)), validation_data=make(mood(48)[40:]))
    assert result.scores["validation"]["accuracy"].n == 8
    assert "Rows: 40 train, 8 validation." in said


def test_a_dataset_dict_brings_its_own_splits_and_class_names(train: Any, tmp_path: Path) -> None:
    from datasets import ClassLabel, DatasetDict

    names = ClassLabel(names=["good", "bad"])
    splits = DatasetDict(
        {"train": as_dataset(mood(40)), "dev": as_dataset(mood(48)[40:]), "extra": as_dataset(mood(2))}
    )
    splits = splits.cast_column("label", names)
    result, said = train(train_data=splits)
    assert result.scores["validation"]["accuracy"].n == 8
    assert "Split 'extra' is not used." in said
    assert Predictor.load(result.run.path, use_cpu=True).facts.labels.names == ("good", "bad")
    splits.save_to_disk(str(tmp_path / "saved"))
    result, said = train(dataset_name=tmp_path / "saved", validation_split_name="extra", output_dir=tmp_path / "again")
    assert result.scores["validation"]["accuracy"].n == 2
    assert "Split 'dev' is not used." in said


def test_a_split_that_is_not_there_is_named_with_those_that_are(train: Any, tmp_path: Path) -> None:
    from datasets import DatasetDict

    DatasetDict({"train": as_dataset(mood()), "dev": as_dataset(mood(8))}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"no split 'dew'; found: train, dev. Did you mean 'dev'"):
        train(dataset_name=tmp_path / "saved", validation_split_name="dew")


def test_two_sources_of_training_rows_are_refused(train: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both train_data and train_file"):
        train(train_data=mood(), train_file=tmp_path / "x.csv")


def test_a_dataset_that_is_not_on_disk_is_not_fetched_when_downloads_are_off(train: Any) -> None:
    with pytest.raises(Exception, match="not on this machine"):
        train(dataset_name="someone/never-heard-of", allow_download=False)


def test_labels_are_numbered_as_in_the_head_of_the_model(train: Any, tmp_path: Path) -> None:
    model = save_tiny_bert(tmp_path / "trained", labels=("Good", "bad"))
    result, said = train(train_data=mood(), model_name_or_path=model, learning_rate=1e-12)
    assert "Labels: in the order of the model's head, good, bad." in said
    texts = [row["text"] for row in mood(6)]
    before = Predictor.load(model, use_cpu=True).probabilities(texts)
    after = Predictor.load(result.run.path, use_cpu=True)
    assert after.facts.labels.names == ("good", "bad")
    assert np.abs(after.probabilities(texts) - before).max() < 1e-5, "the head kept its meaning"


def test_labels_that_mean_something_else_to_the_head_are_refused(train: Any, tmp_path: Path) -> None:
    model = save_tiny_bert(tmp_path / "trained", labels=("NEGATIVE", "POSITIVE"))
    numbers = [{"text": row["text"], "label": int(row["label"] == "good")} for row in mood()]
    with pytest.raises(ConfigError, match=r"trained for NEGATIVE, POSITIVE and the data has 0, 1.*--label_names NEG"):
        train(train_data=numbers, model_name_or_path=model)
    result, _ = train(train_data=numbers, model_name_or_path=model, label_names="NEGATIVE,POSITIVE")
    assert Predictor.load(result.run.path, use_cpu=True).facts.labels.names == ("NEGATIVE", "POSITIVE")


def test_a_head_for_other_labels_starts_afresh_when_asked(train: Any, tmp_path: Path) -> None:
    model = save_tiny_bert(tmp_path / "trained", labels=("NEGATIVE", "POSITIVE"))
    options = {"ignore_mismatched_sizes": True, "learning_rate": 1e-12, "pooling": "pooler"}
    result, said = train(train_data=mood(), model_name_or_path=model, **options)
    assert "The model's head was trained for NEGATIVE, POSITIVE: it is re-initialized." in said
    from safetensors.torch import load_file

    before, after = load_file(model / "model.safetensors"), load_file(result.run.model / "model.safetensors")
    assert not before["classifier.weight"].allclose(after["classifier.weight"], atol=1e-4)
    assert before["bert.pooler.dense.weight"].allclose(after["bert.pooler.dense.weight"], atol=1e-6)


def test_a_model_trained_here_is_trained_further(train: Any, tmp_path: Path) -> None:
    first, _ = train(train_data=mood(), output_dir=tmp_path / "first", learning_rate=3e-3, max_steps=60)
    again, said = train(train_data=mood(60)[20:], model_name_or_path=first.run.model, max_steps=2, learning_rate=1e-5)
    assert not any("new, to be trained" in note for note in said)
    assert (again.scores["validation"]["accuracy"].value or 0) >= 0.75
