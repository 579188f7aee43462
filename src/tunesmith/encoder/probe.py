"""One short row through a model as soon as it is loaded: a config that cannot compute is refused before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunesmith.encoder.guard import naming
from tunesmith.errors import NumericsError

LENGTH = 5


def require_answer(model: Any, folder: Path) -> None:
    """A ConfigError when the model cannot compute a row of a few tokens, a NumericsError when the answer is no number."""
    import torch

    try:
        rows = getattr(model.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:
        rows = None
    if rows is None or hasattr(model.base_model, "set_attention_type"):
        return  # CANINE has no table of tokens; BigBird turns to full attention for good when it sees a short row
    ids = torch.arange(LENGTH).remainder(rows)[None]
    end = getattr(model.config, "eos_token_id", None)
    if isinstance(end, int) and 0 <= end < rows:
        ids[0, -1] = end  # BART and its kin read the place of this token
    was = model.training
    model.eval()
    with naming("its config.json describes a model that cannot compute", folder):
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        finite, shape = bool(torch.isfinite(logits).all()), tuple(logits.shape)
        if shape != (1, model.config.num_labels):
            raise ValueError(f"its answer to one row has the shape {shape}")
    model.train(was)
    if not finite:
        raise NumericsError(
            "the model answers a row of a few tokens with something that is no number",
            where=str(folder),
            fix="Use an undamaged copy of the model and its config.json.",
        )
