"""Attention over packed tokens: each row attends to itself only, with no token of padding computed.

Stretches of a packed batch are laid side by side, with fixed shapes on a GPU, and one after the other again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tunesmith.models.families import project_keys
from tunesmith.speedups.packed_cpu import attend_on_cpu, length_groups
from tunesmith.speedups.packing import Layout
from tunesmith.speedups.steady_tables import order_gradient

GROUPED = ("cpu",)
"""Devices where stretches of equal length share a product; elsewhere shapes stay fixed."""
Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]
"""(queries, keys, values: (stretches, heads, length, head size); which keys are there: bool (stretches, keys) or None for
all) -> (stretches, heads, queries, head size)."""


def spread_rows(x: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
    """((stretches, heads, longest, size) from (tokens, heads, size), bool (stretches, longest): what is inside).

    Outside lie values of other stretches: finite, and to be masked.
    """
    column = torch.arange(layout.longest, dtype=torch.int32, device=x.device)
    inside = column < (layout.bounds[1:] - layout.bounds[:-1]).unsqueeze(1)
    place = (layout.bounds[:-1].unsqueeze(1) + column).clamp(max=x.shape[0] - 1).flatten()
    return x.index_select(0, place).view(*inside.shape, *x.shape[1:]).transpose(1, 2), inside


def rows_of_tokens(layout: Layout, tokens: int) -> torch.Tensor:
    """int64 (tokens): the stretch that each token is in."""
    token = torch.arange(tokens, dtype=torch.int32, device=layout.bounds.device)
    return torch.bucketize(token, layout.bounds[1:], right=True)


def gather_rows(x: torch.Tensor, layout: Layout, tokens: int) -> torch.Tensor:
    """(tokens, heads, size) from (stretches, heads, longest, size)."""
    row = rows_of_tokens(layout, tokens)
    token = torch.arange(tokens, dtype=torch.int32, device=x.device)
    place = row * layout.longest + token - layout.bounds[:-1].index_select(0, row)
    return x.transpose(1, 2).flatten(0, 1).index_select(0, place)


def attend_by_row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, core: Core, *, first_only: bool
) -> torch.Tensor:
    """(queries, heads, size): `core` over each stretch; on a CPU over those of equal length together, with nothing to mask."""
    if q.device.type not in GROUPED:
        keys, inside = spread_rows(k, layout)
        values, _ = spread_rows(v, layout)
        queries = q.unsqueeze(2) if first_only else spread_rows(q, layout)[0]
        out = core(queries, keys, values, inside)
        return out.squeeze(2) if first_only else gather_rows(out, layout, q.shape[0])
    heads, size = q.shape[1:]
    found = []
    for q_at, k_at, count, queries_each, keys_each in length_groups(layout.lengths, first_only):
        asked = q[q_at].view(count, queries_each, heads, size).transpose(1, 2)
        known, given = (x[k_at].view(count, keys_each, heads, size).transpose(1, 2) for x in (k, v))
        found.append(core(asked, known, given, None).transpose(1, 2).reshape(-1, heads, size))
    return torch.cat(found)


NAME = "tunesmith"
"""The name under which transformers knows this attention."""


def register() -> None:
    """Make the attention known to transformers. Padded batches still work: they take the way of `sdpa`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, attend)
    # A packed batch carries no attention_mask, for which the sdpa mask function answers None.
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def use_registered_attention(model: nn.Module) -> Callable[[], None]:
    """Let `model` attend through `attend`; what comes back undoes it, once its last user has called it."""
    register()
    config: Any = model.config
    users: list[str] = model.__dict__.setdefault("_attention_users", [])
    users.append(config._attn_implementation)
    config._attn_implementation = NAME

    def undo() -> None:
        if len(users) == 1:
            config._attn_implementation = users.pop()
        else:
            users.pop()  # the first entry is the name to go back to; strategies come off in any order

    return undo


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    all_tokens: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """(batch, length, heads, head size), as transformers asks of an attention function.

    `layout` says that the batch is packed; `sliding_window` less one is then how far a token sees. `all_tokens` says that the
    queries are those of the rows' first tokens only: keys and values are then made from it, and the ones given are ignored.
    """
    first_only = all_tokens is not None
    if all_tokens is not None:
        key, value = project_keys(module, all_tokens, query.shape[-1])
    if layout is None:
        return _attend_padded(query, key, value, attention_mask, scaling, dropout, first_only), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (tokens, heads, head size)
    window = None if sliding_window is None else sliding_window - 1
    return attend_packed(q, k, v, layout, scale, dropout, first_only, window).unsqueeze(0), None


