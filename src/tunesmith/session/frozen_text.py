"""Texts as vectors of the frozen encoder: the mean of a text's tokens; two texts by their difference and product."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tunesmith.audit.text_survey import Ints
from tunesmith.encoder.load import load_model
from tunesmith.labels import LabelMap
from tunesmith.session.watch import Watch

MOST_TOKENS = 128
BATCH_ROWS = 32


def embed_rows(folder: Path, tokenizer: Any, labels: LabelMap, texts: Sequence[Sequence[str]], watch: Watch) -> Ints:
    """One vector a row, from the first tokens of its texts; each text is computed once."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(folder, labels, ignore_mismatched_sizes=True, new_head=True).model
    bare = model.base_model.to(device).eval()
    known = {text: number for number, text in enumerate(dict.fromkeys(t for row in texts for t in row))}
    every = list(known)
    order = np.argsort([len(text) for text in every], kind="stable")
    vectors: Ints | None = None
    with torch.inference_mode():
        for at in range(0, len(every), BATCH_ROWS):
            some = order[at : at + BATCH_ROWS]
            batch = tokenizer(
                [every[i] for i in some], padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt"
            ).to(device)
            hidden = bare(**batch).last_hidden_state.float()
            mask = batch["attention_mask"][..., None]
            mean = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1).clamp_min(1))
            vectors = np.zeros((len(every), mean.shape[1]), np.float32) if vectors is None else vectors
            vectors[some] = mean.cpu().numpy()
            watch.progress("reading with the frozen model", min(at + BATCH_ROWS, len(every)), len(every))
    assert vectors is not None
    sides = [vectors[[known[row[side]] for row in texts]] for side in range(len(texts[0]))]
    return sides[0] if len(sides) == 1 else np.concatenate([np.abs(sides[0] - sides[1]), sides[0] * sides[1]], axis=1)
