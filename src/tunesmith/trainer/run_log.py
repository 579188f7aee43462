"""The event log of a Trainer's run: every step, evaluation and checkpoint, for the curves, the diagnosis and the report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.events import Evaluated, Event, Note, Resumed, RunEnded, RunStarted, StepDone
from tunesmith.runs.event_log import Journal, open_journal, read_journal
from tunesmith.runs.folder import RunDir

if TYPE_CHECKING:
    from tunesmith.labels import Task

_SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch")


@dataclass
class WaitingStep:
    """A step whose loss and gradient norm may still be on the GPU. `rows` returns the numbers of its examples."""

    loss: Any
    grad_norm: Any
    event: StepDone
    rows: Callable[[], list[int]]
    time: float = field(default_factory=time.perf_counter)


class RunLog:
    """Writes journal.jsonl. Only the main process has one."""

    def __init__(self, run: RunDir, event: RunStarted | Resumed, notes: tuple[str, ...] = ()) -> None:
        journal, lost = open_journal(run.journal_file, event)
        past = read_journal(run.journal_file)
        self._known = {(e.step, e.split) for e in past if isinstance(e, Evaluated)}
        """Evaluations before a resume, which may be repeated."""
        self._journal: Journal | None = journal
        self._step, self._time = event.step, time.perf_counter()
        self.write(event)
        for text in (*lost, *notes):
            self.write(Note(event.step, text))

    def write(self, event: Event) -> None:
        """Append an event."""
        if self._journal is not None:
            self._journal.append(event)

    def step(self, event: StepDone, now: float) -> None:
        """Append an optimizer step that ended now, once, with the time since the one before."""
        if event.step <= self._step:
            return
        self.write(
            replace(event, loss=_finite(event.loss), grad_norm=_finite(event.grad_norm), seconds=now - self._time)
        )
        self._step, self._time = event.step, now

    def evaluated(self, trainer: Any, prefix: str, output: Any, seconds: float) -> None:
        """Append an evaluation, with the loss and prediction of each row if the task is known."""
        state, split = trainer.state, "validation" if prefix == "eval" else prefix.removeprefix("eval_")
        if (state.global_step, split) in self._known:
            return
        metrics = {k.removeprefix(f"{prefix}_"): v for k, v in output.metrics.items() if isinstance(v, (int, float))}
        kept = {k: _finite(float(v)) for k, v in metrics.items() if k not in _SPEED}
        rows = _rows_of_evaluation(trainer, split, output)
        if rows is not None:
            self.write(rows)
        self.write(Evaluated(state.global_step, float(state.epoch or 0.0), split, kept, output.num_samples, seconds))
        self._time = time.perf_counter()

    def sync(self) -> None:
        """Sync to disk, before a checkpoint is published."""
        if self._journal is not None:
            self._journal.sync()

    def end(self, reason: str) -> None:
        """Append the end of the run and close the log."""
        self.write(RunEnded(self._step, reason, time.time()))
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _rows_of_evaluation(trainer: Any, split: str, output: Any) -> Event | None:
    """Return the event with each row's evidence; None if the outputs are of a different kind."""
    from tunesmith.events import RowsEvaluated
    from tunesmith.metrics.evidence import BestConstant, encode_rows, infer_task, keep_rows, rows_to_keep

    logits, labels = output.predictions, output.label_ids
    if not isinstance(logits, np.ndarray) or not isinstance(labels, np.ndarray):
        return None
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
    """Return the label column of the training set, or the evaluated labels if it has none of that kind."""
    from tunesmith.labels import Task
    from tunesmith.metrics.table import to_numpy

    columns = getattr(trainer.train_dataset, "column_names", None) or ()
    name = next((n for n in (*(trainer.label_names or ()), "labels", "label") if n in columns), None)
    try:
        found = to_numpy(trainer.train_dataset[name][:]) if name is not None else np.zeros(0)
    except (TypeError, ValueError, KeyError):
        return otherwise
    fits = found.ndim == (2 if task is Task.MULTILABEL else 1) and len(found)
    if task in (Task.BINARY, Task.MULTICLASS):
        fits = fits and found.dtype.kind in "iu" and found.max() < width
    return found if fits else otherwise
