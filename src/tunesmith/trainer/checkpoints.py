"""Checkpoints of a Trainer: found, loaded, saved and removed. Our sealed folders under transformers' names; no pickle."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.encoder.params import has_adapters
from tunesmith.errors import CheckpointError
from tunesmith.events import RunStarted
from tunesmith.keep.checkpoint import Identity, save_checkpoint
from tunesmith.keep.plain import to_plain
from tunesmith.keep.snapshot import write_files
from tunesmith.keep.weight_files import (
    load_weights,
    newest_intact,
    rotate,
    verify_checkpoint,
    weight_files,
    weight_names,
)
from tunesmith.run.layout import RunDir
from tunesmith.run.reader import first_event
from tunesmith.run.sealed import MANIFEST, verify, write_sealed
from tunesmith.trainer.listeners import export_callback_states
from tunesmith.trainer.saving import TRAINER_STATE
from tunesmith.trainer.upstream import PreTrainedModel, TrainerState, trainer_log

if TYPE_CHECKING:
    from tunesmith.trainer.training import TrainerRun


def save_run(run: TrainerRun) -> None:
    """Publishes `checkpoint-<step>`, then removes older ones beyond `save_total_limit`."""
    trainer, record = run.trainer, run.record
    assert record is not None
    state, args = trainer.state, trainer.args
    folder = run.place.checkpoint(state.global_step)
    if record.journal is not None:
        record.journal.settle()
    best = run.place.checkpoint(state.best_global_step) if state.best_global_step else None
    if best is not None and (best == folder or best.is_dir()):
        state.best_model_checkpoint = str(best)
    export_callback_states(trainer)
    record.state.extra["trainer"] = _resume_notes(run)
    whole = _saves_by_itself(run) or args.save_only_model
    with trainer._parts.files.gathering() if whole else contextlib.nullcontext():
        if args.save_only_model:
            _save_weights_only(run, folder, record.identity)
        else:
            save_checkpoint(folder, record.state, record.identity, describe=lambda tmp: _describe(run, tmp))
    if args.push_to_hub:
        trainer._push_from_checkpoint(str(folder))
    if args.should_save:
        rotate_run(run)
    trainer.runtime.barrier()


def _save_weights_only(run: TrainerRun, folder: Path, identity: Identity) -> None:
    if run.trainer.runtime.is_main:
        files = weight_files(run.trainer.model, run.trainer._parts.files.weights)

        def fill(tmp: Path) -> Any:
            _describe(run, tmp)
            return write_files(tmp, files)

        step = run.trainer.state.global_step
        write_sealed(folder, fill, {"kind": "weights", "step": step, **identity.to_json()})


def _saves_by_itself(run: TrainerRun) -> bool:
    """Whether files of a checkpoint come from `save_model`, which a subclass overrides, or from PEFT."""
    trainer = run.trainer
    return trainer.overrides("save_model") or trainer.overrides("_save") or has_adapters(trainer.model)


def _describe(run: TrainerRun, tmp: Path) -> None:
    """What makes a checkpoint loadable elsewhere, and what scripts look for in it. The engine's weights come after it."""
    trainer, model = run.trainer, run.trainer.model
    if _saves_by_itself(run):
        trainer.save_model(str(tmp), _internal_call=True)
    if isinstance(model, PreTrainedModel) and not has_adapters(model):
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.dtype = model.dtype
        model.config.save_pretrained(tmp)
    trainer._parts.files.save_companions(tmp)
    trainer.state.save_to_json(str(tmp / TRAINER_STATE))


def rotate_run(run: TrainerRun, *, at_end: bool = False) -> None:
    """Deletes what `save_total_limit` does not allow: oldest first, never the best one, never the newest while training."""
    limit, best = run.trainer.args.save_total_limit, run.trainer.state.best_model_checkpoint
    if limit is None or limit <= 0 or (at_end and (limit != 1 or best is None)):
        return
    home = None if best is None else Path(best)
    step = run.trainer.state.global_step
    rotate(run.place, run.run_id, keep=limit, last=step, best=home, newest=not at_end)


def _resume_notes(run: TrainerRun) -> dict[str, Any]:
    """What a resume needs beside the engine's state."""
    used = run.windows.used
    return {
        "scheduler": to_plain(run.trainer.lr_scheduler.state_dict(), "scheduler"),
        **run.progress.to_json(),
        "used_rows": None if used is None else used.to_json(),
    }


def load_best_weights(model: Any, folder: Path) -> None:
    """Puts the weights of the best checkpoint into the model. Other files of it may have changed since: a warning."""
    if not folder.is_dir():
        trainer_log.warning("Could not locate the best model at %s: the weights stay those of the last step", folder)
        return
    try:
        verify_checkpoint(folder)
    except CheckpointError as error:
        verify(folder, names=weight_names(folder))
        trainer_log.warning("its weights are intact and used as the best, but: %s", error.line())
    load_weights(model, folder)


def find_checkpoint(wanted: str | bool | Path, output_dir: str) -> Path:
    """The folder to resume from: the newest intact one of the output folder's last run, or the one that is named."""
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
    newest, skipped = newest_intact(run, last_run_id(run))
    if newest is None:
        why = f": {'; '.join(skipped)}" if skipped else ""
        raise CheckpointError(f"No valid checkpoint found in output directory ({output_dir}){why}")
    for line in skipped:
        trainer_log.warning("not used: %s", line)
    return newest


def last_run_id(run: RunDir) -> str | None:
    """The run that the folder's journal belongs to: checkpoints of an older run may lie beside it."""
    if not run.journal_file.is_file():
        return None
    event = first_event(run.journal_file)
    return event.run_id if isinstance(event, RunStarted) else None


def load_trainer_state(folder: Path) -> Any:
    """The TrainerState of a checkpoint; a best checkpoint that is gone is forgotten."""
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE))
    if state.best_model_checkpoint is not None and not Path(state.best_model_checkpoint).is_dir():
        trainer_log.warning("the best checkpoint %s is gone; it is forgotten", state.best_model_checkpoint)
        state.best_model_checkpoint = None
    return state
