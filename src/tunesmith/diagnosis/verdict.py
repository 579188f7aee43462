"""The verdict on a run: a fitted model weighs every cause, and the most likely one comes first.

`verdicts.json` contains the model, a multinomial logistic regression over the features of a run. bench/diagnose_fit.py fits it to
runs whose cause is known. Verdicts that are nearly as likely, and too few validation examples, are reported as well.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.diagnosis.reading import (
    HIGH_RATE,
    LEAST_CHANGE,
    LOW_RATE,
    USUAL_BATCH,
    USUAL_RATE,
    Features,
    Reading,
    gain_of_score,
    ignored_classes,
    needed_z,
    only_class,
    read_curves,
    read_features,
)
from tunesmith.events import Finding, Severity
from tunesmith.labels import Task
from tunesmith.metrics.calibration import LabelNoise
from tunesmith.runs.event_log import Curves, Floats

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
    return f"--learning_rate {rate:.2g}".replace("e-0", "e-")


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


INSPECT = "read some examples of the training data with their labels; check --text_column_names and --label_column_name"


def audit_command(reading: Reading) -> str:
    """Return the command that audits the files of this run."""
    files = [reading.option(name, "") for name in ("train_file", "validation_file")]
    names = " ".join(shlex.quote(str(file)) for file in files if file) or "FILE"
    return f"tunesmith audit {names} --review_file review.csv: lists suspected label errors and differences between the splits"


def own_split_flags(reading: Reading) -> str:
    """Return flags that take the validation examples from the training file, so that the two cannot differ."""
    if not reading.option("validation_file", None):
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
    others = "".join(f", {name} {value:.3f}" for name, value in reading.baselines)
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
    lower = min(reading.rate / 10, USUAL_RATE) if reading.rate >= HIGH_RATE else reading.rate / 5
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
    lower = min(reading.rate / 3, USUAL_RATE if reading.rate >= HIGH_RATE else math.inf)
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
    if reading.rows is not None and reading.rows.task is not Task.REGRESSION:
        last = reading.rows.validation[-1]
        over = np.abs(last.confidence).mean() - last.hits.mean()
        evidence += f"; its mean confidence exceeds its accuracy by {over:.3f}"
    return evidence, [*_lowest_loss(reading), "--label_smoothing_factor 0.1", *overfitting_advice(reading, at)[:1]]


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
    if reading.rate <= LOW_RATE:
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
    return evidence, [audit_command(reading), INSPECT, own_split_flags(reading)]


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
        INSPECT,
        "--label_smoothing_factor 0.1",
    ]


def _mismatch(reading: Reading, f: Features) -> tuple[str, list[str]]:
    fresh = ""
    if not math.isnan(f.fresh):
        fresh = (
            f"; in the first epoch the loss was {f.fresh * reading.chance_loss:.2f} on training examples not seen before, "
            f"and {f.first * reading.chance_loss:.2f} on validation examples"
        )
    if f.turned > 1:
        fresh += "; examples of one label are predicted as another label more often than the examples of that label"
    evidence = (
        f"{_losses(reading)}; {against_constant(reading)}{fresh}: labels have different meanings in the two splits"
    )
    return evidence, [audit_command(reading), own_split_flags(reading), INSPECT]


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

# --- the verdict ------------------------------------------------------------------------------------------------------

MODEL_FILE = Path(__file__).parent / "verdicts.json"
LOGARITHMIC = ("work", "rate", "train_rows", "classes")

MIN_EVALUATIONS = 3
"""Evaluations that a verdict needs if their examples are not stored."""
MIN_ROWS, ENOUGH_ROWS = 20, 150
"""Validation examples: with fewer than MIN_ROWS, one standard error of the accuracy is more than 10 points; with ENOUGH_ROWS,
half of the gain on training examples can't be distinguished from no gain."""
ABOVE_CONSTANT = 2.0
"""Standard errors by which a score must be above the constant baseline: a run at chance passes with a probability of 2.3%."""
SIGNAL = 1.6
"""Times the z that is significant at 1% over all comparisons: beyond it something was better than the constant baseline."""
LEARNED = 0.8
"""Validation loss, as a share of the constant baseline's loss, that no run without a signal reaches significantly."""
PROBE_SIGNAL = 4.0
"""`probe_z` of labels that can be predicted from the text: on all training examples, each excluded from its own fit."""
NOTABLE_RISE, LARGE_RISE = 0.2, 0.5
"""Rise of the validation loss above its lowest value while the train loss is near 0: a notable rise is reported, and is the
verdict if the run keeps its last weights; a large rise is always the verdict."""
NOTABLE_Z = 0.4
"""`rise_z` of such a rise. It need not be significant over all evaluations: memorized examples explain it."""
LATE_FALL = 0.3
"""Share of the gain that came in the second half of an unfinished run: the next steps bring more."""
SOLVED = 0.1
"""Loss, as a share of the constant baseline's loss, of examples that are solved."""
BARELY = 0.85
"""Loss, as a share of the constant baseline's loss, of a model that has only begun to learn."""
CLOSE, SURE = 0.15, 0.6
"""Probabilities from which a verdict is reported in addition to the first, and even with few validation examples."""
CERTAINTY = 0.95
"""Probability of a verdict that comes from a rule."""


