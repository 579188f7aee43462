"""Thresholds that a run moved are kept with its model, and every way to predict follows them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tiny_model import sentences
from tunesmith.inference.predictor import Predictor
from tunesmith.metrics.calibration import MovedThresholds


def test_moved_thresholds_are_stored_once_and_followed(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = MovedThresholds((1 - 1e-9, 1e-9), "f1", 0.1, 0.9, 0.05, 12)
    monkeypatch.setattr("tunesmith.pipeline.results.fit_thresholds", lambda *_: moved)
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(60)]
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


def test_a_run_that_cannot_fit_thresholds_says_so(train: Any) -> None:
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(40)]
    result, said = train(train_data=rows, move_thresholds=True)
    assert any(line.startswith("Thresholds stay at one half: ") for line in said)
    assert Predictor.load(result.run.path, use_cpu=True).facts.labels.thresholds is None
