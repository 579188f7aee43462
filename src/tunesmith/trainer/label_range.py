"""Labels that the model has no class for: an error that names the row, before a step is taken with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tunesmith.errors import DataError
from tunesmith.trainer.upstream import has_length, is_arrow_dataset

CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
IGNORED = -100
"""The label that transformers' loss passes over."""
LabelCheck = Callable[[Any, npt.NDArray[np.int64]], None]


def require_rows(dataset: Any) -> None:
    """A DataError for a training set without a row: nothing would be trained."""
    if dataset is not None and has_length(dataset) and len(dataset) == 0:
        raise DataError("the train_dataset has no rows", fix="It needs at least one row.")


def label_check(trainer: Any) -> LabelCheck | None:
    """Looks at all labels of an Arrow dataset now; gives what looks at those of a batch. None: the loss is not ours."""
    config = getattr(trainer.model, "config", None)
    classes = int(getattr(config, "num_labels", 0) or 0)
    known = type(trainer.model).__name__.removeprefix("FSDP").endswith(CLASSIFIERS)
    own = trainer.overrides("compute_loss") or trainer.compute_loss_func is not None
    if (
        not known
        or own
        or classes < 2
        or getattr(config, "problem_type", None) not in (None, "single_label_classification")
    ):
        return None
    dataset = trainer.train_dataset
    if is_arrow_dataset(dataset):
        name = next((n for n in ("labels", "label", "label_ids") if n in dataset.column_names), None)
        kind = None if name is None else str(dataset.data.table.schema.field(name).type)
        if name is not None and str(kind).startswith(("int", "uint")) and not _is_transformed(dataset):
            cells = dataset.with_format("numpy")[name][:]
            _require(np.asarray(cells), np.arange(len(cells)), classes, name)

    def check(features: Any, rows: npt.NDArray[np.int64]) -> None:
        found = features.get("labels") if isinstance(features, Mapping) else None
        if isinstance(found, torch.Tensor) and found.ndim == 1 and found.dtype == torch.int64 and not found.is_cuda:
            _require(found.numpy(), rows, classes, "labels")

    return check


def _is_transformed(dataset: Any) -> bool:
    return bool(dataset.format["type"] == "custom")


def _require(labels: npt.NDArray[Any], rows: npt.NDArray[np.int64], classes: int, name: str) -> None:
    wrong = np.flatnonzero(((labels < 0) | (labels >= classes)) & (labels != IGNORED))
    if len(wrong):
        row, label = int(rows[wrong[0]]) if len(rows) == len(labels) else int(wrong[0]), int(labels[wrong[0]])
        raise DataError(
            f"the label is {label}, but the model has {classes} classes (0 to {classes - 1}); "
            f"{len(wrong)} such label{'s' if len(wrong) > 1 else ''}",
            where=f"train_dataset, row {row}, {name}",
            fix="Correct the label, or give the model num_labels for all of them.",
        )
