"""Effects of options on a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from tiny_model import mood
from tunesmith.errors import CheckpointError
from tunesmith.events import Evaluated, RunEnded, StepDone
from tunesmith.inference.predictor import Predictor
from tunesmith.metrics.calibration import MovedThresholds
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import read_manifest


def losses(result: Any) -> list[float]:
    return [e.loss for e in read_journal(result.run.journal_file) if isinstance(e, StepDone) and e.loss is not None]


def evaluations(result: Any) -> list[int]:
    events = read_journal(result.run.journal_file)
    return [e.step for e in events if isinstance(e, Evaluated) and e.split == "validation"]


@pytest.fixture(scope="module")
def plain_losses() -> dict[str, list[float]]:
    return {}


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"gradient_checkpointing": True}, 1e-5),
        ({"padding_free": "off", "cls_only_last_layer": "off", "restrict_vocabulary": "off"}, 1e-5),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 1e-5),
        ({"bf16": True}, 2e-2),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_performance_options_do_not_change_losses(
    options: dict[str, Any], tolerance: float, train: Any, tmp_path: Path, plain_losses: dict[str, list[float]]
) -> None:
    asked = {"train_data": mood(), "max_steps": 6, "train_sampling_strategy": "random"}
    if not plain_losses:
        plain_losses["plain"] = losses(train(**asked, output_dir=tmp_path / "plain")[0])
    found = losses(train(**asked, **options)[0])
    assert len(found) == 6
    assert found == pytest.approx(plain_losses["plain"], abs=tolerance)


def test_order_is_stored_with_the_run(train: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"train_data": mood(), "save_strategy": "steps", "save_steps": 2}
    result, _ = train(**options, max_steps=2, output_dir=tmp_path / "run")
    stored = read_manifest(next(result.run.path.glob("**/checkpoint-*2")))["config"]
    assert stored["train_sampling_strategy"] == "group_by_length"
    for order, what in ({}, "this config"), ({"train_sampling_strategy": "random"}, "a different config"):
        with pytest.raises(CheckpointError, match=f"a finished run of {what}"):
            train(**options, max_steps=2, output_dir=tmp_path / "run", **order)


def test_class_weights_and_label_smoothing_change_the_loss(train: Any, tmp_path: Path) -> None:
    rows = [{**row, "label": "good" if i % 5 == 0 else "bad"} for i, row in enumerate(mood())]
    first = losses(train(train_data=rows, output_dir=tmp_path / "a")[0])[0]
    weighted = losses(train(train_data=rows, output_dir=tmp_path / "b", class_weights="balanced")[0])[0]
    smooth = losses(train(train_data=rows, output_dir=tmp_path / "c", label_smoothing_factor=0.5)[0])[0]
    assert weighted != pytest.approx(first, abs=1e-4)
    assert smooth != pytest.approx(first, abs=1e-6)


def test_frozen_parts_stay_as_they_were(train: Any, tiny: Path) -> None:
    result, _ = train(train_data=mood(), freeze="embeddings,layers.0", weight_decay=0.1)
    before, after = load_file(tiny / "model.safetensors"), load_file(result.run.model / "model.safetensors")
    moved = {name for name, tensor in before.items() if not tensor.equal(after[f"bert.{name}"])}
    assert moved
    assert not [name for name in moved if name.startswith(("embeddings.", "encoder.layer.0."))]


def test_evaluations_happen_at_eval_steps(train: Any, tmp_path: Path) -> None:
    rows = mood()
    assert evaluations(train(train_data=rows, eval_strategy="steps", eval_steps=2, output_dir=tmp_path / "a")[0]) == [
        2,
        4,
    ]
    result, _ = train(train_data=rows, eval_strategy="no", output_dir=tmp_path / "b")
    assert evaluations(result) == []
    assert result.best_step is None
    assert result.scores["validation"]["accuracy"].n == 4


def test_early_stopping_ends_the_run_with_its_reason(train: Any) -> None:
    # Random labels and a zero learning rate: nothing ever improves.
    result, _ = train(
        train_data=mood(), learning_rate=1e-12, max_steps=-1, num_train_epochs=9, early_stopping_patience=2
    )
    end = read_journal(result.run.journal_file)[-1]
    assert isinstance(end, RunEnded)
    assert end.reason == "early_stopping"
    assert evaluations(result) == [5, 10, 15]
    assert result.best_step == 5


def test_best_weights_are_exported(train: Any) -> None:
    result, _ = train(
        train_data=mood(),
        max_steps=12,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
        load_best_model_at_end=True,
    )
    events = read_journal(result.run.journal_file)
    by_step = {e.step: e.metrics["loss"] for e in events if isinstance(e, Evaluated) and e.split == "validation"}
    best = min(by_step, key=lambda step: by_step[step] or 9.0)
    assert result.best_step == best
    assert result.scores["validation"]["loss"].value == pytest.approx(by_step[best], abs=1e-6)


def test_run_without_validation_rows_has_no_scores(train: Any) -> None:
    result, said = train(train_data=mood(), validation_split_fraction=0)
    assert result.scores == {}
    assert any("nothing will be evaluated" in note for note in said)
    assert result.run.model.is_dir()


def test_moved_thresholds_are_stored_and_applied(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = MovedThresholds((1 - 1e-9, 1e-9), "f1", 0.1, 0.9, 0.05, 12)
    monkeypatch.setattr("tunesmith.pipeline.results.fit_thresholds", lambda *_: moved)
    rows = mood(60)
    result, said = train(train_data=rows, test_data=rows[:20], move_thresholds=True)
    assert moved.line() in said
    assert json.loads((result.run.model / "tunesmith.json").read_text())["labels"]["thresholds"] == [1 - 1e-9, 1e-9]
    predictor = Predictor.load(result.run.path, use_cpu=True)
    texts = [row["text"] for row in rows[:20]]
    assert set(predictor.predict(texts)) == {predictor.facts.labels.names[1]}
    assert np.all(predictor.probabilities(texts)[:, 1] < 1 - 1e-9)
    recall = json.loads(result.run.metrics_file.read_text())["test"]["recall"]["value"]
    assert recall == 1.0
    assert result.evaluate(rows[:20])["recall"].value == 1.0


def test_thresholds_stay_if_they_cannot_be_fitted(train: Any) -> None:
    rows = mood()
    result, said = train(train_data=rows, move_thresholds=True)
    assert any(line.startswith("Thresholds stay at one half: ") for line in said)
    assert Predictor.load(result.run.path, use_cpu=True).facts.labels.thresholds is None
