"""The values that options accept: optimizers and schedules by name with what each takes, and lengths of time.

Light: the engine reads these tables, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tunesmith.errors import did_you_mean

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw_torch_fused": ("torch.optim:AdamW", {"fused": True}),
    "adamw_torch": ("torch.optim:AdamW", {"fused": False}),
}
"""Name -> `module:class`, and its own arguments. Rate, betas and epsilon are given to those that take them."""

_MIN_LR = ("num_cycles", "min_lr", "min_lr_rate")
_DECAY = ("num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles")
SCHEDULE_OPTIONS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": _MIN_LR,
    "cosine_warmup_with_min_lr": (*_MIN_LR, "warmup_lr_rate"),
    "warmup_stable_decay": _DECAY,
}
"""Schedule -> the names that `lr_scheduler_kwargs` may hold for it, as in transformers."""

_SHAPES = ("linear", "cosine", "1-sqrt")
_WHOLE = ("timescale", "num_decay_steps", "num_stable_steps")
_LARGEST = 1e9


def schedule_problems(kind: str, options: Mapping[str, Any], learning_rate: float) -> Iterator[tuple[str, str]]:
    """(problem, fix) for each option that this schedule does not take, and for what it needs and is not given."""
    known = SCHEDULE_OPTIONS[kind]
    for name, value in options.items():
        if name not in known:
            takes = f"It takes {', '.join(known)}" if known else "It takes none: leave them out"
            yield f"{kind} has no {name!r}", did_you_mean(name, known) or takes
        elif not name.endswith("_type"):
            yield from _number_problems(name, value)
        elif value not in _SHAPES:
            yield f"{name} {value!r} is not a shape", f"Use one of {', '.join(_SHAPES)}"
    if kind.endswith("min_lr") and ("min_lr" in options) == ("min_lr_rate" in options):
        yield f"{kind} needs min_lr or min_lr_rate, one of them", 'Add {"min_lr_rate": 0.1}'
    if kind == "warmup_stable_decay" and "num_decay_steps" not in options:
        yield f"{kind} needs num_decay_steps", 'Add {"num_decay_steps": 100}'
    end = options.get("lr_end", 1e-7)
    if kind == "polynomial" and isinstance(end, (int, float)) and not end < learning_rate:
        yield f"lr_end {end:g} is not below the learning rate {learning_rate:g}", "Use a smaller lr_end"


def _number_problems(name: str, value: Any) -> Iterator[tuple[str, str]]:
    whole, low = name in _WHOLE, 1 if name == "timescale" else 0
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        yield f"{name} {value!r} is not a {'whole ' if whole else ''}number", f"Write {name}: 1"
    elif not low <= value <= _LARGEST:
        yield f"{name} {value} is out of range", f"Use a number from {low} to {_LARGEST:.0e}"


_PARTS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
_SECONDS = (86400.0, 3600.0, 60.0, 1.0)


def read_duration(text: str) -> float:
    """Seconds. A ValueError says how to write it."""
    match = _PARTS.fullmatch(text.strip().lower())
    seconds = sum(float(n or 0) * unit for n, unit in zip(match.groups(), _SECONDS, strict=True)) if match else 0.0
    if not 0 < seconds < 10**9:
        raise ValueError(f"{text!r} is not a length of time. Write 90s, 20m, 2h or 1h30m")
    return seconds
