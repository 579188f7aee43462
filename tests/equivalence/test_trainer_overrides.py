"""Methods that a script overrides, in a subclass or on the Trainer object, are called as in transformers."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification, set_seed

from sampling import crossed
from trainer_toys import arguments, arrow, tokenizer
from tunesmith import Trainer

TRAINERS = (transformers.Trainer, Trainer)
METHODS = [n for n, v in vars(transformers.Trainer).items() if inspect.isfunction(v) and not n.startswith("__")]


def tiny_bert() -> Any:
    set_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(vocab_size=100, max_position_embeddings=64, **sizes, **dropout))


def make(trainer_class: Any, folder: Path, **options: Any) -> Any:
    """Return a Trainer on rows for which tunesmith would use its speedups."""
    given = {"max_steps": 4, "logging_steps": 2, "learning_rate": 1e-2, "train_sampling_strategy": "sequential"}
    data = {"train_dataset": arrow(40), "eval_dataset": arrow(20, 1), "processing_class": tokenizer()}
    return trainer_class(tiny_bert(), arguments(folder, **given, **options), **data)


def lines(trainer: Any) -> list[dict[str, float]]:
    """Return the log without times."""
    kept = ("loss", "learning_rate", "step", "epoch")
    return [{k: pytest.approx(v, abs=2e-5) for k, v in line.items() if k in kept} for line in trainer.state.log_history]


def counting(trainer_class: Any) -> tuple[Any, Counter[str]]:
    """Return a subclass in which every method counts its calls."""
    calls: Counter[str] = Counter()
    kind = type("Counting", (trainer_class,), {})
    for name in METHODS:
        method = inspect.getattr_static(trainer_class, name, None)
        if not inspect.isfunction(method):
            continue

        def counted(self: Any, *args: Any, _name: str = name, _method: Any = method, **options: Any) -> Any:
            calls[_name] += 1
            return _method(self, *args, **options)

        functools.update_wrapper(counted, method)
        counted.__module__ = __name__
        setattr(kind, name, counted)
    return kind, calls


def test_every_method_called_by_transformers_is_called(tmp_path: Path) -> None:
    counts = []
    for number, trainer_class in enumerate(TRAINERS):
        kind, calls = counting(trainer_class)
        folder = tmp_path / str(number)
        every = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        best = {"load_best_model_at_end": True, "include_num_input_tokens_seen": "all"}
        trainer = make(kind, folder, **every, **best)
        trainer.train()
        trainer.predict(arrow(8, 2))
        counts.append(calls)
    theirs, ours = counts
    assert len(theirs) > 40
    replaced = ("_issue_warnings_after_load",)  # weights that do not fit the model are refused
    assert [n for n in theirs if not ours[n] and n not in replaced] == []
    inside = ("training_step", "compute_loss", "prediction_step", "get_batch_samples", "_clip_grad_norm", "evaluate")
    assert {n: ours[n] for n in inside} == {n: theirs[n] for n in inside}


@pytest.mark.parametrize(
    ("name", "place"),
    crossed(["compute_loss", "training_step", "prediction_step", "floating_point_ops"], ["class", "object"]),
)
def test_overridden_method_sees_batches_of_the_collator(tmp_path: Path, name: str, place: str) -> None:
    seen = []
    for number, trainer_class in enumerate(TRAINERS):
        shapes: list[Any] = []

        def look(
            self: Any, *args: Any, _trainer_class: Any = trainer_class, _shapes: list[Any] = shapes, **options: Any
        ) -> Any:
            inputs = next(a for a in args if hasattr(a, "keys"))
            _shapes.append({k: tuple(v.shape) for k, v in inputs.items()})
            return getattr(_trainer_class, name)(self, *args, **options)

        kind = type("Looking", (trainer_class,), {name: look} if place == "class" else {})
        trainer = make(kind, tmp_path / str(number))
        if place == "object":
            setattr(trainer, name, functools.partial(look, trainer))
        trainer.train()
        trainer.evaluate()
        seen.append((shapes, lines(trainer)))
    assert seen[1][0] == seen[0][0]
    assert seen[1][1] == seen[0][1]


def test_loader_set_on_the_object_can_be_any_iterable(tmp_path: Path) -> None:
    logged = []
    for number, trainer_class in enumerate(TRAINERS):
        trainer = make(trainer_class, tmp_path / str(number))
        one = torch.ones(4, 5, dtype=torch.long)
        labels = torch.tensor([0, 1, 0, 1])
        batches = [{"input_ids": one * (i + 3), "attention_mask": one, "labels": labels} for i in range(4)]
        trainer.get_train_dataloader = lambda found=batches: found
        trainer.train()
        logged.append(lines(trainer))
    assert logged[1] == logged[0]


def test_save_model_set_on_the_object_writes_checkpoints(tmp_path: Path) -> None:
    for number, trainer_class in enumerate(TRAINERS):
        trainer = make(trainer_class, tmp_path / str(number), save_strategy="steps", save_steps=2)
        own = trainer.save_model

        def save(folder: str | None = None, *args: Any, _own: Any = own, **options: Any) -> None:
            _own(folder, *args, **options)
            (Path(folder or "") / "mine.txt").write_text("mine")

        trainer.save_model = save
        trainer.train()
        assert (tmp_path / str(number) / "checkpoint-4" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["compute_loss_context_manager", "autocast_smart_context_manager"])
def test_user_context_wraps_every_forward_pass(tmp_path: Path, name: str) -> None:
    found = []
    for number, trainer_class in enumerate(TRAINERS):
        entered: list[str] = []

        @contextlib.contextmanager
        def own(self: Any, *args: Any, _entered: list[str] = entered, **options: Any) -> Any:
            _entered.append("in")
            yield
            _entered.append("out")

        trainer = make(type("Own", (trainer_class,), {name: own}), tmp_path / str(number), bf16=True)
        dtypes: list[torch.dtype] = []
        trainer.model.classifier.register_forward_hook(lambda *args, seen=dtypes: seen.append(args[2].dtype))
        trainer.train()
        trainer.evaluate()
        found.append((entered, dtypes))
    assert found[1] == found[0]
    assert found[1] == (["in", "out"] * 7, [torch.bfloat16] * 7)
