"""Intervals: known values, bounds and coverage."""

from __future__ import annotations

import numpy as np
import pytest

from tunesmith.labels import Task
from tunesmith.metrics.table import (
    Rows,
    Score,
    auroc_parts,
    confusion_matrix,
    make_suite,
    metric_names,
    metric_of,
    sums_of,
    wilson_limits,
)


def test_wilson_equals_scipy():
    from scipy.stats import binomtest

    for hits, n in ((0, 10), (10, 10), (351, 408), (1, 3)):
        want = binomtest(hits, n).proportion_ci(method="wilson")
        assert [float(v) for v in wilson_limits(hits / n, n)] == pytest.approx([want.low, want.high], abs=1e-12)


def test_score_text_has_value_interval_and_n():
    score = make_suite(Task.BINARY, glue_task="mrpc").compute_with_intervals([1] * 351 + [0] * 57, [1] * 408)[
        "accuracy"
    ]
    assert score.text() == "0.8603 [0.823, 0.891] n=408"
    assert Score.from_json(score.to_json()) == score
    assert Score(None, None, None, 0, "none").text() == "undefined n=0"


def test_f1_interval_is_transformed_wilson_interval():
    # TP 3, FP 1, FN 2: Wilson interval for 3 of 6, transformed by 2J/(1+J)
    rows = Rows(np.array([1] * 5 + [0] * 5), np.array([1, 1, 1, 0, 0, 1, 0, 0, 0, 0]), None)
    low, high = (float(v) for v in wilson_limits(0.5, 6))
    score = metric_of("f1", Task.BINARY).score(rows)
    assert (score.low, score.high) == pytest.approx((2 * low / (1 + low), 2 * high / (1 + high)))


@pytest.mark.parametrize("task", list(Task))
def test_perfect_score_on_ten_examples_has_wide_interval(task):
    rng = np.random.default_rng(0)
    y = np.array([0, 1, 1, 0, 1, 0, 1, 1, 0, 1])
    if task is Task.REGRESSION:
        scores = make_suite(task).compute_with_intervals(y + 0.01 * rng.normal(size=10), y)
        assert scores["pearson"].low < scores["pearson"].value < scores["pearson"].high < 1
        return
    if task is Task.MULTILABEL:
        y = np.stack([y, 1 - y], axis=1)
        logits = 4.0 * y - 2.0
    else:
        logits = 4.0 * np.eye(2)[y] - 2.0
    for name, score in (
        make_suite(task, names=[n for n in metric_names(task) if n != "log_loss"])
        .compute_with_intervals(logits, y)
        .items()
    ):
        assert score.value == score.high == 1.0, name
        assert 0.1 < score.low < 0.9, name


def test_auroc_variance_equals_delong():
    rng = np.random.default_rng(1)
    y = rng.random(120) < 0.4
    s = np.round(rng.normal(size=120) + y, 1)
    wins = (s[y][:, None] > s[~y]) + 0.5 * (s[y][:, None] == s[~y])
    area, influence = auroc_parts(y, s)
    assert area == pytest.approx(wins.mean())
    want = wins.mean(1).var(ddof=1) / y.sum() + wins.mean(0).var(ddof=1) / (~y).sum()
    assert float(influence @ influence) == pytest.approx(want)


@pytest.mark.parametrize("name", ["accuracy", "f1", "f1_macro", "matthews_correlation"])
def test_95_percent_intervals_cover_94_to_96_percent(name):
    # 6,000 seeded datasets of 408 examples: three standard errors of the coverage are 0.8 points.
    truth = np.array([[0.25, 0.07], [0.068, 0.612]])
    draws = np.random.default_rng(7).multinomial(408, truth.ravel(), size=6000)
    metric = metric_of(name, Task.BINARY)
    target, seen = float(metric.formula(*sums_of(truth * 1e9))), {}
    covered = 0
    for draw in map(tuple, draws.tolist()):
        if draw not in seen:
            cells = np.repeat(np.arange(4), draw)
            score = metric.score(Rows(cells // 2, cells % 2, None))
            seen[draw] = score.low <= target <= score.high
        covered += seen[draw]
    assert 0.94 <= covered / 6000 <= 0.96


@pytest.mark.parametrize("name", ["pearson", "spearmanr"])
def test_correlation_intervals_cover_on_skewed_scores(name):
    rng = np.random.default_rng(8)
    big = rng.standard_exponential(1_000_000)
    noise = rng.normal(size=1_000_000) * 0.7
    metric = metric_of(name, Task.REGRESSION)
    target = metric.measure(Rows(big, big + noise, None))
    covered = 0
    for _ in range(800):
        x = rng.standard_exponential(300)
        score = metric.score(Rows(x, x + 0.7 * rng.normal(size=300), None))
        covered += score.low <= target <= score.high
    assert 0.93 <= covered / 800 <= 0.97


def test_single_outlier_has_a_wide_finite_interval():
    y = np.r_[1e-9 * np.arange(29), 1000.0]
    scores = make_suite(Task.REGRESSION, names=["r2", "mse"]).compute_with_intervals(y + 1.0, y)
    for score in scores.values():
        assert np.isfinite([score.low, score.high]).all()
        assert score.low <= score.value <= score.high


def test_value_is_inside_its_interval():
    rng = np.random.default_rng(9)
    for _ in range(150):
        k = int(rng.integers(2, 5))
        n = int(rng.integers(1, 30))
        task = Task.BINARY if k == 2 else Task.MULTICLASS
        y, p = rng.integers(0, k, n), rng.integers(0, k, n)
        for name, score in make_suite(task, names=metric_names(task)).compute_with_intervals(p, y).items():
            if score.value is not None:
                assert score.low <= score.value <= score.high, (name, confusion_matrix(y, p))
                assert score.low >= -1, name
                assert score.high <= 1, name
