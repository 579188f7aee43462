"""What `lr_scheduler_kwargs` may hold for each schedule, by the names of transformers. An unknown name is never passed over."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tunesmith.errors import did_you_mean

_MIN_LR = ("num_cycles", "min_lr", "min_lr_rate")
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
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}
"""Schedule -> the names it takes."""

_SHAPES = ("linear", "cosine", "1-sqrt")
_WORDS = {"warmup_type": _SHAPES, "decay_type": _SHAPES}
_WHOLE = ("timescale", "num_decay_steps", "num_stable_steps")
_LARGEST = 1e9


def schedule_problems(kind: str, options: Mapping[str, Any], learning_rate: float) -> Iterator[tuple[str, str]]:
    """(problem, fix) for each option that this schedule does not take, and for what it needs and is not given."""
    known = SCHEDULE_OPTIONS[kind]
    for name, value in options.items():
        if name not in known:
            takes = f"It takes {', '.join(known)}" if known else "It takes none: leave them out"
            yield f"{kind} has no {name!r}", did_you_mean(name, known) or takes
        elif name in _WORDS:
            if value not in _WORDS[name]:
                yield f"{name} {value!r} is not a shape", f"Use one of {', '.join(_WORDS[name])}"
        else:
            yield from _number_problems(name, value)
    if kind.endswith("min_lr") and ("min_lr" in options) == ("min_lr_rate" in options):
        yield f"{kind} needs min_lr or min_lr_rate, one of them", 'Add {"min_lr_rate": 0.1}'
    if kind == "warmup_stable_decay" and "num_decay_steps" not in options:
        yield f"{kind} needs num_decay_steps", 'Add {"num_decay_steps": 100}'
    end = options.get("lr_end", 1e-7)
    if kind == "polynomial" and isinstance(end, (int, float)) and not end < learning_rate:
        yield f"lr_end {end:g} is not below the learning rate {learning_rate:g}", "Use a smaller lr_end"


def _number_problems(name: str, value: Any) -> Iterator[tuple[str, str]]:
    kind = int if name in _WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind):
        yield f"{name} {value!r} is not a {'whole ' if name in _WHOLE else ''}number", f"Write {name}: 1"
    elif not (1 if name == "timescale" else 0) <= value <= _LARGEST:
        yield (
            f"{name} {value} is out of range",
            f"Use a number from {1 if name == 'timescale' else 0} to {_LARGEST:.0e}",
        )
