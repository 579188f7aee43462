"""The work of the speedups inside a step. The step calls these functions in order and knows no speedup by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from tunesmith.data.batches import Window
from tunesmith.speedups.cuda_graphs import Body
from tunesmith.speedups.determinism import settled
from tunesmith.training.state import TrainState


def replayed(
    state: TrainState, window: Window, rate: float, factor: float, body: Body, reseed: Callable[[], None]
) -> torch.Tensor | None:
    """The numbers of a step that was captured before and is replayed; None where it runs as it is."""
    if state.graphs is None or state.rows_limit is not None:
        return None
    numbers = state.graphs.run(window.micro_batches, rate, factor, body, state.fingerprint.of_step())
    if numbers is None:  # nothing of a capture that failed may be left
        state.optimizer.zero_grad(set_to_none=True)
        reseed()
    return numbers


def around_passes(state: TrainState) -> AbstractContextManager[None]:
    """Around forward and backward pass of a micro-batch."""
    return settled() if state.runtime.device.type == "cuda" else nullcontext()


def decay_unused(state: TrainState, rate: float | torch.Tensor, skip: torch.Tensor) -> None:
    """Weight decay of the embedding rows that are not trained, as the update has it for the others."""
    if state.cut is not None:
        state.cut.decay(1.0 - rate * state.cut_decay * (1.0 - skip.double()))


def free_memory(state: TrainState) -> bool:
    """Gives back memory that makes steps faster; whether there was any."""
    return state.graphs is not None and state.graphs.let_go()
