"""Every method of `transformers.Trainer`: here, or not called here and what to override instead."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tunesmith.errors import ConfigError

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
