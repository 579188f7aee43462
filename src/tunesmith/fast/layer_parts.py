"""Where the parts of an encoder layer are: post-norm layers of BERT's kind, by whatever names transformers has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tunesmith.encoder.families import anatomy_of, why_not


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Self-attention, its norm, feed-forward, its norm, and the dropouts after each (None: there is none)."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    attention_output: nn.Linear
    attention_norm: nn.LayerNorm
    widen: nn.Linear
    narrow: nn.Linear
    output_norm: nn.LayerNorm
    heads: int
    attention: Any
    """The module whose `scaling` the scores are multiplied by; with attention by distances, the one that knows them."""
    drop_weights: nn.Dropout
    drop_attention: nn.Dropout | None
    drop_output: nn.Dropout


def _like_bert(layer: Any) -> LayerParts:
    own, after = layer.attention.self, layer.attention.output
    return LayerParts(
        own.query, own.key, own.value, after.dense, after.LayerNorm,
        layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm,
        own.num_attention_heads, own, own.dropout, after.dropout, layer.output.dropout,
    )  # fmt: skip


def _like_distilbert(layer: Any) -> LayerParts:
    own = layer.attention
    return LayerParts(
        own.q_lin, own.k_lin, own.v_lin, own.out_lin, layer.sa_layer_norm,
        layer.ffn.lin1, layer.ffn.lin2, layer.output_layer_norm,
        own.n_heads, own, own.dropout, None, layer.ffn.dropout,
    )  # fmt: skip


def _like_mpnet(layer: Any) -> LayerParts:
    own, after = layer.attention.attn, layer.attention
    return LayerParts(
        own.q, own.k, own.v, own.o, after.LayerNorm,
        layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm,
        own.num_attention_heads, own, own.dropout, after.dropout, layer.output.dropout,
    )  # fmt: skip


def _like_deberta(layer: Any) -> LayerParts:
    own, after = layer.attention.self, layer.attention.output
    return LayerParts(
        own.query_proj, own.key_proj, own.value_proj, after.dense, after.LayerNorm,
        layer.intermediate.dense, layer.output.dense, layer.output.LayerNorm,
        own.num_attention_heads, own, own.dropout, after.dropout, layer.output.dropout,
    )  # fmt: skip


_KINDS = {
    "bert": _like_bert,
    "electra": _like_bert,
    "roberta": _like_bert,
    "xlm-roberta": _like_bert,
    "camembert": _like_bert,
    "distilbert": _like_distilbert,
    "mpnet": _like_mpnet,
    "deberta-v2": _like_deberta,
}


def parts_of(model: nn.Module) -> list[LayerParts]:
    """The parts of each layer of a model that `why_not_fused` has nothing against."""
    anatomy = anatomy_of(model)
    assert anatomy.family.layers is not None
    read = _KINDS[str(model.config.model_type)]  # type: ignore[union-attr]
    return [read(layer) for layer in getattr(anatomy.stack, anatomy.family.layers)]


def why_not_fused(model: nn.Module) -> str | None:
    """Why the layers of this model must run as transformers wrote them; None when they can run fused."""
    reason = why_not(model)
    if reason:
        return reason
    config: Any = model.config
    if config.model_type == "albert":
        return "the layers of albert share one set of modules"
    if config.model_type not in (*_KINDS, "modernbert"):
        return f"the layers of {config.model_type} are not of BERT's kind"
    if getattr(config, "relative_attention", False) and not getattr(config, "share_att_key", False):
        return "it has projections of distances of their own"
    names = ("hidden_act", "hidden_activation", "activation")
    activation = next((getattr(config, name) for name in names if hasattr(config, name)), None)
    if activation != "gelu":
        return f"its activation is {activation}, not gelu"
    stack = anatomy_of(model).stack
    parameters = list(stack.named_parameters(remove_duplicate=False))
    if len({id(p) for _, p in parameters}) < len(parameters):
        return "its layers share parameters"
    if any(p.dtype != torch.float32 for _, p in parameters):
        return "its weights are not float32"
    if config.model_type == "modernbert":
        biased = any(m.bias is not None for m in stack.modules() if isinstance(m, nn.Linear))
        return "its projections have biases" if biased else None
    if any(m.bias is None for m in stack.modules() if isinstance(m, (nn.Linear, nn.LayerNorm))):
        return "a layer has no bias"
    return None
