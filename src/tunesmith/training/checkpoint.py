"""Checkpoints: what a run saves, how it is verified, and how a run continues from it.

A checkpoint is a folder with a manifest (runs/folder.py) that contains every piece of a TrainState. Files are safetensors and
JSON only; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, load_file, save, save_file
from torch import nn
from torch.optim import Optimizer

from tunesmith.errors import CheckpointError, ConfigError, NumericsError
from tunesmith.files import MAX_JSON_BYTES, read_plain, write_new
from tunesmith.models.families import ADAPTER, adapter_files, has_adapters, trained_beside
from tunesmith.runs.folder import RunDir, checkpoint_step, delete_folder, publish_folder, read_manifest, verify
from tunesmith.training.state import BestSoFar, TrainState, generator_states, restore_generators

WEIGHTS = "model.safetensors"
BESIDE = "trained.safetensors"
"""With adapters only: trained tensors that the adapter files don't contain as they are, under the model's own names."""
OPTIMIZER, GENERATORS, STATE = "optimizer.safetensors", "generators.safetensors", "state.json"
PIECES = (OPTIMIZER, GENERATORS, STATE)
"""Files of every checkpoint in addition to the weights."""
VOCABULARY = "vocabulary.safetensors"
"""Only if weight decay shrinks embedding rows that don't occur in the data: their values before any decay."""
MARK = "sha256:"

log = logging.getLogger(__name__)

Tensors = dict[str, torch.Tensor]


# Which run a checkpoint belongs to


@dataclass(frozen=True)
class Identity:
    """The run that a checkpoint belongs to. A resume compares every field."""

    run_id: str
    data: str
    config: dict[str, Any]
    labels: dict[str, Any]
    versions: dict[str, str | None]

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict for the manifest."""
        return asdict(self)


def content_hash_of(*parts: str) -> str:
    """Return a hash that stands for something too large to show; a difference is reported only as "changed"."""
    return MARK + hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def differences(folder: Path, identity: Identity) -> tuple[list[str], list[str]]:
    """Compare a checkpoint's run with this one: (changes that make it a different run, changed versions)."""
    stored = read_manifest(folder)
    known = isinstance(stored.get("config"), dict) and isinstance(stored.get("versions"), dict)
    if not known or not {"data", "labels"} <= stored.keys():
        raise CheckpointError("has no record of the data, model and options of its run", where=str(folder))
    old, new = stored["config"], identity.config
    names = [k for k in sorted(set(old) | set(new)) if old.get(k) != new.get(k)]
    found = []
    if stored["data"] != identity.data and not any(k.endswith(" data") for k in names):
        found.append("the training data changed")
    if stored["labels"] != identity.labels:
        found.append(f"the labels were {stored['labels']} and are {identity.labels}")
    found += [_change(k, repr(old.get(k)), repr(new.get(k))) for k in names]
    old, new = stored["versions"], identity.versions
    return found, [_change(k, str(old.get(k)), str(new.get(k))) for k in {**new, **old} if old.get(k) != new.get(k)]


def _change(name: str, old: str, new: str) -> str:
    return f"{name} changed" if MARK in old + new else f"{name} was {old} and is {new}"


