"""Packing inside ordinary calls of a model: `model(input_ids=..., attention_mask=...)` computes real tokens only.

The caller keeps its collator, sampler, loss and loop. Inside `PackedCalls.active()` a call of the model packs its padded batch
by the attention mask and returns the same logits. The model is plain at any other time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from tunesmith.errors import short_text
from tunesmith.models.families import FAMILIES, hook_tables, is_watched, why_not
from tunesmith.speedups.first_token import enable_first_token_only, why_not_first_token
from tunesmith.speedups.packing import Packing, enable_padding_free
from tunesmith.speedups.verify import Gradients, difference, half_difference, nothing_left_behind

PACKING, FIRST_TOKEN = "packing", "first-token-only last layer"
ROWS = 4
"""Number of rows that the comparison with the plain model uses."""
_PLAIN_ONLY = (
    "inputs_embeds",
    "position_ids",
    "head_mask",
    "output_hidden_states",
    "output_attentions",
    "past_key_values",
)
"""Arguments of a call that need the padded batch."""
_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError, KeyError)


def why_not_packed(model: nn.Module) -> str | None:
    """Return the reason why calls of this model are not packed; None if they can be."""
    with own_forward(model):
        reason = why_not(model)
    if reason is None and getattr(model, "is_gradient_checkpointing", False):
        return "gradient checkpointing repeats layers"
    return reason


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """Hide the wrapper that accelerate puts around `forward` for mixed precision."""
    wrapper = vars(model).pop("forward", None) if "_original_forward" in vars(model) else None
    try:
        yield
    finally:
        if wrapper is not None:
            vars(model)["forward"] = wrapper


class PackedCalls:
    """Packs the batches of one model while it is active, after a comparison with the plain model on the first batch."""

    def __init__(self, model: nn.Module, *, half: bool = False) -> None:
        self.model = model
        self.on: tuple[str, ...] = ()
        """Names of the speedups in use."""
        self.off: dict[str, str] = {}
        """Name of each speedup that is not in use -> reason."""
        self.dropped: str | None = None
        """How the packed model differed from the plain one on the first batch, once."""
        self._half, self._parts, self._hooks = half, list[Any](), list[Any]()
        self._packing: Packing | None = None
        self._proved: dict[bool, Any] = {}
        self._busy = False
        reason = why_not_packed(model)
        if reason is not None:
            self.off = {PACKING: reason}
            return
        free = enable_padding_free(model)
        self._family = FAMILIES[str(model.config.model_type)]  # type: ignore[union-attr]
        self._packing = Packing(free.first_position, free.keys, free.skipped_id)
        self._parts, self.on = [free], (PACKING,)
        reason = why_not_first_token(model)
        if reason is None:
            self._parts.append(enable_first_token_only(model))
            self.on = (PACKING, FIRST_TOKEN)
        else:
            self.off = {FIRST_TOKEN: reason}
        self._disable()
        self._names = list(inspect.signature(type(model).forward).parameters)[1:]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Pack calls of the model inside this block."""
        if self._packing is None or self._hooks:
            yield
            return
        self._hooks = [
            self.model.register_forward_pre_hook(self._before, with_kwargs=True),
            self.model.register_forward_hook(self._after, always_call=True),
        ]
        try:
            yield
        finally:
            while self._hooks:
                self._hooks.pop().remove()
            self._disable()

    def _enable(self) -> None:
        for part in self._parts:
            part.enable()

    def _disable(self) -> None:
        for part in reversed(self._parts):
            part.disable()

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the padded batch of a call by a packed one; None leaves the call as it is."""
        if self._busy:
            return None
        given = dict(zip(self._names, args, strict=False)) | kwargs
        packed = None if len(args) > len(self._names) else self.pack(given)
        if packed is None or is_watched(hook_tables(model.modules())) or not self._is_proved(given):
            return None
        self._enable()
        return (), packed

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._busy:
            self._disable()

    def pack(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the arguments of the call with a packed batch; None if the batch has to stay padded."""
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if self._packing is None or any(given.get(name) is not None for name in _PLAIN_ONLY):
            return None
        if not (isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor)) or ids.ndim != 2:
            return None
        if mask.shape != ids.shape or not len(ids):
            return None
        kept = mask.cpu().numpy() != 0
        lengths = kept.sum(axis=1)
        if lengths.min() == 0 or not np.array_equal(kept, np.arange(kept.shape[1]) < lengths[:, None]):
            return None  # padded on the left, or with gaps: positions depend on the padding
        tokens = {"input_ids": _cut(ids, lengths)}
        if self._family.segments:
            segments = given.get("token_type_ids")
            tokens["token_type_ids"] = _cut(torch.zeros_like(ids) if segments is None else segments, lengths)
        rest = {k: v for k, v in given.items() if k not in ("input_ids", "attention_mask", "token_type_ids")}
        packed = self._packing(tokens)
        return rest | {k: v.to(ids.device, non_blocking=True) for k, v in packed.items()}

    def _is_proved(self, given: dict[str, Any]) -> bool:
        """Compare with the plain model on the first call, and again after the model changed."""
        trains = torch.is_grad_enabled()
        mark = (
            tuple((id(m), type(m)) for m in self.model.modules()),
            tuple(p.requires_grad for p in self.model.parameters()),
        )
        if self._proved.get(trains) == mark:
            return True
        changed = bool(self._proved) and why_not_packed(self.model)
        wrong = changed or self._compare(given)
        if wrong and len(self._parts) > 1 and not changed:
            self._parts[1:], self.on = [], (PACKING,)
            self.off, self.dropped = {FIRST_TOKEN: f"it changes the result ({wrong})"}, wrong
            wrong = self._compare(given)
        if wrong:
            self.close(wrong if changed else f"it changes the result ({wrong})")
            self.dropped = wrong
            return False
        self._proved[trains] = mark
        return True

    def close(self, reason: str) -> None:
        """Leave the model plain from now on."""
        self._disable()
        self._parts, self.on, self.off, self._packing = [], (), {PACKING: reason}, None

    def _compare(self, given: dict[str, Any]) -> str | None:
        """Return how the packed call differs from the plain one on a few rows, without dropout; None if it doesn't."""
        mask = given["attention_mask"]
        order = torch.argsort(mask.sum(1), descending=True, stable=True).tolist()
        chosen = sorted({order[round(i * (len(order) - 1) / (ROWS - 1))] for i in range(ROWS)})
        few = {
            k: v[chosen] if isinstance(v, torch.Tensor) and v.ndim and len(v) == len(mask) else v
            for k, v in given.items()
        }
        few.pop("labels", None)
        few["attention_mask"] = few["attention_mask"].clone()
        if len({int(n) for n in few["attention_mask"].sum(1)}) == 1 and len(chosen) > 1:
            few["attention_mask"][0, max(1, few["attention_mask"].shape[1] // 2) :] = (
                0  # rows of one length prove nothing
            )
        packed = self.pack(few)
        if packed is None:
            return "the batch cannot be packed"
        self._busy = True
        device = next(self.model.parameters()).device
        state = cast(Any, SimpleNamespace(model=self.model, runtime=SimpleNamespace(device=device)))
        try:
            with nothing_left_behind(state):
                exact = self._measure(few, half=False)
                rounded = self._measure(few, half=True) if self._half else exact
                try:
                    self._enable()
                    fast = self._measure(packed, half=self._half)
                finally:
                    self._disable()
        except torch.OutOfMemoryError:
            return None  # the step itself may fit
        except _ERRORS as error:
            return f"{type(error).__name__}: {short_text(error)}"
        finally:
            self._busy = False
        return half_difference(exact, rounded, fast) if self._half else difference(exact, fast)

    def _measure(self, inputs: dict[str, Any], *, half: bool) -> Gradients:
        """Return a weighted sum of the logits, and its gradients if gradients are enabled."""
        forward: Any = self.model.forward if half else partial(type(self.model).forward, self.model)
        device = next(self.model.parameters()).device.type
        off: Any = nullcontext() if half else torch.autocast(device, enabled=False)
        with off:
            out = forward(**inputs)
        logits = (out["logits"] if isinstance(out, Mapping) else out[0]).float()
        weights = torch.cos(torch.arange(logits.numel(), device=logits.device, dtype=logits.dtype) + 0.5).view(
            logits.shape
        )
        total = (logits * weights).sum()
        found = {"logits": logits.detach()}
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad} if total.requires_grad else {}
        gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True) if named else ()
        for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
            found[name] = torch.zeros_like(parameter) if gradient is None else gradient.detach().float()
        return Gradients(logits.detach().double().norm(), found)


def _cut(rows: torch.Tensor, lengths: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Return each row without its padding."""
    return [row[:n] for row, n in zip(rows.cpu().numpy(), lengths, strict=True)]
