"""The training loop, as a generator of events: step after step, evaluations when they are due, a safe point after each step.

Ranks compare their plans before the first step, because different plans would train different models without an error.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Protocol

import torch

from tunesmith.data.batches import Window
from tunesmith.errors import ConfigError, DataError, did_you_mean
from tunesmith.events import (
    EpochStarted,
    Evaluated,
    Event,
    Improved,
    MicroBatchSplit,
    NonFinite,
    Note,
    SafePoint,
    StepDone,
    finite_or_none,
)
from tunesmith.training.distributed import Runtime
from tunesmith.training.schedule import Plan, lr_at
from tunesmith.training.state import TrainState
from tunesmith.training.step import StepResult, find_culprit, train_step


class BatchSource(Protocol):
    """Source of windows, such as `Batches`."""

    def windows(self, epoch: int, skip: int = 0) -> Iterator[Window]:
        """Yield the windows of an epoch, without the first `skip`."""
        ...


class Interrupted(Exception):
    """Raised to abandon an evaluation because the run must stop; a resumed run repeats it."""


Evaluate = Callable[[TrainState], Mapping[str, tuple[dict[str, float | None], int]]]
"""Split name -> (metrics, rows). The first split selects the best model."""


def train_events(
    state: TrainState,
    batches: BatchSource,
    plan: Plan,
    *,
    evaluate: Evaluate | None = None,
    wants_read_back: Callable[[int], bool] = lambda step: False,
) -> Iterator[Event]:
    """Train from `state.step` to the end of the plan. After a `break` the state is complete up to the last event."""
    require_one_plan(state, batches, plan)
    require_same_epochs(batches, plan, state.step)
    state.planned_steps = plan.num_steps - state.step
    pending: list[StepResult] = []
    clock, empty = StepClock(), 0
    if state.evaluation_due and evaluate is not None:  # the run was stopped during it
        yield from _evaluate(state, plan, evaluate)
        yield SafePoint(state.step)
    epoch, skip = plan.epoch_of(state.step)
    while state.step < plan.num_steps and not state.progress.is_exhausted(plan.patience):
        if skip == 0:
            clock.pause()
            yield EpochStarted(epoch, state.step)
            clock.resume()
        step_before = state.step
        for window in batches.windows(epoch, skip):
            rate, norm = lr_at(state.step, plan.schedule), plan.max_grad_norm
            pending.append(train_step(state, window, learning_rate=rate, max_grad_norm=norm, seed=plan.seed))
            step = state.step
            while state.notes:
                yield Note(step, state.notes.pop(0))
            evaluates = evaluate is not None and plan.evaluate.due(step)
            last = step >= plan.num_steps
            due = len(pending) >= plan.read_back_every or evaluates or last or plan.save.due(step)
            if due or wants_read_back(step):
                yield from _read_back(state, plan, pending, clock)
                pending.clear()
            else:
                clock.pause()
            if evaluates and evaluate is not None:
                yield from _evaluate(state, plan, evaluate)
            yield SafePoint(step)
            clock.resume()
            if last or state.progress.is_exhausted(plan.patience):
                break
        empty = _count_empty(empty, batches, plan, state.step, step_before)
        epoch, skip = epoch + 1, 0


def _count_empty(before: int, batches: BatchSource, plan: Plan, step: int, began: int) -> int:
    """Return the number of consecutive epochs without a window. The second raises: a listener may end the run after one."""
    empty = before + 1 if step == began else 0
    if empty == 2:
        raise DataError(
            f"{type(batches).__name__} returned no window in two epochs, at step {step} of {plan.num_steps}",
            fix="Pass batches whose windows(epoch) can be iterated again, or train fewer steps.",
        )
    return empty


class StepClock:
    """Measures the time of steps without the time that the caller spends on events."""

    def __init__(self) -> None:
        self._spent, self._since = 0.0, time.perf_counter()

    def pause(self) -> None:
        """Stop the clock before an event is yielded."""
        self._spent += time.perf_counter() - self._since

    def resume(self) -> None:
        """Start the clock again."""
        self._since = time.perf_counter()

    def take(self) -> float:
        """Return the seconds since the last call, and stop the clock."""
        self.pause()
        spent, self._spent = self._spent, 0.0
        return spent


def _read_back(state: TrainState, plan: Plan, pending: list[StepResult], clock: StepClock) -> Iterator[Event]:
    """Yield the numbers of the steps since the last read, in order. Only here does the host wait for the device.

    The host runs ahead of the device, so the time is divided equally among them.
    """
    read = torch.stack([result.numbers for result in pending]).tolist()
    seconds = clock.take() / len(pending)
    for result, (loss, norm, bad) in zip(pending, read, strict=True):
        if result.split_to is not None:
            yield MicroBatchSplit(result.step, result.split_from or 0, result.split_to)
        yield StepDone(
            step=result.step,
            epoch=plan.fraction(result.step),
            loss=finite_or_none(loss),
            grad_norm=finite_or_none(norm),
            learning_rate=result.learning_rate,
            examples=len(result.window.rows),
            tokens=sum(b.tokens for b in result.window.micro_batches),
            padded_tokens=sum(b.padded_tokens for b in result.window.micro_batches),
            seconds=seconds,
        )
        if bad != 0.0:
            what, tensor = find_culprit(state, result, plan.seed)
            yield NonFinite(result.step, what, tensor, tuple(int(r) for r in result.window.rows))
            state.poisoned.zero_()


def _evaluate(state: TrainState, plan: Plan, evaluate: Evaluate) -> Iterator[Event]:
    """Evaluate every split, then update the best metric and the patience counter from the first.

    An interrupted evaluation yields a safe point to stop at, and starts again if the run was not stopped.
    """
    started = time.perf_counter()
    state.evaluation_due = True
    while state.evaluation_due:
        try:
            results = evaluate(state)
            state.evaluation_due = False
        except Interrupted:
            yield SafePoint(state.step)
    for split, (metrics, rows) in results.items():
        seconds = time.perf_counter() - started
        yield Evaluated(state.step, plan.fraction(state.step), split, metrics, rows, seconds)
    if plan.metric is None or not results:
        return
    first = next(iter(results.values()))[0]
    name = plan.metric.removeprefix("eval_")
    if name not in first:
        known = tuple(first)
        raise ConfigError(
            f"metric_for_best_model {plan.metric!r} is not among {', '.join(known)}", fix=did_you_mean(name, known)
        )
    value = first[name]
    state.progress, improved = state.progress.updated(value, state.step, greater_is_better=plan.greater_is_better)
    if improved and value is not None:
        yield Improved(state.step, name, value)


def require_agreement(runtime: Runtime, facts: Mapping[str, Any]) -> None:
    """Raise a ConfigError on every rank if the ranks have different facts; it names each one."""
    if runtime.world == 1:
        return
    notes = runtime.gather_objects({name: repr(fact) for name, fact in facts.items()})
    wrong = [
        f"{name} is {_short(notes[0].get(name))} on rank 0 and {_short(other.get(name))} on rank {rank}"
        for rank, other in enumerate(notes)
        for name in notes[0].keys() | other.keys()
        if notes[0].get(name) != other.get(name)
    ]
    if wrong:
        raise ConfigError(
            f"the ranks were started with different settings: {'; '.join(sorted(wrong)[:5])}",
            fix="Start every rank with the same command, config and data.",
        )


def require_one_plan(state: TrainState, batches: Any, plan: Plan) -> None:
    """Refuse ranks that would take different steps or see their rows in different orders."""
    if state.runtime.world == 1:
        return
    facts = {field.name: getattr(plan, field.name) for field in fields(plan)}
    facts |= {"step": state.step, "progress": state.progress, "data_seed": getattr(batches, "seed", None)}
    if hasattr(batches, "order"):
        rows = batches.order(plan.epoch_of(state.step)[0]).rows
        facts["row order"] = hashlib.sha256(rows.tobytes()).hexdigest()[:12]
    require_agreement(state.runtime, facts)


def require_same_epochs(batches: Any, plan: Plan, step: int) -> None:
    """Refuse to resume with a plan whose epochs end at other steps than those of the batches: different rows would follow."""
    epoch = plan.epoch_of(step)[0]
    if epoch == 0 or not hasattr(batches, "steps_in_epoch"):
        return
    ended = sum(batches.steps_in_epoch(e) for e in range(epoch))
    if ended != plan.epoch_ends[epoch - 1]:
        raise ConfigError(
            f"epoch {epoch} of the plan ends at step {plan.epoch_ends[epoch - 1]}, that of the batches at step {ended}",
            fix="Make the plan with epoch_ends_for(batches.steps_in_epoch, ...), and resume with the same batch size.",
        )


def _short(text: str | None) -> str:
    text = str(text)
    return text if len(text) <= 60 else f"{text[:57]}..."
