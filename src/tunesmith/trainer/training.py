"""train(): the engine's `for`, with transformers' callbacks as listeners and their control flags turned into actions."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunesmith.engine.optim import detach_kernel
from tunesmith.engine.state import TrainState
from tunesmith.engine.stopping import StopRequest
from tunesmith.events import EpochStarted, Event, MicroBatchSplit, Note, SafePoint, Saved, StepDone
from tunesmith.fast.in_force import Strategies
from tunesmith.keep.plain import from_plain
from tunesmith.keep.record import RunRecord
from tunesmith.ranks.roster import RankRoster, rank_watch
from tunesmith.ranks.sharding import is_sharded
from tunesmith.run.layout import RunDir
from tunesmith.run.lock import RunLock
from tunesmith.session.run_session import Session, ending_well
from tunesmith.trainer.arguments import Horizon, plan_from_arguments
from tunesmith.trainer.checkpoints import load_trainer_state, rotate_run
from tunesmith.trainer.listeners import (
    evaluated_event,
    fresh_state,
    open_journal,
    require_room,
    rows_of_evaluation,
    tell,
)
from tunesmith.trainer.loaders import TrainWindows
from tunesmith.trainer.processes import naming_workers
from tunesmith.trainer.reactions import LoggedSums, Reactions
from tunesmith.trainer.run_identity import WORDING, UsedRows, compare_used_rows, model_mark, run_id_of, trainer_identity
from tunesmith.trainer.stepping import choose_speed_ups, prepared_model
from tunesmith.trainer.upstream import has_length, speed_metrics, trainer_log, utils
from tunesmith.trainer.validation import label_check, require_rows

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer


class TrainerRun:
    """One call of `train()`: all that it needs beside the Trainer, which outlives it."""

    horizon: Horizon
    windows: TrainWindows
    progress: LoggedSums
    reactions: Reactions

    def __init__(self, trainer: Trainer, place: RunDir, folder: Path | None, trial: Any, ignore_keys: Any) -> None:
        self.trainer, self.place, self.folder = trainer, place, folder
        self.trial, self.ignore_keys = trial, ignore_keys
        self.run_id = uuid.uuid4().hex if folder is None else run_id_of(folder)
        self.record: RunRecord | None = None
        self.speed_ups: Strategies | None = None
        self._journalled: set[tuple[int, str]] = set()

    @property
    def engine(self) -> TrainState | None:
        """The engine's state, once it is made."""
        return None if self.record is None else self.record.state

    def train(self) -> Any:
        """Sets up, trains, and undoes at the end what was done to model and optimizer for the time of it."""
        trainer = self.trainer
        trainer.is_in_train = True
        try:
            with self._surroundings() as (stop, roster):
                self.record = self._set_up(stop)
                with ending_well(self.record, roster):
                    self._begin_state(self.record)
                    output = self._run(self.record)
                    trainer._parts.search.keep(self.trial)
                    trainer.runtime.barrier()
                    return output
        finally:
            trainer.is_in_train = False
            self._undo_speed_ups()

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

    def _undo_speed_ups(self) -> None:
        """Leaves model and optimizer as a user knows them."""
        if self.speed_ups is not None:
            self.speed_ups.disable()
            self.speed_ups = None
        if self.trainer.optimizer is not None:
            detach_kernel(self.trainer.optimizer)

    def _set_up(self, stop: StopRequest | None) -> RunRecord:
        """Loader, length, optimizer and engine of the run."""
        trainer, args = self.trainer, self.trainer.args
        require_rows(trainer.train_dataset)
        loader = trainer.get_train_dataloader()
        mark = model_mark(trainer.model)
        per_step = trainer.get_total_train_batch_size()
        epochs, per_epoch, _, samples, _, batches, steps = trainer.set_initial_training_values(args, loader)
        self.horizon = Horizon(steps, epochs, per_epoch, batches, samples)
        if not is_sharded(trainer.model):  # by an earlier call of train
            trainer.model.to(trainer.runtime.device)  # before the speed-ups, which keep copies of weights beside them
        self.windows = self._make_windows(loader)
        if trainer.runtime.is_main:
            require_room(self.place, steps, saves=args.save_strategy != "no")
        trainer._parts.search.run_ids.add(self.run_id)
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
            trainer.runtime,
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
            record.restore(self.folder)
            trainer.state = load_trainer_state(self.folder)
            utils.compare_trainer_and_checkpoint_args(trainer.args, trainer.state)
            trainer._load_callback_state()
            trainer.lr_scheduler.load_state_dict(from_plain(engine.extra["trainer"]["scheduler"]))
            changed += self._compare_used_rows(record, self.folder)
        self.progress = LoggedSums(engine.step)
        if self.folder is not None:
            self.progress.restore(engine.extra["trainer"])
        self.reactions = Reactions(trainer, horizon, self.progress, self.trial, self.ignore_keys, self._note_saved)
        state = trainer.state
        state.is_hyper_param_search = self.trial is not None
        state.train_batch_size = trainer._train_batch_size
        state.compute_steps(trainer.args, horizon.num_steps)
        state.init_training_references(trainer, horizon.num_steps, horizon.num_epochs, self.trial)
        trainer._initial_num_input_tokens_seen = state.num_input_tokens_seen
        if trainer.runtime.is_main:
            self._journalled = open_journal(self, record, changed)

    def _compare_used_rows(self, record: RunRecord, folder: Path) -> list[str]:
        """Rows that were used before the checkpoint, read again: what changed, where that is allowed."""
        trainer, stored = self.trainer, record.state.extra["trainer"].get("used_rows")
        with_stream = trainer.runtime.is_main and not trainer.args.ignore_data_skip
        found = compare_used_rows(self.windows.used, stored, self.windows.loader, with_stream=with_stream)
        if found is not None and not trainer.allow_changed_data:
            raise record.changed(found, folder)
        if found is not None:
            trainer_log.warning("not an exact resume: resumes although %s", found)
        return [] if found is None else [f"resumes although {found}"]

    def _note_change(self, text: str, certain: bool) -> None:
        """Rows that come again after a resume are not what they were."""
        if certain and not self.trainer.allow_changed_data and self.record is not None:
            raise self.record.changed(text, self.place.path)
        trainer_log.warning("not an exact resume: %s", text)
        self._record(Note(self.trainer.state.global_step, text))

    def _record(self, event: Event) -> None:
        if self.record is not None:
            self.record.on(event)

    def _note_saved(self, name: str, seconds: float) -> None:
        self._record(Saved(self.trainer.state.global_step, name, seconds))

    def note_evaluation(self, prefix: str, output: Any, seconds: float) -> None:
        """Writes an evaluation during training to the journal, unless it was there before a resume."""
        event = evaluated_event(self.trainer.state, prefix, output, seconds)
        if self.record is None or (event.step, event.split) in self._journalled:
            return
        rows = rows_of_evaluation(self.trainer, event.split, output)
        if rows is not None:
            self._record(rows)
        self._record(event)

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
        for event in Session(plan, self.windows, record).events(self.reactions.wants_numbers):
            if not self._act_on(event):
                return

    def _act_on(self, event: Event) -> bool:
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
            return self._at_safe_point(event.step)
        return True

    def _at_safe_point(self, step: int) -> bool:
        trainer = self.trainer
        self.reactions.end_step(step)
        self.reactions.log_evaluate_save()
        number = None if self.record is None else self.record.agreed_signal()
        if self.record is not None and number is not None:
            trainer._save_checkpoint(trainer.model, self.trial)
            self.record.end(f"signal {number}")
            raise self.record.stopped(number, trainer.state.global_step)
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
        return utils.TrainOutput(state.global_step, loss, metrics)
