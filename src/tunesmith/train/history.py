"""The checkpoints of a run folder: which one to go on from, which ones to remove."""

from __future__ import annotations

from pathlib import Path

from tunesmith.errors import CheckpointError
from tunesmith.run.layout import RunDir, checkpoint_step
from tunesmith.run.sealed import read_manifest, retire
from tunesmith.train.shards import verify_checkpoint


def newest_intact(run: RunDir) -> tuple[Path | None, tuple[str, ...]]:
    """(the newest checkpoint that verifies, why each newer one was skipped)."""
    skipped: list[str] = []
    for folder in reversed(run.checkpoints()):
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            skipped.append(error.line())
            continue
        return folder, tuple(skipped)
    return None, tuple(skipped)


def rotate(run: RunDir, run_id: str, *, keep: int, last: int) -> list[Path]:
    """Deletes all but the newest `keep` checkpoints of this run id, by step; `last` is the one that was just published.

    One with a higher step is a damaged one that a resume passed over: it is neither deleted nor counted as kept,
    so that it never stands in for an intact one.
    """
    mine = []
    for folder in run.checkpoints():
        try:
            if checkpoint_step(folder) <= last and read_manifest(folder)["run_id"] == run_id:
                mine.append(folder)
        except (CheckpointError, KeyError):
            continue
    old = sorted(mine, key=checkpoint_step)[: -max(keep, 1)]
    for folder in old:
        retire(folder)
    return old
