"""Listeners of a Trainer's run: transformers' callbacks around the engine's events, and the journal with the rows of each
evaluation, for curves and diagnosis.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import TrainerCallback, TrainerState
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState
from transformers.trainer_utils import has_length, speed_metrics

from tunesmith.events import Evaluated, Resumed, RowsEvaluated, RunStarted
from tunesmith.keep.record import RunRecord
from tunesmith.run.journal import LOST_JOURNAL, read_journal, require_journal
from tunesmith.run.layout import RunDir, checkpoint_step
from tunesmith.run.ownership import start_ledger
from tunesmith.run.sealed import require_sealed, sweep
from tunesmith.trainer.arguments import trainer_log

if TYPE_CHECKING:
    from tunesmith.labels import Task
    from tunesmith.trainer.facade import Trainer
    from tunesmith.trainer.training import TrainerRun

log = logging.getLogger(__name__)


def make_handler(trainer: Trainer, callbacks: list[Any] | None) -> Any:
    """Default flow, trackers, the user's own: transformers' order."""
    trackers = get_reporting_integration_callbacks(trainer.args.report_to)
    given = [DefaultFlowCallback, *trackers, *(callbacks or [])]
    return CallbackHandler(given, trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler)


def fresh_state(trainer: Trainer) -> Any:
    """An empty TrainerState that knows the stateful callbacks."""
    return TrainerState(
        is_local_process_zero=trainer.is_local_process_zero(),
        is_world_process_zero=trainer.is_world_process_zero(),
        stateful_callbacks=_stateful(trainer),
    )


def tell(trainer: Trainer, event: str, **extra: Any) -> None:
    """Calls one event of all callbacks and keeps the control they return."""
    call = getattr(trainer.callback_handler, event)
    trainer.control = call(trainer.args, trainer.state, trainer.control, **extra)


def listens(trainer: Trainer, event: str) -> bool:
    """Whether any callback does something at this event."""
    default = getattr(TrainerCallback, event)
    return any(getattr(type(c), event, default) is not default for c in trainer.callback_handler.callbacks)


def _stateful(trainer: Trainer) -> list[Any]:
    return [c for c in [*trainer.callback_handler.callbacks, trainer.control] if isinstance(c, ExportableState)]


def export_callback_states(trainer: Trainer) -> None:
    """Puts the state of every stateful callback into `state.stateful_callbacks`."""
    found: dict[str, list[Any]] = defaultdict(list)
    for callback in _stateful(trainer):
        found[type(callback).__name__].append(callback.state())
    trainer.state.stateful_callbacks = {name: states if states[1:] else states[0] for name, states in found.items()}


def load_callback_states(trainer: Trainer) -> None:
    """Restores counters of stateful callbacks; with restore_callback_states_from_checkpoint, their arguments too."""
    whole = trainer.args.restore_callback_states_from_checkpoint
    for name, stored in trainer.state.stateful_callbacks.items():
        mine = [c for c in [*trainer.callback_handler.callbacks, trainer.control] if type(c).__name__ == name]
        if not mine:
            trainer_log.warning(f"The checkpoint holds the state of a callback that this run does not have: {name}")
        for callback, data in zip(mine, stored if isinstance(stored, list) else [stored], strict=False):
            if callback is trainer.control and not whole:
                continue
            values = {**(data.get("args", {}) if whole else {}), **data.get("attributes", {})}
            for key, value in values.items():
                setattr(callback, key, value)


def add_log_line(trainer: Trainer, logs: dict[str, float], start_time: float | None = None) -> None:
    """Adds a line to `state.log_history` and calls the callbacks; override to do more."""
    state = trainer.state
    if state.epoch is not None:
        logs["epoch"] = state.epoch
    if trainer.args.include_num_input_tokens_seen != "no":
        logs["num_input_tokens_seen"] = state.num_input_tokens_seen
        if start_time is not None:
            tokens = state.num_input_tokens_seen - trainer._initial_num_input_tokens_seen
            logs.update(speed_metrics("train", start_time, num_tokens=tokens))
    state.log_history.append({**logs, "step": state.global_step})
    tell(trainer, "on_log", logs=logs)


_SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch")


def require_room(run: RunDir, num_steps: int, *, saves: bool) -> None:
    """A ResourceError when a journal of the user, or a checkpoint that we did not write, is where this run would write."""
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


def journal_evaluation(run: TrainerRun, prefix: str, output: Any, seconds: float) -> None:
    """Writes an evaluation during training to the journal under the names of our curves, unless it was there before a resume."""
    state, split = run.trainer.state, "validation" if prefix == "eval" else prefix.removeprefix("eval_")
    if run.record is None or (state.global_step, split) in run.journalled:
        return
    metrics = {k.removeprefix(f"{prefix}_"): v for k, v in output.metrics.items() if isinstance(v, (int, float))}
    kept: dict[str, float | None] = {k: float(v) for k, v in metrics.items() if k not in _SPEED}
    rows = _rows_of_evaluation(run.trainer, split, output)
    if rows is not None:
        run.record.on(rows)
    epoch = float(state.epoch or 0.0)
    run.record.on(Evaluated(state.global_step, epoch, split, kept, output.num_samples, seconds))


def _rows_of_evaluation(trainer: Any, split: str, output: Any) -> RowsEvaluated | None:
    """The event of one evaluation; None where the outputs are of another kind, or were not kept."""
    logits, labels = output.predictions, output.label_ids
    if not isinstance(logits, np.ndarray) or not isinstance(labels, np.ndarray):
        return None
    from tunesmith.metrics.row_evidence import BestConstant, encode_rows, infer_task, keep_rows, rows_to_keep

    task = infer_task(logits, labels)
    if task is None:
        return None
    state, width = trainer.state, int(logits.shape[1]) if logits.ndim == 2 else 1
    constant = BestConstant.of(task, _training_labels(trainer, task, width, labels), width)
    by_steps = state.eval_steps and state.eval_steps >= 1
    planned = int(state.max_steps // state.eval_steps) if by_steps else int(state.num_train_epochs or 1)
    rows = keep_rows(constant, logits, labels, rows_to_keep(planned))
    return None if rows is None else RowsEvaluated(state.global_step, split, encode_rows(rows))


def _training_labels(trainer: Any, task: Task, width: int, otherwise: Any) -> Any:
    """The label column of the training set, or the evaluated labels where it has none of that kind."""
    from tunesmith.labels import Task
    from tunesmith.metrics.rows import to_numpy

    dataset = trainer.train_dataset
    for name in (*(trainer.label_names or ()), "labels", "label"):
        if name not in (getattr(dataset, "column_names", None) or ()):
            continue
        try:
            found = to_numpy(dataset[name][:])
        except (TypeError, ValueError, KeyError):
            return otherwise
        fits = found.ndim == (2 if task is Task.MULTILABEL else 1) and len(found)
        if task in (Task.BINARY, Task.MULTICLASS):
            fits = fits and found.dtype.kind in "iu" and found.max() < width
        return found if fits else otherwise
    return otherwise
