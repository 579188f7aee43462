"""Tiny random models of every architecture and ragged batches, for tests of the exact speedups."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

VOCABULARY = 60
PAD = {"roberta": 1, "xlm-roberta": 1, "camembert": 1, "mpnet": 1}
CUT_FAMILIES = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "distilbert", "mpnet", "deberta-v2")
FAMILIES = (*CUT_FAMILIES, "albert", "modernbert", "modernbert-mean")
RELATIVE = ("mpnet", "deberta-v2")
UNSEGMENTED = ("distilbert", "mpnet", "modernbert", "modernbert-mean")
OWN: dict[str, dict[str, Any]] = {
    "deberta-v2": {
        "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 6, "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "max_relative_positions": -1, "position_biased_input": False, "pooler_dropout": 0.0,
        "pooler_hidden_act": "gelu", "problem_type": "single_label_classification",
    },
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "classifier_pooling": "cls"},
    "modernbert-mean": {"local_attention": 8, "global_attn_every_n_layers": 2, "classifier_pooling": "mean"},
}  # fmt: skip
"""Few buckets and narrow windows, which rows of 17 tokens exceed."""
RAGGED = (5, 1, 2, 9, 5, 17, 2, 11)
MANY_STEPS = (40, pytest.param(100, marks=pytest.mark.long))

Rows = dict[str, list[np.ndarray]]


def make_model(
    kind: str, *, dropout: float = 0.0, layers: int = 2, seed: int = 0, labels: int = 3, **own: Any
) -> nn.Module:
    """Return a random sequence classification model in train mode, float32."""
    torch.manual_seed(seed)
    pad = PAD.get(kind, 0)
    if kind == "distilbert":
        config: Any = transformers.DistilBertConfig(
            vocab_size=VOCABULARY, dim=32, hidden_dim=64, n_layers=layers, n_heads=4, max_position_embeddings=40,
            dropout=dropout, attention_dropout=dropout, seq_classif_dropout=dropout, num_labels=labels, pad_token_id=pad,
        )  # fmt: skip
    else:
        drops = ("embedding_dropout", "mlp_dropout", "attention_dropout") if "modernbert" in kind else ()
        config = transformers.AutoConfig.for_model(
            kind.removesuffix("-mean"), vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
            num_attention_heads=4, max_position_embeddings=40, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout, classifier_dropout=dropout, classifier_dropout_prob=dropout,
            num_labels=labels, pad_token_id=pad, type_vocab_size=2,
            **({} if kind in RELATIVE else {"embedding_size": 16}), **OWN.get(kind, {}), **dict.fromkeys(drops, dropout),
            **own,
        )  # fmt: skip
    with (
        warnings.catch_warnings()
    ):  # DeBERTa-v2 calls torch.jit.script when it is imported, which torch 2.13 deprecates
        warnings.filterwarnings("ignore", message=".*torch.jit.script.*")
        model: nn.Module = transformers.AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():  # the initial standard deviation of 0.02 would hide errors: all scores would be near zero
        for name, parameter in model.named_parameters():
            if "norm" not in name.lower() and parameter.dim() > 1:
                parameter.mul_(5.0)
    return model.train()


def make_rows(lengths: Sequence[int], *, seed: int = 0, pad: int = 0) -> Rows:
    """Return random token ids (never the padding id) and segments."""
    rng = np.random.default_rng(seed)
    return {
        "input_ids": [rng.integers(pad + 1, VOCABULARY, n) for n in lengths],
        "token_type_ids": [(np.arange(n) >= n // 2).astype(np.int64) for n in lengths],
    }


def make_labels(count: int, *, seed: int = 0, labels: int = 3) -> torch.Tensor:
    """Return random class ids."""
    return torch.from_numpy(np.random.default_rng(seed + 1000).integers(0, labels, count))


def pad_rows(rows: Rows, *, kind: str, segments: bool = True) -> dict[str, torch.Tensor]:
    """Return a padded batch."""
    pad = PAD.get(kind, 0)
    longest = max(len(ids) for ids in rows["input_ids"])

    def stack(parts: list[np.ndarray], fill: int) -> torch.Tensor:
        return torch.from_numpy(
            np.stack([np.pad(p.astype(np.int64), (0, longest - len(p)), constant_values=fill) for p in parts])
        )

    batch = {
        "input_ids": stack(rows["input_ids"], pad),
        "attention_mask": stack([np.ones(len(p), np.int64) for p in rows["input_ids"]], 0),
    }
    if segments and kind not in UNSEGMENTED:
        batch["token_type_ids"] = stack(rows["token_type_ids"], 0)
    return batch


def gradients(model: nn.Module, batch: dict[str, Any], labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return loss, logits, and the gradient of each parameter by name."""
    model.zero_grad(set_to_none=True)
    out = model(**batch, labels=labels)
    out.loss.backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return out.loss.detach(), out.logits.detach(), found


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two dicts with equal keys."""
    assert one.keys() == other.keys()
    return max(float((one[k] - other[k]).detach().abs().max()) for k in one)


def assert_same_step(expected: Any, found: Any, tolerance: float = 1e-5) -> None:
    """Assert that two results of `gradients` are equal up to rounding."""
    assert abs(expected[0] - found[0]) < 1e-6
    assert torch.allclose(expected[1], found[1], atol=2e-6)
    assert largest_difference(expected[2], found[2]) < tolerance
