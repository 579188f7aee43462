"""Comparison of two predictors on the same examples."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from tunesmith.errors import ConfigError, DataError
from tunesmith.labels import Task
from tunesmith.metrics.paired import compare_predictions, mcnemar


def predictors(rng, n, error_a, error_b):
    y = (rng.random(n) < 0.68).astype(int)
    return y, np.where(rng.random(n) < error_a, 1 - y, y), np.where(rng.random(n) < error_b, 1 - y, y)


def test_mcnemar_equals_exact_binomial_test():
    # 1 of 6 discordant examples lost: 2 * P(X <= 1) = 2 * 7/64
    low, high, p = mcnemar(5, 1, 408)
    assert p == pytest.approx(14 / 64)
    assert p == pytest.approx(2 * binom.cdf(1, 6, 0.5))
    assert low < 4 / 408 < high
    assert mcnemar(0, 0, 10)[2] == 1.0
    with pytest.raises(DataError):
        mcnemar(8, 8, 10)


def test_equal_predictions_show_no_difference():
    y, a, _ = predictors(np.random.default_rng(0), 100, 0.2, 0.2)
    for metric in ("accuracy", "f1", "matthews_correlation", "f1_macro"):
        result = compare_predictions(a, a, y, task=Task.BINARY, metric=metric)
        assert (result.difference, result.p_value) == (0.0, 1.0)
        assert result.low <= 0 <= result.high


@pytest.mark.parametrize("metric", ["accuracy", "f1", "f1_macro", "mcc", "balanced_accuracy"])
def test_better_predictor_is_found_with_sign_b_minus_a(metric):
    y, a, b = predictors(np.random.default_rng(1), 600, 0.30, 0.08)
    result = compare_predictions(a, b, y, task=Task.BINARY, metric=metric)
    assert result.p_value < 0.001
    assert 0 < result.low < result.difference < result.high
    turned = compare_predictions(b, a, y, task=Task.BINARY, metric=metric)
    assert turned.difference == pytest.approx(-result.difference)


def test_scores_of_every_task_are_compared_by_example():
    rng = np.random.default_rng(2)
    y = rng.random(200)
    result = compare_predictions(
        y + rng.normal(size=200),
        y + 0.2 * rng.normal(size=200),
        y,
        task=Task.REGRESSION,
        metric="pearson",
        resamples=300,
    )
    assert result.difference > 0.3
    assert result.p_value == pytest.approx(1 / 301)
    labels = rng.integers(0, 2, 200)
    good, bad = np.eye(2)[labels] + 0.3 * rng.normal(size=(200, 2)), rng.normal(size=(200, 2))
    assert compare_predictions(bad, good, labels, task=Task.BINARY, metric="auroc", resamples=200).p_value < 0.05
    many = rng.integers(0, 2, (150, 3))
    result = compare_predictions(1 - many, many, many, task=Task.MULTILABEL, metric="f1_micro", resamples=200)
    assert result.difference == 1.0


def test_undefined_metrics_and_no_rows_have_no_verdict():
    result = compare_predictions([1, 1], [1, 0], [1, 1], task=Task.BINARY, metric="mcc")
    assert (result.difference, result.p_value, result.method) == (None, None, "none")
    assert compare_predictions([], [], [], task=Task.BINARY).n == 0
    with pytest.raises(ConfigError, match="unknown metric"):
        compare_predictions([1], [1], [1], task=Task.BINARY, metric="nonsense")


def test_unlabeled_examples_are_ignored_in_comparison():
    result = compare_predictions([1, 0, 1], [1, 1, 1], [1, -1, 0], task=Task.BINARY)
    assert (result.n, result.difference) == (2, 0.0)


@pytest.mark.parametrize(("metric", "runs"), [("accuracy", 1000), ("f1_macro", 600)])
def test_false_positive_rate_is_at_most_5_percent(metric, runs):
    rng = np.random.default_rng(11)
    claimed = 0
    for i in range(runs):
        y, a, b = predictors(rng, 200, 0.14, 0.14)
        claimed += compare_predictions(a, b, y, task=Task.BINARY, metric=metric, seed=i, resamples=199).p_value <= 0.05
    # 0.05 plus three standard errors; bench/interval_coverage.py prints the rates.
    assert claimed / runs <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / runs)


@pytest.mark.parametrize("metric", ["f1", "f1_macro", "mcc", "balanced_accuracy", "accuracy"])
def test_p_value_and_interval_agree_about_zero(metric):
    """Cases near the threshold are most likely to disagree."""
    significant = 0
    for seed in range(120):
        rng = np.random.default_rng(seed)
        y, a, b = predictors(rng, int(rng.integers(12, 120)), 0.35, 0.12)
        result = compare_predictions(a, b, y, task=Task.BINARY, metric=metric, seed=seed, resamples=300)
        if result.p_value is None:
            continue
        assert (result.p_value <= 0.05) == (not result.low <= 0 <= result.high), (seed, result)
        assert result.low <= result.difference <= result.high, (seed, result)
        significant += result.p_value <= 0.05
    assert 20 < significant < 120
