"""Encoders that the speedups support, and the names of their parts. Checks that a model is exactly what transformers builds
from its config (same classes, no hooks). Models with PEFT adapters: the inner model, and the files of the
trained tensors. `peft` is optional and imported only here.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from tunesmith.errors import ConfigError

_OF_MODULES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_ALL_MODULES = tuple(f"_global{name}" for name in _OF_MODULES)
_HARMLESS = ("tunesmith.", "transformers.utils.output_capturing")
"""Our hooks, and those that collect hidden states, which do nothing unless the config enables them."""


def hook_tables(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """Return the hook tables of these modules, and the global ones."""
    tables = [getattr(module, name) for module in modules for name in _OF_MODULES]
    return tables + [getattr(global_hooks, name) for name in _OF_ALL_MODULES]


def is_watched(tables: Iterable[dict[int, Any]]) -> bool:
    """Return whether a user's hook is in one of the tables: it would see different shapes or not be called."""
    hooks = (hook for table in tables if table for hook in table.values())
    return any(not str(getattr(hook, "__module__", "")).startswith(_HARMLESS) for hook in hooks)


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model or a part of it is compiled: torch.compile would trace it again after every change."""
    parts = list(model.modules())
    return any(type(m).__module__.startswith("torch._dynamo.") or m._compiled_call_impl is not None for m in parts)


def why_not_original(model: nn.Module, own_head: tuple[str, ...]) -> str | None:
    """Return how the model differs from what transformers builds from its config; None if it doesn't.

    Parts named in `own_head` may be anything, because they receive one vector per row.
    """
    kind: Any = type(model)
    config: Any = model.config
    try:
        expected = _classes_built(kind, config.to_json_string())
    except Exception as error:  # a modified config can fail in any way
        return f"transformers does not build it from its config ({type(error).__name__})"
    adapters: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if name.split(".", 1)[0] in own_head or any(name.startswith(adapter) for adapter in adapters):
            continue
        found = _class_of(module)
        if found.__module__.startswith("peft.tuners."):  # wraps a linear layer, which also processes tokens separately
            adapters.append(f"{name}.")
            continue
        if found is not expected.get(name):
            return f"{name} is {found.__module__}.{found.__qualname__}, not the module of transformers"
        replaced = replaced_method(module)
        if replaced:
            return f"{replaced} of {name or type(model).__name__} was replaced"
    if is_watched(hook_tables(model.modules())):
        return "its modules have hooks"
    return "it is compiled" if is_compiled(model) else None


@functools.lru_cache(maxsize=16)
def _classes_built(kind: type[Any], config: str) -> Mapping[str, type]:
    """Return the class of each module of a new model, built on the meta device without computing weights."""
    with torch.device("meta"):
        fresh = kind(kind.config_class.from_dict(json.loads(config)))
    return {name: type(module) for name, module in fresh.named_modules(remove_duplicate=False)}


def _class_of(module: nn.Module) -> type:
    """Return the class of a module; for a module that we replaced, the original class."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("tunesmith."))


def replaced_method(module: nn.Module) -> str | None:
    """Return the name of a method that was replaced on the instance or by patching the class."""
    for name, value in vars(module).items():
        if callable(getattr(type(module), name, None)) and not _is_ours(value):
            return name
    home = str(getattr(type(module).forward, "__module__", ""))
    return None if home.startswith(("torch.nn.", "transformers.", "tunesmith.")) else "forward"


def _is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("tunesmith.")


@dataclass(frozen=True, slots=True)
class Family:
    """Names of the parts of one architecture, as transformers spells them."""

    classifier: str
    """transformers' own class with a head that reads one token."""
    encoder: str
    """transformers' own class without a head."""
    stack: str
    """Attribute of the bare model that contains the layers ("": the model itself); the head reads its output."""
    layers: str | None = "layer"
    """Attribute of the stack with the list of layers; None if layers share weights."""
    positions_follow_padding: bool = False
    """RoBERTa numbers positions from `pad_token_id + 1`."""
    segments: bool = True
    """Whether the forward pass accepts `token_type_ids`."""
    own_head: tuple[str, ...] = ()
    """Parts that receive one vector per row, so that users may replace them."""
    relative: bool = False
    """Attention scores depend on the distance of two tokens, and layers accept no further arguments (speedups/relative.py)."""


def _like_bert(name: str, stack: str = "encoder", **options: Any) -> Family:
    return Family(f"{name}ForSequenceClassification", f"{name}Model", stack, **options)


