"""THE session: one training run as both doors drive it. `finetune` builds it from a config, `Trainer` from TrainingArguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tunesmith.engine.loop import BatchSource, Evaluate, train_events
from tunesmith.engine.plan import Plan
from tunesmith.errors import ResourceError, TunesmithError
from tunesmith.events import Event
from tunesmith.keep.record import RunRecord
from tunesmith.ranks.roster import RankRoster


@dataclass
class Session:
    """A run: what it will do, its rows, and who keeps it on disk (with identity, journal and the engine's state)."""

    plan: Plan
    batches: BatchSource
    keeper: RunRecord
    """Acts on every event: a RunKeeper saves by the plan and keeps the best; a plain RunRecord leaves that to its owner."""

    def events(self, wants_read_back: Callable[[int], bool], evaluate: Evaluate | None = None) -> Iterator[Event]:
        """Trains to the end of the plan. The keeper has acted on each event before it is yielded."""
        state = self.keeper.state
        for event in train_events(state, self.batches, self.plan, evaluate=evaluate, wants_read_back=wants_read_back):
            self.keeper.on(event)
            yield event


@contextmanager
def ending_well(keeper: RunRecord, roster: RankRoster) -> Iterator[None]:
    """Around a run: its last line in the journal names the error that ended it, and a rank that was lost has a name."""
    run, state = keeper.run, keeper.state
    try:
        yield
    except TunesmithError as error:
        keeper.end(type(error).__name__)
        last = [folder.name for folder in run.checkpoints()][-1:]
        if isinstance(error, ResourceError) and state.phase == "update" and last:
            problem = f"{error.problem}; last checkpoint: {last[0]}"
            raise ResourceError(problem, where=str(run.path), fix=error.fix) from error
        raise
    except RuntimeError as error:
        lost = roster.explain(error)
        if lost is None:
            raise
        keeper.end("WorkerError")
        raise lost from error
    finally:
        keeper.close()
