"""The run folder's paths."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunesmith.errors import ConfigError
from tunesmith.runs.folder import RunDir, checkpoint_step, open_run


def test_checkpoint_folders_are_spelled_as_transformers_spells_them(tmp_path: Path) -> None:
    assert RunDir(tmp_path).checkpoint(459).name == "checkpoint-459"


def test_checkpoints_are_sorted_by_step_and_nothing_else_is_listed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for name in ("checkpoint-1000", "checkpoint-9", "checkpoint-200", ".tmp-5-77", "checkpoint-x", "checkpoint-3.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-7").write_text("a file, not a folder")
    assert [checkpoint_step(p) for p in run.checkpoints()] == [9, 200, 1000]


def test_a_run_folder_that_does_not_exist_has_no_checkpoints(tmp_path: Path) -> None:
    assert RunDir(tmp_path / "nowhere").checkpoints() == []


def test_open_run_names_the_nearest_run_when_the_folder_is_absent(tmp_path: Path) -> None:
    (tmp_path / "mrpc-seed1").mkdir()
    (tmp_path / "mrpc-seed1" / "journal.jsonl").touch()
    with pytest.raises(ConfigError, match="Did you mean 'mrpc-seed1'"):
        open_run(tmp_path / "mrpc-sed1")


def test_open_run_lists_the_runs_inside_a_folder_of_runs(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "journal.jsonl").touch()
    with pytest.raises(ConfigError, match="one of its runs: a"):
        open_run(tmp_path)


def test_open_run_accepts_a_folder_with_a_journal(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").touch()
    assert open_run(tmp_path).name == tmp_path.name
