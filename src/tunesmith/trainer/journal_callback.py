"""A callback that lets plain `transformers.Trainer` write our journal, so that its runs get curves, diagnosis and report.

    trainer.add_callback(JournalCallback())      # then: tunesmith report OUTPUT_DIR

transformers logs the mean loss since the last log: set `logging_steps=1` for raw values. It also hides a NaN loss (as the mean
of the other steps, or 0.0); the gradient norm gives it away, so such a step becomes a gap here.
"""

from __future__ import annotations

import math
import time
import uuid
from typing import Any

from transformers import TrainerCallback

from tunesmith.events import Evaluated, Event, Improved, NonFinite, Resumed, RunEnded, RunStarted, StepDone
from tunesmith.runs.event_log import Journal, require_journal, truncate_journal
from tunesmith.runs.folder import RunDir
from tunesmith.runs.writing import make_folder

_NOT_METRICS = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time")


class JournalCallback(TrainerCallback):  # type: ignore[misc]  # of a library without types
    """Appends to journal.jsonl in `output_dir`. A run resumed by the Trainer continues the same journal."""

    def __init__(self) -> None:
        self._journal: Journal | None = None
        self._last: tuple[int, float] = (0, 0.0)
        self._best: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Opens the journal; a fresh run starts a fresh one."""
        if not state.is_world_process_zero:
            return
        path = RunDir(args.output_dir).journal_file
        require_journal(path)
        if state.global_step:
            truncate_journal(path, state.global_step)
        else:
            path.unlink(missing_ok=True)
            make_folder(path.parent)
        self._journal = Journal(path)
        epochs = float(state.num_train_epochs)
        loader = kwargs.get("train_dataloader")
        rows = len(loader.dataset) if loader is not None and hasattr(loader.dataset, "__len__") else 0
        per_epoch = state.max_steps / epochs if epochs else 0.0
        self._write(
            RunStarted(uuid.uuid4().hex, state.global_step, state.max_steps, per_epoch, epochs, rows, time.time())
        )
        if state.global_step:
            self._write(Resumed(state.global_step, f"checkpoint-{state.global_step}", (), time.time()))
        self._last, self._best = (state.global_step, time.perf_counter()), state.best_metric

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """One StepDone per log with a training loss."""
        if not logs or "loss" not in logs:
            return
        step, now = state.global_step, time.perf_counter()
        steps, seconds = max(1, step - self._last[0]), now - self._last[1]
        self._last = (step, now)
        loss, norm = _number(logs["loss"]), _number(logs.get("grad_norm"))
        lost = loss is None or ("grad_norm" in logs and norm is None)
        rows = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        rate = _number(logs.get("learning_rate")) or 0.0
        epoch = float(logs.get("epoch", state.epoch or 0.0))
        self._write(StepDone(step, epoch, None if lost else loss, norm, rate, rows, 0, 0, seconds / steps))
        if lost:
            self._write(NonFinite(step, "loss or gradient", "", ()))

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """One Evaluated per evaluation, and Improved when the tracked metric is the best so far."""
        found = {k.removeprefix("eval_"): v for k, v in (metrics or {}).items() if k.startswith("eval_")}
        scores = {k: _number(v) for k, v in found.items() if k not in _NOT_METRICS and isinstance(v, (int, float))}
        if not scores:
            return
        loader = kwargs.get("eval_dataloader")
        rows = len(loader.dataset) if loader is not None and hasattr(loader.dataset, "__len__") else 0
        seconds = float(found.get("runtime", 0.0))
        self._write(Evaluated(state.global_step, float(state.epoch or 0.0), "validation", scores, rows, seconds))
        self._track(args, state.global_step, scores)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Closes the journal."""
        whole = state.global_step >= state.max_steps
        self._write(RunEnded(state.global_step, "completed" if whole else "early_stopping", time.time()))
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _track(self, args: Any, step: int, scores: dict[str, float | None]) -> None:
        name = (args.metric_for_best_model or "").removeprefix("eval_")
        value = scores.get(name)
        if value is None:
            return
        sign = 1 if args.greater_is_better else -1
        if self._best is None or sign * value > sign * self._best:
            self._best = value
            self._write(Improved(step, name, value))

    def _write(self, event: Event) -> None:
        if self._journal is not None:
            self._journal.append(event)


def _number(value: Any) -> float | None:
    """A finite float, or None. Accepts tensors and the strings newer versions log."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
