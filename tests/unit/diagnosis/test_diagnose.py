"""Synthetic curves with a known cause get the matching verdict, with evidence and advice."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tunesmith.diagnosis.verdict import CODES, advised_options, diagnose_curves
from tunesmith.events import Evaluated, Finding, RowsEvaluated, StepDone
from tunesmith.labels import Task
from tunesmith.metrics.evidence import BestConstant, encode_rows, keep_rows
from tunesmith.runs.event_log import Curves, curves_from_events

MRPC = {"equivalent": 2474, "not_equivalent": 1194}
"""Chance: accuracy 0.675, loss 0.631."""


def verdict(synthetic: SimpleNamespace, config: dict[str, Any] | None = None, **run: Any) -> Finding:
    options = synthetic.CONFIG | (config or {})
    curves = curves_from_events(synthetic.make_run(**run, rate=options["learning_rate"]))
    return diagnose_curves(curves, options, label_counts=MRPC)[0]


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "three good epochs": (
        "healthy",
        {"train": [0.48, 0.32, 0.22], "validation": [0.44, 0.38, 0.39], "accuracy": [0.79, 0.84, 0.85]},
        {},
    ),
    "validation loss rises slightly at an equal score": (
        "healthy",
        {"train": [0.45, 0.25, 0.14], "validation": [0.41, 0.40, 0.46], "accuracy": [0.82, 0.86, 0.86]},
        {},
    ),
    "the textbook case": (
        "overfitting",
        {
            "train": [0.50, 0.30, 0.15, 0.10, 0.08],
            "validation": [0.45, 0.41, 0.47, 0.55, 0.63],
            "accuracy": [0.79, 0.84, 0.84, 0.83, 0.83],
        },
        {"load_best_model_at_end": False},
    ),
    "loss and score both got worse": (
        "overfitting",
        {
            "train": [0.4, 0.25, 0.18, 0.15],
            "validation": [0.42, 0.40, 0.45, 0.49],
            "accuracy": [0.82, 0.85, 0.82, 0.80],
        },
        {"load_best_model_at_end": False},
    ),
    "few rows memorized": (
        "overfitting",
        {
            "train": [0.5, 0.2, 0.04, 0.02],
            "validation": [0.64, 0.63, 0.66, 0.67],
            "accuracy": [0.68, 0.69, 0.69, 0.69],
            "train_accuracy": [0.8, 0.95, 1.0, 1.0],
            "train_rows": 73,
        },
        {},
    ),
    "learning rate a hundred times too low": (
        "underfitting",
        {"train": [0.64, 0.63, 0.62], "validation": [0.64, 0.63, 0.625], "accuracy": [0.675, 0.675, 0.675]},
        {"learning_rate": 5e-7},
    ),
    "frozen encoder": (
        "underfitting",
        {"train": [0.62, 0.60, 0.59], "validation": [0.62, 0.61, 0.60], "accuracy": [0.68, 0.69, 0.69]},
        {"freeze": ["encoder", "embeddings"]},
    ),
    "2% of the rows: few steps, both losses falling": (
        "underfitting",
        {
            "train": [0.61, 0.57, 0.54, 0.52],
            "validation": [0.66, 0.645, 0.635, 0.63],
            "accuracy": [0.675, 0.68, 0.70, 0.71],
            "steps_per_epoch": 7,
            "train_rows": 109,
        },
        {},
    ),
    "both losses still falling": (
        "stopped_too_early",
        {"train": [0.60, 0.52, 0.42], "validation": [0.59, 0.52, 0.44], "accuracy": [0.69, 0.74, 0.80]},
        {},
    ),
    "validation jumps": (
        "erratic",
        {
            "train": [0.5, 0.45, 0.42, 0.4, 0.38, 0.36],
            "validation": [0.45, 0.80, 0.44, 0.75, 0.42, 0.70],
            "accuracy": [0.8, 0.6, 0.81, 0.62, 0.82, 0.65],
        },
        {},
    ),
    "batch of one": (
        "erratic",
        {"train": [0.6, 0.5, 0.45], "validation": [0.55, 0.48, 0.46], "accuracy": [0.7, 0.77, 0.79], "noise": 1.2},
        {"per_device_train_batch_size": 1},
    ),
    "NaN loss": ("diverged", {"train": [0.5, 0.3], "validation": [0.5, 0.4], "nan_after": 130}, {}),
    "exploding loss": (
        "diverged",
        {"train": [0.6, 1.5, 2.5], "validation": [0.7, 2.0, 3.0], "accuracy": [0.6, 0.5, 0.5]},
        {"learning_rate": 2e-4},
    ),
    "one class at thirty times the learning rate": (
        "diverged",
        {"train": [0.66, 0.64, 0.635], "validation": [0.64, 0.635, 0.632], "accuracy": [0.675, 0.675, 0.675]},
        {"learning_rate": 1.5e-3},
    ),
    "learned, then collapsed": (
        "diverged",
        {"train": [0.35, 0.64, 0.64], "validation": [0.42, 0.64, 0.64], "accuracy": [0.83, 0.675, 0.675]},
        {},
    ),
    "shuffled labels, three epochs": (
        "no_signal",
        {"train": [0.64, 0.63, 0.62], "validation": [0.64, 0.64, 0.64], "accuracy": [0.675, 0.675, 0.67]},
        {},
    ),
    "shuffled labels memorized": (
        "no_signal",
        {
            "train": [0.63, 0.5, 0.2, 0.08],
            "validation": [0.64, 0.75, 1.2, 1.6],
            "accuracy": [0.675, 0.62, 0.58, 0.57],
            "train_accuracy": [0.68, 0.8, 0.95, 0.99],
        },
        {},
    ),
    "label ids swapped in the validation file": (
        "split_mismatch",
        {
            "train": [0.4, 0.3, 0.2],
            "validation": [1.2, 1.5, 2.0],
            "accuracy": [0.25, 0.2, 0.18],
            "train_accuracy": [0.85, 0.9, 0.95],
        },
        {},
    ),
    "ten validation rows": (
        "not_enough_evidence",
        {"train": [0.5, 0.3, 0.2], "validation": [0.5, 0.4, 0.5], "n": 10},
        {},
    ),
}


@pytest.mark.parametrize(("expected", "run", "config"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("seed", [0, 1])
def test_verdict_matches_the_known_cause(
    synthetic: SimpleNamespace, expected: str, run: dict[str, Any], config: dict[str, Any], seed: int
) -> None:
    found = verdict(synthetic, config, seed=seed, **run)
    assert found.code == expected, found
    assert found.code in CODES
    assert re.search(r"\d", found.evidence), "evidence has numbers"
    assert 1 <= len(found.advice) <= 3
    assert found.confidence is not None
    assert 0 < found.confidence < 1
    assert found.severity != "error" or found.confidence >= 0.6, "an uncertain verdict is not an error"
    assert Finding.from_json(found.to_json()) == found


def test_overfitting_verdict_has_numbers_and_advice(synthetic: SimpleNamespace) -> None:
    found = verdict(synthetic, {"load_best_model_at_end": False}, **CASES["the textbook case"][1])
    rose = "validation loss rose 0.41 to 0.63 after step 200 while train loss fell 0.30 to 0.08"
    assert found.evidence == rose
    assert (found.code, found.severity) == ("overfitting", "warning")
    assert found.advice[0] == "--early_stopping_patience 2 --load_best_model_at_end true"


RISES = {
    "400 examples, train accuracy 1.00": {
        "train": [0.30, 0.06, 0.02, 0.01],
        "validation": [0.36, 0.34, 0.45, 0.55],
        "accuracy": [0.85, 0.87, 0.87, 0.86],
        "train_accuracy": [0.90, 0.99, 1.0, 1.0],
        "train_rows": 360,
        "n": 40,
    },
    "200 examples, few steps": {
        "train": [0.50, 0.20, 0.05, 0.02],
        "validation": [0.45, 0.34, 0.44, 0.55],
        "accuracy": [0.80, 0.90, 0.85, 0.85],
        "train_accuracy": [0.80, 0.95, 1.0, 1.0],
        "train_rows": 180,
        "steps_per_epoch": 22,
        "n": 40,
    },
    "loss nearly doubles": {
        "train": [0.30, 0.10, 0.02],
        "validation": [0.42, 0.55, 0.80],
        "accuracy": [0.82, 0.83, 0.81],
    },
}


@pytest.mark.parametrize("run", RISES.values(), ids=RISES.keys())
def test_rising_loss_with_memorized_examples_is_overfitting(synthetic: SimpleNamespace, run: dict[str, Any]) -> None:
    """It is a note if the run keeps its best weights, and a warning if it keeps the last ones."""
    curves = curves_from_events(synthetic.make_run(**run))
    for kept, severity in ((True, "info"), (False, "warning")):
        found = diagnose_curves(curves, synthetic.CONFIG | {"load_best_model_at_end": kept}, label_counts=MRPC)[0]
        assert (found.code, found.severity) == ("overfitting", severity)
        assert "; the run keeps the weights of step" in found.evidence or not kept
        assert found.advice[0].startswith("label more examples" if kept else "--early_stopping_patience 2")


def test_small_rise_after_kept_weights_is_a_note(synthetic: SimpleNamespace) -> None:
    curves = curves_from_events(synthetic.make_run(**CASES["the textbook case"][1]))
    first, remark = diagnose_curves(curves, synthetic.CONFIG, label_counts=MRPC)
    assert (first.code, first.severity) == ("healthy", "info")
    assert (remark.code, remark.severity) == ("overfitting", "info")
    assert remark.evidence.endswith("; the run keeps the weights of step 200")


def test_rise_is_overfitting_if_last_weights_are_kept(synthetic: SimpleNamespace) -> None:
    """240 reviews for 10 epochs: the score stays at 0.82 while the loss rises by 45% and train accuracy is 1.00."""
    train, validation = [0.53, 0.27, 0.1, 0.03, 0.01, 0.005], [0.58, 0.42, 0.39, 0.44, 0.53, 0.57]
    scores = [0.66, 0.82, 0.81, 0.825, 0.82, 0.82]
    curves = curves_from_events(synthetic.make_run(train, validation, accuracy=scores, train_rows=240, n=160))
    last = diagnose_curves(curves, synthetic.CONFIG | {"load_best_model_at_end": False}, label_counts=MRPC)[0]
    assert last.code in ("overfitting", "calibration_drift")
    assert last.severity == "warning"
    first, remark = diagnose_curves(curves, synthetic.CONFIG, label_counts=MRPC)
    assert (first.code, remark.code) == ("healthy", "calibration_drift")
    assert first.evidence.startswith("accuracy 0.825 vs. constant baseline 0.674"), "the score of the kept weights"


def test_memorized_regression_with_flat_loss_is_overfitting(synthetic: SimpleNamespace) -> None:
    train, validation = [0.5 * 0.7**k for k in range(20)], [0.6, *[0.5] * 19]
    events = synthetic.make_run(train, validation, accuracy=[0.6, *[0.72] * 19], metric="pearson", train_rows=240)
    config = synthetic.CONFIG | {"load_best_model_at_end": False}
    found = diagnose_curves(curves_from_events(events), config, constant_loss=1.0)[0]
    assert (found.code, found.severity) == ("overfitting", "info")
    assert found.evidence.startswith("the training examples are memorized: train loss is 0.00, validation loss 0.50")


def row_run(
    synthetic: SimpleNamespace,
    logits: np.ndarray | list[np.ndarray],
    labels: np.ndarray,
    losses: list[float],
    **run: Any,
) -> Curves:
    """Return a run with these predictions, the same at each evaluation unless `logits` is a list."""
    constant = BestConstant.of(Task.BINARY, labels, 2)
    predictions = iter(logits if isinstance(logits, list) else [logits] * 2 * len(losses))
    events = []
    for event in synthetic.make_run(losses, losses, n=len(labels), **run):
        events.append(event)
        if isinstance(event, Evaluated):
            kept = keep_rows(constant, next(predictions), labels)
            assert kept is not None
            events.append(RowsEvaluated(event.step, event.split, encode_rows(kept)))
    return curves_from_events(events)


@pytest.mark.parametrize("rate", [1e-6, 5e-5, 1e-2])
def test_first_line_reports_single_predicted_class(synthetic: SimpleNamespace, rate: float) -> None:
    draw = np.random.default_rng(0)
    labels = (draw.random(200) < 0.3).astype(np.int64)
    logits = np.stack([np.full(200, 1.0), draw.normal(0, 0.1, 200)], axis=1)
    curves = row_run(synthetic, logits, labels, [0.65, 0.63, 0.62])
    found = diagnose_curves(curves, synthetic.CONFIG | {"learning_rate": rate}, label_names=("good", "bad"))[0]
    assert found.code != "healthy"
    assert found.evidence.startswith("the model predicts only one class, good, for all 200 validation examples; ")
    assert advised_options(found.advice[0]).keys() & {"num_train_epochs", "learning_rate"}


def test_first_line_reports_single_class_of_kept_weights(synthetic: SimpleNamespace) -> None:
    draw = np.random.default_rng(0)
    labels = (draw.random(200) < 0.3).astype(np.int64)
    one, both = np.stack([np.full(200, 1.0), draw.normal(0, 0.1, 200)], axis=1), draw.normal(0, 1, (200, 2))
    one[:5, 1] = 2
    curves = row_run(synthetic, [one] * 2 + [both] * 4, labels, [0.62, 0.63, 0.65], accuracy=[0.7, 0.5, 0.5])
    found = diagnose_curves(curves, synthetic.CONFIG, label_names=("good", "bad"))[0]
    assert found.evidence.startswith("the model predicts only one class, good, for 195 of 200 validation examples; ")
    last = diagnose_curves(curves, synthetic.CONFIG | {"load_best_model_at_end": False})[0]
    assert "only one class" not in last.evidence


def test_label_noise_verdict_follows_its_estimate(synthetic: SimpleNamespace) -> None:
    curves = curves_from_events(synthetic.make_run(**CASES["three good epochs"][1]))
    noise = {"share": 0.2, "low": 0.15, "high": 0.26, "n": 1000}
    found = diagnose_curves(curves, synthetic.CONFIG, label_counts=MRPC, label_noise=noise)[0]
    assert (found.code, found.severity) == ("label_noise", "error")
    estimate = "20% of the training labels (15% to 26%, n=1,000) are wrong"
    assert found.evidence.startswith(f"a linear probe estimates that {estimate}")
    assert found.numbers["label_noise"] == noise
    assert found.numbers["likelihoods"] == {"label_noise": 0.95}, "no other cause is shown as more likely"
    for other in ({**noise, "low": 0.0}, {"share": "many"}, None):
        assert diagnose_curves(curves, synthetic.CONFIG, label_counts=MRPC, label_noise=other)[0].code == "healthy"


def test_correct_but_unconfident_predictions_are_healthy(synthetic: SimpleNamespace) -> None:
    labels = np.tile([0, 0, 1], 50)
    curves = row_run(synthetic, 0.8 * np.eye(2)[labels], labels, [0.5, 0.4, 0.37])
    assert diagnose_curves(curves, synthetic.CONFIG)[0].code == "healthy"


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("last", [0.0, 0.01])
def test_solved_task_is_healthy(synthetic: SimpleNamespace, kept: bool, last: float) -> None:
    """In float32, the loss of a confident and correct prediction is 0."""
    run: dict[str, Any] = {"train": [0.1, 0.0, 0.0], "validation": [0.2, last, last], "accuracy": [0.95, 1.0, 1.0]}
    run |= {"steps_per_epoch": 10, "n": 30}
    curves = curves_from_events(synthetic.make_run(**run))
    found = diagnose_curves(curves, synthetic.CONFIG | {"load_best_model_at_end": kept}, label_counts=MRPC)
    assert found[0].code == "healthy"


def test_erratic_advice_never_raises_the_learning_rate(synthetic: SimpleNamespace) -> None:
    jumpy = verdict(synthetic, **CASES["validation jumps"][1])
    assert jumpy.advice[0] == "--learning_rate 1.7e-5 --num_train_epochs 12", "enough epochs at the lower rate"
    assert "--warmup_steps 0.1" in jumpy.advice
    single = verdict(synthetic, {"per_device_train_batch_size": 1}, **CASES["batch of one"][1])
    assert single.advice[0] == "--learning_rate 5e-5 --per_device_train_batch_size 8 --num_train_epochs 27"
    assert single.advice[1] == "--gradient_accumulation_steps 16"


def test_learning_rate_advice_moves_toward_usual_value(synthetic: SimpleNamespace) -> None:
    low = verdict(synthetic, {"learning_rate": 5e-7}, **CASES["learning rate a hundred times too low"][1])
    high = verdict(synthetic, {"learning_rate": 1.5e-3}, **CASES["one class at thirty times the learning rate"][1])
    assert low.advice[0] == "--learning_rate 5e-5 --num_train_epochs 6", "the usual learning rate and enough epochs"
    assert high.advice[0] == "--learning_rate 5e-5 --num_train_epochs 6"


def test_frozen_encoder_is_reported_as_the_reason(synthetic: SimpleNamespace) -> None:
    found = verdict(synthetic, {"freeze": ["encoder"]}, **CASES["frozen encoder"][1])
    assert "frozen" in found.evidence
    assert "--freeze" in found.advice[0]
    low = verdict(synthetic, {"freeze": ["encoder"], "learning_rate": 1e-6}, **CASES["frozen encoder"][1])
    assert advised_options(low.advice[0]).keys() == {"freeze", "learning_rate", "num_train_epochs"}, "all three"


def test_few_steps_lead_to_advice_for_more_epochs(synthetic: SimpleNamespace) -> None:
    found = verdict(synthetic, **CASES["2% of the rows: few steps, both losses falling"][1])
    assert found.advice[0] == "--num_train_epochs 40", "28 steps in 4 epochs: at most ten times as many"
    assert "28 steps are few" in found.evidence


def test_interrupted_run_is_advised_to_resume(synthetic: SimpleNamespace) -> None:
    run = CASES["both losses still falling"][1] | {"planned_epochs": 9, "ended": "SIGTERM"}
    assert "step 300 of 900" in verdict(synthetic, **run).advice[0]


def test_last_batch_of_very_short_run_is_no_divergence(synthetic: SimpleNamespace) -> None:
    events = synthetic.make_run(
        [0.60, 0.585, 0.57], [0.618, 0.616, 0.615], accuracy=[0.685, 0.685, 0.685], steps_per_epoch=5, train_rows=73
    )
    last = max(k for k, event in enumerate(events) if isinstance(event, StepDone))
    events[last] = replace(events[last], loss=1.4)
    assert diagnose_curves(curves_from_events(events), synthetic.CONFIG, label_counts=MRPC)[0].code == "underfitting"


def test_no_events_are_not_enough_evidence() -> None:
    (found,) = diagnose_curves(curves_from_events([]), {})
    assert found.code == "not_enough_evidence"


@pytest.mark.parametrize(
    ("advice", "options"),
    [
        ("--learning_rate 2e-5", {"learning_rate": "2e-5"}),
        (
            "--early_stopping_patience 2 --load_best_model_at_end true",
            {"early_stopping_patience": "2", "load_best_model_at_end": "true"},
        ),
        ("--seed 43: see whether the verdict stays the same", {"seed": "43"}),
        ("remove --freeze: this trains the whole encoder", {"freeze": None}),
        ("label more examples: there are 73 training examples", {}),
    ],
)
def test_advice_is_machine_readable(advice: str, options: dict[str, str | None]) -> None:
    assert advised_options(advice) == options


def test_running_run_is_still_learning_not_stopped_early(synthetic: SimpleNamespace) -> None:
    run = CASES["both losses still falling"][1] | {"planned_epochs": 9, "ended": None}
    curves = curves_from_events(synthetic.make_run(**run))
    (found,) = diagnose_curves(curves, synthetic.CONFIG, label_counts=MRPC, running=True)
    assert (found.code, found.severity, found.advice) == (
        "still_learning",
        "info",
        ("let it continue: step 300 of 900",),
    )
    assert diagnose_curves(curves, synthetic.CONFIG, label_counts=MRPC)[0].code == "stopped_too_early"


def test_run_that_just_started_is_advised_to_wait(synthetic: SimpleNamespace) -> None:
    curves = curves_from_events(synthetic.make_run([0.5], [0.5], planned_epochs=9, ended=None))
    (found,) = diagnose_curves(curves, synthetic.CONFIG, label_counts=MRPC, running=True)
    assert found.advice[0] == "wait: a verdict needs 2 more evaluations"
    not_yet = curves_from_events(synthetic.make_run([], [], planned_epochs=9, ended=None))
    (found,) = diagnose_curves(not_yet, synthetic.CONFIG, label_counts=MRPC, running=True)
    assert not any("validation_split_fraction" in advice for advice in found.advice), "a later evaluation is allowed"
    assert any(
        "validation_split_fraction" in a
        for a in diagnose_curves(not_yet, synthetic.CONFIG, label_counts=MRPC)[0].advice
    )


def test_fitted_head_is_not_taken_for_a_split_difference(synthetic: SimpleNamespace) -> None:
    """A lower training loss in the first epoch is no sign of different splits if the head was fitted to the training examples."""
    run = synthetic.make_run([0.22, 0.16, 0.12], [0.66, 0.70, 0.72], accuracy=[0.70, 0.70, 0.70], start=0.3)
    likely = []
    for start in ("off", "on"):
        config = synthetic.CONFIG | {"head_start": start}
        found = diagnose_curves(curves_from_events(run), config, label_counts=MRPC)[0]
        likely.append(found.numbers["likelihoods"].get("split_mismatch", 0.0))
    assert likely[0] > likely[1]


def test_advice_changes_max_steps_if_the_run_sets_it(synthetic: SimpleNamespace) -> None:
    """max_steps overrides num_train_epochs, so advice to change the epochs would have no effect."""
    curves = curves_from_events(synthetic.make_run(**CASES["both losses still falling"][1]))
    found = diagnose_curves(curves, synthetic.CONFIG | {"max_steps": curves.num_steps}, label_counts=MRPC)[0]
    options = [advised_options(advice) for advice in found.advice]
    assert not any("num_train_epochs" in one for one in options)
    assert next(int(one["max_steps"] or 0) for one in options if "max_steps" in one) >= 2 * curves.num_steps
