"""Files of tensors: safetensors whose bytes are hashed while they are written, so that nothing is read back; those that hold the
weights of a checkpoint, and the way back into the model.

The format: 8 bytes of header length, the header in JSON padded to 8 bytes, then the tensors without gaps.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tunesmith.encoder.families import ADAPTER, adapter_files, has_adapters, trained_beside
from tunesmith.errors import CheckpointError, NumericsError
from tunesmith.ranks.sharding import gathered, sharded_like
from tunesmith.run.sealed import read_manifest
from tunesmith.run.writing import create, hash_file

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
        tensor = gathered(tensor.detach())
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


def holds_names(folder: Path, model: nn.Module) -> bool:
    """Return whether the stored weights have the model's own names, so that `load_weights` restores all of them."""
    if has_adapters(model) or not (folder / WEIGHTS).is_file():
        return False
    own = model.state_dict()
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        stored = set(file.keys())
    there = {own[name].data_ptr() for name in own if name in stored}
    return stored <= own.keys() and all(n in stored or t.data_ptr() in there for n, t in own.items())


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
