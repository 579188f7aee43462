"""A checkpoint: every piece of a TrainState in a sealed folder. safetensors and JSON only: nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from tunesmith.errors import CheckpointError
from tunesmith.files import MAX_JSON_BYTES, read_plain
from tunesmith.models.families import ADAPTER
from tunesmith.runs.sealed import write_sealed
from tunesmith.runs.writing import create, write_new
from tunesmith.training.aside import beside_steps, buffered
from tunesmith.training.plain import pack_optimizer, unpack_optimizer
from tunesmith.training.record import Identity
from tunesmith.training.state import TrainState, generator_states, restore_generators
from tunesmith.training.stopping import BestSoFar
from tunesmith.training.weight_files import (
    WEIGHTS,
    Take,
    contiguous,
    copy_weights,
    load_weights,
    missing_file,
    read_weights,
    require_finite,
    weight_files,
    write_tensors,
)

OPTIMIZER, GENERATORS, STATE = "optimizer.safetensors", "generators.safetensors", "state.json"
PIECES = (OPTIMIZER, GENERATORS, STATE)
"""Beside the weights (weight_files.py)."""
VOCABULARY = "vocabulary.safetensors"
"""Only where weight decay shrinks embedding rows that do not occur in the data: their values before any decay."""


@dataclass(frozen=True)
class Snapshot:
    """`files` are tensors by file and name; `state` is the text of state.json; `meta` goes into the manifest."""

    files: dict[str, dict[str, torch.Tensor]]
    state: str
    meta: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for tensors in self.files.values() for t in tensors.values())

    def write(self, folder: Path, describe: Callable[[Path], None] | None) -> None:
        """Publishes it as a sealed folder. `describe` writes what makes it loadable elsewhere (config, tokenizer)."""

        def fill(tmp: Path) -> dict[str, Future[str]]:
            if describe is not None:
                # first: it may write weights of its own, and the hashes below are of what is written here
                describe(tmp)
            known = write_files(tmp, self.files)
            write_new(tmp / STATE, self.state.encode())
            return known

        write_sealed(folder, fill, self.meta, bytes_needed=self.size)

    def copied(self, buffers: dict[str, torch.Tensor]) -> Snapshot:
        """The same on the CPU, in memory of its own; what a device computes meanwhile does not wait for it."""
        devices = {tensor.device for tensors in self.files.values() for tensor in tensors.values() if tensor.is_cuda}
        with beside_steps(devices.pop() if devices else torch.device("cpu")):
            files = {
                file: {name: buffered(buffers, tensor, f"{file}/{name}") for name, tensor in tensors.items()}
                for file, tensors in self.files.items()
            }
        return replace(self, files=files)


@dataclass
class Due:
    """A checkpoint that is to be published by a thread; `improved`: it holds the best weights so far."""

    step: int
    snapshot: Snapshot
    improved: bool


def write_files(folder: Path, files: dict[str, dict[str, torch.Tensor]]) -> dict[str, Future[str]]:
    """Writes tensors by file and name; returns futures of their sha256. Files of weights carry the format `pt`."""
    known = {}
    for name, tensors in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)  # a model's own way to save may have written it
        metadata = {"format": "pt"} if name.endswith((WEIGHTS, ADAPTER)) else None
        known[name] = write_tensors(folder / name, tensors, metadata=metadata)
    return known


def link_files(source: Path, target: Path, names: list[str]) -> None:
    """Files of one folder in another: hard links where the disk can, so they cost nothing."""
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        try:
            os.link(source / name, target / name)
        except OSError:
            with open(source / name, "rb") as old, create(target / name) as new:
                shutil.copyfileobj(old, new)


def save_checkpoint(
    folder: Path, state: TrainState, identity: Identity, *, describe: Callable[[Path], None] | None = None
) -> None:
    """Publishes the state as `folder`. `describe` writes what makes it loadable elsewhere (config, tokenizer).

    All ranks call it; rank 0 alone writes, between two barriers.
    """
    snapshot = capture(state, identity)
    if snapshot is not None:
        snapshot.write(folder, describe)
    state.runtime.barrier()


def capture(
    state: TrainState, identity: Identity, buffers: dict[str, torch.Tensor] | None = None, *, stays: bool = False
) -> Snapshot | None:
    """What a checkpoint of this moment holds, on rank 0; None on the others. All ranks call it.

    Tensors that are on the CPU already are the run's own: a caller that continues training copies them first. Those of a device
    are copied into `buffers`, which must not be in use; or on the device itself, where the copy `stays`; then what the
    optimizer has on the CPU is copied too.
    """
    state.require_whole("they are not saved")
    generators = state.runtime.gather_objects(generator_states(state.runtime.device))
    if not state.runtime.is_main:
        return None
    take: Take | None = _clone if stays else None if buffers is None else partial(buffered, buffers)
    weights = weight_files(state.model, _whole_tensors(state), take)
    tensors, plain = pack_optimizer(state.optimizer)
    tensors = contiguous(tensors, take, OPTIMIZER)
    if stays:  # some optimizers count their steps on the host
        tensors = {name: tensor if tensor.is_cuda else tensor.clone() for name, tensor in tensors.items()}
    for held in weights.values():
        require_finite(held, state.step)
    files = {
        **weights,
        OPTIMIZER: tensors,
        GENERATORS: {f"{k}.{r}": v for r, g in enumerate(generators) for k, v in g["tensors"].items()},
    }
    if state.cut is not None and float(state.cut.kept) != 1.0:
        files[VOCABULARY] = state.cut.state_dict()
    if stays:
        torch.cuda.synchronize(state.runtime.device)
    text = json.dumps(_plain_state(state, plain, generators), allow_nan=False)
    return Snapshot(files, text, {"kind": "checkpoint", "step": state.step, **identity.to_json()})


def _clone(tensor: torch.Tensor, key: str) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def full_weights(state: TrainState) -> dict[str, torch.Tensor]:
    """The model's tensors as transformers stores them, on the CPU, with the whole vocabulary."""
    return contiguous(_whole_tensors(state))


