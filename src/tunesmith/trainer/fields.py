"""Every field of `TrainingArguments`: honoured, or refused by name with what to use instead. The docs table is made from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.ranks.sharding_options import read_sharding

Allowed = Callable[[Any], bool]


@dataclass(frozen=True)
class Field:
    """`allowed` says which values work; any other is refused with `instead`. None: every value works."""

    note: str
    allowed: Allowed | None = None
    instead: str = ""


def _only(*values: Any) -> Allowed:
    return lambda value: any(value is v or value == v for v in values)


def _unset(value: Any) -> bool:
    return not value


_NO_BIG_MODELS = (
    "It shards models larger than one device; encoders with a classification head fit on one. Leave it out."
)
_TRANSFORMERS = "as in transformers"

FIELDS: dict[str, Field] = {
    **dict.fromkeys(
        (
            "output_dir",
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "num_train_epochs",
            "max_steps",
            "learning_rate",
            "lr_scheduler_type",
            "lr_scheduler_kwargs",
            "warmup_steps",
            "optim",
            "optim_args",
            "weight_decay",
            "adam_beta1",
            "adam_beta2",
            "adam_epsilon",
            "max_grad_norm",
            "label_smoothing_factor",
            "bf16",
            "bf16_full_eval",
            "fp16_full_eval",
            "tf32",
            "gradient_checkpointing",
            "gradient_checkpointing_kwargs",
            "torch_compile",
            "torch_compile_backend",
            "torch_compile_mode",
            "use_cache",
            "neftune_noise_alpha",
            "torch_empty_cache_steps",
            "logging_strategy",
            "logging_steps",
            "logging_first_step",
            "log_on_each_node",
            "include_num_input_tokens_seen",
            "log_level",
            "log_level_replica",
            "disable_tqdm",
            "report_to",
            "run_name",
            "project",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
            "eval_strategy",
            "eval_steps",
            "eval_delay",
            "prediction_loss_only",
            "eval_on_start",
            "eval_do_concat_batches",
            "eval_accumulation_steps",
            "include_for_metrics",
            "batch_eval_metrics",
            "save_only_model",
            "save_strategy",
            "save_steps",
            "push_to_hub",
            "hub_token",
            "hub_private_repo",
            "hub_model_id",
            "hub_strategy",
            "hub_always_push",
            "hub_revision",
            "load_best_model_at_end",
            "metric_for_best_model",
            "greater_is_better",
            "ignore_data_skip",
            "full_determinism",
            "seed",
            "data_seed",
            "use_cpu",
            "dataloader_drop_last",
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
            "dataloader_in_order",
            "remove_unused_columns",
            "label_names",
            "length_column_name",
            "ddp_find_unused_parameters",
            "ddp_bucket_cap_mb",
            "ddp_broadcast_buffers",
            "ddp_static_graph",
            "ddp_backend",
            "ddp_timeout",
            "skip_memory_metrics",
            "local_rank",
        ),
        Field(_TRANSFORMERS),
    ),
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
        _only("random", "sequential", "group_by_length"),
        "Use 'group_by_length'.",
    ),
    "average_tokens_across_devices": Field(
        "the divisor is always counted over all devices",
        _only(True),
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


def sharding_problems(asked: Any, config: Any) -> list[str]:
    """What `fsdp` and `fsdp_config` ask for and is not done, a sentence each."""
    try:
        read_sharding(asked, config)
    except ConfigError as error:
        return list(error.problems or (error.line(),))
    return []


ACCELERATOR: dict[str, str] = {
    "split_batches": "True: `per_device_train_batch_size` and `per_device_eval_batch_size` are the rows of all ranks together, "
    "and must be a multiple of their number",
    "dispatch_batches": "True: rank 0 alone reads a stream and sends each rank its rows; `dataloader_num_workers` does not "
    "apply to it. None or False: each rank reads the stream and takes its rows, which must then come in one order on all of "
    "them. Of a dataset with a length each rank reads its own rows, whatever the value: the order is known to all",
    "even_batches": "no effect: a row is never trained or evaluated twice to fill up a batch. A rank without rows in the last "
    "step adds nothing to it, so that two ranks equal one. The last rows of a stream are completed as in transformers",
    "use_seedable_sampler": "no effect: the order of an epoch depends on the seed and the epoch alone",
    "non_blocking": "no effect: batches are always copied to the device without waiting",
    "gradient_accumulation_kwargs": "`num_steps` sets `gradient_accumulation_steps`, which must then be 1; "
    "`sync_each_batch`: ranks exchange gradients in each micro-batch, to the same sum. `adjust_scheduler` and "
    "`sync_with_dataloader` have no effect, as in transformers: the scheduler is stepped once for each update",
    "use_configured_state": "as in transformers: `TrainingArguments` takes the device of the state that you made",
}
"""Every value of `accelerator_config`, and what it does."""


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
