"""The checkpoints of a run folder: which are intact, which one to resume from, which to remove; and the files that hold their
weights, with the way back into the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from tunesmith.encoder.params import ADAPTER, adapter_files, has_adapters, trained_beside
from tunesmith.errors import CheckpointError, NumericsError
from tunesmith.keep.snapshot import WEIGHTS, buffered, hash_tensors
from tunesmith.ranks.sharding import gathered, sharded_like
from tunesmith.run.layout import RunDir, checkpoint_step
from tunesmith.run.sealed import read_manifest, retire, verify

INDEX = "model.safetensors.index.json"


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """The manifest of an intact checkpoint, as `verify` gives it. Weights that were cut into shards since it was written must
    be the same tensors, bit for bit: put together they have the hash of the file that they replace."""
    files = read_manifest(folder)["files"]
    cut = WEIGHTS in files and INDEX not in files and not (folder / WEIGHTS).exists() and (folder / INDEX).is_file()
    if cut and hash_tensors(read_shards(folder), metadata={"format": "pt"}) != files[WEIGHTS]["sha256"]:
        raise CheckpointError(f"its tensors are not those of the {WEIGHTS} that was written", where=str(folder / INDEX))
    return verify(folder, names=set(files) - {WEIGHTS} if cut else None)


def read_shards(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors that the index lists; a CheckpointError names what is missing or leads out of the folder."""
    try:
        places = json.loads((folder / INDEX).read_bytes())["weight_map"]
        shards = {name: load_file(folder / name) for name in sorted(set(places.values())) if Path(name).name == name}
        return {tensor: shards[name][tensor] for tensor, name in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its shards cannot be read: {error}", where=str(folder / INDEX)) from error


def newest_intact(run: RunDir, run_id: str | None = None) -> tuple[Path | None, tuple[str, ...]]:
    """(the newest checkpoint that verifies, why each newer one was skipped); of one run, where it has any of that run."""
    skipped: list[str] = []
    mine = [f for f in run.checkpoints() if run_id is None or belongs_to(f, run_id, damaged=True)]
    for folder in reversed(mine or run.checkpoints()):
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            skipped.append(error.line())
            continue
        return folder, tuple(skipped)
    return None, tuple(skipped)


def belongs_to(folder: Path, run_id: str, *, damaged: bool = False) -> bool:
    """Whether a checkpoint is of this run; `damaged` is the answer for one that cannot be read."""
    try:
        return bool(read_manifest(folder)["run_id"] == run_id)
    except (CheckpointError, KeyError):
        return damaged


def rotate(
    run: RunDir, run_id: str, *, keep: int, last: int, best: Path | None = None, newest: bool = True
) -> list[Path]:
    """Deletes the oldest checkpoints of this run id until `keep` are left, never the `best`, never the `newest` unless
    that is False; `last` is the step of the one that was just published.

    One with a higher step is a damaged one that a resume passed over: it is neither deleted nor counted as kept,
    so that it is never taken for an intact one.
    """
    found = [f for f in run.checkpoints() if checkpoint_step(f) <= last and belongs_to(f, run_id)]
    mine = sorted(found, key=checkpoint_step)
    home = None if best is None else best.resolve()
    kept = {f for f in mine[-1:] if newest} | {f for f in mine if f.resolve() == home}
    old = [f for f in mine if f not in kept][: max(len(mine) - max(keep, len(kept)), 0)]
    for folder in old:
        retire(folder)
    return old


BESIDE = "trained.safetensors"
"""Only with adapters: what is trained and not in their files as it is, under the model's own names."""


def weight_files(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], buffers: dict[str, torch.Tensor] | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by file and name, ready for safetensors. Of a model with adapters, what is trained alone."""
    if not has_adapters(model):
        return {WEIGHTS: contiguous(tensors, buffers, WEIGHTS)}
    files = {name: contiguous(held) for name, held in adapter_files(model, tensors).items()}
    beside = trained_beside(model, tensors, adapter_files(model, tensors, embeddings=False))
    return {**files, BESIDE: contiguous(beside)} if beside else files


def contiguous(
    tensors: Mapping[str, torch.Tensor], buffers: dict[str, torch.Tensor] | None = None, file: str = ""
) -> dict[str, torch.Tensor]:
    """Tensors ready for safetensors: on the CPU, each with memory of its own.

    What lies on a device is copied into `buffers` where they are given, by file and name: fresh memory costs more than the copy.
    """
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        tensor = gathered(tensor.detach())
        if buffers is not None and tensor.device.type != "cpu":
            tensor = buffered(tensor, buffers, f"{file}/{name}")
        tensor = tensor.cpu().contiguous()
        out[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return out


def require_finite(weights: Mapping[str, torch.Tensor], step: int) -> None:
    """A NumericsError before weights that are not finite reach the disk: an update can overflow where its gradient did not."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.numel() and not all(bool(torch.isfinite(v)) for v in tensor.aminmax()):
            raise NumericsError(
                f"step {step}: weight {name} is not finite; it was not saved",
                fix="Lower --learning_rate; the last checkpoint holds finite weights.",
            )


def load_weights(model: nn.Module, folder: Path) -> None:
    """Copies the weights of a checkpoint into the model, in place; names and shapes must be the model's own."""
    if has_adapters(model):
        _load_adapters(model, folder)
    else:
        copy_weights(model, read_weights(folder), str(folder / WEIGHTS))


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The stored tensors of a model without adapters, in one file or in shards."""
    return (
        read_shards(folder)
        if (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file()
        else _read(folder, WEIGHTS)
    )


def is_weights(name: str) -> bool:
    """Whether a file of a checkpoint holds weights, or says which files do."""
    return name in (WEIGHTS, BESIDE, INDEX) or name.endswith(ADAPTER)


def weight_names(folder: Path) -> set[str]:
    """The files of a sealed folder that hold weights, shards among them."""
    names = set(read_manifest(folder)["files"])
    shards = {n for n in names if n.startswith("model-") and n.endswith(".safetensors")}
    return {name for name in names if is_weights(name)} | shards


def holds(folder: Path, model: nn.Module) -> bool:
    """Whether the stored weights are the model's, bit for bit."""
    own = model.state_dict()
    files = weight_files(model, own) if has_adapters(model) else {WEIGHTS: own}
    try:
        pairs = [
            (tensor.cpu(), stored[key])
            for name, tensors in files.items()
            for stored in [read_weights(folder) if name == WEIGHTS else _read(folder, name)]
            for key, tensor in _fitting(tensors, stored, str(folder)).items()
        ]
    except (CheckpointError, SafetensorError):
        return False
    return all(mine.dtype == stored.dtype and torch.equal(mine, stored) for mine, stored in pairs)


def copy_weights(model: nn.Module, stored: dict[str, torch.Tensor], where: str) -> None:
    """Copies tensors into the model, in place; a CheckpointError where names or shapes are not the model's own."""
    if type(model).load_state_dict is not nn.Module.load_state_dict:
        # A user's model that brings its own way, for buffers that grow, say.
        model.load_state_dict(stored)
        return
    _copy(model.state_dict(), stored, where)


def _load_adapters(model: nn.Module, folder: Path) -> None:
    own = model.state_dict()
    files = adapter_files(model, own, embeddings=False)
    held = {id(tensor) for tensor in own.values()}
    for file, tensors in files.items():
        stored = _read(folder, file)
        # What PEFT computes for its file is in BESIDE as it was; embeddings of a resized vocabulary are not trained.
        mine = {key: tensor for key, tensor in tensors.items() if id(tensor) in held}
        _copy(mine, {key: stored[key] for key in stored if key in mine}, str(folder / file))
    beside = trained_beside(model, own, files)
    if beside:
        _copy(beside, _read(folder, BESIDE), str(folder / BESIDE))


def _copy(own: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], where: str) -> None:
    with torch.no_grad():
        for name, tensor in _fitting(own, stored, where).items():
            tensor.copy_(sharded_like(stored[name], tensor))


