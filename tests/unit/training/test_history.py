"""Which checkpoints of a run folder stay, and which one a run resumes from: the same rules for both doors."""

from __future__ import annotations

from pathlib import Path

from tunesmith.runs.folder import RunDir
from tunesmith.runs.manifest import write_sealed
from tunesmith.training.checkpoint import newest_intact, rotate


def make_run(folder: Path, steps: range, run_id: str = "mine") -> RunDir:
    run = RunDir(folder)
    for step in steps:

        def fill(tmp: Path) -> None:
            (tmp / "x.bin").write_bytes(b"x")

        write_sealed(run.checkpoint(step), fill, {"kind": "checkpoint", "step": step, "run_id": run_id})
    return run


def left(run: RunDir) -> list[str]:
    return [folder.name for folder in run.checkpoints()]


def test_the_oldest_go_and_the_best_stays(tmp_path: Path) -> None:
    run = make_run(tmp_path, range(1, 6))
    rotate(run, "mine", keep=2, last=5, best=run.checkpoint(2))
    assert left(run) == ["checkpoint-2", "checkpoint-5"]
    rotate(run, "mine", keep=1, last=5, best=run.checkpoint(2))
    assert left(run) == ["checkpoint-2", "checkpoint-5"]
    rotate(run, "mine", keep=1, last=5, best=run.checkpoint(2), newest=False)
    assert left(run) == ["checkpoint-2"]


def test_another_run_and_a_later_step_are_neither_removed_nor_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path, range(1, 3), "other")
    make_run(tmp_path, range(3, 7))
    rotate(run, "mine", keep=1, last=5)
    assert left(run) == ["checkpoint-1", "checkpoint-2", "checkpoint-5", "checkpoint-6"]


def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path) -> None:
    run = make_run(tmp_path, range(1, 3), "other")
    make_run(tmp_path, range(3, 5))
    (run.checkpoint(4) / "x.bin").write_bytes(b"y")
    found, skipped = newest_intact(run, "mine")
    assert found == run.checkpoint(3)
    assert len(skipped) == 1
    assert "checkpoint-4" in skipped[0]
    assert newest_intact(run, "other")[0] == run.checkpoint(2)
