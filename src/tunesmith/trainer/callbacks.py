"""transformers' callbacks around the engine's events: how they are called, and what their control flags ask for between two
steps: log, evaluation, checkpoint."""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerState
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, ExportableState

from tunesmith.errors import ConfigError, did_you_mean
from tunesmith.events import Saved
from tunesmith.trainer.arguments import trainer_log
from tunesmith.trainer.saving import sealing_again

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer
    from tunesmith.trainer.training import TrainerRun


def make_handler(trainer: Trainer, callbacks: list[Any] | None) -> Any:
    """Default flow, trackers, the user's own: transformers' order."""
    trackers = get_reporting_integration_callbacks(trainer.args.report_to)
    given = [DefaultFlowCallback, *trackers, *(callbacks or [])]
    return CallbackHandler(given, trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler)


def fresh_state(trainer: Trainer) -> Any:
    """An empty TrainerState that knows the stateful callbacks."""
    return TrainerState(
        is_local_process_zero=trainer.is_local_process_zero(),
        is_world_process_zero=trainer.is_world_process_zero(),
        stateful_callbacks=_stateful(trainer),
    )


def tell(trainer: Trainer, event: str, **extra: Any) -> None:
    """Calls one event of all callbacks and keeps the control they return."""
    call = getattr(trainer.callback_handler, event)
    trainer.control = call(trainer.args, trainer.state, trainer.control, **extra)


def listens(trainer: Trainer, event: str) -> bool:
    """Whether any callback does something at this event."""
    default = getattr(TrainerCallback, event)
    return any(getattr(type(c), event, default) is not default for c in trainer.callback_handler.callbacks)


def _stateful(trainer: Trainer) -> list[Any]:
    return [c for c in [*trainer.callback_handler.callbacks, trainer.control] if isinstance(c, ExportableState)]


def export_callback_states(trainer: Trainer) -> None:
    """Puts the state of every stateful callback into `state.stateful_callbacks`."""
    found: dict[str, list[Any]] = defaultdict(list)
    for callback in _stateful(trainer):
        found[type(callback).__name__].append(callback.state())
    trainer.state.stateful_callbacks = {name: states if states[1:] else states[0] for name, states in found.items()}


def load_callback_states(trainer: Trainer) -> None:
    """Restores counters of stateful callbacks; with restore_callback_states_from_checkpoint, their arguments too."""
    whole = trainer.args.restore_callback_states_from_checkpoint
    for name, stored in trainer.state.stateful_callbacks.items():
        mine = [c for c in [*trainer.callback_handler.callbacks, trainer.control] if type(c).__name__ == name]
        if not mine:
            trainer_log.warning(f"The checkpoint holds the state of a callback that this run does not have: {name}")
        for callback, data in zip(mine, stored if isinstance(stored, list) else [stored], strict=False):
            if callback is trainer.control and not whole:
                continue
            values = {**(data.get("args", {}) if whole else {}), **data.get("attributes", {})}
            for key, value in values.items():
                setattr(callback, key, value)


_STORED = ("ended_epochs", "epoch", "epoch_open", "steps_in_epoch", "loss_since_log", "logged_step")


