"""Where float32 is the better choice on a GPU: steps that a host launches kernel by kernel, and models that fail in bf16."""

from __future__ import annotations

import numpy as np
from torch import nn

from tunesmith.data.batches import Batch, make_batch
from tunesmith.data.tokens import TokenRows
from tunesmith.models.load import compute_row
from tunesmith.training.distributed import Runtime
from tunesmith.training.state import TrainState

LARGEST = 3e9
"""Tokens times the weights of a matrix, on average. On an H200 BERT-base's step (1.2 million weights a matrix) takes as long in
float32 as under autocast at 2,500 tokens; float32 steps of BART and XLNet are the quicker ones at 2e9 (docs/research/performance.md)."""


def is_launch_bound(model: nn.Module, tokens: float) -> bool:
    """Whether a float32 step of so many tokens on a GPU takes the time of its launches, not that of its products.

    By arithmetic alone, so that the same run is decided in the same way wherever it starts again.
    """
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    sizes = [p.numel() for p in model.parameters() if p.ndim > 1 and id(p) not in tables]
    return bool(sizes) and tokens * sum(sizes) / len(sizes) < LARGEST


def why_float32(state: TrainState, rows: TokenRows, batch_tokens: float) -> str | None:
    """Why steps of so many tokens are quicker in float32 than in bf16 on this GPU; None where they are not, or on a CPU.

    Autocast launches a cast for each matrix. Fused layers have none, and a captured step does not pay for launches.
    """
    strategies, runtime = state.strategies, state.runtime
    assert strategies is not None
    if runtime.device.type != "cuda" or runtime.precision != "bf16" or "padding_free" in strategies.parts:
        return None
    if not is_launch_bound(state.model, batch_tokens):
        return None
    why = "quicker than bf16 for steps launched one kernel at a time"
    if state.graphs is None:
        return why
    from tunesmith.speedups.compared import nothing_left_behind

    def passes(batch: Batch) -> None:
        with runtime.autocast():
            loss, _ = state.objective.sum(state.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]

    some = make_batch(rows, np.arange(min(2, len(rows))), strategies.padding)
    with nothing_left_behind(state):
        failure = state.graphs.rehearse(runtime.move(some), passes)
    return None if failure is None else f"{why} ({failure})"


def why_not_half(model: nn.Module, runtime: Runtime) -> str | None:
    """Why this model cannot compute in half precision: transformers' DeBERTa fills masks with a number of float32."""
    if runtime.precision == "no":
        return None
    try:
        with runtime.autocast():
            compute_row(model)
    except RuntimeError as error:
        return f"as this model fails in {runtime.precision} ({str(error).splitlines()[0]})"
    return None