# Saving


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint: tensors by file and name, the text of state.json, and the fields of the manifest."""

    files: dict[str, Tensors]
    state: str
    meta: dict[str, Any]

    def write(self, folder: Path, describe: Callable[[Path], None] | None) -> None:
        """Publish it as a folder with a manifest. `describe` writes config and tokenizer."""

        def fill(tmp: Path) -> None:
            if describe is not None:
                describe(tmp)
            write_files(tmp, self.files)
            write_new(tmp / STATE, self.state.encode())

        size = sum(t.numel() * t.element_size() for tensors in self.files.values() for t in tensors.values())
        publish_folder(folder, fill, self.meta, bytes_needed=size)


def save_checkpoint(
    folder: Path, state: TrainState, identity: Identity, *, describe: Callable[[Path], None] | None = None
) -> None:
    """Save the state as `folder`. All ranks call it; only rank 0 writes. `describe` writes config and tokenizer."""
    snapshot = capture(state, identity)
    if snapshot is not None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        snapshot.write(folder, describe)
    state.runtime.barrier()


def capture(state: TrainState, identity: Identity, buffers: Tensors | None = None) -> Snapshot | None:
    """Return the content of a checkpoint of this moment; None on ranks other than 0. All ranks call it.

    With `buffers`, every tensor is copied into them, so that training can continue while the snapshot is written.
    """
    state.require_whole("they are not saved")
    generators = state.runtime.gather_objects(generator_states(state.runtime.device))
    if not state.runtime.is_main:
        return None
    optimizer, plain = pack_optimizer(state.optimizer)
    files = {
        **weight_files(state.model, whole_weights(state), buffers),
        OPTIMIZER: contiguous(optimizer, buffers, OPTIMIZER),
        GENERATORS: {f"{k}.{r}": v for r, g in enumerate(generators) for k, v in g["tensors"].items()},
    }
    if buffers is not None and state.runtime.device.type == "cuda":
        torch.cuda.synchronize(state.runtime.device)
    for name, tensors in files.items():
        if is_weights(name):
            require_finite(tensors, state.step)
    if state.vocabulary is not None and float(state.vocabulary.kept) != 1.0:
        files[VOCABULARY] = contiguous(state.vocabulary.state_dict(), buffers, VOCABULARY)
    scale = state.loss_scale
    text = {
        "step": state.step,
        "progress": asdict(state.progress),
        "rows_limit": state.rows_limit,
        "evaluation_due": state.evaluation_due,
        "vocabulary": None if state.vocabulary is None else "decayed" if VOCABULARY in files else "plain",
        "vocabulary_given_up": state.speedups is not None and "restrict_vocabulary" in state.speedups.dropped,
        "loss_scale": None if scale is None else [float(scale.scale), int(scale.good_steps)],
        "optimizer": plain,
        "generators": [g["plain"] for g in generators],
    }
    meta = {"kind": "checkpoint", "step": state.step, **identity.to_json()}
    return Snapshot(files, json.dumps(text, allow_nan=False), meta)


def whole_weights(state: TrainState) -> Tensors:
    """Return the model's tensors where they are, with the whole vocabulary."""
    tensors: Tensors = state.model.state_dict()
    if state.vocabulary is not None:
        tensors[_embedding_name(state.model)] = state.vocabulary.table()
    return tensors


def _embedding_name(model: nn.Module) -> str:
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    return next(name for name, parameter in model.named_parameters() if parameter is weight)


def bytes_of(state: TrainState) -> tuple[int, int]:
    """Return the expected size on disk of (the weights, a whole checkpoint)."""
    weights = sum(t.numel() * t.element_size() for t in state.model.state_dict().values())
    if state.vocabulary is not None:
        whole = state.vocabulary.size * int(state.model.get_input_embeddings().weight.shape[1]) * 4  # type: ignore[operator]
        weights += whole * (2 if state.vocabulary_decay else 1)
    moments = sum(2 * p.numel() * p.element_size() for g in state.optimizer.param_groups for p in g["params"])
    return weights, weights + moments


def write_files(folder: Path, files: Mapping[str, Tensors]) -> None:
    """Write tensors by file and name. Weight files have the format `pt`, as transformers expects."""
    for name, tensors in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        save_file(tensors, folder / name, metadata={"format": "pt"} if name.endswith((WEIGHTS, ADAPTER)) else None)


def weight_files(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], buffers: Tensors | None = None
) -> dict[str, Tensors]:
    """Return tensors by file and name, ready for safetensors. For a model with adapters: only the trained tensors."""
    if not has_adapters(model):
        return {WEIGHTS: contiguous(tensors, buffers, WEIGHTS)}
    files = {name: contiguous(held, buffers, name) for name, held in adapter_files(model, tensors).items()}
    beside = trained_beside(model, tensors, adapter_files(model, tensors, embeddings=False))
    return {**files, BESIDE: contiguous(beside, buffers, BESIDE)} if beside else files


