"""How a rule writes its finding: numbers in the evidence, values in the advice."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from typing import Any

from tunesmith.diagnosis.evidence import Reading
from tunesmith.diagnosis.thresholds import ENOUGH_WORK, MOST_TIMES, USUAL_BATCH
from tunesmith.findings import Finding, Severity


def make_finding(
    reading: Reading,
    code: str,
    evidence: str,
    advice: Sequence[str],
    *,
    confidence: float,
    severity: Severity = "warning",
    **numbers: Any,
) -> Finding:
    """A finding with one to three next actions and the best step among its numbers."""
    best = reading.curves.best()
    if best is not None:
        numbers |= {"best_metric": best[0], "best_step": best[1], "best_value": best[2]}
    actions = tuple(dict.fromkeys(advice))[:3]
    return Finding(code, severity, evidence, actions, round(min(max(confidence, 0.05), 0.99), 2), numbers)


def effective_batch(reading: Reading) -> int:
    """Examples per optimizer step on one device."""
    size = int(reading.option("per_device_train_batch_size", 8))
    return size * int(reading.option("gradient_accumulation_steps", 1))


def rate_flag(rate: float) -> str:
    """`--learning_rate` with a value a person would type: one or two digits."""
    exponent = math.floor(math.log10(rate))
    mantissa = round(rate / 10**exponent, 1)
    if mantissa >= 10:
        mantissa, exponent = 1.0, exponent + 1
    return f"--learning_rate {mantissa:g}e{exponent}"


def epochs_flag(epochs: float) -> str:
    """`--num_train_epochs` with a value a person would type."""
    return f"--num_train_epochs {max(1.0, epochs):.3g}"


def planned_epochs(reading: Reading) -> float:
    """The epochs the run was asked for."""
    per_epoch = reading.curves.steps_per_epoch
    if per_epoch > 0 and reading.curves.num_steps:
        return reading.curves.num_steps / per_epoch
    return float(reading.option("num_train_epochs", 3.0))


def longer_flag(reading: Reading, rate: float | None = None) -> str:
    """More epochs: twice as many, or as many as an encoder needs to learn at this rate, where a run had only begun.

    With another `rate` than the run had, the epochs that are enough at that one.
    """
    done = (rate or reading.rate) * max(1, int(reading.step[-1])) / 2
    times = max(1 if rate else 2, math.ceil(ENOUGH_WORK / done))
    return epochs_flag(min(times, MOST_TIMES) * planned_epochs(reading))


def usual_flags(reading: Reading, rate: float) -> str:
    """This rate, a batch of 8 where it is smaller, and epochs enough at both."""
    batch = effective_batch(reading)
    wider = max(1, math.ceil(USUAL_BATCH / 2 / batch))
    size = wider * int(reading.option("per_device_train_batch_size", 8))
    flags = [rate_flag(rate)] + [f"--per_device_train_batch_size {size}"] * (wider > 1)
    done = rate * max(1, int(reading.step[-1])) / wider / 2
    times = min(math.ceil(ENOUGH_WORK / done), MOST_TIMES)
    return " ".join(flags + [epochs_flag(times * planned_epochs(reading))] * (times > 1))


def early_stop_step(reading: Reading, *, patience: int = 2) -> int | None:
    """Where early stopping on validation loss would have ended the run; None when it would have run to its end."""
    best, waited = math.inf, 0
    for step, loss in zip(reading.step[:-1], reading.val_loss[:-1], strict=True):
        best, waited = (float(loss), 0) if loss < best else (best, waited + 1)
        if waited >= patience:
            return int(step)
    return None


def _file(reading: Reading, name: str) -> str | None:
    value = reading.option(name, None)
    return shlex.quote(value) if isinstance(value, str) else None


def audit_command(reading: Reading) -> str:
    """The audit of the files of this run."""
    train, other = _file(reading, "train_file"), _file(reading, "validation_file")
    if train is None:
        return "tunesmith audit FILE: lists labels that look wrong, and what differs between the splits"
    files = train if other is None else f"{train} {other}"
    return f"tunesmith audit {files} --review_file review.csv: lists labels that look wrong, and what differs between the splits"


def inspect_command(reading: Reading) -> str:
    """Some rows as the model sees them."""
    file = _file(reading, "train_file")
    rows = "tunesmith inspect" if file is None else f"tunesmith inspect --train_file {file} --rows 0,1,2,3,4"
    return f"{rows}: read some rows beside their labels; check --text_column_names and --label_column_name"


def own_split_flags(reading: Reading) -> str:
    """Validation rows from the training file, where they have a file of their own: what differs between the two is gone."""
    if _file(reading, "validation_file") is None:
        return "check that all rows come from one source and use the same label ids (--label_names)"
    return (
        "--validation_file '' --validation_split_fraction 0.1: if the score is good on these rows, the two files differ"
    )


_FLAG = re.compile(r"--(\w+) (\S+)")


def advised_options(advice: str) -> dict[str, str | None]:
    """Option -> value (None: leave it out) of one advice, so that it can be followed by a program; {} when it is for people."""
    if advice.startswith("leave out --"):
        return {advice.removeprefix("leave out --").split(":")[0].strip(): None}
    flags = advice.split(": ")[0].split(" (")[0]
    found = {name: value.strip("'") for name, value in _FLAG.findall(flags)}
    return found if advice.startswith("--") else {}
