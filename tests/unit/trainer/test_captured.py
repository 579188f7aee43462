"""Captured steps under the façade: what a replay does not do is done all the same, and who takes part is never left out.

There is no GPU here: a stand-in "captures" by keeping the body of the step it saw then, and runs that again. The real capture
is looked at by tests/gpu/test_trainer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DataCollatorWithPadding, TrainerCallback

from conftest import tiny_bert
from trainer_toys import arguments, arrow, tokenizer
from tunesmith import Trainer
from tunesmith.speedups import apply, cuda_graphs
from tunesmith.speedups.cuda_graphs import StepGraphs
from tunesmith.trainer import stepping


class Kernel:
    """What `attach_kernel` gives, without a kernel: the optimizer of torch reads its rate itself."""

    written = 0

    def write_rates(self) -> None:
        Kernel.written += 1


class Emulated(StepGraphs):
    """Keeps the body of a step instead of a graph."""

    replays = 0

    def run(self, batches: Any, *given: Any) -> Any:
        self.given = batches  # attention on a CPU reads lengths on the host, which a copy of tensors does not bring
        return super().run(batches, *given)

    def _capture(self, batches: Any, body: Any) -> Any:
        fixed = [cuda_graphs._place(batch, self._device) for batch in batches]
        numbers, outer = torch.zeros(3), self

        class Graph:
            def replay(self) -> None:
                outer.replays += 1
                numbers.copy_(body(outer.given, outer._rate, outer._factor))

        return cuda_graphs._Captured(Graph(), fixed, numbers)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[Emulated]:
    """From here on a CPU looks like a GPU that captures steps."""
    made: list[Emulated] = []

    def make(*given: Any, **options: Any) -> Emulated:
        made.append(Emulated(*given, **options))
        return made[-1]

    Kernel.written = 0
    monkeypatch.setattr(stepping, "has_triton", lambda: True)
    monkeypatch.setattr(apply, "_no_graphs", lambda device, world, packed: None)
    monkeypatch.setattr(apply, "StepGraphs", make)
    monkeypatch.setattr(stepping, "attach_kernel", lambda optimizer, layers: Kernel())
    return made


def run(folder: Path, *, callbacks: Any = (), kind: Any = Trainer, model: Any = None, **options: Any) -> Any:
    defaults = {"num_train_epochs": 2, "learning_rate": 1e-3, "logging_steps": 1, "max_grad_norm": 0.5}
    trainer = kind(
        tiny_bert(dropout=0.1) if model is None else model,
        arguments(folder, **{**defaults, **options}),
        train_dataset=arrow(64),
        eval_dataset=arrow(16, seed=1),
        data_collator=DataCollatorWithPadding(tokenizer()),
        callbacks=list(callbacks),
    )
    trainer.train()
    return trainer


class AroundSteps(TrainerCallback):
    """Notes the events around steps, and the rate it sees there."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, *, optimizer: Any = None, **_: Any) -> None:
        self.events.append(("begin", state.global_step, optimizer.param_groups[0]["lr"]))

    def on_step_end(
        self, args: Any, state: Any, control: Any, *, model: Any = None, lr_scheduler: Any = None, **_: Any
    ) -> None:
        self.events.append(("end", state.global_step, lr_scheduler.get_last_lr(), model.training))


def history(trainer: Any) -> list[dict[str, Any]]:
    timed = ("runtime", "per_second")
    return [{k: v for k, v in line.items() if not k.endswith(timed)} for line in trainer.state.log_history]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_replayed_run_logs_counts_and_learns_what_the_same_run_uncaptured_does(
    tmp_path: Path, captured: list[Emulated], accumulation: int
) -> None:
    class Uncaptured(Trainer):
        def _make_engine(self) -> Any:
            engine = super()._make_engine()
            assert engine.graphs is not None
            engine.graphs.off = True
            return engine

    options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "eval_strategy": "epoch", "warmup_steps": 3}
    heard = [AroundSteps(), AroundSteps()]
    one = run(tmp_path / "1", callbacks=[heard[0]], **options)
    other = run(tmp_path / "2", callbacks=[heard[1]], kind=Uncaptured, **options)
    assert captured[0].replays > 4
    assert Kernel.written == captured[0].replays
    assert captured[1].replays == 0
    assert history(one) == history(other)
    assert one.state.total_flos == other.state.total_flos > 0
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert heard[0].events == heard[1].events


