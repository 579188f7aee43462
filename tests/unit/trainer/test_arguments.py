"""Constructor and TrainingArguments match transformers, including names of older versions."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers

from trainer_toys import Regression, RegressionDataset, arguments
from tunesmith import Trainer, TrainingArguments
from tunesmith.errors import ConfigError


def test_trainer_is_a_subclass_with_the_same_constructor() -> None:
    assert issubclass(Trainer, transformers.Trainer)
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


def test_unknown_argument_suggests_nearest_name() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'learning_rate'"):
        TrainingArguments("out", learning_rat=1e-3)


def test_old_keyword_tokenizer_is_accepted_with_a_note(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


def test_misspelled_metric_is_refused_before_training(tmp_path: Path) -> None:
    options = {"eval_strategy": "epoch", "metric_for_best_model": "los", "load_best_model_at_end": True}
    args = arguments(tmp_path, save_strategy="epoch", **options)
    with pytest.raises(ConfigError, match="Did you mean 'loss'"):
        Trainer(Regression(), args, train_dataset=RegressionDataset(), eval_dataset=RegressionDataset())
