"""Ranks compare notes before the first step: what differs between them would split the run without a word."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tunesmith.engine.plan import Plan
from tunesmith.engine.state import TrainState
from tunesmith.errors import ConfigError
from tunesmith.ranks.runtime import Runtime


def require_agreement(runtime: Runtime, facts: Mapping[str, Any]) -> None:
    """Returns when every rank holds the same facts; else a ConfigError on every rank, naming each that differs."""
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
            f"the ranks were not started with the same thing: {'; '.join(sorted(wrong)[:5])}",
            fix="Start every rank with the same command, config and data.",
        )


def require_one_plan(state: TrainState, batches: Any, plan: Plan) -> None:
    """Refuses ranks that would take different steps or see their rows in different orders."""
    if state.runtime.world == 1:
        return
    facts = {field.name: getattr(plan, field.name) for field in fields(plan)}
    facts |= {"step": state.step, "progress": state.progress, "data_seed": getattr(batches, "seed", None)}
    if hasattr(batches, "order"):
        rows = batches.order(plan.epoch_of(state.step)[0]).rows
        facts["row order"] = hashlib.sha256(rows.tobytes()).hexdigest()[:12]
    require_agreement(state.runtime, facts)


def require_own_epochs(batches: Any, plan: Plan, step: int) -> None:
    """Refuses to resume with a plan whose epochs end elsewhere than those of the batches: it would be at other rows."""
    epoch = plan.epoch_of(step)[0]
    if epoch == 0 or not hasattr(batches, "steps_in_epoch"):
        return
    ended = sum(batches.steps_in_epoch(e) for e in range(epoch))
    if ended != plan.epoch_ends[epoch - 1]:
        raise ConfigError(
            f"epoch {epoch} of the plan ends at step {plan.epoch_ends[epoch - 1]}, that of the batches at step {ended}",
            fix="Make the plan with epoch_ends_for(batches.steps_in_epoch, ...): with a token budget epochs differ in length.",
        )


def _short(text: str | None) -> str:
    text = str(text)
    return text if len(text) <= 60 else f"{text[:57]}..."
