"""What every stack of fused layers has: the parts of an encoder layer (post-norm layers of BERT's kind, by whatever names
transformers has them), half-precision copies of its matrices, and a forward in place of transformers'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from tunesmith.errors import ConfigError
from tunesmith.models.families import anatomy_of, hook_tables, is_watched, why_not


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


class Copies(Protocol):
    """Of one layer: parameters, and for each of them the copy that products are computed with."""

    @property
    def copied(self) -> Sequence[torch.Tensor]:
        """The parameters."""

    @property
    def targets(self) -> Sequence[torch.Tensor]:
        """Their copies."""


class FusedStack:
    """The strategy as applied to one model. `disable` leaves the model as it was."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, first_token_only: bool) -> None:
        reason = why_not_fused(model)
        if reason:
            raise ConfigError(f"fused layers are not possible: {reason}", fix="Train it unfused.")
        self.dtype, self.first_token_only = dtype, first_token_only
        self._stack: Any = anatomy_of(model).stack
        self._inner = list(self._uncalled())
        self._listeners = hook_tables(self._inner)
        copies = self._copies(model)
        self._targets = [t for layer in copies for t in layer.targets]
        self._copied = [p for layer in copies for p in layer.copied]
        self._seen: list[tuple[int, int]] = []
        self.kept_fresh = False
        """Set where nothing but an optimizer's kernel, which writes the copies too, writes weights between steps."""
        self.enable()

    def _uncalled(self) -> Iterable[nn.Module]:
        """The modules whose work is done without calling them."""
        raise NotImplementedError

    def _copies(self, model: nn.Module) -> Sequence[Copies]:
        """Those of each layer."""
        raise NotImplementedError

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the stack's own forward."""
        raise NotImplementedError

    @property
    def copies(self) -> dict[torch.Tensor, torch.Tensor]:
        """Each parameter that has one, with its copy."""
        return dict(zip(self._copied, self._targets, strict=True))

    def enable(self) -> None:
        """Let the stack run fused."""
        self._stack.forward = self._forward

    def disable(self) -> None:
        """Give the stack its own forward back."""
        vars(self._stack).pop("forward", None)

    def refresh_if_changed(self) -> None:
        """Copy the weights if anything but the optimizer's kernel wrote to them, or put others in their place."""
        seen = [(p._version, p.data_ptr()) for p in self._copied]
        if seen != self._seen:
            self._refresh()
            self._seen = seen

    def _refresh(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._copied)

    def _prepare(self, calls: int, device: torch.device) -> torch.Tensor:
        """Copies as the weights are now; one seed for each call that drops values."""
        if self.kept_fresh:
            self.refresh_if_changed()
        else:  # copied anew each time: a write through `.data` leaves no sign
            self._refresh()
        # From torch's generator, which is seeded for the step: dropout is a function of the step.
        return torch.randint(2**62, (calls,), device=device) if self._stack.training else self._targets[0]

    def _is_watched(self) -> bool:
        """Hooks of the user's of any kind; of our own, those that look for a value that is not finite."""
        return any(module._forward_hooks for module in self._inner) or is_watched(self._listeners)


def probability(dropout: nn.Module | None, training: bool) -> float:
    """The share of values that a layer's dropout drops now."""
    return dropout.p if training and isinstance(dropout, nn.Dropout) else 0.0
