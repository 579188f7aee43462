"""A checkpoint: every piece of a TrainState in a sealed folder. safetensors and JSON only: nothing is ever unpickled."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

from tunesmith.errors import CheckpointError, NumericsError
from tunesmith.files import MAX_JSON_BYTES, read_plain
from tunesmith.models.families import ADAPTER, adapter_files, has_adapters, trained_beside
from tunesmith.runs.folder import RunDir, checkpoint_step
from tunesmith.runs.manifest import read_manifest, retire, verify, write_sealed
from tunesmith.runs.writing import create, hash_file, write_new
from tunesmith.training.aside import beside_steps, buffered
from tunesmith.training.serialization import from_plain, to_plain
from tunesmith.training.state import TrainState, generator_states, restore_generators
from tunesmith.training.stopping import BestSoFar

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


MARK = "sha256:"


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to. A resume compares every field."""

    run_id: str
    data: str
    config: dict[str, Any]
    labels: dict[str, Any]
    versions: dict[str, str | None]

    def to_json(self) -> dict[str, Any]:
        """A plain dict for the manifest."""
        return asdict(self)


def content_mark(*parts: str) -> str:
    """How an identity holds something too large to be shown: a hash of it, which is reported only as "changed"."""
    return MARK + hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


TOKENIZER_FILE = "tokenizer.json"
"""An entry that checkpoints of earlier versions lack."""


def differences(folder: Path, identity: Identity) -> tuple[list[str], list[str]]:
    """The differences between a checkpoint's run and this one, in words: (those that make it another run; libraries and others
    that are only reported, where an exact resume is not promised)."""
    stored = read_manifest(folder)
    known = isinstance(stored.get("config"), dict) and isinstance(stored.get("versions"), dict)
    if not known or not {"data", "labels"} <= stored.keys():
        raise CheckpointError("does not say what its run was made from", where=str(folder))
    old, new = stored["config"], identity.config
    names = [k for k in sorted(set(old) | set(new)) if old.get(k) != new.get(k)]
    names = [k for k in names if k != TOKENIZER_FILE or k in old]
    found = []
    if stored["data"] != identity.data and not any(k.endswith(" data") for k in names):
        found.append("the training data changed")
    if stored["labels"] != identity.labels:
        found.append(f"the labels were {stored['labels']} and are {identity.labels}")
    found += [_in_words(k, repr(old.get(k)), repr(new.get(k))) for k in names]
    old, new = stored["versions"], identity.versions
    return found, [_in_words(k, str(old.get(k)), str(new.get(k))) for k in {**new, **old} if old.get(k) != new.get(k)]


