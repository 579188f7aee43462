"""Quicker parts for the CPU that compute the same: dropout masks and matrix products (decisions/0104, 0105)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tunesmith.encoder.families import is_compiled
from tunesmith.fast.random_mask import draw_keep_mask


class CpuSpeed:
    """The strategy as applied to one model. `disable` leaves the model as it was."""

    def __init__(self, model: nn.Module, quick: dict[type[nn.Module], type[nn.Module]]) -> None:
        self._model, self._quick = model, quick
        self._swapped: list[tuple[nn.Module, type[nn.Module]]] = []
        self.enable()

    def enable(self) -> None:
        """Swap the class of every plain module that a quicker one exists for."""
        for module in self._model.modules():
            if type(module) in self._quick:
                self._swapped.append((module, type(module)))
                module.__class__ = self._quick[type(module)]

    def disable(self) -> None:
        """Give every module its own class back."""
        while self._swapped:
            module, before = self._swapped.pop()
            module.__class__ = before


def enable_cpu_speed(model: nn.Module, *, dropout: bool = True, linear: bool = True) -> CpuSpeed:
    """Swap the forward of plain `nn.Dropout` and `nn.Linear` modules. Parameters and state dict are untouched.

    On another device, or in another dtype than float32, the swapped modules do what they did before.
    """
    quick: dict[type[nn.Module], type[nn.Module]] = {}
    if is_compiled(model):
        return CpuSpeed(model, quick)
    if dropout:
        quick[nn.Dropout] = QuickDropout
    if linear and _product() is not None:
        quick[nn.Linear] = QuickLinear
    return CpuSpeed(model, quick)


def _is_plain(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


class QuickDropout(nn.Dropout):
    """`nn.Dropout` with a mask of `draw_keep_mask`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or not 0.0 < self.p < 1.0 or not _is_plain(input):
            return super().forward(input)
        return input * draw_keep_mask(input.numel(), self.p).view_as(input)


def _product() -> Callable[..., torch.Tensor] | None:
    """oneDNN's product for float32, which `nn.Linear` does not use by itself; None where this torch has none."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    operator: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise
    return operator


_ENOUGH_ROWS = 64
"""Below, the call costs more than the product."""


class QuickLinear(nn.Linear):
    """`nn.Linear` through oneDNN: 8 to 12% quicker forward and towards the input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // self.in_features
        if rows < _ENOUGH_ROWS or not _is_plain(input):
            return super().forward(input)
        flat = input.reshape(rows, self.in_features)
        if torch.is_grad_enabled():
            out: torch.Tensor = _OneDnnLinear.apply(flat, self.weight, self.bias)  # type: ignore[no-untyped-call]
        else:
            out = _multiply(flat, self.weight, self.bias)
        return out.view(*input.shape[:-1], self.out_features)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = _product()
    if product is None:  # a model unpickled on a machine without oneDNN
        return functional.linear(x, weight, bias)
    return product(x, weight, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        need_x, need_weight, need_bias = ctx.needs_input_grad
        # Gradients are enabled here while a second derivative is wanted, which oneDNN's product does not have.
        towards_x = functional.linear if torch.is_grad_enabled() else _multiply
        return (
            towards_x(grad, weight.t(), None) if need_x else None,
            grad.t() @ x if need_weight else None,  # oneDNN would copy both operands first: no gain
            grad.sum(0) if ctx.has_bias and need_bias else None,
        )
