"""Thresholds that keep the error rate of answered examples below a limit."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binom

from tunesmith.errors import DataError
from tunesmith.metrics.calibration import HeldOut, choose_thresholds, coverage_curve


def draw(rng: np.random.Generator, count: int, *, sharpness: float = 1.5) -> tuple[np.ndarray, np.ndarray, HeldOut]:
    """Return binary examples of an overconfident model, whose error rate falls with its confidence."""
    logit = rng.normal(0, 3, count)
    positive = 1 / (1 + np.exp(-sharpness * logit))
    table = np.stack([1 - positive, positive], axis=1)
    labels = (rng.random(count) < 1 / (1 + np.exp(-logit))).astype(int)
    return table, labels, HeldOut.of(table, table.argmax(axis=1), labels)


def test_bound_is_kept_on_new_examples_in_95_percent_of_draws():
    rng = np.random.default_rng(0)
    table, labels, _ = draw(rng, 50_000)
    exceeded = answered = 0
    for _ in range(200):
        chosen = choose_thresholds(draw(rng, 600)[2], 0.08, ("a", "b"))
        answer = chosen.answers(table, table.argmax(axis=1))
        exceeded += (table.argmax(axis=1) != labels)[answer].mean() > 0.08
        answered += answer.mean() / 200
    assert exceeded <= 10
    assert answered > 0.5


def test_uninformative_confidence_keeps_the_limit():
    rng = np.random.default_rng(6)
    chosen = 0
    for _ in range(400):
        correct = rng.random(500) >= 0.1
        held_out = HeldOut(rng.random(500), np.zeros(500, dtype=int), correct)
        try:
            chosen += choose_thresholds(held_out, 0.0999, ("a", "b")).answered > 0
        except DataError:
            continue
    assert chosen <= 20, "every threshold has an error rate of 10%"


def test_answered_examples_pass_and_one_step_more_fails():
    _, _, held_out = draw(np.random.default_rng(1), 800)
    chosen = choose_thresholds(held_out, 0.1, ("a", "b"))
    assert binom.cdf(chosen.errors, chosen.answered, 0.1) <= 0.05
    step = 800 * (1 - 0.2) / 20
    more = np.argsort(-held_out.confidence)[: round(chosen.answered + step)]
    assert binom.cdf((~held_out.correct[more]).sum(), len(more), 0.1) > 0.05


def test_too_few_examples_are_refused_with_the_number_needed():
    _, _, held_out = draw(np.random.default_rng(2), 100)
    with pytest.raises(DataError, match="at least 149 held-out examples are needed, and there are 100"):
        choose_thresholds(held_out, 0.02, ("a", "b"))


def test_unreachable_limit_is_refused_with_the_lowest_error_rate():
    table = np.tile([0.2, 0.8], (2000, 1))
    labels = (np.arange(2000) % 10 != 0).astype(int)
    with pytest.raises(DataError, match=r"40 of the 400 most confident held-out examples are wrong \(10.00%\)"):
        choose_thresholds(HeldOut.of(table, table.argmax(axis=1), labels), 0.02, ("a", "b"))


def test_per_class_thresholds_bound_each_class():
    rng = np.random.default_rng(3)
    table = rng.dirichlet([1, 1, 1], 6000)
    labels = np.array([rng.choice(3, p=p / p.sum()) for p in table**3])
    labels[table.argmax(axis=1) == 2] = rng.integers(0, 3, (table.argmax(axis=1) == 2).sum())
    chosen = choose_thresholds(HeldOut.of(table, table.argmax(axis=1), labels), 0.1, ("a", "b", "c"), per_class=True)
    assert np.isinf(chosen.thresholds[2])
    assert all(np.isfinite(chosen.thresholds[:2]))
    answered = chosen.answers(table, table.argmax(axis=1))
    for k in (0, 1):
        mine = answered & (table.argmax(axis=1) == k)
        assert mine.any()
        assert (labels[mine] != k).mean() <= 0.1


def test_coverage_curve_ends_with_all_examples():
    table, labels, held_out = draw(np.random.default_rng(4), 300)
    share, error = coverage_curve(held_out)[-1]
    assert share == 1
    assert error == pytest.approx((table.argmax(axis=1) != labels).mean())


def test_held_out_examples_survive_json():
    _, _, held_out = draw(np.random.default_rng(5), 50)
    again = HeldOut.from_json(held_out.to_json())
    np.testing.assert_array_equal(again.confidence, held_out.confidence)
    np.testing.assert_array_equal(again.correct, held_out.correct)
