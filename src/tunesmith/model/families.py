"""Which encoders the exact strategies know, and where their parts are."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Family:
    """Names of the parts of one architecture, as transformers spells them."""

    stack: str
    """Attribute of the bare model that holds the layers; its output is what the head reads."""
    keys: str
    values: str
    layers: str | None = "layer"
    """Attribute of the stack with the list of layers; None where layers share weights."""
    positions_follow_padding: bool = False
    """RoBERTa numbers positions from `pad_token_id + 1`."""
    segments: bool = True
    """Whether the forward takes `token_type_ids`."""


_BERT = Family(stack="encoder", keys="key", values="value")
_ROBERTA = Family(stack="encoder", keys="key", values="value", positions_follow_padding=True)

FAMILIES: dict[str, Family] = {
    "bert": _BERT,
    "electra": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "distilbert": Family(stack="transformer", keys="k_lin", values="v_lin", segments=False),
    "albert": Family(stack="encoder", keys="key", values="value", layers=None),
}
"""By `config.model_type`. DeBERTa and MPNet add a bias per position pair, ModernBERT unpads by itself."""

_REASONS = {
    "deberta": "its attention adds a relative position bias",
    "deberta-v2": "its attention adds a relative position bias",
    "mpnet": "its attention adds a relative position bias",
    "modernbert": "it has its own rotary positions and unpadding",
}


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of one model instance."""

    family: Family
    bare: nn.Module
    stack: nn.Module
    last_layer: nn.Module | None
    first_position: int
    """The position id of a row's first token."""


def why_not(model: nn.Module) -> str | None:
    """Why this model cannot run packed, as the rest of the sentence "padding-free is off: ..."; None when it can."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in FAMILIES:
        return f"{kind} does not fit, {_REASONS.get(kind, 'no description of its parts is known')}"
    if not type(model).__name__.endswith("ForSequenceClassification"):
        return f"{type(model).__name__} is not a sequence classification model, its head reads more than one token"
    if getattr(config, "is_decoder", False):
        return "the model is configured as a decoder"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return "its position embeddings are relative"
    bare = getattr(model, str(getattr(model, "base_model_prefix", "")), None)
    if not isinstance(getattr(bare, FAMILIES[kind].stack, None), nn.Module):
        return f"the layers of this {kind} are not where transformers keeps them"
    return None


def anatomy_of(model: nn.Module) -> Anatomy:
    """The parts of a model that `why_not` has nothing against."""
    config = model.config
    family = FAMILIES[str(config.model_type)]  # type: ignore[union-attr]
    bare = getattr(model, str(model.base_model_prefix))
    stack: nn.Module = getattr(bare, family.stack)
    layers = getattr(stack, family.layers) if family.layers else None
    offset = int(config.pad_token_id) + 1 if family.positions_follow_padding else 0  # type: ignore[union-attr, arg-type]
    return Anatomy(
        family=family,
        bare=bare,
        stack=stack,
        last_layer=layers[-1] if layers is not None and len(layers) else None,
        first_position=offset,
    )


def project_keys(attention: nn.Module, hidden: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `hidden` (batch, length, width) as (batch, heads, length, head size)."""
    names = ("key", "value") if hasattr(attention, "key") else ("k_lin", "v_lin")
    shape = (*hidden.shape[:-1], -1, head_size)
    key, value = (getattr(attention, name)(hidden).view(shape).transpose(1, 2) for name in names)
    return key, value