def attend_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, dropout: float, first_only: bool,
    window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """(tokens, heads, head size) of a packed batch; with `first_only` the queries are those of the stretches' first tokens.

    With `window` a token sees those at most so far from it.
    """
    return _method_for(q)(q, k, v, layout, scale, dropout, first_only, binding(window, layout))


def binding(window: int | None, layout: Layout) -> int | None:
    """The window where it hides a token from another; None where the rows are too short for that."""
    return None if window is None or window >= layout.longest - 1 else window


def _attend_padded(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    dropout: float,
    first_only: bool,
) -> torch.Tensor:
    """What transformers' own `sdpa` computes; with `first_only` for the first query of each row."""
    if mask is not None and first_only:
        mask = mask[:, :, :1]
    out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale)
    return out.transpose(1, 2)


Method = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout, float, float, bool, "int | None"], torch.Tensor]


def _method_for(q: torch.Tensor) -> Method:
    """The quickest exact method for these tensors (decisions/0101)."""
    if q.device.type == "cpu":
        return attend_on_cpu
    if q.device.type == "cuda" and q.shape[-1] % 8 == 0:
        if q.dtype in (torch.bfloat16, torch.float16):
            return _attend_by_flash
        return attend_by_padding
    return attend_by_mask


def _query_bounds(layout: Layout, first_only: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Bounds of queries and keys, and the longest stretch of queries."""
    if not first_only:
        return layout.bounds, layout.bounds, layout.longest
    return torch.arange(layout.bounds.shape[0], dtype=torch.int32, device=layout.bounds.device), layout.bounds, 1


def _attend_by_flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, dropout: float, first_only: bool,
    window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Flash attention over stretches. `torch.nn.attention.varlen` is the same kernel, but fixes dropout at 0.

    Every stretch has a query, the filling too: of keys without one the kernel leaves the gradients uninitialised.
    """
    q_bounds, k_bounds, q_longest = _query_bounds(layout, first_only)
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, q_bounds, k_bounds, q_longest, layout.longest, dropout, False, False, scale=scale,
        window_size_left=window, window_size_right=window,
    )[0]  # fmt: skip
    return order_gradient(out)


def attend_by_padding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, dropout: float, first_only: bool,
    window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Stretches laid side by side for the attention alone, with a mask over the gaps; for float32 on a GPU.

    The memory-efficient kernel would take stretches as they are, but with dropout its backward pass draws another mask
    than its forward pass: TREC ended at 0.89 instead of 0.97 accuracy (decisions/0107).
    """
    keys, inside = spread_rows(k, layout)
    values, _ = spread_rows(v, layout)
    queries = q.unsqueeze(2) if first_only else spread_rows(q, layout)[0]
    mask = inside[:, None, None, :].expand(-1, 1, queries.shape[2], -1)
    if window is not None:
        mask = mask & _near(queries.shape[2], layout.longest, window, q.device)
    out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout, scale=scale)
    out = order_gradient(out)
    return out.squeeze(2) if first_only else gather_rows(out, layout, q.shape[0])


def _near(queries: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """bool (queries, keys): at most `window` apart."""
    places = torch.arange(keys, device=device)
    return (places[:queries, None] - places).abs() <= window


def attend_by_mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float, dropout: float, first_only: bool,
    window: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """All tokens against all, with a mask that keeps rows apart: works on any device, and nothing in it syncs."""
    q_bounds, k_bounds, _ = _query_bounds(layout, first_only)
    q_row, k_row = (
        torch.bucketize(torch.arange(x.shape[0], device=x.device, dtype=torch.int32), bounds[1:], right=True)
        for x, bounds in ((q, q_bounds), (k, k_bounds))
    )
    mask = q_row.unsqueeze(1) == k_row.unsqueeze(0)
    if window is not None:
        place = torch.arange(k.shape[0], device=k.device)
        mask &= ((k_bounds[:-1].unsqueeze(1) if first_only else place.unsqueeze(1)) - place).abs() <= window
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout, scale=scale)
    return out.squeeze(0).transpose(0, 1)
