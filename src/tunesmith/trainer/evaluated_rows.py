"""The rows of a Trainer's evaluation as evidence for the diagnosis, where its arrays are one output and one label a row."""

from __future__ import annotations

from typing import Any

import numpy as np

from tunesmith.events import RowsEvaluated
from tunesmith.labels import Task
from tunesmith.metrics.row_evidence import BestConstant, encode_rows, infer_task, keep_rows, rows_to_keep
from tunesmith.metrics.rows import to_numpy


def rows_of_evaluation(trainer: Any, split: str, output: Any) -> RowsEvaluated | None:
    """The event of one evaluation; None where the outputs are of another kind, or were not kept."""
    logits, labels = output.predictions, output.label_ids
    if not isinstance(logits, np.ndarray) or not isinstance(labels, np.ndarray):
        return None
    task = infer_task(logits, labels)
    if task is None:
        return None
    width = int(logits.shape[1]) if logits.ndim == 2 else 1
    constant = BestConstant.of(task, _training_labels(trainer, task, width, labels), width)
    rows = keep_rows(constant, logits, labels, rows_to_keep(_planned_evaluations(trainer)))
    return None if rows is None else RowsEvaluated(trainer.state.global_step, split, encode_rows(rows))


def _training_labels(trainer: Any, task: Task, width: int, otherwise: Any) -> Any:
    """The label column of the training set, or the evaluated labels where it has none of that kind."""
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


def _planned_evaluations(trainer: Any) -> int:
    every = trainer.state.eval_steps
    return int(trainer.state.max_steps // every) if every and every >= 1 else int(trainer.state.num_train_epochs or 1)
