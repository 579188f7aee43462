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

from tunesmith.diagnosis.features import Features
from tunesmith.diagnosis.thresholds import ABOVE_CONSTANT, SIGNAL
from tunesmith.runs.series import Floats

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
