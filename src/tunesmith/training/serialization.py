"""Values as JSON and tensors, and back again: what ranks exchange, and all that an optimizer keeps (state of each parameter,
whole groups, what is its own). Same types, no pickle.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from tunesmith.errors import ConfigError

KIND = "__kind__"
"""Marks what JSON has no word for: {"__kind__": "tuple", "value": [...]}."""


JSON = "json"
"""The name of the text among the tensors of a message."""


def to_plain(value: Any, name: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """The value ready for JSON; its tensors go to `tensors` under names that end in `name`, or are written out as numbers."""
    if isinstance(value, torch.Tensor):
        if tensors is None:
            return {KIND: "numbers", "dtype": _word(value.dtype), "value": to_plain(value.tolist(), name)}
        return {KIND: "tensor", "value": _keep(value, name, tensors)}
    if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, float) and value.dtype.kind in "biuf":
        if isinstance(value, np.ndarray) and tensors is not None:
            return {KIND: "array", "value": _keep(torch.from_numpy(np.ascontiguousarray(value)), name, tensors)}
        return {KIND: "numpy", "dtype": str(value.dtype), "value": to_plain(value.tolist(), name)}
    if isinstance(value, float) and not math.isfinite(value):
        return {KIND: "float", "value": repr(float(value))}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "value": _word(value)}
    if isinstance(value, dict):
        if type(value) is not Counter and all(type(k) is str and k != KIND for k in value):
            return {k: to_plain(v, f"{k}:{name}", tensors) for k, v in value.items()}
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {
            KIND: kind,
            "value": [[to_plain(k, name), to_plain(v, f"{k}:{name}", tensors)] for k, v in value.items()],
        }
    series = next((k for k, (own, _) in _SERIES.items() if isinstance(value, own)), None)
    if series is None:
        raise ConfigError(
            f"{name} is a {type(value).__name__}: only numbers, text, tensors, lists and dicts are saved or sent to other ranks",
            fix="If it is state of an optimizer or scheduler: leave it out of its state_dict(), or set save_strategy='no'.",
        )
    items = [to_plain(v, f"{i}:{name}", tensors) for i, v in enumerate(value)]
    return items if series == "list" else {KIND: series, "value": items}


def from_plain(value: Any, find: Callable[[str], torch.Tensor] | None = None) -> Any:
    """What `to_plain` was given; `find` gives the tensor of a name."""
    if isinstance(value, list):
        return [from_plain(v, find) for v in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {k: from_plain(v, find) for k, v in value.items()}
    kind, inner = value[KIND], value["value"]
    if kind in ("tensor", "array") and find is not None:
        return find(inner) if kind == "tensor" else find(inner).numpy()
    if kind == "numbers":
        return torch.tensor(from_plain(inner), dtype=_dtype(value["dtype"]))
    if kind == "numpy":
        return np.array(from_plain(inner), dtype=value["dtype"])[()]
    if kind == "dtype":
        return _dtype(inner)
    if kind == "float":
        return float(inner)
    made = from_plain(inner, find)
    if kind in ("dict", "counter"):
        return (Counter if kind == "counter" else dict)(dict(made))
    return _SERIES[kind][1](made)


_SERIES: Mapping[str, tuple[type, Callable[[list[Any]], Any]]] = {
    "list": (list, list),
    "tuple": (tuple, tuple),
    "set": (set, set),
    "deque": (deque, deque),
}


def to_bytes(value: Any) -> bytes:
    """The value as one message, in the format of safetensors."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(to_plain(value, "value", tensors)).encode()
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save({JSON: torch.frombuffer(bytearray(text), dtype=torch.uint8), **kept})


def from_bytes(message: bytes) -> Any:
    """What `to_bytes` was given."""
    tensors = load(message)
    return from_plain(json.loads(tensors.pop(JSON).numpy().tobytes()), tensors.__getitem__)


def _keep(tensor: torch.Tensor, name: str, tensors: dict[str, torch.Tensor]) -> str:
    while name in tensors:  # "a:b" under "c" is called as "a" under "b:c"
        name += "'"
    tensors[name] = tensor
    return name


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(word: str) -> torch.dtype:
    found = getattr(torch, word, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{word!r} is not a type of numbers")
    return found
