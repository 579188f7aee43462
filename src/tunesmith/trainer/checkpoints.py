"""The run folder of a Trainer: checkpoints saved, removed, found and loaded; the journal with the rows of each evaluation. Our
sealed folders under transformers' names; no pickle.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedModel, TrainerState
from transformers.trainer_utils import has_length

from tunesmith.errors import CheckpointError
from tunesmith.events import Evaluated, Resumed, RowsEvaluated, RunStarted
from tunesmith.models.families import has_adapters
from tunesmith.runs.event_log import LOST_JOURNAL, first_event, read_journal, require_journal
from tunesmith.runs.folder import RunDir, checkpoint_step
from tunesmith.runs.manifest import MANIFEST, require_sealed, sweep, verify, write_sealed
from tunesmith.runs.writing import write_file
from tunesmith.trainer.arguments import trainer_log
from tunesmith.training.checkpoint import (
    load_weights,
    newest_intact,
    rotate,
    save_checkpoint,
    verify_checkpoint,
    weight_files,
    weight_names,
    write_files,
)
from tunesmith.training.run_writer import RunRecord
from tunesmith.training.serialization import to_plain

if TYPE_CHECKING:
    from tunesmith.labels import Task
    from tunesmith.trainer.facade import Trainer
    from tunesmith.trainer.training import TrainerRun

TRAINING_ARGS, TRAINER_STATE = "training_args.json", "trainer_state.json"


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
    record.state.extra["trainer"] = {  # what a resume needs beside the engine's state
        "scheduler": to_plain(trainer.lr_scheduler.state_dict(), "scheduler"),
        **run.progress.to_json(),
        "used_rows": None if run.windows.used is None else run.windows.used.to_json(),
    }
    whole = _saves_by_itself(trainer) or args.save_only_model
    with gathering(trainer) if whole else contextlib.nullcontext():
        if not args.save_only_model:
            save_checkpoint(folder, record.state, record.identity, describe=lambda tmp: _describe(trainer, tmp))
        elif trainer.runtime.is_main:
            files = weight_files(trainer.model, weights_to_save(trainer))

            def fill(tmp: Path) -> Any:
                _describe(trainer, tmp)
                return write_files(tmp, files)

            write_sealed(folder, fill, {"kind": "weights", "step": state.global_step, **record.identity.to_json()})
    if args.push_to_hub:
        trainer._push_from_checkpoint(str(folder))
    if args.should_save:
        rotate_run(run)
    trainer.runtime.barrier()


def _saves_by_itself(trainer: Trainer) -> bool:
    """Whether files of a checkpoint come from `save_model`, which a subclass overrides, or from PEFT."""
    return trainer.overrides("save_model", "_save") or has_adapters(trainer.model)


def _describe(trainer: Trainer, tmp: Path) -> None:
    """Writes what other programs need to load a checkpoint, and the files that scripts expect in it; before the weights."""
    model = trainer.model
    if _saves_by_itself(trainer):
        trainer.save_model(str(tmp), _internal_call=True)
    if isinstance(model, PreTrainedModel) and not has_adapters(model):
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.dtype = model.dtype
        model.config.save_pretrained(tmp)
    save_companions(trainer, tmp)
    trainer.state.save_to_json(str(tmp / TRAINER_STATE))


def save_companions(trainer: Trainer, tmp: Path) -> None:
    """Tokenizer and arguments, beside the weights, in a folder that is being written."""
    tokenizer = trainer.processing_class
    if tokenizer is None:
        tokenizer = getattr(trainer.data_collator, "tokenizer", None)
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(tmp)
    write_file(tmp / TRAINING_ARGS, trainer.args.to_json_string().encode())


@contextlib.contextmanager
def gathering(trainer: Trainer) -> Iterator[None]:
    """Inside, `weights_to_save` are the whole model on the main process, also where each process holds a part of it."""
    yield


def weights_to_save(trainer: Trainer) -> dict[str, Any]:
    """The weights as a save writes them."""
    found: dict[str, Any] = trainer.model.state_dict() if trainer._gathered is None else trainer._gathered
    return found


def rotate_run(run: TrainerRun, *, at_end: bool = False) -> None:
    """Deletes what `save_total_limit` does not allow: oldest first, never the best one, never the newest while training."""
    limit, best = run.trainer.args.save_total_limit, run.trainer.state.best_model_checkpoint
    if limit is None or limit <= 0 or (at_end and (limit != 1 or best is None)):
        return
    home = None if best is None else Path(best)
    step = run.trainer.state.global_step
    rotate(run.place, run.run_id, keep=limit, last=step, best=home, newest=not at_end)


def load_best_model(trainer: Trainer) -> None:
    """Loads the weights of the best checkpoint into the model. Other files that changed since are a warning."""
    folder = Path(trainer.state.best_model_checkpoint)
    if not folder.is_dir():
        trainer_log.warning("Could not locate the best model at %s: the weights stay those of the last step", folder)
        return
    try:
        verify_checkpoint(folder)
    except CheckpointError as error:
        verify(folder, names=weight_names(folder))
        trainer_log.warning("its weights are intact and used as the best, but: %s", error.line())
    load_weights(trainer.model, folder)


def find_checkpoint(wanted: str | bool | Path, output_dir: str) -> Path:
    """The folder to resume from: the newest intact one of the output folder's last run, or the one that is named."""
    if wanted is not True:
        folder = Path(str(wanted))
        if not (folder / MANIFEST).is_file():
            problem, fix = "there is no such folder", None
            if folder.is_dir():
                theirs = (folder / TRAINER_STATE).is_file()
                problem = "it was written by transformers" if theirs else "it has no MANIFEST.json"
                fix = "Load its weights with from_pretrained and start a new run."
            raise CheckpointError(f"Can't find a valid checkpoint at {folder}: {problem}", fix=fix)
        verify_checkpoint(folder)
        return folder
    run = RunDir(output_dir)
    # checkpoints of an older run may lie beside those of the run that the journal belongs to
    first = first_event(run.journal_file) if run.journal_file.is_file() else None
    newest, skipped = newest_intact(run, first.run_id if isinstance(first, RunStarted) else None)
    if newest is None:
        why = f": {'; '.join(skipped)}" if skipped else ""
        raise CheckpointError(f"No valid checkpoint found in output directory ({output_dir}){why}")
    for line in skipped:
        trainer_log.warning("not used: %s", line)
    return newest


