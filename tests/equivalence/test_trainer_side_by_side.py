"""tunesmith's Trainer and transformers' have equal state, logs, folders and results with the same options and rows."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import EarlyStoppingCallback, TrainerCallback

from sampling import crossed
from trainer_toys import (
    Accuracy,
    PretrainedRegression,
    Recorder,
    RegressionConfig,
    RegressionDataset,
    Stream,
    arguments,
)
from tunesmith import Trainer

TIMES = ("runtime", "per_second", "preparation_time")
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "the first step is logged": {"logging_first_step": True, "logging_steps": 7},
    "one log line per epoch": {"logging_strategy": "epoch", "save_strategy": "epoch"},
    "intervals as fractions of the run": {
        "logging_steps": 0.2,
        "eval_strategy": "steps",
        "eval_steps": 0.25,
        "save_steps": 0.5,
    },
    "an evaluation before the first step": {"eval_on_start": True, "eval_strategy": "epoch"},
    "late evaluations by epoch": {"eval_strategy": "epoch", "eval_delay": 1.5},
    "separate intervals": {"eval_strategy": "steps", "eval_steps": 5, "logging_steps": 3, "save_steps": 10},
    "steps that end within an epoch": {"max_steps": 11, "logging_steps": 4, "eval_strategy": "epoch"},
    "more accumulation than batches": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 5},
    "the best are saved": {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "best",
        "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
    },
    "only the best": {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "metric_for_best_model": "eval_accuracy",
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    },
    "weights only": {"save_only_model": True, "save_steps": 5},
    "two checkpoints": {"save_steps": 3, "save_total_limit": 2},
    "rows dropped": {"dataloader_drop_last": True, "per_device_train_batch_size": 7, "logging_steps": 1},
    "tokens counted": {"include_num_input_tokens_seen": "all", "logging_steps": 5},
    "no clipping": {"max_grad_norm": 0.0, "logging_steps": 3},
    "fp16, which a CPU doesn't have": {"fp16": True, "logging_steps": 3},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9", "logging_steps": 4},
    "adafactor": {"optim": "adafactor", "logging_steps": 4},
    "greedy scheduler": {
        "lr_scheduler_type": "greedy",
        "lr_scheduler_kwargs": {"patience": 1, "factor": 0.5},
        "eval_strategy": "epoch",
        "metric_for_best_model": "eval_loss",
        "num_train_epochs": 10,
        "logging_steps": 8,
    },
    "reduce on plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "eval_strategy": "epoch",
        "metric_for_best_model": "eval_loss",
        "logging_steps": 4,
    },
}


def make(kind: Any, folder: Path, *, model: Any = None, data: Any = None, held: Any = None, **options: Any) -> Any:
    """Return a Trainer of either kind on toy rows in a fixed order."""
    callbacks = [*options.pop("callbacks", []), Recorder()]
    defaults = {"train_sampling_strategy": "sequential", "save_strategy": "steps"}
    trainer = kind(
        PretrainedRegression(RegressionConfig()) if model is None else model,
        arguments(folder, **{**defaults, **options}),
        train_dataset=RegressionDataset() if data is None else data,
        eval_dataset=RegressionDataset(length=20, seed=1) if held is None else held,
        compute_metrics=Accuracy(),
        callbacks=callbacks,
    )
    trainer.model_accepts_loss_kwargs = False  # the toy model accepts any keyword and uses none
    return trainer


def plain(value: Any, folder: Path) -> Any:
    """Return a value without times and folder names."""
    if isinstance(value, dict):
        return {k: plain(v, folder) for k, v in value.items() if not any(t in str(k) for t in TIMES)}
    if isinstance(value, (list, tuple)):
        return [plain(v, folder) for v in value]
    return value.replace(str(folder), "FOLDER") if isinstance(value, str) else value


def seen(trainer: Any, folder: Path, output: Any = None) -> dict[str, Any]:
    """Return the results of a run."""
    return {
        "state": plain(dataclasses.asdict(trainer.state), folder),
        "output": plain(output._asdict(), folder) if output is not None else None,
        "events": next(c.events for c in trainer.callback_handler.callbacks if isinstance(c, Recorder)),
        "folders": sorted(p.name for p in folder.glob("checkpoint-*")),
        "weights": [p.item() for p in trainer.model.parameters()],
    }


def same(theirs: Any, ours: Any, path: str = "") -> None:
    """Assert that two structures are equal, up to rounding; errors contain the path."""
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), path
        for key, value in theirs.items():
            same(value, ours[key], f"{path}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), path
        for index, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            same(a, b, f"{path}[{index}]")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6), path
    else:
        assert ours == theirs, path


def side_by_side(tmp_path: Path, run: Any) -> Any:
    """Run both kinds, compare them, and return the results."""
    found = [run(kind, tmp_path / name) for name, kind in (("a", transformers.Trainer), ("b", Trainer))]
    same(*found)
    return found[1]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_state_logs_checkpoints_and_results_match_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    def run(kind: Any, folder: Path) -> Any:
        trainer = make(kind, folder, **options)
        return seen(trainer, folder, trainer.train())

    found = side_by_side(tmp_path, run)
    assert found["state"]["global_step"] == found["output"]["global_step"] > 2
    assert found["weights"] != [0.0, 0.0]


def test_stream_and_several_evaluation_sets_match_transformers(tmp_path: Path) -> None:
    held = {"near": RegressionDataset(length=9), "far": RegressionDataset(length=11, seed=3)}

    def run(kind: Any, folder: Path) -> Any:
        stream = make(kind, folder / "1", data=Stream(20), held=Stream(13), max_steps=7, logging_steps=2)
        stream.train()
        several = make(
            kind,
            folder / "2",
            held=held,
            eval_strategy="epoch",
            save_strategy="epoch",
            metric_for_best_model="eval_far_loss",
            greater_is_better=False,
            load_best_model_at_end=True,
        )
        several.train()
        more = [several.evaluate(), several.evaluate({"new": RegressionDataset(length=5)})]
        more.append(several.evaluate(RegressionDataset(length=5), metric_key_prefix="held"))
        return [
            seen(stream, folder / "1"),
            seen(several, folder / "2"),
            plain([stream.evaluate(), *more], folder),
        ]

    found = side_by_side(tmp_path, run)
    assert "held_accuracy" in found[2][-1]


def test_early_stopping_matches_transformers(tmp_path: Path) -> None:
    def run(kind: Any, folder: Path) -> Any:
        options = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 20}
        options |= {"metric_for_best_model": "accuracy", "load_best_model_at_end": True}
        stop = EarlyStoppingCallback(1, 1e-4)
        trainer = make(kind, folder, callbacks=[stop], per_device_train_batch_size=16, **options)
        return seen(trainer, folder, trainer.train())

    assert side_by_side(tmp_path, run)["state"]["global_step"] < 80


class Asking(TrainerCallback):  # type: ignore[misc]
    """Callback that sets control flags at unusual times."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log = state.global_step in (2, 5)
        control.should_evaluate = state.global_step == 4
        control.should_save = state.global_step == 5
        control.should_epoch_stop = state.global_step == 6
        control.should_training_stop = state.global_step == 11


