"""The probability of each verdict given the signs of a run: multinomial logistic regression.

`verdicts.json` holds the model; bench/diagnose_fit.py writes it from the signs of runs whose cause is known.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.diagnosis.advice import (
    against_constant,
    diverged_advice,
    epochs_flag,
    explain_verdict,
    longer_flag,
    make_finding,
    own_split_flags,
    rate_flag,
)
from tunesmith.diagnosis.features import (
    ABOVE_CONSTANT,
    CLOSE,
    ENOUGH_ROWS,
    ERROR_RATE,
    FAR_RISE,
    LARGE_RISE,
    LATE_FALL,
    LEAST_CHANGE,
    MIN_EVALUATIONS,
    MIN_ROWS,
    NOTABLE_RISE,
    SIGNAL,
    SURE,
    Features,
    Reading,
    gain_of_score,
    needed_z,
    read_curves,
    read_features,
)
from tunesmith.findings import Finding, Severity
from tunesmith.runs.curves import Curves, Floats

MODEL_FILE = Path(__file__).parent / "verdicts.json"
LOGARITHMIC = ("work", "rate", "train_rows", "classes")


@cache
def _model() -> dict[str, Any]:
    found = json.loads(MODEL_FILE.read_text(encoding="utf-8"))
    return {k: v if k in ("signs", "verdicts") else np.array(v, np.float64) for k, v in found.items()}


def sign_values(signs: Mapping[str, float], names: Sequence[str]) -> Floats:
    """The values of these signs, some as logarithms; NaN where one is not known."""
    return np.array([_value(name, signs.get(name, math.nan)) for name in names])


def _value(name: str, value: float) -> float:
    if name in LOGARITHMIC:
        return math.log10(value) if value > 0 else math.nan
    return min(max(value, -99.0), 99.0)  # a NaN stays one


def columns_of_signs(values: Floats, model: Mapping[str, Any]) -> Floats:
    """What the coefficients are multiplied by: each sign in standard deviations, the part of it above the median, whether it
    is not known (then both are 0), and 1."""
    known = ~np.isnan(values)
    inside = np.clip(values, model["low"], model["high"])
    line = np.where(known, (inside - model["mean"]) / model["spread"], 0.0)
    bend = np.where(known, np.maximum(inside - model["median"], 0.0) / model["spread"], 0.0)
    return np.concatenate([line, bend, ~known, np.ones((*values.shape[:-1], 1))], axis=-1)


def weigh_verdicts(f: Features) -> dict[str, float]:
    """Verdict -> probability, the likeliest first; 0 for what is not possible."""
    model = _model()
    logits = columns_of_signs(sign_values(f.named(), model["signs"]), model) @ model["coefficients"]
    possible = [is_possible(code, f) for code in model["verdicts"]]
    weights = np.where(possible, np.exp(logits - logits[possible].max()), 0.0)
    found = dict(zip(model["verdicts"], (weights / weights.sum()).tolist(), strict=True))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def is_possible(code: str, f: Features) -> bool:
    """Whether a verdict is not ruled out, whatever the other signs are: `healthy` where the score is not above the best constant
    beyond its error, `no_signal` where something was, `class_ignored` where every class is predicted."""
    if code == "healthy":
        return f.above > ABOVE_CONSTANT
    if code == "no_signal":
        return not f.signal > SIGNAL
    return code != "class_ignored" or f.ignored > 0


CODES = (
    "healthy",
    "overfitting",
    "calibration_drift",
    "underfitting",
    "erratic",
    "diverged",
    "stopped_too_early",
    "still_learning",
    "no_signal",
    "label_noise",
    "split_mismatch",
    "class_ignored",
    "not_enough_evidence",
)
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
"""Verdicts that do not rest on the validation score alone."""


def diagnose(
    curves: Curves,
    config: Mapping[str, Any],
    *,
    label_counts: Mapping[str, int] | None = None,
    num_labels: int | None = None,
    label_names: Sequence[str] = (),
    floor: float | None = None,
    floors: Mapping[str, Mapping[str, float]] | None = None,
    probe_rows: str | None = None,
    running: bool = False,
) -> list[Finding]:
    """Findings, the verdict first; never empty. `label_counts` are those of the training rows, `floor` the best constant's loss,
    `floors` the scores of simpler models (name -> metric -> score), `probe_rows` the probe's answers for training rows.

    The same curves up to an earlier step give what would have been said then: the live board calls this, too.
    `running`: the run has not ended, so that it may be `still_learning` and has not stopped too early.
    """
    return judge_reading(
        read_curves(
            curves,
            config,
            label_counts=label_counts,
            num_labels=num_labels,
            label_names=label_names,
            floor=floor,
            floors=floors,
            probe_rows=probe_rows,
            running=running,
        )
    )


def judge_reading(reading: Reading) -> list[Finding]:
    """Findings about what was read of a run, the verdict first; never empty."""
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
    """The most likely cause, with those that are nearly as likely and the experiment that would tell."""
    likely = weigh_verdicts(features)
    code, sure = next(iter(likely.items()))
    close = [(c, p) for c, p in list(likely.items())[1:3] if p >= CLOSE]
    if code == "healthy" and _has_overfitted(features):
        code, sure, close = "overfitting", 1 - ERROR_RATE, []
    evidence, advice = explain_verdict(code, reading, features)
    if close:
        telling = telling_experiment(code, close[0][0], reading)
        same = telling.split(": ")[0]
        advice = [*(line for k, line in enumerate(advice[:2]) if k == 0 or line.split(": ")[0] != same), telling]
    if reading.running and not _is_over(reading) and _falls_late(code, features):
        run = reading.curves
        left = f"let it continue: step {run.last_step}" + (f" of {run.num_steps}" if run.num_steps else "")
        code, advice = "still_learning", [left]
    if _was_cut_short(reading) and features.late_fall > LATE_FALL and code in ("healthy", "underfitting"):
        code, (evidence, advice) = "stopped_too_early", explain_verdict("stopped_too_early", reading, features)
    if code == "healthy" and not reading.chance_known and reading.chance_score is None:
        evidence = f"nothing is wrong with the curves, but what the best constant scores is not known: {evidence}"
        code, advice = (
            "not_enough_evidence",
            ["train with tunesmith, which keeps the class shares and the rows", *advice],
        )
    if code not in CERTAIN and sure < SURE and (unsure := cannot_tell(reading, features)) is not None:
        evidence, advice = f"{unsure[0]}. Most likely otherwise: {code.replace('_', ' ')}", unsure[1]
        code, close = "not_enough_evidence", []
    severity: Severity = SEVERITY.get(code, "warning")
    if code in ("overfitting", "calibration_drift") and not _harms(reading):
        severity = "info"
    numbers: dict[str, Any] = {"likelihoods": {c: round(p, 2) for c, p in likely.items() if p >= 0.03}}
    if close and code == next(iter(likely)):
        numbers["close"] = {c: round(p, 2) for c, p in close}
    if code == "overfitting":
        numbers["lowest_loss_step"] = int(reading.step[reading.best])
    found = [make_finding(reading, code, evidence, advice, confidence=sure, severity=severity, **numbers)]
    return found + _remarks(reading, features, code)


def _harms(reading: Reading) -> bool:
    """Whether the weights that the run keeps have a far higher validation loss than its best ones."""
    kept = reading.kept
    return kept is None or bool(reading.val_loss[kept] > (1 + LARGE_RISE) * reading.val_loss.min())


def _has_overfitted(f: Features) -> bool:
    """Whether a run that keeps better weights went far beyond them: training rows are memorised, validation rows cost more."""
    return (
        f.keeps and f.train < 0.5 * f.last and f.rise > FAR_RISE and f.rise_z > 1 and f.rise * f.lowest > LEAST_CHANGE
    )


def _falls_late(code: str, f: Features) -> bool:
    return code in ("stopped_too_early", "underfitting") or (code == "healthy" and f.late_fall > LATE_FALL)


def _is_over(reading: Reading) -> bool:
    return bool(reading.curves.num_steps) and reading.curves.last_step >= 0.9 * reading.curves.num_steps


def _was_cut_short(reading: Reading) -> bool:
    """Whether the run ended before its plan, by a signal or an error."""
    ended = reading.curves.ended not in ("completed", "early_stopping")
    return bool(reading.curves.num_steps) and ended and not reading.running and not _is_over(reading)


def _remarks(reading: Reading, features: Features, first: str) -> list[Finding]:
    """What is true beside the verdict: a rise after the weights that a run keeps, and classes that are never predicted."""
    codes = []
    if first == "healthy" and features.rise_z > 1 and features.rise > NOTABLE_RISE and features.keeps:
        codes.append("overfitting" if features.rise > LARGE_RISE or features.score_fall_z > 1 else "calibration_drift")
    if reading.rows is not None and first in ("healthy", "overfitting", "calibration_drift") and features.ignored:
        codes.append("class_ignored")
    found = [(code, *explain_verdict(code, reading, features)) for code in codes]
    return [make_finding(reading, *parts, confidence=0.9, severity="info") for parts in found]


def _lost(reading: Reading) -> Finding | None:
    """Diverged in the training loss itself. Needs no evaluation."""
    evidence, confidence = _not_finite(reading) or _blown_up(reading) or ("", 0.0)
    if not evidence:
        return None
    return make_finding(
        reading, "diverged", evidence, diverged_advice(reading), confidence=confidence, severity="error"
    )


def _not_finite(reading: Reading) -> tuple[str, float] | None:
    run = reading.curves
    if not run.non_finite or len(run.train_loss) == 0:
        return None
    tail = run.train_loss.value[-20:]
    if run.ended != "NumericsError" and np.isfinite(tail).mean() > 0.5:
        return None
    count = len(run.non_finite)
    more = f" ({count} such steps)" if count > 1 else ""
    return f"loss or gradient was not finite at step {run.non_finite[0]}{more}", 0.99


def _blown_up(reading: Reading) -> tuple[str, float] | None:
    """The loss of single steps rose again beyond their scatter: means of a tenth of the steps are compared."""
    raw, chance = reading.curves.train_loss.finite(), reading.train_chance_loss
    # Fewer steps are no curve: the last of 15 steps on 73 rows was one unlucky batch (granite on MRPC).
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
        return f"train loss rose from {low:.2f} (step {at}) to {end:.2f}; the best constant has {chance:.2f}", 0.95
    if low <= 0.8 * chance and end >= 0.93 * chance:
        return (
            f"train loss had reached {low:.2f} (step {at}) and rose back to {end:.2f}, the loss of the best constant",
            0.9,
        )
    return None


def _too_little(reading: Reading, features: Features | None) -> Finding | None:
    """A finding when there are too few evaluations, too few rows in them, or no constant to compare with."""
    run, count = reading.curves, len(reading)
    needed = MIN_EVALUATIONS if reading.rows is None else 1
    evidence = ""
    if count < needed:
        evidence = f"{count} evaluation{'s' * (count != 1)} with a validation loss; a verdict needs {needed}"
        advice = [f"--eval_strategy steps --eval_steps {max(1, (run.num_steps or run.last_step) // 6)}"]
        if reading.running:  # what it will evaluate is not known yet
            advice.insert(0, f"wait: {needed - count} more evaluation{'s' * (needed - count != 1)} make a verdict")
        elif not count:
            advice.append("--validation_split_fraction 0.1 (or --validation_file): there are no validation curves")
    elif reading.rows_evaluated < MIN_ROWS:
        rows = reading.rows_evaluated
        evidence = f"{rows} validation rows; one row more or less moves the score by {1 / max(1, rows):.0%}"
        advice = ["--validation_split_fraction 0.2"]
    elif reading.chance_loss <= 0:
        evidence = "a constant prediction is always right on the validation rows: there is nothing to learn"
        advice = ["add rows with other labels"]
    elif reading.regression and reading.rows is None and not reading.chance_known:
        evidence = f"validation loss is {reading.val_loss[-1]:.2f}; what the mean of the labels would cost is not known"
        advice = ["--metric_name pearson,mse,r2: they show whether the model learned more than the mean"]
    if not evidence:
        return None
    return make_finding(reading, "not_enough_evidence", evidence, advice, confidence=0.9, severity="info")


def cannot_tell(reading: Reading, f: Features) -> tuple[str, list[str]] | None:
    """(evidence, advice) where the validation rows are too few: their score may be that of the constant, and it may be above it
    by half of what was learnt of the training rows. Both are within two standard errors."""
    sample = None if reading.rows is None else reading.rows.train[-1]
    if reading.rows is None or sample is None or f.score_z > ABOVE_CONSTANT or reading.rows_evaluated >= ENOUGH_ROWS:
        return None
    gain, learnt, rows = reading.rows.score_gain(), gain_of_score(sample), reading.rows_evaluated
    error = max(gain.error, 1 / max(1, rows))
    if not (learnt.z > 3 or f.train < 0.5) or not gain.size + 2 * error >= learnt.size / 2:
        return None
    needed = math.ceil(rows * (2.5 * error / max(gain.size, learnt.size / 4, 0.02)) ** 2)
    evidence = (
        f"{against_constant(reading)}: {rows} validation rows are too few to tell whether the model is better than it"
    )
    advice = [f"hold out or label more validation rows: about {max(needed, 2 * rows)}"]
    if reading.option("validation_file", None) is None:
        advice.insert(0, "--folds 5: each row is evaluated once, by a model that was not trained on it")
    return evidence, advice


def telling_experiment(one: str, other: str, reading: Reading) -> str:
    """The one cheap run that would tell two verdicts apart."""
    pair = {one, other}
    if "healthy" in pair and pair & {"stopped_too_early", "underfitting"}:
        return f"{longer_flag(reading)}: if the score rises, the run had stopped too early"
    longer, seed = longer_flag(reading), int(reading.option("seed", 42)) + 1
    if pair <= {"underfitting", "stopped_too_early", "no_signal", "label_noise", "class_ignored"}:
        return f"{longer}: if train loss falls and validation loss does not, the labels are the cause"
    if "split_mismatch" in pair:
        return own_split_flags(reading)
    if pair & {"diverged", "erratic"}:
        return f"{rate_flag(reading.rate / 10)}: if the curve is smooth then, the learning rate was the cause"
    if "overfitting" in pair or "calibration_drift" in pair:
        best = max(1.0, float(np.ceil(reading.epoch[reading.best])))
        return f"{epochs_flag(best)}: if the score is as good, the later epochs only memorised the training rows"
    return f"--seed {seed}: see whether the verdict stays the same"
