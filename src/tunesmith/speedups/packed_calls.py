"""Packing inside ordinary calls of a model: `model(input_ids=..., attention_mask=...)` computes real tokens only.

The caller keeps its collator, sampler, loss and loop. In `PackedCalls.active()`, padded batches are packed by their attention
mask: in calls of a classifier that we know, or in the calls of `BertModel` and the like inside any other model (a custom
class, token classification, LoRA), which then gets the padded shape back, with zeros for padding. The first call is compared
with the plain model. The model is plain at any other time.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tunesmith.models.families import (
    anatomy_of,
    hook_tables,
    is_watched,
    known_encoders,
    why_not,
    why_not_encoder,
)
from tunesmith.speedups.packing import FirstTokenOnly, Packing, PaddingFree, why_not_first_token
from tunesmith.speedups.verify import (
    ROWS,
    Gradients,
    failure,
    float_tensors,
    judge_by,
    nothing_left_behind,
    spread_by_length,
    weighted_gradients,
)

PACKING, FIRST_TOKEN, IN_EVALUATION = "packing", "first-token-only last layer", "packing in evaluation"
MOST_FILLED = 0.9
"""An encoder's batch with a larger share of real tokens stays padded: packing costs more than it saves."""
_PLAIN_ONLY = (
    "inputs_embeds",
    "position_ids",
    "head_mask",
    "encoder_hidden_states",
    "output_hidden_states",
    "output_attentions",
    "past_key_values",
)
"""Arguments of a call that need the padded batch."""


@contextmanager
def own_forward(model: nn.Module) -> Iterator[None]:
    """Hide the wrapper that accelerate puts around `forward` for mixed precision."""
    wrapper = vars(model).pop("forward", None) if "_original_forward" in vars(model) else None
    try:
        yield
    finally:
        if wrapper is not None:
            vars(model)["forward"] = wrapper


