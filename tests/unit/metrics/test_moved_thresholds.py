"""Thresholds are moved only if that improves examples they were not fitted on."""

from __future__ import annotations

import numpy as np
import pytest

from tunesmith.labels import LabelMap, Task, choose_labels
from tunesmith.metrics.calibration import fit_thresholds
from tunesmith.metrics.table import make_suite


def rare(count: int, seed: int, shift: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    """Return a rare class 1 with calibrated probabilities that rarely exceed 0.5."""
    rng = np.random.default_rng(seed)
    gold = (rng.random(count) < 0.08).astype(np.int64)
    logit = rng.normal(size=count) + shift * gold - 2.5
    positive = 1 / (1 + np.exp(-logit))
    return np.c_[1 - positive, positive], gold


def test_rare_class_threshold_moves_and_improves_new_examples() -> None:
    found = fit_thresholds(*rare(2000, 0), Task.BINARY)
    assert found is not None
    assert found.thresholds is not None
    assert found.thresholds[1] < 0.4
    assert found.after > found.before + 2 * found.error
    probabilities, gold = rare(4000, 1)
    plain, moved = (
        make_suite(Task.BINARY, names=("f1",), scores="probabilities", thresholds=t).compute(probabilities, gold)["f1"]
        for t in (None, found.thresholds)
    )
    assert moved is not None
    assert plain is not None
    assert moved > plain + 0.05
    assert found.line().startswith("Thresholds moved to ")


def test_thresholds_stay_if_gain_is_noise() -> None:
    rng = np.random.default_rng(0)
    kept = 0
    for seed in range(20):
        gold = np.random.default_rng(seed).integers(2, size=200)
        positive = np.clip(gold * 0.4 + rng.normal(scale=0.25, size=200) + 0.3, 0.01, 0.99)
        found = fit_thresholds(np.c_[1 - positive, positive], gold, Task.BINARY)
        assert found is not None
        kept += found.thresholds is not None
    assert kept <= 1


def test_few_examples_or_regression_have_no_thresholds() -> None:
    probabilities, gold = rare(60, 0)
    assert fit_thresholds(probabilities, gold, Task.BINARY) is None
    assert fit_thresholds(np.zeros((50, 1)), np.zeros(50), Task.REGRESSION) is None


def test_thresholds_move_for_multiclass_and_multilabel() -> None:
    rng = np.random.default_rng(0)
    gold = rng.choice(3, p=[0.85, 0.1, 0.05], size=3000)
    logits = rng.normal(size=(3000, 3)) + 1.2 * np.eye(3)[gold] + np.log([0.85, 0.1, 0.05])
    table = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    many = fit_thresholds(table, gold, Task.MULTICLASS)
    assert many is not None
    assert many.thresholds is not None
    assert many.thresholds[0] > many.thresholds[1] > many.thresholds[2]
    tags = (rng.random((2000, 2)) < [0.1, 0.5]).astype(np.int64)
    shown = 1 / (1 + np.exp(-(rng.normal(size=(2000, 2)) + 2 * tags - [3.5, 1.0])))
    several = fit_thresholds(shown, tags, Task.MULTILABEL)
    assert several is not None
    assert several.thresholds is not None
    assert several.thresholds[0] < 0.4


def test_label_map_saves_and_applies_thresholds() -> None:
    labels = LabelMap(("no", "yes"), Task.BINARY, (0.8, 0.2))
    assert LabelMap.from_json(labels.to_json()) == labels
    assert "thresholds" not in LabelMap(("no", "yes"), Task.BINARY).to_json()
    table = np.array([[0.79, 0.21], [0.81, 0.19]])
    assert choose_labels(table, Task.BINARY, labels.thresholds).tolist() == [1, 0]
    assert choose_labels(table, Task.BINARY).tolist() == [0, 0]
    for bad in ((0.5,), (0.0, 1.0), ("a", "b")):
        with pytest.raises((ValueError, TypeError)):
            LabelMap.from_json({"names": ["no", "yes"], "task": "binary", "thresholds": list(bad)})
