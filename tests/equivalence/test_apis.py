"""The command, the function and two custom loops have bit-identical losses and weights for the same config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith import finetune, load_metric, lr_at, train_events
from tunesmith.cli.main import main
from tunesmith.data.batches import Batches, Padding, TokenRows
from tunesmith.events import StepDone
from tunesmith.labels import Task
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss
from tunesmith.training.optimizer import make_optimizer, set_rate
from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
from tunesmith.training.state import TrainState, seed_step

LABELS = ("bad", "good")
OPTIONS: dict[str, Any] = {
    "learning_rate": 1e-3,
    "num_train_epochs": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "weight_decay": 0.01,
    "warmup_steps": 3,
    "seed": 7,
    "train_sampling_strategy": "random",
    "max_grad_norm": 100.0,
}
"""Clipping has no effect: a manual loop multiplies the gradients, the engine's optimizer divides by the same number."""
PLAIN = {"restrict_vocabulary": "off", "recipe": "hf"}
"""A restricted vocabulary sums the gradient norm in a different order."""


@dataclass(frozen=True)
class Outcome:
    """Result of one API."""

    losses: list[float]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with a head (so that it isn't random) and dropout, and 43 rows, so that the last batch is smaller."""
    root = tmp_path_factory.mktemp("apis")
    save_tiny_bert(root / "model", labels=LABELS)
    write_csv(root / "train.csv", [{"text": t, "label": LABELS[good]} for t, good in sentences(43)])
    return root


def encoded(place: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    rows = sentences(43)
    return {**tokenizer([t for t, _ in rows], truncation=True), "labels": [int(good) for _, good in rows]}


def load(place: Path) -> Any:
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(place / "model")


def parts(place: Path) -> tuple[TrainState, Batches, Plan]:
    data = encoded(place)
    rows = TokenRows.from_lists({k: data[k] for k in ("input_ids", "token_type_ids", "labels")})
    batches = Batches(rows, Padding(), 4, seed=OPTIONS["seed"], accumulation=2)
    steps, ends = epoch_ends_for([batches.steps_in_epoch(0)], max_steps=0, num_epochs=2)
    plan = Plan(steps, ends, Schedule("linear", 1e-3, 3, steps), seed=OPTIONS["seed"], max_grad_norm=100.0)
    model = load(place)
    speedups = apply_speedups(model, rows, Padding(), device=torch.device("cpu"), restrict_vocabulary="off")
    batches = replace(batches, collate=speedups.train_collate)
    optimizer = make_optimizer(model, learning_rate=1e-3, weight_decay=0.01)
    return (
        TrainState(model, optimizer, TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True), speedups=speedups),
        batches,
        plan,
    )


def by_events(place: Path) -> Outcome:
    state, batches, plan = parts(place)
    losses = [e.loss for e in train_events(state, batches, plan) if isinstance(e, StepDone)]
    return Outcome([x for x in losses if x is not None], dict(state.model.state_dict()))


def by_hand(place: Path) -> Outcome:
    """Train with a plain PyTorch loop."""
    state, batches, plan = parts(place)
    model, optimizer, objective = state.model, state.optimizer, state.objective
    losses: list[float] = []
    for epoch in range(2):
        for window in batches.windows(epoch):
            model.train()
            seed_step(plan.seed, len(losses), rank=0)
            factor = 1 / objective.weight(window.labels, len(window.rows))
            total = torch.zeros(())
            for batch in window.micro_batches:
                loss = objective.sum(model, batch)[0] * factor
                loss.backward()
                total += loss.detach()
            set_rate(optimizer, lr_at(len(losses), plan.schedule))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(total.item())
    return Outcome(losses, dict(model.state_dict()))


def of_run(folder: Path) -> Outcome:
    events = read_journal(RunDir(folder).journal_file)
    losses = [e.loss for e in events if isinstance(e, StepDone) and e.loss is not None]
    return Outcome(losses, load_file(RunDir(folder).model / "model.safetensors"))


def by_command(place: Path, folder: Path, **more: str) -> Outcome:
    flags = {**OPTIONS, **PLAIN, "validation_split_fraction": 0, "train_sample_size": 0, **more}
    words = ["train", "--train_file", str(place / "train.csv"), "--model_name_or_path", str(place / "model")]
    words += ["--output_dir", str(folder), "--use_cpu", "--cache_dir", str(place / "cache")]
    assert main([*words, *(w for name, value in flags.items() for w in (f"--{name}", str(value)))]) == 0
    return of_run(folder)


def by_function(place: Path, folder: Path) -> Outcome:
    rows = [{"text": t, "label": LABELS[good]} for t, good in sentences(43)]
    options: dict[str, Any] = {**OPTIONS, **PLAIN, "validation_split_fraction": 0.0, "train_sample_size": 0}
    finetune(
        train_data=rows,
        model_name_or_path=str(place / "model"),
        output_dir=str(folder),
        use_cpu=True,
        cache_dir=str(place / "cache"),
        **options,
    )
    return of_run(folder)


def same(a: Outcome, b: Outcome, *, roundings: int = 0) -> None:
    """Assert equal weights, and losses that differ by at most this many float32 rounding errors."""
    assert a.losses == pytest.approx(b.losses, rel=roundings * 2**-23, abs=0)
    assert a.weights.keys() == b.weights.keys()
    for name, tensor in a.weights.items():
        assert torch.equal(tensor, b.weights[name]), name


@pytest.fixture(scope="module")
def command(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    found = by_command(place, tmp_path_factory.mktemp("command") / "run")
    assert len(found.losses) == 12
    assert found.losses[-1] != found.losses[0]
    return found


def test_event_loop_equals_command(place: Path, command: Outcome) -> None:
    same(by_events(place), command)


def test_plain_pytorch_loop_equals_command(place: Path, command: Outcome) -> None:
    same(by_hand(place), command)


def test_function_equals_command(place: Path, command: Outcome, tmp_path: Path) -> None:
    same(by_function(place, tmp_path / "run"), command)


def test_public_names_resolve() -> None:
    import tunesmith

    for name in dir(tunesmith):
        assert getattr(tunesmith, name) is not None, name
    assert callable(tunesmith.finetune), "even after importing every package"
    assert callable(load_metric("glue", "mrpc").add_batch)
