"""Which encoders the exact strategies know, and where their parts are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tunesmith.encoder.recognition import why_not_original


@dataclass(frozen=True, slots=True)
class Family:
    """Names of the parts of one architecture, as transformers spells them."""

    classifier: str
    """transformers' own class with a head that reads one token."""
    stack: str
    """Attribute of the bare model that holds the layers (the empty name: it does itself); its output is what the head reads."""
    layers: str | None = "layer"
    """Attribute of the stack with the list of layers; None where layers share weights."""
    positions_follow_padding: bool = False
    """RoBERTa numbers positions from `pad_token_id + 1`."""
    segments: bool = True
    """Whether the forward takes `token_type_ids`."""
    own_head: tuple[str, ...] = ()
    """Parts that are handed one vector for each row, and may therefore be the user's own."""
    relative: bool = False
    """Scores depend on how far apart two tokens are, and layers take no further arguments (fast/relative_attention.py)."""


def _like_bert(name: str, **options: Any) -> Family:
    return Family(f"{name}ForSequenceClassification", "encoder", **options)


FAMILIES: dict[str, Family] = {
    "bert": _like_bert("Bert", own_head=("dropout", "classifier")),
    "electra": _like_bert("Electra"),
    "roberta": _like_bert("Roberta", positions_follow_padding=True),
    "xlm-roberta": _like_bert("XLMRoberta", positions_follow_padding=True),
    "camembert": _like_bert("Camembert", positions_follow_padding=True),
    "distilbert": Family(
        "DistilBertForSequenceClassification",
        "transformer",
        segments=False,
        own_head=("pre_classifier", "dropout", "classifier"),
    ),
    "albert": _like_bert("Albert", layers=None, own_head=("dropout", "classifier")),
    "mpnet": _like_bert("MPNet", positions_follow_padding=True, segments=False, relative=True),
    "deberta-v2": _like_bert("DebertaV2", own_head=("dropout", "classifier"), relative=True),
    "modernbert": Family(
        "ModernBertForSequenceClassification", "", "layers", segments=False, own_head=("head", "drop", "classifier")
    ),
}
"""By `config.model_type`."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of one model instance."""

    family: Family
    bare: nn.Module
    stack: nn.Module
    layers: nn.ModuleList | None
    first_position: int
    """The position id of a row's first token."""


def why_not(model: nn.Module) -> str | None:
    """Why this model cannot run packed, as the rest of the sentence "padding-free is off: ..."; None when it can.

    Known by what it is, not by what it is called: a class of one's own may read any token, or take other arguments.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", type(model).__name__)
    if kind not in FAMILIES:
        return f"{kind} does not fit, no description of its parts is known"
    import transformers

    family = FAMILIES[kind]
    if type(model) is not getattr(transformers, family.classifier):
        return f"{type(model).__name__} is not transformers' own {family.classifier}, its head may read any token"
    if getattr(config, "is_decoder", False):
        return "the model is configured as a decoder"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return "its position embeddings are relative"
    if getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
        return "its config asks for hidden states or attention weights"
    if any(getattr(module, "chunk_size_feed_forward", 0) for module in model.modules()):
        return "it computes its feed-forward layers in chunks"
    if getattr(config, "conv_kernel_size", 0) > 0:
        return "a convolution mixes neighbouring tokens"
    ropes = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(r, dict) and r.get("rope_type", "default") != "default" for r in ropes.values()):
        return "its rotary positions depend on the length of the batch"
    return why_not_original(model, family.own_head)


def anatomy_of(model: nn.Module) -> Anatomy:
    """The parts of a model that `why_not` has nothing against."""
    config = model.config
    family = FAMILIES[str(config.model_type)]  # type: ignore[union-attr]
    bare = getattr(model, str(model.base_model_prefix))
    stack: nn.Module = getattr(bare, family.stack) if family.stack else bare
    layers = getattr(stack, family.layers) if family.layers else None
    offset = int(bare.embeddings.padding_idx) + 1 if family.positions_follow_padding else 0
    return Anatomy(
        family=family,
        bare=bare,
        stack=stack,
        layers=layers,
        first_position=offset,
    )


def pools_mean(model: nn.Module) -> bool:
    """Whether the head reads the mean of all tokens instead of the first."""
    return getattr(model.config, "classifier_pooling", "cls") == "mean"


def project_keys(attention: nn.Module, hidden: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `hidden` (batch, length, width) as (batch, heads, length, head size)."""
    names = ("key", "value") if hasattr(attention, "key") else ("k_lin", "v_lin")
    shape = (*hidden.shape[:-1], -1, head_size)
    key, value = (getattr(attention, name)(hidden).view(shape).transpose(1, 2) for name in names)
    return key, value
