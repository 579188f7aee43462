"""What happens between two steps: ends of steps and epochs, and the control flags turned into log, evaluation, checkpoint."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.errors import ConfigError, did_you_mean
from tunesmith.trainer.attributes import TrainerAttributes
from tunesmith.trainer.callback_changes import sealing_again
from tunesmith.trainer.upstream import trainer_log


class ReactionPart(TrainerAttributes):
    """The methods of a Trainer that act on control flags. They read and set `control`, `state` and `_progress`."""

    _ignore_keys: Any = None

    def store_flos(self) -> None:
        """Adds this process's operations, over all ranks, to `state.total_flos`."""
        self.state.total_flos += sum(self.runtime.gather_objects(self.current_flos))
        self.current_flos = 0.0

    def _wants_numbers(self, step: int) -> bool:
        """Asked after each step whether its numbers are needed now. Callbacks hear of the step's end here, to decide it."""
        self._end_step(step)
        control = self.control
        asked = control.should_log or control.should_evaluate or control.should_save
        ends = self._progress.steps_in_epoch >= self._horizon.steps_per_epoch
        return bool(asked or ends or control.should_training_stop or control.should_epoch_stop)

    def _end_step(self, step: int) -> None:
        """Tells the callbacks about a step, once."""
        progress = self._progress
        if step <= progress.announced_step:
            return
        progress.announced_step = step
        progress.steps_in_epoch += 1
        horizon = self._horizon
        batches = min(progress.steps_in_epoch * self.args.gradient_accumulation_steps, horizon.batches_per_epoch)
        self.state.global_step = step
        self.state.epoch = progress.epoch + batches / horizon.batches_per_epoch
        self._tell("on_step_end")  # type: ignore[attr-defined]

    def _take_batch_size_of(self, folder: Path | None) -> None:
        """With auto_find_batch_size a resume goes on with the batch size that was found."""
        if folder is not None and self.args.auto_find_batch_size:
            found = json.loads((folder / "trainer_state.json").read_text()).get("train_batch_size")
            self._train_batch_size = found or self._train_batch_size

    def _takes_smaller_batches(self, error: Exception) -> bool:
        """Whether the run begins again with smaller batches: memory ran out where no step can be repeated, in a callback
        or in the optimizer. Where it runs out in a step, the engine splits the micro-batch and nothing begins again."""
        size = self._train_batch_size
        if not self.args.auto_find_batch_size or self.runtime.world > 1 or size <= 1:
            return False
        if not (isinstance(error, MemoryError) or "out of memory" in str(error).lower()):
            return False
        self._train_batch_size = max(int(size * 0.9), 1)  # transformers' step
        if self._created_lr_scheduler:
            self.optimizer, self.lr_scheduler, self._created_lr_scheduler = self._given_optimizer, None, False
        trainer_log.warning("out of memory: the run begins again with batches of %d rows", self._train_batch_size)
        return True

    def _next_epoch(self, epoch: int) -> bool:
        """Closes the epoch before and opens this one; False when there is none left, or somebody said stop."""
        progress = self._progress
        if progress.epoch_open:
            if progress.steps_in_epoch == 0:
                trainer_log.warning(
                    f"not a single batch came out of the training set, stopping training at step {self.state.global_step}! "
                    "A stream that can be read once ends before max_steps."
                )
                self.control.should_training_stop = True
            self._end_epoch()
            if self.control.should_training_stop:
                return False
        if epoch >= self._horizon.num_epochs:
            return False
        progress.epoch, progress.steps_in_epoch, progress.epoch_open = epoch, 0, True
        self._tell("on_epoch_begin")  # type: ignore[attr-defined]
        return True

    def _end_epoch(self) -> None:
        """Announces the end of the epoch under way and does what the flags say."""
        progress = self._progress
        if not progress.epoch_open:
            return
        progress.epoch_open = False
        progress.ended_epochs.append(self.state.global_step)
        self._tell("on_epoch_end")  # type: ignore[attr-defined]
        self._log_evaluate_save()

    def _finish_restored_epoch(self) -> bool:
        """After a resume from the last step of an epoch, its end may still be due. Returns whether to go on."""
        progress, horizon = self._progress, self._horizon
        if progress.epoch_open and progress.steps_in_epoch >= horizon.steps_per_epoch:
            self._end_epoch()
            progress.steps_in_epoch = 0
        elif not progress.epoch_open:
            progress.steps_in_epoch = 0
        return not self.control.should_training_stop

    def _log_evaluate_save(self) -> None:
        """Log line, evaluation, checkpoint: what is asked for, in this order."""
        step, control = self.state.global_step, self.control
        if control.should_log and step > self._progress.logged_step:
            logs = {"loss": self._progress.mean_loss(step)}
            if self._progress.grad_norm is not None:
                logs["grad_norm"] = self._progress.grad_norm
            if self._progress.rate is not None:
                logs["learning_rate"] = self._progress.rate
            self.store_flos()
            self.log(logs, self._progress.started)  # type: ignore[attr-defined]
        if self.control.should_evaluate:
            metrics = self._evaluate(self._trial, self._ignore_keys)
            improved = self._determine_best_metric(metrics, self._trial)
            if self.args.save_strategy == "best":
                self.control.should_save = improved
        if self.control.should_save:
            started = time.perf_counter()
            self.store_flos()
            self._save_checkpoint(self.model, self._trial)  # type: ignore[attr-defined]
            name = f"checkpoint-{self.state.global_step}"
            self._note_saved(Path(name), time.perf_counter() - started)  # type: ignore[attr-defined]
            folder = Path(self._get_output_dir(self._trial)) / name  # type: ignore[attr-defined]
            watched = self.runtime.is_main and folder.is_dir() and self._listens("on_save")  # type: ignore[attr-defined]
            with sealing_again(folder, self.model) if watched else contextlib.nullcontext():
                self._tell("on_save")  # type: ignore[attr-defined]

    def _evaluate(self, trial: Any, ignore_keys: Any, skip_scheduler: bool = False) -> dict[str, float]:
        """An evaluation during training; a scheduler that waits for a metric gets it."""
        metrics: dict[str, float] = self.evaluate(ignore_keys=ignore_keys)  # type: ignore[attr-defined]
        self._report_to_hp_search(trial, self.state.global_step, metrics)  # type: ignore[attr-defined]
        if not skip_scheduler and self._waits_for_metric():  # type: ignore[attr-defined]
            self.lr_scheduler.step(tracked_metric(metrics, self.args.metric_for_best_model))
        return metrics

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any = None) -> bool:
        """Whether this evaluation is the best so far; remembers it in the state."""
        if self.args.metric_for_best_model is None:
            return False
        value = tracked_metric(metrics, self.args.metric_for_best_model)
        greater = bool(self.args.greater_is_better)
        if self.state.best_metric is None:
            self.state.best_metric = float("-inf") if greater else float("inf")
        better = np.greater if greater else np.less
        if not better(value, self.state.best_metric):
            return False
        self.state.best_metric = value
        if self.args.save_strategy != "no":
            self.state.best_global_step = self.state.global_step
        return True


def tracked_metric(metrics: dict[str, float], name: str) -> float:
    """The metric that decides, with or without the prefix `eval_`; a KeyError-like ConfigError lists what there is."""
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