def load_trainer_state(folder: Path) -> Any:
    """The TrainerState of a checkpoint, without a best checkpoint that no longer exists."""
    state = TrainerState.load_from_json(str(folder / TRAINER_STATE))
    if state.best_model_checkpoint is not None and not Path(state.best_model_checkpoint).is_dir():
        trainer_log.warning(
            "the best checkpoint %s no longer exists and is not tracked any more", state.best_model_checkpoint
        )
        state.best_model_checkpoint = None
    return state


def require_room(run: RunDir, num_steps: int, *, saves: bool) -> None:
    """A ResourceError when a journal or checkpoint that we did not write is in the place of one of this run."""
    require_journal(run.journal_file)
    for folder in run.checkpoints():
        if saves and checkpoint_step(folder) <= num_steps:
            require_sealed(folder)


def open_journal(run: TrainerRun, record: RunRecord, notes: Sequence[str]) -> set[tuple[int, str]]:
    """Opens the journal of a run; returns the evaluations (step, split) in it that the resumed run may repeat."""
    place, step = run.place, run.trainer.state.global_step
    sweep(place.path)
    if run.folder is None:
        trainer, h = run.trainer, run.horizon
        args, dataset = trainer.args, trainer.train_dataset
        rows = len(dataset) if has_length(dataset) else 0
        epochs = min(float(args.num_train_epochs), float(h.num_epochs)) if args.max_steps <= 0 else 0.0
        epochs = epochs or h.num_steps / h.steps_per_epoch
        record.open(RunStarted(run.run_id, 0, h.num_steps, h.steps_per_epoch, epochs, rows, time.time()))
        return set()
    if not place.journal_file.exists():
        trainer_log.warning("%s: %s", place.path, LOST_JOURNAL)
    record.open(Resumed(step, run.folder.name, (), time.time()), notes)
    # The evaluation at the end of an epoch may be in the journal already while the checkpoint is from before it.
    past = read_journal(place.journal_file) if run.progress.epoch_open else []
    return {(e.step, e.split) for e in past if isinstance(e, Evaluated)}


_SPEED = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch")


def journal_evaluation(run: TrainerRun, prefix: str, output: Any, seconds: float) -> None:
    """Writes an evaluation during training to the journal under the names of our curves, unless it was there before a resume."""
    state, split = run.trainer.state, "validation" if prefix == "eval" else prefix.removeprefix("eval_")
    if run.record is None or (state.global_step, split) in run.journalled:
        return
    metrics = {k.removeprefix(f"{prefix}_"): v for k, v in output.metrics.items() if isinstance(v, (int, float))}
    kept: dict[str, float | None] = {k: float(v) for k, v in metrics.items() if k not in _SPEED}
    rows = _rows_of_evaluation(run.trainer, split, output)
    if rows is not None:
        run.record.on(rows)
    epoch = float(state.epoch or 0.0)
    run.record.on(Evaluated(state.global_step, epoch, split, kept, output.num_samples, seconds))


def _rows_of_evaluation(trainer: Any, split: str, output: Any) -> RowsEvaluated | None:
    """The event of one evaluation; None where the outputs are of another kind, or were not kept."""
    logits, labels = output.predictions, output.label_ids
    if not isinstance(logits, np.ndarray) or not isinstance(labels, np.ndarray):
        return None
    from tunesmith.metrics.evidence import BestConstant, encode_rows, infer_task, keep_rows, rows_to_keep

    task = infer_task(logits, labels)
    if task is None:
        return None
    state, width = trainer.state, int(logits.shape[1]) if logits.ndim == 2 else 1
    constant = BestConstant.of(task, _training_labels(trainer, task, width, labels), width)
    by_steps = state.eval_steps and state.eval_steps >= 1
    planned = int(state.max_steps // state.eval_steps) if by_steps else int(state.num_train_epochs or 1)
    rows = keep_rows(constant, logits, labels, rows_to_keep(planned))
    return None if rows is None else RowsEvaluated(state.global_step, split, encode_rows(rows))


def _training_labels(trainer: Any, task: Task, width: int, otherwise: Any) -> Any:
    """The label column of the training set, or the evaluated labels where it has none of that kind."""
    from tunesmith.labels import Task
    from tunesmith.metrics.rows import to_numpy

    columns = getattr(trainer.train_dataset, "column_names", None) or ()
    name = next((n for n in (*(trainer.label_names or ()), "labels", "label") if n in columns), None)
    try:
        found = to_numpy(trainer.train_dataset[name][:]) if name is not None else np.zeros(0)
    except (TypeError, ValueError, KeyError):
        return otherwise
    fits = found.ndim == (2 if task is Task.MULTILABEL else 1) and len(found)
    if task in (Task.BINARY, Task.MULTICLASS):
        fits = fits and found.dtype.kind in "iu" and found.max() < width
    return found if fits else otherwise
