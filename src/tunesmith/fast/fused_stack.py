"""What every stack of fused layers has: half-precision copies of its matrices, and a forward in place of transformers'."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from tunesmith.encoder.families import anatomy_of, hook_tables, is_watched
from tunesmith.errors import ConfigError
from tunesmith.fast.layer_parts import why_not_fused


class Copies(Protocol):
    """Of one layer: parameters, and for each of them the copy that products are computed with."""

    @property
    def copied(self) -> Sequence[torch.Tensor]:
        """The parameters."""

    @property
    def targets(self) -> Sequence[torch.Tensor]:
        """Their copies."""


class FusedStack:
    """The strategy as applied to one model. `disable` leaves the model as it was."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, *, first_token_only: bool) -> None:
        reason = why_not_fused(model)
        if reason:
            raise ConfigError(f"fused layers are not possible: {reason}", fix="Train it unfused.")
        self.dtype, self.first_token_only = dtype, first_token_only
        self._stack: Any = anatomy_of(model).stack
        self._inner = list(self._uncalled())
        self._listeners = hook_tables(self._inner)
        copies = self._copies(model)
        self._targets = [t for layer in copies for t in layer.targets]
        self._copied = [p for layer in copies for p in layer.copied]
        self._seen: list[tuple[int, int]] = []
        self.kept_fresh = False
        """Set where nothing but an optimizer's kernel, which writes the copies too, writes weights between steps."""
        self.enable()

    def _uncalled(self) -> Iterable[nn.Module]:
        """The modules whose work is done without calling them."""
        raise NotImplementedError

    def _copies(self, model: nn.Module) -> Sequence[Copies]:
        """Those of each layer."""
        raise NotImplementedError

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the stack's own forward."""
        raise NotImplementedError

    @property
    def copies(self) -> dict[torch.Tensor, torch.Tensor]:
        """Each parameter that has one, with its copy."""
        return dict(zip(self._copied, self._targets, strict=True))

    def enable(self) -> None:
        """Let the stack run fused."""
        self._stack.forward = self._forward

    def disable(self) -> None:
        """Give the stack its own forward back."""
        vars(self._stack).pop("forward", None)

    def refresh_if_changed(self) -> None:
        """Copy the weights if anything but the optimizer's kernel wrote to them, or put others in their place."""
        seen = [(p._version, p.data_ptr()) for p in self._copied]
        if seen != self._seen:
            self._refresh()
            self._seen = seen

    def _refresh(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._copied)

    def _prepare(self, calls: int, device: torch.device) -> torch.Tensor:
        """Copies as the weights are now; the seeds of so many calls that drop values."""
        if self.kept_fresh:
            self.refresh_if_changed()
        else:  # copied anew each time: a write through `.data` leaves no sign
            self._refresh()
        # Drawn from torch's generator, which is seeded for the step: what is dropped is a function of the step.
        return torch.randint(2**62, (calls,), device=device) if self._stack.training else self._targets[0]

    def _is_watched(self) -> bool:
        """Hooks of the user's of any kind; of our own, those that look for a value that is not finite."""
        return any(module._forward_hooks for module in self._inner) or is_watched(self._listeners)


def probability(dropout: nn.Module | None, training: bool) -> float:
    """The share of values that a layer's dropout drops now."""
    return dropout.p if training and isinstance(dropout, nn.Dropout) else 0.0
