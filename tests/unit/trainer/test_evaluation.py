"""evaluate and predict: every row once, in the order of the dataset, with the metrics under transformers' keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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


def test_evaluate_returns_the_loss_and_metrics_of_every_row(tmp_path: Path) -> None:
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


def test_predict_returns_a_named_tuple_in_the_order_of_the_dataset(tmp_path: Path) -> None:
    data = RegressionDataset(length=66, seed=1)
    predictions, labels, metrics = make(tmp_path, compute_metrics=Accuracy()).predict(data)
    assert np.allclose(predictions, 1.5 * data.x + 2.5)
    assert np.array_equal(labels, data.ys[0])
    assert {"test_loss", "test_accuracy", "test_runtime"} <= set(metrics)


def test_rows_sorted_by_length_come_back_in_order(tmp_path: Path) -> None:
    data = arrow(37)
    options: dict[str, Any] = {"model": tiny_bert(), "train_sampling_strategy": "group_by_length", "eval_dataset": data}
    trainer = make(tmp_path, data_collator=DataCollatorWithPadding(tokenizer()), **options)
    output = trainer.predict(data)
    assert output.label_ids.tolist() == data["label"]
    single = make(tmp_path, data_collator=DataCollatorWithPadding(tokenizer()), per_device_eval_batch_size=1, **options)
    assert np.allclose(output.predictions, single.predict(data).predictions, atol=1e-5)


def test_a_dict_of_evaluation_sets_gives_each_its_own_keys(tmp_path: Path) -> None:
    sets = {"near": RegressionDataset(length=8, seed=1), "far": RegressionDataset(length=9, seed=2)}
    trainer = make(tmp_path, eval_dataset=sets, compute_metrics=Accuracy())
    results = trainer.evaluate()
    assert {"eval_near_loss", "eval_far_loss", "eval_near_accuracy"} <= set(results)
    assert "test_near_loss" in trainer.evaluate(sets, metric_key_prefix="test")
    run = make(
        tmp_path,
        eval_dataset=sets,
        eval_strategy="epoch",
        save_strategy="epoch",
        num_train_epochs=2,
        metric_for_best_model="far_loss",
        load_best_model_at_end=True,
    )
    run.train_dataset = RegressionDataset()
    run.train()
    assert run.state.best_metric == min(e["eval_far_loss"] for e in run.state.log_history if "eval_far_loss" in e)


def test_two_outputs_and_two_labels_come_back_as_tuples(tmp_path: Path) -> None:
    data = RegressionDataset(length=12, seed=1, label_names=["labels", "labels_2"])

    class Two(Regression):
        def forward(self, input_x: torch.Tensor, labels: Any = None, labels_2: Any = None, **kwargs: Any) -> Any:
            return super().forward(input_x, labels)

    trainer = make(tmp_path, model=Two(1.5, 2.5, double_output=True), label_names=["labels", "labels_2"])
    predictions, labels, _ = trainer.predict(data)
    assert len(predictions) == len(labels) == 2
    assert np.array_equal(labels[1], data.ys[1])


def test_logits_are_preprocessed_before_they_are_kept(tmp_path: Path) -> None:
    trainer = make(
        tmp_path, compute_metrics=Accuracy(), preprocess_logits_for_metrics=lambda logits, labels: logits + 1
    )
    data = trainer.eval_dataset
    assert np.allclose(trainer.predict(data).predictions, 1.5 * data.x + 3.5)


def test_losses_and_inputs_reach_the_metrics_when_asked_for(tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def look(result: Any) -> dict[str, float]:
        seen.update(losses=result.losses, inputs=result.inputs)
        return {}

    class Named(Regression):
        main_input_name = "input_x"

    trainer = make(tmp_path, model=Named(), compute_metrics=look, include_for_metrics=["loss", "inputs"])
    trainer.evaluate()
    assert seen["losses"].shape == (21,)
    assert np.array_equal(seen["inputs"], trainer.eval_dataset.x)


def test_metrics_batch_by_batch_equal_those_over_everything(tmp_path: Path) -> None:
    class Streaming:
        def __init__(self) -> None:
            self.hits: list[float] = []

        def __call__(self, result: Any, compute_result: bool) -> dict[str, float]:
            self.hits += (torch.abs(result.predictions - result.label_ids) <= 0.25).float().tolist()
            return {"accuracy": float(np.mean(self.hits))} if compute_result else {}

    whole = make(tmp_path, compute_metrics=Accuracy()).evaluate()
    parts = make(tmp_path, compute_metrics=Streaming(), batch_eval_metrics=True).evaluate()
    assert parts["eval_accuracy"] == pytest.approx(whole["eval_accuracy"])
    assert parts["eval_loss"] == pytest.approx(whole["eval_loss"])


def test_prediction_loss_only_keeps_no_predictions(tmp_path: Path) -> None:
    output = make(tmp_path, prediction_loss_only=True).predict(RegressionDataset(length=5))
    assert output.predictions is None
    assert output.label_ids is None
    assert "test_loss" in output.metrics


def test_batches_may_be_kept_apart(tmp_path: Path) -> None:
    output = make(tmp_path, eval_do_concat_batches=False).predict(RegressionDataset(length=20))
    assert [len(p) for p in output.predictions] == [8, 8, 4]


def test_rows_without_labels_and_streams_can_be_predicted(tmp_path: Path) -> None:
    data = RegressionDataset(length=11, seed=2)
    bare = [{"input_x": row["input_x"]} for row in data]  # type: ignore[attr-defined]
    output = make(tmp_path).predict(bare)
    assert np.allclose(output.predictions, 1.5 * data.x + 2.5)
    assert output.label_ids is None
    assert "test_loss" not in output.metrics
    assert make(tmp_path).predict(Stream(13)).predictions.shape == (13,)


def test_prediction_step_may_be_overridden(tmp_path: Path) -> None:
    class Own(Trainer):
        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
            return loss, logits * 0, labels

    assert not make(tmp_path, kind=Own).predict(RegressionDataset(length=5)).predictions.any()


def test_an_evaluation_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="requires an eval_dataset"):
        make(tmp_path, eval_dataset=None).evaluate()


def test_half_precision_evaluation_casts_the_model(tmp_path: Path) -> None:
    trainer = make(tmp_path, model=tiny_bert(), bf16_full_eval=True, data_collator=DataCollatorWithPadding(tokenizer()))
    output = trainer.predict(arrow(9).remove_columns(["text"]))
    assert trainer.model.dtype == torch.bfloat16
    assert output.predictions.shape == (9, 2)


def test_persistent_workers_keep_the_evaluation_loaders(tmp_path: Path) -> None:
    sets = {"a": RegressionDataset(length=8), "b": RegressionDataset(length=9)}
    kept = make(tmp_path, eval_dataset=sets, dataloader_persistent_workers=True, dataloader_num_workers=1)
    assert kept.get_eval_dataloader("a") is kept.get_eval_dataloader("a")
    assert kept.get_eval_dataloader("a") is not kept.get_eval_dataloader("b")
    fresh = make(tmp_path, eval_dataset=sets)
    assert fresh.get_eval_dataloader("a") is not fresh.get_eval_dataloader("a")
    assert fresh.get_eval_dataloader("a").dataset is sets["a"]
