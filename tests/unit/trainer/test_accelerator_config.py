"""accelerator_config: each value has the effect that the compatibility page names (two ranks: tests/distributed)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from docs.trainer_page import ACCELERATOR
from transformers.trainer_pt_utils import AcceleratorConfig

from trainer_toys import Regression, RegressionDataset, Stream, arguments
from tunesmith import Trainer
from tunesmith.errors import ConfigError
from tunesmith.trainer.arguments import TrainingArguments

VALUES: dict[str, Any] = {
    "split_batches": True,
    "dispatch_batches": True,
    "even_batches": False,
    "use_seedable_sampler": False,
    "non_blocking": True,
    "gradient_accumulation_kwargs": {"sync_each_batch": True},
}


def losses(folder: Path, kind: Any = Trainer, data: Any = None, **options: Any) -> list[float]:
    args = arguments(folder, max_steps=4, logging_steps=1, train_sampling_strategy="sequential", **options)
    trainer = kind(Regression(), args, train_dataset=RegressionDataset() if data is None else data)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_the_page_has_every_value_and_no_other() -> None:
    assert set(ACCELERATOR) == {field.name for field in dataclasses.fields(AcceleratorConfig)}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_changes_nothing_on_one_process_and_user_code_sees_it(tmp_path: Path, name: str) -> None:
    config = {name: VALUES[name]}
    assert losses(tmp_path, accelerator_config=config) == losses(tmp_path)
    theirs = losses(tmp_path, transformers.Trainer, accelerator_config=config)
    assert losses(tmp_path, accelerator_config=config) == pytest.approx(theirs, abs=2e-5)
    seen = Trainer(Regression(), arguments(tmp_path, accelerator_config=config)).accelerator
    if name == "gradient_accumulation_kwargs":
        assert seen.gradient_state.plugin_kwargs["sync_each_batch"] is True
    else:
        assert getattr(seen, name) == VALUES[name]


def test_a_stream_that_one_process_dispatches_is_read_as_it_is(tmp_path: Path) -> None:
    config = {"dispatch_batches": True}
    assert losses(tmp_path, data=Stream(), accelerator_config=config) == losses(tmp_path, data=Stream())


@pytest.mark.parametrize("kind", [transformers.Trainer, Trainer])
def test_num_steps_of_gradient_accumulation_is_taken_where_the_arguments_leave_it_open(
    tmp_path: Path, kind: Any
) -> None:
    config = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    args = arguments(tmp_path, accelerator_config=config)
    trainer = kind(Regression(), args, train_dataset=RegressionDataset())
    assert trainer.args.gradient_accumulation_steps == 2
    assert trainer.get_total_train_batch_size(args) == 16
    with pytest.raises((ValueError, ConfigError), match="`num_steps` is set but"):
        kind(Regression(), arguments(tmp_path, gradient_accumulation_steps=3, accelerator_config=config))


def test_one_set_of_arguments_serves_two_trainers(tmp_path: Path) -> None:
    args = arguments(tmp_path, accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 2}})
    for _ in range(2):
        assert Trainer(Regression(), args).args.gradient_accumulation_steps == 2
    assert args.accelerator_config.gradient_accumulation_kwargs == {"num_steps": 2}


def test_a_configuration_comes_from_a_file_too_and_old_options_are_put_into_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"even_batches": False}))
    assert Trainer(Regression(), arguments(tmp_path, accelerator_config=str(file))).accelerator.even_batches is False
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, split_batches=True, accelerator_config={"even_batches": False}
    )
    assert args.accelerator_config.split_batches is True
    assert args.accelerator_config.even_batches is False
    with pytest.raises(ConfigError, match="both given"):
        TrainingArguments(str(tmp_path), use_cpu=True, split_batches=True, accelerator_config=str(file))
