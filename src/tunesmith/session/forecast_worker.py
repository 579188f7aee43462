"""The child of `forecast_run`: a whole run of few steps, chosen so that its memory and its speed are those of the real one."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.config.load import load_config
from tunesmith.config.schema import RunConfig
from tunesmith.errors import TunesmithError
from tunesmith.events import Evaluated, Event, StepDone
from tunesmith.run.layout import RunDir
from tunesmith.run.ledger import start_ledger
from tunesmith.run.lock import RunLock
from tunesmith.session.drive import train_run
from tunesmith.session.first_steps import peak_bytes
from tunesmith.session.forecast import ERROR_MARK, Forecast
from tunesmith.session.inputs import read_run_data
from tunesmith.session.planning import make_plan
from tunesmith.session.prepare import Prepared, prepare, start_runtime
from tunesmith.session.watch import Watch
from tunesmith.tokens.batches import Batches, Window
from tunesmith.tokens.token_rows import TokenRows

WARM_STEPS, TIMED_STEPS = 2, 10
EVALUATED_ROWS = 256


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


class _Phases:
    """When what happened."""

    def __init__(self) -> None:
        self.steps: list[StepDone] = []
        self.evaluation = 0.0
        self._last = time.monotonic()

    def on(self, event: Event) -> None:
        now = time.monotonic()
        if isinstance(event, StepDone):
            self.steps.append(event)
        elif isinstance(event, Evaluated) and event.split == "validation":
            self.evaluation = now - self._last
        self._last = now


def measure_run(config: RunConfig, begun: float) -> Forecast:
    """Prepares everything, trains the chosen windows, evaluates some rows, saves and exports, and scales to the whole."""
    with tempfile.TemporaryDirectory(prefix="tunesmith-plan-") as folder:
        data = {"train": None, "validation": None, "test": None}
        prepared = prepare(
            config, start_runtime(config), lambda: read_run_data(config, data, Watch().progress), Watch()
        )
        start = time.time() - begun
        has_validation = "validation" in prepared.tokenized
        on_gpu = prepared.runtime.device.type == "cuda"
        plan = make_plan(config, prepared.batches, prepared.suite, has_validation=has_validation, on_gpu=on_gpu)
        evaluations = sum(plan.evaluate.due(step) for step in range(1, plan.num_steps + 1))
        short, scale = _shorten(prepared, folder)
        clock, run = _Phases(), RunDir(Path(folder) / "run")
        with RunLock(run.lock_file):
            start_ledger(run.path, run.remade_files)
            at = time.monotonic()
            train_run(run, short, Watch(listeners=[clock.on]))
            spent = time.monotonic() - at
        one = clock.evaluation * scale
        steps = _step_seconds(clock.steps, prepared.batches, plan.num_steps)
        rest = spent - sum(step.seconds for step in clock.steps) - clock.evaluation
        size = sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())
        journal = run.journal_file.stat().st_size / max(len(clock.steps), 1) * plan.num_steps
        checkpoint = max((sum(f.stat().st_size for f in c.rglob("*")) for c in run.checkpoints()), default=0)
        return Forecast(
            device=str(prepared.runtime.device),
            steps=plan.num_steps,
            peak_bytes=peak_bytes(prepared),
            disk_bytes=int(size + journal + checkpoint),
            start_seconds=start,
            step_seconds=steps,
            evaluation_seconds=one * evaluations,
            finish_seconds=max(rest, 0.0) + max(one - clock.evaluation, 0.0),
        )


def _shorten(prepared: Prepared, folder: str) -> tuple[Prepared, float]:
    """The same with few steps and few evaluated rows; and by how much an evaluation of all rows takes longer."""
    batches = prepared.batches
    order = batches.order(0)
    lengths = batches.rows.lengths[order.rows]
    widest = np.maximum.reduceat(lengths, order.starts[:-1]) * np.diff(order.starts)
    tokens = np.add.reduceat(lengths, order.starts[:-1])
    by_size = np.argsort(-tokens, kind="stable")
    spread = by_size[np.linspace(0, len(by_size) - 1, WARM_STEPS + TIMED_STEPS - 1).round().astype(int)]
    # The widest comes first: what runs out of memory does so at once. The first steps also prove the speed-ups: not timed.
    chosen = (int(widest.argmax()), *np.random.default_rng(0).permutation(spread).tolist())
    tokenized, splits, whole, part = dict(prepared.tokenized), dict(prepared.bundle.splits), 0, 0
    sample = prepared.train_sample()
    extra = 0 if sample is None else int(sample.lengths.sum())
    for split, found in prepared.tokenized.items():
        if split == "train":
            continue
        kept = _spread_rows(found.rows)
        if split == "validation":
            whole, part = int(found.rows.lengths.sum()), int(found.rows.lengths[kept].sum())
        tokenized[split] = replace(found, rows=found.rows.select(kept), dataset=found.dataset.select(kept))
        splits[split] = splits[split].select(kept)
    config = replace(
        prepared.config,
        output_dir=str(Path(folder) / "run"),
        num_train_epochs=1.0,
        max_steps=-1,
        eval_strategy=None if "validation" in tokenized else "no",
        eval_delay=0,
        early_stopping_patience=None,
        report_to=("none",),
    )
    bundle = replace(prepared.bundle, splits=splits)
    few = ChosenWindows(**{f.name: getattr(batches, f.name) for f in fields(batches)}, chosen=chosen)
    short = replace(prepared, config=config, tokenized=tokenized, bundle=bundle, batches=few)
    return short, (whole + extra) / max(part + extra, 1)


def _spread_rows(rows: TokenRows) -> Any:
    """The longest rows, and others from all lengths."""
    order = np.argsort(-rows.lengths, kind="stable")
    longest, rest = order[: EVALUATED_ROWS // 4], order[EVALUATED_ROWS // 4 :]
    places = np.unique(np.linspace(0, max(len(rest) - 1, 0), min(len(rest), EVALUATED_ROWS)).round().astype(int))
    return np.sort(np.concatenate([longest, rest[places]]))


def _step_seconds(steps: list[StepDone], batches: Batches, count: int) -> float:
    """All steps of the run, by a line through the measured ones: a fixed part and one for each token."""
    timed = steps[WARM_STEPS:] or steps
    tokens = np.array([step.tokens for step in timed], dtype=float)
    seconds = np.array([step.seconds for step in timed])
    mean = float(batches.rows.lengths.mean()) * batches.rows_per_step / batches.world
    slope = fixed = 0.0
    if len(timed) > 2 and tokens.std() > 0:
        slope, fixed = np.polyfit(tokens, seconds, 1)
    if slope <= 0 or fixed < 0:
        slope, fixed = float(seconds.sum() / max(tokens.sum(), 1)), 0.0
    if batches.token_budget is not None:
        mean = float(batches.rows.lengths.sum()) / batches.steps_in_epoch(0)
    first = sum(step.seconds for step in steps[:1])
    return float(first + (count - 1) * (fixed + slope * mean))


def main() -> None:
    """Reads the options from stdin and prints the forecast; an error of ours is one marked line on stderr."""
    out = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is not an answer
    asked = json.load(sys.stdin)
    try:
        found = measure_run(load_config(None, asked["options"]), asked["begun"])
    except TunesmithError as error:
        sys.exit(ERROR_MARK + json.dumps({"text": error.line(), "exit_code": error.exit_code}))
    print(json.dumps(asdict(found)), file=out, flush=True)


if __name__ == "__main__":
    main()
