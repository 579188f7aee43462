"""The runs of bench/diagnose_runs.py, as the PyPI packages training-doctor and sk-autod see them.

    /tmp/peers-venv/bin/python bench/diagnose_peers.py curves.json verdicts.json

It runs in an environment of its own that holds these two packages and nothing of tunesmith; `diagnose_runs.py --export`
writes the curves, `--table` reads the verdicts. What each package says is kept in its own words.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CODES = {
    "Learning rate likely too high": ("diverged", "erratic"),
    "Gradient instability detected": ("diverged", "erratic"),
    "Learning rate may be too low": ("underfitting",),
    "Training plateau detected": ("underfitting",),
    "Overfitting detected": ("overfitting",),
    "Classic overfitting": ("overfitting",),
    "Missed early stopping": ("overfitting",),
    "Exploding gradient": ("diverged", "erratic"),
    "LR too high": ("diverged", "erratic"),
    "Noisy training": ("diverged", "erratic"),
    "LR too low": ("underfitting",),
    "Underfitting": ("underfitting",),
    "Dying ReLU proxy": ("underfitting",),
    "Label noise floor": ("no_signal",),
    "Data leakage": ("no_signal",),
}
"""Their problems in our words, read kindly: a problem stands for every verdict that could mean it."""


def ask_training_doctor(run: dict[str, Any]) -> tuple[str, str]:
    """Fed step by step like its README says: the problem with the highest confidence, "" when it found none.

    The second answer leaves out what it is less than 0.6 sure of: above that its README speaks of a strong signal.
    """
    from training_doctor import Doctor

    doctor = Doctor()
    evaluated = dict(zip(run["eval_step"], run["val_loss"], strict=True))
    for k, step in enumerate(run["step"]):
        metrics = {"loss": run["loss"][k], "lr": run["rate"][k], "grad_norm": run["norm"][k]}
        metrics = {name: float("nan") if value is None else value for name, value in metrics.items()}
        if step in evaluated:
            metrics["eval_loss"] = evaluated[step]
        doctor.log(step=step, **metrics)
    found = sorted(doctor.diagnoses, key=lambda d: -d.confidence)
    problem = found[0].problem if found else ""
    return problem, problem if found and found[0].confidence >= 0.6 else ""


def ask_sk_autod(run: dict[str, Any]) -> str:
    """Its first finding, "" when it found none, "refused: ..." when it takes no such curve."""
    from sk_autod import diagnose

    try:
        found = diagnose(run["train_loss"], run["val_loss"]).findings
    except ValueError as error:
        return f"refused: {error}"
    return found[0].detector_name if found else ""


def main() -> None:
    """Asks both about every run."""
    source, target = map(Path, sys.argv[1:])
    runs = json.loads(source.read_text())
    said = {}
    for name, run in runs.items():
        problem, strong = ask_training_doctor(run)
        said[name] = {
            "training-doctor": problem,
            "training-doctor, strong signals only": strong,
            "sk-autod": ask_sk_autod(run),
        }
    target.write_text(json.dumps({"codes": CODES, "said": said}, indent=1))


if __name__ == "__main__":
    main()