FAMILIES: dict[str, Family] = {
    "bert": _like_bert("Bert", own_head=("dropout", "classifier")),
    "electra": _like_bert("Electra"),
    "roberta": _like_bert("Roberta", positions_follow_padding=True),
    "xlm-roberta": _like_bert("XLMRoberta", positions_follow_padding=True),
    "camembert": _like_bert("Camembert", positions_follow_padding=True),
    "distilbert": _like_bert(
        "DistilBert", stack="transformer", segments=False, own_head=("pre_classifier", "dropout", "classifier")
    ),
    "albert": _like_bert("Albert", layers=None, own_head=("dropout", "classifier")),
    "mpnet": _like_bert("MPNet", positions_follow_padding=True, segments=False, relative=True),
    "deberta-v2": _like_bert("DebertaV2", own_head=("dropout", "classifier"), relative=True),
    "modernbert": _like_bert(
        "ModernBert", stack="", layers="layers", segments=False, own_head=("head", "drop", "classifier")
    ),
}
"""By `config.model_type`."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a model instance."""

    family: Family
    bare: nn.Module
    stack: nn.Module
    layers: nn.ModuleList | None
    first_position: int
    """Return the position id of a row's first token."""


def why_not(model: nn.Module) -> str | None:
    """Return why this classifier cannot run packed, as the end of the sentence "packing is off: ..."; None if it can.

    The class itself is checked, not its name: a user's class may read any token or accept different arguments.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if kind not in FAMILIES:
        return f"{kind} does not fit, no description of its parts is known"
    import transformers

    family = FAMILIES[kind]
    if type(model) is not getattr(transformers, family.classifier):
        return f"{type(model).__name__} is not transformers' own {family.classifier}, its head may read any token"
    return why_not_by_config(model) or why_not_original(model, family.own_head)


def known_encoders(model: nn.Module) -> list[nn.Module]:
    """Return the encoders of known architectures inside any model: `BertModel` and the like, not subclasses of them."""
    names = {family.encoder for family in FAMILIES.values()}

    def is_known(kind: type) -> bool:
        return kind.__name__ in names and kind.__module__.startswith("transformers.models.")

    return [module for module in model.modules() if is_known(type(module))]


def why_not_encoder(encoder: nn.Module) -> str | None:
    """Return why one of the `known_encoders` cannot run packed; None if it can."""
    if getattr(encoder, "is_gradient_checkpointing", False):
        return "gradient checkpointing repeats layers"
    if anatomy_of(encoder).family.relative and getattr(encoder, "pooler", None) is not None:
        return f"the pooler of {type(encoder).__name__} reads the padded batch"
    return why_not_by_config(encoder) or why_not_original(encoder, ())


def why_not_by_config(model: nn.Module) -> str | None:
    """Return why the config of this encoder rules out packing and padding to other widths; None if it doesn't."""
    config: Any = model.config
    if getattr(config, "is_decoder", False):
        return "the model is configured as a decoder"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return "its position embeddings are relative"
    if getattr(config, "output_hidden_states", False) or getattr(config, "output_attentions", False):
        return "its config requests hidden states or attention weights"
    if any(getattr(module, "chunk_size_feed_forward", 0) for module in model.modules()):
        return "it computes its feed-forward layers in chunks"
    if getattr(config, "conv_kernel_size", 0) > 0:
        return "it has a convolution over tokens"
    ropes = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(r, dict) and r.get("rope_type", "default") != "default" for r in ropes.values()):
        return "its rotary positions depend on the length of the batch"
    return None


def anatomy_of(model: nn.Module) -> Anatomy:
    """Return the parts of a model for which `why_not` is None."""
    config = model.config
    family = FAMILIES[str(config.model_type)]  # type: ignore[union-attr]
    bare: Any = getattr(model, str(model.base_model_prefix), model)  # an encoder is its own
    stack: nn.Module = getattr(bare, family.stack) if family.stack else bare
    layers = getattr(stack, family.layers) if family.layers else None
    offset = int(bare.embeddings.padding_idx) + 1 if family.positions_follow_padding else 0
    return Anatomy(family, bare, stack, layers, first_position=offset)


def pools_mean(model: nn.Module) -> bool:
    """Return whether the head reads the mean of all tokens instead of the first."""
    return getattr(model.config, "classifier_pooling", "cls") == "mean"


def project_keys(attention: nn.Module, hidden: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of `hidden` (batch, length, width) as (batch, heads, length, head size)."""
    names = ("key", "value") if hasattr(attention, "key") else ("k_lin", "v_lin")
    shape = (*hidden.shape[:-1], -1, head_size)
    key, value = (getattr(attention, name)(hidden).view(shape).transpose(1, 2) for name in names)
    return key, value


def is_hooked(parameter: torch.Tensor) -> bool:
    """Return whether a hook receives the gradient of a parameter immediately."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


ADAPTER = "adapter_model.safetensors"
_PREFIX = "base_model.model."
"""Key prefix of an adapter that `model.add_adapter` made."""


def has_adapters(model: nn.Module) -> bool:
    """Return whether only the adapters of this model are stored: made by `get_peft_model`, or by `model.add_adapter`."""
    return _is_wrapped(model) or bool(getattr(model, "_hf_peft_config_loaded", False))


def adapter_files(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], *, embeddings: bool = True
) -> dict[str, dict[str, torch.Tensor]]:
    """Return tensors by file and key in PEFT's layout: the adapter `default` at the top, others in a folder with their name.

    Tensors that are unchanged in `tensors`, the model's state dict, are the same objects. `embeddings`: include those
    that PEFT adds if the vocabulary was resized.
    """
    from peft import get_peft_model_state_dict

    wrapped = _is_wrapped(model)
    adapted: Any = model
    files = {}
    for name in list(adapted.peft_config) if wrapped else adapted.active_adapters()[:1]:
        found = get_peft_model_state_dict(
            model, state_dict=tensors, adapter_name=name, save_embedding_layers="auto" if embeddings else False
        )
        folder = f"{name}/" if wrapped and name != "default" else ""
        files[f"{folder}{ADAPTER}"] = found if wrapped else {f"{_PREFIX}{k}": v for k, v in found.items()}
    return files


