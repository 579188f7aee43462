"""train(): the engine's `for`, with transformers' callbacks as listeners and their control flags turned into actions."""

from __future__ import annotations

import contextlib
import time
import uuid
from pathlib import Path
from typing import Any

from tunesmith.errors import NumericsError, StoppedBySignal
from tunesmith.events import (
    EpochStarted,
    Event,
    MicroBatchSplit,
    NonFinite,
    Note,
    RunEnded,
    SafePoint,
    StepDone,
)
from tunesmith.run.layout import RunDir
from tunesmith.run.lock import RunLock
from tunesmith.train.checkpoint import load_checkpoint
from tunesmith.train.loop import train_events
from tunesmith.train.plain import from_plain
from tunesmith.train.rank_watch import rank_watch
from tunesmith.train.sharding import is_sharded
from tunesmith.train.signals import StopRequest
from tunesmith.trainer.arguments import make_plan
from tunesmith.trainer.comparison import ComparisonPart
from tunesmith.trainer.data import DataPart
from tunesmith.trainer.evaluation import EvaluationPart
from tunesmith.trainer.identity import make_identity, model_mark, require_same_run, run_id_of
from tunesmith.trainer.journalling import JournalPart, require_room
from tunesmith.trainer.label_range import label_check, require_rows
from tunesmith.trainer.length import LengthPart
from tunesmith.trainer.loaders import TrainWindows
from tunesmith.trainer.methods import check_overrides
from tunesmith.trainer.preparation import choose_speed_ups, prepared_model, seed_for
from tunesmith.trainer.progress import Progress
from tunesmith.trainer.reactions import ReactionPart
from tunesmith.trainer.resuming import find_checkpoint, load_trainer_state
from tunesmith.trainer.stepping import SteppingPart
from tunesmith.trainer.upstream import has_length, speed_metrics, trainer_log, utils
from tunesmith.trainer.used_rows import UsedRows
from tunesmith.trainer.workers import naming_workers


