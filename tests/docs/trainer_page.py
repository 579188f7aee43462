"""The part of docs/reference/trainer_compatibility.md that is made from the code: the tables of arguments and methods.

PYTHONPATH=tests python tests/docs/trainer_page.py      # writes them into the page
"""

from __future__ import annotations

import dataclasses
from typing import Any

import transformers

from source_tree import SRC
from tunesmith.trainer.arguments import DROPPED, MOVED, RENAMED, SWITCHES
from tunesmith.trainer.validation import LIMITED, NOT_CALLED

PAGE = SRC.parents[1] / "docs" / "reference" / "trainer_compatibility.md"
START, END = "<!-- tables: PYTHONPATH=tests python tests/docs/trainer_page.py -->\n", "<!-- end of tables -->\n"

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

NOTES: dict[str, str] = {
    **dict.fromkeys(_AS_THERE.split(), "as in transformers"),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict", "resume_from_checkpoint"), "read by your script, as in transformers"
    ),
    "fp16": "as in transformers: on a CPU the run trains in float32, with a warning",
    "gradient_accumulation_steps": "the loss is divided once, by the items of the whole window: 8x1 = 4x2 = 2x4 (transformers "
    "adds up the means of micro-batches for encoders, so its loss grows with the number of steps)",
    "auto_find_batch_size": "out of memory splits the micro-batch and repeats the step, always: the maths does not change. When "
    "True, memory that runs out elsewhere (a callback) begins the run again with 0.9 of the batch, as in transformers",
    "logging_nan_inf_filter": "nothing is left to filter: a loss or gradient that is not finite stops the run (NumericsError)",
    "eval_use_gather_object": "results of all ranks are always gathered as objects",
    "save_total_limit": "as in transformers; rotates by step within this run, never by time of change",
    "enable_jit_checkpoint": "SIGTERM or SIGINT saves at the next safe point and ends the run (StoppedBySignal)",
    "restore_callback_states_from_checkpoint": "counters of stateful callbacks are always restored; True restores the arguments "
    "they were made with, too",
    "train_sampling_strategy": "random, sequential or group_by_length; the order of an epoch depends on seed and epoch alone",
    "average_tokens_across_devices": "the divisor is always counted over all devices",
    "save_on_each_node": "rank 0 alone writes",
    "accelerator_config": "each of its values has its line below",
    "debug": "none needed: a value that is not finite is named with its tensor and its rows",
    "fsdp": "True, full_shard or shard_grad_op: torch's fully_shard (FSDP2) over all ranks",
    "fsdp_config": "reshard_after_forward, transformer_layer_cls_to_wrap, auto_wrap_policy (TRANSFORMER_BASED_WRAP, NO_WRAP); "
    "prefetching and loading are torch's own",
}
"""What each field of `TrainingArguments` does; one that is in LIMITED alone is refused when it is set."""

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
"""Methods of transformers' Trainer that are here, and what is to be known of each."""


def tables() -> str:
    """Arguments, old names and methods, a line each."""
    lines = ["## TrainingArguments", "", "| field | default | status | note |", "| --- | --- | --- | --- |"]
    for field in dataclasses.fields(transformers.TrainingArguments):
        note, (_, instead) = NOTES.get(field.name, ""), LIMITED.get(field.name, (None, ""))
        status = "refused" if not note else "some values" if instead else "honoured"
        note = f"{note}. Otherwise: {instead}" if note and instead else note or instead
        lines.append(f"| `{field.name}` | `{_default(field)!r}` | {status} | {_cell(note)} |")
    lines += ["", "### accelerator_config", "", "| value | effect |", "| --- | --- |"]
    lines += [f"| `{name}` | {_cell(effect)} |" for name, effect in ACCELERATOR.items()]
    lines += ["", "## Old names", "", "`tunesmith.TrainingArguments` accepts them with a one-line note.", ""]
    lines += ["| old name | now |", "| --- | --- |"]
    lines += [f"| `{old}` | `{new}` |" for old, new in RENAMED.items()]
    lines += [
        "| `warmup_ratio` | `warmup_steps` below 1 |",
        *(f"| `{old}` | `{new}={value!r}` |" for old, (new, value) in SWITCHES.items()),
        "| `tokenizer=` of the Trainer | `processing_class=` |",
    ]
    lines += [f"| `{old}` | `accelerator_config={{'{old}': ...}}` |" for old in MOVED]
    lines += [f"| `{old}` | left out: {_cell(why)} |" for old, why in DROPPED.items()]
    lines += ["", "## Methods", "", "| method | status | note |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | honoured | {_cell(note) or 'as in transformers'} |" for name, note in PROVIDED.items()]
    lines += [f"| `{name}` | an override is refused | {_cell(why)} |" for name, why in NOT_CALLED.items()]
    return "\n".join(lines) + "\n"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return getattr(field.default, "value", field.default)
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def trainer_page() -> str:
    """The page with the tables of today in it."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    return f"{before}{START}{tables()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(trainer_page(), encoding="utf-8")
