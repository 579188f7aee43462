"""What cannot be told: verdicts that are nearly as likely, with the run that would tell, and too few validation rows."""

from __future__ import annotations

import math

import numpy as np

from tunesmith.diagnose.evidence import Reading
from tunesmith.diagnose.features import Features
from tunesmith.diagnose.signs import gain_of_score
from tunesmith.diagnose.thresholds import ABOVE_CONSTANT
from tunesmith.diagnose.verdict import epochs_flag, longer_flag, own_split_flags, rate_flag
from tunesmith.diagnose.wording import against_constant


def cannot_tell(reading: Reading, f: Features) -> tuple[str, list[str]] | None:
    """(evidence, advice) where the validation rows are too few: their score may be that of the constant, and it may be above it
    by half of what was learnt of the training rows. Both are within two standard errors."""
    sample = None if reading.rows is None else reading.rows.train[-1]
    if reading.rows is None or sample is None or f.above > ABOVE_CONSTANT:
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