@cache
def _model() -> dict[str, Any]:
    found = json.loads(MODEL_FILE.read_text(encoding="utf-8"))
    return {k: v if k in ("features", "verdicts") else np.array(v, np.float64) for k, v in found.items()}


def feature_values(features: Mapping[str, float], names: Sequence[str]) -> Floats:
    """Return the values of these features, some as logarithms; NaN if unknown."""
    return np.array([_value(name, features.get(name, math.nan)) for name in names])


def _value(name: str, value: float) -> float:
    if name in LOGARITHMIC:
        return math.log10(value) if value > 0 else math.nan
    return min(max(value, -99.0), 99.0)  # a NaN stays one


def columns_of(values: Floats, model: Mapping[str, Any]) -> Floats:
    """Return the inputs of the regression: each feature in standard deviations, the part of it above the median, whether it
    is not known (then both are 0), and 1."""
    known = ~np.isnan(values)
    inside = np.clip(values, model["low"], model["high"])
    line = np.where(known, (inside - model["mean"]) / model["spread"], 0.0)
    bend = np.where(known, np.maximum(inside - model["median"], 0.0) / model["spread"], 0.0)
    return np.concatenate([line, bend, ~known, np.ones((*values.shape[:-1], 1))], axis=-1)


def weigh_verdicts(f: Features, noise: LabelNoise | None = None) -> dict[str, float]:
    """Return verdict -> probability, the likeliest first; 0 for impossible verdicts."""
    model = _model()
    logits = columns_of(feature_values(f.named(), model["features"]), model) @ model["coefficients"]
    possible = [is_possible(code, f, noise) for code in model["verdicts"]]
    weights = np.where(possible, np.exp(logits - logits[possible].max()), 0.0)
    found = dict(zip(model["verdicts"], (weights / weights.sum()).tolist(), strict=True))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def is_possible(code: str, f: Features, noise: LabelNoise | None = None) -> bool:
    """Return whether a verdict is possible: `healthy` if the score is not above the constant baseline, `no_signal` if something
    was, `underfitting` if the training examples are memorized, `class_ignored` if every class is predicted, `label_noise` if
    few training labels are wrong."""
    if code == "healthy":
        return f.above > ABOVE_CONSTANT
    if code == "no_signal":
        learned = f.lowest < LEARNED and f.signal > 1
        return not (f.signal > SIGNAL or learned or f.probe_z > PROBE_SIGNAL)
    if code == "underfitting":
        return not f.train < 2 * SOLVED
    if code == "label_noise":
        return noise is None or not noise.is_clean
    return code != "class_ignored" or f.ignored > 0