class Hears(TrainerCallback):
    """Does something at one event of a step."""

    def __init__(self) -> None:
        self.gradients: list[bool] = []

    def note(self, model: Any) -> None:
        self.gradients.append(all(p.grad is not None for p in model.parameters()))


class BeforeUpdate(Hears):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        self.note(model)


class AfterUpdate(Hears):
    def on_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        self.note(model)


@pytest.mark.parametrize("listener", [BeforeUpdate, AfterUpdate])
def test_who_looks_at_gradients_sees_those_of_every_step(
    tmp_path: Path, captured: list[Emulated], listener: Any
) -> None:
    heard = listener()
    trainer = run(tmp_path, callbacks=[heard])
    assert heard.gradients == [True] * trainer.state.global_step
    assert captured[0].replays == 0


class Meddles(TrainerCallback):
    """Does something to model or optimizer in the middle of a run."""

    def __init__(self, what: str) -> None:
        self.what, self.calls = what, 0

    def hook(self, *_: Any) -> None:
        self.calls += 1

    def on_step_end(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        weight = model.classifier.weight
        if state.global_step != 8:
            return
        if self.what == "hook on a module":
            model.bert.embeddings.register_forward_hook(self.hook)
        elif self.what == "hook on a parameter":
            weight.register_hook(self.hook)
        elif self.what == "hook on the optimizer":
            optimizer.register_step_pre_hook(self.hook)
        elif self.what == "weights elsewhere":
            weight.data = weight.data.clone() * 2
        elif self.what == "another parameter":
            model.classifier.bias = nn.Parameter(torch.ones(2))
        elif self.what == "frozen":
            weight.requires_grad_(False)
        elif self.what == "decay":
            optimizer.param_groups[0]["weight_decay"] = 0.3
        else:
            model.bert.embeddings.dropout.p = 0.5


@pytest.mark.parametrize("what", ["hook on a module", "hook on a parameter", "hook on the optimizer"])
def test_a_hook_set_in_the_middle_of_a_run_is_called_in_every_step_after_it(
    tmp_path: Path, captured: list[Emulated], what: str
) -> None:
    meddler = Meddles(what)
    run(tmp_path, callbacks=[meddler], max_steps=16)
    assert 0 < captured[0].replays < 8
    assert meddler.calls == 8


@pytest.mark.parametrize("what", ["weights elsewhere", "another parameter", "frozen", "decay", "dropout"])
def test_what_was_captured_before_the_model_changed_is_not_replayed(
    tmp_path: Path, captured: list[Emulated], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[int] = []
    close = Emulated.close
    monkeypatch.setattr(Emulated, "close", lambda self: (known.append(len(self)), close(self))[-1])
    run(tmp_path, callbacks=[Meddles(what)], max_steps=24)
    assert len(known) == 3, "at the first step, after the change, at the end"
    assert known[1] > 0
    assert known[2] > 0, "captured anew"
    assert len(captured[0]) == 0, "nothing outlives the run"


def test_another_optimizer_runs_uncaptured(tmp_path: Path, captured: list[Emulated]) -> None:
    run(tmp_path / "1", optim="sgd", max_steps=6)
    assert captured == []


SIZES: dict[str, Any] = {
    "vocab_size": 200, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


def unknown(kind: str, **sizes: Any) -> Any:
    """An encoder that no speed-up knows."""
    transformers.set_seed(0)
    config = transformers.AutoConfig.for_model(kind, num_labels=2, initializer_range=0.3, **SIZES, **sizes)
    return transformers.AutoModelForSequenceClassification.from_config(config)


class Unaided(Trainer):
    use_speed_ups = False


@pytest.mark.parametrize(("kind", "heads", "taken_off"), [("roformer", 2, set()), ("convbert", 4, {"length_buckets"})])
def test_steps_of_an_unknown_encoder_are_captured_padded_and_those_of_the_plain_run(
    tmp_path: Path, captured: list[Emulated], kind: str, heads: int, taken_off: set[str]
) -> None:
    """ConvBERT mixes padding into its neighbours: batches wider than their longest row would give other losses."""
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
    sizes = {"num_attention_heads": heads, "embedding_size": 16, **quiet}
    ours = run(tmp_path / "1", model=unknown(kind, **sizes), num_train_epochs=4)
    plain = run(tmp_path / "2", model=unknown(kind, **sizes), num_train_epochs=4, kind=Unaided)
    assert captured[0].replays > 4
    assert ours._engine.speedups.dropped == taken_off
    losses = [[line["loss"] for line in t.state.log_history if "loss" in line] for t in (ours, plain)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
