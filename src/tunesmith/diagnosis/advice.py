"""The text of a verdict: one sentence of evidence with numbers, and up to three next actions with values."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tunesmith.diagnosis.features import LEAST_CHANGE, USUAL_BATCH, Features, ignored_classes
from tunesmith.diagnosis.reading import USUAL_RATE, Reading
from tunesmith.findings import Finding, Severity
from tunesmith.metrics.evidence import RowEvidence

USUAL_HEAD_RATE = 1e-3
"""Learning rate of a head on a frozen encoder."""
LITTLE_WORK, ENOUGH_WORK = 2e-3, 8e-3
"""Sums of the learning rates of all steps. Runs that had only begun had 7e-5 to 1.5e-3, those that learned 2e-3 and more."""
MOST_TIMES = 10
"""A run is not advised to train longer than this many times."""
SURE_AND_WRONG = 0.74
"""Accuracy on the quarter of validation examples with the highest confidence. With 40% wrong labels it was 0.44 to 0.64."""
TRAIN_ABOVE = 2.5
"""Standard errors by which training examples have a higher loss than validation examples. In good runs it is lower."""


def make_finding(
    code: str,
    evidence: str,
    advice: Sequence[str],
    *,
    confidence: float,
    severity: Severity = "warning",
    **numbers: Any,
) -> Finding:
    """Return a finding with one to three next actions."""
    actions = tuple(dict.fromkeys(advice))[:3]
    return Finding(code, severity, evidence, actions, round(min(max(confidence, 0.05), 0.99), 2), numbers)


def rate_flag(rate: float) -> str:
    """Return `--learning_rate` with one or two digits."""
    exponent = math.floor(math.log10(rate))
    mantissa = round(rate / 10**exponent, 1)
    if mantissa >= 10:
        mantissa, exponent = 1.0, exponent + 1
    return f"--learning_rate {mantissa:g}e{exponent}"


def epochs_flag(reading: Reading, epochs: float) -> str:
    """Return `--num_train_epochs`, or `--max_steps` if the run sets that: it takes precedence."""
    if int(reading.option("max_steps", -1)) > 0:
        per_epoch = reading.curves.steps_per_epoch or 1
        return f"--max_steps {max(1, round(epochs * per_epoch))}"
    return f"--num_train_epochs {max(1.0, epochs):.3g}"


def planned_epochs(reading: Reading) -> float:
    """Return the planned number of epochs."""
    per_epoch = reading.curves.steps_per_epoch
    if per_epoch > 0 and reading.curves.num_steps:
        return reading.curves.num_steps / per_epoch
    return float(reading.option("num_train_epochs", 3.0))


def longer_flag(reading: Reading, rate: float | None = None) -> str:
    """Return a longer duration: twice as long, or as long as an encoder needs at this learning rate (or at `rate`)."""
    done = (rate or reading.rate) * max(1, int(reading.step[-1])) / 2
    times = max(1 if rate else 2, math.ceil(ENOUGH_WORK / done))
    return epochs_flag(reading, min(times, MOST_TIMES) * planned_epochs(reading))


def usual_flags(reading: Reading, rate: float) -> str:
    """Return this learning rate, a batch size of at least 8, and enough epochs for both."""
    batch = reading.effective_batch
    wider = max(1, math.ceil(USUAL_BATCH / 2 / batch))
    size = wider * int(reading.option("per_device_train_batch_size", 8))
    flags = [rate_flag(rate)] + [f"--per_device_train_batch_size {size}"] * (wider > 1)
    done = rate * max(1, int(reading.step[-1])) / wider / 2
    times = min(math.ceil(ENOUGH_WORK / done), MOST_TIMES)
    return " ".join(flags + [epochs_flag(reading, times * planned_epochs(reading))] * (times > 1))


def _file(reading: Reading, name: str) -> str | None:
    value = reading.option(name, None)
    return shlex.quote(value) if isinstance(value, str) else None


def audit_command(reading: Reading) -> str:
    """Return the command that audits the files of this run."""
    train, other = _file(reading, "train_file"), _file(reading, "validation_file")
    if train is None:
        return "tunesmith audit FILE: lists suspected label errors and differences between the splits"
    files = train if other is None else f"{train} {other}"
    return f"tunesmith audit {files} --review_file review.csv: lists suspected label errors and differences between the splits"


def inspect_command(reading: Reading) -> str:
    """Return advice to look at some examples."""
    file = _file(reading, "train_file")
    rows = "the training data" if file is None else file
    return f"read some examples of {rows} with their labels; check --text_column_names and --label_column_name"


def own_split_flags(reading: Reading) -> str:
    """Return flags that take the validation examples from the training file, so that the two cannot differ."""
    if _file(reading, "validation_file") is None:
        return "check that all examples come from one source and use the same label ids (--label_names)"
    return (
        "--validation_file '' --validation_split_fraction 0.1: if the score is good on this split, the two files differ"
    )


_FLAG = re.compile(r"--(\w+) (\S+)")


def advised_options(advice: str) -> dict[str, str | None]:
    """Return the options of one advice with their values (None: remove the option); {} if it names none."""
    if advice.startswith("remove --"):
        return {advice.removeprefix("remove --").split(":")[0].strip(): None}
    flags = advice.split(": ")[0].split(" (")[0]
    found = {name: value.strip("'") for name, value in _FLAG.findall(flags)}
    return found if advice.startswith("--") else {}


def against_constant(reading: Reading, at: int = -1) -> str:
    """Compare the score of an evaluation with the constant baseline and list other baselines."""
    others = "".join(f", {name} {value:.3f}" for name, value in reading.floors)
    if reading.rows is not None:
        gain = reading.rows.score_gain(at)
        name = {"regression": "Pearson's r", "multilabel": "micro F1"}.get(reading.rows.task.value, "accuracy")
        score, constant = float(reading.rows.scores[at]), reading.rows.constant_score
        return f"{name} {score:.3f} vs. constant baseline {constant:.3f} ({gain.size:+.3f} ± {1.96 * gain.error:.3f}){others}"
    score = reading.val_score[at]
    if not reading.metric or not math.isfinite(score):
        return f"the constant baseline has a loss of {reading.chance_loss:.2f}{others}"
    chance = reading.chance_score
    than = "" if chance is None else f" vs. constant baseline {chance[0]:.3f}"
    return f"{reading.metric} {abs(score):.3f}{than}{others}"


def _losses(reading: Reading) -> str:
    train, last = reading.train_loss[-1], reading.val_loss[-1]
    return f"after {reading.step[-1]} steps train loss is {train:.2f} and validation loss {last:.2f} ({_baseline(reading)})"


def _baseline(reading: Reading) -> str:
    return f"constant baseline: {reading.chance_loss:.2f}"


def _healthy(reading: Reading, f: Features) -> tuple[str, list[str]]:
    at, kept = reading.best, -1 if reading.kept is None else reading.kept
    ended = f" and ended at {reading.val_loss[-1]:.2f}" if at < len(reading) - 1 else ""
    reached = f"validation loss reached {reading.val_loss[at]:.2f} at step {reading.step[at]}{ended}"
    evidence = f"{against_constant(reading, kept)}; {reached} ({_baseline(reading)})"
    advice = []
    if f.late_fall > 0.4 and f.late_z > 2.5 and f.last > 0.3:
        evidence += (
            f"; {f.late_fall:.0%} of the gain came in the second half of the training, so it may improve further"
        )
        advice.append(f"{epochs_flag(reading, 2 * planned_epochs(reading))}: the loss was still falling")
    if reading.kept is None and at < len(reading) - 1:
        advice.append("--load_best_model_at_end true: the last weights are not the best ones")
    advice.append(f"--seed {int(reading.option('seed', 42)) + 1}: a second seed shows how much of the score is luck")
    return evidence, advice


def _diverged(reading: Reading, f: Features) -> tuple[str, list[str]]:
    same = "; every example gets the same prediction" if f.spread < 0.01 else ""
    evidence = (
        f"train loss is {reading.train_loss[-1]:.2f} after {reading.step[-1]} steps at a learning rate of {reading.rate:g}; "
        f"{_baseline(reading)}; {against_constant(reading)}{same}"
    )
    return evidence, diverged_advice(reading)


def diverged_advice(reading: Reading) -> list[str]:
    """Return a much lower learning rate, then options that stabilize the first steps."""
    lower = min(reading.rate / 10, USUAL_RATE) if reading.rate_is("high") else reading.rate / 5
    advice = [usual_flags(reading, lower) if len(reading) else rate_flag(lower)]
    if reading.option("fp16", False):
        advice.append("--bf16 true --fp16 false")
    return advice + _steadier(reading)


def _steadier(reading: Reading) -> list[str]:
    advice = [] if reading.option("warmup_steps", 0) else ["--warmup_steps 0.1"]
    return advice if 0 < float(reading.option("max_grad_norm", 1.0)) <= 1 else [*advice, "--max_grad_norm 1.0"]


def _erratic(reading: Reading, f: Features) -> tuple[str, list[str]]:
    low, high = float(reading.val_loss.min()), float(reading.val_loss.max())
    batch = reading.effective_batch
    evidence = f"validation loss moved between {low:.2f} and {high:.2f} ({_baseline(reading)})"
    if f.swings:
        evidence = f"validation loss rose and fell back {f.swings} time{'s' * (f.swings > 1)}, between {low:.2f} and {high:.2f}"
    evidence += (
        f"; the loss of single steps varies by {f.step_noise * reading.chance_loss:.2f} (effective batch {batch}, learning rate "
        f"{reading.rate:g}); "
        f"{against_constant(reading)}"
    )
    lower = min(reading.rate / 3, USUAL_RATE if reading.rate_is("high") else math.inf)
    advice = [usual_flags(reading, min(reading.rate, USUAL_RATE) if batch < USUAL_BATCH / 2 else lower)]
    if batch < USUAL_BATCH:
        steps = int(reading.option("gradient_accumulation_steps", 1)) * math.ceil(USUAL_BATCH / batch)
        advice.append(f"--gradient_accumulation_steps {steps}")
    return evidence, advice + _steadier(reading)


def _overfitting(reading: Reading, f: Features) -> tuple[str, list[str]]:
    at, loss, train = reading.best, reading.val_loss, reading.train_loss
    if at < len(reading) - 1 and f.rise > LEAST_CHANGE:
        evidence = (
            f"validation loss rose {loss[at]:.2f} to {loss[-1]:.2f} after step {reading.step[at]} "
            f"while train loss fell {train[at]:.2f} to {train[-1]:.2f}"
        )
    else:
        evidence = f"train loss is {train[-1]:.2f}, validation loss {loss[-1]:.2f} ({_baseline(reading)})"
        if f.train < 0.2 * f.last:
            evidence = f"the training examples are memorized: {evidence}"
    if reading.kept is not None:
        evidence += f"; the run keeps the weights of step {reading.step[reading.kept]}"
    return evidence, overfitting_advice(reading, at)


def overfitting_advice(reading: Reading, at: int) -> list[str]:
    """Return advice: keep the best weights, label more examples, save the later epochs.

    If the best weights are kept, neither early stopping, fewer epochs nor weight decay raised the score.
    """
    rows, epochs = reading.curves.train_rows, math.ceil(float(reading.epoch[max(at, reading.kept or 0)]))
    more = f"label more examples: there are {rows:,} training examples" if rows else "label more examples"
    shorter = [f"{epochs_flag(reading, epochs)}: saves the later epochs"] if epochs < planned_epochs(reading) else []
    if reading.kept is None:
        return ["--early_stopping_patience 2 --load_best_model_at_end true", more, *shorter]
    return [more, *shorter, *_lowest_loss(reading)]


def _drift(reading: Reading, f: Features) -> tuple[str, list[str]]:
    at, loss = reading.best, reading.val_loss
    rose = f"validation loss rose {loss[at]:.2f} to {loss[-1]:.2f} after step {reading.step[at]}"
    evidence = f"{rose} while the score stayed the same"
    if reading.rows is not None and math.isfinite(over := _overconfidence(reading.rows.validation[-1])):
        evidence += f"; its mean confidence exceeds its accuracy by {over:.3f}"
    return evidence, [*_lowest_loss(reading), "--label_smoothing_factor 0.1", *overfitting_advice(reading, at)[:1]]


def _overconfidence(rows: RowEvidence) -> float:
    """Return the mean confidence minus the accuracy; NaN without confidences."""
    return float(np.abs(rows.confidence).mean() - rows.hits.mean())


def _lowest_loss(reading: Reading) -> list[str]:
    """Return the missing options that keep the weights with the lowest loss."""
    flags = ["--load_best_model_at_end true"] if reading.kept is None else []
    flags += ["--metric_for_best_model loss"] if reading.curves.tracked_metric != "loss" else []
    return [f"{' '.join(flags)}: the score stays about the same and the probabilities improve"] if flags else []


def _underfitting(reading: Reading, f: Features) -> tuple[str, list[str]]:
    cause = underfitting_cause(reading, f)
    evidence = f"{_losses(reading)}; {against_constant(reading)}; {cause}"
    advice = []
    if reading.frozen:
        low = f"--freeze '' {rate_flag(USUAL_RATE)} {longer_flag(reading, USUAL_RATE)}" if reading.rate < 2e-5 else ""
        advice.append(f"{low or 'remove --freeze'}: this trains the whole encoder")
        if reading.rate < USUAL_HEAD_RATE:
            advice.append(f"or, with the encoder frozen, {rate_flag(USUAL_HEAD_RATE)}")
    elif reading.rate < 2e-5:
        advice.append(f"{rate_flag(USUAL_RATE)} {longer_flag(reading, USUAL_RATE)}")
    if float(reading.option("weight_decay", 0.0)) >= 1.0:
        advice.append("--weight_decay 0.01")
    return evidence, [*_resume(reading), *advice, longer_flag(reading)]


def underfitting_cause(reading: Reading, f: Features) -> str:
    """Return the setting that explains it."""
    if reading.frozen:
        return "the encoder is frozen"
    if reading.rate_is("low"):
        return f"a learning rate of {reading.rate:g} hardly changes the weights"
    if float(reading.option("weight_decay", 0.0)) >= 1.0:
        return f"weight_decay {reading.config['weight_decay']:g} pulls the weights back"
    if f.work < LITTLE_WORK:
        return f"{reading.step[-1]} steps are few at a learning rate of {reading.rate:g}"
    return "the settings are typical, so a larger model may be needed"


def _resume(reading: Reading) -> list[str]:
    run = reading.curves
    if run.num_steps and run.last_step < 0.9 * run.num_steps and run.ended not in ("completed", "early_stopping"):
        return [f"tunesmith resume: the run ended at step {run.last_step} of {run.num_steps}"]
    return []


def _stopped(reading: Reading, f: Features) -> tuple[str, list[str]]:
    loss, train, before = reading.val_loss, reading.train_loss, max(0, len(reading) - 2)
    evidence = (
        f"validation loss still fell {loss[before]:.2f} to {loss[-1]:.2f} between steps {reading.step[before]} and "
        f"{reading.step[-1]}, and train loss {train[before]:.2f} to {train[-1]:.2f}; {f.late_fall:.0%} of the gain came in the "
        f"second half of the training (by summed learning rates); {against_constant(reading)}"
    )
    advice = [*_resume(reading), longer_flag(reading)]
    if reading.rate < 2e-5 and not reading.frozen:
        advice.insert(-1, f"{rate_flag(USUAL_RATE)} {longer_flag(reading, USUAL_RATE)}")
    return evidence, advice


def _no_signal(reading: Reading, f: Features) -> tuple[str, list[str]]:
    evidence = (
        f"validation loss was never below {reading.val_loss.min():.2f} ({_baseline(reading)}) in "
        f"{reading.step[-1]} steps at a typical learning rate ({reading.rate:g}), "
        f"and train loss is {reading.train_loss[-1]:.2f}; "
        f"{against_constant(reading)}: the texts do not predict the labels"
    )
    return evidence, [audit_command(reading), inspect_command(reading), own_split_flags(reading)]


def _label_noise(reading: Reading, f: Features) -> tuple[str, list[str]]:
    signs = []
    if f.sure < SURE_AND_WRONG:
        signs.append(f"only {f.sure:.0%} of the quarter of validation examples with the highest confidence are right")
    if f.train_above_z > TRAIN_ABOVE:
        signs.append(
            f"the loss of training examples exceeds that of validation examples by {f.train_above_z:.1f} standard errors"
        )
    noise = reading.label_noise
    if noise is not None and noise.is_noisy:
        signs.insert(0, f"a linear probe estimates that {noise.text()} are wrong")
    evidence = "; ".join([*signs[:1], _losses(reading), against_constant(reading), *signs[1:]])
    return f"{evidence}: many labels look wrong", [
        audit_command(reading),
        inspect_command(reading),
        "--label_smoothing_factor 0.1",
    ]


def _mismatch(reading: Reading, f: Features) -> tuple[str, list[str]]:
    fresh = (
        ""
        if math.isnan(f.fresh)
        else (
            f"; in the first epoch the loss was {f.fresh * reading.chance_loss:.2f} on training examples not seen before, "
            f"and {f.first * reading.chance_loss:.2f} on validation examples"
        )
    )
    if f.turned > 1:
        fresh += "; examples of one label are predicted as another label more often than the examples of that label"
    evidence = (
        f"{_losses(reading)}; {against_constant(reading)}{fresh}: labels have different meanings in the two splits"
    )
    return evidence, [audit_command(reading), own_split_flags(reading), inspect_command(reading)]


def one_class_advice(reading: Reading, code: str, advice: list[str]) -> list[str]:
    """Return the advice of a run that predicts only one class."""
    if code in ("diverged", "label_noise", "split_mismatch", "not_enough_evidence"):
        return advice
    balanced = "--class_weights balanced: the other classes count as much as the most frequent one"
    return [*advice[:2], balanced] if code == "underfitting" else [longer_flag(reading), balanced, *advice]


def _ignored(reading: Reading, f: Features) -> tuple[str, list[str]]:
    assert reading.rows is not None
    classes = ignored_classes(reading.rows.validation[-1])
    verb, shares = "is" if len(classes) == 1 else "are", reading.rows.validation[-1].constant.values
    names = ", ".join(
        f"{reading.label_name(k)} ({count} examples, {shares[k]:.1%} of the training examples)"
        for k, count in classes[:4]
    )
    evidence = (
        f"{len(classes)} class{'es' * (len(classes) != 1)} with {f.ignored:.0%} of the validation examples "
        f"{verb} never predicted: {names}; {against_constant(reading)}"
    )
    weights = "--class_weights balanced: raises the macro F1, but may lower the accuracy"
    return evidence, [longer_flag(reading), weights, "label more examples of these classes"]


EXPLAIN: dict[str, Callable[[Reading, Features], tuple[str, list[str]]]] = {
    "healthy": _healthy,
    "diverged": _diverged,
    "erratic": _erratic,
    "overfitting": _overfitting,
    "calibration_drift": _drift,
    "underfitting": _underfitting,
    "stopped_too_early": _stopped,
    "no_signal": _no_signal,
    "label_noise": _label_noise,
    "split_mismatch": _mismatch,
    "class_ignored": _ignored,
}
"""Verdict -> the function that returns its evidence and advice."""
