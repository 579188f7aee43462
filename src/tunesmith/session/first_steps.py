"""One line about the whole run as soon as its first steps are measured: time, memory, disk."""

from __future__ import annotations

import resource
from collections.abc import Callable

from tunesmith.engine.plan import Plan
from tunesmith.events import Event, StepDone
from tunesmith.session.prepare import Prepared
from tunesmith.session.watch import Say

WARM_STEPS, TIMED_STEPS = 3, 10
FEWEST_STEPS = 40
"""A shorter run is over before its forecast is worth a line."""


def announce_plan(prepared: Prepared, plan: Plan, say: Say) -> Callable[[Event], None]:
    """A listener that says once how long the steps will take, by the tokens of the first ones."""
    timed: list[StepDone] = []

    def on(event: Event) -> None:
        if not isinstance(event, StepDone) or plan.num_steps < FEWEST_STEPS or len(timed) >= TIMED_STEPS:
            return
        if event.step > max(WARM_STEPS, plan.read_back_every):  # the steps of one read share its time
            timed.append(event)
        if len(timed) == TIMED_STEPS:
            say(_sentence(prepared, plan, timed))

    return on


def _sentence(prepared: Prepared, plan: Plan, timed: list[StepDone]) -> str:
    batches = prepared.batches
    tokens = float(batches.rows.lengths.sum()) / batches.steps_in_epoch(0) / batches.world
    seconds = sum(s.seconds for s in timed) / max(sum(s.tokens for s in timed), 1) * tokens * plan.num_steps
    took = (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.1f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
    weights = sum(p.numel() * p.element_size() for p in prepared.state.model.parameters())
    disk = weights * (3 + 1 + 1)  # a checkpoint has the weights and two moments; best/ and model/ have the weights
    return (
        f"Plan: {plan.num_steps:,} steps take about {took}, {peak_bytes(prepared) / 1e6:,.0f} MB of memory so far, "
        f"about {disk / 1e6:,.0f} MB on disk."
    )


def peak_bytes(prepared: Prepared) -> int:
    """The most memory held so far: of the device where there is one, else of this process."""
    if prepared.runtime.device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
