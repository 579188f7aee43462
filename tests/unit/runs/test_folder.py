"""Run folders: paths, JSON files and lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.runs.folder import (
    RunDir,
    checkpoint_step,
    open_run,
    read_environment,
    read_metrics,
    read_summary,
)


def test_checkpoints_are_listed_by_step(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for name in ("checkpoint-1000", "checkpoint-9", "checkpoint-200", ".tmp-5-77", "checkpoint-x", "checkpoint-3.bak"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-7").write_text("a file, not a folder")
    assert [checkpoint_step(p) for p in run.checkpoints()] == [9, 200, 1000]


def test_open_run_of_an_absent_folder_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "mrpc-seed1").mkdir()
    (tmp_path / "mrpc-seed1" / "journal.jsonl").touch()
    with pytest.raises(ConfigError, match="Did you mean 'mrpc-seed1'"):
        open_run(tmp_path / "mrpc-sed1")


def test_open_run_lists_the_runs_inside_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "journal.jsonl").touch()
    with pytest.raises(ConfigError, match="one of its runs: a"):
        open_run(tmp_path)


DAMAGED = {
    "nested": "[" * 100_000,
    "400 digits": '{"rows": {"train": ' + "1" * 400 + "}}",
    "a list": "[1]",
    "text for a count": '{"rows": {"train": "many"}}',
    "below 0": '{"label_counts": {"train": {"a": -1}}}',
    "names that are numbers": '{"labels": [1, 2]}',
    "a cut that is a text": '{"truncation": {"train": {"rows_cut": "x"}}}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_summary_is_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / "data_summary.json"
    file.write_text(DAMAGED[name])
    with pytest.raises(CheckpointError, match=r"data_summary\.json: ") as caught:
        read_summary(file)
    assert len(str(caught.value)) < 400


def test_absent_files_are_empty_and_new_fields_are_kept(tmp_path: Path) -> None:
    assert read_environment(tmp_path / "environment.json") == {}
    (tmp_path / "data_summary.json").write_text('{"task": null, "rows": {"train": 3}, "of tomorrow": [[1]]}')
    assert read_summary(tmp_path / "data_summary.json")["of tomorrow"] == [[1]]
    (tmp_path / "metrics.json").write_text('{"test": {"f1": {"value": NaN, "low": -Infinity}}}')
    assert read_metrics(tmp_path / "metrics.json") == {"test": {"f1": {"value": None, "low": None}}}
