"""What a Trainer refuses: a model without a head, arguments that do not go together, labels that are no class, and methods of
transformers' loop that a subclass replaces and nothing would call here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tunesmith.errors import ConfigError, DataError
from tunesmith.trainer.upstream import can_return_loss, find_labels, has_length, headless_models, is_arrow_dataset

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

PROVIDED: dict[str, str] = {
    "train": "resume_from_checkpoint takes True or a folder; the checkpoint is verified before it is used",
    "evaluate": "",
    "predict": "rows in the order of the dataset, whatever the sampler",
    "evaluation_loop": "",
    "prediction_step": "may be overridden",
    "training_step": "may be overridden; runs the engine's micro-step",
    "compute_loss": "may be overridden; a mean over the batch is weighted by its items, a loss that reads "
    "num_items_in_batch is taken as a share of the window (or say it with loss_is_scaled_for_ga)",
    "compute_loss_context_manager": "",
    "autocast_smart_context_manager": "",
    "floating_point_ops": "may be overridden",
    "store_flos": "",
    "log": "may be overridden",
    "get_train_dataloader": "may be overridden; batches of a loader of your own are skipped by reading them on resume",
    "get_eval_dataloader": "may be overridden",
    "get_test_dataloader": "may be overridden",
    "get_total_train_batch_size": "",
    "set_initial_training_values": "may be overridden",
    "num_examples": "",
    "create_optimizer": "may be overridden",
    "create_scheduler": "may be overridden",
    "create_optimizer_and_scheduler": "may be overridden",
    "get_optimizer_cls_and_kwargs": "",
    "get_decay_parameter_names": "may be overridden",
    "get_learning_rates": "",
    "get_num_trainable_parameters": "",
    "get_optimizer_group": "",
    "call_model_init": "",
    "hyperparameter_search": "backend optuna",
    "add_callback": "",
    "pop_callback": "",
    "remove_callback": "",
    "save_model": "may be overridden; training_args.json instead of the pickle training_args.bin",
    "save_state": "",
    "save_metrics": "",
    "log_metrics": "",
    "metrics_format": "",
    "create_model_card": "",
    "init_hf_repo": "",
    "push_to_hub": "",
    "is_local_process_zero": "",
    "is_world_process_zero": "",
    "end": "",
}

_LOOP = "the loop is the engine's: use a callback, training_step or compute_loss"
_SAVE = "checkpoints are sealed folders: use a callback's on_save, or save_model"
NOT_CALLED: dict[str, str] = {
    "create_accelerator_and_postprocess": "the device comes from TrainingArguments and the launcher",
    "get_batch_samples": _LOOP,
    "get_cp_size": "there is no context parallelism",
    "get_sp_size": "there is no sequence parallelism",
    "get_tp_size": "there is no tensor parallelism",
    "_inner_training_loop": _LOOP,
    "_run_epoch": _LOOP,
    "_init_training_state": _LOOP,
    "_prepare_for_training": _LOOP,
    "_finalize_training": "use a callback's on_train_end",
    "_maybe_log_save_evaluate": "use a callback that sets control.should_log, should_evaluate or should_save",
    "_get_num_items_in_batch": "override compute_loss",
    "_clip_grad_norm": "set max_grad_norm, or use a callback's on_pre_optimizer_step",
    "_get_grad_norm": "use a callback's on_pre_optimizer_step",
    "_wrap_model": "wrap the model before you give it to the Trainer",
    "_save_optimizer_and_scheduler": _SAVE,
    "_save_rng_state": _SAVE,
    "_save_scaler": _SAVE,
    "_load_from_checkpoint": _SAVE,
    "_load_optimizer_and_scheduler": _SAVE,
    "_load_rng_state": _SAVE,
    "_load_scaler": _SAVE,
    "_issue_warnings_after_load": "a checkpoint whose weights do not fit the model is refused",
    "_update_auto_batch_size": _LOOP,
    "_move_model_to_device": "the device comes from TrainingArguments and the launcher",
    "_prepare_context_parallel_inputs": "there is no context parallelism",
    "_has_mixed_mesh_grads": "there is no tensor parallelism",
    "_mixed_mesh_grad_norm": "there is no tensor parallelism",
    "_sync_replicated_trainable_parameters": "there is no tensor parallelism",
    "_tune_save_checkpoint": "the backend of a search is optuna",
}
"""Methods of transformers' loop that a script may have replaced there; nothing would call them here."""


def check_overrides(kind: type[Any], own: Collection[str] = ()) -> None:
    """Refuses a class or an object with attributes of its `own` that replaces what is never called: silence would be a
    different experiment."""
    found = [name for name in NOT_CALLED if hasattr(kind, name) or name in own]
    problems = tuple(f"{name} is never called here: {NOT_CALLED[name]}" for name in found)
    if problems:
        raise ConfigError("; ".join(problems), where=kind.__name__, problems=problems)


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
    """Checks all labels of an Arrow dataset now; returns the check for those of a batch. None: the loss is not ours."""
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
