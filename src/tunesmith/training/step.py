"""One optimizer step: forward, backward, check, update, zero. The loss is divided once, by the weight of the whole window."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tunesmith.data.batches import Batch, Window
from tunesmith.errors import ResourceError
from tunesmith.speedups.determinism import settled
from tunesmith.speedups.verify import ready
from tunesmith.training.optimizer import (
    Rate,
    apply_update,
    make_moments,
    set_rate,
    trained_parameters,
)
from tunesmith.training.state import TrainState, seed_step

if TYPE_CHECKING:
    from tunesmith.training.evaluation import Objective


@dataclass(frozen=True)
class StepResult:
    """The numbers of one step, still on the device: reading one would wait for it."""

    step: int
    numbers: torch.Tensor
    """Loss, gradient norm before clipping, and 1.0 if one of them is NaN or inf and a smaller loss scale can't fix it."""
    learning_rate: float
    window: Window
    split_from: int | None = None
    """Largest micro-batch before an out-of-memory split it; None if nothing was split in this step."""
    split_to: int | None = None

    @property
    def loss(self) -> torch.Tensor:
        """The mean loss over the window."""
        return self.numbers[0]

    @property
    def grad_norm(self) -> torch.Tensor:
        """The gradient norm before clipping."""
        return self.numbers[1]


def train_step(
    state: TrainState, window: Window, *, learning_rate: float, max_grad_norm: float, seed: int
) -> StepResult:
    """Advance the state by one optimizer step.

    A NaN or infinite step leaves the weights unchanged, and so do later ones until the host has read its result.
    """
    state.require_whole("training cannot continue with them")
    if state.phase == "gradients":  # of a step that was interrupted
        state.optimizer.zero_grad(set_to_none=True)
    limit_before = state.rows_limit
    window = ready(state, window)
    weight = state.objective.weight(window.labels, len(window.rows))
    # DDP averages gradients over ranks, so each rank's share is multiplied by their number.
    factor = state.runtime.world / weight if weight > 0 else float("nan")
    reseed = partial(seed_step, seed, state.step, state.runtime.rank, state.runtime.device)
    reseed()

    def body(batches: Sequence[Batch], rate: Rate, share: Rate) -> torch.Tensor:
        state.phase = "gradients"
        objective = TwoReadings(state.objective) if state.push > 0 else state.objective
        share = 0.0 if window.idle else share
        loss = _accumulate(state, batches, share, objective)
        if isinstance(objective, TwoReadings):
            objective.again = True
            with pushed(state.model, state.push):
                _accumulate(state, batches, share, objective)
        return _update(state, loss, rate, max_grad_norm)

    numbers = None
    if state.graphs is not None and state.rows_limit is None:
        assert state.speedups is not None
        numbers = state.speedups.replay(window, learning_rate, factor, body, state.fingerprint.of_step)
        if numbers is None:  # discard the gradients of a failed capture
            state.optimizer.zero_grad(set_to_none=True)
            reseed()
    while numbers is None:
        try:
            pieces = [piece for batch in window.micro_batches for piece in split_batch(batch, state.rows_limit)]
            numbers = body(pieces, learning_rate, factor)
        except torch.OutOfMemoryError as error:
            _make_room(state, window, error)
            reseed()
    state.step += 1
    if state.rows_limit == limit_before:
        return StepResult(state.step, numbers, learning_rate, window)
    largest = max(len(b) for b in window.micro_batches)
    return StepResult(state.step, numbers, learning_rate, window, largest, state.rows_limit)


def _accumulate(
    state: TrainState, batches: Sequence[Batch], factor: Rate, objective: Objective | TwoReadings
) -> torch.Tensor:
    """Add the gradients of the window's mean loss to `.grad`; return that loss (over all ranks)."""
    runtime = state.runtime
    state.wrapped.train()
    total = torch.zeros((), device=runtime.device)
    for index, batch in enumerate(batches):
        in_order = settled() if runtime.device.type == "cuda" else contextlib.nullcontext()
        with runtime.sync_when(index == len(batches) - 1, state.wrapped), in_order:
            total += micro_step(state, runtime.move(batch), factor, objective)
    return runtime.sum_over_ranks(total) / runtime.world


def micro_step(
    state: TrainState, batch: Batch, factor: Rate, objective: Objective | TwoReadings | None = None
) -> torch.Tensor:
    """Run forward and backward on a micro-batch; return its share of the window's loss."""
    with state.runtime.autocast():
        loss_sum, _ = (objective or state.objective).sum(state.wrapped, batch)
    loss = loss_sum * factor
    torch.autograd.backward(loss if state.loss_scale is None else loss * state.loss_scale.scale)
    return loss.detach()


def _update(state: TrainState, loss: torch.Tensor, rate: Rate, max_grad_norm: float) -> torch.Tensor:
    """Clip, update and zero the gradients, without waiting for the device; return the step's numbers."""
    optimizer, scale = state.optimizer, state.loss_scale
    norm = torch.nn.utils.get_total_norm([p.grad for p in trained_parameters(optimizer) if p.grad is not None])
    divisor = torch.ones_like(norm) if scale is None else scale.scale.to(norm.dtype)
    norm = norm / divisor
    bad = (~(torch.isfinite(norm) & torch.isfinite(loss))).to(norm.dtype)
    # The scale affects only the backward pass: a NaN or infinite loss stays so with any scale.
    lasting = bad if scale is None else bad * (~torch.isfinite(loss) | scale.is_smallest)
    state.poisoned.copy_(torch.maximum(state.poisoned, lasting))
    skip = torch.maximum(state.poisoned, bad)
    if max_grad_norm > 0:
        # the coefficient of clip_grad_norm_, passed to the optimizer as a divisor: no extra pass over the gradients
        divisor = divisor * torch.clamp((norm + 1e-6) / max_grad_norm, min=1.0)
    numbers = torch.stack([loss.to(norm.dtype), norm, lasting])
    set_rate(optimizer, rate)
    make_moments(optimizer)
    state.phase = "update"
    apply_update(optimizer, torch.nan_to_num(divisor, nan=1.0, posinf=1.0), skip, state.kernel)
    if state.speedups is not None:
        state.speedups.after_update(rate, state.vocabulary_decay, skip)
    if scale is not None:
        scale.update(bad)
    state.phase = "done"
    optimizer.zero_grad(set_to_none=True)
    return numbers


