"""The journal of a Trainer's run: every step and evaluation, for curves and diagnosis."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tunesmith.events import Evaluated, Resumed, RunStarted
from tunesmith.keep.record import RunRecord
from tunesmith.run.journal import LOST_JOURNAL, require_journal
from tunesmith.run.layout import RunDir, checkpoint_step
from tunesmith.run.ledger import start_ledger
from tunesmith.run.reader import read_journal
from tunesmith.run.sealed import require_sealed, sweep
from tunesmith.trainer.upstream import has_length

if TYPE_CHECKING:
    from tunesmith.trainer.training import TrainerRun

log = logging.getLogger(__name__)
_SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch")


def require_room(run: RunDir, num_steps: int, *, saves: bool) -> None:
    """A ResourceError when a person's journal, or a checkpoint that we did not write, stands where this run would write."""
    require_journal(run.journal_file)
    for folder in run.checkpoints():
        if saves and checkpoint_step(folder) <= num_steps:
            require_sealed(folder)


def open_journal(run: TrainerRun, record: RunRecord, notes: Sequence[str]) -> set[tuple[int, str]]:
    """Opens the journal of a run; returns the evaluations (step, split) that are in it and may come again."""
    place, step = run.place, run.trainer.state.global_step
    sweep(place.path)
    start_ledger(place.path, place.remade_files)
    if run.folder is None:
        record.open(started_event(run))
        return set()
    if not place.journal_file.exists():
        log.warning("%s: %s", place.path, LOST_JOURNAL)
    record.open(Resumed(step, run.folder.name, (), time.time()), notes)
    # The evaluation at the end of an epoch may be in the journal already while the checkpoint is from before it.
    past = read_journal(place.journal_file) if run.progress.epoch_open else []
    return {(e.step, e.split) for e in past if isinstance(e, Evaluated)}


def started_event(run: TrainerRun) -> RunStarted:
    """The first line of a journal."""
    trainer, h = run.trainer, run.horizon
    args, dataset = trainer.args, trainer.train_dataset
    rows = len(dataset) if has_length(dataset) else 0
    epochs = min(float(args.num_train_epochs), float(h.num_epochs)) if args.max_steps <= 0 else 0.0
    epochs = epochs or h.num_steps / h.steps_per_epoch
    return RunStarted(run.run_id, 0, h.num_steps, h.steps_per_epoch, epochs, rows, time.time())


def evaluated_event(state: Any, prefix: str, output: Any, seconds: float) -> Evaluated:
    """An evaluation under the names of our curves."""
    split = "validation" if prefix == "eval" else prefix.removeprefix("eval_")
    metrics = {k.removeprefix(f"{prefix}_"): v for k, v in output.metrics.items() if isinstance(v, (int, float))}
    kept: dict[str, float | None] = {k: float(v) for k, v in metrics.items() if k not in _SPEED}
    return Evaluated(state.global_step, float(state.epoch or 0.0), split, kept, output.num_samples, seconds)