def contiguous(tensors: Mapping[str, torch.Tensor], buffers: Tensors | None = None, file: str = "") -> Tensors:
    """Return tensors on the CPU, ready for safetensors: contiguous and without shared memory.

    With `buffers`, each is a copy in memory that later calls use again: fresh memory costs five times as much as the copy.
    Copies from a GPU are not synchronized.
    """
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if buffers is None:
            tensor = tensor.cpu().contiguous()
            out[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
            seen.add(tensor.data_ptr())
            continue
        held = buffers.get(f"{file}/{name}")
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffers[f"{file}/{name}"] = held
        out[name] = held.copy_(tensor, non_blocking=True)
    return out


def require_finite(weights: Mapping[str, torch.Tensor], step: int) -> None:
    """Raise a NumericsError for NaN or infinite weights: an update can overflow even if its gradient did not."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.numel() and not bool(torch.stack(tensor.aminmax()).isfinite().all()):
            raise NumericsError(
                f"step {step}: weight {name} is NaN or infinite; it was not saved",
                fix="Lower --learning_rate; the last checkpoint has finite weights.",
            )


# Verifying, finding and deleting


def newest_intact(run: RunDir, run_id: str | None = None) -> tuple[Path | None, tuple[str, ...]]:
    """Return the newest checkpoint that verifies and why each newer one was skipped; of this run if it has any."""
    skipped: list[str] = []
    mine = [f for f in run.checkpoints() if run_id is None or belongs_to(f, run_id, damaged=True)]
    for folder in reversed(mine or run.checkpoints()):
        try:
            verify(folder)
        except CheckpointError as error:
            skipped.append(error.line())
            continue
        return folder, tuple(skipped)
    return None, tuple(skipped)


def belongs_to(folder: Path, run_id: str, *, damaged: bool = False) -> bool:
    """Return whether a checkpoint is part of this run; `damaged` is the result for one that can't be read."""
    try:
        return bool(read_manifest(folder)["run_id"] == run_id)
    except (CheckpointError, KeyError):
        return damaged


def rotate(run: RunDir, run_id: str, *, keep: int, last: int, best: Path | None = None) -> None:
    """Delete the oldest checkpoints of this run until `keep` are left; the newest and the `best` one stay.

    `last` is the step of the newest published one. One with a higher step is damaged (a resume skipped it): it is neither
    deleted nor counted, so it never replaces an intact one.
    """
    mine = [f for f in run.checkpoints() if checkpoint_step(f) <= last and belongs_to(f, run_id)]
    home = None if best is None else best.resolve()
    others = [f for f in mine[:-1] if f.resolve() != home]
    for folder in others[: max(len(mine) - keep, 0)]:
        delete_folder(folder)


# Loading


def load_checkpoint(folder: Path, state: TrainState, *, settings: bool = True) -> None:
    """Load a verified checkpoint into the state. A missing piece is an error: there is no partial resume.

    Without `settings`, the optimizer's groups (learning rate, weight decay, ...) stay as this run created them.
    """
    plain = _read_state(folder / STATE)
    for piece in (*PIECES, VOCABULARY) if plain.get("vocabulary") == "decayed" else PIECES:
        if not (folder / piece).is_file():
            raise missing_file(folder, piece)
    try:
        _load_pieces(folder, state, plain, settings=settings)
    except (KeyError, IndexError, TypeError, ValueError, SafetensorError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"is not a complete state: {error}", where=str(folder)) from error


def _read_state(file: Path) -> dict[str, Any]:
    try:
        plain = json.loads(read_plain(file, MAX_JSON_BYTES)) if file.is_file() else {}
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        raise CheckpointError("is not the state of a run", where=str(file))
    return plain


def _load_pieces(folder: Path, state: TrainState, plain: dict[str, Any], *, settings: bool) -> None:
    if plain.get("vocabulary_given_up") and state.vocabulary is not None:
        state.restore_vocabulary("it was off when the checkpoint was saved")
    if (plain["vocabulary"] is None) != (state.vocabulary is None):
        raise CheckpointError("was saved with a different setting of restrict_vocabulary", where=str(folder))
    if state.vocabulary is None:
        load_weights(state.model, folder)
    else:
        _load_vocabulary(state, folder)
    unpack_optimizer(state.optimizer, load_file(folder / OPTIMIZER), plain["optimizer"], str(folder), settings=settings)
    state.step = int(plain["step"])
    state.phase = "done"
    state.optimizer.zero_grad(set_to_none=True)
    state.progress = BestSoFar(**plain["progress"])
    state.rows_limit = plain["rows_limit"]
    state.evaluation_due = plain["evaluation_due"]
    if state.loss_scale is not None and plain["loss_scale"] is not None:
        state.loss_scale.scale.fill_(plain["loss_scale"][0])
        state.loss_scale.good_steps.fill_(plain["loss_scale"][1])
    rank = state.runtime.rank
    if rank < len(plain["generators"]):
        stored = load_file(folder / GENERATORS).items()
        mine = {name.removesuffix(f".{rank}"): tensor for name, tensor in stored if name.endswith(f".{rank}")}
        restore_generators({"tensors": mine, "plain": plain["generators"][rank]}, state.runtime.device)


def _load_vocabulary(state: TrainState, folder: Path) -> None:
    """Load the weights into a model that trains only the embedding rows that occur in the data."""
    assert state.vocabulary is not None
    stored = _read(folder, WEIGHTS)
    name = _embedding_name(state.model)
    if (folder / VOCABULARY).is_file():
        state.vocabulary.load_state_dict(load_file(folder / VOCABULARY))
    else:
        ids, kept = torch.from_numpy(state.vocabulary.ids), torch.ones((), dtype=torch.float64)
        state.vocabulary.load_state_dict({"table": stored[name], "ids": ids, "kept": kept})
    stored[name] = state.model.state_dict()[name]
    copy_weights(state.model, stored, str(folder / WEIGHTS))


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copy the weights of a checkpoint into the model, in place. Names and shapes must match."""
    if not has_adapters(model):
        copy_weights(model, _read(folder, WEIGHTS), str(folder / WEIGHTS))
        return
    own = model.state_dict()
    files = adapter_files(model, own, embeddings=False)
    held = {id(tensor) for tensor in own.values()}
    for file, tensors in files.items():
        stored = _read(folder, file)
        # `BESIDE` contains the originals of tensors that PEFT computes; embeddings of a resized vocabulary are not trained.
        mine = {key: tensor for key, tensor in tensors.items() if id(tensor) in held}
        _copy(mine, {key: stored[key] for key in stored if key in mine}, str(folder / file))
    beside = trained_beside(model, own, files)
    if beside:
        _copy(beside, _read(folder, BESIDE), str(folder / BESIDE))


def is_weights(name: str) -> bool:
    """Return whether a file of a checkpoint contains weights."""
    return name in (WEIGHTS, BESIDE) or name.endswith(ADAPTER)


def holds_names(folder: Path, model: nn.Module) -> bool:
    """Return whether the stored weights have the model's own names, so that `load_weights` restores all of them."""
    if has_adapters(model) or not (folder / WEIGHTS).is_file():
        return False
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        stored = set(file.keys())
    return stored == _needed(model.state_dict(), stored).keys()


def copy_weights(model: nn.Module, stored: Tensors, where: str) -> None:
    """Copy tensors into the model, in place; a CheckpointError if names or shapes don't match."""
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        # a user's model may resize buffers in its own `load_state_dict`
        model.load_state_dict(stored)
        return
    _copy(model.state_dict(), stored, where)


def _copy(own: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], where: str) -> None:
    needed = _needed(own, stored)
    wrong = sorted(needed.keys() ^ stored.keys()) or [n for n in needed if needed[n].shape != stored[n].shape]
    if wrong:
        raise CheckpointError(f"does not fit the model: {', '.join(wrong[:5])}", where=where)
    with torch.no_grad():
        for name, tensor in needed.items():
            tensor.copy_(stored[name])


