"""Values as JSON and tensors, and back again: what ranks exchange, and all that an optimizer keeps (state of each parameter,
whole groups, what is its own). Same types, no pickle.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save
from torch.optim import Optimizer

from tunesmith.errors import CheckpointError, ConfigError

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


log = logging.getLogger(__name__)

_OF_THE_DEVICE = ("params", "names", "fused", "foreach", "capturable", "differentiable")
"""Entries of a group that a resume leaves as they were made: how the update is computed here, not what it computes."""


def pack_optimizer(optimizer: Optimizer) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors by "key:parameter", everything else as JSON); tensors are the optimizer's own."""
    tensors: dict[str, torch.Tensor] = {}
    names = _names(optimizer)
    plain: dict[str, Any] = {"names": names}
    stored = optimizer.state_dict()
    if _has_own_way(optimizer):
        plain["own"] = to_plain(stored, "optimizer", tensors)
    else:
        flat = [name for group in names for name in group]
        by_name = {flat[k] if isinstance(k, int) else k: v for k, v in stored["state"].items()}
        plain["state"] = {n: to_plain(v, n, tensors) for n, v in by_name.items() if n in flat}
        plain["shared"] = to_plain({n: v for n, v in by_name.items() if n not in flat}, "shared", tensors)
        plain["groups"] = [_plain_group(group, f"group {i}", tensors) for i, group in enumerate(stored["param_groups"])]
    plain["tensors"] = sorted(tensors)
    return tensors, plain


def unpack_optimizer(
    optimizer: Optimizer, tensors: dict[str, torch.Tensor], plain: dict[str, Any], where: str, *, settings: bool = True
) -> None:
    """Restores what `pack_optimizer` made; the parameters must be the same, in the same groups.

    Without `settings` the groups stay as they were made: the run asked for others.
    """
    missing = sorted(set(plain["tensors"]) ^ set(tensors))
    if missing:
        raise CheckpointError(f"the optimizer's state is not complete: {', '.join(missing[:3])}", where=where)
    names = _names(optimizer)
    if names != plain["names"]:
        raise CheckpointError("the optimizer's parameters are not those of this run", where=where)
    if "own" in plain:
        optimizer.load_state_dict(from_plain(plain["own"], tensors.__getitem__))
        return
    for group, own in zip(optimizer.param_groups, names, strict=True):
        for name, parameter in zip(own, group["params"], strict=True):
            with_device = bool(group.get("fused") or group.get("capturable"))

            def find(key: str, parameter: torch.Tensor = parameter, with_device: bool = with_device) -> Any:
                counts = key.startswith("step:") and not with_device  # torch counts on the CPU there
                return tensors[key] if counts else tensors[key].to(parameter.device)

            # a parameter without stored state must have none here either
            optimizer.state.pop(parameter, None)
            if name in plain["state"]:
                optimizer.state[parameter] = from_plain(plain["state"][name], find)
    optimizer.state.update(from_plain(plain["shared"], tensors.__getitem__))
    if settings:
        for group, stored in zip(optimizer.param_groups, plain["groups"], strict=True):
            _restore_group(group, stored, tensors)


def _names(optimizer: Optimizer) -> list[list[str]]:
    return [
        list(group.get("names") or [f"{index}.{i}" for i in range(len(group["params"]))])
        for index, group in enumerate(optimizer.param_groups)
    ]


def _has_own_way(optimizer: Optimizer) -> bool:
    """Whether its class has its own `state_dict` or `load_state_dict`."""
    kind = type(optimizer)
    return kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict


def _plain_group(group: dict[str, Any], name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What a group holds beside its parameters; what cannot be written is left to the code that makes the optimizer."""
    found = {}
    for key, value in group.items():
        if key in _OF_THE_DEVICE:
            continue
        if callable(value) and not isinstance(value, torch.Tensor):
            log.debug("the optimizer's %s of %s is code, and is not in the checkpoint", key, name)
            continue
        found[key] = to_plain(value, f"{key}:{name}", tensors)
    return found


def _restore_group(group: dict[str, Any], stored: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    device = group["params"][0].device if group["params"] else torch.device("cpu")
    for key, text in stored.items():
        value, here = from_plain(text, lambda name: tensors[name].to(device)), group.get(key)
        if isinstance(here, torch.Tensor) and (not isinstance(value, torch.Tensor) or value.shape == here.shape):
            here.copy_(torch.as_tensor(value))  # in place: a captured step reads it there
        elif isinstance(value, torch.Tensor):
            # torch takes a rate that is a tensor only where it was made as one
            group[key] = float(value) if key == "lr" and here is not None else value
        else:
            group[key] = value
