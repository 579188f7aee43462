"""What a Trainer refuses: fields of `TrainingArguments` that it does not honour, methods of transformers' loop that a subclass
replaces and nothing would call here, a model without a head, arguments that do not go together, labels that are no class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES
from transformers.trainer_utils import has_length
from transformers.utils import can_return_loss, find_labels

from tunesmith.errors import ConfigError, DataError
from tunesmith.ranks.sharding import read_sharding
from tunesmith.trainer.content import is_arrow_dataset

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer


@dataclass(frozen=True)
class Field:
    """`allowed` says which values work; any other is refused with `instead`. None: every value works."""

    note: str
    allowed: Callable[[Any], bool] | None = None
    instead: str = ""


def _unset(value: Any) -> bool:
    return not value


_NO_BIG_MODELS = (
    "It shards models larger than one device; encoders with a classification head fit on one. Leave it out."
)
_AS_THERE = """
    output_dir per_device_train_batch_size per_device_eval_batch_size num_train_epochs max_steps learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps optim optim_args weight_decay adam_beta1 adam_beta2
    adam_epsilon max_grad_norm label_smoothing_factor bf16 bf16_full_eval fp16_full_eval tf32 gradient_checkpointing
    gradient_checkpointing_kwargs torch_compile torch_compile_backend torch_compile_mode use_cache neftune_noise_alpha
    torch_empty_cache_steps logging_strategy logging_steps logging_first_step log_on_each_node
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay prediction_loss_only eval_on_start
    eval_do_concat_batches eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model
    save_strategy save_steps push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push
    hub_revision load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip full_determinism seed
    data_seed use_cpu dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns
    label_names length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph
    ddp_backend ddp_timeout skip_memory_metrics local_rank
"""

FIELDS: dict[str, Field] = {
    **dict.fromkeys(_AS_THERE.split(), Field("as in transformers")),
    "fp16": Field("as in transformers: on a CPU the run trains in float32, with a warning"),
    "gradient_accumulation_steps": Field(
        "the loss is divided once, by the items of the whole window: 8x1 = 4x2 = 2x4 (transformers adds up the means of "
        "micro-batches for encoders, so its loss grows with the number of steps)"
    ),
    "auto_find_batch_size": Field(
        "out of memory splits the micro-batch and repeats the step, always: the maths does not change. When True, memory that "
        "runs out elsewhere (a callback) begins the run again with 0.9 of the batch, as in transformers"
    ),
    "logging_nan_inf_filter": Field(
        "nothing is left to filter: a loss or gradient that is not finite stops the run (NumericsError)"
    ),
    "eval_use_gather_object": Field("results of all ranks are always gathered as objects"),
    "save_total_limit": Field("as in transformers; rotates by step within this run, never by time of change"),
    "enable_jit_checkpoint": Field("SIGTERM or SIGINT saves at the next safe point and ends the run (StoppedBySignal)"),
    "restore_callback_states_from_checkpoint": Field(
        "counters of stateful callbacks are always restored; True restores the arguments they were made with, too"
    ),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict", "resume_from_checkpoint"),
        Field("read by your script, as in transformers"),
    ),
    "train_sampling_strategy": Field(
        "random, sequential or group_by_length; the order of an epoch depends on seed and epoch alone",
        lambda value: value in ("random", "sequential", "group_by_length"),
        "Use 'group_by_length'.",
    ),
    "average_tokens_across_devices": Field(
        "the divisor is always counted over all devices",
        bool,
        "Leave it True: the loss is divided by the items of all devices, or two ranks would not equal one.",
    ),
    "save_on_each_node": Field("rank 0 alone writes", _unset, "Leave it out, and copy the folder to the other nodes."),
    "accelerator_config": Field("each of its values has its line below"),
    "debug": Field(
        "none needed: a value that is not finite is named with its tensor and its rows",
        _unset,
        "Leave it out: a value that is not finite stops the run and is named.",
    ),
    "optim_target_modules": Field(
        "refused when set", _unset, "It serves GaLore and APOLLO; use optim='adamw_torch_fused'."
    ),
    "use_liger_kernel": Field("refused when set", _unset, "Its kernels are for decoder language models. Leave it out."),
    "liger_kernel_config": Field(
        "refused when set", _unset, "Its kernels are for decoder language models. Leave it out."
    ),
    "parallelism_config": Field("refused when set", _unset, _NO_BIG_MODELS),
    "deepspeed": Field(
        "refused when set", _unset, f"{_NO_BIG_MODELS} For several devices use torchrun or accelerate launch."
    ),
    "fsdp": Field(
        "True, full_shard or shard_grad_op: torch's fully_shard (FSDP2) over all ranks",
        lambda value: not sharding_problems(value, None),
        "The other strategies and offloading are not built in.",
    ),
    "fsdp_config": Field(
        "reshard_after_forward, transformer_layer_cls_to_wrap, auto_wrap_policy (TRANSFORMER_BASED_WRAP, NO_WRAP); "
        "prefetching and loading are torch's own",
        lambda value: not sharding_problems(True, value),
        "Offloading, activation checkpointing (use gradient_checkpointing), sharded checkpoints, FSDP1 and XLA are refused.",
    ),
}
"""Every field of `TrainingArguments`: honoured, or refused by name with what to use instead."""


def sharding_problems(asked: Any, config: Any) -> list[str]:
    """What `fsdp` and `fsdp_config` ask for and is not done, a sentence each."""
    try:
        read_sharding(asked, config)
    except ConfigError as error:
        return list(error.problems or (error.line(),))
    return []


def refused(args: Any) -> list[str]:
    """One sentence for each field of `args` that is set to something this Trainer does not do."""
    problems = []
    for name, entry in FIELDS.items():
        value = getattr(args, name, None)
        if entry.allowed is not None and not entry.allowed(value):
            asked = {"fsdp": (value, None), "fsdp_config": (True, value)}.get(name)
            why = " ".join(sharding_problems(*asked)) if asked else f"{name}={value!r} is not supported."
            problems.append(f"{why} {entry.instead}")
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
    """Refuses a class or an object with attributes of its `own` that replaces what is never called: silence would be a
    different experiment."""
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
