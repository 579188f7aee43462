"""`tunesmith demo`: the embedded data and recipe, and a folder of its own each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunesmith.cli.demo import make_config
from tunesmith.pipeline.identity import free_folder


def test_the_demo_trains_the_default_model_on_the_sample_with_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = make_config()
    assert config.model_name_or_path is None
    assert [Path(str(f)).name for f in (config.train_file, config.validation_file, config.test_file)] == [
        "train.csv",
        "validation.csv",
        "test.csv",
    ]
    assert all(Path(str(f)).is_file() for f in (config.train_file, config.validation_file, config.test_file))
    assert (config.learning_rate, config.num_train_epochs, config.per_device_train_batch_size) == (1e-4, 5.0, 16)
    assert (config.warmup_steps, config.weight_decay, config.output_dir) == (0.1, 0.01, "runs/demo")


def test_a_finished_demo_is_kept_and_an_unfinished_one_is_gone_on_with(tmp_path: Path) -> None:
    first = tmp_path / "demo"
    assert free_folder(first) == first
    first.mkdir()
    assert free_folder(first) == first
    (first / "report.html").touch()
    assert free_folder(first) == tmp_path / "demo-2"
    (tmp_path / "demo-2").mkdir()
    (tmp_path / "demo-2" / "report.html").touch()
    assert free_folder(first) == tmp_path / "demo-3"
