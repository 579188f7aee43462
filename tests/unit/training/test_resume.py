"""A run that goes on from any safe point repeats the unbroken run bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batches, Padding, TokenRows
from tunesmith.errors import CheckpointError, ConfigError, StoppedBySignal
from tunesmith.events import WALL_CLOCK, Evaluated, Event, Improved, Note, RunStarted, SafePoint, StepDone, to_json
from tunesmith.labels import Task
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.checkpoint import Identity, contiguous, load_weights
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss, predict_rows
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.run_writer import RunWriter, StopRequest
from tunesmith.training.schedule import Calendar, Plan, Schedule, epoch_ends_for
from tunesmith.training.state import TrainState

ROWS = 46


def make_writer(
    folder: Path,
    *,
    accumulation: int = 1,
    sampling: Any = "group_by_length",
    patience: int | None = None,
    fast: bool = False,
    save_every: int = 1,
) -> tuple[RunWriter, Batches]:
    rows = TokenRows.from_lists(token_lists(ROWS))
    batches = Batches(rows, Padding(), 4 // accumulation, seed=3, accumulation=accumulation, sampling=sampling)
    steps, ends = epoch_ends_for(batches.steps_in_epoch, max_steps=0, num_epochs=2)
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


def run(writer: RunWriter, batches: Batches, *, until: int | None = None) -> None:
    validation = TokenRows.from_lists(token_lists(20, seed=9))

    def evaluate(state: TrainState) -> dict[str, tuple[dict[str, float | None], int]]:
        with state.cut.whole() if state.cut is not None else nullcontext():
            result = predict_rows(
                state.model, validation, Padding(), state.runtime, max_rows=8, objective=state.objective
            )
        return {"validation": ({"loss": result.loss}, 20)}

    writer.begin(RunStarted("run", 0, writer.plan.num_steps, 1, 1, ROWS))
    for event in train_events(
        writer.state, batches, writer.plan, evaluate=evaluate, wants_read_back=writer.wants_read_back
    ):
        writer.on(event)
        if isinstance(event, SafePoint) and event.step == until:
            writer.close()
            return
    writer.end("completed")


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
    [{}, {"accumulation": 2}, {"sampling": "random"}, {"patience": 2}, {"fast": True}],
    ids=["grouped", "accumulation", "random", "early-stop", "all-strategies"],
)
def test_resume_repeats_the_same_events_and_weights(tmp_path: Path, options: dict[str, Any]) -> None:
    writer, batches = make_writer(tmp_path / "whole", **options)
    run(writer, batches)
    whole, events = tensors_of(writer.state), lasting(read_journal(writer.run.journal_file))
    last = writer.state.step
    assert last > 10
    for step in range(1, last, 9 if options else 4):
        folder = tmp_path / f"broken-{step}"
        others = [f"checkpoint-{other}" for other in range(1, last + 1) if other != step]
        shutil.copytree(writer.run.path, folder, ignore=shutil.ignore_patterns(*others))
        again, batches = make_writer(folder, **options, save_every=7)
        run(again, batches)
        assert again.state.step == last
        assert lasting(read_journal(again.run.journal_file)) == events
        tensors = tensors_of(again.state)
        assert tensors.keys() == whole.keys()
        assert all(torch.equal(tensors[n], whole[n]) for n in whole), step
        assert again.state.progress == writer.state.progress


def test_resume_with_other_epoch_ends_is_refused(tmp_path: Path) -> None:
    first, batches = make_writer(tmp_path)
    run(first, batches, until=20)
    second, batches = make_writer(tmp_path)
    _, guessed = epoch_ends_for([batches.steps_in_epoch(0) - 1], max_steps=0, num_epochs=3)
    assert guessed != second.plan.epoch_ends
    second.plan = replace(second.plan, epoch_ends=guessed)
    with pytest.raises(ConfigError, match=r"epoch_ends_for\(batches\.steps_in_epoch"):
        run(second, batches)
    second.close()


@pytest.mark.parametrize("changed", [False, True])
def test_resume_with_allowed_change_uses_the_new_settings(tmp_path: Path, changed: bool) -> None:
    first, batches = make_writer(tmp_path)
    first.state.optimizer.param_groups[0]["weight_decay"] = 0.25
    run(first, batches, until=3)
    second, _ = make_writer(tmp_path, accumulation=2 if changed else 1)
    second.allow_changed = changed
    second.begin(RunStarted("run", 0, 1, 1, 1, ROWS))
    second.close()
    assert second.state.optimizer.param_groups[0]["weight_decay"] == (0.1 if changed else 0.25)


def cut_log(writer: RunWriter, steps: int) -> None:
    lines = writer.run.journal_file.read_bytes().splitlines(keepends=True)
    end = next(i for i, line in enumerate(lines) if f'"StepDone", "step": {steps + 1},'.encode() in line)
    writer.run.journal_file.write_bytes(b"".join(lines[:end]))


def test_event_log_shorter_than_its_checkpoint_is_refused(tmp_path: Path) -> None:
    first, batches = make_writer(tmp_path, save_every=4)
    run(first, batches, until=8)
    cut_log(first, 5)
    before = first.run.journal_file.read_bytes()
    second, batches = make_writer(tmp_path, save_every=4)
    with pytest.raises(CheckpointError, match=r"journal\.jsonl: ends after step 5, .* steps 6 to 8 are missing"):
        run(second, batches)
    assert first.run.journal_file.read_bytes() == before


def test_deleted_event_log_is_noted_and_resumed_twice(tmp_path: Path) -> None:
    first, batches = make_writer(tmp_path, save_every=4)
    run(first, batches, until=8)
    first.run.journal_file.unlink()
    for until in (8, 9, None):
        writer, batches = make_writer(tmp_path, save_every=4)
        run(writer, batches, until=until)
    events: list[Any] = read_journal(first.run.journal_file)
    assert any(isinstance(e, Note) and "was gone" in e.text for e in events)
    steps = [e.step for e in events if isinstance(e, StepDone)]
    assert steps == list(range(9, writer.plan.num_steps + 1))


@pytest.mark.parametrize("caught", ["suppressed", "replaced"])
def test_signal_that_a_library_catches_is_raised(caught: str) -> None:
    def finish() -> None:
        with StopRequest() as stop:
            stop.raise_immediately()
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except StoppedBySignal as error:
                if caught == "replaced":
                    raise ValueError("could not determine the shape of an object") from error

    with pytest.raises(StoppedBySignal) as found:
        finish()
    assert found.value.exit_code == 130


def test_signal_after_the_run_is_complete_is_ignored() -> None:
    with StopRequest() as stop:
        stop.raise_immediately()
        stop.run_is_complete()
        os.kill(os.getpid(), signal.SIGINT)
    assert stop.signal == signal.SIGINT


def tied(seed: int, vocabulary: int = 20) -> BertForMaskedLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForMaskedLM(BertConfig(vocab_size=vocabulary, **sizes))


def test_tied_weights_of_save_pretrained_are_loaded(tmp_path: Path) -> None:
    stored, model = tied(0), tied(1)
    stored.save_pretrained(tmp_path)
    load_weights(model, tmp_path)
    expected, got = contiguous(stored.state_dict()), contiguous(model.state_dict())
    assert len(got) > len(list(model.parameters())), "some tensor must have two names"
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    tied(0).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_weights(tied(0, vocabulary=21), tmp_path)
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        load_weights(tied(0), tmp_path / "elsewhere")