def _needed(own: Mapping[str, torch.Tensor], stored: Container[str]) -> Tensors:
    """Return the model's tensors that a file must contain. `save_pretrained` stores only one name of a shared tensor."""
    there = {tensor.data_ptr() for name, tensor in own.items() if name in stored}
    return {name: tensor for name, tensor in own.items() if name in stored or tensor.data_ptr() not in there}


def _read(folder: Path, name: str) -> Tensors:
    if not (folder / name).is_file():
        raise missing_file(folder, name)
    return load_file(folder / name)


def missing_file(folder: Path, name: str) -> CheckpointError:
    """Return the error for a checkpoint that lacks a file."""
    fix = f"To start a new run from its weights: --model_name_or_path {folder} and another --output_dir."
    if name == WEIGHTS and any(folder.glob(f"**/{ADAPTER}")):
        fix = "It contains PEFT adapters: add adapters to the model as the run did (peft.get_peft_model)."
    elif name != WEIGHTS and is_weights(name):
        fix = "It is not from a run with these adapters: load it with from_pretrained and start a new run."
    return CheckpointError(f"has no {name}, so the run cannot resume exactly from it", where=str(folder), fix=fix)


# The state of an optimizer

_OF_THE_DEVICE = ("params", "names", "fused", "foreach", "capturable", "differentiable")
"""Entries of a group that a resume doesn't restore: they determine how the update is computed, not its result."""


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
    """Restore the state that `pack_optimizer` returned; the parameters and groups must be the same.

    Without `settings`, the groups keep the values of this run.
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

            # a parameter without stored state must not have one
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
    """Return whether its class has its own `state_dict` or `load_state_dict`."""
    kind = type(optimizer)
    return kind.state_dict is not Optimizer.state_dict or kind.load_state_dict is not Optimizer.load_state_dict


def _plain_group(group: dict[str, Any], name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the options of a group without its parameters; what JSON can't store is skipped."""
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
            here.copy_(torch.as_tensor(value))  # in place, because a CUDA graph reads it
        elif isinstance(value, torch.Tensor):
            # torch accepts a tensor as learning rate only if the group was created with one
            group[key] = float(value) if key == "lr" and here is not None else value
        else:
            group[key] = value