def _fitting(
    own: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor], where: str
) -> dict[str, torch.Tensor]:
    """The model's tensors that the stored ones are for. `save_pretrained` stores one of several names of a tensor."""
    missing = [name for name in own if name not in stored]
    there = {own[name].data_ptr() for name in own if name in stored} if missing else set()
    fitting = {name: tensor for name, tensor in own.items() if name in stored or tensor.data_ptr() not in there}
    wrong = sorted(set(fitting) ^ set(stored)) or [n for n in fitting if fitting[n].shape != stored[n].shape]
    if wrong:
        raise CheckpointError(f"does not fit the model: {', '.join(wrong[:5])}", where=where)
    return fitting


def _read(folder: Path, name: str) -> dict[str, torch.Tensor]:
    if not (folder / name).is_file():
        fix = f"To start a new run from its weights: --model_name_or_path {folder} and another --output_dir."
        if name == WEIGHTS and any(folder.glob(f"**/{ADAPTER}")):
            fix = "It holds PEFT adapters: put adapters into the model as the run did (peft.get_peft_model)."
        elif name != WEIGHTS:
            fix = "It is not of a run with these adapters: load what it holds with from_pretrained and start a new run."
        raise CheckpointError(f"has no {name}, so the run cannot resume exactly from it", where=str(folder), fix=fix)
    return load_file(folder / name)
