"""TrainingArguments: every field is honoured or refused by name; old names are accepted; the table in the docs is current."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers
from docs.trainer_page import NOTES, PAGE, PROVIDED, trainer_page

from trainer_toys import Regression, RegressionDataset, arguments
from tunesmith import Trainer, TrainingArguments
from tunesmith.errors import ConfigError
from tunesmith.trainer.validation import LIMITED, NOT_CALLED, refused

NAMES = [f.name for f in dataclasses.fields(transformers.TrainingArguments)]

REFUSED: dict[str, Any] = {
    "deepspeed": "ds.json",
    "fsdp": "offload",
    "fsdp_config": {"cpu_offload": True},
    "parallelism_config": object(),
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
    "optim_target_modules": ["attn"],
    "debug": ["underflow_overflow"],
    "save_on_each_node": True,
    "average_tokens_across_devices": False,
    "train_sampling_strategy": "batch_rebalance",
}


def test_the_table_has_every_field_and_no_other() -> None:
    assert sorted(NOTES.keys() | LIMITED.keys()) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_field_is_honoured_or_refused_by_name_with_what_to_use_instead(name: str, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    assert refused(args) == []
    assert (name in LIMITED) == (name in REFUSED)
    if name not in LIMITED:
        assert NOTES[name]
        return
    setattr(args, name, REFUSED[name])
    with pytest.raises(ConfigError) as caught:
        Trainer(Regression(), args, train_dataset=RegressionDataset())
    assert name in str(caught.value)
    instead = LIMITED[name][1]
    assert instead
    assert instead in str(caught.value)


def test_all_refused_fields_are_named_at_once(tmp_path: Path) -> None:
    args = arguments(tmp_path, train_sampling_strategy="batch_rebalance", average_tokens_across_devices=False)
    with pytest.raises(ConfigError) as caught:
        Trainer(Regression(), args, train_dataset=RegressionDataset())
    assert len(caught.value.problems) == 2


def test_every_method_of_transformers_is_here_or_its_override_is_refused() -> None:
    public = {n for n, m in inspect.getmembers(transformers.Trainer, callable) if not n.startswith("_")}
    assert public <= PROVIDED.keys() | NOT_CALLED.keys()
    assert all(callable(getattr(Trainer, name, None)) for name in PROVIDED)
    assert not any(hasattr(Trainer, name) for name in NOT_CALLED)


@pytest.mark.parametrize("name", NOT_CALLED)
def test_an_override_that_would_never_be_called_is_refused(name: str, tmp_path: Path) -> None:
    mine = type("Mine", (Trainer,), {name: lambda self: None})
    with pytest.raises(ConfigError, match=f"{name} is never called"):
        mine(Regression(), arguments(tmp_path))


def test_the_table_in_the_docs_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == trainer_page(), "run: PYTHONPATH=tests python tests/docs/trainer_page.py"


def test_the_constructor_takes_what_transformers_takes_in_the_same_order() -> None:
    theirs = list(inspect.signature(transformers.Trainer.__init__).parameters)
    assert list(inspect.signature(Trainer.__init__).parameters)[: len(theirs)] == theirs


@pytest.mark.parametrize(
    ("old", "name", "value"),
    [
        ({"evaluation_strategy": "epoch"}, "eval_strategy", "epoch"),
        ({"warmup_ratio": 0.1}, "warmup_steps", 0.1),
        ({"group_by_length": True}, "train_sampling_strategy", "group_by_length"),
        ({"no_cuda": True}, "use_cpu", True),
        ({"per_gpu_train_batch_size": 3}, "per_device_train_batch_size", 3),
        ({"include_inputs_for_metrics": True}, "include_for_metrics", ["inputs"]),
        ({"overwrite_output_dir": True}, "output_dir", "out"),
        ({"logging_dir": "logs"}, "output_dir", "out"),
    ],
)
def test_old_names_are_accepted_with_a_note(
    old: dict[str, Any], name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="tunesmith"):
        args = TrainingArguments("out", **{"use_cpu": True, **old})
    assert isinstance(args, transformers.TrainingArguments)
    assert getattr(args, name) == value
    assert len([r for r in caplog.records if next(iter(old)) in r.getMessage()]) == 1


def test_an_unknown_name_gets_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'learning_rate'"):
        TrainingArguments("out", learning_rat=1e-3)


def test_the_arguments_can_be_parsed_from_a_command_line(tmp_path: Path) -> None:
    words = ["--output_dir", str(tmp_path), "--learning_rate", "0.5", "--use_cpu", "True"]
    (args,) = transformers.HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words)
    assert args.learning_rate == 0.5


def test_the_old_keyword_tokenizer_is_accepted_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    marker = object()
    with caplog.at_level(logging.WARNING, logger="tunesmith"):
        trainer = Trainer(Regression(), arguments(tmp_path), tokenizer=marker)
    assert trainer.processing_class is marker
    assert "processing_class" in caplog.text


def test_arguments_are_left_untouched(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=2)
    before = args.to_dict()
    Trainer(Regression(), args, train_dataset=RegressionDataset()).train()
    assert args.to_dict() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_strategy": "epoch"}, "eval_dataset"),
        ({"save_strategy": "best"}, "metric_for_best_model"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_runs(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(Regression(), arguments(tmp_path, **options), train_dataset=RegressionDataset())
