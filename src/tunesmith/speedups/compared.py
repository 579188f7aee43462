"""Loss and gradients of one micro-batch with dropout off, how far two of them are apart, and everything put back after."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tunesmith.data.batches import Batch
from tunesmith.models.families import why_not
from tunesmith.training.state import TrainState, generator_states, restore_generators, seed_everything

TOLERANCE = 1e-4
"""Relative, of the loss and of the gradient of each parameter in float32."""
NOISE = 2e-6
"""Of the norm of all gradients: rounding, for parameters whose gradient is zero but for it (the bias of keys)."""
TIMES_AUTOCAST = 2.0
"""How many times as far from float32 as autocast's own step a half-precision step may be, over all parameters."""
FP16_SCALE = 1024.0
_CONTAINERS = (list, dict, OrderedDict, set, deque)


@dataclass(frozen=True)
class Gradients:
    """Of one step, by the name of the parameter; zeros where it takes no part."""

    loss: torch.Tensor
    of: dict[str, torch.Tensor]
    tolerance: float = TOLERANCE
    """Relative: rounding alone is more where the weights themselves are in half precision."""

    def norm(self) -> torch.Tensor:
        """Over all of them."""
        total: torch.Tensor = torch.stack([g.norm() for g in self.of.values()]).norm()
        return total


def measure(state: TrainState, batch: Batch, *, half: bool = True) -> Gradients:
    """Loss and gradients of a micro-batch; with `half` in the precision of the run."""
    with nothing_left_behind(state):
        seed_everything(0)
        return _measure(state, batch, half)


def _measure(state: TrainState, batch: Batch, half: bool) -> Gradients:
    named = {n: p for n, p in state.model.named_parameters() if p.requires_grad}
    with state.runtime.autocast() if half else nullcontext():
        loss, _ = state.objective.sum(state.model, batch)
    scale = FP16_SCALE if half and state.runtime.precision == "fp16" else 1.0
    found = _differentiate(state.model, loss * scale, list(named.values()))
    gradients = {}
    for (name, parameter), gradient in zip(named.items(), found, strict=True):
        whole = torch.zeros_like(parameter) if gradient is None else gradient.detach() / scale
        if state.cut is not None and parameter is state.cut.parameter:
            whole = state.cut.expand(whole).to(whole.device)
        gradients[name] = whole.to(torch.float64 if whole.dtype == torch.float64 else torch.float32)
    coarsest = max(torch.finfo(p.dtype).eps for p in named.values())
    return Gradients(loss.detach().double(), gradients, max(TOLERANCE, 8 * coarsest))


def _differentiate(model: nn.Module, loss: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor | None]:
    """Gradients without their hooks: those on parameters are not called."""
    if not getattr(model, "is_gradient_checkpointing", False):
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))
    torch.autograd.backward(loss)  # repeated layers refuse the other way
    found = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def difference(plain: Gradients, fast: Gradients) -> str | None:
    """Where two steps in one precision are further apart than rounding explains; None where they are not, or cannot be told."""
    noise = max(NOISE, plain.tolerance / 50) * plain.norm()
    if not torch.isfinite(plain.loss + noise):
        return None
    if not abs(plain.loss - fast.loss) <= plain.tolerance * abs(plain.loss) + 1e-6:
        return f"loss {float(fast.loss):.6f} instead of {float(plain.loss):.6f}"
    for name, expected in plain.of.items():
        if not (fast.of[name] - expected).norm() <= plain.tolerance * expected.norm() + noise:
            return _named(name, expected, fast.of[name])
    return None


def half_difference(exact: Gradients, rounded: Gradients, fast: Gradients) -> str | None:
    """Where a half-precision step is further from the float32 one than autocast's own explains."""
    everything = exact.norm()
    if not torch.isfinite(exact.loss + rounded.loss + everything + rounded.norm()):
        return None
    own = {n: (rounded.of[n] - g).norm() for n, g in exact.of.items()}
    ours = {n: (fast.of[n] - g).norm() for n, g in exact.of.items()}
    for name, expected in exact.of.items():
        # One parameter's error is luck; what is wrong altogether is wrong by the size of its gradient.
        if not ours[name] <= 4 * own[name] + 0.05 * expected.norm() + 1e-3 * everything:
            return _named(name, expected, fast.of[name])
    total, theirs = (torch.stack(list(e.values())).norm() for e in (ours, own))
    allowed = TIMES_AUTOCAST * theirs + TOLERANCE * everything
    if not total <= allowed:
        return f"gradients {float(total / everything):.2%} from float32's, autocast's {float(theirs / everything):.2%}"
    if not abs(fast.loss - exact.loss) <= 4 * abs(rounded.loss - exact.loss) + 0.01 * abs(exact.loss) + 1e-6:
        return f"loss {float(fast.loss):.6f} instead of {float(exact.loss):.6f}"
    return None


def _named(name: str, expected: torch.Tensor, found: torch.Tensor) -> str:
    share = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
    return f"the gradient of {name} differs by {share:.2g} of its norm"


@contextmanager
def nothing_left_behind(state: TrainState) -> Iterator[None]:
    """Inside, dropout is off and products are exact; afterwards everything is as it was, but for files and the like."""
    model, device = state.model, state.runtime.device
    generators = generator_states(device)
    precision = torch.get_float32_matmul_precision()
    attributes = [(vars(m), dict(vars(m)), _contents(m)) for m in model.modules()]
    own = why_not(model) is not None  # a forward pass of the user's own might write to weights
    tensors = [*model.buffers(), *(model.parameters() if own else ())]
    values = [t.detach().clone() for t in tensors]
    watched = [(p, p.grad, p._backward_hooks) for p in model.parameters()]
    try:
        torch.set_float32_matmul_precision("highest")
        for parameter, _, hooks in watched:
            parameter.grad = None
            if hooks:
                parameter._backward_hooks = None
        model.train()
        for module in model.modules():
            _stop_dropping(module)
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for parameter, gradient, hooks in watched:
            parameter.grad = gradient
            if hooks:
                parameter._backward_hooks = hooks
        for place, before, contents in attributes:
            _put_back(place, before, contents)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                if not torch.equal(tensor, value):
                    tensor.copy_(value)
        by_rank = {f"{k}.{0}": v for k, v in generators["tensors"].items()}
        restore_generators(by_rank, generators["plain"], 0, device)


def _stop_dropping(module: nn.Module) -> None:
    """Dropout modules, and the shares that attention functions are handed (ModernBERT's `attention_dropout`)."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = 0.0
    for name in [n for n, value in vars(module).items() if "drop" in n and isinstance(value, float)]:
        setattr(module, name, 0.0)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """The containers among a module's attributes, each with a copy of what is in it."""
    return [(value, copy.copy(value)) for value in vars(module).values() if type(value) in _CONTAINERS]


def _put_back(place: dict[str, Any], before: dict[str, Any], contents: list[tuple[Any, Any]]) -> None:
    for container, kept in contents:
        container.clear()
        container.extend(kept) if isinstance(container, (list, deque)) else container.update(kept)
    if place.keys() != before.keys() or any(place[k] is not v for k, v in before.items()):
        place.clear()
        place.update(before)
