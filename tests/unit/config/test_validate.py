"""What cannot be is said before anything is read or loaded."""

from __future__ import annotations

from typing import Any

import pytest

from tunesmith.config.load import load_config
from tunesmith.config.options import OPTIMIZERS, SCHEDULE_OPTIONS, RunConfig, list_options
from tunesmith.config.validate import find_problems
from tunesmith.errors import ConfigError

GOOD = {"train_file": "a.csv"}


def _schedule(kind: str, **options: Any) -> dict[str, Any]:
    return {"lr_scheduler_type": kind, "lr_scheduler_kwargs": options}


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"per_device_train_batch_size": -3}, "per_device_train_batch_size: -3 is too small. Use 1 or more"),
        ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size: 0 is too small"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: 0 is too small"),
        ({"learning_rate": 0.0}, "learning_rate: 0.0 is not above 0"),
        ({"learning_rate": -1e-5}, "learning_rate: -1e-05 is not above 0"),
        ({"num_train_epochs": 0.0}, "num_train_epochs: 0.0 is not above 0"),
        ({"max_steps": 0}, "max_steps: 0 is not a number of steps"),
        ({"validation_split_fraction": 1.0}, "validation_split_fraction: 1.0 is not between 0 and 1"),
        ({"validation_split_fraction": -0.1}, "validation_split_fraction: -0.1 is not between 0 and 1"),
        ({"label_smoothing_factor": 1.5}, "label_smoothing_factor: 1.5 is not between 0 and 1"),
        ({"warmup_steps": -1}, "warmup_steps: -1 is too small"),
        ({"warmup_steps": 1.5}, "warmup_steps: 1.5 is neither a share below 1 nor whole steps. Write 2"),
        ({"seed": -1}, "seed: -1 is too small"),
        ({"seed": 2**32}, "seed: 4294967296 is too large"),
        ({"layerwise_lr_decay": 1.2}, "layerwise_lr_decay: 1.2 is above 1"),
        ({"save_total_limit": 0}, "save_total_limit: 0 is too small"),
        ({"train_file": None}, "train_file: no training rows are given. Use --train_file FILE"),
        ({"task_name": "mrpc"}, "task_name: cannot be used together with train_file"),
        ({"dataset_config_name": "mrpc"}, "dataset_config_name: needs dataset_name"),
        ({"train_split_name": "x"}, "train_split_name: has no meaning for files"),
        ({"validation_file": "a.csv"}, "validation_file: is the same file as train_file"),
        ({"validation_file": "b.csv", "test_file": "b.csv"}, "test_file: is the same file as validation_file"),
        ({"text_column_names": ("a", "b", "c")}, "text_column_names: 3 columns are named"),
        ({"text_column_names": ("a", "a")}, "text_column_names: 'a' is named twice"),
        ({"text_column_names": ("a",), "label_column_name": "a"}, "label_column_name: 'a' is also a text column"),
        ({"label_names": ("x", "y", "x")}, "label_names: 'x' is named twice"),
        ({"delimiter": "||"}, "delimiter: '||' is not one character"),
        ({"encoding": "utf9"}, "encoding: 'utf9' is not a known encoding. Did you mean 'utf-8'?"),
        ({"class_weights": (1.0, 0.0)}, "class_weights: 0.0 is not above 0"),
        ({"class_weights": (1.0,), "label_names": ("a", "b")}, "class_weights: 1 weights for 2 labels"),
        ({"class_weights": "balanced", "do_regression": True}, "class_weights: has no meaning for regression"),
        ({"metric_name": ("acuracy",)}, "metric_name: 'acuracy' is not a metric. Did you mean 'accuracy'?"),
        ({"metric_for_best_model": "recal"}, "metric_for_best_model: 'recal' is not a metric. Did you mean 'recall'?"),
        (
            {"metric_for_best_model": "f1", "metric_name": ("accuracy",)},
            "metric_for_best_model: f1 is not among metric_name. Add f1 to metric_name",
        ),
        ({"eval_strategy": "steps"}, "eval_steps: eval_strategy steps needs a number of steps"),
        (
            {"eval_strategy": "no", "load_best_model_at_end": True},
            "load_best_model_at_end: needs evaluations, but eval_strategy is no",
        ),
        (
            {"eval_strategy": "no", "early_stopping_patience": 2},
            "early_stopping_patience: needs evaluations, but eval_strategy is no",
        ),
        (
            {"validation_split_fraction": 0.0, "load_best_model_at_end": True},
            "load_best_model_at_end: needs evaluations, but there is no evaluation set. Give validation_file",
        ),
        (
            {"validation_split_fraction": 0.0, "eval_strategy": "epoch"},
            "eval_strategy: is epoch, but there is no evaluation set",
        ),
        ({"eval_strategy": "no", "save_strategy": "best"}, "save_strategy: best needs evaluations"),
        ({"save_strategy": "no", "load_best_model_at_end": True}, "load_best_model_at_end: needs checkpoints"),
        ({"token_budget": 64, "max_seq_length": 128}, "token_budget: 64 is too small for one row of 128 tokens"),
        ({"token_budget": 640, "train_sampling_strategy": "sequential"}, "token_budget: sorts rows"),
        ({"pad_to_max_length": True, "padding_free": "on"}, "padding_free: on contradicts pad_to_max_length"),
        ({"bf16": True, "fp16": True}, "fp16: cannot be used together with bf16"),
        ({"use_cpu": True, "cuda_graphs": "on"}, "cuda_graphs: on needs a GPU, but use_cpu is set"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_kwargs: cosine_with_min_lr needs min_lr"),
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            "lr_scheduler_kwargs: warmup_stable_decay needs num_decay_steps",
        ),
        ({"lr_scheduler_kwargs": {"power": 2}}, "lr_scheduler_kwargs: linear has no 'power'. It takes none"),
        (
            _schedule("cosine", num_cycle=2),
            "lr_scheduler_kwargs: cosine has no 'num_cycle'. Did you mean 'num_cycles'?",
        ),
        (_schedule("polynomial", num_cycles=2), "lr_scheduler_kwargs: polynomial has no 'num_cycles'. It takes lr_end"),
        (_schedule("cosine", num_cycles="many"), "lr_scheduler_kwargs: num_cycles 'many' is not a number"),
        (_schedule("cosine", num_cycles=1e308), "lr_scheduler_kwargs: num_cycles 1e+308 is out of range"),
        (_schedule("polynomial", power=-1), "lr_scheduler_kwargs: power -1 is out of range"),
        (_schedule("polynomial", lr_end=1), "lr_scheduler_kwargs: lr_end 1 is not below the learning rate 5e-05"),
        (_schedule("inverse_sqrt", timescale=1.5), "lr_scheduler_kwargs: timescale 1.5 is not a whole number"),
        (_schedule("inverse_sqrt", timescale=0), "lr_scheduler_kwargs: timescale 0 is out of range"),
        (
            _schedule("cosine_with_min_lr", min_lr=1e-6, min_lr_rate=0.1),
            "lr_scheduler_kwargs: cosine_with_min_lr needs",
        ),
        (
            _schedule("warmup_stable_decay", num_decay_steps=3, decay_type="sine"),
            "lr_scheduler_kwargs: decay_type 'sine' is not a shape. Use one of linear, cosine, 1-sqrt",
        ),
        ({"num_train_epochs": 1e308}, "num_train_epochs: 1e+308 is too large. Use at most 1000000"),
        ({"num_train_epochs": 2e4, "token_budget": 512}, "num_train_epochs: is above 10000 with token_budget"),
        ({"gradient_accumulation_steps": 10**12}, "gradient_accumulation_steps: 1000000000000 is too large"),
        ({"preprocessing_num_workers": 10**6}, "preprocessing_num_workers: 1000000 is too large"),
        ({"ddp_timeout": 10**18}, "ddp_timeout: 1000000000000000000 is too large"),
        ({"max_steps": 10**18}, "max_steps: 1000000000000000000 is too large. Use at most 1000000000000000"),
        ({"per_device_train_batch_size": 10**30}, "per_device_train_batch_size: this number is too large"),
        ({"data_seed": 2**70}, "data_seed: 1180591620717411303424 is too large. Use at most 4294967295"),
        ({"report_to": ("tensorbord",)}, "report_to: 'tensorbord' is not a known tracker. Did you mean 'tensorboard'?"),
    ],
)
def test_an_impossible_config_is_one_line_with_a_way_out(options: dict[str, Any], start: str) -> None:
    (problem,) = find_problems(RunConfig(**{**GOOD, **options}))
    assert problem.startswith(start)
    assert ". " in problem, "no advice"


