"""train(): the engine's `for`, with transformers' callbacks as listeners and their control flags turned into actions."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import TrainOutput, compare_trainer_and_checkpoint_args, has_length, speed_metrics

from tunesmith.events import EpochStarted, Event, MicroBatchSplit, Note, SafePoint, StepDone
from tunesmith.runs.folder import RunDir
from tunesmith.runs.lock import RunLock
from tunesmith.runs.manifest import read_manifest
from tunesmith.speedups.apply import Speedups
from tunesmith.trainer.arguments import Horizon, plan_from_arguments, trainer_log
from tunesmith.trainer.callbacks import LoggedSums, Reactions, fresh_state, tell
from tunesmith.trainer.checkpoints import (
    TRAINER_STATE,
    find_checkpoint,
    load_trainer_state,
    open_journal,
    require_room,
    rotate_run,
)
from tunesmith.trainer.run_identity import WORDING, UsedRows, compare_used_rows, model_mark, trainer_identity
from tunesmith.trainer.stepping import choose_speed_ups, prepared_model, seed_for
from tunesmith.trainer.validation import check_overrides, label_check, require_rows
from tunesmith.trainer.windows import TrainWindows, naming_workers
from tunesmith.training.checkpoint import load_checkpoint
from tunesmith.training.distributed import RankRoster, rank_watch
from tunesmith.training.optimizer import detach_kernel
from tunesmith.training.run_writer import RunRecord
from tunesmith.training.serialization import from_plain
from tunesmith.training.stopping import StopRequest

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer


def attempt_training(trainer: Trainer, resume: str | bool | None, trial: Any, ignore_keys: Any) -> Any:
    """A run of a Trainer, and where memory runs out outside of a step, the same run with smaller batches."""
    check_overrides(type(trainer), vars(trainer))
    if trainer.model_init is not None:
        seed_for(trainer.args)
        trainer.model = trainer.model_wrapped = trainer.call_model_init(trial)
        trainer.optimizer, trainer.lr_scheduler = None, None
        trainer._signature_columns = None
    trainer._hp_search_setup(trial)
    place = RunDir(trainer._get_output_dir(trial))
    folder = None if resume is None or resume is False else find_checkpoint(resume, str(place.path))
    if folder is not None and trainer.args.auto_find_batch_size:  # the one that was found
        found = json.loads((folder / TRAINER_STATE).read_text()).get("train_batch_size")
        trainer._train_batch_size = found or trainer._train_batch_size
    while True:
        trainer._run = TrainerRun(trainer, place, folder, trial, ignore_keys)
        try:
            return trainer._run.train()
        except (RuntimeError, MemoryError) as error:
            if not _takes_smaller_batches(trainer, error):
                raise


def _takes_smaller_batches(trainer: Trainer, error: Exception) -> bool:
    """Whether the run begins again with smaller batches: memory ran out where no step can be repeated, in a callback
    or in the optimizer. Where it runs out in a step, the engine splits the micro-batch and nothing begins again."""
    size = trainer._train_batch_size
    if not trainer.args.auto_find_batch_size or trainer.runtime.world > 1 or size <= 1:
        return False
    if not (isinstance(error, MemoryError) or "out of memory" in str(error).lower()):
        return False
    trainer._train_batch_size = max(int(size * 0.9), 1)  # transformers' step
    if trainer._created_lr_scheduler:
        trainer.optimizer, trainer.lr_scheduler = trainer._given_optimizer, None
        trainer._created_lr_scheduler = False
    trainer_log.warning("out of memory: the run begins again with batches of %d rows", trainer._train_batch_size)
    return True


class TrainerRun:
    """One call of `train()`: all that it needs beside the Trainer, which outlives it."""

    horizon: Horizon
    windows: TrainWindows
    progress: LoggedSums
    reactions: Reactions

    def __init__(self, trainer: Trainer, place: RunDir, folder: Path | None, trial: Any, ignore_keys: Any) -> None:
        self.trainer, self.place, self.folder = trainer, place, folder
        self.trial, self.ignore_keys = trial, ignore_keys
        self.run_id = uuid.uuid4().hex if folder is None else str(read_manifest(folder)["run_id"])
        self.record: RunRecord | None = None
        self.speed_ups: Speedups | None = None
        self.journalled: set[tuple[int, str]] = set()
        """Evaluations (step, split) that were in the journal before a resume and may come again."""

    def train(self) -> Any:
        """Sets up, trains, and at the end undoes what was done to model and optimizer for training."""
        trainer = self.trainer
        trainer.is_in_train = True
        try:
            with self._surroundings() as (stop, roster):
                self.record = self._set_up(stop)
                with self.record.ending_well(roster):
                    self._begin_state(self.record)
                    output = self._run(self.record)
                    if trainer._search is not None and self.trial is not None:
                        trainer._search.keep(self.trial)
                    trainer.runtime.barrier()
                    return output
        finally:
            trainer.is_in_train = False
            if self.speed_ups is not None:
                self.speed_ups.close()
                self.speed_ups = None
            if trainer.optimizer is not None:
                detach_kernel(trainer.optimizer)

    @contextlib.contextmanager
    def _surroundings(self) -> Iterator[tuple[StopRequest | None, RankRoster]]:
        trainer = self.trainer
        with contextlib.ExitStack() as stack:
            if trainer.runtime.is_main:
                stack.enter_context(RunLock(self.place.lock_file))
            stop = stack.enter_context(StopRequest()) if trainer.args.enable_jit_checkpoint else None
            roster = stack.enter_context(rank_watch(trainer.runtime))
            stack.enter_context(naming_workers())
            stack.enter_context(prepared_model(trainer))
            yield stop, roster

    def _set_up(self, stop: StopRequest | None) -> RunRecord:
        """Loader, length, optimizer and engine of the run."""
        trainer, args = self.trainer, self.trainer.args
        require_rows(trainer.train_dataset)
        loader = trainer.get_train_dataloader()
        mark = model_mark(trainer.model)
        per_step = trainer.get_total_train_batch_size()
        epochs, per_epoch, _, samples, _, batches, steps = trainer.set_initial_training_values(args, loader)
        self.horizon = Horizon(epochs, per_epoch, samples, batches, steps)
        trainer.model.to(trainer.runtime.device)  # before the speed-ups, which keep copies of weights beside them
        self.windows = self._make_windows(loader)
        if trainer.runtime.is_main:
            require_room(self.place, steps, saves=args.save_strategy != "no")
        trainer._run_ids.add(self.run_id)
        dataset = getattr(loader, "dataset", trainer.train_dataset)
        identity = trainer_identity(trainer, dataset, mark, self.run_id, per_step)
        if trainer._created_lr_scheduler:
            trainer.lr_scheduler, trainer._created_lr_scheduler = None, False
        trainer.create_optimizer_and_scheduler(steps)
        engine = trainer._make_engine()
        trainer.callback_handler.train_dataloader = loader
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(trainer.callback_handler, name, getattr(trainer, name))
        return RunRecord(self.place, engine, identity, trainer.allow_changed_data, stop, wording=WORDING)

    def _make_windows(self, loader: Any) -> TrainWindows:
        trainer, args = self.trainer, self.trainer.args
        token_rows, padding = trainer._fast_rows(loader)
        self.speed_ups = choose_speed_ups(trainer, token_rows, padding)
        return TrainWindows(
            loader,
            args.gradient_accumulation_steps,
            args.seed if args.data_seed is None else args.data_seed,
            trainer._clock,
            token_rows,
            padding if self.speed_ups is None else self.speed_ups.train_collate,
            args.ignore_data_skip,
            pinned=trainer.runtime.device.type == "cuda" and args.dataloader_pin_memory,
            used=UsedRows(len(trainer.train_dataset) if has_length(trainer.train_dataset) else None, self._note_change),
            check=label_check(trainer),
        )

    def _begin_state(self, record: RunRecord) -> None:
        """A fresh TrainerState and journal, or those of the checkpoint."""
        trainer, horizon, engine = self.trainer, self.horizon, record.state
        trainer.state = fresh_state(trainer)
        changed: list[str] = []
        if self.folder is not None:
            changed = record.compare(self.folder)[1]
            for text in changed:
                trainer_log.warning("not an exact resume: %s", text)
            load_checkpoint(self.folder, record.state)
            trainer.state = load_trainer_state(self.folder)
            compare_trainer_and_checkpoint_args(trainer.args, trainer.state)
            trainer._load_callback_state()
            trainer.lr_scheduler.load_state_dict(from_plain(engine.extra["trainer"]["scheduler"]))
            changed += self._compare_used_rows(record, self.folder)
        self.progress = LoggedSums(engine.step)
        if self.folder is not None:
            self.progress.restore(engine.extra["trainer"])
        self.reactions = Reactions(self)
        state = trainer.state
        state.is_hyper_param_search = self.trial is not None
        state.train_batch_size = trainer._train_batch_size
        state.compute_steps(trainer.args, horizon.num_steps)
        state.init_training_references(trainer, horizon.num_steps, horizon.num_epochs, self.trial)
        trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen
        if trainer.runtime.is_main:
            self.journalled = open_journal(self, record, changed)

    def _compare_used_rows(self, record: RunRecord, folder: Path) -> list[str]:
        """Reads rows again that were used before the checkpoint; the lines that note a change, where changes are allowed."""
        trainer, stored = self.trainer, record.state.extra["trainer"].get("used_rows")
        with_stream = trainer.runtime.is_main and not trainer.args.ignore_data_skip
        found = compare_used_rows(self.windows.used, stored, self.windows.loader, with_stream=with_stream)
        if found is not None and not trainer.allow_changed_data:
            raise record.changed(found, folder)
        if found is not None:
            trainer_log.warning("not an exact resume: resumes although %s", found)
        return [] if found is None else [f"resumes although {found}"]

    def _note_change(self, text: str, certain: bool) -> None:
        """Refuses or notes that rows differ from what they were before the resume."""
        assert self.record is not None
        if certain and not self.trainer.allow_changed_data:
            raise self.record.changed(text, self.place.path)
        trainer_log.warning("not an exact resume: %s", text)
        self.record.on(Note(self.trainer.state.global_step, text))

    def _run(self, record: RunRecord) -> Any:
        trainer = self.trainer
        trainer_log.info("***** Running training *****")
        trainer_log.info("  %d steps of %d rows", self.horizon.num_steps, trainer.get_total_train_batch_size())
        tell(trainer, "on_train_begin")
        if trainer.args.eval_on_start and record.state.step == 0:
            trainer._evaluate(self.trial, self.ignore_keys, skip_scheduler=True)
        if self.reactions.finish_restored_epoch():
            self._follow_events(record)
        self.reactions.end_epoch()
        output = self._finish()
        record.end("completed" if trainer.state.global_step >= trainer.state.max_steps else "break")
        return output

    def _follow_events(self, record: RunRecord) -> None:
        """The loop: every event is journalled, then acted on."""
        trainer, progress = self.trainer, self.progress
        at_once = trainer.runtime.device.type == "cpu" or not has_length(self.windows.loader)
        plan = plan_from_arguments(trainer.args, self.horizon, ended=progress.ended_epochs, read_at_once=at_once)
        if progress.steps_in_epoch:
            tell(trainer, "on_epoch_begin")
        if trainer.args.ignore_data_skip:
            progress.steps_in_epoch = 0  # the epoch is read from its beginning again
        for event in record.train(plan, self.windows, self.reactions.wants_numbers):
            if not self._act_on(event, record):
                return

    def _act_on(self, event: Event, record: RunRecord) -> bool:
        """Does what an event asks for; False ends the run."""
        if isinstance(event, StepDone):
            self.progress.add(event.loss, event.grad_norm, event.learning_rate)
        elif isinstance(event, MicroBatchSplit):
            text = "out of memory: micro-batches now have %d rows; the maths is the same"
            trainer_log.warning(text, event.rows_after)
        elif isinstance(event, Note):
            trainer_log.warning(event.text)
        elif isinstance(event, EpochStarted):
            return self.reactions.next_epoch(event.epoch)
        elif isinstance(event, SafePoint):
            return self._at_safe_point(event.step, record)
        return True

    def _at_safe_point(self, step: int, record: RunRecord) -> bool:
        trainer = self.trainer
        self.reactions.end_step(step)
        self.reactions.log_evaluate_save()
        number = record.agreed_signal()
        if number is not None:
            trainer._save_checkpoint(trainer.model, self.trial)
            record.end(f"signal {number}")
            raise record.stopped(number, trainer.state.global_step)
        if trainer.control.should_epoch_stop:
            self.windows.end_epoch()
        return not trainer.control.should_training_stop

    def _finish(self) -> Any:
        """Final metrics, best weights, `on_train_end`."""
        trainer, state = self.trainer, self.trainer.state
        steps = state.global_step - self.progress.first_step
        loss = self.progress.training_loss(state.global_step)
        samples = self.horizon.samples * steps / max(state.max_steps, 1)
        metrics = speed_metrics("train", self.progress.started, num_samples=samples, num_steps=steps)
        trainer.store_flos()
        metrics |= {"total_flos": state.total_flos, "train_loss": loss}
        trainer._memory_tracker.stop_and_update_metrics(metrics)
        trainer.log(metrics)
        if trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None:
            trainer._load_best_model()
        if trainer.args.should_save:
            rotate_run(self, at_end=True)
        tell(trainer, "on_train_end")
        trainer._finish_current_push()
        return TrainOutput(state.global_step, loss, metrics)
