"""Quicker parts for the CPU that compute the same: dropout masks, matrix products, large tables (decisions/0104, 0105, 0115).

A model that only predicts has its weights laid out once as oneDNN wants them, with GELU in the same pass. With weights that
change this would not pay: they would be laid out anew each step. MiniLM-L6, 200 rows of MRPC, one core: 2.38 s to 2.28 s. It
costs a second copy of the matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tunesmith.models.families import is_compiled


def draw_keep_mask(size: int, drop: float) -> torch.Tensor:
    """float32 (size): 0 with probability `drop`, else 1; what is kept is to be multiplied by `kept_scale(drop)`.

    torch draws 53 random bits for each element of a mask. Here 8 decide, but for one element in 256, where 32 more do: the
    probability is off by 2**-41 at most. They come from SFC64, seeded by torch's generator, whose state is all that a resume
    or a recomputation needs.
    """
    source = np.random.SFC64(int(torch.empty((), dtype=torch.int64).random_()))
    octets = source.random_raw((size + 7) // 8).view(np.uint8)[:size]
    edge, rest = divmod(drop * 256, 1.0)
    mask = torch.empty(size)
    torch.gt(torch.from_numpy(octets), int(edge), out=mask)
    open_ones = np.flatnonzero(octets == int(edge))
    more = source.random_raw((len(open_ones) + 1) // 2).view(np.uint32)[: len(open_ones)]
    mask.numpy()[open_ones] = more >= round(rest * 2**32)
    return mask


def draw_keep_masks(sizes: Sequence[int], drops: Sequence[float]) -> Sequence[torch.Tensor | None]:
    """One mask for each size, None where nothing is dropped. With one probability it is one draw: calls cost what values cost."""
    if len(set(drops)) == 1 and drops[0] > 0:
        return draw_keep_mask(sum(sizes), drops[0]).split_with_sizes(list(sizes))
    return [draw_keep_mask(size, drop) if drop > 0 else None for size, drop in zip(sizes, drops, strict=True)]


def kept_scale(drop: float) -> float:
    """What keeps the mean of dropped values as it was."""
    return 1.0 / (1.0 - drop)


class ClassSwap:
    """Modules of one model whose class is another for a while. `disable` leaves the model as it was."""

    def __init__(self, model: nn.Module, others: dict[type[nn.Module], type[nn.Module]]) -> None:
        self._model, self._others = model, others
        self._swapped: list[tuple[nn.Module, type[nn.Module]]] = []
        self.enable()

    def enable(self) -> None:
        """Swap the class of every plain module that another is given for."""
        for module in self._model.modules():
            if type(module) in self._others:
                self._swapped.append((module, type(module)))
                module.__class__ = self._others[type(module)]

    def disable(self) -> None:
        """Give every module its own class back."""
        while self._swapped:
            module, before = self._swapped.pop()
            module.__class__ = before
            _MEMORY.pop(module, None)


def enable_cpu_speed(model: nn.Module, *, dropout: bool = True, linear: bool = True) -> ClassSwap:
    """Swap the forward of plain `nn.Dropout`, `nn.Linear` and `nn.Embedding` modules. Parameters and state dict are untouched.

    On another device, or in another dtype than float32, the swapped modules do what they did before.
    """
    quick: dict[type[nn.Module], type[nn.Module]] = {}
    if is_compiled(model):
        return ClassSwap(model, quick)
    if dropout:
        quick[nn.Dropout] = QuickDropout
    if linear and _product() is not None:
        quick[nn.Linear] = QuickLinear
    if linear:
        quick[nn.Embedding] = QuickEmbedding
    return ClassSwap(model, quick)


def in_float32_here(x: torch.Tensor) -> bool:
    """Whether the parts for the CPU take it."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


_ENOUGH_VALUES = 2**15
"""Below, torch's own mask costs less."""