class TrainPart(SteppingPart, ReactionPart, JournalPart, EvaluationPart, LengthPart, DataPart, ComparisonPart):
    """The training run of a Trainer."""

    use_speed_ups: bool = True
    """Padding-free batches and the like, where they compute the same; set it to False to go without."""
    _stop: StopRequest | None = None

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Trains to the end of the plan, or until a callback says stop. Returns (global_step, training_loss, metrics)."""
        check_overrides(type(self), vars(self))
        self._memory_tracker.start()
        if self.model_init is not None:
            seed_for(self.args)
            self.model = self.call_model_init(trial)  # type: ignore[attr-defined]
            self.model_wrapped = self.model
            self.optimizer, self.lr_scheduler = None, None
            self._signature_columns = None
        self._hp_search_setup(trial)  # type: ignore[attr-defined]
        run = RunDir(self._get_output_dir(trial))
        wanted = None if resume_from_checkpoint is False else resume_from_checkpoint
        folder = None if wanted is None else find_checkpoint(wanted, str(run.path))
        self._take_batch_size_of(folder)
        while True:
            try:
                return self._train_in(run, folder, trial, ignore_keys_for_eval)
            except (RuntimeError, MemoryError) as error:
                if not self._takes_smaller_batches(error):
                    raise

    def _train_in(self, run: RunDir, folder: Path | None, trial: Any, ignore_keys_for_eval: Any) -> Any:
        """One attempt at a run, with everything around it that is undone at its end."""
        self.is_in_train = True
        try:
            with contextlib.ExitStack() as stack:
                if self.runtime.is_main:
                    stack.enter_context(RunLock(run.lock_file))
                self._stop = stack.enter_context(StopRequest()) if self.args.enable_jit_checkpoint else None
                stack.enter_context(rank_watch(self.runtime))
                stack.enter_context(naming_workers())
                stack.enter_context(prepared_model(self))
                self._set_up(run, folder, trial)
                output = self._run(run, trial, ignore_keys_for_eval)
                self._keep_trial(trial)  # type: ignore[attr-defined]
                self.runtime.barrier()
                return output
        finally:
            self.is_in_train = False
            self._undo_speed_ups()
            if self._journal is not None:
                self._journal.close()
                self._journal = None

    def _set_up(self, run: RunDir, folder: Path | None, trial: Any) -> None:
        """Loader, plan, optimizer, engine state; and everything a checkpoint brings back."""
        args = self.args
        require_rows(self.train_dataset)
        loader = self.get_train_dataloader()
        mark = model_mark(self.model)
        per_step = self.get_total_train_batch_size()
        self._horizon = self._length_of_run(loader)
        if not is_sharded(self.model):  # by an earlier call of train
            self.model.to(self.runtime.device)  # before the speed-ups, which keep copies of weights beside them
        token_rows, padding = self._fast_rows(loader)
        self._speed_ups = choose_speed_ups(self, token_rows, padding)
        collate = padding if self._speed_ups is None else self._speed_ups.train_collate
        seed = args.seed if args.data_seed is None else args.data_seed
        self._windows = TrainWindows(
            loader,
            args.gradient_accumulation_steps,
            seed,
            self.runtime,
            self._clock,
            token_rows,
            collate,
            args.ignore_data_skip,
            pinned=self.runtime.device.type == "cuda" and args.dataloader_pin_memory,
            used=UsedRows(len(self.train_dataset) if has_length(self.train_dataset) else None, self._note_change),
            check=label_check(self),
        )
        if self.runtime.is_main:
            require_room(run, self._horizon.num_steps, saves=args.save_strategy != "no")
        self._run_id = uuid.uuid4().hex if folder is None else run_id_of(folder)
        self._own_runs.add(self._run_id)
        self._identity = make_identity(
            self, getattr(loader, "dataset", self.train_dataset), mark, self._run_id, per_step
        )
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer_and_scheduler(self._horizon.num_steps)
        self._engine = self._make_engine()
        self._begin_state(run, folder, trial)
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader

    def _begin_state(self, run: RunDir, folder: Path | None, trial: Any) -> None:
        """A fresh TrainerState and journal, or those of the checkpoint."""
        assert self._engine is not None
        self.state = self._fresh_state()
        changed: list[str] = []
        if folder is not None:
            changed = require_same_run(folder, self._identity, allow=self.allow_changed_data)
            load_checkpoint(folder, self._engine)
            self.state = load_trainer_state(folder)
            utils.compare_trainer_and_checkpoint_args(self.args, self.state)
            self._load_callback_state()
            self.lr_scheduler.load_state_dict(from_plain(self._engine.extra["trainer"]["scheduler"]))
            changed += self._compare_used_rows(folder)
        self._progress = Progress(self._engine.step)
        if folder is not None:
            self._restore_progress(self._engine.extra["trainer"])
        self.state.is_hyper_param_search = trial is not None
        self.state.train_batch_size = self._train_batch_size
        self.state.compute_steps(self.args, self._horizon.num_steps)
        self.state.init_training_references(self, self._horizon.num_steps, self._horizon.num_epochs, trial)
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        if self.runtime.is_main:
            self._open_journal(run, folder, changed)

    def _restore_progress(self, notes: dict[str, Any]) -> None:
        progress = self._progress
        progress.ended_epochs = list(notes["ended_epochs"])
        progress.epoch, progress.steps_in_epoch = notes["epoch"], notes["steps_in_epoch"]
        progress.loss_since_log, progress.logged_step = notes["loss_since_log"], notes["logged_step"]
        progress.epoch_open = notes["epoch_open"]
        progress.loss_total = -progress.loss_since_log  # those steps belong to the mean of an earlier call

    def _run(self, run: RunDir, trial: Any, ignore_keys: Any) -> Any:
        assert self._engine is not None
        self._trial, self._ignore_keys = trial, ignore_keys
        trainer_log.info("***** Running training *****")
        trainer_log.info("  %d steps of %d rows", self._horizon.num_steps, self.get_total_train_batch_size())
        self._tell("on_train_begin")
        if self.args.eval_on_start and self._engine.step == 0:
            self._evaluate(trial, ignore_keys, skip_scheduler=True)
        if self._finish_restored_epoch():
            self._follow_events()
        self._end_epoch()
        output = self._finish(run)
        if self._journal is not None:
            done = self.state.global_step >= self.state.max_steps
            self._journal.append(RunEnded(self.state.global_step, "completed" if done else "break", time.time()))
        return output

    def _follow_events(self) -> None:
        """The loop: every event is journalled, then acted on."""
        assert self._engine is not None
        plan = make_plan(
            self.args,
            self._horizon,
            ended=self._progress.ended_epochs,
            read_at_once=self.runtime.device.type == "cpu" or not has_length(self._windows.loader),
        )
        if self._progress.steps_in_epoch:
            self._tell("on_epoch_begin")
        if self.args.ignore_data_skip:
            self._progress.steps_in_epoch = 0  # the epoch is read from its beginning again
        for event in train_events(self._engine, self._windows, plan, wants_read_back=self._wants_numbers):
            if self._journal is not None:
                self._journal.append(event)
            if not self._act_on(event):
                return

    def _act_on(self, event: Event) -> bool:
        """Does what an event asks for; False ends the run."""
        if isinstance(event, StepDone):
            self._progress.add(event.loss, event.grad_norm, event.learning_rate)
        elif isinstance(event, NonFinite):
            self._refuse(event)
        elif isinstance(event, MicroBatchSplit):
            trainer_log.warning(
                "out of memory: micro-batches now have %d rows; the maths is the same", event.rows_after
            )
        elif isinstance(event, Note):
            trainer_log.warning(event.text)
        elif isinstance(event, EpochStarted):
            return self._next_epoch(event.epoch)
        elif isinstance(event, SafePoint):
            return self._at_safe_point()
        return True

    def _at_safe_point(self) -> bool:
        self._end_step(self._engine.step if self._engine is not None else 0)
        self._log_evaluate_save()
        signals = [] if self._stop is None else self.runtime.gather_objects(self._stop.signal)
        number = next((s for s in signals if s is not None), None)
        if number is not None:
            self._save_checkpoint(self.model, self._trial)
            raise StoppedBySignal(
                number,
                f"stopped by signal {number} after step {self.state.global_step}; everything is saved: "
                "train(resume_from_checkpoint=True) goes on from here",
            )
        if self.control.should_epoch_stop:
            self._windows.end_epoch()
        return not self.control.should_training_stop

    def _refuse(self, event: NonFinite) -> None:
        """A number that is not finite ends the run; the weights are those before this step."""
        rows = ", ".join(str(r) for r in event.rows[:8]) + (", ..." if len(event.rows) > 8 else "")
        raise NumericsError(
            f"step {event.step}: {event.what} {event.tensor} is not finite (training rows {rows}); "
            "the update was not applied",
            where=str(self.args.output_dir),
            fix="Lower learning_rate, use bf16 instead of fp16, or look at these rows.",
        )

    def _finish(self, run: RunDir) -> Any:
        """Final metrics, best weights, `on_train_end`."""
        steps = self.state.global_step - self._progress.first_step
        loss = self._progress.training_loss(self.state.global_step)
        samples = self._horizon.samples * steps / max(self.state.max_steps, 1)
        metrics = speed_metrics("train", self._progress.started, num_samples=samples, num_steps=steps)
        self.store_flos()
        metrics |= {"total_flos": self.state.total_flos, "train_loss": loss}
        self._memory_tracker.stop_and_update_metrics(metrics)
        self.log(metrics)
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        if self.args.should_save:
            self._rotate(run, at_end=True)
        self._tell("on_train_end")
        self._finish_current_push()  # type: ignore[attr-defined]
        return utils.TrainOutput(self.state.global_step, loss, metrics)
