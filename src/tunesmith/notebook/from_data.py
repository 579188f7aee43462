"""`tunesmith.finetune`: a table, texts and labels, a file or a config -> a trained model that predicts; and what a notebook cell
shows while it trains: a bar, the latest numbers and the loss curves, redrawn in place."""

from __future__ import annotations

import sys
import time
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from tunesmith.config.schema import RunConfig
from tunesmith.data.ready_commands import as_called
from tunesmith.errors import ConfigError, DataError, name_the_extra
from tunesmith.events import Evaluated, Event, Improved, RunEnded, StepDone
from tunesmith.pipeline.train import finetune
from tunesmith.pipeline.watch import RunResult, Watch

REDRAW_SECONDS = 0.5
"""A front end that is sent more than this falls behind."""
WIDTH, HEIGHT = 460, 150
TRAIN, VALIDATION = "#3b76c4", "#d1702b"


def finetune_data(
    data: Any = None,
    labels: Any = None,
    *,
    config: RunConfig | None = None,
    train_data: Any = None,
    validation_data: Any = None,
    test_data: Any = None,
    watch: Watch | None = None,
    **options: Any,
) -> RunResult:
    """Trains, evaluates and exports one run; resumes it if its folder holds an unfinished one.

    `data` is a DataFrame, a dict of lists, a Dataset or DatasetDict, a list of dicts, an array of rows, a file name, or a
    RunConfig; with `labels`, it is the texts alone. `validation_data` and `test_data` take the same tables. `options` are
    the options of `tunesmith train` under the same names. Progress is shown in the terminal or the notebook cell;
    `watch=Watch()` shows nothing.
    """
    if isinstance(data, RunConfig):
        data, config = None, data
    elif isinstance(data, (str, Path)):
        data, options["train_file"] = None, data
    if data is not None and train_data is not None:
        raise ConfigError("train_data is given twice", fix="Give the training rows once.")
    rows = train_data if data is None else data
    try:
        if labels is not None:
            from tunesmith.data.in_memory import labelled_table

            rows = labelled_table(rows, labels)
        tables = {"train_data": rows, "validation_data": validation_data, "test_data": test_data}
        return _train(config, watch, **tables, **options)
    except ModuleNotFoundError as error:
        name_the_extra(error, "finetune")
        raise
    except DataError as error:
        fix = None if error.fix is None else as_called(error.fix, in_memory=rows is not None)
        if fix == error.fix:
            raise
        raise DataError(error.problem, where=error.where, fix=fix) from None


def _train(config: RunConfig | None, watch: Watch | None, **given: Any) -> RunResult:
    """The run with its progress shown where the code runs."""
    if watch is not None:
        return finetune(config, watch=watch, **given)
    if in_notebook():
        view = LiveView()
        try:
            return finetune(config, watch=view.watch(), **given)
        finally:
            view.draw(now=True)
    from tunesmith.cli.console import Console

    console = Console()
    try:
        return finetune(config, watch=console.watch(), **given)
    finally:
        console.close()


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class LiveView:
    """A listener of a run that shows one output and updates it."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._what, self._done, self._total = "reading", 0, 0
        self._losses: list[tuple[int, float]] = []
        self._validation: list[tuple[int, float]] = []
        self._latest = ""
        self._drawn = 0.0
        self._steps = 0
        self._display: Any = None
        self._watch = Watch(self.say, self.progress, self.plan, [self.on])

    def watch(self) -> Watch:
        """The hooks that `finetune` takes."""
        return self._watch

    def say(self, text: str) -> None:
        """A sentence about the data or the model."""
        self._lines.append(text)
        self.draw()

    def progress(self, what: str, done: int, total: int) -> None:
        """How far reading, tokenizing or evaluating is."""
        self._what, self._done, self._total = what, done, total
        self.draw()

    def plan(self, num_steps: int, steps_per_epoch: float) -> None:
        """How many steps the run has."""
        self._steps = num_steps

    def on(self, event: Event) -> None:
        """Takes an event in."""
        if isinstance(event, StepDone):
            self._what, self._done, self._total = "training", event.step, self._steps
            if event.loss is not None:
                last = self._losses[-1][1] if self._losses else event.loss
                self._losses.append((event.step, 0.9 * last + 0.1 * event.loss))
        elif isinstance(event, Evaluated) and event.split == "validation":
            loss = event.metrics.get("loss")
            if loss is not None:
                self._validation.append((event.step, loss))
            shown = [f"{self._watch.title(k)} {v:.4f}" for k, v in event.metrics.items() if v is not None][:4]
            self._latest = f"epoch {event.epoch:.2f}: validation {', '.join(shown)}"
        elif isinstance(event, RunEnded):
            self._what, self._done, self._total = f"{event.reason}: step", event.step, self._steps
        self.draw(now=isinstance(event, (Evaluated, Improved, RunEnded)))

    def draw(self, *, now: bool = False) -> None:
        """Shows the present state, at most twice a second."""
        if not now and time.monotonic() - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = time.monotonic()
        ipython: Any = import_module("IPython.display")  # only ever called inside of IPython
        page = ipython.HTML(self.html())
        if self._display is None:
            self._display = ipython.display(page, display_id=True)
        else:
            self._display.update(page)

    def html(self) -> str:
        """The output as it stands."""
        share = 100 * self._done / self._total if self._total else 0
        count = f"{self._done:,} of {self._total:,}" if self._total else ""
        bar = (
            f"<div style='width:{WIDTH}px;max-width:100%;background:#8883;height:8px;border-radius:4px'>"
            f"<div style='width:{share:.1f}%;background:{TRAIN};height:8px;border-radius:4px'></div></div>"
        )
        said = "".join(f"<div>{escape(line)}</div>" for line in self._lines)
        notes = f"<details><summary>{len(self._lines)} notes</summary>{said}</details>" if said else ""
        curve = self._curve() if len(self._losses) > 1 else ""
        return f"<div>{escape(self._what)} {count}{bar}<div>{escape(self._latest)}</div>{curve}{notes}</div>"

    def _curve(self) -> str:
        every = max(1, len(self._losses) // 300)
        train = [*self._losses[::every], self._losses[-1]]
        top = max(v for _, v in (*train, *self._validation)) or 1.0
        right = max(self._steps, train[-1][0])

        def place(point: tuple[int, float]) -> tuple[float, float]:
            return 36 + (WIDTH - 44) * point[0] / right, HEIGHT - 20 - (HEIGHT - 34) * point[1] / top

        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, train))
        marks = "".join(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3' fill='{VALIDATION}'/>" for x, y in map(place, self._validation)
        )
        words = "font-size='11' fill='currentColor'"
        return (
            f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' style='width:{WIDTH}px;max-width:100%'>"
            f"<polyline points='{line}' fill='none' stroke='{TRAIN}' stroke-width='1.5'/>{marks}"
            f"<text x='0' y='14' {words}>{top:.2f}</text><text x='0' y='{HEIGHT - 20}' {words}>0</text>"
            f"<text x='36' y='{HEIGHT - 4}' {words}>loss by step: line = training, dots = validation</text></svg>"
        )
