"""Forecast the time, memory and disk space of a run from a few of its real steps.

`tunesmith plan` trains a small part of the run in a temporary folder.
"""

from __future__ import annotations

import resource
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tunesmith.config.options import RunConfig
from tunesmith.events import Evaluated, Event, Saved, StepDone
from tunesmith.pipeline.folds import each_run
from tunesmith.pipeline.inputs import read_run_data
from tunesmith.pipeline.train import PAIR_STAGE, RunEnding, RunObserver, prepare, train_run
from tunesmith.runs.folder import RunDir, RunLock

if TYPE_CHECKING:
    from tunesmith.pipeline.prepare import Prepared

WARM_STEPS, TIMED_STEPS = 3, 10
GPU_WARM_STEPS, GPU_STEPS = 32, 96
"""The first steps are slower (kernels are compiled) and not timed."""
PAIR_STEPS = 30
"""Number of timed pair warm-up steps."""
EVALUATED_EXAMPLES = {"cpu": 256, "cuda": 2_048}


@dataclass(frozen=True)
class Forecast:
    """Seconds by phase, peak memory, and bytes on disk: measured, then scaled to all examples, steps and runs."""

    device: str
    runs: int
    steps: int
    peak_bytes: int
    disk_bytes: int
    start_seconds: float
    once_seconds: float
    step_seconds: float
    evaluation_seconds: float
    finish_seconds: float

    @property
    def seconds(self) -> float:
        """Return the total, from the start of the process to its end."""
        begin = self.start_seconds + self.once_seconds
        return begin + self.step_seconds + self.evaluation_seconds + self.finish_seconds

    def to_json(self) -> dict[str, Any]:
        """Return a plain dict that includes the total."""
        return {**asdict(self), "seconds": self.seconds}


def measure_run(config: RunConfig) -> Forecast:
    """Train a small part of the run and scale the times to all of it; with `folds` and `seeds`, to all runs."""
    all_runs = list(each_run(config)) if config.trains_several else [config]
    config, runs = all_runs[0], len(all_runs)
    began, warmup = time.monotonic(), list[tuple[int, int, float]]()

    def progress(what: str, done: int, total: int) -> None:
        if what == PAIR_STAGE:
            warmup.append((done, total, time.monotonic()))

    data = read_run_data(config, {}, progress)
    from tunesmith.pipeline.prepare import start_runtime  # torch, after the data was read

    with tempfile.TemporaryDirectory(prefix="tunesmith-plan-") as folder:
        observer = RunObserver(progress=progress, start_steps=PAIR_STEPS)
        prepared = prepare(config, start_runtime(config), lambda: data, observer)
        start = time.monotonic() - began + _rest_of_warmup(warmup)
        plan = prepared.plan
        every = range(1, plan.num_steps + 1)
        evaluations = sum(map(plan.evaluate.due, every))
        saves = sum(plan.save.due(step) or plan.evaluate.due(step) for step in every)
        short, part = _shorten(prepared, Path(folder) / "run")
        events: list[Event] = []
        run = RunDir(short.config.run_folder)
        with RunLock(run.lock_file):
            at = time.monotonic()
            train_run(run, short, RunObserver(listeners=[events.append]), RunEnding())
            spent = time.monotonic() - at
        steps = [event.seconds for event in events if isinstance(event, StepDone)]
        evaluated = [e.seconds for e in events if isinstance(e, Evaluated) and e.split == "validation"] or [0.0]
        saved = [event.seconds for event in events if isinstance(event, Saved)] or [0.0]
        warm = min(GPU_WARM_STEPS if prepared.runtime.device.type == "cuda" else WARM_STEPS, len(steps) - 1)
        a_step = float(np.mean(steps[warm:]))
        once = max(sum(steps[:warm]) - warm * a_step, 0.0)
        rest = max(spent - sum(steps) - sum(evaluated), 0.0)
        size = sum(file.stat().st_size for file in run.path.rglob("*") if file.is_file())
        journal = run.journal_file.stat().st_size / len(steps) * plan.num_steps
        weights = sum(p.numel() * p.element_size() for p in prepared.state.model.parameters())
        return Forecast(
            device=str(prepared.runtime.device),
            runs=runs,
            steps=runs * plan.num_steps,
            peak_bytes=_peak_bytes(prepared),
            disk_bytes=int(runs * (size + journal) + (9 * weights if saves else 0)),
            start_seconds=runs * start,
            once_seconds=runs * once,
            step_seconds=runs * (a_step * plan.num_steps + max(saves - 1, 0) * saved[-1]),
            evaluation_seconds=runs * evaluated[-1] / part * evaluations,
            finish_seconds=runs * rest / part,
        )


