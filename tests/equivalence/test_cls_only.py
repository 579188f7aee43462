"""A last layer that computes only first tokens has the loss and gradients of the full layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from equivalence.strategy_cases import (
    CUT_FAMILIES,
    PAD,
    RAGGED,
    gradients,
    largest_difference,
    make_labels,
    make_model,
    make_rows,
    pad_rows,
)
from tunesmith.errors import ConfigError
from tunesmith.speedups.packing import enable_first_token_only, enable_padding_free, pack, why_not_first_token

SHAPES = {"ragged": RAGGED, "one row": (7,), "all of one token": (1, 1, 1), "equal": (6, 6, 6, 6)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", CUT_FAMILIES)
def test_first_token_only_layer_matches_plain_layer(kind: str, shape: str) -> None:
    model = make_model(kind)
    rows, labels = make_rows(SHAPES[shape], pad=PAD.get(kind, 0)), make_labels(len(SHAPES[shape]))
    batch: dict[str, Any] = pad_rows(rows, kind=kind)
    loss, logits, plain = gradients(model, batch, labels)
    strategy = enable_padding_free(model)
    batch = dict(pack(rows, first_position=strategy.first_position, keys=strategy.keys))
    enable_first_token_only(model)
    ours_loss, ours_logits, ours = gradients(model, batch, labels)
    assert abs(loss - ours_loss) < 1e-6
    assert torch.allclose(logits, ours_logits, atol=2e-6)
    assert largest_difference(plain, ours) < 1e-5


def test_last_feed_forward_computes_only_first_tokens() -> None:
    model = make_model("bert", layers=3)
    seen: dict[int, tuple[int, ...]] = {}
    strategy = enable_padding_free(model)
    enable_first_token_only(model)
    for number, layer in enumerate(model.bert.encoder.layer):
        layer.intermediate.register_forward_hook(lambda m, a, o, n=number: seen.__setitem__(n, tuple(o.shape[:2])))
    model(**pack(make_rows(RAGGED), first_position=strategy.first_position, keys=strategy.keys))
    assert seen == {0: (1, sum(RAGGED)), 1: (1, sum(RAGGED)), 2: (1, len(RAGGED))}


@pytest.mark.parametrize("kind", CUT_FAMILIES)
def test_padded_call_by_user_returns_all_tokens(kind: str) -> None:
    model = make_model(kind).eval()
    batch = pad_rows(make_rows(RAGGED, pad=PAD.get(kind, 0)), kind=kind)
    with torch.no_grad():
        plain = model.base_model(**batch).last_hidden_state
        enable_padding_free(model)
        enable_first_token_only(model)
        found = model.base_model(**batch).last_hidden_state
    real = batch["attention_mask"].bool()
    assert found.shape == plain.shape
    assert torch.allclose(found[real], plain[real], atol=1e-5)


@pytest.mark.parametrize("order", ["packing first", "cut first"])
def test_strategies_can_be_removed_in_any_order(order: str) -> None:
    model = make_model("bert")
    before = model.config._attn_implementation
    speedups = [enable_padding_free(model), enable_first_token_only(model)]
    for strategy in speedups if order == "packing first" else reversed(speedups):
        strategy.disable()
    assert model.config._attn_implementation == before


def test_shared_layers_raise_with_the_reason() -> None:
    model = make_model("albert")
    assert "share" in str(why_not_first_token(model))
    with pytest.raises(ConfigError, match="cannot be reduced"):
        enable_first_token_only(model)
