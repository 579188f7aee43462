"""Our engine as a contestant: the run that `tunesmith train` would make, stopped and gone on with at will."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from tunesmith.events import Event, SafePoint, StepDone
from tunesmith.finetune.prepare import Prepared
from tunesmith.measure.contest import Turn
from tunesmith.measure.hardware import wait_for
from tunesmith.train.loop import train_events
from tunesmith.train.plan import Plan, epoch_ends_for
from tunesmith.train.schedule import Schedule


def train_ours(prepared: Prepared) -> Callable[[int], Turn]:
    """A function that trains some more steps."""
    events = _events(prepared)

    def train(steps: int) -> Turn:
        rows, tokens, done = 0, 0, 0
        wait_for(prepared.runtime.device)
        began = time.perf_counter()
        for event in events:
            if isinstance(event, StepDone):
                rows, tokens = rows + event.examples, tokens + event.tokens
            elif isinstance(event, SafePoint):
                done += 1
                if done == steps:
                    break
        wait_for(prepared.runtime.device)
        return Turn(time.perf_counter() - began, rows, tokens)

    return train


def _events(prepared: Prepared) -> Iterator[Event]:
    config = prepared.config
    one = [prepared.batches.steps_in_epoch(0)]
    steps, ends = epoch_ends_for(one, max_steps=10**6, num_epochs=1)
    plan = Plan(steps, ends, Schedule("constant", config.learning_rate, 0, steps), seed=config.seed)
    return iter(train_events(prepared.state, prepared.batches, plan))
