"""Names what was not finite: repeats the step's forward and backward pass and looks at every tensor."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from tunesmith.training.state import TrainState, seed_step
from tunesmith.training.step import StepResult


def find_culprit(state: TrainState, result: StepResult, seed: int) -> tuple[str, str]:
    """(what, name) of the first bad tensor: a weight, an output of a module, the loss, or a gradient."""
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
        return "loss", "no labelled row in the batch"
    # Not exchanged between ranks: they may come here at different moments. The rank that saw it names it.
    return (
        "gradient",
        "not seen again when repeated" if state.runtime.world == 1 else "of another rank (its output names it)",
    )


def _watch(name: str, found: list[str]) -> Any:
    def look(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, (tuple, list)) else (output,)
        for tensor in tensors:
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.is_floating_point()
                and not bool(torch.isfinite(tensor).all())
            ):
                found.append(name or type(module).__name__)
                return

    return look
