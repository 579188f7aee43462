"""evaluate and predict process every row once, in dataset order, and return metrics under transformers' keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import DataCollatorWithPadding

from conftest import tiny_bert
from trainer_toys import Accuracy, Regression, RegressionDataset, Stream, arguments, arrow, tokenizer
from tunesmith import Trainer


def make(folder: Path, *, model: Any = None, kind: Any = Trainer, **options: Any) -> Any:
    own = {
        n: options.pop(n)
        for n in ("compute_metrics", "preprocess_logits_for_metrics", "eval_dataset", "data_collator")
        if n in options
    }
    own.setdefault("eval_dataset", RegressionDataset(length=21, seed=1))
    return kind(Regression(1.5, 2.5) if model is None else model, arguments(folder, **options), **own)


def test_evaluate_returns_loss_and_metrics_of_all_examples(tmp_path: Path) -> None:
    trainer = make(tmp_path, compute_metrics=Accuracy())
    data = trainer.eval_dataset
    predicted = 1.5 * data.x + 2.5
    results = trainer.evaluate()
    assert results["eval_loss"] == pytest.approx(float(((predicted - data.ys[0]) ** 2).mean()), abs=1e-5)
    assert results["eval_accuracy"] == Accuracy()((predicted, data.ys[0]))["accuracy"]
    assert set(results) == {
        "epoch",
        "eval_loss",
        "eval_accuracy",
        "eval_model_preparation_time",
        "eval_runtime",
        "eval_samples_per_second",
        "eval_steps_per_second",
    }


def test_predict_returns_named_tuple_in_dataset_order(tmp_path: Path) -> None:
    data = RegressionDataset(length=66, seed=1)
    predictions, labels, metrics = make(tmp_path, compute_metrics=Accuracy()).predict(data)
    assert np.allclose(predictions, 1.5 * data.x + 2.5)
    assert np.array_equal(labels, data.ys[0])
    assert {"test_loss", "test_accuracy", "test_runtime"} <= set(metrics)


def test_rows_sorted_by_length_are_returned_in_order(tmp_path: Path) -> None:
    data = arrow(37)
    options: dict[str, Any] = {"model": tiny_bert(), "train_sampling_strategy": "group_by_length", "eval_dataset": data}
    trainer = make(tmp_path, data_collator=DataCollatorWithPadding(tokenizer()), **options)
    output = trainer.predict(data)
    assert output.label_ids.tolist() == data["label"]
    single = make(tmp_path, data_collator=DataCollatorWithPadding(tokenizer()), per_device_eval_batch_size=1, **options)
    assert np.allclose(output.predictions, single.predict(data).predictions, atol=1e-5)


def test_rows_without_labels_and_streams_can_be_predicted(tmp_path: Path) -> None:
    data = RegressionDataset(length=11, seed=2)
    bare = [{"input_x": row["input_x"]} for row in data]  # type: ignore[attr-defined]
    output = make(tmp_path).predict(bare)
    assert np.allclose(output.predictions, 1.5 * data.x + 2.5)
    assert output.label_ids is None
    assert "test_loss" not in output.metrics
    assert make(tmp_path).predict(Stream(13)).predictions.shape == (13,)
