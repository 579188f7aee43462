"""What a Trainer refuses: a model without a head, arguments that do not go together, labels that are no class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tunesmith.errors import ConfigError, DataError
from tunesmith.trainer.upstream import can_return_loss, find_labels, has_length, headless_models, is_arrow_dataset

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer


def require_head(kind: type[Any]) -> None:
    """Refuses a model that computes hidden states only."""
    if kind.__name__ in headless_models and not find_labels(kind) and not can_return_loss(kind):
        raise ConfigError(
            f"The model you have picked ({kind.__name__}) cannot be used as is for training: it only computes hidden states",
            fix="Use one with a head, such as AutoModelForSequenceClassification.",
        )


def refuse_combinations(trainer: Trainer) -> None:
    """Combinations of arguments that cannot work."""
    args = trainer.args
    strategy = getattr(args.eval_strategy, "value", args.eval_strategy)
    if strategy != "no" and trainer.eval_dataset is None:
        raise ConfigError(
            f"You have set `args.eval_strategy` to {strategy} but you didn't pass an `eval_dataset` to `Trainer`",
            fix="Either set `args.eval_strategy` to `no` or pass an `eval_dataset`.",
        )
    if args.save_strategy == "best" and args.metric_for_best_model is None:
        raise ConfigError("`args.metric_for_best_model` must be provided when using 'best' save_strategy")
    if trainer.optimizer_cls_and_kwargs is not None and trainer.optimizer is not None:
        raise RuntimeError("Passing both `optimizers` and `optimizer_cls_and_kwargs` arguments is incompatible.")
    if trainer.model_init is not None and (trainer.optimizer is not None or trainer.lr_scheduler is not None):
        raise RuntimeError(
            "Passing a `model_init` is incompatible with providing the `optimizers` argument. "
            "You should subclass `Trainer` and override the `create_optimizer_and_scheduler` method."
        )
    metrics = trainer.compute_metrics
    if args.batch_eval_metrics and metrics and "compute_result" not in inspect.signature(metrics).parameters:
        raise ConfigError("with `batch_eval_metrics`, compute_metrics must take a boolean `compute_result`")
    if not callable(trainer.data_collator):
        raise TypeError("The `data_collator` should be a simple callable (function, class with `__call__`).")
    if trainer.train_dataset is not None and not has_length(trainer.train_dataset) and args.max_steps <= 0:
        raise ConfigError(
            "The train_dataset does not implement __len__, max_steps has to be specified. "
            "The number of steps needs to be known in advance for the learning rate scheduler."
        )


CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
IGNORED = -100
"""The label that transformers' loss passes over."""
LabelCheck = Callable[[Any, npt.NDArray[np.int64]], None]


def require_rows(dataset: Any) -> None:
    """A DataError for a training set without a row: nothing would be trained."""
    if dataset is not None and has_length(dataset) and len(dataset) == 0:
        raise DataError("the train_dataset has no rows", fix="It needs at least one row.")


def label_check(trainer: Trainer) -> LabelCheck | None:
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
