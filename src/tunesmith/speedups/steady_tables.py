"""Gradients of embedding tables that are summed in one order on a GPU, so that a step has one result.

From 2.11 on torch adds the gradient of a table with atomics where few of its rows occur often (token types), from 3,073 ids in a
batch on, unless deterministic algorithms are asked for: two equal runs of 64 rows a step had other last bits after five steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tunesmith.models.families import is_compiled
from tunesmith.speedups.cpu_speed import ClassSwap


class SteadyEmbedding(nn.Embedding):
    """`nn.Embedding` whose gradient is that of `look_up`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            return super().forward(input)
        return look_up(self.weight, input, self.padding_idx)


def enable_steady_tables(model: nn.Module) -> ClassSwap:
    """Plain tables of the model get the gradient of `look_up`; `disable` leaves the model as it was."""
    return ClassSwap(model, {} if is_compiled(model) else {nn.Embedding: SteadyEmbedding})


def look_up(table: torch.Tensor, ids: torch.Tensor, padding: int | None) -> torch.Tensor:
    """The rows of a table, whose gradient is summed in one order."""
    if not torch.is_grad_enabled():
        return torch.embedding(table, ids)
    found: torch.Tensor = _Rows.apply(table, ids, -1 if padding is None else padding)  # type: ignore[no-untyped-call]
    return found


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, ids: torch.Tensor, padding: int) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding = table.shape[0], padding
        return torch.embedding(table, ids)

    @staticmethod
    def backward(ctx: Any, given: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (ids,) = ctx.saved_tensors
        with deterministic():
            return torch.ops.aten.embedding_dense_backward(given, ids, ctx.rows, ctx.padding, False), None, None


@contextmanager
def deterministic(*, strict: bool = False) -> Iterator[None]:
    """Deterministic algorithms are asked for, without what torch.use_deterministic_algorithms loads and fills beside that."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    torch._C._set_deterministic_algorithms(True, warn_only=not strict)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(was[0], warn_only=was[1])
        torch._C._set_deterministic_fill_uninitialized_memory(filled)
