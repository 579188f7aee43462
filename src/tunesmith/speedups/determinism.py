"""Gradients on a GPU that are summed in a fixed order, so that two equal steps are bit-identical.

Embeddings: torch adds the gradient with atomics if few rows occur often (token types), beginning with 3,073 ids in a batch.
Packed attention: flash and memory-efficient kernels add the gradient of the queries with atomics, one addition per block of
keys. Both have a deterministic algorithm, which is switched on for these nodes only. `full_determinism` covers everything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tunesmith.models.families import is_compiled


class DeterministicEmbedding(nn.Embedding):
    """`nn.Embedding` with a deterministic gradient."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            return super().forward(input)
        return look_up(self.weight, input, self.padding_idx)


class DeterministicEmbeddings:
    """The embeddings of one model with a deterministic gradient. `disable` restores the model."""

    def __init__(self, model: nn.Module) -> None:
        plain = () if is_compiled(model) else model.modules()
        self._embeddings = [module for module in plain if type(module) is nn.Embedding]
        self.enable()

    def enable(self) -> None:
        """Swap the class of every plain `nn.Embedding`."""
        for module in self._embeddings:
            module.__class__ = DeterministicEmbedding

    def disable(self) -> None:
        """Restore the class of every module."""
        for module in self._embeddings:
            module.__class__ = nn.Embedding


def look_up(table: torch.Tensor, ids: torch.Tensor, padding: int | None) -> torch.Tensor:
    """Look up rows of a table; their gradient is summed in a fixed order."""
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
    """Request deterministic algorithms without the side effects of torch.use_deterministic_algorithms."""
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch._C._get_deterministic_fill_uninitialized_memory()
    torch._C._set_deterministic_fill_uninitialized_memory(False)
    torch._C._set_deterministic_algorithms(True, warn_only=not strict)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(was[0], warn_only=was[1])
        torch._C._set_deterministic_fill_uninitialized_memory(filled)


class _Order:
    """Switches deterministic algorithms on while the backward pass of an attention runs, in any thread."""

    def __init__(self) -> None:
        self._held: Any = None

    def begin(self, _: Any) -> None:
        """Switch them on before the node."""
        self.settle()
        self._held = deterministic(strict=True)
        self._held.__enter__()

    def settle(self, *_: Any) -> None:
        """Switch them off after the node, or after a backward pass that was interrupted inside it."""
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)


_order = _Order()


_NODES = ("FlashAttentionBackward", "EfficientAttentionBackward")


def order_gradient(out: torch.Tensor) -> torch.Tensor:
    """Return the output of an attention unchanged; the backward pass of its kernel will sum in a fixed order."""
    node = kernel_node(out.grad_fn) if out.is_cuda else None
    if node is not None:
        node.register_prehook(_order.begin)
        node.register_hook(_order.settle)
    return out


def kernel_node(node: Any, depth: int = 4) -> Any:
    """Find the autograd node of a kernel with atomics, at most `depth` levels back (torch may slice or cast in between)."""
    if node is None or depth == 0:
        return None
    if any(name in node.name() for name in _NODES):
        return node
    return next((found for following, _ in node.next_functions if (found := kernel_node(following, depth - 1))), None)


@contextmanager
def settled() -> Iterator[None]:
    """Switch deterministic algorithms off again if a backward pass is interrupted (out of memory)."""
    try:
        yield
    finally:
        _order.settle()