class PackedModule:
    """One module whose calls can be packed: a classifier that we know, or an encoder `inside` another model."""

    def __init__(self, module: nn.Module, owner: PackedCalls, *, inside: bool) -> None:
        self.module, self.inside, self.forced = module, inside, False
        self._owner, self._anatomy = owner, anatomy_of(module)
        self._places, self._shape = torch.zeros(0), (0, 0)
        self._under_way = False
        self._ends_here = inside and (self._anatomy.family.relative or self._anatomy.stack is module)
        """Whether the packed output is that of the module itself, which `after` puts back."""
        free = PaddingFree(module, (_keep if self._ends_here else self._put_back) if inside else None)
        self.parts: list[Any] = [free]
        self._packing = Packing(free.first_position, free.keys, free.skipped_id)
        if not inside and why_not_first_token(module) is None:
            self.parts.append(FirstTokenOnly(module))
        self.disable()
        self._names = list(inspect.signature(type(module).forward).parameters)[1:]

    def enable(self) -> None:
        """Let the module take packed batches."""
        for part in self.parts:
            part.enable()

    def disable(self) -> None:
        """Make the module plain."""
        for part in reversed(self.parts):
            part.disable()
        if self._anatomy.family.relative:
            from tunesmith.speedups.relative import context_of

            context = context_of(self.module)
            context.layout = context.all_tokens = None

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        return dict(zip(self._names, args, strict=False)) | kwargs

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the padded batch of a call by a packed one; None leaves the call as it is."""
        if len(args) > len(self._names):
            return None
        given = self.named(args, kwargs)
        if self.lengths_of(given) is None or not (self.forced or self._owner.may_pack()):
            return None
        packed = self.pack(given)  # after the comparison in `may_pack`, which packs other batches
        self.enable()
        self._under_way = True
        return (), self.begin(packed)

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """End a packed call."""
        if not self._under_way:
            return None
        self._under_way = False
        self.disable()
        return self._put_back(module, args, {}, output) if self._ends_here and output is not None else None

    def begin(self, packed: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a packed call for hooks that came too late for it: those of `enable`."""
        tokens = packed["input_ids"].shape[1]
        if self._anatomy.family.relative:
            from tunesmith.speedups.relative import context_of

            context_of(self.module).layout = packed.pop("layout")
            if self.inside:
                packed["attention_mask"] = torch.ones((1, 1, 1, tokens), device=packed["input_ids"].device)
        elif self._anatomy.stack is self.module:
            packed["attention_mask"] = {"full_attention": None, "sliding_attention": None}
        return packed

    def lengths_of(self, given: Mapping[str, Any]) -> NDArray[np.int64] | None:
        """Return the tokens of each row; None if the batch has to stay padded."""
        ids, mask = given.get("input_ids"), given.get("attention_mask")
        if any(given.get(name) is not None for name in _PLAIN_ONLY):
            return None
        if not (isinstance(ids, torch.Tensor) and isinstance(mask, torch.Tensor)) or ids.ndim != 2:
            return None
        lengths = right_padded_lengths(mask) if mask.shape == ids.shape else None
        return None if self.inside and lengths is not None and lengths.sum() > MOST_FILLED * mask.numel() else lengths

    def pack(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the call with a packed batch."""
        ids, lengths = given["input_ids"], self.lengths_of(given)
        if lengths is None:
            raise ValueError("the batch cannot be packed")
        if self.inside:
            order, columns = np.argsort(lengths, kind="stable"), np.arange(ids.shape[1])  # the order of `Packing`
            places = (columns + order[:, None] * len(columns))[columns < lengths[order, None]]
            self._places, self._shape = torch.from_numpy(places).to(ids.device), tuple(ids.shape)
        tokens = {"input_ids": _without_padding(ids, lengths)}
        if self._anatomy.family.segments:
            segments = given.get("token_type_ids")
            segments = torch.zeros_like(ids) if segments is None else segments
            tokens["token_type_ids"] = _without_padding(segments, lengths)
        rest = {k: v for k, v in given.items() if k not in ("input_ids", "attention_mask", "token_type_ids")}
        packed = self._packing(tokens)
        return rest | {k: v.to(ids.device, non_blocking=True) for k, v in packed.items()}

    def _put_back(self, stack: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        """Return the output in the shape of the padded batch, with zeros for padding."""
        hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output.last_hidden_state
        rows, width = self._shape
        flat = hidden.new_zeros(rows * width, hidden.shape[-1]).index_copy(0, self._places, hidden[0])
        padded = flat.view(rows, width, hidden.shape[-1])
        if isinstance(output, tuple):
            return padded, *output[1:]
        output.last_hidden_state = padded
        return output


class PackedCalls:
    """Packs the batches of one model while it is active, after a comparison with the plain model on the first batch.

    `only_loss`: the caller reads only the model's own loss while it trains, so outputs for padding may differ.
    """

    def __init__(self, model: nn.Module, *, half: bool = False, only_loss: bool = False) -> None:
        self.model = model
        self.on: tuple[str, ...] = ()
        """Names of the speedups in use."""
        self.off: dict[str, str] = {}
        """Name of each speedup that is not in use -> reason."""
        self.dropped: str | None = None
        """How the packed model differed from the plain one on the first batch, once."""
        self.busy = False
        """Whether the comparison is under way."""
        self._half, self._only_loss = half, only_loss
        self._hooks: list[Any] = []
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._checked: dict[bool, tuple[Any, str | None]] = {}
        """Whether gradients are enabled -> (mark of the model, how packing differed)."""
        self._packed = self._choose_modules()
        if not self._packed:
            return
        self.on = (PACKING,)
        if len(self._packed[0].parts) > 1:
            self.on = (PACKING, FIRST_TOKEN)
        elif not self._packed[0].inside:
            self.off = {FIRST_TOKEN: str(why_not_first_token(model))}

    def _choose_modules(self) -> list[PackedModule]:
        with own_forward(self.model):
            reason = why_not(self.model)
        if getattr(self.model, "is_gradient_checkpointing", False):
            reason = "gradient checkpointing repeats layers"
        elif self._half or next(self.model.parameters()).device.type != "cpu":
            # rounding differs, and nobody compared the speed: only what is known as a whole is packed
            relative = reason is None and anatomy_of(self.model).family.relative
            reason = "its attention is packed in float32 on a CPU only" if relative else reason
            if reason is not None:
                self.off = {PACKING: reason}
                return []
        if reason is None:
            return [PackedModule(self.model, self, inside=False)]
        encoders = {encoder: why_not_encoder(encoder) for encoder in known_encoders(self.model)}
        found = [PackedModule(encoder, self, inside=True) for encoder, why in encoders.items() if why is None]
        if not found:
            self.off = {PACKING: next((why for why in encoders.values() if why), reason)}
        return found

    @contextmanager
    def active(self) -> Iterator[None]:
        """Pack calls of the model inside this block."""
        if not self._packed or self._hooks:
            yield
            return
        self._hooks = [self.model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for packed in self._packed:
            self._hooks.append(packed.module.register_forward_pre_hook(packed.before, with_kwargs=True))
            self._hooks.append(packed.module.register_forward_hook(packed.after, always_call=True))
        self._hooks.append(self.model.register_forward_hook(self._end, always_call=True))
        try:
            yield
        finally:
            while self._hooks:
                self._hooks.pop().remove()
            self._end()
            for packed in self._packed:
                packed.disable()

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self.busy:
            self._call = (args, kwargs)

    def _end(self, *_: Any) -> None:
        if not self.busy:
            self._call = None

    def may_pack(self) -> bool:
        """Return whether a batch may be packed now. The first time, and after the model changed, it is compared."""
        if self.busy or self._call is None or is_watched(hook_tables(self.model.modules())):
            return False
        trains = torch.is_grad_enabled()
        mark = (
            tuple((id(m), type(m)) for m in self.model.modules()),
            tuple(p.requires_grad for p in self.model.parameters()),
        )
        known, wrong = self._checked.get(trains, (None, None))
        if known != mark:
            wrong = self._why_no_longer() if self._checked else None
            wrong = self._find_difference() if wrong is None else wrong
            self._checked[trains] = (mark, wrong)
        return wrong is None and bool(self._packed)

    def _why_no_longer(self) -> str | None:
        """Return why a model that was changed cannot be packed any more."""
        with own_forward(self.model):
            reasons = [why_not_encoder(p.module) if p.inside else why_not(self.model) for p in self._packed]
        wrong = next((reason for reason in reasons if reason), None)
        if wrong is not None:
            self.close(wrong)
        return wrong

    def _find_difference(self) -> str | None:
        """Compare; switch off what differs."""
        wrong = self._compare()
        whole = self._packed[0]
        if wrong and len(whole.parts) > 1:
            whole.parts[1:], self.on = [], (PACKING,)
            self.off, self.dropped = {FIRST_TOKEN: f"it changes the result ({wrong})"}, wrong
            wrong = self._compare()
        if wrong and self._packed[0].inside and not torch.is_grad_enabled():
            self.off[IN_EVALUATION] = f"outputs for padding would differ ({wrong})"
        elif wrong:
            self.close(f"it changes the result ({wrong})")
            self.dropped = wrong
        return wrong

    def close(self, reason: str) -> None:
        """Leave the model plain from now on."""
        for packed in self._packed:
            packed.disable()
        self._packed, self.on, self.off = [], (), {PACKING: reason}

    def _compare(self) -> str | None:
        """Return how the packed call differs from the plain one, without dropout; None if it doesn't."""
        assert self._call is not None
        whole = None if self._packed[0].inside else self._packed[0]
        args, kwargs = self._call if whole is None else ((), _some_rows(whole.named(*self._call)))
        self.busy = True
        try:
            with nothing_left_behind(self.model, next(self.model.parameters()).device):
                exact = self._measure(args, kwargs, half=False)
                rounded = self._measure(args, kwargs, half=True) if self._half else None
                return failure(judge_by(exact, rounded), partial(self._measure_packed, whole, args, kwargs))
        except torch.OutOfMemoryError:
            return None  # the step itself may fit
        finally:
            self.busy = False

    def _measure_packed(self, whole: PackedModule | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Gradients:
        if whole is None:
            for encoder in self._packed:
                encoder.forced = True
            try:
                return self._measure(args, kwargs, half=self._half)
            finally:
                for encoder in self._packed:
                    encoder.forced = False
                    encoder.disable()
        packed = whole.pack(kwargs)
        whole.enable()
        try:
            return self._measure((), whole.begin(packed), half=self._half)
        finally:
            whole.disable()

    def _measure(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, half: bool) -> Gradients:
        """Return a weighted sum of the outputs, and its gradients if gradients are enabled."""
        forward: Any = self.model.forward if half else partial(type(self.model).forward, self.model)
        device = next(self.model.parameters()).device.type
        off: Any = nullcontext() if half else torch.autocast(device, enabled=False)
        with off:
            out = forward(*args, **kwargs)
        if self._only_loss and torch.is_grad_enabled() and isinstance(out, Mapping) and out.get("loss") is not None:
            out = out["loss"]
        named = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        return weighted_gradients([tensor.float() for tensor in float_tensors(out)], named)


def right_padded_lengths(mask: torch.Tensor) -> NDArray[np.int64] | None:
    """Return the tokens of each row; None if rows are empty or padded on the left or inside: positions depend on the padding."""
    kept = mask.cpu().numpy() != 0
    lengths: NDArray[np.int64] = kept.sum(axis=1)
    fits = len(kept) and lengths.min() > 0 and np.array_equal(kept, np.arange(kept.shape[1]) < lengths[:, None])
    return lengths if fits else None


def _keep(*_: Any) -> None:
    """Leave an output as it is."""


def _some_rows(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a classifier's call for a few rows of different lengths, without labels."""
    mask = given["attention_mask"]
    chosen = spread_by_length(mask.sum(1).cpu().numpy(), ROWS)
    few = {
        k: v[chosen] if isinstance(v, torch.Tensor) and v.ndim and len(v) == len(mask) else v for k, v in given.items()
    }
    few.pop("labels", None)
    few["attention_mask"] = few["attention_mask"].clone()
    if len({int(n) for n in few["attention_mask"].sum(1)}) == 1 and len(chosen) > 1:
        few["attention_mask"][0, max(1, mask.shape[1] // 2) :] = 0  # rows of one length prove nothing
    return few


def _without_padding(rows: torch.Tensor, lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    return [row[:n] for row, n in zip(rows.cpu().numpy(), lengths, strict=True)]