def test_a_problem_begins_with_the_place_the_option_was_given_at() -> None:
    config = RunConfig(**GOOD, seed=-1, learning_rate=-1.0)
    found = find_problems(config, wheres={"seed": "run.yaml:3:1", "learning_rate": "--learning_rate"})
    assert [line.split(" is ")[0] for line in found] == ["--learning_rate: -1.0", "run.yaml:3:1: seed: -1"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eval_strategy": "steps", "eval_steps": 10},
        {"eval_strategy": "steps", "logging_steps": 10},
        {"warmup_steps": 0.1},
        {"eval_strategy": "no"},
        {"metric_for_best_model": "eval_f1"},
        {"metric_for_best_model": "mcc", "metric_name": ("MCC", "acc")},
        {"metric_for_best_model": "loss"},
        {"class_weights": (1.0, 2.0), "label_names": ("a", "b")},
        {"max_steps": 1},
        {"validation_split_fraction": 0.0},
        {"train_file": None, "task_name": "mrpc"},
        {"train_file": None, "dataset_name": "glue", "dataset_config_name": "mrpc", "train_split_name": "train"},
    ],
)
def test_a_possible_config_has_no_problem(options: dict[str, Any]) -> None:
    assert find_problems(RunConfig(**{**GOOD, **options})) == ()


def test_the_schedules_known_here_are_those_that_are_computed() -> None:
    from tunesmith.training.schedule import SCHEDULES

    assert set(SCHEDULE_OPTIONS) == set(SCHEDULES)


def test_the_names_of_optimizers_and_schedules_come_from_one_light_table() -> None:
    assert list_options()["optim"].choices == tuple(OPTIMIZERS)
    assert list_options()["lr_scheduler_type"].choices == tuple(SCHEDULE_OPTIONS)
    with pytest.raises(ConfigError, match="--optim: expected adamw_torch_fused or adamw_torch, got 'adam'"):
        load_config(None, {"optim": "adam"}, need_data=False)