# Values as JSON and tensors

KIND = "__kind__"
"""Marks values that JSON can't express: {"__kind__": "tuple", "value": [...]}."""


def to_plain(value: Any, name: str, tensors: dict[str, torch.Tensor] | None = None) -> Any:
    """Return the value ready for JSON; tensors go to `tensors` under names that end in `name`, or become numbers."""
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
        items = [[to_plain(k, name), to_plain(v, f"{k}:{name}", tensors)] for k, v in value.items()]
        return {KIND: kind, "value": items}
    if isinstance(value, (list, tuple)):
        items = [to_plain(v, f"{i}:{name}", tensors) for i, v in enumerate(value)]
        return items if isinstance(value, list) else {KIND: "tuple", "value": items}
    raise ConfigError(
        f"{name} is a {type(value).__name__}: only numbers, text, tensors, lists and dicts are saved or sent to other ranks",
        fix="If it is state of an optimizer or scheduler, remove it from its state_dict(), or set save_strategy='no'.",
    )


def from_plain(value: Any, find: Callable[[str], torch.Tensor] | None = None) -> Any:
    """Return the original value; `find` returns the tensor of a name."""
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
    if kind == "counter":
        return Counter(dict(made))
    return tuple(made) if kind == "tuple" else dict(made)


def to_bytes(value: Any) -> bytes:
    """Return the value as one message in the format of safetensors, for other ranks."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(to_plain(value, "value", tensors)).encode()
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return save({"json": torch.frombuffer(bytearray(text), dtype=torch.uint8), **kept})


def from_bytes(message: bytes) -> Any:
    """Return the value of a message from `to_bytes`."""
    tensors = load(message)
    return from_plain(json.loads(tensors.pop("json").numpy().tobytes()), tensors.__getitem__)


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
