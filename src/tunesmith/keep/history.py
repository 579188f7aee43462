"""The checkpoints of a run folder: which are intact, which one to resume from, which ones to remove."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tunesmith.errors import CheckpointError
from tunesmith.keep.snapshot import WEIGHTS
from tunesmith.keep.tensor_file import hash_tensors
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
    so that it never stands in for an intact one.
    """
    found = [f for f in run.checkpoints() if checkpoint_step(f) <= last and belongs_to(f, run_id)]
    mine = sorted(found, key=checkpoint_step)
    home = None if best is None else best.resolve()
    kept = {f for f in mine[-1:] if newest} | {f for f in mine if f.resolve() == home}
    old = [f for f in mine if f not in kept][: max(len(mine) - max(keep, len(kept)), 0)]
    for folder in old:
        retire(folder)
    return old
