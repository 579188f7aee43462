"""Decay groups, layer-wise rates, freezing."""

from __future__ import annotations

import pytest

from conftest import tiny_bert
from tunesmith.errors import ConfigError
from tunesmith.training.optimizer import count_layers, depth_of, freeze, param_groups


def test_only_matrices_decay_and_every_trainable_parameter_is_in_one_group() -> None:
    model = tiny_bert()
    shapes = {n: p.ndim for n, p in model.named_parameters()}
    groups = param_groups(model, weight_decay=0.1)
    names = [n for g in groups for n in g.names]
    assert sorted(names) == sorted(shapes)
    assert {g.weight_decay for g in groups} == {0.0, 0.1}
    for group in groups:
        assert all((shapes[n] >= 2) == (group.weight_decay > 0) for n in group.names)


def test_the_rate_shrinks_from_the_head_down_to_the_embeddings() -> None:
    model = tiny_bert(layers=3)
    assert count_layers(model) == 3
    scale = {n: g.lr_scale for g in param_groups(model, weight_decay=0.0, layerwise_lr_decay=0.5) for n in g.names}
    assert scale["classifier.weight"] == 1.0
    assert scale["bert.pooler.dense.weight"] == 1.0
    assert scale["bert.encoder.layer.2.output.dense.weight"] == 0.5
    assert scale["bert.encoder.layer.0.output.dense.weight"] == 0.125
    assert scale["bert.embeddings.word_embeddings.weight"] == 0.0625


@pytest.mark.parametrize(
    ("parts", "frozen", "trained"),
    [
        (("embeddings",), "bert.embeddings.word_embeddings.weight", "bert.encoder.layer.0.output.dense.weight"),
        (("encoder",), "bert.encoder.layer.1.output.dense.weight", "classifier.weight"),
        (("layers.0-1",), "bert.encoder.layer.1.output.dense.weight", "bert.encoder.layer.2.output.dense.weight"),
    ],
)
def test_freezing_stops_the_named_parts_and_nothing_else(parts: tuple[str, ...], frozen: str, trained: str) -> None:
    model = tiny_bert(layers=3)
    names = freeze(model, parts)
    assert frozen in names
    assert not model.get_parameter(frozen).requires_grad
    assert model.get_parameter(trained).requires_grad
    assert set(names).isdisjoint(n for g in param_groups(model, weight_decay=0.0) for n in g.names)


@pytest.mark.parametrize(
    ("part", "text"), [("embedings", "Did you mean"), ("layers.7", "layers 0 to 1"), ("layers.2-1", "layers 0 to 1")]
)
def test_an_unknown_part_is_refused(part: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        freeze(tiny_bert(), (part,))


def test_distilbert_and_roberta_names_have_a_depth() -> None:
    assert depth_of("distilbert.transformer.layer.4.ffn.lin1.weight", 6) == 5
    assert depth_of("roberta.embeddings.LayerNorm.weight", 6) == 0
    assert depth_of("model.layers.3.mlp.Wi.weight", 6) == 4
    assert depth_of("classifier.out_proj.weight", 6) == 7