def split_batch(batch: Batch, limit: int | None) -> list[Batch]:
    """Return pieces of at most `limit` rows of a padded batch; a packed batch brings its own way to split."""
    if limit is None or len(batch) <= limit:
        return [batch]
    if batch.split is not None:
        return batch.split(batch, limit)
    out = []
    for start in range(0, len(batch), limit):
        at = slice(start, start + limit)
        inputs = {k: v[at] for k, v in batch.inputs.items()}
        tokens = int(inputs["attention_mask"].sum()) if "attention_mask" in inputs else int(inputs["input_ids"].numel())
        labels = None if batch.labels is None else batch.labels[at]
        rows = np.asarray(batch.rows[at])
        out.append(Batch(inputs, labels, rows, tokens, int(inputs["input_ids"].numel())))
    return out


def _make_room(state: TrainState, window: Window, error: BaseException) -> None:
    """After an out-of-memory: free the memory that only makes steps faster; if there is none, halve the micro-batch.

    Once the update has begun nothing is repeated: some weights would be updated twice.
    """
    state.optimizer.zero_grad(set_to_none=True)
    if state.phase != "gradients":
        raise ResourceError(
            f"out of memory in the update of step {state.step + 1}, or in a callback after it; it cannot be repeated",
            fix="Free memory on the device, then resume from the last checkpoint, which is intact.",
        ) from error
    if state.speedups is None or not state.speedups.free_memory():
        largest = max(len(b) for b in window.micro_batches)
        current = largest if state.rows_limit is None else min(state.rows_limit, largest)
        if current <= 1 or state.runtime.world > 1:
            raise ResourceError(
                f"out of memory at step {state.step + 1} with a micro-batch size of {current}",
                fix="Lower --max_seq_length or --per_device_train_batch_size, or set --gradient_checkpointing.",
            ) from error
        state.rows_limit = (current + 1) // 2
    gc.collect()
    if state.runtime.device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass
class TwoReadings:
    """The objective of adversarial training: the loss in the first pass, the distance to its outputs in the second."""

    objective: Any
    """A TaskLoss."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    again: bool = False

    def sum(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the summed loss of this pass, and its logits."""
        if self.again:
            logits = model(**batch.inputs).logits
            return self.objective.divergence(logits, self.outputs.pop(0)), logits
        loss, logits = self.objective.sum(model, batch)
        self.outputs.append(logits.detach())
        return loss, logits


@contextmanager
def pushed(model: nn.Module, size: float) -> Iterator[None]:
    """Move the word embeddings along their gradient within the block, and restore them exactly afterwards.

    Rows with a gradient move by `size` times their joint norm; other rows stay.
    """
    weight = model.get_input_embeddings().weight  # type: ignore[operator]
    gradient = weight.grad
    if gradient is None:  # frozen
        yield
        return
    with torch.no_grad():
        kept, gradient = weight.detach().clone(), gradient.float()
        squares = gradient.square().sum(1)
        length = (kept.float().square().sum(1) * (squares > 0)).sum().sqrt()
        weight.add_((gradient * (size * length / squares.sum().sqrt().clamp_min(1e-30))).to(weight.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def find_culprit(state: TrainState, result: StepResult, seed: int) -> tuple[str, str]:
    """Return (what, name) of the first bad tensor: a weight, an output of a module, the loss, or a gradient."""
    for name, parameter in state.model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            return "weight", name
    found: list[str] = []
    hooks = [
        module.register_forward_hook(_watch(name, found))
        for name, module in state.model.named_modules()
        if not any(module.children())
    ]
    try:
        state.model.train()
        seed_step(seed, result.step - 1, state.runtime.rank, state.runtime.device)
        for batch in result.window.micro_batches:
            with state.runtime.autocast():
                loss, _ = state.objective.sum(state.model, state.runtime.move(batch))
            if found:
                return "output", found[0]
            if not bool(torch.isfinite(loss)):
                return "loss", "loss"
            with contextlib.suppress(RuntimeError):
                torch.autograd.backward(loss)
        for name, parameter in state.model.named_parameters():
            if parameter.grad is not None and not bool(torch.isfinite(parameter.grad).all()):
                return "gradient", name
    finally:
        for hook in hooks:
            hook.remove()
        state.optimizer.zero_grad(set_to_none=True)
    weight = state.objective.weight(result.window.labels, len(result.window.rows))
    if weight == 0:
        return "loss", "no labeled row in the batch"
    # Ranks don't exchange this, because they may get here at different moments. The rank that saw it names it.
    alone = state.runtime.world == 1
    return "gradient", "not seen again when repeated" if alone else "of another rank (its output names it)"


def _watch(name: str, found: list[str]) -> Any:
    def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        outputs = output if isinstance(output, (tuple, list)) else (output,)
        tensors = [t for t in outputs if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if not all(bool(torch.isfinite(t).all()) for t in tensors):
            found.append(name or type(module).__name__)

    return look
