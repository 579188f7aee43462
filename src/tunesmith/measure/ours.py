"""Our engine as a contestant: the run that `tunesmith train` would make, stopped and gone on with at will."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tunesmith.events import Event, SafePoint, StepDone
from tunesmith.measure.contest import Turn
from tunesmith.measure.hardware import wait_for
from tunesmith.pipeline.prepare import Prepared
from tunesmith.training.loop import train_events
from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for

SHAPES_FIRST = 64
"""Steps in which most shapes were met; they count as start-up, as the compiling of others does."""


def train_ours(prepared: Prepared) -> Callable[[int], Turn]:
    """A function that trains some more steps. On a GPU the first call takes more before: shapes are captured as they come."""
    events = _events(prepared)
    seen = Counted()
    ahead = SHAPES_FIRST if prepared.runtime.device.type == "cuda" else 0

    def train(steps: int) -> Turn:
        nonlocal ahead
        if ahead:
            first, ahead = ahead, 0
            train(first)
        here, done = Counted(), 0
        wait_for(prepared.runtime.device)
        began = time.perf_counter()
        for event in events:
            if isinstance(event, StepDone):
                here.add(event)
                seen.add(event)
            elif isinstance(event, SafePoint):
                done += 1
                if done == steps:
                    break
        wait_for(prepared.runtime.device)
        return _turn(time.perf_counter() - began, steps, here, seen, prepared)

    return train


@dataclass
class Counted:
    """Steps that told of themselves, with their rows and tokens."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0

    def add(self, event: StepDone) -> None:
        """One step more."""
        self.steps, self.rows, self.tokens = self.steps + 1, self.rows + event.examples, self.tokens + event.tokens


def _turn(seconds: float, steps: int, here: Counted, seen: Counted, prepared: Prepared) -> Turn:
    """On a GPU steps tell of themselves some at a time, later: a turn then counts as so many average steps."""
    if here.steps == steps:
        return Turn(seconds, here.rows, here.tokens)
    if seen.steps:
        return Turn(seconds, round(steps * seen.rows / seen.steps), round(steps * seen.tokens / seen.steps))
    rows = steps * prepared.batches.rows_per_step
    return Turn(seconds, rows, round(rows * float(prepared.rows("train").lengths.mean())))


def _events(prepared: Prepared) -> Iterator[Event]:
    config = prepared.config
    one = [prepared.batches.steps_in_epoch(0)]
    steps, ends = epoch_ends_for(one, max_steps=10**6, num_epochs=1)
    schedule = Schedule("constant", config.decided.learning_rate, 0, steps)
    every = 16 if prepared.runtime.device.type == "cuda" else 1  # as `tunesmith train` reads its numbers back
    plan = Plan(steps, ends, schedule, seed=config.seed, max_grad_norm=config.max_grad_norm, read_back_every=every)
    return iter(train_events(prepared.state, prepared.batches, plan))
