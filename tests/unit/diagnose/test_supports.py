"""How the signs of a run are weighed: what is small beside the constant's loss, or natural for the task, is no fault."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from tunesmith.diagnose.features import Features
from tunesmith.diagnose.supports import weigh_verdicts

GOOD = Features(
    first=0.6,
    lowest=0.4,
    last=0.4,
    train=0.3,
    fresh=0.65,
    gap_z=-1.0,
    gain_z=12.0,
    score_z=15.0,
    signal=5.0,
    train_z=15.0,
    rise=0.0,
    rise_z=0.0,
    score_fall_z=0.0,
    late_fall=0.2,
    late_z=2.0,
    late_size=0.1,
    swings=0,
    step_noise=0.1,
    batch_noise=0.05,
    spread=0.6,
    sure=0.95,
    plateau=0.2,
    train_above_z=-5.0,
    classes=6,
    random=math.nan,
    random_ratio=math.nan,
    calibration=0.02,
    ignored=0.0,
    turned=-1.0,
    ignored_most=0.0,
    majority=0.3,
    work=0.01,
    rate=1e-4,
    frozen=False,
    train_rows=1200,
    epochs=3.0,
    evaluations=3,
)


def first(**changes: Any) -> str:
    return next(iter(weigh_verdicts(replace(GOOD, **changes))))


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "healthy"),
        # a regression that explains 95% of the variance: a quarter of nearly nothing
        ({"lowest": 0.044, "last": 0.055, "train": 0.02, "rise": 0.235, "rise_z": 1.7}, "healthy"),
        ({"lowest": 0.44, "last": 0.62, "train": 0.1, "rise": 0.41, "rise_z": 3.0}, "overfitting"),
        # some of 50 classes are never predicted; one of three is not
        ({"ignored": 0.18, "ignored_most": 0.02}, "healthy"),
        ({"ignored": 0.18, "ignored_most": 0.18}, "class_ignored"),
        # batches of a task with a class of 5% scatter by themselves
        ({"step_noise": 0.8, "batch_noise": 1.0}, "healthy"),
        ({"step_noise": 0.8, "batch_noise": 0.05}, "erratic"),
        # many looks see the wild beginning
        ({"swings": 3, "evaluations": 32}, "healthy"),
        ({"swings": 3, "evaluations": 8}, "erratic"),
    ],
)
def test_what_is_small_or_natural_is_no_fault(changes: dict[str, Any], verdict: str) -> None:
    assert first(**changes) == verdict


CHANCE = {
    "first": 1.0,
    "lowest": 1.0,
    "last": 1.0,
    "fresh": 1.0,
    "gain_z": 0.0,
    "score_z": 0.0,
    "signal": 0.0,
    "sure": 0.6,
    "plateau": 1.0,
}


def test_a_loss_far_above_the_constant_is_underfitting_not_a_text_without_signal() -> None:
    assert first(**CHANCE, train=0.98, train_z=0.0) == "no_signal"
    far = CHANCE | {"first": 20.0, "lowest": 13.0, "last": 13.0}
    assert first(**far, train=13.0, train_z=0.0) == "underfitting"


@pytest.mark.parametrize("train", [0.95, 0.6, 0.2])
def test_without_any_signal_it_is_not_the_labels_of_some_rows(train: float) -> None:
    assert first(**CHANCE, train=train, train_z=9.0) == "no_signal", "however much of the training rows was learnt"


HARD = {"first": 0.97, "lowest": 0.9, "last": 0.92, "train": 0.6, "fresh": 0.98, "gain_z": 3.0, "score_z": 5.0}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"sure": 0.7, "plateau": 0.3}, "healthy"),
        ({"sure": 0.68, "plateau": 0.6}, "label_noise"),
        ({"sure": 0.64, "plateau": 0.7, "classes": 2}, "healthy"),
        ({"sure": 0.6, "plateau": 1.0, "classes": 2}, "label_noise"),
        ({"train": 0.99, "train_above_z": 4.0}, "label_noise"),
        ({"sure": math.nan, "plateau": math.nan, "random": 0.26, "random_ratio": 5.0}, "healthy"),
        ({"sure": math.nan, "plateau": math.nan, "random": 0.6, "random_ratio": 13.0}, "label_noise"),
        ({"late_fall": 0.7, "late_z": 4.7, "late_size": 0.05, "train": 0.8}, "healthy"),
        ({"train": 0.2, "last": 0.98}, "healthy"),
        ({"train": 0.2, "last": 1.0, "score_z": 1.0}, "overfitting"),
    ],
)
def test_a_hard_task_is_no_fault(changes: dict[str, Any], verdict: str) -> None:
    assert first(**(HARD | changes)) == verdict
