"""What a person sees while a run goes on: progress bars on a terminal, plain lines elsewhere. One more event listener."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from tunesmith.events import (
    EpochStarted,
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
from tunesmith.finetune import Watch


def uses_color(stream: TextIO) -> bool:
    """Whether to colour text: a terminal, and NO_COLOR not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Console:
    """Shows a run on stderr; results go to stdout by the command itself."""

    def __init__(
        self, *, bars: bool | None = None, logging_steps: float | None = None, stream: TextIO | None = None
    ) -> None:
        self.stream = stream or sys.stderr
        self.bars = self.stream.isatty() if bars is None else bars
        self.logging_steps = logging_steps
        self._bar: Any = None
        self._what: str | None = None
        self._every = 1
        self._num_steps = 0
        self._window: list[float] = []
        self._started = time.monotonic()
        self._first_step: int | None = None
        self._last_said: dict[str, int] = {}

    def watch(self) -> Watch:
        """The hooks that `finetune` takes."""
        return Watch(self.say, self.progress, [self.on])

    def say(self, text: str) -> None:
        """One line that stays."""
        self._close_bar()
        print(self._dim(text), file=self.stream, flush=True)

    def progress(self, what: str, done: int, total: int) -> None:
        """How far something is: a bar, or a line at the end and every tenth on the way."""
        if self.bars:
            if self._what != what:
                self._open_bar(what, total, "rows")
            self._bar.update(done - self._bar.n)
            if done >= total:
                self._close_bar()
            return
        tenth = 10 * done // max(total, 1)
        if self._last_said.get(what) != tenth and (done >= total or (total > 50_000 and tenth > 0)):
            self._last_said[what] = tenth
            print(f"{what}: {done:,} of {total:,} rows", file=self.stream, flush=True)

    def counter(self, what: str, total: int) -> Callable[[int], None]:
        """A function to be called with the rows of each batch done."""
        done = 0

        def count(rows: int) -> None:
            nonlocal done
            done += rows
            self.progress(what, min(done, total), total)

        return count

    def on(self, event: Event) -> None:
        """Shows an event."""
        if isinstance(event, RunStarted):
            self._begin(event.num_steps, event.steps_per_epoch)
            self.say(
                f"training: {event.train_rows:,} rows, {event.num_steps:,} steps, {event.num_epochs:g} epochs "
                f"of {event.steps_per_epoch:g} steps"
            )
        elif isinstance(event, Resumed):
            self.say(f"resumed after step {event.step} from {event.checkpoint}")
            for reason in event.skipped:
                self.say(f"skipped: {reason}")
        elif isinstance(event, StepDone):
            self._on_step(event)
        elif isinstance(event, Evaluated):
            self._on_evaluated(event)
        elif isinstance(event, (Note, MicroBatchSplit, NonFinite)):
            self.say(_sentence(event))
        elif isinstance(event, (EpochStarted, Improved, SafePoint)):
            pass

    def plan(self, num_steps: int, steps_per_epoch: float) -> None:
        """Tells the number of steps where no RunStarted comes (a resumed run)."""
        self._begin(num_steps, steps_per_epoch)

    def close(self) -> None:
        """Leaves the terminal clean."""
        self._close_bar()

    def _begin(self, num_steps: int, steps_per_epoch: float) -> None:
        self._num_steps = num_steps
        every = self.logging_steps
        if every is None:
            self._every = max(1, round(steps_per_epoch / 20))
        else:
            self._every = max(1, int(num_steps * every)) if 0 < every < 1 else int(every)

    def _on_step(self, event: StepDone) -> None:
        if self._first_step is None:
            self._first_step, self._started = event.step - 1, time.monotonic()
        if event.loss is not None:
            self._window.append(event.loss)
        shown = event.step % self._every == 0 or event.step == self._num_steps
        mean = sum(self._window) / len(self._window) if self._window else float("nan")
        if self.bars:
            if self._what != "training":
                self._open_bar("training", self._num_steps or None, "step")
            self._bar.update(event.step - self._bar.n)
            if shown:
                self._bar.set_postfix_str(f"loss {mean:.4f}, lr {event.learning_rate:.2e}")
        elif shown:
            rate = (event.step - self._first_step) / max(time.monotonic() - self._started, 1e-9)
            left = (self._num_steps - event.step) / rate if rate else 0
            print(
                f"step {event.step}/{self._num_steps} epoch {event.epoch:.2f} loss {mean:.4f} lr {event.learning_rate:.2e} "
                f"{rate:.2f} step/s {_duration(left)} left",
                file=self.stream,
                flush=True,
            )
        if shown:
            self._window.clear()

    def _on_evaluated(self, event: Evaluated) -> None:
        values = " ".join(f"{k} {v:.4f}" if v is not None else f"{k} -" for k, v in event.metrics.items())
        name = {"train_sample": "train sample"}.get(event.split, event.split)
        text = f"epoch {event.epoch:.2f} {name} (n={event.n}): {values}"
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        else:
            print(text, file=self.stream, flush=True)

    def _open_bar(self, what: str, total: int | None, unit: str) -> None:
        from tqdm import tqdm

        self._close_bar()
        self._what = what
        self._bar = tqdm(total=total, desc=what, unit=unit, file=self.stream, dynamic_ncols=True, leave=True)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._what = None, None

    def _dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if uses_color(self.stream) else text


def _sentence(event: Note | MicroBatchSplit | NonFinite) -> str:
    if isinstance(event, Note):
        return event.text
    if isinstance(event, MicroBatchSplit):
        return (
            f"out of memory at step {event.step}: micro-batches of {event.rows_before} rows now have {event.rows_after}"
        )
    return f"step {event.step}: {event.what} {event.tensor} is not finite; the update was not applied"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