def certain_verdict(first: str, f: Features, noise: LabelNoise | None = None) -> str | None:
    """Return a verdict that needs no fitted model, whatever it says first; None if there is none."""
    if noise is not None and noise.is_noisy and first not in ("diverged", "split_mismatch"):
        return "label_noise"
    if f.last < SOLVED and f.above > ABOVE_CONSTANT:
        return "healthy"
    if first == "diverged" and f.gain_z > ABOVE_CONSTANT < f.above and f.rise < LEAST_CHANGE:
        return "erratic"  # it has learned, and was still learning at the end
    if first not in ("healthy", "underfitting", "calibration_drift"):
        return None
    if (
        first == "healthy"
        and f.last > BARELY
        and f.late_z > 2.5
        and f.rise < LEAST_CHANGE
        and f.work < 1.5 * LITTLE_WORK
    ):
        return "stopped_too_early"
    # The validation loss of a regression need not rise: it stays flat.
    memorized = math.isnan(f.majority) and f.train < min(SOLVED, 0.2 * f.last) and not f.late_z > ABOVE_CONSTANT
    if memorized or (_rises(f) and f.rise > LARGE_RISE):
        return "overfitting"
    if _rises(f) and not f.keeps:
        return "overfitting" if f.score_fall_z > 1 else "calibration_drift"
    return None


def _rises(f: Features) -> bool:
    """Return whether the validation loss rose notably while the training examples were memorized."""
    rises = f.rise > NOTABLE_RISE and f.rise_z > NOTABLE_Z and f.rise * f.lowest > LEAST_CHANGE
    return rises and f.train < SOLVED


CODES = (*EXPLAIN, "still_learning", "not_enough_evidence")
SEVERITY: dict[str, Severity] = {
    "healthy": "info",
    "not_enough_evidence": "info",
    "still_learning": "info",
    "diverged": "error",
    "no_signal": "error",
    "label_noise": "error",
    "split_mismatch": "error",
}
CERTAIN = ("healthy", "diverged", "stopped_too_early", "still_learning")
"""Verdicts that rest on more than the validation score."""


def diagnose_curves(curves: Curves, config: Mapping[str, Any], **facts: Any) -> list[Finding]:
    """Return findings, first the verdict. `facts` are keywords of `read_curves`: `label_counts` or `num_labels` of the
    training examples, `constant_loss`: the loss of the constant baseline, `baselines`: scores of others (name -> metric ->
    score), `running`: whether the run has not ended.
    """
    return judge_reading(read_curves(curves, config, **facts))


def judge_reading(reading: Reading) -> list[Finding]:
    """Return findings about the readings of a run, the verdict first; never empty."""
    lost = _lost(reading)
    if lost is not None:
        return [lost]
    features = read_features(reading) if len(reading) and reading.chance_loss > 0 else None
    thin = _too_little(reading, features)
    if thin is not None:
        return [thin]
    assert features is not None
    return _verdict(reading, features)


def _verdict(reading: Reading, features: Features) -> list[Finding]:
    """Return the most likely cause, with those that are nearly as likely."""
    likely = weigh_verdicts(features, reading.label_noise)
    certain = certain_verdict(next(iter(likely)), features, reading.label_noise)
    if certain is None and _is_solved(reading) and features.above > ABOVE_CONSTANT:
        certain = "healthy"
    if certain is not None:
        likely = {certain: max(CERTAINTY, likely.get(certain, 0.0))}
    code, sure = next(iter(likely.items()))
    close = [(c, p) for c, p in list(likely.items())[1:3] if p >= CLOSE]
    evidence, advice = EXPLAIN[code](reading, features)
    if reading.running and not _is_over(reading) and _falls_late(code, features):
        run = reading.curves
        left = f"let it continue: step {run.last_step}" + (f" of {run.num_steps}" if run.num_steps else "")
        code, advice = "still_learning", [left]
    if _was_cut_short(reading) and features.late_fall > LATE_FALL and code in ("healthy", "underfitting"):
        code, (evidence, advice) = "stopped_too_early", EXPLAIN["stopped_too_early"](reading, features)
    if code == "healthy" and not reading.chance_known and reading.chance_score is None:
        evidence = f"the curves look good, but the score of the constant baseline is unknown: {evidence}"
        code, advice = (
            "not_enough_evidence",
            ["train with tunesmith, which stores class frequencies and predictions", *advice],
        )
    if code not in CERTAIN and sure < SURE and (unsure := cannot_tell(reading, features)) is not None:
        evidence, advice = unsure
        if sure >= 0.5:
            evidence += f". Otherwise most likely: {code.replace('_', ' ')}"
        code, close = "not_enough_evidence", []
    last = None if reading.rows is None else reading.rows.validation[-1 if reading.kept is None else reading.kept]
    only = None if last is None else only_class(last)
    if last is not None and only is not None:
        count, rows = int((last.predictions == only).sum()), len(last)
        of = f"all {rows}" if count == rows else f"{count} of {rows}"
        evidence = (
            f"the model predicts only one class, {reading.label_name(only)}, for {of} validation examples; {evidence}"
        )
        advice = one_class_advice(reading, code, advice)
    severity: Severity = SEVERITY.get(code, "warning")
    if severity == "error" and sure < SURE:
        severity = "warning"
    if code in ("overfitting", "calibration_drift") and not _harms(reading):
        severity = "info"
    numbers: dict[str, Any] = {"likelihoods": {c: round(p, 2) for c, p in likely.items() if p >= 0.03}}
    if reading.label_noise is not None and reading.label_noise.is_precise:
        numbers["label_noise"] = reading.label_noise.to_json()
    if close and code == next(iter(likely)):
        numbers["close"] = {c: round(p, 2) for c, p in close}
    found = [make_finding(code, evidence, advice, confidence=sure, severity=severity, **numbers)]
    return found + _remarks(reading, features, code)


