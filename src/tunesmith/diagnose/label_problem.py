"""Label or data problem: the text does not tell the label, or the two splits do not mean the same."""

from __future__ import annotations

import math

from tunesmith.diagnose.reading import Reading
from tunesmith.diagnose.thresholds import BEGUN_TO_MEMORISE, ENOUGH_STEPS, FEW_ROWS, MEMORISED, NEAR_CHANCE
from tunesmith.diagnose.verdict import make_finding
from tunesmith.findings import Finding

LOOK = (
    "read 20 training rows beside their labels (tunesmith inspect); check --text_column_names and --label_column_name"
)
SPLITS = "check that both splits come from the same source and use the same label ids (--label_names)"


def check_label_problem(reading: Reading) -> Finding | None:
    """A finding when a usual setup learns nothing, memorises without use, or scores below chance."""
    return _below_chance(reading) or _memorised_without_use(reading) or _nothing_to_learn(reading)


def _below_chance(reading: Reading) -> Finding | None:
    chance, score, seen = reading.chance_accuracy, float(reading.val_score[-1]), float(reading.train_score[-1])
    if chance is None or not (math.isfinite(score) and seen > chance):
        return None
    error = math.sqrt(chance * (1 - chance) / max(1, reading.rows))
    if score >= chance - 4 * error or seen - score < 0.3:
        return None
    evidence = (
        f"accuracy is {seen:.3f} on training rows and {score:.3f} on validation rows, below the {chance:.3f} of chance"
    )
    return make_finding(reading, "data_problem", evidence, [SPLITS, LOOK], confidence=0.9, severity="error")


def _memorised_without_use(reading: Reading) -> Finding | None:
    train, loss, chance = float(reading.train_loss[-1]), float(reading.val_loss.min()), reading.chance_loss
    enough = reading.curves.train_rows >= FEW_ROWS
    # While validation loss does not come down, less of a fall in training says the same; but where only the head learns, or
    # hardly anything does, that is the reason at hand (measured: granite with a frozen encoder on 320 rows of MRPC).
    hampered = reading.frozen or reading.rate_is("low")
    limit = 2 * MEMORISED if hampered or reading.best == len(reading) - 1 else BEGUN_TO_MEMORISE
    if not enough or train > limit * chance or loss < 0.97 * chance or reading.at_chance() is False:
        return None
    evidence = (
        f"train loss fell to {train:.2f} but validation loss was never below {loss:.2f} (chance: {chance:.2f}): "
        "what was learnt does not carry over to new rows"
    )
    return make_finding(reading, "data_problem", evidence, [LOOK, SPLITS], confidence=0.85, severity="error")


def _nothing_to_learn(reading: Reading) -> Finding | None:
    train, chance = float(reading.train_loss[-1]), reading.chance_loss
    usual = reading.rate_is("usual") and not reading.frozen and reading.step[-1] >= ENOUGH_STEPS
    if not usual or train < NEAR_CHANCE * chance or reading.at_chance() is False:
        return None
    evidence = (
        f"after {reading.step[-1]} steps at a usual rate ({reading.rate:g}) train loss is {train:.2f}, chance is {chance:.2f}: "
        "the text tells nothing about the label"
    )
    return make_finding(reading, "data_problem", evidence, [LOOK, SPLITS], confidence=0.75, severity="error")
