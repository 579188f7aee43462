"""Not enough evidence: said instead of a guess."""

from __future__ import annotations

from tunesmith.diagnose.reading import Reading
from tunesmith.diagnose.thresholds import MIN_EVALUATIONS, MIN_ROWS
from tunesmith.diagnose.verdict import epochs_flag, make_finding, planned_epochs
from tunesmith.findings import Finding


def check_evidence(reading: Reading) -> Finding | None:
    """A finding when there are too few evaluations or too few rows in them."""
    run = reading.curves
    if len(reading) < MIN_EVALUATIONS:
        steps = max(1, (run.num_steps or run.last_step) // 6)
        advice = [f"--eval_strategy steps --eval_steps {steps}"]
        if not len(reading):
            advice.append("--validation_split_fraction 0.1 (or --validation_file): there are no validation curves")
        if reading.running:
            advice.insert(0, f"wait: {MIN_EVALUATIONS - len(reading)} more evaluations make a verdict")
        plural = "s" * (len(reading) != 1)
        evidence = f"{len(reading)} evaluation{plural} with a validation loss; a verdict needs {MIN_EVALUATIONS}"
        return _found(reading, evidence, advice)
    if reading.rows < MIN_ROWS:
        evidence = f"{reading.rows} validation rows; one row more or less right moves the score by {1 / max(1, reading.rows):.0%}"
        return _found(reading, evidence, ["--validation_split_fraction 0.2"])
    return None


def nothing_shown(reading: Reading) -> Finding:
    """The finding when no rule applies and yet the run is no better than chance."""
    low, chance = reading.val_loss.min(), reading.chance_loss
    evidence = f"no rule applies, but validation loss {low:.2f} is hardly below chance ({chance:.2f})"
    seed = int(reading.option("seed", 42)) + 1
    return _found(
        reading, evidence, [epochs_flag(2 * planned_epochs(reading)), f"--seed {seed}: does it say the same?"]
    )


def _found(reading: Reading, evidence: str, advice: list[str]) -> Finding:
    return make_finding(reading, "not_enough_evidence", evidence, advice, confidence=0.9, severity="info")
