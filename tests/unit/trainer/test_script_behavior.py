"""Behavior that scripts rely on: counters, best checkpoints and callback state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import DataCollatorWithPadding, TrainerCallback, TrainerState
from transformers.optimization import Adafactor, AdafactorSchedule
from transformers.trainer_callback import ExportableState

from conftest import tiny_bert
from trainer_toys import (
    Accuracy,
    PretrainedRegression,
    Regression,
    RegressionConfig,
    RegressionDataset,
    arguments,
    arrow,
    tokenizer,
)
from tunesmith import Trainer
from tunesmith.events import StepDone
from tunesmith.runs.event_log import read_journal


def make(folder: Path, *, model: Any = None, data: Any = None, kind: Any = Trainer, **options: Any) -> Any:
    own = {
        n: options.pop(n) for n in ("callbacks", "optimizers", "compute_metrics", "processing_class") if n in options
    }
    return kind(
        PretrainedRegression(RegressionConfig()) if model is None else model,
        arguments(folder, **options),
        train_dataset=RegressionDataset() if data is None else data,
        eval_dataset=RegressionDataset(length=20, seed=1),
        **{"compute_metrics": Accuracy(), **own},
    )


class Scripted(Trainer):
    """Trainer whose evaluations return scripted accuracies."""

    def _evaluate(self, *given: Any, **more: Any) -> dict[str, float]:
        left: list[float] = self.args.scripted
        return {"eval_accuracy": left.pop(0) if len(left) > 1 else left[0]}


@pytest.mark.parametrize(
    ("options", "values", "best", "at", "kept"),
    [
        ({"eval_strategy": "no", "save_steps": 12}, [0.1], None, None, [12, 24]),
        ({"eval_strategy": "no", "save_steps": 1, "save_total_limit": 1}, [0.1], None, None, [24]),
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, [0.5, 0.4, 0.3], 0.5, 8, [8, 16, 24]),
        ({"eval_strategy": "epoch", "save_steps": 4}, [0.4, 0.5, 0.3], 0.5, 16, [4, 8, 12, 16, 20, 24]),
        ({"eval_steps": 1, "save_steps": 1, "save_total_limit": 1}, [0.9, 0.8], 0.9, 1, [1]),
        ({"eval_strategy": "epoch", "save_strategy": "best"}, [0.6, 0.65, 0.64], 0.65, 16, [8, 16]),
    ],
)
def test_best_checkpoint_is_saved_at_best_evaluation(
    tmp_path: Path, options: Any, values: list[float], best: float | None, at: int | None, kept: list[int]
) -> None:
    chosen = {"eval_strategy": "steps", "save_strategy": "steps", "metric_for_best_model": "accuracy", **options}
    trainer = make(tmp_path, kind=Scripted, greater_is_better=True, **chosen)
    trainer.args.scripted = list(values)
    trainer.train()
    state = trainer.state
    assert (state.best_metric, state.best_global_step) == (best, at)
    assert state.best_model_checkpoint == (None if at is None else str(tmp_path / f"checkpoint-{at}"))
    assert sorted(int(p.name[11:]) for p in tmp_path.glob("checkpoint-*")) == kept


def test_unsaved_best_evaluation_has_no_checkpoint(tmp_path: Path) -> None:
    options = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 2}
    trainer = make(tmp_path, kind=Scripted, metric_for_best_model="accuracy", greater_is_better=True, **options)
    trainer.args.scripted = [0.9, 0.8]
    trainer.train()
    assert (trainer.state.best_global_step, trainer.state.best_model_checkpoint) == (3, None)


class Counter(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Callback that counts steps and has a name."""

    def __init__(self, name: str = "unnamed") -> None:
        self.name, self.count = name, 0

    def on_step_end(self, *given: Any, **more: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"name": self.name}, "attributes": {"count": self.count}}


@pytest.mark.parametrize("restore", [True, False])
def test_two_callbacks_of_one_class_keep_separate_states(tmp_path: Path, restore: bool) -> None:
    options = {"save_strategy": "steps", "save_steps": 2}
    make(tmp_path, callbacks=[Counter("one"), Counter("two")], max_steps=2, **options).train()
    stored = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["stateful_callbacks"]["Counter"]
    assert stored == [{"args": {"name": n}, "attributes": {"count": 2}} for n in ("one", "two")]
    fresh = [Counter(), Counter()]
    trainer = make(tmp_path, callbacks=fresh, max_steps=3, restore_callback_states_from_checkpoint=restore, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    used = [c for c in trainer.callback_handler.callbacks if isinstance(c, Counter)]
    assert [c.name for c in used] == (["one", "two"] if restore else ["unnamed"] * 2)
    assert [c.count for c in used] == [3, 3]


def test_control_state_is_stored_in_the_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    trainer = make(tmp_path, max_steps=2, restore_callback_states_from_checkpoint=True)
    trainer.state = TrainerState.load_from_json(str(tmp_path / "checkpoint-2" / "trainer_state.json"))
    trainer._load_callback_state()
    assert trainer.control.should_training_stop


def test_optimizer_without_learning_rate_trains_and_saves(tmp_path: Path) -> None:
    model = Regression()
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
    pair = (optimizer, AdafactorSchedule(optimizer))
    trainer = make(tmp_path, model=model, optimizers=pair, logging_steps=8, save_strategy="epoch")
    trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] > 0
    assert [model.a.item(), model.b.item()] != [0.0, 0.0]
    assert (tmp_path / "checkpoint-24" / "MANIFEST.json").is_file()


def test_resume_remembers_reduced_batch_size(tmp_path: Path) -> None:
    def run_out(s: Any, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.train_batch_size >= 16:
            raise RuntimeError("CUDA out of memory.")

    callback = type("RunOut", (TrainerCallback,), {"on_step_end": run_out})()
    options = {"per_device_train_batch_size": 16, "auto_find_batch_size": True, "save_strategy": "steps"}
    data = RegressionDataset(length=128)
    make(tmp_path, data=data, callbacks=[callback], max_steps=2, save_steps=1, **options).train()
    trainer = make(tmp_path, data=data, max_steps=2, save_steps=1, **options)
    assert trainer._train_batch_size == 16
    trainer.train(resume_from_checkpoint=True)
    assert (trainer._train_batch_size, trainer.state.global_step) == (14, 2)


def test_training_loss_after_resume_averages_new_steps(tmp_path: Path) -> None:
    options = {"save_strategy": "steps", "save_steps": 5, "logging_steps": 9}
    make(tmp_path, **options).train()
    losses = [e.loss for e in read_journal(tmp_path / "journal.jsonl") if isinstance(e, StepDone)]
    later = make(tmp_path, **options).train(resume_from_checkpoint=str(tmp_path / "checkpoint-15"))
    assert later.training_loss == pytest.approx(np.mean(losses[15:]), rel=1e-6)
    assert make(tmp_path, **options).train(resume_from_checkpoint=True).training_loss == 0.0, "nothing was left to do"


def test_rows_sorted_by_length_are_returned_in_order(tmp_path: Path) -> None:
    data, found = arrow(37), []
    for size in (8, 1):
        args = arguments(tmp_path, train_sampling_strategy="group_by_length", per_device_eval_batch_size=size)
        collator = DataCollatorWithPadding(tokenizer())
        found.append(Trainer(tiny_bert(), args, data_collator=collator, eval_dataset=data).predict(data))
    assert found[0].label_ids.tolist() == data["label"]
    assert np.allclose(found[0].predictions, found[1].predictions, atol=1e-5)
