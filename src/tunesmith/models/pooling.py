"""Which vector of a row the head reads: the first token's, or the mean of all, in a model that transformers loads as it is.

transformers' BERT and RoBERTa give their head the first token. The mean comes from one more standard layer: its queries and
keys are zero, so every token attends to all tokens alike; its values are the hidden states, scaled so that the residual of
the first token hardly counts; its feed-forward part adds nothing. The first token then contains the
normalized mean. The dense layer of the head starts as a scaled identity, in which tanh is nearly straight: the last layer
then reads the pooled vector itself, and can start from a linear model fitted to it. Both parts are not trained.
"""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import nn

from tunesmith.errors import ConfigError
from tunesmith.models.families import anatomy_of, why_not

Pooling = Literal["pooler", "first", "mean"]
VALUE_SCALE = 256.0
"""Of the averaging layer: the first token's own vector stays in with a weight of 1/256. A power of 2 is exact in any type."""
HEAD_SCALE = 0.5
"""Of the identity in front of tanh, for values of variance 1: they are mostly below 2, where tanh(x / 2) bends little."""
_TANH_HEADS = ("bert", "roberta", "xlm-roberta", "camembert")
"""Families whose head is a dense layer, tanh and a linear layer."""


def poolings_of(model: nn.Module) -> tuple[Pooling, ...]:
    """What `set_pooling` can do with this model; "pooler" is what it does by itself."""
    config: Any = model.config
    if config.model_type == "modernbert" and hasattr(config, "classifier_pooling"):
        return ("pooler", "first", "mean")
    if config.model_type not in _TANH_HEADS or why_not(model) is not None or is_averaging(model):
        return ("pooler",)
    return ("pooler", "first", "mean")


def set_pooling(model: nn.Module, pooling: Pooling) -> None:
    """Changes a freshly loaded model in place. It stays a plain model of its class: saving and loading need no tunesmith code."""
    if pooling == "pooler":
        if is_averaging(model):
            _freeze(*_averaging_parts(model))
        return
    if pooling not in poolings_of(model):
        raise ConfigError(
            f"--pooling {pooling} is not possible for {model.config.model_type}",  # type: ignore[union-attr]
            fix="Leave it out, or use --pooling pooler: the model's own way.",
        )
    config: Any = model.config
    if config.model_type == "modernbert":
        config.classifier_pooling = "mean" if pooling == "mean" else "cls"
        return
    dense = dense_of(model)
    _make_identity(dense, _scale_for(model, pooling))
    _freeze(dense)
    if pooling == "mean":
        _add_averaging_layer(model)


def reads_linearly(model: nn.Module, pooling: Pooling) -> bool:
    """Whether the last layer of the head reads what `pooled_features` gives, so that it can start from a fitted one."""
    config: Any = model.config
    return config.model_type in _TANH_HEADS and (pooling != "pooler" or config.model_type == "bert")


def pooled_features(model: nn.Module, hidden: torch.Tensor, mean: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """What the last layer of the head would read, from the hidden states of first tokens and the mean ones, (rows, width)."""
    config: Any = model.config
    if config.model_type not in _TANH_HEADS:
        return hidden if pooling == "first" else mean
    if pooling == "pooler":
        return torch.tanh(nn.functional.linear(hidden, *_matrix(dense_of(model))))
    if pooling == "first":
        return torch.tanh(_scale_for(model, pooling) * hidden)
    blended = mean + hidden / VALUE_SCALE
    normal = nn.functional.layer_norm(blended, blended.shape[-1:])
    return torch.tanh(_scale_for(model, pooling) * normal)


def _scale_for(model: nn.Module, pooling: Pooling) -> float:
    """The mean is normalized; the size of a first token's values is that of the last norm's weights."""
    layers = anatomy_of(model).layers
    if pooling == "mean" or layers is None:
        return HEAD_SCALE
    norm: Any = layers[-1].output.LayerNorm  # type: ignore[union-attr]
    size = float((norm.weight.detach().square() + norm.bias.detach().square()).mean().sqrt())
    return HEAD_SCALE / max(size, 1e-3)


def last_linear(model: nn.Module) -> nn.Linear:
    """The layer that gives the logits."""
    head: Any = getattr(model, "classifier", None)
    found = getattr(head, "out_proj", head)
    if not isinstance(found, nn.Linear):
        raise ConfigError(f"the head of {type(model).__name__} does not end in a linear layer that is known")
    return found


def is_averaging(model: nn.Module) -> bool:
    """Whether the last layer is one that `set_pooling` added, in this run or the one that the model comes from."""
    config: Any = model.config
    if config.model_type not in _TANH_HEADS or why_not(model) is not None:
        return False
    layers = anatomy_of(model).layers
    if layers is None or not len(layers):
        return False
    own: Any = layers[-1].attention.self  # type: ignore[union-attr]
    if bool(own.query.weight.any()) or bool(own.key.weight.any()):
        return False
    value: torch.Tensor = own.value.weight.detach()
    return torch.equal(value, VALUE_SCALE * torch.eye(*value.shape, dtype=value.dtype, device=value.device))


def _averaging_parts(model: nn.Module) -> tuple[nn.Module, ...]:
    layers = anatomy_of(model).layers
    assert layers is not None
    layer: Any = layers[-1]
    for module in layer.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if isinstance(getattr(layer.attention.self, "attention_dropout", None), float):
        layer.attention.self.attention_dropout = 0.0
    return (layer, dense_of(model))


def _add_averaging_layer(model: nn.Module) -> None:
    config: Any = model.config
    layers = anatomy_of(model).layers
    assert layers is not None
    layer: Any = copy.deepcopy(layers[-1], {id(config): config})  # one config for all layers: it names the attention
    own, after, narrow = layer.attention.self, layer.attention.output, layer.output
    if hasattr(own, "layer_idx"):
        own.layer_idx = len(layers)
    with torch.no_grad():
        for part in (own.query, own.key, narrow.dense):
            part.weight.zero_()
            part.bias.zero_()
        _make_identity(own.value, VALUE_SCALE)
        _make_identity(after.dense, 1.0)
        for norm in (after.LayerNorm, narrow.LayerNorm):
            norm.weight.fill_(1.0)
            norm.bias.zero_()
    layers.append(layer)
    config.num_hidden_layers = len(layers)
    _freeze(*_averaging_parts(model))


def dense_of(model: Any) -> nn.Linear:
    """The layer in front of tanh in the head of BERT and RoBERTa."""
    dense: nn.Linear = model.bert.pooler.dense if model.config.model_type == "bert" else model.classifier.dense
    return dense


def _matrix(dense: nn.Linear) -> tuple[torch.Tensor, torch.Tensor]:
    return dense.weight.detach(), dense.bias.detach()


def _make_identity(dense: nn.Linear, scale: float) -> None:
    with torch.no_grad():
        dense.weight.copy_(scale * torch.eye(*dense.weight.shape))
        dense.bias.zero_()


def _freeze(*parts: nn.Module) -> None:
    for part in parts:
        part.requires_grad_(False)
