"""Saving and loading a state, weights of other writers, and signals at the end of a run (see also tests/faults)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batches, Padding, TokenRows
from tunesmith.errors import CheckpointError, ConfigError, StoppedBySignal
from tunesmith.events import StepDone
from tunesmith.labels import Task
from tunesmith.training.checkpoint import Identity, contiguous, load_checkpoint, load_weights, save_checkpoint
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.run_writer import StopRequest
from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
from tunesmith.training.state import TrainState


def make_run(num_epochs: int = 2, *, weight_decay: float = 0.1) -> tuple[TrainState, Batches, Plan]:
    rows = TokenRows.from_lists(token_lists(46))
    batches = Batches(rows, Padding(), 4, seed=3, sampling="group_by_length")
    steps, ends = epoch_ends_for(batches.steps_in_epoch, max_steps=0, num_epochs=num_epochs)
    plan = Plan(steps, ends, Schedule("linear", 1e-3, 3, steps), seed=3)
    model = tiny_bert(dropout=0.1)
    optimizer = make_optimizer(model, learning_rate=1e-3, weight_decay=weight_decay)
    return TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True)), batches, plan


def losses(run: tuple[TrainState, Batches, Plan], *, until: int = 99) -> list[float | None]:
    found: list[float | None] = []
    for event in train_events(*run):
        if isinstance(event, StepDone):
            found.append(event.loss)
            if event.step == until:
                break
    return found


def test_resumed_loop_repeats_the_same_losses_and_weights(tmp_path: Path) -> None:
    whole, first, second = make_run(), make_run(), make_run()
    expected = losses(whole)
    start = losses(first, until=15)
    save_checkpoint(tmp_path / "checkpoint-15", first[0], Identity("run", "data", {}, {}, {}))
    load_checkpoint(tmp_path / "checkpoint-15", second[0])
    assert start + losses(second) == expected
    weights, resumed = whole[0].model.state_dict(), second[0].model.state_dict()
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)


@pytest.mark.parametrize("settings", [True, False])
def test_optimizer_settings_come_from_checkpoint_or_run(tmp_path: Path, settings: bool) -> None:
    first, second = make_run(weight_decay=0.25), make_run()
    losses(first, until=3)
    save_checkpoint(tmp_path / "checkpoint-3", first[0], Identity("run", "data", {}, {}, {}))
    load_checkpoint(tmp_path / "checkpoint-3", second[0], settings=settings)
    assert second[0].optimizer.param_groups[0]["weight_decay"] == (0.25 if settings else 0.1)


def test_resume_with_different_epoch_ends_is_refused() -> None:
    state, batches, plan = make_run()
    _, guessed = epoch_ends_for([batches.steps_in_epoch(0) - 1], max_steps=0, num_epochs=3)
    assert guessed != plan.epoch_ends
    state.step = 20
    with pytest.raises(ConfigError, match=r"epoch_ends_for\(batches\.steps_in_epoch"):
        losses((state, batches, Plan(plan.num_steps, guessed, plan.schedule, seed=3)))


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
