"""The output of a run: progress bars on a terminal, plain lines elsewhere. It listens to events."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections import deque
from typing import Any, TextIO

from tunesmith.cli.main import drop
from tunesmith.events import (
    Evaluated,
    Event,
    Improved,
    MicroBatchSplit,
    NonFinite,
    Note,
    Resumed,
    RunStarted,
    SafePoint,
    StepDone,
)
from tunesmith.pipeline.train import PAIR_STAGE, RunObserver

SLOW_SECONDS = 2.0
"""Without bars, only work that takes longer is reported."""
LINE_SECONDS = 10.0
"""Without bars, minimum time between two lines about progress."""
MAX_EVALUATIONS = 8
"""Evaluations to print; the report contains all of them."""

_BAR = "{desc} {percentage:3.0f}% |{bar}| "
_REST = "  {rate_noinv_fmt}  {remaining} left"
TRAINING_BAR: dict[str, Any] = {
    "unit": " step",
    "bar_format": _BAR + "{n_fmt}/{total_fmt}" + _REST + "{postfix}",
    "smoothing": 0.05,
}
ROWS_BAR: dict[str, Any] = {"unit": " rows", "bar_format": _BAR + "{n:,}/{total:,} rows" + _REST}
BYTES_BAR: dict[str, Any] = {"unit": "B", "unit_scale": True, "bar_format": _BAR + "{n_fmt}/{total_fmt}" + _REST}
DETAILS = (
    *("Text: ", "Label: ", "Task: ", "Recipe: ", "Newly initialized", "Speedups: ", "Order: "),
    "F1, precision and recall refer",
)
"""Messages that begin like this are printed only with -v; the report contains them."""
SHOWN_METRICS = 2
"""Metrics of an evaluation to print, so that the line fits 80 columns."""


def uses_color(stream: TextIO) -> bool:
    """Return whether to color text: only on a terminal, unless NO_COLOR is set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def quiet_libraries() -> None:
    """Silence messages of libraries that a user cannot act on."""
    import logging
    import warnings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    for name in ("transformers", "datasets", "huggingface_hub", "torch", "accelerate", "filelock"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(torch|transformers|datasets|accelerate|huggingface_hub|sklearn)(\.|$)")


class Console:
    """Shows a run on stderr. The command prints the results to stdout."""

    def __init__(
        self,
        *,
        bars: bool | None = None,
        logging_steps: float | None = None,
        verbose: bool = False,
        stream: TextIO | None = None,
    ) -> None:
        self.stream = stream or sys.stderr
        self.bars = self.stream.isatty() and os.environ.get("TERM") != "dumb" if bars is None else bars
        self.logging_steps = logging_steps
        self.verbose = verbose
        self._training: Any = None
        self._bar: Any = None
        self._what: str | None = None
        self._begun = self._said = self._last_line = 0.0
        self._last_evaluation = 0
        self._every = 1
        self._num_steps = 0
        self._losses: list[float] = []
        self._recent: deque[float] = deque(maxlen=50)
        self._evaluations: list[Evaluated] = []
        self._shown: set[str] = set()

    def observer(self) -> RunObserver:
        """Return the observer to pass to `finetune`."""
        return RunObserver(self.say, self.progress, self.plan, [self.on])

    def say(self, text: str) -> None:
        """Print a sentence above the bars, wrapped to the terminal width. Details are printed only if verbose.

        A sentence is printed once: the runs of several folds or trials have the same data and warnings.
        """
        if text in self._shown or (not self.verbose and text.startswith(DETAILS)):
            return
        self._shown.add(text)
        if self.bars:
            width = max(40, shutil.get_terminal_size((80, 24)).columns - 1)
            text = textwrap.fill(text, width, subsequent_indent="  ", break_on_hyphens=False)
        self._write(self._paint(text, "2"))

    def progress(self, what: str, done: int, total: int) -> None:
        """Show a bar that disappears when it is full, or print a line every ten seconds."""
        if self._what != what:
            self._close_bar()
            self._what, self._begun, self._said = what, time.monotonic(), 0.0
            if self.bars:
                kind = BYTES_BAR if what == "reading" else TRAINING_BAR if what == PAIR_STAGE else ROWS_BAR
                self._bar = self._open(what, total, kind, leave=False)
        if self._bar is not None:
            self._bar.total = total
            self._bar.update(done - self._bar.n)
        else:
            self._progress_line(what, done, total)
        if done >= total:
            self._close_bar()

    def _progress_line(self, what: str, done: int, total: int) -> None:
        spent = time.monotonic() - self._begun
        over = done >= total
        if spent < SLOW_SECONDS or (not over and spent - self._said < LINE_SECONDS):
            return
        self._said = spent
        unit = "steps" if what == PAIR_STAGE else "rows"
        count = (
            f"{format_bytes(done)} of {format_bytes(total)}" if what == "reading" else f"{done:,} of {total:,} {unit}"
        )
        left = "" if over or not done else f", {format_duration(spent * (total - done) / done)} left"
        self._write(f"{what}: {count} in {format_duration(spent)}{left}")

    def on(self, event: Event) -> None:
        """Show an event."""
        if isinstance(event, RunStarted):
            self.plan(event.num_steps, event.steps_per_epoch)
            epochs = f"{round(event.num_epochs, 2):g} epoch{'s' * (event.num_epochs != 1)}"
            self.say(f"Training: {event.num_steps:,} steps, {epochs} of {event.train_rows:,} rows.")
        elif isinstance(event, Resumed):
            self.say(f"Resumed: after step {event.step}, from {event.checkpoint}.")
            for reason in event.skipped:
                self.say(f"Skipped: {reason}")
        elif isinstance(event, StepDone):
            self._on_step(event)
        elif isinstance(event, Evaluated):
            self._evaluations.append(event)
        elif isinstance(event, (Improved, SafePoint)):
            self._show_evaluation(best=isinstance(event, Improved))
        elif isinstance(event, (Note, MicroBatchSplit, NonFinite)):
            self._write(_sentence(event))

    def close(self) -> None:
        """Remove the bars."""
        self._close_bar()
        if self._training is not None:
            self._training.close()
            self._training = None

    def plan(self, num_steps: int, steps_per_epoch: float) -> None:
        """Begin a run of this length. A resumed run has no RunStarted event that announces it."""
        self.close()
        self._num_steps, self._last_evaluation = num_steps, 0
        self._losses.clear()
        self._last_line = time.monotonic()
        every = self.logging_steps
        if every is None:
            self._every = max(1, round(num_steps / 10))
        else:
            self._every = max(1, int(num_steps * every)) if 0 < every < 1 else int(every)

    def _on_step(self, event: StepDone) -> None:
        if event.loss is not None:
            self._losses.append(event.loss)
        self._recent.append(event.seconds)
        due = event.step % self._every == 0 or event.step == self._num_steps
        mean = sum(self._losses) / len(self._losses) if self._losses else float("nan")
        if self.bars:
            if self._training is None:
                self._training = self._open("training", self._num_steps or None, TRAINING_BAR, initial=event.step - 1)
            self._training.update(event.step - self._training.n)
            if due or not self._training.postfix:
                self._training.set_postfix_str(f"loss {mean:.4f}", refresh=False)
        elif due and (self.logging_steps is not None or time.monotonic() - self._last_line >= LINE_SECONDS):
            self._last_line = time.monotonic()
            self._write(
                f"step {event.step}/{self._num_steps}  epoch {event.epoch:.2f}  loss {mean:.4f}  "
                f"lr {event.learning_rate:.2e}  {self._rate_and_rest(event.step)}"
            )
        if due:
            self._losses.clear()

    def _rate_and_rest(self, step: int) -> str:
        """Return speed and remaining time, from the last steps without evaluations and saves."""
        spent = sum(self._recent)
        if spent <= 0:
            return ""
        rate = len(self._recent) / spent
        return f"{rate:.1f} step/s  {format_duration((self._num_steps - step) / rate)} left"

    def _show_evaluation(self, *, best: bool) -> None:
        """Print one line per validation set, with the loss on the train sample. Close evaluations are skipped."""
        found, self._evaluations = self._evaluations, []
        if not found:
            return
        step, train = found[0].step, next((event for event in found if event.split == "train_sample"), None)
        close = step - self._last_evaluation < self._num_steps / MAX_EVALUATIONS and step < self._num_steps
        if close and not self.verbose:
            return
        self._last_evaluation = step
        for event in found:
            if event is train:
                continue
            start = f"epoch {event.epoch:.2f}  " + ("" if event.split == "validation" else f"{event.split}: ")
            of_train = "" if train is None else f" (train {_metric(train.metrics.get('loss'))})"
            shown = [(name, value) for name, value in event.metrics.items() if name != "loss"][:SHOWN_METRICS]
            values = "".join(f"  {name} {_metric(value)}" for name, value in shown)
            mark = self._paint("  best", "32") if best and event is found[0] else ""
            self._write(f"{start}loss {_metric(event.metrics.get('loss'))}{of_train}{values}{mark}")

    def _write(self, text: str) -> None:
        """Print a line above the bars."""
        bar = self._bar if self._bar is not None else self._training
        try:
            if bar is not None:
                bar.write(text, file=self.stream)
            else:
                print(text, file=self.stream, flush=True)
        except OSError:  # the reader of stderr has gone, or its disk is full: no reason to end a run
            drop(self.stream)

    def _open(
        self, what: str, total: int | None, style: dict[str, Any], *, leave: bool = True, initial: int = 0
    ) -> Any:
        from tqdm import tqdm

        width = min(100, shutil.get_terminal_size((80, 24)).columns - 1)
        return tqdm(
            total=total, desc=f"{what:<10}", file=self.stream, ncols=width, leave=leave, initial=initial, **style
        )

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._what = None, None

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if uses_color(self.stream) else text


def _metric(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _sentence(event: Note | MicroBatchSplit | NonFinite) -> str:
    if isinstance(event, Note):
        return event.text
    if isinstance(event, MicroBatchSplit):
        sizes = f"{event.rows_after} instead of {event.rows_before} rows"
        return f"Out of memory at step {event.step}: micro-batches now have {sizes}."
    what = event.what if event.what == event.tensor else f"{event.what} of {event.tensor}"
    return f"Step {event.step}: the {what} is NaN or inf, so the update was skipped."


def format_duration(seconds: float) -> str:
    """Format seconds as `12s`, `3m05s` or `2h07m`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def format_bytes(count: float) -> str:
    """Format bytes as `812 B` or `3.4 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
