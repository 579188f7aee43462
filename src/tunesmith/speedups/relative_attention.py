"""Attention over packed rows whose scores depend on how far apart two tokens are: MPNet's, and DeBERTa's disentangled one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tunesmith.speedups.attention import attend_by_row
from tunesmith.speedups.packed_cpu import attend_on_cpu, draw_keep_mask
from tunesmith.speedups.packing import Layout


class RowContext:
    """What travels beside a call of a model whose layers take no further arguments: the layout of the batch under way."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self.all_tokens: torch.Tensor | None = None
        """Set inside a last layer that runs for first tokens only."""
        self._known: dict[tuple[str, int, torch.device], torch.Tensor] = {}

    def kept(self, name: str, longest: int, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """A tensor that depends on the longest row alone: made once on the host, and read by captured steps where it lies."""
        key = (name, longest, device)
        if key not in self._known:
            with torch.inference_mode(False):  # it may be a prediction that asks first, and a step that asks next
                self._known[key] = make().to(device)
        return self._known[key]


_CONTEXTS: WeakKeyDictionary[nn.Module, RowContext] = WeakKeyDictionary()


def context_of(model: nn.Module) -> RowContext:
    """The one of this model."""
    return _CONTEXTS.setdefault(model, RowContext())


def _weigh(scores: torch.Tensor, v: torch.Tensor, inside: torch.Tensor | None, drop: float) -> torch.Tensor:
    """softmax(scores) @ v over the keys that are inside, with dropout of the weights."""
    if inside is not None:
        scores = scores.masked_fill(~inside[:, None, None, :], torch.finfo(scores.dtype).min)
    weights = torch.softmax(scores, -1)
    if drop > 0 and weights.device.type == "cpu":
        weights = weights * draw_keep_mask(weights, drop)
    elif drop > 0:
        weights = functional.dropout(weights, drop)
    return weights.to(v.dtype) @ v


class MpnetRows:
    """MPNet: one learned bias for each head and distance, shared by all layers."""

    def __init__(self, encoder: Any, context: RowContext) -> None:
        self._encoder, self._context = encoder, context

    def shared(self, hidden: torch.Tensor, layout: Layout) -> torch.Tensor:
        """(heads, longest, longest): the bias of each pair of places.

        Looked up once for each distance and laid along the diagonals: its gradient is summed along them in one order, where a
        table of all pairs would be added up by whichever thread comes first.
        """

        def buckets() -> torch.Tensor:
            ahead = torch.arange(1 - layout.longest, layout.longest)  # key - query
            found: torch.Tensor = self._encoder.relative_position_bucket(ahead)
            return found

        ids = self._context.kept("buckets", layout.longest, hidden.device, buckets)
        bias: torch.Tensor = self._encoder.relative_attention_bias(ids)
        return _by_distance(bias.t().unsqueeze(1).expand(-1, layout.longest, -1))

    def attend(
        self, attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor, *,
        drop: float, first_only: bool,
    ) -> torch.Tensor:  # fmt: skip
        """(queries, heads, size) of the batch under way."""
        layout, scale = self._context.layout, q.shape[-1] ** -0.5
        assert layout is not None
        if q.device.type == "cpu" and q.dtype == bias.dtype and not torch.is_autocast_enabled("cpu"):
            return attend_on_cpu(q, k, v, layout, scale, drop, first_only, bias=bias)

        def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
            scores = (q @ k.transpose(-1, -2)) * scale
            return _weigh(scores + bias[:, : q.shape[2], : k.shape[2]].to(scores.dtype), v, inside, drop)

        return attend_by_row(q, k, v, layout, core, first_only=first_only)


class DebertaRows:
    """DeBERTa-v2 and v3: besides content to content, content to position and position to content."""

    def __init__(self, encoder: Any, context: RowContext) -> None:
        self._encoder, self._context = encoder, context

    def shared(self, hidden: torch.Tensor, layout: Layout) -> torch.Tensor | None:
        """(positions, width): the embeddings of distances, before the dropout of each layer."""
        embeddings: torch.Tensor | None = self._encoder.get_rel_embedding()
        return embeddings

    def distances(self, attention: Any, embeddings: torch.Tensor, *, training: bool) -> torch.Tensor:
        """(2 longest - 1, width): embeddings of the distances query - key, from the longest back to the longest ahead.

        What is projected is these alone: transformers projects all that the model knows.
        """
        layout, span = self._context.layout, attention.pos_ebd_size
        assert layout is not None

        def ids() -> torch.Tensor:
            build = sys.modules[type(attention).__module__].build_relative_position
            like = torch.empty(layout.longest, 1)
            sizes = {"bucket_size": attention.position_buckets, "max_position": attention.max_relative_positions}
            rel: torch.Tensor = build(like, like, **sizes)[0]
            descending = torch.cat([rel[:, 0].flip(0), rel[0, 1:]])  # longest - 1, ..., 0, -1, ..., 1 - longest
            return torch.clamp(descending + span, 0, 2 * span - 1)

        known = self._context.kept("distances", layout.longest, embeddings.device, ids)
        dropped = functional.dropout(embeddings[: 2 * span], attention.pos_dropout.p, training)
        return functional.embedding(known, dropped)

    def attend(
        self, attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, embeddings: torch.Tensor | None, *,
        drop: float, first_only: bool,
    ) -> torch.Tensor:  # fmt: skip
        """(queries, heads, size) of the batch under way."""
        if embeddings is None:
            return self.attend_with(attention, q, k, v, None, None, drop=drop, first_only=first_only)
        placed = self.distances(attention, embeddings, training=attention.training)
        shared = attention.share_att_key
        key = attention.key_proj if shared else getattr(attention, "pos_key_proj", None)
        query = attention.query_proj if shared else getattr(attention, "pos_query_proj", None)
        asked = attention.pos_att_type
        by_key = key(placed) if "c2p" in asked and key is not None else None
        by_query = query(placed) if "p2c" in asked and query is not None else None
        return self.attend_with(attention, q, k, v, by_key, by_query, drop=drop, first_only=first_only)

    def scale(self, attention: Any, size: int) -> float:
        """What scores are multiplied by; transformers has the root in float32, whatever the weights."""
        kinds = 1 + ("c2p" in attention.pos_att_type) + ("p2c" in attention.pos_att_type)
        return 1.0 / float(np.sqrt(np.float32(size * kinds)))

    def attend_with(
        self, attention: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
        by_key: torch.Tensor | None, by_query: torch.Tensor | None, *, drop: float, first_only: bool,
    ) -> torch.Tensor:  # fmt: skip
        """As `attend`, from the projections of distances as keys and as queries, (2 longest - 1, width)."""
        layout, (heads, size) = self._context.layout, q.shape[1:]
        assert layout is not None
        scale, longest = self.scale(attention, size), layout.longest
        tables = [None if t is None else t.reshape(-1, heads, size).transpose(0, 1) for t in (by_key, by_query)]

        def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, inside: torch.Tensor | None) -> torch.Tensor:
            keys = k.shape[2]
            near = slice(longest - keys, longest + keys - 1)  # distances within rows of this length
            as_keys, as_queries = (None if t is None else t[:, near] for t in tables)
            scores = q @ k.transpose(-1, -2)
            if as_keys is not None and first_only:
                scores = scores + q @ as_keys[:, keys - 1 :].transpose(-1, -2)
            elif as_keys is not None:
                scores = scores + _by_distance(q @ as_keys.transpose(-1, -2))
            if as_queries is not None and first_only:
                scores = scores + (k * as_queries[:, keys - 1 :]).sum(-1, keepdim=True).transpose(-1, -2)
            elif as_queries is not None:
                scores = scores + _by_distance(k @ as_queries.flip(1).transpose(-1, -2)).transpose(-1, -2)
            return _weigh(scores * scale, v, inside, drop)

        return attend_by_row(q, k, v, layout, core, first_only=first_only)


def _by_distance(x: torch.Tensor) -> torch.Tensor:
    """(..., n, n) from (..., n, 2n - 1): of row i the entries from n - 1 - i on. No value is copied."""
    x = x.contiguous()
    length, width = x.shape[-2:]
    return x.as_strided((*x.shape[:-1], length), (*x.stride()[:-2], width - 1, 1), x.storage_offset() + length - 1)


RowAttention = MpnetRows | DebertaRows


def row_attention(encoder: nn.Module, context: RowContext) -> RowAttention:
    """By what the encoder is."""
    kind = MpnetRows if hasattr(encoder, "relative_attention_bias") else DebertaRows
    return kind(encoder, context)
