"""Reliability and ECE."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.calibration import calibration_curve

from tunesmith.labels import Task
from tunesmith.metrics.calibration import expected_calibration_error, fit_temperature, log_loss_of, reliability_bins


def test_bins_equal_scikit_learn():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(4), 400)
    y = rng.integers(0, 4, 400)
    right = p.argmax(1) == y
    accuracy, confidence = calibration_curve(right, p.max(1), n_bins=10)
    bins = reliability_bins(p, y, num_bins=10)
    assert [b.accuracy for b in bins] == pytest.approx(accuracy.tolist())
    assert [b.confidence for b in bins] == pytest.approx(confidence.tolist())


def test_calibration_error_is_small_only_if_calibrated():
    rng = np.random.default_rng(1)
    q = rng.random(20_000)
    z = (rng.random(20_000) < q).astype(int)
    assert expected_calibration_error(q, z) < 0.02
    assert expected_calibration_error(np.where(q > 0.5, 0.999, 0.001), z) > 0.2


def test_no_labeled_examples_give_no_bins():
    assert reliability_bins([[0.5, 0.5]], [-1]) == ()
    assert expected_calibration_error([[0.5, 0.5]], [-1]) is None


def test_fit_temperature_recovers_scale_or_returns_none() -> None:
    rng = np.random.default_rng(0)
    true = rng.normal(size=(3000, 4)) * 1.5
    odds = np.exp(true) / np.exp(true).sum(axis=1, keepdims=True)
    gold = np.array([rng.choice(4, p=row) for row in odds])
    found = fit_temperature(true * 3.0, gold, Task.MULTICLASS)
    assert found is not None
    assert found.value == pytest.approx(3.0, rel=0.1)
    assert found.error_after < 0.03 < found.error_before
    assert log_loss_of(true * 3.0 / found.value, gold) < log_loss_of(true * 3.0, gold)
    assert fit_temperature(true[:20], gold[:20], Task.MULTICLASS) is None
    assert fit_temperature(true[:, 0], gold.astype(float), Task.REGRESSION) is None
    several = (rng.random((3000, 4)) < 1 / (1 + np.exp(-true))).astype(int)
    found = fit_temperature(true * 2.0, several, Task.MULTILABEL)
    assert found is not None
    assert found.value == pytest.approx(2.0, rel=0.1)