def trained_beside(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], files: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return tensors that training changes and no adapter file contains: unfrozen layers, a prompt encoder, buffers."""
    held = {id(t) for file in files.values() for t in file.values()}
    changing = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    changing |= {n for n, _ in model.named_buffers()}
    return {n: t for n, t in tensors.items() if n in changing and id(t) not in held}


def _is_wrapped(model: nn.Module) -> bool:
    """Return whether a model is a `PeftModel`, without importing the library."""
    kind = getattr(sys.modules.get("peft"), "PeftModel", None)
    return kind is not None and isinstance(model, kind)


# --- pooling ----------------------------------------------------------------------------------------------------------

# Which vector of a row the head reads: the first token's, or the mean of all, in a model that transformers loads as it
# is. The heads of BERT and RoBERTa in transformers read the first token. The mean comes from one more standard layer: its
# queries and keys are zero, so every token attends to all tokens alike; its values are the hidden states, scaled so
# that the residual of the first token hardly counts; its feed-forward part adds nothing. The first token then contains
# the normalized mean. The dense layer of the head starts as a scaled identity, in which tanh is nearly straight: the
# last layer then reads the pooled vector itself, and can start from a linear model fitted to it. Both parts are not
# trained.

Pooling = Literal["pooler", "first", "mean"]
VALUE_SCALE = 256.0
"""Weight of the first token's own vector in the averaging layer. A power of 2 is exact in any type."""
HEAD_SCALE = 0.5
"""Scale of the identity before tanh. Values have variance 1 and are mostly below 2, where tanh(x / 2) is nearly linear."""
_TANH_HEADS = ("bert", "roberta", "xlm-roberta", "camembert")
"""Families whose head is a dense layer, tanh and a linear layer."""


def poolings_of(model: nn.Module) -> tuple[Pooling, ...]:
    """Return the poolings that `set_pooling` supports for this model; "pooler" is its own."""
    config: Any = model.config
    if config.model_type == "modernbert" and hasattr(config, "classifier_pooling"):
        return ("pooler", "first", "mean")
    if config.model_type not in _TANH_HEADS or why_not(model) is not None or is_averaging(model):
        return ("pooler",)
    return ("pooler", "first", "mean")


def set_pooling(model: nn.Module, pooling: Pooling) -> None:
    """Change a newly loaded model in place. It stays a plain model of its class, so that loading needs no tunesmith code."""
    if pooling == "pooler":
        if is_averaging(model):
            _freeze(*_averaging_parts(model))
        return
    if pooling not in poolings_of(model):
        raise ConfigError(
            f"--pooling {pooling} is not possible for {model.config.model_type}",  # type: ignore[union-attr]
            fix="Omit it, or use --pooling pooler: the model's own pooling.",
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
    """Return whether the last layer of the head reads `pooled_features`, so that it can start from a fitted one."""
    config: Any = model.config
    return config.model_type in _TANH_HEADS and (pooling != "pooler" or config.model_type == "bert")


def pooled_features(model: nn.Module, hidden: torch.Tensor, mean: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Return the input of the head's last layer, from the hidden states of first tokens and their means, (rows, width)."""
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
    """Return the scale of pooled vectors: fixed for a normalized mean; by the size of the last norm for a first token."""
    layers = anatomy_of(model).layers
    if pooling == "mean" or layers is None:
        return HEAD_SCALE
    norm: Any = layers[-1].output.LayerNorm  # type: ignore[union-attr]
    size = float((norm.weight.detach().square() + norm.bias.detach().square()).mean().sqrt())
    return HEAD_SCALE / max(size, 1e-3)


def last_linear(model: nn.Module) -> nn.Linear:
    """Return the layer that computes the logits."""
    head: Any = getattr(model, "classifier", None)
    found = getattr(head, "out_proj", head)
    if not isinstance(found, nn.Linear):
        raise ConfigError(f"the head of {type(model).__name__} does not end in a linear layer that is known")
    return found


def is_averaging(model: nn.Module) -> bool:
    """Return whether `set_pooling` added the last layer, in this run or an earlier one."""
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
    layer: Any = copy.deepcopy(
        layers[-1], {id(config): config}
    )  # all layers share one config, which names the attention
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
    """Return the layer before tanh in the head of BERT and RoBERTa."""
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
