"""What the speed-ups do in a step. The step calls these in order and knows no speed-up by name.

Speed-ups prove themselves: a few rows pass through the plain step and the fast one. What differs is taken off, and reported.
Nothing is left behind: weights, gradients, buffers, generators and the model's attributes are as before (decisions/0111).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from tunesmith.data.batches import Batch, Padding, Window
from tunesmith.models.families import hook_tables, is_watched, why_not
from tunesmith.speedups.graphs import Body
from tunesmith.speedups.in_force import Strategies
from tunesmith.speedups.packing import collated, tokens_of
from tunesmith.speedups.steady_tables import settled
from tunesmith.training.state import TrainState

if TYPE_CHECKING:
    from tunesmith.speedups.compared import Gradients


def replayed(
    state: TrainState, window: Window, rate: float, factor: float, body: Body, reseed: Callable[[], None]
) -> torch.Tensor | None:
    """The numbers of a step that was captured before and is replayed; None where it runs as it is."""
    if state.graphs is None:
        return None
    if state.rows_limit is not None or state.hooks.inside:
        return None
    numbers = state.graphs.run(window.micro_batches, rate, factor, body, state.fingerprint.of_step())
    if numbers is None:  # nothing of a capture that failed may be left
        state.optimizer.zero_grad(set_to_none=True)
        reseed()
    elif state.hooks.after_update is not None:
        state.hooks.after_update(numbers)
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


ROWS = 4
"""Most rows of a proof."""
MOST_STEPS, SHARE = 2.0, 0.01
"""What it may cost: so many steps, or this share of a run that is shorter."""
ORDER = ("fused_layers", "cls_only_last_layer", "padding_free", "length_buckets", "restrict_vocabulary")
"""In which speed-ups are taken off to find the one that differs: those that reach deepest into the model first."""

Judge = Callable[["Gradients"], "str | None"]


def ready(state: TrainState, window: Window) -> Window:
    """The window as the model takes it now. Speed-ups that were not proved on this model, as it is now, are proved first."""
    state.require_exact_cut()
    strategies = state.strategies
    if strategies is None or not (strategies.parts or strategies.dropped):
        return window
    if state.proved is None or not (strategies.undisturbed or state.proved == state.fingerprint.of_model()):
        first = state.proved is None
        dropped = _unrecognised(strategies)
        dropped |= _disproved(state, window.micro_batches[0], without=set(dropped))
        for name, reason in _over_ranks(state, dropped, first).items():
            _take_off(state, name, reason)
        state.proved = state.fingerprint.of_model()
    if not strategies.dropped & {"padding_free", "length_buckets"}:
        return window
    return replace(window, micro_batches=tuple(strategies.adapted(b) for b in window.micro_batches))


def _unrecognised(strategies: Strategies) -> dict[str, str]:
    """What the model no longer is the model for, and why."""
    reasons = {name: strategies.why_not(name) for name in strategies.parts}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _over_ranks(state: TrainState, dropped: dict[str, str], first: bool) -> dict[str, str]:
    """Ranks decide alike before the first step. Later each decides for itself: gradients are the same either way."""
    if not first or state.runtime.world == 1:
        return dropped
    found: dict[str, str] = {}
    for rank in state.runtime.gather_objects(dropped):
        found = {**rank, **found}
    return found


def _take_off(state: TrainState, name: str, reason: str) -> None:
    assert state.strategies is not None
    if name == "restrict_vocabulary" and state.cut is not None:
        state.stop_cutting(reason)
    elif name in state.strategies.parts:
        state.strategies.drop(name)
        state.notes.append(f"{name} is off: {reason}")


def _disproved(state: TrainState, batch: Batch, *, without: set[str]) -> dict[str, str]:
    """The speed-ups that compute something else than the plain step, and what differs."""
    strategies = state.strategies
    assert strategies is not None
    left = [name for name in ORDER if name in strategies.parts and name not in without]
    if "length_buckets" in left and not _widened_rows(strategies, batch):
        found = _disproved(state, batch, without={*without, "length_buckets"})
        return found | {"length_buckets": "no row of the first batch would be padded further by it"}
    # Hooks of the user's are not called for a proof. While they listen, only what needs no knowledge of a model is on.
    if not left or is_watched(hook_tables(state.model.modules())):
        return {}
    try:
        with strategies.without(without):
            return _search(state, batch, left, without)
    except torch.OutOfMemoryError:
        state.notes.append("the speed-ups were not compared with the plain step: it needs more memory than they do")
        return {}


def _search(state: TrainState, batch: Batch, left: list[str], without: set[str]) -> dict[str, str]:
    from tunesmith.speedups.compared import measure

    strategies = state.strategies
    assert strategies is not None
    judge, rows = _plain_steps(state, batch, left)

    def fails(off: set[str]) -> str | None:
        shaped = (strategies.parts.keys() & {"padding_free", "length_buckets"}) - off - without
        fast = rows(strategies.train_collate if shaped else strategies.padding)
        with strategies.without(off - without):
            try:
                return judge(measure(state, fast))
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError) as error:
                return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else 'no message'}"

    wrong = fails(set())
    if wrong is None:
        return {}
    off: list[str] = []
    for name in left:
        off.append(name)
        if fails(set(off)) is None:
            break
    for name in off[:-1]:  # those taken off before the one that was wrong
        if fails(set(off) - {name}) is None:
            off.remove(name)
    return dict.fromkeys(off, f"its step is not the plain one ({wrong})")


def _plain_steps(state: TrainState, batch: Batch, left: list[str]) -> tuple[Judge, Callable[..., Batch]]:
    """What judges a fast step by plain ones, and what makes its batch."""
    from tunesmith.speedups.compared import difference, half_difference, measure

    strategies = state.strategies
    assert strategies is not None
    half = state.runtime.precision != "no"
    chosen = _rows_for(state, batch, passes=3 if half else 2)
    lengths = [len(ids) for ids in tokens_of(batch)["input_ids"]]
    known = why_not(state.model) is None and len({lengths[i] for i in chosen}) == 1
    longest = max(1, lengths[chosen[0]] // 2) if known else None  # rows of one length would leave nothing to pad

    def rows(collate: object) -> Batch:
        return state.runtime.move(collated(batch, collate, chosen, longest))  # type: ignore[arg-type]

    plain = rows(strategies.padding)
    with strategies.without(left):
        try:
            exact = measure(state, plain, half=False)
        except Exception:
            if len(chosen) == len(batch):
                raise  # the user's own error: the step would fail in the same way
            chosen, longest = list(range(len(batch))), None
            plain = rows(strategies.padding)
            exact = measure(state, plain, half=False)
        if not half:
            return (lambda fast: difference(exact, fast)), rows
        rounded = measure(state, plain)
    return (lambda fast: half_difference(exact, rounded, fast)), rows


def _widened_rows(strategies: Strategies, batch: Batch) -> list[int]:
    """Rows of which a batch in a length bucket would be wider than the longest: others would prove nothing about it."""
    lengths = [len(ids) for ids in tokens_of(batch)["input_ids"]]
    bucket = strategies.train_collate
    assert isinstance(bucket, Padding)
    longest = max((n for n in lengths if bucket.width(n) > n), default=0)
    return [i for i, n in enumerate(lengths) if n <= longest]


def _rows_for(state: TrainState, batch: Batch, *, passes: int) -> list[int]:
    """Rows of a micro-batch that the proof can afford: the longest, the shortest, and some between; two at least."""
    strategies = state.strategies
    assert strategies is not None
    bucketed = "length_buckets" in strategies.parts and _widened_rows(strategies, batch)
    rows = np.array(bucketed or range(len(batch)))
    budget = min(MOST_STEPS, SHARE * state.planned_steps) * len(batch) / passes
    count = min(len(rows), max(2, min(ROWS, int(budget))))
    lengths = np.array([len(ids) for ids in tokens_of(batch)["input_ids"]])[rows]
    spread = np.unique(np.linspace(0, len(rows) - 1, count).round().astype(int))
    return sorted(int(i) for i in rows[np.argsort(-lengths, kind="stable")[spread]])
