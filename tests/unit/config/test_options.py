"""The options of a run: types, problems with their fix, and YAML that reads back equal."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.config.load import convert, find_problems, load_config, read_entries, read_top_level
from tunesmith.config.options import RunConfig, dump_config, dump_value
from tunesmith.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "folder"),
    [
        ({"train_file": "data/pairs.csv.gz"}, "runs/pairs-all-MiniLM-L6-v2"),
        ({"train_file": "data/pairs.v2.xlsx"}, "runs/pairs.v2-all-MiniLM-L6-v2"),
        ({"task_name": "mrpc", "model_name_or_path": "google/electra-small"}, "runs/mrpc-electra-small"),
        ({"dataset_name": "org/reviews", "model_name_or_path": "models/bert/"}, "runs/reviews-bert"),
        ({"train_file": "a.csv", "run_name": "mine"}, "runs/mine"),
        ({"train_file": "a.csv", "run_name": "mine", "output_dir": "out/x"}, "out/x"),
        ({}, "runs/run-all-MiniLM-L6-v2"),
    ],
)
def test_run_folder_is_named_after_data_and_model(options: dict[str, Any], folder: str) -> None:
    assert RunConfig(**options).run_folder == Path(folder)


def test_written_config_reads_back_equal(tmp_path: Path) -> None:
    config = RunConfig(
        train_file="a.csv",
        delimiter="\t",
        text_column_names=("no", "a, b"),
        label_column_name="null",
        label_names=("0123", "1e5", "~", "yes", 'say "x" \\ # : \u2028 \U0001f600'),
        learning_rate=1e-5,
        class_weights=(1.0, 0.3),
        lr_scheduler_type="polynomial",
        resume_from_checkpoint=True,
        freeze=("embeddings",),
        save_total_limit=None,
        label_smoothing_factor=0.1 + 0.2,
    )
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config), encoding="utf-8")
    config_again = load_config(file, {"class_weights": "balanced", "label_smoothing_factor": "0.30000000000000004"})
    assert dataclasses.replace(config_again, class_weights=(1.0, 0.3)) == config
    assert file.read_text(encoding="utf-8").startswith("# --- Data ---\n")


@given(st.text(st.characters(exclude_categories=("Cs",))))
def test_any_text_survives_yaml(text: str) -> None:
    ([entry], _) = read_top_level(f"run_name: {dump_value(text)}\n", "x")
    assert entry.value == text


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_number_survives_yaml(number: float) -> None:
    ([entry], _) = read_top_level(f"x: {dump_value(number)}\n", "x")
    assert float(entry.value) == number


@given(st.binary(max_size=200), st.sampled_from([".yaml", ".yml"]))
def test_any_bytes_parse_or_raise_config_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, suffix: str
) -> None:
    file = tmp_path_factory.getbasetemp() / f"fuzz{suffix}"
    file.write_bytes(content)
    with contextlib.suppress(ConfigError):
        assert read_entries(file) is not None


@pytest.mark.parametrize(
    ("value", "hint", "message"),
    [
        ("0123", int, "expected a whole number, got '0123'"),
        ("1e3", int, "expected a whole number, got '1e3'"),
        (8.0, int, "expected a whole number, got 8.0"),
        (True, float, "expected a number, got True"),
        ("nan", float, "expected a number, got 'nan'"),
        ("0,5", float, "expected a number, got '0,5'"),
        ("maybe", bool, "expected true or false, got 'maybe'"),
        (1, bool, "expected true or false, got 1"),
        (None, float, "expected a number, got nothing"),
        (5, str, "expected text, got 5"),
        ("x", Literal["no", "steps", "epoch"], "expected no, steps or epoch, got 'x'"),
        ("epochs", Literal["no", "steps", "epoch"], "expected no, steps or epoch, got 'epochs'. Did you mean 'epoch'?"),
        ([1, "x"], tuple[float, ...], "expected a list of numbers, got [1, 'x']"),
        ([["a"]], tuple[str, ...], "expected a list of names, got [['a']]"),
    ],
)
def test_wrong_value_is_refused_with_what_was_expected(value: Any, hint: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        convert(value, hint)
    assert str(caught.value) == message


GOOD = {"train_file": "a.csv"}


@pytest.mark.parametrize(
    ("options", "start"),
    [
        ({"per_device_train_batch_size": -3}, "per_device_train_batch_size: -3 is too small. Use 1 or more"),
        ({"learning_rate": 0.0}, "learning_rate: 0.0 is not above 0"),
        ({"max_steps": 0}, "max_steps: 0 is not a number of steps"),
        ({"validation_split_fraction": 1.0}, "validation_split_fraction: 1.0 is not between 0 and 1"),
        ({"label_smoothing_factor": 1.5}, "label_smoothing_factor: 1.5 is not between 0 and 1"),
        ({"warmup_steps": 1.5}, "warmup_steps: 1.5 is neither a share below 1 nor whole steps. Write 2"),
        ({"seed": 2**32}, "seed: 4294967296 is too large"),
        ({"layerwise_lr_decay": 1.2}, "layerwise_lr_decay: 1.2 is above 1"),
        ({"train_file": None}, "train_file: no training data. Use --train_file FILE"),
        ({"task_name": "mrpc"}, "task_name: cannot be used together with train_file"),
        ({"dataset_config_name": "mrpc"}, "dataset_config_name: needs dataset_name"),
        ({"train_split_name": "x"}, "train_split_name: has no meaning for files"),
        ({"validation_file": "a.csv"}, "validation_file: is the same file as train_file"),
        ({"validation_file": "b.csv", "test_file": "b.csv"}, "test_file: is the same file as validation_file"),
        ({"text_column_names": ("a", "b", "a")}, "text_column_names: 'a' is named twice"),
        ({"text_column_names": ("a",), "label_column_name": "a"}, "label_column_name: 'a' is also a text column"),
        ({"label_separator": "coma"}, "label_separator: 'coma' is not a separator. Did you mean 'comma'?"),
        ({"encoding": "utf9"}, "encoding: 'utf9' is not a known text encoding. Did you mean 'utf-8'?"),
        ({"class_weights": (1.0, 0.0)}, "class_weights: 0.0 is not above 0"),
        ({"class_weights": (1.0,), "label_names": ("a", "b")}, "class_weights: 1 weights for 2 labels"),
        ({"class_weights": "balanced", "do_regression": True}, "class_weights: has no meaning for regression"),
        ({"metric_name": ("acuracy",)}, "metric_name: 'acuracy' is not a metric. Did you mean 'accuracy'?"),
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
            {"validation_split_fraction": 0.0, "load_best_model_at_end": True},
            "load_best_model_at_end: needs evaluations, but there is no evaluation set. Set validation_file",
        ),
        (
            {"validation_split_fraction": 0.0, "eval_strategy": "epoch"},
            "eval_strategy: is epoch, but there is no evaluation set",
        ),
        ({"eval_strategy": "no", "save_strategy": "best"}, "save_strategy: best needs evaluations"),
        ({"save_strategy": "no", "load_best_model_at_end": True}, "load_best_model_at_end: needs checkpoints"),
        ({"bf16": True, "fp16": True}, "fp16: cannot be used together with bf16"),
        ({"use_cpu": True, "cuda_graphs": "on"}, "cuda_graphs: on needs a GPU, but use_cpu is set"),
        ({"num_train_epochs": 1e308}, "num_train_epochs: 1e+308 is too large. Use at most 1000000"),
        ({"max_steps": 10**18}, "max_steps: 1000000000000000000 is too large. Use at most 1000000000000000"),
        ({"per_device_train_batch_size": 10**30}, "per_device_train_batch_size: this number is too large"),
        ({"report_to": ("tensorbord",)}, "report_to: 'tensorbord' is not a known tracker. Did you mean 'tensorboard'?"),
    ],
)
def test_impossible_config_is_reported_with_a_fix(options: dict[str, Any], start: str) -> None:
    (problem,) = find_problems(RunConfig(**{**GOOD, **options}))
    assert problem.startswith(start)
    assert ". " in problem, "no advice"


def test_problem_starts_with_location_of_the_option() -> None:
    config = RunConfig(**GOOD, seed=-1, learning_rate=-1.0)
    found = find_problems(config, wheres={"seed": "run.yaml:3:1", "learning_rate": "--learning_rate"})
    assert [line.split(" is ")[0] for line in found] == ["--learning_rate: -1.0", "run.yaml:3:1: seed: -1"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eval_strategy": "steps", "eval_steps": 10},
        {"warmup_steps": 0.1},
        {"metric_for_best_model": "eval_f1"},
        {"metric_for_best_model": "mcc", "metric_name": ("MCC", "acc")},
        {"class_weights": (1.0, 2.0), "label_names": ("a", "b")},
        {"max_steps": 1, "validation_split_fraction": 0.0},
        {"train_file": None, "dataset_name": "glue", "dataset_config_name": "mrpc", "train_split_name": "train"},
    ],
)
def test_valid_config_has_no_problem(options: dict[str, Any]) -> None:
    assert find_problems(RunConfig(**{**GOOD, **options})) == ()
