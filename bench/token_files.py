"""Reads what bench/token_ids.py wrote, as rows for the engine and as rows for transformers.Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tunesmith.data.tokens import Ragged, TokenRows

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


def arrow_rows(rows: TokenRows) -> Any:
    """The same rows as a `datasets.Dataset`."""
    from datasets import Dataset

    return Dataset.from_list(trainer_rows(rows))


def collator(multiple_of: int | None = None) -> Any:
    """DataCollatorWithPadding with the tokenizer that made the ids."""
    from transformers import AutoTokenizer, DataCollatorWithPadding

    return DataCollatorWithPadding(
        AutoTokenizer.from_pretrained(str(TOKENS / "minilm")), pad_to_multiple_of=multiple_of
    )


def read_texts() -> tuple[list[str], list[str]]:
    """The sentences of MRPC's test split, firsts and seconds."""
    with np.load(TOKENS / "texts.npz") as data:
        first, second = (data[name].tobytes().decode().split("\n") for name in ("sentence1", "sentence2"))
    return first, second


def long_tail_lengths(count: int, seed: int = 1) -> npt.NDArray[np.int64]:
    """Tokens of each row: lognormal, half of the rows under 40, 5 to 512; 1 in 400 is 500 tokens or longer."""
    drawn = np.random.default_rng(seed).lognormal(np.log(40.0), 0.9, count)
    return np.clip(np.round(drawn), 5, 512).astype(np.int64)


def make_rows(lengths: npt.NDArray[np.int64], seed: int = 1) -> tuple[TokenRows, list[str]]:
    """Rows of so many tokens (the last word's pieces may be missing), as ids and as text: stretches of MRPC's words.

    Labels are drawn at random: nothing is to be learnt from such rows but how long they take.
    """
    with np.load(TOKENS / "words.npz") as data:
        words = data["text"].tobytes().decode().split("\n")
        offsets, ids, ends = data["offsets"], data["input_ids"], data["ends"]
    rng = np.random.default_rng(seed + 1)
    last = int(np.searchsorted(offsets, offsets[-1] - lengths.max()))
    start = rng.integers(0, last, len(lengths))
    stop = np.searchsorted(offsets, offsets[start] + lengths - 2, side="right") - 1
    sizes = offsets[stop] - offsets[start] + 2
    where = np.concatenate(([0], np.cumsum(sizes)))
    inside = np.arange(where[-1]) - np.repeat(where[:-1], sizes) - 1  # -1 at [CLS]
    values = ids[np.clip(inside + np.repeat(offsets[start], sizes), 0, len(ids) - 1)]
    values[where[:-1]], values[where[1:] - 1] = ends
    bounds = np.array([0, len(lengths)], dtype=np.int64)
    columns = {
        "input_ids": Ragged(((values, where),), bounds),
        "token_type_ids": Ragged(((np.zeros_like(values), where),), bounds),
    }
    rows = TokenRows(columns, sizes.astype(np.int32), rng.integers(0, 2, len(lengths)))
    return rows, [" ".join(words[a:b]) for a, b in zip(start, stop, strict=True)]


def pad(features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Dynamic padding, as DataCollatorWithPadding does it."""
    width = max(len(f["input_ids"]) for f in features)
    out = {
        name: torch.tensor([f[name] + [0] * (width - len(f[name])) for f in features])
        for name in ("input_ids", "token_type_ids", "attention_mask")
    }
    if "labels" in features[0]:
        out["labels"] = torch.tensor([f["labels"] for f in features])
    return out
