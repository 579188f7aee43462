"""Trackers for `tunesmith train`: pass the events of a run to transformers' integration callbacks."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from transformers import TrainerControl, TrainerState
from transformers.integrations.integration_utils import get_reporting_integration_callbacks

from tunesmith.config.options import RunConfig, to_dict
from tunesmith.events import EpochStarted, Evaluated, Event, Resumed, RunEnded, RunStarted, Saved, StepDone
from tunesmith.pipeline.inputs import is_installed
from tunesmith.training.schedule import Plan

log = logging.getLogger(__name__)

PROJECT = "tunesmith"
LINES_AN_EPOCH = 20


class Trackers:
    """A listener of events. A tracker that fails is removed with a warning: it never stops the run."""

    def __init__(self, names: list[str], config: RunConfig, plan: Plan, model: Any) -> None:
        os.environ.setdefault("WANDB_PROJECT", PROJECT)
        os.environ.setdefault("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = ("tensorboard", "wandb", "trackio", "mlflow")  # all: those that are installed
        names = [name for name in known if is_installed(name)] if "all" in names else names
        every = config.logging_steps
        if every is None:
            every = round(float(plan.epoch_ends[0]) / LINES_AN_EPOCH)
        elif every < 1:
            every = math.ceil(every * plan.num_steps)
        self._every = max(1, int(every))
        self._model, self._arguments = model, tracker_arguments(config)
        self._state = TrainerState(max_steps=plan.num_steps, is_world_process_zero=True)
        self._control = TrainerControl()
        self._callbacks = [kind() for kind in get_reporting_integration_callbacks(names)]
        self._losses: list[float] = []
        self._last: StepDone | None = None

    def __call__(self, event: Event) -> None:
        """Pass an event to the trackers."""
        if isinstance(event, (RunStarted, Resumed)):
            self._state.global_step = event.step
            self._tell("on_train_begin", model=self._model)
        elif isinstance(event, StepDone):
            self._take(event)
        elif isinstance(event, Evaluated):
            prefix = "eval" if event.split == "validation" else event.split
            scores = {f"{prefix}_{k}": v for k, v in event.metrics.items() if v is not None}
            self._line(event.step, event.epoch, scores)
        elif isinstance(event, Saved):
            self._tell("on_save")
        elif isinstance(event, (EpochStarted, RunEnded)):
            self._flush()
            if isinstance(event, RunEnded):
                self._close()

    def _take(self, event: StepDone) -> None:
        self._last = event
        if event.loss is not None:
            self._losses.append(event.loss)
        if event.step % self._every == 0:
            self._flush()

    def _flush(self) -> None:
        """Log the mean loss since the last entry."""
        last, losses = self._last, self._losses
        self._last, self._losses = None, []
        if last is None:
            return
        line: dict[str, float] = {"learning_rate": last.learning_rate}
        line |= {} if last.grad_norm is None else {"grad_norm": last.grad_norm}
        line |= {"loss": sum(losses) / len(losses)} if losses else {}
        self._line(last.step, last.epoch, line)

    def _line(self, step: int, epoch: float, numbers: dict[str, float]) -> None:
        self._state.global_step, self._state.epoch = step, epoch
        self._tell("on_log", logs={**numbers, "epoch": epoch}, model=self._model)

    def _close(self) -> None:
        self._tell("on_train_end", model=self._model)
        for callback in self._callbacks:
            # transformers leaves its W&B run open for a later evaluate(); the next run of this process would go into it
            finish = getattr(getattr(callback, "_wandb", None), "finish", None)
            if finish is not None:
                self._try(callback, finish)

    def _tell(self, event: str, **extra: Any) -> None:
        for callback in list(self._callbacks):
            call = getattr(callback, event, None)
            if call is not None:
                self._try(callback, call, self._arguments, self._state, self._control, **extra)

    def _try(self, callback: Any, call: Callable[..., Any], *given: Any, **extra: Any) -> None:
        try:
            call(*given, **extra)
        except Exception as error:  # the tracker's code and server, not ours
            name = type(callback).__name__.removesuffix("Callback")
            first = next(iter(str(error).splitlines()), "")
            log.warning("%s stopped working and is disabled: %s: %s", name, type(error).__name__, first)
            self._callbacks.remove(callback)


def tracker_arguments(config: RunConfig) -> Any:
    """Return the part of `TrainingArguments` that the callbacks read: folder, name and options."""
    options = to_dict(config)
    return SimpleNamespace(
        output_dir=str(config.run_folder),
        run_name=config.name,
        project=PROJECT,
        load_best_model_at_end=False,
        metric_for_best_model=None,
        hub_private_repo=None,
        trackio_space_id=None,
        trackio_bucket_id=None,
        trackio_static_space_id=False,
        to_dict=lambda: options,
        to_json_string=lambda: json.dumps(options, indent=2, default=str),
    )
