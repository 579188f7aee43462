"""What a Trainer refuses: fields of `TrainingArguments` that it does not honour, methods of transformers' loop that a subclass
replaces and nothing would call here, a model without a head, arguments that do not go together, labels out of range.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.trainer_utils import has_length
from transformers.utils import can_return_loss, find_labels

from tunesmith.errors import ConfigError, DataError
from tunesmith.trainer.content import is_arrow_dataset

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer


def _unset(value: Any) -> bool:
    return not value


_NO_BIG_MODELS = (
    "It shards models larger than one device; encoders with a classification head fit on one. Leave it out."
)
_NO_LIGER = "Its kernels are for decoder language models. Leave it out."
LIMITED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "train_sampling_strategy": (
        lambda value: value in ("random", "sequential", "group_by_length"),
        "Use 'group_by_length'.",
    ),
    "average_tokens_across_devices": (
        bool,
        "Leave it True: the loss is divided by the items of all devices, or two ranks would not equal one.",
    ),
    "save_on_each_node": (_unset, "Leave it out, and copy the folder to the other nodes."),
    "debug": (_unset, "Leave it out: a value that is not finite stops the run and is named."),
    "optim_target_modules": (_unset, "It serves GaLore and APOLLO; use optim='adamw_torch_fused'."),
    "use_liger_kernel": (_unset, _NO_LIGER),
    "liger_kernel_config": (_unset, _NO_LIGER),
    "parallelism_config": (_unset, _NO_BIG_MODELS),
    "deepspeed": (_unset, f"{_NO_BIG_MODELS} For several devices use torchrun or accelerate launch."),
    "fsdp": (_unset, _NO_BIG_MODELS),
}
"""Fields of `TrainingArguments` of which some values work: (which, what to use instead of the others). All other fields are
honoured: docs/reference/trainer_compatibility.md has a line for each."""


def refused(args: Any) -> list[str]:
    """One sentence for each field of `args` that is set to something this Trainer does not do."""
    problems = []
    for name, (allowed, instead) in LIMITED.items():
        value = getattr(args, name, None)
        if not allowed(value):
            problems.append(f"{name}={value!r} is not supported. {instead}")
    return problems


def check_arguments(args: Any) -> None:
    """Refuses every field that is set to something this Trainer does not do: all of them at once."""
    problems = refused(args)
    if problems:
        raise ConfigError("; ".join(problems), where="TrainingArguments", problems=tuple(problems))


_LOOP = """
    get_batch_samples _inner_training_loop _run_epoch _init_training_state _prepare_for_training _update_auto_batch_size
"""
_SAVES = """
    _save_optimizer_and_scheduler _save_rng_state _save_scaler _load_from_checkpoint _load_optimizer_and_scheduler
    _load_rng_state _load_scaler
"""
_TENSORS = "get_tp_size _has_mixed_mesh_grads _mixed_mesh_grad_norm _sync_replicated_trainable_parameters"
NOT_CALLED: dict[str, str] = {
    **dict.fromkeys(_LOOP.split(), "the loop is the engine's: use a callback, training_step or compute_loss"),
    **dict.fromkeys(_SAVES.split(), "checkpoints are sealed folders: use a callback's on_save, or save_model"),
    **dict.fromkeys(
        ("create_accelerator_and_postprocess", "_move_model_to_device"),
        "the device comes from TrainingArguments and the launcher",
    ),
    **dict.fromkeys(("get_cp_size", "_prepare_context_parallel_inputs"), "there is no context parallelism"),
    "get_sp_size": "there is no sequence parallelism",
    **dict.fromkeys(_TENSORS.split(), "there is no tensor parallelism"),
    "_finalize_training": "use a callback's on_train_end",
    "_maybe_log_save_evaluate": "use a callback that sets control.should_log, should_evaluate or should_save",
    "_get_num_items_in_batch": "override compute_loss",
    "_clip_grad_norm": "set max_grad_norm, or use a callback's on_pre_optimizer_step",
    "_get_grad_norm": "use a callback's on_pre_optimizer_step",
    "_wrap_model": "wrap the model before you give it to the Trainer",
    "_issue_warnings_after_load": "a checkpoint whose weights do not fit the model is refused",
    "_tune_save_checkpoint": "the backend of a search is optuna",
}
"""Methods of transformers' loop that a script may have replaced there; nothing would call them here."""


def check_overrides(kind: type[Any], own: Collection[str] = ()) -> None:
    """Refuses a class or an object with attributes of its `own` that replaces what is never called: to ignore it would
    be a different experiment."""
    found = [name for name in NOT_CALLED if hasattr(kind, name) or name in own]
    problems = tuple(f"{name} is never called here: {NOT_CALLED[name]}" for name in found)
    if problems:
        raise ConfigError("; ".join(problems), where=kind.__name__, problems=problems)


def require_head(kind: type[Any]) -> None:
    """Refuses a model that computes hidden states only."""
    if kind.__name__ in MODEL_MAPPING_NAMES.values() and not find_labels(kind) and not can_return_loss(kind):
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
        if name is not None and str(kind).startswith(("int", "uint")) and dataset.format["type"] != "custom":
            cells = dataset.with_format("numpy")[name][:]
            _require(np.asarray(cells), np.arange(len(cells)), classes, name)

    def check(features: Any, rows: npt.NDArray[np.int64]) -> None:
        found = features.get("labels") if isinstance(features, Mapping) else None
        if isinstance(found, torch.Tensor) and found.ndim == 1 and found.dtype == torch.int64 and not found.is_cuda:
            _require(found.numpy(), rows, classes, "labels")

    return check


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
