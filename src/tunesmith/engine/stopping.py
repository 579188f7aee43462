"""The best evaluation so far, and when to stop because it no longer improves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from tunesmith.errors import ConfigError, did_you_mean


@dataclass(frozen=True)
class BestSoFar:
    """Counters that survive a resume. `value` is the best metric, reached after `step` steps."""

    value: float | None = None
    step: int | None = None
    evaluations_without_gain: int = 0

    def to_json(self) -> dict[str, Any]:
        """A plain dict for the checkpoint."""
        return {"value": self.value, "step": self.step, "evaluations_without_gain": self.evaluations_without_gain}


def metric_value(metrics: dict[str, float | None], name: str) -> float | None:
    """The tracked metric, with or without the prefix `eval_`; a name that is not there is a ConfigError."""
    key = name.removeprefix("eval_")
    if key not in metrics:
        known = tuple(metrics)
        raise ConfigError(
            f"metric_for_best_model {name!r} is not among {', '.join(known)}", fix=did_you_mean(key, known)
        )
    return metrics[key]


def update_progress(
    progress: BestSoFar, value: float | None, step: int, *, greater_is_better: bool, min_delta: float = 0.0
) -> tuple[BestSoFar, bool]:
    """(new counters, whether this is the best so far). A value that is not finite never is.

    Any gain makes a new best; only a gain of more than `min_delta` resets the count that patience looks at.
    """
    if value is None or not math.isfinite(value):
        return replace(progress, evaluations_without_gain=progress.evaluations_without_gain + 1), False
    if progress.value is None:
        return BestSoFar(value, step, 0), True
    gain = value - progress.value if greater_is_better else progress.value - value
    waited = 0 if gain > min_delta else progress.evaluations_without_gain + 1
    if gain > 0:
        return BestSoFar(value, step, waited), True
    return replace(progress, evaluations_without_gain=waited), False


def is_exhausted(progress: BestSoFar, patience: int | None) -> bool:
    """Whether `patience` evaluations in a row brought no gain."""
    return patience is not None and progress.evaluations_without_gain >= patience
