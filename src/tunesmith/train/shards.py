"""Weights of a checkpoint that were cut into shards (`model.safetensors.index.json`): read, and shown to be the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tunesmith.errors import CheckpointError
from tunesmith.run.sealed import read_manifest, verify
from tunesmith.train.snapshot import WEIGHTS
from tunesmith.train.tensor_file import hash_tensors

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
