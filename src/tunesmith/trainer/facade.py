"""The Trainer: transformers' methods and results over the one engine. Each method hands over to the part that does it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tunesmith.engine.state import TrainState
from tunesmith.tokens.batches import Padding
from tunesmith.tokens.token_rows import TokenRows
from tunesmith.trainer.arguments import run_length
from tunesmith.trainer.assembly import TrainerAssembly
from tunesmith.trainer.attempts import attempt_training
from tunesmith.trainer.checkpoints import load_best_weights, save_run
from tunesmith.trainer.data import columns_taken
from tunesmith.trainer.listeners import add_log_line, load_callback_states
from tunesmith.trainer.objective import on_device, require_columns
from tunesmith.trainer.processes import rows_behind
from tunesmith.trainer.reactions import remember_best, tracked_metric
from tunesmith.trainer.saving import write_metrics, write_trainer_state
from tunesmith.trainer.stepping import build_optimizer, build_scheduler, decay_names, make_engine, waits_for_metric
from tunesmith.trainer.upstream import has_length, optimizer_class_and_options, parts

Context = contextlib.AbstractContextManager[Any]


class Trainer(TrainerAssembly):
    """Change one import and keep the script. Where it differs from transformers: docs/reference/trainer_compatibility.md."""

    log_metrics = parts.log_metrics
    metrics_format = staticmethod(parts.metrics_format)
    get_num_trainable_parameters = parts.get_num_trainable_parameters
    get_learning_rates = parts.get_learning_rates
    get_optimizer_group = parts.get_optimizer_group

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Trains to the end of the plan, or until a callback says stop. Returns (global_step, training_loss, metrics)."""
        self._memory_tracker.start()
        return attempt_training(self, resume_from_checkpoint, trial, ignore_keys_for_eval)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics of the evaluation set, or of each of a dict of them, under prefixed keys."""
        return self._parts.evaluation.evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """(predictions, label_ids, metrics), row i for row i of the dataset."""
        return self._parts.evaluation.predict(test_dataset, ignore_keys, metric_key_prefix)

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Predictions, labels and metrics over a DataLoader, with or without labels."""
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        return self._parts.evaluation.loop(dataloader, description, loss_only, ignore_keys, metric_key_prefix)

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """(loss, logits, labels) of one batch, each None where there is none."""
        return self._parts.evaluation.prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _evaluate(self, trial: Any, ignore_keys: Any, skip_scheduler: bool = False) -> dict[str, float]:
        """An evaluation during training; a scheduler that waits for a metric gets it."""
        metrics = self.evaluate(ignore_keys=ignore_keys)
        self._report_to_hp_search(trial, self.state.global_step, metrics)
        if not skip_scheduler and waits_for_metric(self.lr_scheduler):
            self.lr_scheduler.step(tracked_metric(metrics, self.args.metric_for_best_model))
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        return remember_best(self.args, self.state, metrics)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds a line to `state.log_history` and calls the callbacks; override to do more."""
        add_log_line(self, logs, start_time)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The mean loss of the batch; with `num_items_in_batch`, its share of the mean over that many items."""
        return self._parts.loss.compute(model, inputs, return_outputs, num_items_in_batch)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward pass of one micro-batch; returns its share of the step's loss."""
        return self._parts.loss.training_step(model, inputs, num_items_in_batch)

    def compute_loss_context_manager(self) -> Context:
        """The precision of forward passes."""
        return self.autocast_smart_context_manager()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Context:
        """Autocast as bf16 or fp16 ask for it."""
        return self.runtime.autocast()

    def floating_point_ops(self, inputs: Any) -> float:
        """6 operations per token and parameter (without embeddings); 0 for a model that cannot count its parameters."""
        return self._parts.loss.operations_of(inputs)

    def store_flos(self) -> None:
        """Adds this process's operations, over all ranks, to `state.total_flos`."""
        self.state.total_flos += sum(self.runtime.gather_objects(self.current_flos))
        self.current_flos = 0.0

    def _track_num_input_tokens(self, inputs: Any) -> None:
        self._parts.loss.count_input_tokens(inputs)

    def _prepare_input(self, data: Any) -> Any:
        """The same structure with its tensors on the device."""
        return on_device(data, self.args.device)

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The batch on the device; an empty one is refused."""
        inputs = self._prepare_input(inputs)
        require_columns(inputs, self._signature_columns)
        return inputs

    def _make_engine(self) -> TrainState:
        assert self._parts.run is not None
        return make_engine(self._parts.run)

    def get_train_dataloader(self) -> Any:
        """The training DataLoader, in an order that depends on (seed, epoch) alone."""
        return self._parts.loaders.train()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The evaluation DataLoader; a string names one of a dict of evaluation sets."""
        return self._parts.loaders.evaluation(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The DataLoader of `predict`."""
        size = self._parts.loaders.eval_batch_size
        return self._get_dataloader(test_dataset, "test", size, sampler_fn=self._get_eval_sampler)

    def get_total_train_batch_size(self, args: Any = None) -> int:
        """Rows of one optimizer step over all micro-batches and ranks."""
        return int(self._train_batch_size * self.args.gradient_accumulation_steps * self.runtime.world)

    def num_examples(self, dataloader: Any) -> int:
        """Rows of a DataLoader's dataset; estimated from its batches where the dataset has no length."""
        return rows_behind(dataloader, int(self.args.per_device_train_batch_size))

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[int, int, int, float, int, int, int]:
        """(epochs, steps an epoch, rows, rows over all epochs, rows a step, batches an epoch, steps); may be overridden."""
        batches = len(dataloader) if has_length(dataloader) else None
        rows = self.num_examples(dataloader) if batches else None
        return run_length(args, batches, rows, self.get_total_train_batch_size(args))

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Our batch sampler. A subclass may return any torch sampler instead."""
        return self._parts.loaders.train_sampler(self.train_dataset if train_dataset is None else train_dataset)

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        return self._parts.loaders.eval_sampler(eval_dataset)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        return self._parts.loaders.make(dataset, description, batch_size, sampler_fn, is_training=is_training)

    def _fast_rows(self, loader: Any) -> tuple[TokenRows | None, Padding | None]:
        return self._parts.loaders.fast_rows(loader)

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = columns_taken(self.model, self.label_names)

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        return self._parts.loaders.without_unused(dataset, description)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        return self._parts.loaders.dropping_collator(data_collator, description)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Sets up both; override this, or one of the two it calls."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """The optimizer, made once; an optimizer the user gave is kept."""
        if self.optimizer is None:
            self.optimizer = build_optimizer(self, self.model if model is None else model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The scheduler object, made once a run; a scheduler the user gave is kept."""
        if self.lr_scheduler is None:
            given = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = build_scheduler(self.args, given, num_training_steps)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """(class, options) of the optimizer that `optim` names."""
        found: tuple[Any, Any] = optimizer_class_and_options(args, model)
        return found

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Parameters that decay: neither biases nor norms."""
        return decay_names(model)

    def _get_learning_rate(self) -> float:
        """The rate the next step will use."""
        return float(self.optimizer.param_groups[0]["lr"])

    def hyperparameter_search(
        self,
        hp_space: Callable[[Any], dict[str, Any]] | None = None,
        compute_objective: Callable[[dict[str, float]], Any] | None = None,
        n_trials: int = 20,
        direction: str | list[str] = "minimize",
        backend: Any = None,
        hp_name: Callable[[Any], str] | None = None,
        **options: Any,
    ) -> Any:
        """The best run (BestRun), or one for each point of the front when there are several directions."""
        self.hp_name = hp_name
        return self._parts.search.run(hp_space, compute_objective, n_trials, direction, backend, **options)

    def _load_callback_state(self) -> None:
        load_callback_states(self)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model so that `from_pretrained` loads it; the main process alone. With fsdp all processes call it."""
        with self._parts.files.gathering():
            if self.args.should_save:
                self._save(self.args.output_dir if output_dir is None else output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self._parts.files.save(Path(self.args.output_dir if output_dir is None else output_dir), state_dict)

    def save_state(self) -> None:
        """Writes `trainer_state.json`; the main process alone."""
        if self.is_world_process_zero():
            write_trainer_state(Path(self.args.output_dir), self.state)

    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        """Writes `<split>_results.json`, and adds to `all_results.json`; the main process alone."""
        if self.is_world_process_zero():
            write_metrics(Path(self.args.output_dir), split, metrics, combined=combined)

    def _save_checkpoint(self, model: Any, trial: Any = None) -> None:
        """Publishes `checkpoint-<step>`, then removes older ones beyond `save_total_limit`."""
        assert self._parts.run is not None
        save_run(self._parts.run)

    def _load_best_model(self) -> None:
        load_best_weights(self.model, Path(self.state.best_model_checkpoint))

    def create_model_card(
        self,
        language: str | None = None,
        license: str | None = None,
        tags: str | list[str] | None = None,
        model_name: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> None:
        """Writes README.md from what the Trainer knows."""
        if self.is_world_process_zero():
            facts = {name: value for name, value in locals().items() if name != "self"}
            self._parts.hub.write_model_card(**facts)

    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **card: Any,
    ) -> Any:
        """Uploads the output folder with a fresh model card; returns the commit, or a future when not blocking."""
        return self._parts.hub.push(commit_message, blocking=blocking, token=token, revision=revision, **card)