def _whole_tensors(state: TrainState) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = state.model.state_dict()
    if state.cut is not None:
        tensors[_embedding_name(state.model)] = state.cut.table()
    return tensors


def bytes_of(state: TrainState) -> tuple[int, int]:
    """(bytes of the weights, bytes of a whole checkpoint) to be expected on disk."""
    weights = sum(t.numel() * t.element_size() for t in state.model.state_dict().values())
    if state.cut is not None:
        whole = state.cut.size * int(state.model.get_input_embeddings().weight.shape[1]) * 4  # type: ignore[operator]
        weights += whole * (2 if state.cut_decay else 1)
    moments = sum(2 * p.numel() * p.element_size() for g in state.optimizer.param_groups for p in g["params"])
    return weights, weights + moments


def _embedding_name(model: nn.Module) -> str:
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    return next(name for name, parameter in model.named_parameters() if parameter is weight)


def _plain_state(state: TrainState, optimizer: dict[str, Any], generators: list[dict[str, Any]]) -> dict[str, Any]:
    scale = state.loss_scale
    return {
        "step": state.step,
        "progress": state.progress.to_json(),
        "rows_limit": state.rows_limit,
        "evaluation_due": state.evaluation_due,
        "vocabulary": None if state.cut is None else "decayed" if float(state.cut.kept) != 1.0 else "plain",
        "vocabulary_given_up": state.strategies is not None and "restrict_vocabulary" in state.strategies.dropped,
        "loss_scale": None if scale is None else [float(scale.scale), int(scale.good_steps)],
        "optimizer": optimizer,
        "generators": [g["plain"] for g in generators],
        "extra": state.extra,
    }


def _read_state(file: Path) -> dict[str, Any]:
    try:
        plain = json.loads(read_plain(file, MAX_JSON_BYTES)) if file.is_file() else {}
    except (ValueError, RecursionError):
        plain = None
    if not isinstance(plain, dict):
        raise CheckpointError("is not the state of a run", where=str(file))
    return plain


def load_checkpoint(folder: Path, state: TrainState, *, settings: bool = True) -> None:
    """Loads a verified checkpoint into the state. A missing piece is refused: there is no partial resume.

    Without `settings` the optimizer's groups (rate, decay, ...) stay as this run has made them.
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
        raise CheckpointError(f"does not hold a complete state: {error}", where=str(folder)) from error


def _load_pieces(folder: Path, state: TrainState, plain: dict[str, Any], *, settings: bool) -> None:
    if plain.get("vocabulary_given_up") and state.cut is not None:
        state.stop_cutting("it was off when the checkpoint was saved")
    if (plain["vocabulary"] is None) != (state.cut is None):
        raise CheckpointError("has a cut vocabulary on one side only (restrict_vocabulary)", where=str(folder))
    _load_weights_into(state, folder)
    tensors = load_file(folder / OPTIMIZER)
    unpack_optimizer(state.optimizer, tensors, plain["optimizer"], str(folder), settings=settings)
    state.step = int(plain["step"])
    state.phase = "done"
    state.optimizer.zero_grad(set_to_none=True)
    state.progress = BestSoFar(**plain["progress"])
    state.rows_limit = plain["rows_limit"]
    state.evaluation_due = bool(plain.get("evaluation_due", False))
    state.extra = plain["extra"]
    if state.loss_scale is not None and plain["loss_scale"] is not None:
        state.loss_scale.scale.fill_(plain["loss_scale"][0])
        state.loss_scale.good_steps.fill_(plain["loss_scale"][1])
    rank = state.runtime.rank
    if rank < len(plain["generators"]):
        restore_generators(load_file(folder / GENERATORS), plain["generators"][rank], rank, state.runtime.device)


def _load_weights_into(state: TrainState, folder: Path) -> None:
    """Weights of a checkpoint, also where the state trains a cut vocabulary."""
    if state.cut is None:
        load_weights(state.model, folder)
    else:
        stored = read_weights(folder)
        name = _embedding_name(state.model)
        cut = {
            "table": stored[name],
            "ids": torch.from_numpy(state.cut.ids),
            "kept": torch.ones((), dtype=torch.float64),
        }
        state.cut.load_state_dict(load_file(folder / VOCABULARY) if (folder / VOCABULARY).is_file() else cut)
        stored[name] = state.model.state_dict()[name]
        copy_weights(state.model, stored, str(folder / WEIGHTS))