def _in_words(name: str, old: str, new: str) -> str:
    return f"{name} changed" if MARK in old + new else f"{name} was {old} and is {new}"


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """The manifest of an intact checkpoint, as `verify` gives it. Weights that were cut into shards since it was written must
    be the same tensors, bit for bit: put together they have the hash of the file that they replace."""
    files = read_manifest(folder)["files"]
    cut = WEIGHTS in files and INDEX not in files and not (folder / WEIGHTS).exists() and (folder / INDEX).is_file()
    if cut and hash_tensors(read_shards(folder), metadata={"format": "pt"}) != files[WEIGHTS]["sha256"]:
        raise CheckpointError(f"its tensors are not those of the {WEIGHTS} that was written", where=str(folder / INDEX))
    return verify(folder, names=set(files) - {WEIGHTS} if cut else None)


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
    mine = [f for f in run.checkpoints() if checkpoint_step(f) <= last and belongs_to(f, run_id)]
    home = None if best is None else best.resolve()
    kept = {f for f in mine[-1:] if newest} | {f for f in mine if f.resolve() == home}
    old = [f for f in mine if f not in kept][: max(len(mine) - max(keep, len(kept)), 0)]
    for folder in old:
        retire(folder)
    return old


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
BESIDE = "trained.safetensors"
"""Only with adapters: what is trained and not in their files as it is, under the model's own names."""
DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""In the order in which the library puts them into a file."""
BLOCK = 1 << 22
"""Bytes written and hashed at a time."""


def write_tensors(
    file: Path, tensors: dict[str, torch.Tensor], *, metadata: dict[str, str] | None = None
) -> Future[str]:
    """Writes contiguous CPU tensors, byte for byte as the library would; gives the sha256 in hex, when it is ready.

    The tensors must stay as they are until then: their memory is hashed by a thread that the writing does not wait for.
    """
    if any(tensor.dtype not in DTYPES for tensor in tensors.values()):
        save_file(tensors, file, metadata=metadata)
        ready: Future[str] = Future()
        ready.set_result(hash_file(file))
        return ready
    parts = _parts(tensors, metadata)
    digest = _hash_aside(parts, tensors)
    try:
        with create(file) as out:
            for part in parts:
                for at in range(0, len(part), BLOCK):
                    out.write(part[at : at + BLOCK])
    except BaseException:
        digest.cancel()
        raise
    return digest


def hash_tensors(tensors: dict[str, torch.Tensor], *, metadata: dict[str, str] | None = None) -> str | None:
    """The sha256 of the file that `write_tensors` would write; None where that is left to the library."""
    if any(tensor.dtype not in DTYPES for tensor in tensors.values()):
        return None
    return _hash_aside(_parts(tensors, metadata), tensors).result()


def _parts(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> list[memoryview]:
    """The bytes of a safetensors file: header, then tensor after tensor."""
    place = list(DTYPES).index
    ordered = sorted(tensors.items(), key=lambda item: (place(item[1].dtype), item[0]))
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, tensor in ordered:
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *(_bytes_of(tensor) for _, tensor in ordered)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor, without a copy (numpy has no bfloat16)."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _hash_aside(parts: list[memoryview], owners: dict[str, torch.Tensor]) -> Future[str]:
    """sha256 of the parts, made by a thread of its own: one file is hashed while the next is written and synced.

    `owners` are the tensors whose memory the parts look at: the thread keeps them alive.
    """
    digest: Future[str] = Future()

    def run(_owners: object) -> None:
        total = hashlib.sha256()
        for part in parts:
            for start in range(0, len(part), BLOCK):
                if digest.cancelled():
                    return
                total.update(part[start : start + BLOCK])
        if digest.set_running_or_notify_cancel():
            digest.set_result(total.hexdigest())

    threading.Thread(target=run, args=(owners,), name="tunesmith-hash", daemon=True).start()
    return digest


def read_shards(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors that the index lists; a CheckpointError names what is missing or leads out of the folder."""
    try:
        places = json.loads((folder / INDEX).read_bytes())["weight_map"]
        shards = {name: load_file(folder / name) for name in sorted(set(places.values())) if Path(name).name == name}
        return {tensor: shards[name][tensor] for tensor, name in places.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its shards cannot be read: {error}", where=str(folder / INDEX)) from error


def weight_files(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], take: Take | None = None
) -> dict[str, dict[str, torch.Tensor]]:
    """Tensors by file and name, ready for safetensors. Of a model with adapters, what is trained alone."""
    if not has_adapters(model):
        return {WEIGHTS: contiguous(tensors, take, WEIGHTS)}
    files = {name: contiguous(held) for name, held in adapter_files(model, tensors).items()}
    beside = trained_beside(model, tensors, adapter_files(model, tensors, embeddings=False))
    return {**files, BESIDE: contiguous(beside)} if beside else files


Take = Callable[[torch.Tensor, str], torch.Tensor]
"""(tensor of a device, its file and name) -> a copy of it."""


def contiguous(
    tensors: Mapping[str, torch.Tensor], take: Take | None = None, file: str = ""
) -> dict[str, torch.Tensor]:
    """Tensors ready for safetensors, each with memory of its own: on the CPU, or where `take` puts those of a device."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        elsewhere = take is not None and tensor.device.type != "cpu"
        tensor = take(tensor, f"{file}/{name}") if take is not None and elsewhere else tensor.cpu().contiguous()
        out[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return out


def require_finite(weights: Mapping[str, torch.Tensor], step: int) -> None:
    """A NumericsError before weights that are not finite reach the disk: an update can overflow where its gradient did not."""
    floats = {n: t for n, t in weights.items() if t.is_floating_point() and t.numel()}
    found = {n: torch.stack(t.aminmax()).isfinite().all() for n, t in floats.items()}
    for device in {flag.device for flag in found.values()}:
        here = [n for n, flag in found.items() if flag.device == device]
        for name, finite in zip(here, torch.stack([found[n] for n in here]).tolist(), strict=True):  # one read a device
            if not finite:
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
    sharded = (folder / INDEX).is_file() and not (folder / WEIGHTS).is_file()
    return read_shards(folder) if sharded else _read(folder, WEIGHTS)


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
        # a user's model with its own `load_state_dict`, for buffers that grow, for example
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
            tensor.copy_(stored[name])


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
        raise missing_file(folder, name)
    return load_file(folder / name)


def missing_file(folder: Path, name: str) -> CheckpointError:
    """The error for a checkpoint that lacks a file."""
    fix = f"To start a new run from its weights: --model_name_or_path {folder} and another --output_dir."
    if name == WEIGHTS and any(folder.glob(f"**/{ADAPTER}")):
        fix = "It holds PEFT adapters: put adapters into the model as the run did (peft.get_peft_model)."
    elif name != WEIGHTS and is_weights(name):
        fix = "It is not of a run with these adapters: load what it holds with from_pretrained and start a new run."
    return CheckpointError(f"has no {name}, so the run cannot resume exactly from it", where=str(folder), fix=fix)


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
