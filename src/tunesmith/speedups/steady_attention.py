"""Attention on a GPU whose gradient is summed in one order, so that a step has one result.

torch's kernels for attention add the gradient of queries with atomics where a row has more keys than one block: two equal runs
with rows of 260 to 420 tokens differed by 1e-3 in their weights after 30 steps in bf16 (decisions/0126). Flash and
memory-efficient attention have an order where deterministic algorithms are asked for; cuDNN's has none, and is not used.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from tunesmith.speedups.steady_tables import deterministic

_NAME = "scaled_dot_product_attention"
_NODES = ("FlashAttentionBackward", "EfficientAttentionBackward")
_DEPTH = 4
"""Nodes behind the result in which the kernel's is looked for: torch cuts off what it padded, and autocast casts."""


class _Order:
    """Deterministic algorithms while the backward pass of an attention runs, whatever thread it runs in."""

    def __init__(self) -> None:
        self._held: Any = None

    def begin(self, _: Any) -> None:
        """Before the node."""
        self.settle()
        self._held = deterministic(strict=True)
        self._held.__enter__()

    def end(self, *_: Any) -> None:
        """After it."""
        self.settle()

    def settle(self) -> None:
        """As before the node; also where its backward pass broke off and `end` was never called."""
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)


_order = _Order()


def order_gradient(out: torch.Tensor) -> torch.Tensor:
    """The result of an attention; the backward pass of its kernel, where that is one with atomics, is run in one order."""
    node = kernel_node(out.grad_fn) if out.is_cuda else None
    if node is not None:
        node.register_prehook(_order.begin)
        node.register_hook(_order.end)
    return out


def kernel_node(node: Any, depth: int = _DEPTH) -> Any:
    """The node of such a kernel among the nearest behind a result; None where there is none."""
    if node is None or depth == 0:
        return None
    if any(name in node.name() for name in _NODES):
        return node
    return next((found for following, _ in node.next_functions if (found := kernel_node(following, depth - 1))), None)


class _Replaced:
    """torch's attention, replaced while a step of any thread runs."""

    def __init__(self) -> None:
        self._lock, self._users, self._own = threading.Lock(), 0, functional.scaled_dot_product_attention

    def enter(self) -> None:
        """One step more."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._own = functional.scaled_dot_product_attention
                vars(functional)[_NAME] = self

    def leave(self) -> None:
        """One step less."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                vars(functional)[_NAME] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        was = torch._C._get_cudnn_sdp_enabled()
        torch._C._set_sdp_use_cudnn(was and not _has_another_kernel())
        try:
            return order_gradient(self._own(*args, **kwargs))
        finally:
            torch._C._set_sdp_use_cudnn(was)


def _has_another_kernel() -> bool:
    """Whether cuDNN's is not the only one that the user allows."""
    return bool(
        torch._C._get_flash_sdp_enabled()
        or torch._C._get_mem_efficient_sdp_enabled()
        or torch._C._get_math_sdp_enabled()
    )


_replaced = _Replaced()


@contextmanager
def steady_attention(device: torch.device) -> Iterator[None]:
    """Around the passes of a step, both, as layers may be computed again in the backward pass."""
    strict = torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    if device.type != "cuda" or strict:
        yield
        return
    _order.settle()
    _replaced.enter()
    try:
        yield
    finally:
        _replaced.leave()
        _order.settle()
