"""A run that goes on from any safe point repeats the unbroken run bit for bit."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batches, Padding
from tunesmith.data.tokens import TokenRows
from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.events import WALL_CLOCK, Evaluated, Event, Improved, RunStarted, SafePoint, StepDone, to_json
from tunesmith.labels import Task
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir
from tunesmith.runs.manifest import read_manifest
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.checkpoint import Identity
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss, predict_rows
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.run_writer import RunWriter
from tunesmith.training.schedule import Calendar, Plan, Schedule, epoch_ends_for
from tunesmith.training.state import TrainState

ROWS = 46
BUDGET: dict[str, Any] = {"token_budget": 96, "shuffle_window": 2}
"""With this, epochs differ in length."""


def make_keeper(
    folder: Path,
    *,
    accumulation: int = 1,
    sampling: Any = "group_by_length",
    patience: int | None = None,
    fast: bool = False,
    save_every: int = 1,
    **order: Any,
) -> tuple[RunWriter, Batches]:
    rows = TokenRows.from_lists(token_lists(ROWS))
    batches = Batches(rows, Padding(), 4 // accumulation, seed=3, accumulation=accumulation, sampling=sampling, **order)
    epochs = 3 if order else 2
    steps, ends = epoch_ends_for(batches.steps_in_epoch, max_steps=0, num_epochs=epochs)
    plan = Plan(
        steps,
        ends,
        Schedule("linear", 1e-3, 3, steps),
        seed=3,
        evaluate=Calendar("steps", 4, last=steps),
        save=Calendar("steps", save_every),
        metric="loss",
        greater_is_better=False,
        patience=patience,
    )
    model = tiny_bert(dropout=0.1)
    speedups = None
    if fast:
        speedups = apply_speedups(model, rows, Padding(), device=torch.device("cpu"))
        assert len(speedups.on) == 3, speedups.notes
        batches = replace(batches, collate=speedups.train_collate)
    optimizer = make_optimizer(model, learning_rate=1e-3, weight_decay=0.1)
    state = TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True), speedups=speedups)
    identity = Identity("run", "data", {"accumulation": accumulation}, {"names": ["a", "b"]}, {})
    given = {"plan": plan, "describe": lambda tmp: None, "keep_checkpoints": 100}
    return RunWriter(RunDir(folder), state, identity, **given), batches


def run(keeper: RunWriter, batches: Batches, *, until: int | None = None) -> None:
    validation = TokenRows.from_lists(token_lists(20, seed=9))

    def evaluate(state: TrainState) -> dict[str, tuple[dict[str, float | None], int]]:
        with state.cut.whole() if state.cut is not None else nullcontext():
            result = predict_rows(
                state.model, validation, Padding(), state.runtime, max_rows=8, objective=state.objective
            )
        return {"validation": ({"loss": result.loss}, 20)}

    keeper.begin(RunStarted("run", 0, keeper.plan.num_steps, 1, 1, ROWS))
    for event in train_events(
        keeper.state, batches, keeper.plan, evaluate=evaluate, wants_read_back=keeper.wants_read_back
    ):
        keeper.on(event)
        if isinstance(event, SafePoint) and event.step == until:
            keeper.close()
            return
    keeper.end("completed")


def lasting(events: list[Event]) -> list[dict[str, Any]]:
    kept = [to_json(e) for e in events if isinstance(e, (StepDone, Evaluated, Improved))]
    return [{k: v for k, v in e.items() if k not in WALL_CLOCK} for e in kept]


def tensors_of(state: TrainState) -> dict[str, torch.Tensor]:
    out = {f"model.{n}": t.clone() for n, t in state.model.state_dict().items()}
    for index, values in enumerate(state.optimizer.state.values()):
        out |= {f"optimizer.{index}.{k}": v.clone() for k, v in values.items()}
    return out


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulation": 2}, {"sampling": "random"}, {"patience": 2}, {"fast": True}, BUDGET],
    ids=["grouped", "accumulation", "random", "early-stop", "all-strategies", "token-budget"],
)
def test_resume_from_any_safe_point_repeats_the_same_events(tmp_path: Path, options: dict[str, Any]) -> None:
    keeper, batches = make_keeper(tmp_path / "whole", **options)
    run(keeper, batches)
    whole, events = tensors_of(keeper.state), lasting(read_journal(keeper.run.journal_file))
    last = keeper.state.step
    assert last > 10
    for step in range(1, last, 1 if not options else 5):
        folder = tmp_path / f"broken-{step}"
        others = [f"checkpoint-{other}" for other in range(1, last + 1) if other != step]
        shutil.copytree(keeper.run.path, folder, ignore=shutil.ignore_patterns(*others))
        again, batches = make_keeper(folder, **options, save_every=7)
        run(again, batches)
        assert again.state.step == last
        assert lasting(read_journal(again.run.journal_file)) == events
        tensors = tensors_of(again.state)
        assert tensors.keys() == whole.keys()
        assert all(torch.equal(tensors[n], whole[n]) for n in whole), step
        assert again.state.progress == keeper.state.progress


def test_a_plan_whose_epochs_are_not_those_of_the_batches_is_refused_before_it_resumes_at_another_row(
    tmp_path: Path,
) -> None:
    first, batches = make_keeper(tmp_path, **BUDGET)
    run(first, batches, until=20)
    second, batches = make_keeper(tmp_path, **BUDGET)
    _, guessed = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=0, num_epochs=3)
    assert guessed != second.plan.epoch_ends
    second.plan = replace(second.plan, epoch_ends=guessed)
    with pytest.raises(ConfigError, match=r"epoch_ends_for\(batches\.steps_in_epoch"):
        run(second, batches)
    second.close()


def test_a_run_broken_off_in_its_loop_goes_on_exactly(tmp_path: Path) -> None:
    whole, batches = make_keeper(tmp_path / "whole")
    run(whole, batches)
    first, batches = make_keeper(tmp_path / "broken")
    run(first, batches, until=7)
    second, batches = make_keeper(tmp_path / "broken")
    run(second, batches)
    expected, got = tensors_of(whole.state), tensors_of(second.state)
    assert all(torch.equal(expected[n], got[n]) for n in expected)


def test_resume_refuses_another_config_and_names_it(tmp_path: Path) -> None:
    first, batches = make_keeper(tmp_path)
    run(first, batches, until=5)
    second, batches = make_keeper(tmp_path, accumulation=2)
    with pytest.raises(CheckpointError, match="accumulation was 1 and is 2"):
        run(second, batches)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path) -> None:
    first, batches = make_keeper(tmp_path)
    run(first, batches, until=5)
    file = first.run.checkpoint(5) / "optimizer.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    second, batches = make_keeper(tmp_path)
    second.begin(RunStarted("run", 0, 1, 1, 1, ROWS))
    second.close()
    resumed = [e for e in read_journal(second.run.journal_file) if type(e).__name__ == "Resumed"]
    assert second.state.step == 4
    assert "optimizer.safetensors" in resumed[0].skipped[0]  # type: ignore[union-attr]
    assert "sha256" in resumed[0].skipped[0]  # type: ignore[union-attr]


def test_when_every_checkpoint_is_damaged_the_run_is_refused(tmp_path: Path) -> None:
    first, batches = make_keeper(tmp_path)
    run(first, batches, until=3)
    for folder in first.run.checkpoints():
        (folder / "MANIFEST.json").write_text("{")
    second, batches = make_keeper(tmp_path)
    with pytest.raises(CheckpointError, match="no intact checkpoint is left"):
        run(second, batches)


def test_a_missing_piece_is_refused_even_when_the_manifest_agrees(tmp_path: Path) -> None:
    import json

    from tunesmith.runs.manifest import _own_hash

    first, batches = make_keeper(tmp_path)
    run(first, batches, until=1)
    folder = first.run.checkpoint(1)
    (folder / "optimizer.safetensors").unlink()
    manifest = json.loads((folder / "MANIFEST.json").read_text())
    del manifest["files"]["optimizer.safetensors"]
    manifest["self"] = _own_hash(manifest)
    (folder / "MANIFEST.json").write_text(json.dumps(manifest))
    second, batches = make_keeper(tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors"):
        run(second, batches)


@pytest.mark.parametrize("changed", [False, True])
def test_a_run_told_to_go_on_with_another_config_takes_its_settings_and_not_the_checkpoints(
    tmp_path: Path, changed: bool
) -> None:
    first, batches = make_keeper(tmp_path)
    first.state.optimizer.param_groups[0]["weight_decay"] = 0.25
    run(first, batches, until=3)
    second, _ = make_keeper(tmp_path, accumulation=2 if changed else 1)
    second.allow_changed = changed
    second.begin(RunStarted("run", 0, 1, 1, 1, ROWS))
    second.close()
    assert second.state.optimizer.param_groups[0]["weight_decay"] == (0.1 if changed else 0.25)


def test_damaged_best_weights_end_their_use_with_the_name_of_the_file(tmp_path: Path) -> None:
    keeper, batches = make_keeper(tmp_path)
    run(keeper, batches)
    state = keeper.state
    state.progress = replace(state.progress, step=state.step - 1)  # as if the last evaluation were not the best one
    held = read_manifest(keeper.run.best)["step"]
    with pytest.raises(CheckpointError, match=f"holds the weights of step {held}"), keeper.best_weights():
        pass
    state.progress, state.step = replace(state.progress, step=held), held + 1
    with keeper.best_weights() as best:
        assert best == keeper.run.best
    file = keeper.run.best / "model.safetensors"
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="sha256 differs"), keeper.best_weights():
        raise ValueError("what the damage led to")