def test_control_flags_set_by_callback_match_transformers(tmp_path: Path) -> None:
    def run(kind: Any, folder: Path) -> Any:
        trainer = make(kind, folder, callbacks=[Asking()], num_train_epochs=3, logging_steps=100)
        return seen(trainer, folder, trainer.train())

    assert side_by_side(tmp_path, run)["state"]["global_step"] == 11


@pytest.mark.parametrize(
    ("event", "flag"),
    crossed(
        ["on_step_end", "on_log", "on_evaluate", "on_save", "on_epoch_end"],
        ["should_training_stop", "should_epoch_stop"],
    ),
)
def test_stop_at_any_event_ends_at_the_same_step(tmp_path: Path, flag: str, event: str) -> None:
    def run(kind: Any, folder: Path) -> Any:
        stopper = type("Stopper", (TrainerCallback,), {event: lambda s, a, b, c, **k: setattr(c, flag, True)})()
        options = {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 7, "logging_steps": 3}
        trainer = make(kind, folder, callbacks=[stopper], num_train_epochs=2, **options)
        return seen(trainer, folder, trainer.train())

    side_by_side(tmp_path, run)


def test_resume_without_skipping_counts_epochs_as_transformers(tmp_path: Path) -> None:
    def run(kind: Any, folder: Path) -> Any:
        options = {"save_steps": 4, "logging_steps": 1, "num_train_epochs": 2, "ignore_data_skip": True}
        data = RegressionDataset(length=48)
        make(kind, folder, data=data, **options).train()
        trainer = make(kind, folder, data=data, **options)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
        return seen(trainer, folder)

    found = side_by_side(tmp_path, run)
    assert [round(e["epoch"], 2) for e in found["state"]["log_history"][3:6]] == [0.67, 0.17, 0.33]
