"""Which checkpoint a Trainer resumes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunesmith.errors import CheckpointError
from tunesmith.events import RunStarted
from tunesmith.run.layout import RunDir
from tunesmith.run.reader import first_event
from tunesmith.run.sealed import MANIFEST, read_manifest
from tunesmith.train.shards import verify_checkpoint
from tunesmith.trainer.upstream import TrainerState, trainer_log

TRAINER_STATE = "trainer_state.json"

log = trainer_log


def find_checkpoint(wanted: str | bool | Path, output_dir: str) -> Path:
    """The folder to go on from: the newest intact one of the output folder's last run, or the one that is named."""
    if wanted is not True:
        folder = Path(str(wanted))
        if not (folder / MANIFEST).is_file():
            found = (
                "it was written by transformers" if (folder / TRAINER_STATE).is_file() else "it has no MANIFEST.json"
            )
            raise CheckpointError(
                f"Can't find a valid checkpoint at {folder}: {found if folder.is_dir() else 'there is no such folder'}",
                fix="Load its weights with from_pretrained and start a new run." if folder.is_dir() else None,
            )
        verify_checkpoint(folder)
        return folder
    run = RunDir(output_dir)
    mine = [f for f in run.checkpoints() if not (run_id := last_run_id(run)) or belongs_to(f, run_id, damaged=True)]
    skipped = []
    for folder in reversed(mine or run.checkpoints()):
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            skipped.append(error.line())
            continue
        for line in skipped:
            log.warning("not used: %s", line)
        return folder
    why = f": {'; '.join(skipped)}" if skipped else ""
    raise CheckpointError(f"No valid checkpoint found in output directory ({output_dir}){why}")


def last_run_id(run: RunDir) -> str | None:
    """The run that the folder's journal belongs to: checkpoints of an older run may lie beside it."""
    if not run.journal_file.is_file():
        return None
    event = first_event(run.journal_file)
    return event.run_id if isinstance(event, RunStarted) else None


def belongs_to(folder: Path, run_id: str, *, damaged: bool = False) -> bool:
    """Whether a checkpoint is of this run; `damaged` is the answer for one that cannot be read."""
    try:
        return bool(read_manifest(folder)["run_id"] == run_id)
    except CheckpointError:
        return damaged


def load_trainer_state(folder: Path) -> Any:
    """The TrainerState of a checkpoint; a best checkpoint that is gone is forgotten."""
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE))
    if state.best_model_checkpoint is not None and not Path(state.best_model_checkpoint).is_dir():
        log.warning("the best checkpoint %s is gone; it is forgotten", state.best_model_checkpoint)
        state.best_model_checkpoint = None
    return state
