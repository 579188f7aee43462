"""Stretches of a packed batch laid side by side, with fixed shapes on a GPU, and one after the other again."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tunesmith.fast.packed_cpu import length_groups
from tunesmith.fast.packing import Layout

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
    for q_at, k_at, _, count, queries_each, keys_each in length_groups(layout.lengths, heads, first_only):
        asked = q[q_at].view(count, queries_each, heads, size).transpose(1, 2)
        known, given = (x[k_at].view(count, keys_each, heads, size).transpose(1, 2) for x in (k, v))
        found.append(core(asked, known, given, None).transpose(1, 2).reshape(-1, heads, size))
    return torch.cat(found)