def _is_solved(reading: Reading) -> bool:
    """Return whether nearly all predictions are right, however unsure the model still is."""
    if reading.rows is None or reading.rows.task is Task.REGRESSION:
        return False
    return bool(1 - reading.rows.scores[-1] < 0.5 * SOLVED * (1 - reading.rows.constant_score))


def _harms(reading: Reading) -> bool:
    """Return whether the run keeps its last weights, and their validation loss is notably above the lowest."""
    return reading.kept is None and bool(reading.val_loss[-1] > (1 + NOTABLE_RISE) * reading.val_loss.min())


def _falls_late(code: str, f: Features) -> bool:
    return code in ("stopped_too_early", "underfitting") or (code == "healthy" and f.late_fall > LATE_FALL)


def _is_over(reading: Reading) -> bool:
    return bool(reading.curves.num_steps) and reading.curves.last_step >= 0.9 * reading.curves.num_steps


def _was_cut_short(reading: Reading) -> bool:
    """Return whether a signal or an error ended the run early."""
    ended = reading.curves.ended not in ("completed", "early_stopping")
    return bool(reading.curves.num_steps) and ended and not reading.running and not _is_over(reading)


def _remarks(reading: Reading, features: Features, first: str) -> list[Finding]:
    """Return additional findings: a rise after the kept weights, and classes that are never predicted."""
    codes = []
    rises = (features.rise_z > 1 and features.rise > NOTABLE_RISE) or _rises(features)
    if first == "healthy" and rises and features.keeps:
        codes.append("overfitting" if features.rise > LARGE_RISE or features.score_fall_z > 1 else "calibration_drift")
    if reading.rows is not None and first in ("healthy", "overfitting", "calibration_drift") and features.ignored:
        codes.append("class_ignored")
    found = [(code, *EXPLAIN[code](reading, features)) for code in codes]
    return [make_finding(*parts, confidence=0.9, severity="info") for parts in found]


def _lost(reading: Reading) -> Finding | None:
    """Return the finding of a diverged training loss, which needs no evaluation."""
    evidence, confidence = _not_finite(reading) or _blown_up(reading) or ("", 0.0)
    if not evidence:
        return None
    return make_finding("diverged", evidence, diverged_advice(reading), confidence=confidence, severity="error")


def _not_finite(reading: Reading) -> tuple[str, float] | None:
    run = reading.curves
    if not run.non_finite or len(run.train_loss) == 0:
        return None
    tail = run.train_loss.value[-20:]
    if run.ended != "NumericsError" and np.isfinite(tail).mean() > 0.5:
        return None
    count = len(run.non_finite)
    more = f" ({count} such steps)" if count > 1 else ""
    return f"the loss or gradient was NaN or infinite at step {run.non_finite[0]}{more}", 0.99


