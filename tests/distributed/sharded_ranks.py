"""One rank of the tests of a sharded engine (FSDP): runs every case and writes what it saw."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conftest import tiny_bert, token_lists
from distributed.engine_ranks import CASES, evaluate, run_case
from tunesmith.data.batches import Batches, Padding
from tunesmith.data.tokens import TokenRows
from tunesmith.errors import ConfigError
from tunesmith.events import NonFinite, StepDone
from tunesmith.labels import Task
from tunesmith.speedups.strategies import choose_strategies
from tunesmith.training.checkpoint import Identity, load_checkpoint, save_checkpoint
from tunesmith.training.evaluate import TaskLoss
from tunesmith.training.loop import train_events
from tunesmith.training.optim import make_optimizer
from tunesmith.training.plan import Plan, Schedule
from tunesmith.training.runtime import Runtime, make_runtime
from tunesmith.training.sharding import Sharding, gathered, is_sharded
from tunesmith.training.state import TrainState

SHARDED_CASES = [
    "ragged tail",
    "a rank without a row",
    "accumulation and a tail of uneven micro-batches",
    "class weights, unlabelled rows, smoothing",
    "a parameter that is never used",
    "early stopping",
]
STEPS, SAVED_AT = 8, 3
IDENTITY = Identity("run", "data", {}, {}, {})


def small_state(runtime: Runtime, *, fused: bool = True, dropout: float = 0.0) -> TrainState:
    """A model on this runtime; made from another seed on each rank, as an unseeded script does it."""
    model = tiny_bert(seed=runtime.rank, dropout=dropout)
    optimizer = make_optimizer(
        model, learning_rate=1e-3, weight_decay=0.1, optim="adamw_torch_fused" if fused else "adamw_torch"
    )
    return TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), runtime)


def small_batches(runtime: Runtime, rows: int = 41) -> Batches:
    """8 rows a step over all ranks."""
    data = TokenRows.from_lists(token_lists(rows))
    return Batches(data, Padding(), 8 // runtime.world, seed=3, rank=runtime.rank, world=runtime.world)


def go_on(state: TrainState, *, until: int = STEPS, max_grad_norm: float = 1.0) -> list[Any]:
    """[loss, gradient norm] of the steps that are left."""
    plan = Plan(until, (6, 12), Schedule("linear", 1e-3, 2, 12), seed=3, max_grad_norm=max_grad_norm)
    events = train_events(state, small_batches(state.runtime), plan)
    return [[e.loss, e.grad_norm] for e in events if isinstance(e, StepDone)]


def weights_of(state: TrainState) -> dict[str, str]:
    """Every weight and moment, byte for byte."""
    found = {name: gathered(tensor) for name, tensor in state.model.state_dict().items()}
    for group in state.optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            found |= {f"{name}.{key}": gathered(value) for key, value in state.optimizer.state[parameter].items()}
    return {name: tensor.numpy().tobytes().hex() for name, tensor in found.items()}


def interrupted(runtime: Runtime, folder: Path, *, dropout: float) -> dict[str, Any]:
    """A run beside the same run that was saved after 3 steps and went on in a fresh state."""
    state = small_state(runtime, dropout=dropout)
    go_on(state, until=SAVED_AT)
    save_checkpoint(folder, state, IDENTITY)
    rest = go_on(state)
    again = small_state(runtime, dropout=dropout)
    load_checkpoint(folder, again)
    return {"rest": rest, "repeated": go_on(again), "same weights": weights_of(again) == weights_of(state)}


def resumed(runtime: Runtime, folder: Path) -> list[Any]:
    """The steps after a checkpoint."""
    state = small_state(runtime)
    load_checkpoint(folder, state)
    assert state.step == SAVED_AT
    return go_on(state)


def name_what_is_not_finite(runtime: Runtime) -> list[Any]:
    """What is said of a weight that one rank spoiled, and of the gradient after it."""
    state = small_state(runtime)
    with torch.no_grad():
        local: Any = dict(state.model.named_parameters())["bert.encoder.layer.1.output.dense.weight"]
        if runtime.rank == 1:
            local.to_local()[0, 0] = float("nan")
    plan = Plan(2, (6,), Schedule("linear", 1e-3, 2, 12), seed=3)
    # one rank is asked for numbers earlier than the other: the search must not begin on one alone
    events = train_events(state, small_batches(runtime), plan, wants_read_back=lambda step: runtime.rank == 0)
    return next([e.what, e.tensor, len(e.rows)] for e in events if isinstance(e, NonFinite))


def in_bf16(folder: Path) -> dict[str, Any]:
    """Steps and an evaluation in bf16, with copies, with parts, and with parts saved and gone on with."""
    copies = make_runtime(use_cpu=True, precision="bf16", timeout_seconds=60)
    parts = make_runtime(use_cpu=True, precision="bf16", sharding=Sharding(), timeout_seconds=60)
    whole_run, dealt_run = small_state(copies), small_state(parts)
    return {
        "copies": go_on(whole_run),
        "parts": go_on(dealt_run),
        "evaluated": [evaluate(state)["validation"][0]["loss"] for state in (whole_run, dealt_run)],
        "kept in": sorted({str(gathered(p).dtype) for p in dealt_run.model.parameters()}),
        "interrupted": interrupted(parts, folder, dropout=0.1),
    }


def main() -> None:
    """All cases, then `<out>-<rank>.json`."""
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    runtime = make_runtime(use_cpu=True, timeout_seconds=60, sharding=Sharding())
    found: dict[str, Any] = {name: run_case(runtime, **CASES[name]) for name in SHARDED_CASES}
    found["interrupted"] = interrupted(runtime, out.parent / "dropout", dropout=0.1)
    found["whole run"] = interrupted(runtime, out.parent / "sharded", dropout=0.0)["rest"]
    found["from alone"] = resumed(runtime, out.parent / "alone")
    found["not finite"] = name_what_is_not_finite(runtime)
    found["clipped"] = go_on(small_state(runtime), max_grad_norm=0.001)
    found["clipped, not fused"] = go_on(small_state(runtime, fused=False), max_grad_norm=0.001)
    found["bf16"] = in_bf16(out.parent / "bf16")
    fresh = small_state(runtime)
    found["evaluated first"] = evaluate(fresh)["validation"][0]["loss"]
    part = next(p for p in fresh.model.parameters() if p.ndim == 2)
    found["part"] = [is_sharded(fresh.model), int(np.prod(part.to_local().shape)), part.numel()]  # type: ignore[operator]
    try:
        choose_strategies(tiny_bert(), None, Padding(), device=runtime.device, sharded=True, pack_rows="on")
    except ConfigError as error:
        found["refused"] = error.line()
    Path(f"{out}-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
