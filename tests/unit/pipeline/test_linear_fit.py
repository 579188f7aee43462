"""The linear model of a probe: what it says about a left-out row is what a model without that row says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

from tunesmith.labels import Task
from tunesmith.pipeline import probe
from tunesmith.pipeline.probe import PENALTY, fit_linear, fit_logistic


def clusters(rows: int, width: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=rows)
    centers = rng.normal(size=(classes, width))
    return torch.from_numpy(centers[labels] + rng.normal(size=(rows, width))), torch.from_numpy(labels)


@pytest.mark.parametrize("width", [6, 80])
def test_left_out_values_are_those_of_a_model_fitted_without_the_row(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "PENALTIES", (0.1,))
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(40, width)), rng.normal(size=40)
    fit = fit_linear(torch.from_numpy(x), torch.from_numpy(y), Task.REGRESSION, 1)
    centered = x - x.mean(0)
    penalty = 0.1 * float(np.linalg.eigvalsh(centered.T @ centered)[-1])
    for row in (0, 17, 39):
        others = np.arange(40) != row
        # The same penalty on the same centre: leaving a row out moves the centre, which the closed form accounts for.
        expected = Ridge(alpha=penalty).fit(x[others], y[others]).predict(x[row : row + 1])[0]
        assert float(fit.held_out[row, 0]) == pytest.approx(expected, abs=1e-6)


def test_logits_are_calibrated_on_left_out_rows() -> None:
    x, labels = clusters(400, 10, 3)
    fit = fit_linear(x, labels, Task.MULTICLASS, 3)
    p = fit.held_out.softmax(1)
    right = (p.argmax(1) == labels).double()
    assert float(right.mean()) > 0.8
    assert abs(float(p.max(1).values.mean() - right.mean())) < 0.03


def test_noise_is_given_the_probabilities_of_the_classes() -> None:
    rng = np.random.default_rng(2)
    labels = torch.from_numpy((rng.random(300) < 0.2).astype(np.int64))
    fit = fit_linear(torch.from_numpy(rng.normal(size=(300, 20))), labels, Task.BINARY, 2)
    assert fit.explained < 0.02
    assert float(fit.held_out.softmax(1)[:, 1].mean()) == pytest.approx(float(labels.double().mean()), abs=0.02)


def test_other_rows_get_the_logits_of_the_same_model() -> None:
    x, labels = clusters(200, 8, 4)
    fit = fit_linear(x, labels, Task.MULTICLASS, 4)
    again, other = clusters(200, 8, 4, seed=0)
    assert (fit.logits(again).argmax(1) == other).double().mean() > 0.6
    assert torch.allclose(fit.logits(again), again @ fit.weights.T + fit.bias)


def test_labels_of_which_a_row_has_several() -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(300, 5))
    labels = torch.from_numpy((x[:, :2] > 0).astype(np.float32))
    fit = fit_linear(torch.from_numpy(x), labels, Task.MULTILABEL, 2)
    assert ((fit.held_out > 0) == (labels > 0.5)).double().mean() > 0.9


@pytest.mark.parametrize("classes", [2, 4])
def test_a_logistic_model_is_that_of_scikit_learn_with_a_penalty_by_the_length_of_the_features(classes: int) -> None:
    x, labels = clusters(8 * classes, 30, classes)
    weights, bias = fit_logistic(x, labels, classes)
    penalty = PENALTY * float(x.square().sum(1).mean())
    # Two classes have one row of weights there: the difference of ours, whose squares are half of its.
    expected = LogisticRegression(C=(2 if classes == 2 else 1) / penalty, tol=1e-8, max_iter=1000).fit(x, labels)
    ours = (x @ weights.T + bias).softmax(1)
    assert np.abs(ours.numpy() - expected.predict_proba(x)).max() < 1e-4
    assert torch.allclose(fit_logistic(x * 10, labels, classes)[0] * 10, weights, atol=1e-4)
