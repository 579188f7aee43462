"""One rank of the engine tests: runs every case and writes results. Also called in one process, for comparison."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batches, Padding, TokenRows
from tunesmith.errors import ConfigError
from tunesmith.events import Improved, StepDone
from tunesmith.labels import Task
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.distributed import Runtime, make_runtime
from tunesmith.training.evaluation import TaskLoss, predict_rows
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Calendar, Plan, Schedule, epoch_ends_for
from tunesmith.training.state import TrainState

CASES: dict[str, dict[str, Any]] = {
    "plain": {"rows": 48},
    "ragged tail": {"rows": 45},
    "a rank without a row": {"rows": 41},
    "accumulation": {"rows": 64, "accumulation": 2},
    "accumulation and a rank without a row": {"rows": 49, "accumulation": 2},
    "accumulation and a tail of uneven micro-batches": {"rows": 41, "accumulation": 3},
    "class weights, unlabeled rows, smoothing": {"rows": 45, "weights": (0.5, 2.0), "unlabeled": True},
    "all strategies": {"rows": 45, "fast": True},
    "all strategies and accumulation": {"rows": 49, "fast": True, "accumulation": 2},
    "grouped by length": {"rows": 45, "sampling": "group_by_length"},
    "a parameter that is never used": {"rows": 24, "spare": True},
    "early stopping": {"rows": 40, "patience": 1, "epochs": 6, "rate": 3e-2},
}
PER_STEP = 8
"""Rows per micro-step, over all ranks."""


def run_case(
    runtime: Runtime, *, rows: int, accumulation: int = 1, weights: Any = None, unlabeled: bool = False,
    fast: bool = False, sampling: Any = "random", spare: bool = False,
    patience: int | None = None, epochs: int = 2, rate: float = 1e-3, seed: int = 3,
) -> dict[str, Any]:  # fmt: skip
    """Return losses, norms, evaluations and final weights of one small run."""
    lists = token_lists(rows)
    if unlabeled:
        lists["labels"][::7] = [-1] * len(lists["labels"][::7])
    data = TokenRows.from_lists(lists)
    model = tiny_bert()
    if spare:
        model.spare = nn.Linear(3, 3)
        model.config.model_type = "unheard of"
    batches = Batches(
        data, Padding(), PER_STEP // runtime.world, seed=seed, accumulation=accumulation, sampling=sampling,
        rank=runtime.rank, world=runtime.world,
    )  # fmt: skip
    speedups = None
    if fast:
        speedups = apply_speedups(model, data, Padding(), device=runtime.device)
        assert len(speedups.on) == 3, speedups.notes
        batches = replace(batches, collate=speedups.train_collate)
    optimizer = make_optimizer(model, learning_rate=rate, weight_decay=0.1)
    state = TrainState(
        model, optimizer, TaskLoss(Task.BINARY, 2, weights, 0.1 if weights else 0.0), runtime, speedups=speedups
    )
    steps, ends = epoch_ends_for([batches.steps_in_epoch(e) for e in range(epochs)], max_steps=0, num_epochs=epochs)
    plan = Plan(
        steps, ends, Schedule("linear", rate, 2, steps), seed=seed, evaluate=Calendar("steps", 3, last=steps),
        metric="loss", greater_is_better=False, patience=patience,
    )  # fmt: skip
    events = list(train_events(state, batches, plan, evaluate=evaluate))
    weights_now = state.model.state_dict()
    return {
        "losses": [e.loss for e in events if isinstance(e, StepDone)],
        "norms": [e.grad_norm for e in events if isinstance(e, StepDone)],
        "improved": [(e.step, e.value) for e in events if isinstance(e, Improved)],
        "step": state.step,
        "planned": steps,
        "progress": asdict(state.progress),
        "weights": {name: tensor.double().sum().item() for name, tensor in weights_now.items()},
        "exact": {n: tensor.float().numpy().tobytes().hex()[:4096] for n, tensor in weights_now.items()},
    }


def evaluate(state: TrainState) -> dict[str, tuple[dict[str, float | None], int]]:
    """Return the loss over 21 rows."""
    from contextlib import nullcontext

    rows = TokenRows.from_lists(token_lists(21, seed=9))
    with state.vocabulary.whole() if state.vocabulary is not None else nullcontext():
        result = predict_rows(state.model, rows, Padding(), state.runtime, max_rows=4, objective=state.objective)
    return {"validation": ({"loss": result.loss}, 21)}


def evaluate_rows(runtime: Runtime) -> dict[str, Any]:
    """Return the logits of 1, 2, 21 and 22 rows in input order, and how often the model saw each."""
    model = tiny_bert(seed=1)
    out: dict[str, Any] = {}
    for count in (1, 2, 21, 22):
        rows = TokenRows.from_lists(token_lists(count, seed=count))
        seen: list[int] = []
        found = predict_rows(
            model, rows, Padding(), runtime, max_rows=4, objective=TaskLoss(Task.BINARY, 2), on_batch=seen.append
        )
        assert not np.isnan(found.logits).any()
        total = sum(sum(part) for part in runtime.gather_objects(seen))
        out[str(count)] = {"logits": found.logits.tolist(), "loss": found.loss, "seen": total}
    return out


def disagree(runtime: Runtime) -> str:
    """Return the error that ranks with different seeds get."""
    try:
        run_case(runtime, rows=24, seed=3 + runtime.rank)
    except ConfigError as error:
        return error.line()
    return "not refused"


def main() -> None:
    """Run all cases, then write `<out>-<rank>.json`."""
    torch.set_num_threads(1)
    runtime = make_runtime(use_cpu=True, timeout_seconds=600)
    found: dict[str, Any] = {name: run_case(runtime, **options) for name, options in CASES.items()}
    found["again"] = run_case(runtime, **CASES["all strategies and accumulation"])
    found["evaluation"] = evaluate_rows(runtime)
    found["disagree"] = disagree(runtime)
    Path(f"{sys.argv[1]}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