@dataclass
class LoggedSums:
    """Sums since the last log line and over the whole call, in optimizer steps."""

    first_step: int
    started: float = field(default_factory=time.time)
    logged_step: int = 0
    loss_since_log: float = 0.0
    loss_total: float = 0.0
    grad_norm: float | None = None
    learning_rate: float | None = None
    reported_rate: float | None = None
    """What a `_get_learning_rate` of the user returned for the last step."""
    epoch: int = 0
    epoch_open: bool = False
    """An epoch has begun, and `on_epoch_end` was not called for it yet."""
    steps_in_epoch: int = 0
    announced_step: int = 0
    """The last step whose end was passed to the callbacks."""
    ended_epochs: list[int] = field(default_factory=list)
    """The step each finished epoch ended at."""

    def __post_init__(self) -> None:
        self.logged_step = self.announced_step = self.first_step

    @property
    def rate(self) -> float | None:
        """The learning rate of the last step, as it is logged."""
        return self.learning_rate if self.reported_rate is None else self.reported_rate

    def add(self, loss: float | None, grad_norm: float | None, learning_rate: float) -> None:
        """Counts one step that was read back."""
        self.loss_since_log += 0.0 if loss is None else loss
        self.grad_norm = grad_norm
        self.learning_rate = learning_rate

    def mean_loss(self, step: int) -> float:
        """The mean loss since the last log line; starts a new sum."""
        mean = self.loss_since_log / max(step - self.logged_step, 1)
        self.loss_total += self.loss_since_log
        self.loss_since_log = 0.0
        self.logged_step = step
        return mean

    def to_json(self) -> dict[str, Any]:
        """What a resume needs."""
        return {name: getattr(self, name) for name in _STORED}

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Restores what `to_json` returned."""
        for name in _STORED:
            setattr(self, name, notes[name])
        self.ended_epochs = list(self.ended_epochs)
        self.loss_total = -self.loss_since_log  # those steps belong to the mean of an earlier call

    def training_loss(self, step: int) -> float:
        """The mean loss over this call."""
        return (self.loss_total + self.loss_since_log) / max(step - self.first_step, 0.001)


class Reactions:
    """Calls the callbacks of a run when an event is due, and does what their control flags ask for."""

    def __init__(self, run: TrainerRun) -> None:
        self._run, self.trainer, self.horizon, self.progress = run, run.trainer, run.horizon, run.progress

    def wants_numbers(self, step: int) -> bool:
        """Whether the numbers of this step are needed now. `on_step_end` is called here, because callbacks decide it."""
        self.end_step(step)
        control = self.trainer.control
        asked = control.should_log or control.should_evaluate or control.should_save
        ends = self.progress.steps_in_epoch >= self.horizon.steps_per_epoch
        return bool(asked or ends or control.should_training_stop or control.should_epoch_stop)

    def end_step(self, step: int) -> None:
        """Calls the callbacks for a step, once."""
        progress, trainer = self.progress, self.trainer
        if step <= progress.announced_step:
            return
        progress.announced_step = step
        progress.steps_in_epoch += 1
        all_batches = self.horizon.batches_per_epoch
        batches = min(progress.steps_in_epoch * trainer.args.gradient_accumulation_steps, all_batches)
        trainer.state.global_step = step
        trainer.state.epoch = progress.epoch + batches / all_batches
        tell(trainer, "on_step_end")

    def next_epoch(self, epoch: int) -> bool:
        """Ends the previous epoch and begins this one; False when no epoch is left or a callback asked to stop."""
        progress, trainer = self.progress, self.trainer
        if progress.epoch_open:
            if progress.steps_in_epoch == 0:
                trainer_log.warning(
                    "the training set gave no batch, stopping training at step "
                    f"{trainer.state.global_step}! A stream that can be read once ends before max_steps."
                )
                trainer.control.should_training_stop = True
            self.end_epoch()
            if trainer.control.should_training_stop:
                return False
        if epoch >= self.horizon.num_epochs:
            return False
        progress.epoch, progress.steps_in_epoch, progress.epoch_open = epoch, 0, True
        tell(trainer, "on_epoch_begin")
        return True

    def end_epoch(self) -> None:
        """Calls `on_epoch_end` for the current epoch and does what the flags ask for."""
        if self.progress.epoch_open:
            self.progress.epoch_open = False
            self.progress.ended_epochs.append(self.trainer.state.global_step)
            tell(self.trainer, "on_epoch_end")
            self.log_evaluate_save()

    def finish_restored_epoch(self) -> bool:
        """After a resume from the last step of an epoch, its end may still be due. Returns whether to continue."""
        progress = self.progress
        if progress.epoch_open and progress.steps_in_epoch >= self.horizon.steps_per_epoch:
            self.end_epoch()
        if not progress.epoch_open:
            progress.steps_in_epoch = 0
        return not self.trainer.control.should_training_stop

    def log_evaluate_save(self) -> None:
        """Log line, evaluation, checkpoint: what is asked for, in this order."""
        trainer, progress = self.trainer, self.progress
        step = trainer.state.global_step
        if trainer.control.should_log and step > progress.logged_step:
            logs = {"loss": progress.mean_loss(step), "grad_norm": progress.grad_norm, "learning_rate": progress.rate}
            trainer.store_flos()
            trainer.log({name: value for name, value in logs.items() if value is not None}, progress.started)
        if trainer.control.should_evaluate:
            metrics = trainer._evaluate(self._run.trial, self._run.ignore_keys)
            improved = trainer._determine_best_metric(metrics, self._run.trial)
            if trainer.args.save_strategy == "best":
                trainer.control.should_save = improved
        if trainer.control.should_save:
            self._save()

    def _save(self) -> None:
        trainer, run = self.trainer, self._run
        assert run.record is not None
        started, step = time.perf_counter(), trainer.state.global_step
        trainer.store_flos()
        trainer._save_checkpoint(trainer.model, run.trial)
        folder = run.place.checkpoint(step)
        run.record.on(Saved(step, folder.name, time.perf_counter() - started))
        watched = trainer.runtime.is_main and folder.is_dir() and listens(trainer, "on_save")
        with sealing_again(folder, trainer.model) if watched else contextlib.nullcontext():
            tell(trainer, "on_save")


def evaluate_in_training(
    trainer: Trainer, trial: Any, ignore_keys: Any, skip_scheduler: bool = False
) -> dict[str, float]:
    """An evaluation during training; a scheduler that waits for a metric gets it."""
    metrics = trainer.evaluate(ignore_keys=ignore_keys)
    trainer._report_to_hp_search(trial, trainer.state.global_step, metrics)
    if not skip_scheduler and waits_for_metric(trainer.lr_scheduler):
        trainer.lr_scheduler.step(tracked_metric(metrics, trainer.args.metric_for_best_model))
    return metrics


def waits_for_metric(scheduler: Any) -> bool:
    """Whether a scheduler is stepped by an evaluation instead of a training step."""
    step = getattr(scheduler, "step", None)
    if step is None:
        return False
    plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
    return plateau or _takes_metrics(getattr(step, "__func__", step))


@functools.lru_cache(maxsize=16)
def _takes_metrics(step: Callable[..., Any]) -> bool:
    """Cached, as it is called after every step: reading a signature takes as long as the rest of the call."""
    return "metrics" in inspect.signature(step).parameters


def remember_best(trainer: Trainer, metrics: dict[str, float], trial: Any = None) -> bool:
    """Whether this evaluation is the best so far; remembers it in the TrainerState."""
    args, state = trainer.args, trainer.state
    if args.metric_for_best_model is None:
        return False
    value = tracked_metric(metrics, args.metric_for_best_model)
    greater = bool(args.greater_is_better)
    if state.best_metric is None:
        state.best_metric = float("-inf") if greater else float("inf")
    if not (np.greater if greater else np.less)(value, state.best_metric):
        return False
    state.best_metric = value
    if args.save_strategy != "no":
        state.best_global_step = state.global_step
    return True


def tracked_metric(metrics: dict[str, float], name: str) -> float:
    """The value of `metric_for_best_model`, with or without the prefix `eval_`; a ConfigError lists the metrics there are."""
    key = name if name.startswith("eval_") else f"eval_{name}"
    if key not in metrics:
        known = tuple(metrics)
        raise MetricMissing(
            f"The `metric_for_best_model` training argument is set to '{key}', which is not found in the evaluation "
            f"metrics. The available evaluation metrics are: {list(known)}",
            fix=did_you_mean(key, known) or "Consider changing the `metric_for_best_model` via the TrainingArguments.",
        )
    return metrics[key]


class MetricMissing(ConfigError, KeyError):
    """A ConfigError that scripts written for transformers catch as a KeyError."""