def _blown_up(reading: Reading) -> tuple[str, float] | None:
    """Return whether the train loss rose again beyond its noise: means over a tenth of the steps are compared."""
    raw, chance = reading.curves.train_loss.finite(), reading.train_chance_loss
    # With fewer steps, one unlucky batch would decide.
    if len(raw) < 20 or not math.isfinite(chance):
        return None
    width = max(10, len(raw) // 10)
    parts = [raw.value[k : k + width] for k in range(0, len(raw) - width + 1, width)]
    parts[-1] = raw.value[-width:]
    means = [float(part.mean()) for part in parts]
    lowest, end = int(np.argmin(means)), means[-1]
    error = math.sqrt((float(parts[lowest].var(ddof=1)) + float(parts[-1].var(ddof=1))) / width)
    if end - means[lowest] <= needed_z(len(parts)) * error:
        return None
    low, at = means[lowest], int(raw.step[min(len(raw) - 1, lowest * width + width // 2)])
    if end >= 1.3 * chance and end >= 1.5 * low:
        return f"train loss rose from {low:.2f} (step {at}) to {end:.2f}; the constant baseline has {chance:.2f}", 0.95
    if low <= 0.8 * chance and end >= 0.93 * chance:
        return (
            f"train loss had reached {low:.2f} (step {at}) and rose back to {end:.2f}, the loss of the constant baseline",
            0.9,
        )
    return None


def _too_little(reading: Reading, features: Features | None) -> Finding | None:
    """Return a finding if there are too few evaluations or examples, or no baseline to compare with."""
    run, count = reading.curves, len(reading)
    needed = MIN_EVALUATIONS if reading.rows is None else 1
    evidence = ""
    if count < needed:
        evidence = f"{count} evaluation{'s' * (count != 1)} with a validation loss; a verdict needs {needed}"
        advice = [f"--eval_strategy steps --eval_steps {max(1, (run.num_steps or run.last_step) // 6)}"]
        if reading.running:  # what it will evaluate is not known yet
            advice.insert(0, f"wait: a verdict needs {needed - count} more evaluation{'s' * (needed - count != 1)}")
        elif not count:
            advice.append("--validation_split_fraction 0.1 (or --validation_file): there are no validation curves")
    elif reading.rows_evaluated < MIN_ROWS:
        rows = reading.rows_evaluated
        evidence = f"{rows} validation examples: one of them changes the score by {1 / max(1, rows):.0%}"
        advice = ["--validation_split_fraction 0.2"]
    elif reading.chance_loss <= 0:
        evidence = "a constant prediction is always right on the validation rows: there is nothing to learn"
        advice = ["add rows with other labels"]
    elif reading.regression and reading.rows is None and not reading.chance_known:
        evidence = f"validation loss is {reading.val_loss[-1]:.2f}; the loss of the constant baseline is unknown"
        advice = ["--metric_name pearson,mse,r2: they show whether the model is better than the mean"]
    if not evidence:
        return None
    return make_finding("not_enough_evidence", evidence, advice, confidence=0.9, severity="info")


def cannot_tell(reading: Reading, f: Features) -> tuple[str, list[str]] | None:
    """Return (evidence, advice) if the validation rows are too few: within two standard errors, their score may equal the
    constant baseline, or exceed it by half of the gain on training rows."""
    sample = None if reading.rows is None else reading.rows.train[-1]
    if reading.rows is None or sample is None or f.score_z > ABOVE_CONSTANT or reading.rows_evaluated >= ENOUGH_ROWS:
        return None
    gain, learned, rows = reading.rows.score_gain(), gain_of_score(sample), reading.rows_evaluated
    error = max(gain.error, 1 / max(1, rows))
    if not (learned.z > 3 or f.train < 0.5) or not gain.size + 2 * error >= learned.size / 2:
        return None
    needed = math.ceil(rows * (2.5 * error / max(gain.size, learned.size / 4, 0.02)) ** 2)
    evidence = (
        f"{against_constant(reading)}: {rows} validation examples are too few to tell whether the model is better"
    )
    advice = [f"hold out or label more validation examples: about {max(needed, 2 * rows)}"]
    if reading.option("validation_file", None) is None:
        advice.insert(0, "--folds 5: each example is evaluated once, by a model that was not trained on it")
    return evidence, advice
