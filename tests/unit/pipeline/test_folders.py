"""A run folder that is taken away while the run writes to it, and the name of a run in its model card."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiny_model import sentences
from tunesmith.errors import ResourceError
from tunesmith.events import Event, StepDone
from tunesmith.pipeline.train import finetune
from tunesmith.pipeline.watch import RunResult, Watch

ROWS = [{"text": t, "label": "good" if good else "bad"} for t, good in sentences(40)]


def train(folder: Path, tiny: Path, cache: Path, **options: Any) -> RunResult:
    defaults = {"use_cpu": True, "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "train_sample_size": 8}
    where = {"model_name_or_path": tiny, "output_dir": folder, "cache_dir": cache}
    return finetune(train_data=ROWS, **where, **{**defaults, **options})


@pytest.mark.parametrize(
    ("how", "save_strategy"),
    [
        *((how, "steps") for how in ("removed", "renamed", "linked", "made again", "journal removed")),
        *(("removed", "no"), ("linked", "no"), ("journal removed", "no")),
    ],
)
def test_a_run_folder_that_is_no_longer_there_ends_the_run_at_the_next_write(
    how: str, save_strategy: str, tiny: Path, cache: Path, tmp_path: Path
) -> None:
    run, steps = tmp_path / "run", []
    (tmp_path / "mine").mkdir()

    def swap(event: Event) -> None:
        if not isinstance(event, StepDone):
            return
        steps.append(event.step)
        if event.step != 1:
            return
        if how == "journal removed":
            (run / "journal.jsonl").unlink()
            return
        shutil.rmtree(run) if how == "removed" else os.rename(run, tmp_path / "moved")
        if how == "linked":
            run.symlink_to(tmp_path / "mine")
        elif how == "made again":
            run.mkdir()

    options: dict[str, Any] = {"save_strategy": save_strategy, "eval_strategy": "no"}
    with pytest.raises(ResourceError, match="was removed, renamed or replaced while the run wrote to it") as caught:
        train(run, tiny, cache, watch=Watch(listeners=[swap]), **options)
    assert caught.value.exit_code == 4
    assert steps == ([1, 2] if save_strategy == "steps" else [1, 2, 3, 4])
    assert list((tmp_path / "mine").iterdir()) == []
    assert how != "removed" or not run.exists()


def test_any_name_of_a_run_gives_a_model_card_that_reads(tiny: Path, cache: Path, tmp_path: Path) -> None:
    name = 'line\nbreak: "quoted" \\ | <b>\u2028\x85---\n---'
    result = train(tmp_path / "run", tiny, cache, max_steps=1, run_name=name)
    front, body = result.run.card_file.read_text().removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["model-index"][0]["name"] == name
    assert body.splitlines()[1] == '# line break: "quoted" \\ \\| &lt;b> --- ---'
