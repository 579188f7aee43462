"""The embedding block of models of BERT's kind in few kernels on a GPU: words, positions, kinds of tokens, LayerNorm, dropout.

A part of fused layers: it hands the first layer what it reads, the residual in float32 and its copy in half precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tunesmith.models.families import anatomy_of, hook_tables, is_watched
from tunesmith.speedups.fused_ops import side_stream, sum_rows
from tunesmith.speedups.steady_tables import SteadyEmbedding
from tunesmith.speedups.vocabulary import CutEmbedding
from tunesmith.training.distributed import has_triton

_BERT = ("input_ids", "token_type_ids", "position_ids", "inputs_embeds", "past_key_values_length")
_ARGUMENTS = {
    **dict.fromkeys(("bert", "electra", "roberta", "xlm-roberta", "camembert"), _BERT),
    "distilbert": ("input_ids", "inputs_embeds", "position_ids"),
}
"""Arguments of the block's forward in transformers' order, by the type of the model."""
_TABLES = (nn.Embedding, SteadyEmbedding, CutEmbedding)
Draw = Callable[[torch.device, bool], tuple[torch.Tensor, int]]
"""(where, whether the block drops values) -> the seeds of a step, and the place of the block's own among them."""
_MOST_KINDS = 2
"""Kinds of tokens that the kernel of the backward pass keeps sums for."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What the kernels are passed beside tables and norm."""

    tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    """Ids, positions, kinds: of all tokens, one after the other."""
    rows_of: torch.Tensor | None
    paddings: tuple[int, int]
    eps: float
    drop: float
    seeds: torch.Tensor
    call: int
    dtype: torch.dtype
    copied: bool


@dataclass(frozen=True, slots=True)
class EmbeddedTokens:
    """What the block made, until the layers take it."""

    hidden: torch.Tensor
    """(1, tokens, width) in float32: what the model hands to its layers."""
    version: int
    copy: torch.Tensor | None
    """(tokens, width) in the type of products."""
    seeds: torch.Tensor
    """Those of the layers, and one more for the block."""


