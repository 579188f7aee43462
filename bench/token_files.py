"""Reads what bench/token_ids.py wrote, as rows for the engine and as rows for transformers.Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunesmith.data.token_rows import Ragged, TokenRows

TOKENS = Path(__file__).resolve().parents[1] / "scratch" / "tokens"


def engine_rows(name: str, split: str, limit: int | None = None) -> TokenRows:
    """The rows of a split for the engine."""
    with np.load(TOKENS / f"{name}.npz") as data:
        offsets, labels = data[f"{split}.offsets"], data[f"{split}.labels"]
        ends = np.array([0, len(offsets) - 1], dtype=np.int64)
        columns = {c: Ragged(((data[f"{split}.{c}"], offsets),), ends) for c in ("input_ids", "token_type_ids")}
    rows = TokenRows(columns, np.diff(offsets).astype(np.int32), labels)
    return rows if limit is None else rows.select(np.arange(min(limit, len(rows))))


def trainer_rows(rows: TokenRows) -> list[dict[str, Any]]:
    """The same rows as a list of dicts, as a tokenized Dataset gives them."""
    every = rows.take(np.arange(len(rows)))
    assert rows.labels is not None
    return [
        {
            "input_ids": ids.tolist(),
            "token_type_ids": types.tolist(),
            "attention_mask": [1] * len(ids),
            "labels": int(label),
        }
        for ids, types, label in zip(every["input_ids"], every["token_type_ids"], rows.labels, strict=True)
    ]


def pad(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Dynamic padding, as DataCollatorWithPadding does it."""
    width = max(len(f["input_ids"]) for f in features)
    out = {
        name: torch.tensor([f[name] + [0] * (width - len(f[name])) for f in features])
        for name in ("input_ids", "token_type_ids", "attention_mask")
    }
    out["labels"] = torch.tensor([f["labels"] for f in features])
    return out
