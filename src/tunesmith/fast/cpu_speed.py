"""Quicker parts for the CPU that compute the same: dropout masks, matrix products, large tables (decisions/0104, 0105, 0115)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

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
            _MEMORY.pop(module, None)


def enable_cpu_speed(model: nn.Module, *, dropout: bool = True, linear: bool = True) -> CpuSpeed:
    """Swap the forward of plain `nn.Dropout`, `nn.Linear` and `nn.Embedding` modules. Parameters and state dict are untouched.

    On another device, or in another dtype than float32, the swapped modules do what they did before.
    """
    quick: dict[type[nn.Module], type[nn.Module]] = {}
    if is_compiled(model):
        return CpuSpeed(model, quick)
    if dropout:
        quick[nn.Dropout] = QuickDropout
    if linear and _product() is not None:
        quick[nn.Linear] = QuickLinear
    if linear:
        quick[nn.Embedding] = QuickEmbedding
    return CpuSpeed(model, quick)


def is_plain(x: torch.Tensor) -> bool:
    """Whether the parts for the CPU take it."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


_ENOUGH_VALUES = 2**15
"""Below, torch's own mask costs less."""


class QuickDropout(nn.Dropout):
    """`nn.Dropout` with a mask of `draw_keep_mask`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        usual = self.training and 0.0 < self.p < 1.0 and input.numel() >= _ENOUGH_VALUES
        if not usual or not is_plain(input):
            return super().forward(input)
        return input * draw_keep_mask(input.numel(), self.p).view_as(input)


def _product() -> Callable[..., torch.Tensor] | None:
    """oneDNN's product for float32, which `nn.Linear` does not use by itself; None where this torch has none."""
    if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return None
    operator: Callable[..., torch.Tensor] = torch.ops.mkldnn._linear_pointwise
    return operator


_ENOUGH_ROWS, _ENOUGH_PRODUCTS = 64, 2**25
"""Below, the calls cost more than they save: rows, and multiplications of a product."""


class QuickLinear(nn.Linear):
    """`nn.Linear` through oneDNN: 8 to 12% quicker forward and towards the input."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // self.in_features
        small = rows < _ENOUGH_ROWS or rows * self.in_features * self.out_features < _ENOUGH_PRODUCTS
        if small or not is_plain(input):
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


_LARGE_TABLE = 2**24
"""Bytes. Memory of smaller gradients stays with the process anyway."""
_MEMORY: WeakKeyDictionary[nn.Module, list[torch.UntypedStorage]] = WeakKeyDictionary()
"""The memory of the last gradient of each table."""


class QuickEmbedding(nn.Embedding):
    """`nn.Embedding` whose gradient lies in the same memory at each step: new memory costs more than the gradient."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        usual = self.max_norm is None and not (self.scale_grad_by_freq or self.sparse)
        if not (usual and torch.is_grad_enabled() and is_plain(weight) and weight.nbytes >= _LARGE_TABLE):
            return super().forward(input)
        memory = _MEMORY.setdefault(self, [])
        padding = -1 if self.padding_idx is None else self.padding_idx
        out: torch.Tensor = _TableRows.apply(weight, input, padding, memory)  # type: ignore[no-untyped-call]
        return out


class _TableRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, ids: torch.Tensor, padding: int, memory: list[torch.UntypedStorage]
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding, ctx.memory = weight.shape, padding, memory
        return torch.embedding(weight, ids)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative is wanted
            whole = torch.ops.aten.embedding_dense_backward(grad, ids, ctx.shape[0], ctx.padding, False)
            return whole, None, None, None
        rows, place = torch.unique(ids, return_inverse=True)
        few = torch.ops.aten.embedding_dense_backward(grad, place, len(rows), -1, False)
        if ctx.padding >= 0:
            few[rows == ctx.padding] = 0.0
        return _zeros_in(ctx.memory, ctx.shape, grad).index_copy_(0, rows, few), None, None, None


def _zeros_in(memory: list[torch.UntypedStorage], shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
    """Zeros in the memory of the last gradient, unless a tensor still lies there."""
    size = shape.numel() * like.element_size()
    if memory and memory[0].nbytes() == size and torch._C._storage_Use_Count(memory[0]._cdata) == 1:
        return like.new_empty(0).set_(memory[0], 0, shape).zero_()
    found = like.new_zeros(shape)
    memory[:] = [found.untyped_storage()]
    return found
