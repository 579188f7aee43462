"""Label noise estimates are accurate for planted errors and low for hard tasks with correct labels."""

from __future__ import annotations

import numpy as np
import pytest

from tunesmith.metrics.calibration import LabelNoise, estimate_label_noise


def sample(rows: int, classes: int, skill: float, wrong: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scores of a model with this skill, and labels of which this share is wrong."""
    draw = np.random.default_rng(seed)
    scores = skill * draw.normal(size=(rows, classes))
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    labels = (draw.random((rows, 1)) > p.cumsum(axis=1)).sum(axis=1).clip(0, classes - 1)
    replaced = np.zeros(rows, bool)
    replaced[draw.permutation(rows)[: round(wrong * rows)]] = True
    return 0.3 * scores, np.where(replaced, (labels + draw.integers(1, classes, rows)) % classes, labels)


@pytest.mark.parametrize("classes", [2, 6])
@pytest.mark.parametrize("wrong", [0.1, 0.2, 0.4])
def test_planted_errors_are_estimated_within_five_points(classes: int, wrong: float) -> None:
    parts = [sample(1000, classes, 4.0, wrong, 1), sample(300, classes, 4.0, 0.0, 2)]
    found = estimate_label_noise(parts, classes)
    assert found is not None
    assert found.share == pytest.approx(wrong, abs=0.051)
    assert found.low <= wrong <= found.high
    assert found.is_precise


@pytest.mark.parametrize("skill", [0.6, 1.0, 2.0])
def test_hard_task_with_correct_labels_is_not_noisy(skill: float) -> None:
    found = [estimate_label_noise([sample(1000, 5, skill, 0.0, seed)], 5) for seed in range(3)]
    assert not any(one is not None and one.is_noisy for one in found)


def test_scores_without_information_give_no_estimate() -> None:
    scores, labels = sample(1000, 3, 2.0, 0.0, 0)
    assert estimate_label_noise([(scores, np.random.default_rng(1).permutation(labels))], 3) is None
    assert estimate_label_noise([], 3) is None


def test_estimate_is_read_back_and_malformed_entries_are_ignored() -> None:
    noise = LabelNoise(0.1, 0.05, 0.15, 400)
    assert LabelNoise.from_json(noise.to_json()) == noise
    for other in (None, "x", {}, {**noise.to_json(), "low": 0.3}, {**noise.to_json(), "n": None}):
        assert LabelNoise.from_json(other) is None
