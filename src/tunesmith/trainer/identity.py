"""What a Trainer's checkpoint belongs to: the data and the options its position in the data depends on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from tunesmith.errors import CheckpointError
from tunesmith.run.environment import package_versions
from tunesmith.run.resealed import CHANGED
from tunesmith.run.sealed import read_manifest
from tunesmith.train.checkpoint import Identity, differences, version_changes
from tunesmith.trainer.data import is_arrow_dataset
from tunesmith.trainer.upstream import has_length, trainer_log

SAMPLED_ROWS = 16


def make_identity(args: Any, dataset: Any, model: Any, run_id: str, rows_per_step: int) -> Identity:
    """The identity of a run. Options that may change between two calls of a script (epochs, rate, logging) are not in it."""
    config = {
        "rows_per_step": rows_per_step,
        "train_sampling_strategy": str(args.train_sampling_strategy),
        "seed": args.seed,
        "data_seed": args.data_seed,
        "dataloader_drop_last": args.dataloader_drop_last,
    }
    labels = getattr(getattr(model, "config", None), "id2label", None) or {}
    names = {"names": [str(labels[k]) for k in sorted(labels)]}
    return Identity(run_id, fingerprint(dataset), config, names, package_versions())


def fingerprint(dataset: Any) -> str:
    """Length, columns and a sample of rows of an Arrow dataset; the length alone of anything else (its rows may be random)."""
    if dataset is None or not has_length(dataset):
        return "stream"
    text = f"{len(dataset)} rows"
    if is_arrow_dataset(dataset) and getattr(dataset, "_format_type", None) != "custom" and len(dataset):
        spread = [i * (len(dataset) - 1) // SAMPLED_ROWS for i in range(SAMPLED_ROWS + 1)]
        sample = [dataset.with_format(None)[i] for i in sorted(set(spread))]
        text += json.dumps([sorted(dataset.column_names), sample], default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def require_same_run(folder: Any, identity: Identity, *, allow: bool) -> list[str]:
    """What differs between a checkpoint's run and this one; refused unless allowed, as its place in the data means
    something else now. Another version of a library is a warning."""
    found = differences(folder, identity)
    if found and not allow:
        raise CheckpointError(
            f"this run was started with something else: {'; '.join(found)}",
            where=str(folder),
            fix="Put it back, set Trainer.allow_changed_data = True to go on all the same, or load the weights with "
            "from_pretrained and start a new run.",
        )
    changed = [f"goes on although {text}" for text in found] + version_changes(folder, identity)
    changed += [f"{name} of {folder} was changed by a callback" for name in read_manifest(folder).get(CHANGED, ())]
    for text in changed:
        trainer_log.warning("not an exact resume: %s", text)
    return changed


def run_id_of(folder: Any) -> str:
    """The run a checkpoint belongs to."""
    return str(read_manifest(folder)["run_id"])
