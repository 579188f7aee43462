"""The linear probe equals scikit-learn's models, fitted without the held-out row."""

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
def test_held_out_values_equal_ridge_without_the_row(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "PENALTIES", (0.1,))
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(40, width)), rng.normal(size=40)
    fit = fit_linear(torch.from_numpy(x), torch.from_numpy(y), Task.REGRESSION, 1)
    centered = x - x.mean(0)
    penalty = 0.1 * float(np.linalg.eigvalsh(centered.T @ centered)[-1])
    for row in (0, 17, 39):
        others = np.arange(40) != row
        # Equal penalty and mean: holding out a row changes the mean, which the closed form accounts for.
        expected = Ridge(alpha=penalty).fit(x[others], y[others]).predict(x[row : row + 1])[0]
        assert float(fit.held_out[row, 0]) == pytest.approx(expected, abs=1e-6)


def test_logits_are_calibrated_on_held_out_rows() -> None:
    x, labels = clusters(400, 10, 3)
    fit = fit_linear(x, labels, Task.MULTICLASS, 3)
    p = fit.held_out.softmax(1)
    right = (p.argmax(1) == labels).double()
    assert float(right.mean()) > 0.8
    assert abs(float(p.max(1).values.mean() - right.mean())) < 0.03


@pytest.mark.parametrize("classes", [2, 4])
def test_logistic_model_equals_scikit_learn(classes: int) -> None:
    x, labels = clusters(8 * classes, 30, classes)
    weights, bias = fit_logistic(x, labels, classes)
    penalty = PENALTY * float(x.square().sum(1).mean())
    # scikit-learn has one weight vector for two classes: the difference of our two, with twice the squared norm.
    expected = LogisticRegression(C=(2 if classes == 2 else 1) / penalty, tol=1e-8, max_iter=1000).fit(x, labels)
    ours = (x @ weights.T + bias).softmax(1)
    assert np.abs(ours.numpy() - expected.predict_proba(x)).max() < 1e-4
    assert torch.allclose(fit_logistic(x * 10, labels, classes)[0] * 10, weights, atol=1e-4)