def _peak_bytes(prepared: Prepared) -> int:
    """Return the peak memory so far: of the GPU if there is one, otherwise of this process."""
    if prepared.runtime.device.type == "cuda":
        import torch

        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _shorten(prepared: Prepared, folder: Path) -> tuple[Prepared, float]:
    """Return the same run with few steps and few evaluated examples, and the share of the tokens that is evaluated."""
    from tunesmith.pipeline.prepare import make_plan

    kind = prepared.runtime.device.type
    tokenized, splits = dict(prepared.tokenized), dict(prepared.bundle.splits)
    whole, part = 1, 1
    for split, found in prepared.tokenized.items():
        if split != "train":
            lengths = found.rows.lengths
            kept = _spread(lengths, EVALUATED_EXAMPLES.get(kind, 256))
            whole, part = whole + int(lengths.sum()), part + int(lengths[kept].sum())
            tokenized[split] = replace(found, rows=found.rows.select(kept), cut=found.cut[kept])
            splits[split] = splits[split].select(kept)
    config = replace(
        prepared.config,
        output_dir=str(folder),
        num_train_epochs=1.0,
        max_steps=-1,
        eval_strategy="epoch" if "validation" in tokenized else "no",
        early_stopping_patience=None,
        report_to=("none",),
    )
    few = _few_batches(prepared, GPU_STEPS if kind == "cuda" else WARM_STEPS + TIMED_STEPS)
    bundle = replace(prepared.bundle, splits=splits)
    short = replace(prepared, config=config, tokenized=tokenized, bundle=bundle, batches=few)
    on_gpu, has_validation = kind == "cuda", "validation" in tokenized
    plan = make_plan(config, few, prepared.suite, has_validation=has_validation, on_gpu=on_gpu)
    return replace(short, plan=plan), part / whole


def _few_batches(prepared: Prepared, steps: int) -> Any:
    """Return batches of some windows of the first epoch: the widest one, for its memory, and an even spread of sizes."""
    order = prepared.batches.order(0)
    lengths = prepared.batches.rows.lengths[order.rows]
    widest = int((np.maximum.reduceat(lengths, order.starts[:-1]) * np.diff(order.starts)).argmax())
    chosen = {widest, *_spread(np.add.reduceat(lengths, order.starts[:-1]), steps).tolist()}
    rows = np.sort(np.concatenate([order.window(at) for at in chosen]))
    return replace(prepared.batches, rows=prepared.batches.rows.select(rows))


def _spread(sizes: npt.NDArray[Any], wanted: int) -> npt.NDArray[np.int64]:
    """Return the positions of this many sizes, evenly spread from the largest to the smallest, in ascending order."""
    order = np.argsort(-sizes, kind="stable")
    return np.sort(order[np.unique(np.linspace(0, len(order) - 1, min(len(order), wanted)).round().astype(np.int64))])


def _rest_of_warmup(steps: list[tuple[int, int, float]]) -> float:
    """Return the seconds of the pair warm-up steps that were skipped. `steps`: (completed steps, all steps, time)."""
    if not steps:
        return 0.0
    (first, _, began), (last, total, ended) = steps[min(WARM_STEPS, len(steps) - 1)], steps[-1]
    return (total - last) * (ended - began) / max(last - first, 1)