class QuickDropout(nn.Dropout):
    """`nn.Dropout` with a mask of `draw_keep_mask`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        usual = self.training and 0.0 < self.p < 1.0 and input.numel() >= _ENOUGH_VALUES
        if not usual or not in_float32_here(input):
            return super().forward(input)
        return input * draw_keep_mask(input.numel(), self.p).mul_(kept_scale(self.p)).view_as(input)


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
        if _is_small(rows, self.weight) or not in_float32_here(input):
            return super().forward(input)
        flat = input.reshape(rows, self.in_features)
        if torch.is_grad_enabled():
            out: torch.Tensor = _OneDnnLinear.apply(flat, self.weight, self.bias)  # type: ignore[no-untyped-call]
        else:
            out = multiply(flat, self.weight, self.bias)
        return out.view(*input.shape[:-1], self.out_features)


def _is_small(rows: int, weight: torch.Tensor) -> bool:
    return rows < _ENOUGH_ROWS or rows * weight.numel() < _ENOUGH_PRODUCTS


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`functional.linear` by the quicker way, with no gradient."""
    product = _product()
    if product is None or x.dtype != torch.float32 or _is_small(x.shape[0], weight):
        return functional.linear(x, weight, bias)
    return product(x, weight, bias, "none", [], "")


def towards_parameters(
    grad: torch.Tensor, x: torch.Tensor, need: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the weight and of the bias of a projection of `x`, as far as they are needed."""
    return grad.t() @ x if need[0] else None, grad.sum(0) if need[1] else None  # oneDNN would copy both operands first


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        need_x, need_weight, need_bias = ctx.needs_input_grad
        # Gradients are enabled here while a second derivative is wanted, which oneDNN's product does not have.
        towards_x = functional.linear if torch.is_grad_enabled() else multiply
        to_x = towards_x(grad, weight.t(), None) if need_x else None
        return to_x, *towards_parameters(grad, x, (need_weight, ctx.has_bias and need_bias))


_LARGE_TABLE = 2**24
"""Bytes. Memory of smaller gradients stays with the process anyway."""
_MEMORY: WeakKeyDictionary[nn.Module, list[torch.UntypedStorage]] = WeakKeyDictionary()
"""The memory of the last gradient of each table."""


class QuickEmbedding(nn.Embedding):
    """`nn.Embedding` whose gradient lies in the same memory at each step: new memory costs more than the gradient."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        usual = self.max_norm is None and not (self.scale_grad_by_freq or self.sparse)
        if not (usual and torch.is_grad_enabled() and in_float32_here(weight) and weight.nbytes >= _LARGE_TABLE):
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
        return like.new_empty(0).set_(memory[0], 0, shape, (shape[1], 1)).zero_()
    found = like.new_zeros(shape)
    memory[:] = [found.untyped_storage()]
    return found


ENOUGH_ROWS = 64
"""Below, the call costs more than the product."""
TYPICAL_ROWS = 4096


class PackedLinear(QuickLinear):
    """`nn.Linear`, followed by GELU where `gelu` is set."""

    packed: torch.Tensor
    gelu: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // self.in_features
        plain = input.device.type == "cpu" and input.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if rows < ENOUGH_ROWS or not plain or torch.is_grad_enabled():
            out = super().forward(input)
            return functional.gelu(out) if self.gelu else out
        flat = input.reshape(rows, self.in_features)
        kind, how = ("gelu", "none") if self.gelu else ("none", "")
        found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(flat, self.packed, self.bias, kind, [], how)
        return found.view(*input.shape[:-1], self.out_features)


def pack_products(model: nn.Module) -> int:
    """Changes the model's products for good; how many were changed. Its weights must not change afterwards."""
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return 0
    count = 0
    for module in model.modules():
        if type(module) is QuickLinear and module.weight.dtype == torch.float32 and module.out_features >= ENOUGH_ROWS:
            with torch.inference_mode():
                packed = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), TYPICAL_ROWS)
            module.__class__ = PackedLinear
            assert isinstance(module, PackedLinear)
            module.packed, module.gelu = packed, False
            count += 1
    for module in model.modules():
        dense, activation = getattr(module, "dense", None), getattr(module, "intermediate_act_fn", None)
        if isinstance(dense, PackedLinear) and callable(activation) and _is_gelu(activation):
            dense.gelu = True
            module.intermediate_act_fn = nn.Identity()
    return count


def _is_gelu(activation: object) -> bool:
    """By what it computes: transformers has several by that name, and some are approximations."""
    probe = torch.linspace(-8.0, 8.0, 257)
    with torch.inference_mode():
        return callable(activation) and torch.equal(activation(probe), functional.gelu(probe))
