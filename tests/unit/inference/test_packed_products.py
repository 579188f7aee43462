"""Products laid out once for prediction: the same numbers, with few rows and with many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tunesmith.speedups.cpu_speed import PackedLinear, enable_cpu_speed, pack_products


def make_model(activation: str) -> Any:
    from transformers import BertConfig, BertForSequenceClassification, set_seed

    set_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
        max_position_embeddings=64, hidden_act=activation, initializer_range=0.2,
    )  # fmt: skip
    return BertForSequenceClassification(config).eval()


@pytest.mark.parametrize("rows", [1, 3, 9])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_packed_products_give_the_plain_logits(activation: str, rows: int) -> None:
    model, ids = make_model(activation), torch.randint(0, 50, (rows, 30))
    with torch.inference_mode():
        plain = model(ids).logits
    enable_cpu_speed(model)
    assert pack_products(model) == 2 * 6 + 1  # the pooler's too; the head is too small
    fused = [m for m in model.modules() if isinstance(m, PackedLinear) and m.gelu]
    assert len(fused) == (2 if activation == "gelu" else 0)
    with torch.inference_mode():
        packed = model(ids).logits
    assert plain.std() > 0.01
    torch.testing.assert_close(packed, plain, atol=1e-5, rtol=0)


def test_the_state_of_the_model_stays_as_it_was_and_gradients_still_flow() -> None:
    model = make_model("gelu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    enable_cpu_speed(model)
    pack_products(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    model(torch.randint(0, 50, (4, 30))).logits.sum().backward()
    assert model.bert.encoder.layer[0].intermediate.dense.weight.grad.abs().sum() > 0
