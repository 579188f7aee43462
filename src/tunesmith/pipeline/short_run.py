"""A whole run of few steps, chosen so that its memory and its speed are those of the real one, and what they forecast."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.config.schema import RunConfig
from tunesmith.data.batches import Batches, Window
from tunesmith.pipeline.drive import train_run
from tunesmith.pipeline.forecast import WARM_READS, Forecast, Pace, RunClock
from tunesmith.pipeline.inputs import RunData
from tunesmith.pipeline.planning import STEPS_A_READ, make_plan, peak_bytes
from tunesmith.pipeline.prepare import Prepared, prepare, start_runtime
from tunesmith.pipeline.start_clock import StartClock
from tunesmith.pipeline.watch import Watch
from tunesmith.runs.folder import RunDir
from tunesmith.runs.lock import RunLock
from tunesmith.training.evaluation import TOKENS_AT_ONCE

TIMED_READS, GPU_READS = 10, 6
"""Of a CPU, after the first ones; of a GPU in all, each of STEPS_A_READ steps."""
EVALUATED_ROWS = {False: 256, True: 2_048}
"""Of a split on a CPU and on a GPU, beside the longest."""


START_STEPS = 30
"""Of a pair start."""


@dataclass(frozen=True)
class ChosenWindows(Batches):
    """Some windows of the first epoch, the widest first."""

    chosen: tuple[int, ...] = ()

    def steps_in_epoch(self, epoch: int) -> int:
        """One a window."""
        return len(self.chosen)

    def windows(self, epoch: int, skip: int = 0) -> Iterator[Window]:
        """The chosen ones in their order."""
        order = self.order(0)
        yield from (self.window(order.window(at)) for at in self.chosen[skip:])


def measure_run(config: RunConfig, data: RunData, watch: Watch, begun: float) -> Forecast:
    """Prepares everything, trains the chosen windows, evaluates some rows, saves and exports, and scales to the whole.

    `begun`: when the process was started, by time.time().
    """
    with tempfile.TemporaryDirectory(prefix="tunesmith-plan-") as folder:
        begin = StartClock()

        def progress(what: str, done: int, total: int) -> None:
            watch.progress(what, done, total)
            begin.note(what, done, total)

        timed_start = replace(watch, progress=progress, start_steps=START_STEPS)
        prepared = prepare(config, start_runtime(config), lambda: data, timed_start)
        start = time.time() - begun + begin.rest_seconds
        has_validation = "validation" in prepared.tokenized
        on_gpu = prepared.runtime.device.type == "cuda"
        plan = make_plan(
            prepared.config, prepared.batches, prepared.suite, has_validation=has_validation, on_gpu=on_gpu
        )
        every = range(1, plan.num_steps + 1)
        evaluations = sum(map(plan.evaluate.due, every))
        saves = sum(plan.save.due(step) or plan.evaluate.due(step) for step in every)
        short, rows = _shorten(prepared, folder, reads=GPU_READS if on_gpu else 0, between=saves > 1)
        clock, run = RunClock(), RunDir(Path(folder) / "run")
        with RunLock(run.lock_file):
            at = time.monotonic()
            train_run(run, short, replace(watch, listeners=[clock.on]))
            spent = time.monotonic() - at
        pace = Pace.of(clock.reads, saved=len(clock.evaluations) > 1)
        timed = clock.evaluations or [0.0]  # the first one also makes kernels
        a_token = timed[-1] / max(rows.evaluated, 1)
        rest = spent - sum(read.seconds for read in clock.reads) - sum(timed)
        size = sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())
        journal = run.journal_file.stat().st_size / max(sum(read.steps for read in clock.reads), 1) * plan.num_steps
        checkpoint = max((sum(f.stat().st_size for f in c.rglob("*")) for c in run.checkpoints()), default=0)
        return Forecast(
            device=str(prepared.runtime.device),
            steps=plan.num_steps,
            peak_bytes=peak_bytes(prepared),
            disk_bytes=int(size + journal + checkpoint),
            start_seconds=start,
            once_seconds=pace.once,
            step_seconds=pace.seconds(plan.num_steps, plan.num_steps * rows.step) + max(saves - 1, 0) * pace.save,
            evaluation_seconds=max(timed[0] - timed[-1], 0.0) + a_token * rows.evaluation * evaluations,
            finish_seconds=max(rest, 0.0) + a_token * rows.left_out,
        )


@dataclass(frozen=True)
class _Tokens:
    """Of a step on average; evaluated in the short run; of a whole evaluation; that the short run does not score at its end."""

    step: float
    evaluated: int
    evaluation: int
    left_out: int


def _shorten(prepared: Prepared, folder: str, *, reads: int, between: bool) -> tuple[Prepared, _Tokens]:
    """The same with few steps and few evaluated rows. `between`: the run evaluates and saves before its last step too."""
    batches = prepared.batches
    chosen = _choose_windows(batches, reads)
    tokenized, splits = dict(prepared.tokenized), dict(prepared.bundle.splits)
    sample = prepared.train_sample()
    extra = 0 if sample is None else int(sample.lengths.sum())
    whole, part = dict[str, int](), dict[str, int]()
    for split, found in prepared.tokenized.items():
        if split == "train":
            continue
        kept = _spread_rows(found.rows.lengths, on_gpu=reads > 0)
        whole[split], part[split] = int(found.rows.lengths.sum()), int(found.rows.lengths[kept].sum())
        tokenized[split] = replace(found, rows=found.rows.select(kept), dataset=found.dataset.select(kept))
        splits[split] = splits[split].select(kept)
    evaluates, twice = "validation" in tokenized, dict[str, Any]()
    if evaluates and between:
        twice = {"eval_steps": len(chosen) - 1, "save_strategy": prepared.config.save_strategy or "epoch"}
    config = replace(
        prepared.config,
        output_dir=str(Path(folder) / "run"),
        num_train_epochs=1.0,
        max_steps=-1,
        eval_strategy="steps" if twice else None if evaluates else "no",
        eval_delay=0,
        early_stopping_patience=None,
        report_to=("none",),
        **twice,
    )
    bundle = replace(prepared.bundle, splits=splits)
    few = ChosenWindows(**{f.name: getattr(batches, f.name) for f in fields(batches)}, chosen=chosen)
    short = replace(prepared, config=config, tokenized=tokenized, bundle=bundle, batches=few)
    step = float(batches.rows.lengths.mean()) * batches.rows_per_step / batches.world
    if batches.token_budget is not None:
        step = float(batches.rows.lengths.sum()) / batches.steps_in_epoch(0)
    evaluated, evaluation = part.get("validation", 0) + extra, whole.get("validation", 0) + extra
    return short, _Tokens(step, evaluated, evaluation, sum(whole.values()) - sum(part.values()))


def _choose_windows(batches: Batches, reads: int) -> tuple[int, ...]:
    """Windows of the first epoch from all sizes, the widest first: what runs out of memory does so at once."""
    order = batches.order(0)
    lengths = batches.rows.lengths[order.rows]
    widest = np.maximum.reduceat(lengths, order.starts[:-1]) * np.diff(order.starts)
    tokens = np.add.reduceat(lengths, order.starts[:-1])
    by_size = np.argsort(-tokens, kind="stable")
    count = reads * STEPS_A_READ if reads else WARM_READS + TIMED_READS
    spread = by_size[np.linspace(0, len(by_size) - 1, count - 1).round().astype(int)]
    return (int(widest.argmax()), *np.random.default_rng(0).permutation(spread).tolist())


def _spread_rows(lengths: Any, *, on_gpu: bool) -> Any:
    """A whole batch of the longest rows, for its memory, and others from all lengths, for the time."""
    order = np.argsort(-lengths, kind="stable")
    longest, wanted = max(TOKENS_AT_ONCE[on_gpu] // int(lengths.max(initial=1)), 64), EVALUATED_ROWS[on_gpu]
    rest = order[longest:]
    places = np.unique(np.linspace(0, max(len(rest) - 1, 0), min(len(rest), wanted)).round().astype(int))
    return np.sort(np.concatenate([order[:longest], rest[places]]))