class _Embedded(torch.autograd.Function):
    """dropout(LayerNorm(word + kind + position)), dropout drawn again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, word: torch.Tensor, place: torch.Tensor, kind: torch.Tensor | None, gamma: torch.Tensor,
        beta: torch.Tensor, told: _Told,
    ) -> Any:  # fmt: skip
        from tunesmith.speedups.embedding_kernels import embed_forward

        out, copy, unit, rstd, keys = embed_forward(
            told.tokens, told.rows_of, word, place, kind, gamma, beta, paddings=told.paddings, eps=told.eps,
            drop=told.drop, seeds=told.seeds, call=told.call, dtype=told.dtype, copied=told.copied,
        )  # fmt: skip
        ctx.save_for_backward(unit, gamma, rstd, told.seeds, keys, told.tokens[2])
        ctx.drop, ctx.call = told.drop, told.call
        ctx.sizes, ctx.kinds = [word.shape[0], place.shape[0]], 0 if kind is None else kind.shape[0]
        ctx.parameters = tuple(p for p in (gamma, beta, kind) if p is not None)
        ctx.set_materialize_grads(False)
        return (out, copy) if told.copied else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor | None, d_copy: torch.Tensor | None = None) -> Any:
        from tunesmith.speedups.embedding_kernels import embed_backward, sum_by_key

        given = [d.contiguous() for d in (d_out, d_copy) if d is not None]
        if not given:
            return (None,) * 6
        unit, gamma, rstd, seeds, keys, types = ctx.saved_tensors
        one, other = given[0], given[1] if len(given) > 1 else None
        d_sum, sums = embed_backward(
            one, other, unit, gamma, rstd, types, ctx.kinds, drop=ctx.drop, seeds=seeds, call=ctx.call
        )
        with side_stream.after(sums, parameters=ctx.parameters):
            totals = sum_rows(sums)
        wanted = ctx.needs_input_grad
        d_word = d_place = None
        if wanted[0] or wanted[1]:
            d_word, d_place = sum_by_key(d_sum, keys, sum(ctx.sizes)).split_with_sizes(ctx.sizes)
        found = d_word, d_place, totals[2:] if ctx.kinds else None, totals[0], totals[1], None
        return tuple(d if need else None for d, need in zip(found, wanted, strict=True))


class FusedEmbeddings:
    """The block of one model, in place of its module's forward.

    Trained batches of one row that come with their positions, as packed ones do, run in its kernels; all others, and all
    while a hook listens to a part of the block, as transformers runs them.
    """

    def __init__(
        self, module: Any, arguments: tuple[str, ...], dtype: torch.dtype, draw: Draw, *, copied: bool
    ) -> None:
        self._module, self._arguments, self._draw = module, arguments, draw
        self._dtype, self._copied = dtype, copied and dtype != torch.float32
        self._inner = [part for part in module.modules() if part is not module]
        self._listeners = hook_tables(self._inner)
        self._made: EmbeddedTokens | None = None

    def enable(self) -> None:
        """Let the block run fused."""
        self._module.forward = self._forward

    def disable(self) -> None:
        """Give its module its own forward back."""
        vars(self._module).pop("forward", None)

    def take(self, hidden: torch.Tensor) -> EmbeddedTokens | None:
        """What was made with this, if nothing has changed it since. Asked once: nothing is kept beyond the layers."""
        made, self._made = self._made, None
        return made if made is not None and made.hidden is hidden and made.version == hidden._version else None

    def _forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = {**dict(zip(self._arguments, args, strict=False)), **kwargs}
        self._made = None
        if not self._takes(given):
            own: torch.Tensor = type(self._module).forward(self._module, *args, **kwargs)
            return own
        module, ids = self._module, given["input_ids"]
        word, place, kind = self._tables()
        types = None if kind is None else given.get("token_type_ids")
        drop = self._drop()
        seeds, call = self._draw(ids.device, drop > 0)
        told = _Told(
            (ids.reshape(-1), given["position_ids"].reshape(-1), None if types is None else types.reshape(-1)),
            word.rows_on(ids.device) if isinstance(word, CutEmbedding) else None,
            (_or_none(word.padding_idx), _or_none(place.padding_idx)),
            module.LayerNorm.eps, drop, seeds, call, self._dtype, self._copied,
        )  # fmt: skip
        tables = word.weight, place.weight, None if kind is None else kind.weight
        out = _Embedded.apply(*tables, module.LayerNorm.weight, module.LayerNorm.bias, told)  # type: ignore[no-untyped-call]
        residual, copy = out if self._copied else (out, None)
        hidden: torch.Tensor = residual.unsqueeze(0)
        self._made = EmbeddedTokens(hidden, hidden._version, copy, seeds)
        return hidden

    def _tables(self) -> tuple[nn.Embedding, nn.Embedding, nn.Embedding | None]:
        module = self._module
        return module.word_embeddings, module.position_embeddings, getattr(module, "token_type_embeddings", None)

    def _drop(self) -> float:
        dropout: nn.Dropout = self._module.dropout
        return dropout.p if dropout.training else 0.0

    def _takes(self, given: dict[str, Any]) -> bool:
        """Whether the kernels compute what the module would: evaluation has the whole vocabulary, and is left to it."""
        ids, positions, types = (given.get(name) for name in ("input_ids", "position_ids", "token_type_ids"))
        if ids is None or positions is None or given.get("inputs_embeds") is not None or not torch.is_grad_enabled():
            return False
        usual = ids.dim() == 2 and ids.shape[0] == 1 and ids.shape == positions.shape and ids.numel() > 0
        if not usual or not (types is None or types.shape == ids.shape) or not runs_kernels(ids):
            return False
        return not self._is_watched() and self._is_plain(ids.device)

    def _is_plain(self, device: torch.device) -> bool:
        """Read at each call: the vocabulary is cut and whole again, parts can be put in the place of others."""
        norm, kind = self._module.LayerNorm, self._tables()[2]
        tables = [t for t in self._tables() if t is not None]
        if type(norm) is not nn.LayerNorm or norm.bias is None or not all(map(_is_plain_table, tables)):
            return False
        if kind is not None and (kind.num_embeddings > _MOST_KINDS or kind.padding_idx is not None):
            return False
        weights = [norm.weight, norm.bias, *(t.weight for t in tables)]
        stored = all(w.dtype == torch.float32 and w.device == device and w.is_contiguous() for w in weights)
        return stored and isinstance(self._module.dropout, nn.Dropout) and self._drop() < 1.0

    def _is_watched(self) -> bool:
        return any(part._forward_hooks for part in self._inner) or is_watched(self._listeners)


def _is_plain_table(table: nn.Embedding) -> bool:
    rescales = table.max_norm is not None or table.scale_grad_by_freq or table.sparse
    return type(table) in _TABLES and "forward" not in vars(table) and not rescales


def _or_none(padding: int | None) -> int:
    """No row has the number -1."""
    return -1 if padding is None else padding


def runs_kernels(ids: torch.Tensor) -> bool:
    """Whether the kernels run where these ids are."""
    return ids.device.type == "cuda" and has_triton()


def fuse_embeddings(model: nn.Module, dtype: torch.dtype, draw: Draw) -> FusedEmbeddings | None:
    """The block of a model that `why_not_fused` has nothing against; None where its block is of another kind."""
    kind = str(model.config.model_type)  # type: ignore[union-attr]
    if kind not in _ARGUMENTS:
        return None
    bare: Any = anatomy_of(model).bare
    # ELECTRA may have a narrower block and a projection behind it, which reads float32.
    projected = hasattr(bare, "embeddings_project")
    return FusedEmbeddings(bare.embeddings, _ARGUMENTS[kind], dtype, draw, copied=not projected)
