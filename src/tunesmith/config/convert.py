"""From what a person wrote to the type of an option, and the values that options accept: optimizers and schedules by name with
what each takes, and lengths of time. The engine reads these tables, too.

Text is read by the option's type, never by guessing: `1e-5` is a number where a number is wanted, `no` a string where one is.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from tunesmith.errors import did_you_mean

WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""The spellings of true and false."""

_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*)")


@dataclass(frozen=True)
class Range:
    """The numbers that an option accepts; None: no limit but `check.LARGEST_NUMBER`. `share`: from 0, below 1."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    share: bool = False
    whole_from_one: bool = False
    """Below 1 a share, from 1 on a number of steps: 1.5 is neither."""


FromOne = Annotated[int, Range(at_least=1)]
FromZero = Annotated[int, Range(at_least=0)]
NotNegative = Annotated[float, Range(at_least=0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(share=True)]
Steps = Annotated[int | float, Range(above=0, whole_from_one=True)]
Seed = Annotated[int, Range(at_least=0, at_most=2**32 - 1)]  # NumPy takes no larger seed
GlueTaskName = Literal["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]
AutoOnOff = Literal["auto", "on", "off"]


def convert(value: Any, hint: Any) -> Any:
    """The value in the type of the hint. A ValueError says what was expected and what was found."""
    kinds = _kinds(hint)
    if value is None or (isinstance(value, str) and NoneType in kinds and _means_none(value, kinds)):
        if NoneType in kinds:
            return None
        raise ValueError(f"expected {describe(hint)}, got nothing")
    for kind in kinds:
        if kind is not NoneType:
            with suppress(ValueError, OverflowError, RecursionError):  # not of this kind; another of the union may fit
                return _convert_one(value, kind)
    shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
    raise ValueError(f"expected {describe(hint)}, got {shown}{_how_to_write(value, kinds)}")


def describe(hint: Any) -> str:
    """The type in plain words: "a whole number", "auto, on or off"."""
    words: list[str] = []
    for kind in _kinds(hint):
        if kind is NoneType:
            continue
        if get_origin(kind) is Literal:
            words += [str(choice) for choice in get_args(kind)]
        elif get_origin(kind) is tuple:
            words.append("a list of numbers" if get_args(kind)[0] is float else "a list of names")
        else:
            words.append(_NAMES[get_origin(kind) or kind])
    if "a whole number" in words and "a number" in words:
        words.remove("a whole number")
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def is_boolean(hint: Any) -> bool:
    """Whether the option is only a switch."""
    return bool in _kinds(hint) and str not in _kinds(hint)


def is_list(hint: Any) -> bool:
    """Whether the option takes several values."""
    return any(get_origin(kind) is tuple for kind in _kinds(hint))


def choices_of(hint: Any) -> tuple[str, ...]:
    """The fixed words an option accepts, if it has any."""
    return tuple(str(c) for kind in _kinds(hint) if get_origin(kind) is Literal for c in get_args(kind))


_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping of names to numbers",
}


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _means_none(text: str, kinds: tuple[Any, ...]) -> bool:
    """Empty text unsets any option; the words none and null do so where text itself is not wanted."""
    if text == "":
        return True
    free_text = str in kinds or any(get_origin(kind) is tuple and get_args(kind)[0] is str for kind in kinds)
    listed = any("none" in get_args(kind) for kind in kinds if get_origin(kind) is Literal)
    return not free_text and not listed and text.lower() in ("none", "null")


def _convert_one(value: Any, kind: Any) -> Any:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return _as_choice(value, get_args(kind))
    if origin is tuple:
        return _as_tuple(value, get_args(kind)[0])
    reader = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_str, dict: _as_dict}[origin]
    return reader(value)


def _as_choice(value: Any, choices: tuple[Any, ...]) -> Any:
    """One of the choices. True and False (JSON, TOML) stand for on/off or yes/no among them."""
    meant = [c for c in choices if c == value or (isinstance(value, bool) and WORDS.get(str(c)) is value)]
    if not meant:
        raise ValueError
    return meant[0]


def _as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in WORDS:
        return WORDS[value.lower()]
    raise ValueError


def _as_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()) and len(value) < 20:
        return int(value)
    raise ValueError


def _as_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number) or (isinstance(value, str) and re.match(r"[+-]?0[0-9]", value.strip())):
        raise ValueError
    return number


def _as_str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _as_tuple(value: Any, item: Any) -> tuple[Any, ...]:
    """A list as it is; text is split at commas, so that empty text is an empty list."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")] if value.strip() else []
    if not isinstance(value, (list, tuple)):
        raise ValueError
    return tuple(_convert_one(part, item) for part in value)


def _as_dict(value: Any) -> dict[str, Any]:
    """A mapping of names to plain numbers, words or switches; on the command line written as JSON."""
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError
    return {str(name): _as_scalar(part) for name, part in value.items()}


def _as_scalar(value: Any) -> Any:
    for reader in (_as_int, _as_float):
        with suppress(ValueError):
            return reader(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return _as_str(value)


def _how_to_write(value: Any, kinds: tuple[Any, ...]) -> str:
    """How to write the number so that it is accepted, or nothing."""
    number = math.nan
    if isinstance(value, (str, float)) and {int, float}.intersection(kinds):
        with suppress(ValueError):
            number = float(value)
    return f". Write {int(number)}" if number.is_integer() and abs(number) < 1e15 else ""


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
_WHOLE_NUMBERS = ("timescale", "num_decay_steps", "num_stable_steps")
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
    whole, low = name in _WHOLE_NUMBERS, 1 if name == "timescale" else 0
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        yield f"{name} {value!r} is not a {'whole ' if whole else ''}number", f"Write {name}: 1"
    elif not low <= value <= _LARGEST:
        yield f"{name} {value} is out of range", f"Use a number from {low} to {_LARGEST:.0e}"


_PARTS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
_SECONDS = (86400.0, 3600.0, 60.0, 1.0)


def read_duration(text: str) -> float:
    """The number of seconds. A ValueError says how to write a duration."""
    match = _PARTS.fullmatch(text.strip().lower())
    seconds = sum(float(n or 0) * unit for n, unit in zip(match.groups(), _SECONDS, strict=True)) if match else 0.0
    if not 0 < seconds < 10**9:
        raise ValueError(f"{text!r} is not a length of time. Write 90s, 20m, 2h or 1h30m")
    return seconds
