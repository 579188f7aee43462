"""A model with mean pooling is still a plain transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from tunesmith.data.batches import Padding
from tunesmith.errors import ConfigError
from tunesmith.models.families import is_averaging, last_linear, pooled_features, poolings_of, set_pooling
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.optimizer import count_layers, param_groups

SHAPE: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
    "num_labels": 3, "max_position_embeddings": 40, "pad_token_id": 1,
}  # fmt: skip


ROWS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]


def make(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "bert":
        model: Any = BertForSequenceClassification(BertConfig(**SHAPE))
    else:
        model = RobertaForSequenceClassification(RobertaConfig(**SHAPE))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model.eval()


def padded() -> dict[str, torch.Tensor]:
    width = max(map(len, ROWS))
    ids = torch.tensor([row + [1] * (width - len(row)) for row in ROWS])
    return {"input_ids": ids, "attention_mask": (ids != 1).long()}


def read_by_head(model: Any) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    hook = last_linear(model).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(**padded())
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("pooling", ["pooler", "first", "mean"])
def test_head_reads_the_pooled_vector(kind: str, pooling: Any) -> None:
    model = make(kind)
    with torch.no_grad():
        hidden = model.base_model(**padded()).last_hidden_state
    mask = padded()["attention_mask"].unsqueeze(-1)
    mean = (hidden * mask).sum(1) / mask.sum(1)
    expected = pooled_features(model, hidden[:, 0], mean, pooling)
    set_pooling(model, pooling)
    assert torch.allclose(read_by_head(model), expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_saved_mean_model_loads_in_transformers(kind: str, tmp_path: Path) -> None:
    model = make(kind)
    set_pooling(model, "mean")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        ours, theirs = (m(**padded()).logits.softmax(1) for m in (model, loaded))
    assert type(loaded) is type(model)
    assert loaded.config.num_hidden_layers == 3
    assert (ours - theirs).abs().max() < 1e-5
    assert is_averaging(loaded)
    assert poolings_of(loaded) == ("pooler",)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_mean_model_packed_has_equal_logits(kind: str) -> None:
    model = make(kind)
    set_pooling(model, "mean")
    with torch.no_grad():
        plain = model(**padded()).logits
        speedups = apply_speedups(model, None, Padding(1), device=torch.device("cpu"))
        assert {"padding_free", "cls_only_last_layer"} <= set(speedups.parts)
        batch: Any = speedups.collate({"input_ids": [torch.tensor(row).numpy() for row in ROWS]})
        fast = model(**batch).logits
    speedups.close()
    assert (plain - fast).abs().max() < 1e-4


def test_averaging_layer_is_not_trained() -> None:
    model, plain = make("bert"), make("bert")
    set_pooling(model, "mean")
    assert count_layers(model) == count_layers(plain) == 2
    rates: list[dict[str, float]] = []
    for each in (model, plain):
        groups = param_groups(each, weight_decay=0.0, layerwise_lr_decay=0.5, head_lr_scale=3.0)
        rates.append({name: group.lr_scale for group in groups for name in group.names})
    mean, ours = rates
    assert all(ours[name] == rate for name, rate in mean.items())
    assert not any(".layer.2." in name or "pooler" in name for name in mean)
    assert mean["classifier.weight"] == 3.0
    assert mean["bert.encoder.layer.1.output.dense.weight"] == 0.5


def test_modernbert_pools_by_its_own_config() -> None:
    shape = {k: v for k, v in SHAPE.items() if k != "num_labels"}
    model = ModernBertForSequenceClassification(ModernBertConfig(**shape, num_labels=3, cls_token_id=2, sep_token_id=3))
    set_pooling(model, "mean")
    assert model.config.classifier_pooling == "mean"
    assert model.config.num_hidden_layers == 2


def test_distilbert_refuses_mean_pooling() -> None:
    model = DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=60, dim=16, n_layers=1, n_heads=2, hidden_dim=32)
    )
    assert poolings_of(model) == ("pooler",)
    with pytest.raises(ConfigError, match="--pooling mean is not possible for distilbert"):
        set_pooling(model, "mean")
