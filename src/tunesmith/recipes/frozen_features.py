"""One forward pass of a frozen encoder: the first token's vector and the mean one of each row, kept on disk by content."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from tunesmith.errors import TunesmithError
from tunesmith.ranks.runtime import Runtime
from tunesmith.run.writing import write_file
from tunesmith.tokens.batches import Padding, evaluation_batches
from tunesmith.tokens.token_cache import default_token_cache
from tunesmith.tokens.token_rows import TokenRows

log = logging.getLogger(__name__)
TOKENS_IN_A_BATCH = {"cpu": 2048, "cuda": 32_768}


@dataclass(frozen=True)
class FrozenFeatures:
    """`first[i]` and `mean[i]` belong to row i; half precision, as they are kept on disk."""

    first: torch.Tensor
    mean: torch.Tensor


def compute_features(
    model: nn.Module,
    rows: TokenRows,
    padding: Padding,
    runtime: Runtime,
    *,
    on_batch: Callable[[int], None] | None = None,
) -> FrozenFeatures:
    """Runs the encoder without its head over the rows, in evaluation mode. The model is left as it was."""
    bare: Any = model.base_model
    found: dict[str, torch.Tensor] = {}
    limit = TOKENS_IN_A_BATCH.get(runtime.device.type, 2048)
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), runtime.autocast():
            for batch in evaluation_batches(rows, padding, max_tokens=limit):
                moved = runtime.move(batch)
                hidden = bare(**moved.inputs).last_hidden_state.float()
                mask = moved.inputs["attention_mask"].unsqueeze(-1).float()
                mean = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1)
                for name, values in (("first", hidden[:, 0]), ("mean", mean)):
                    store = found.setdefault(
                        name, torch.empty(len(rows), values.shape[-1], dtype=torch.half, device=values.device)
                    )
                    store[torch.from_numpy(batch.rows).to(values.device)] = values.half()
                if on_batch is not None:
                    on_batch(len(batch))
    finally:
        model.train(was_training)
    return FrozenFeatures(found["first"], found["mean"])


def cached_features(
    key: str, folder: str | None, rows: TokenRows, compute: Callable[[], FrozenFeatures], device: torch.device
) -> tuple[FrozenFeatures, bool]:
    """What `compute` gives, or gave for the same rows and the same `key` before; and whether it was found."""
    from safetensors.torch import load, save

    root = Path(folder) / "probe" if folder is not None else default_token_cache().parent / "probe"
    file = root / f"{_name_of(key, rows)}.safetensors"
    try:
        stored = load(file.read_bytes())
        if len(stored["first"]) == len(rows) and stored["first"].shape == stored["mean"].shape:
            return FrozenFeatures(stored["first"].to(device), stored["mean"].to(device)), True
    except FileNotFoundError:
        pass
    except Exception as error:  # whatever is wrong with the file, its content can be computed again
        log.warning("features in %s cannot be used (%s); they are computed again", file, error)
    made = compute()
    try:
        os.makedirs(root, exist_ok=True)
        write_file(file, save({"first": made.first.cpu(), "mean": made.mean.cpu()}))
    except (OSError, TunesmithError) as error:
        log.warning("features cannot be kept in %s (%s)", root, error)
    return made, False


def _name_of(key: str, rows: TokenRows) -> str:
    digest = hashlib.sha256(key.encode())
    for name, column in sorted(rows.columns.items()):
        digest.update(name.encode())
        for part in column.take(np.arange(len(rows))):
            digest.update(np.asarray(part, dtype=np.int64).tobytes())
            digest.update(b"|")
    return digest.hexdigest()[:32]
