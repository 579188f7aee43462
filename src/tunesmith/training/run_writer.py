"""What both doors do alike for a run on disk: find and remove its checkpoints, compare a resume, train with every event in the
journal, refuse a NaN, agree on a stop, end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tunesmith.errors import CheckpointError, NumericsError, ResourceError, StoppedBySignal, TunesmithError, short_text
from tunesmith.events import Event, Improved, NonFinite, Note, Resumed, RunEnded, RunStarted, SafePoint, Saved
from tunesmith.runs.environment import fault_point
from tunesmith.runs.event_log import LOST_JOURNAL, Journal, truncate_journal
from tunesmith.runs.folder import RunDir, checkpoint_step
from tunesmith.runs.manifest import read_manifest, require_space, sweep, verify, write_sealed
from tunesmith.runs.writing import disk_error
from tunesmith.training.aside import Aside, has_device_room, has_room
from tunesmith.training.checkpoint import (
    PIECES,
    VOCABULARY,
    Due,
    Identity,
    Snapshot,
    bytes_of,
    capture,
    differences,
    link_files,
    load_checkpoint,
    newest_intact,
    rotate,
)
from tunesmith.training.distributed import RankRoster
from tunesmith.training.loop import BatchSource, Evaluate, train_events
from tunesmith.training.schedule import Plan
from tunesmith.training.state import TrainState
from tunesmith.training.stopping import StopRequest, is_exhausted

Listener = Callable[[Event], None]
GOOD_ENDS = ("completed", "early_stopping")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wording:
    """The wording of a door's advice: the spelling of its options, and how a run is resumed."""

    changed: str
    """What to do about a run that differs from its checkpoint."""
    resume: str
    """What continues a run that was stopped."""
    option: str = "--"
    """The prefix of an option's name."""


COMMAND = Wording(
    "Put it back, give another --output_dir, or --allow_changed_data to resume all the same.",
    "the same command resumes from here",
)


@dataclass
class RunRecord:
    """The journal of one run and the rules about it. Rank 0 alone touches the disk: elsewhere `journal` is None."""

    run: RunDir
    state: TrainState
    identity: Identity
    allow_changed: bool = False
    stop: StopRequest | None = None
    listeners: list[Listener] = field(default_factory=list)
    wording: Wording = COMMAND
    journal: Journal | None = field(init=False, default=None)

    def compare(self, folder: Path) -> tuple[list[str], list[str]]:
        """(what differs between a checkpoint's run and this one, the notes about it for the user). A difference is refused
        unless changes are allowed, as the position in the data means something else then."""
        found, reported = differences(folder, self.identity)
        if found and not self.allow_changed:
            raise self.changed(f"this run was started with something else: {'; '.join(found)}", folder)
        return found, [f"resumes although {text}" for text in found] + reported

    def changed(self, problem: str, where: Path) -> CheckpointError:
        """The error for a run that differs from its checkpoint."""
        return CheckpointError(problem, where=str(where), fix=self.wording.changed)

    def open(self, event: RunStarted | Resumed, notes: Sequence[str] = ()) -> None:
        """Starts the journal anew, or continues it from the step of a checkpoint."""
        if not self.state.runtime.is_main:
            return
        file, fresh = self.run.journal_file, isinstance(event, RunStarted)
        lost = [] if fresh or file.exists() else [LOST_JOURNAL]
        if fresh:
            file.unlink(missing_ok=True)
        else:
            truncate_journal(file, event.step)
        self.journal = Journal(file)
        self.on(event)
        for text in (*lost, *notes):
            self.on(Note(event.step, text))

    def train(
        self,
        plan: Plan,
        batches: BatchSource,
        wants_read_back: Callable[[int], bool],
        evaluate: Evaluate | None = None,
    ) -> Iterator[Event]:
        """Trains to the end of the plan. `on` has acted on each event before it is yielded."""
        for event in train_events(self.state, batches, plan, evaluate=evaluate, wants_read_back=wants_read_back):
            self.on(event)
            yield event

    @contextmanager
    def ending_well(self, roster: RankRoster) -> Iterator[None]:
        """Around a run: the journal ends with the error that ended the run, and a lost rank is named."""
        try:
            yield
        except TunesmithError as error:
            self.end(type(error).__name__)
            last = [folder.name for folder in self.run.checkpoints()][-1:]
            if isinstance(error, ResourceError) and self.state.phase == "update" and last:
                problem = f"{error.problem}; last checkpoint: {last[0]}"
                raise ResourceError(problem, where=str(self.run.path), fix=error.fix) from error
            raise
        except RuntimeError as error:
            lost = roster.explain(error)
            if lost is None:
                raise
            self.end("WorkerError")
            raise lost from error
        finally:
            self.close()

    def on(self, event: Event) -> None:
        """Hands an event to the journal and the listeners."""
        if self.journal is not None:
            try:
                self.journal.append(event)
            except OSError as error:
                raise disk_error(error, self.run.journal_file) from error
        for listener in self.listeners:
            listener(event)
        if isinstance(event, NonFinite):
            self._refuse(event)

    def _refuse(self, event: NonFinite) -> None:
        """Ends a run with a number that is not finite; the weights are those before this step."""
        self.end("NumericsError")
        last = max(self.run.checkpoints(), default=None, key=checkpoint_step)
        rows = ", ".join(str(r) for r in event.rows[:8]) + (", ..." if len(event.rows) > 8 else "")
        dash = self.wording.option
        raise NumericsError(
            f"step {event.step}: {event.what} {event.tensor} is not finite (training rows {rows}); the update was not applied"
            + (f"; last good checkpoint: {last.name}" if last is not None else ""),
            where=str(self.run.path),
            fix=f"Lower {dash}learning_rate, use {dash}bf16 instead of {dash}fp16, or look at these rows.",
        )

    def agreed_signal(self) -> int | None:
        """The signal that asks all ranks to stop here, if one came to any of them."""
        if self.stop is None:
            return None
        return self.state.runtime.largest(self.stop.signal or 0) or None

    def stopped(self, number: int, step: int) -> StoppedBySignal:
        """The error that ends a run which was saved because of a signal."""
        return StoppedBySignal(number, f"after step {step}; everything is saved: {self.wording.resume}")

    def end(self, reason: str) -> None:
        """Writes the last event. A run that ended well is not over before that is on disk."""
        if self.journal is not None:
            if reason in GOOD_ENDS:
                self.journal.settle()
            self.on(RunEnded(self.state.step, reason, time.time()))
            self.journal.close()
            self.journal = None

    def close(self) -> None:
        """Closes the journal; raises nothing, as it runs while another error is on its way out."""
        journal, self.journal = self.journal, None
        if journal is not None:
            try:
                journal.close()
            except OSError as error:
                log.warning("%s: cannot be closed: %s", self.run.journal_file, error.strerror)


ASIDE_FROM = 64 << 20
"""Bytes. A smaller checkpoint is written faster than a thread pays off (BERT-base: 1.3 GB, 0.8 s; a copy 0.1 s)."""


@dataclass(kw_only=True)
class RunKeeper(RunRecord):
    """A record that also saves by the plan and keeps the best weights."""

    plan: Plan
    describe: Callable[[Path], None]
    """Writes what makes a weights folder loadable (config, tokenizer)."""
    keep_checkpoints: int = 1
    keep_best: bool = True
    stop: StopRequest = field(default_factory=StopRequest)
    aside_from: int = ASIDE_FROM
    """Bytes of a checkpoint from which on the run copies it and continues while a thread writes it."""
    _aside: Aside = field(init=False, default_factory=Aside)
    _waiting: Due | None = field(init=False, default=None)
    """A checkpoint on the device that is newer than all that the thread was given."""
    _improved: bool = field(init=False, default=False)

    def begin(self, started: RunStarted) -> None:
        """Resumes from the newest intact checkpoint if there is one, else starts the journal anew."""
        main = self.state.runtime.is_main
        if main:
            try:
                self.run.path.mkdir(parents=True, exist_ok=True)
                sweep(self.run.path)
            except OSError as error:
                raise disk_error(error, self.run.path) from error
        # Rank 0 decides for all: on a shared disk two ranks may see different files.
        newest, skipped = newest_intact(self.run) if main else (None, ())
        name, skipped = self.state.runtime.gather_objects((newest and newest.name, skipped))[0]
        folder = None if name is None else self.run.path / name
        if folder is None and skipped:
            raise CheckpointError(
                f"no intact checkpoint is left: {'; '.join(skipped)}",
                where=str(self.run.path),
                fix="Remove the run folder to train from the start, or restore the files.",
            )
        if main:
            self._require_space(fresh=folder is None)
        if folder is not None:
            self._resume(folder, skipped)
        else:
            self.open(started)
        self.state.runtime.barrier()

    def _resume(self, folder: Path, skipped: tuple[str, ...]) -> None:
        found, notes = self.compare(folder)
        load_checkpoint(folder, self.state, settings=not found)
        self.open(Resumed(self.state.step, folder.name, skipped, time.time()), notes)
        if not self.state.runtime.is_main:
            return
        if self.keep_best and self.state.progress.step == self.state.step:
            self._link_best(folder)
        elif self.keep_best and self.state.progress.step is not None:
            self._require_best()

    def _require_space(self, *, fresh: bool) -> None:
        """Room for what the run will have on disk at once: two checkpoints while one replaces the other, best/ and model/."""
        weights, whole = bytes_of(self.state)
        saves = self.plan.save.cadence != "no" or self.keep_best
        require_space(self.run.path, (whole * (2 if fresh else 1) if saves else 0) + weights * (2 if fresh else 1))

    def _require_best(self) -> None:
        """best/ must hold the weights of the best step that the checkpoint records, or the run would end with other weights."""
        wanted = self.state.progress.step
        try:
            found = read_manifest(self.run.best)["step"]
            if found > self.state.step:
                return  # newer than this checkpoint: the run comes to that step again and replaces it
            problem = f"holds the weights of step {found}, the best are those of step {wanted}"
            if found == wanted:
                verify(self.run.best)
                return
        except CheckpointError as error:
            problem = error.line()
        home = self.run.checkpoint(wanted or 0)
        try:
            verify(home)
        except CheckpointError:
            raise CheckpointError(
                f"{problem}, and there is no other copy",
                where=str(self.run.best),
                fix="Restore best/, or remove the run folder to train from the start.",
            ) from None
        self._link_best(home)

    def on(self, event: Event) -> None:
        """Hands an event to the journal and the listeners, and acts on it."""
        super().on(event)
        if isinstance(event, Improved):
            self._improved = True
        elif isinstance(event, SafePoint):
            self._at_safe_point(event.step)

    def wants_read_back(self, step: int) -> bool:
        """Whether the numbers of all steps up to here are needed now."""
        return self._improved or self.stop.signal is not None

    def _at_safe_point(self, step: int) -> None:
        self._take_save(wait=False)
        number = self.agreed_signal()
        over = is_exhausted(self.state.progress, self.plan.patience)
        due = self.plan.save.due(step) or (self._improved and self.keep_best) or number is not None or over
        if due and step > 0:
            self.save(step, wait=number is not None)
        elif number is not None:
            self._take_save(wait=True)
        elif not self._aside.is_busy():
            self._start_waiting()
        fault_point("step.end")
        if number is not None:
            self.end(f"signal {number}")
            raise self.stopped(number, step)

    def save(self, step: int, *, wait: bool = True) -> None:
        """Publishes checkpoint, then best weights, then removes older checkpoints: in this order, and by step.

        Without `wait` a large checkpoint may be written after this returns; a signal and the end wait for it. Where one is kept,
        saves come faster than the disk takes them and the device has room for copies, some are skipped: steps continue, and the
        newest copy replaces the one that waits. A crash costs what was done since the last checkpoint that was published.
        """
        runtime, buffers = self.state.runtime, self._aside.buffers
        size = 0 if wait or runtime.world > 1 else bytes_of(self.state)[1]
        aside = size >= max(self.aside_from, 1) and has_room(size)
        stays = aside and has_device_room(runtime.device, size)
        skips = stays and self.keep_checkpoints == 1
        improved = self._improved and self.keep_best
        if not skips:
            self._take_save(wait=True)
        elif self._waiting is not None and self._waiting.improved and not improved:
            self._start_needed(step)
        started = time.perf_counter()
        if self.journal is not None:
            self.journal.settle()
        snapshot = capture(self.state, self.identity, buffers, stays=stays)
        self._improved = False
        if snapshot is not None and aside:
            self._waiting = Due(step, snapshot if stays else snapshot.copied(buffers), improved)
            if not skips or self._is_over(step) or not self._aside.is_busy():
                self._start_waiting()
        elif snapshot is not None:
            self._publish(step, snapshot, improved)
            self._say_saved(step, time.perf_counter() - started)
        runtime.barrier()

    def _is_over(self, step: int) -> bool:
        return step >= self.plan.num_steps or is_exhausted(self.state.progress, self.plan.patience)

    def _start_needed(self, step: int) -> None:
        """Starts the waiting checkpoint, which that of this step does not replace. One copy is left to the thread, or the device
        would fill up; after the last step no further ones come."""
        self._start_waiting()
        while len(self._aside.steps()) > 1 and not self._is_over(step):
            self._report(wait=True)

    def _start_waiting(self) -> None:
        """Gives the waiting checkpoint to the thread, behind what it still writes."""
        due, self._waiting = self._waiting, None
        if due is not None:
            self._aside.start(lambda: self._publish_aside(due), due.step)

    def _publish_aside(self, due: Due) -> None:
        due.snapshot = due.snapshot.copied(self._aside.buffers)  # the device's memory is free from here on
        self._publish(due.step, due.snapshot, due.improved)

    def _publish(self, step: int, snapshot: Snapshot, improved: bool) -> None:
        folder = self.run.checkpoint(step)
        snapshot.write(folder, self.describe)
        if improved:
            self._link_best(folder)
        try:
            rotate(self.run, self.identity.run_id, keep=self.keep_checkpoints, last=step)
        except OSError as error:
            raise disk_error(error, self.run.path) from error

    def _take_save(self, *, wait: bool) -> None:
        """Reports the checkpoints that were written aside once they are published, with `wait` all that are due; raises the error
        that prevented one."""
        if wait:
            self._start_waiting()
        while self._report(wait=wait):
            pass

    def _report(self, *, wait: bool) -> bool:
        """Reports the oldest checkpoint of the thread; False when there is none to report."""
        try:
            done = self._aside.take(wait=wait)
        except BaseException:
            self._waiting = None  # nothing is published behind one that could not be
            raise
        if done is not None:
            self._say_saved(*done)
        return done is not None

    def _settle_save(self) -> None:
        """Waits for the checkpoints written aside while another error propagates: their own error is only logged."""
        try:
            self._take_save(wait=True)
        except Exception as error:
            log.warning("%s", error.line() if isinstance(error, TunesmithError) else short_text(error))

    def _say_saved(self, step: int, seconds: float) -> None:
        self.on(Saved(step, self.run.checkpoint(step).name, seconds))

    def _link_best(self, folder: Path) -> None:
        """The weights of a checkpoint as `best/`: hard links where the disk can, so they cost nothing."""
        manifest = read_manifest(folder)
        names = [n for n in manifest["files"] if n not in (*PIECES, VOCABULARY)]

        def fill(tmp: Path) -> dict[str, str]:
            link_files(folder, tmp, names)
            return {name: manifest["files"][name]["sha256"] for name in names}

        fault_point("best.begin")
        meta = {"kind": "best", "step": manifest["step"], **self.identity.to_json()}
        write_sealed(self.run.best, fill, meta)

    def _refuse(self, event: NonFinite) -> None:
        if self.plan.nan_action != "skip":
            super()._refuse(event)

    @contextmanager
    def best_weights(self) -> Iterator[Path | None]:
        """The folder of the best weights; None when the model has them: no evaluation was the best, or the last one.

        They are hashed while they are used; where that finds damage, its error ends the block, whatever else did.
        """
        self._start_waiting()  # the steps are over
        if not self.keep_best or self.state.progress.step in (None, self.state.step):
            yield None
            return
        while self._report(wait=self.state.progress.step in self._aside.steps()):
            pass
        best, check = self.run.best, Aside()
        held = read_manifest(best)["step"]
        if held != self.state.progress.step:
            problem = f"holds the weights of step {held}, the best are those of step {self.state.progress.step}"
            raise CheckpointError(problem, where=str(best))
        check.start(lambda: verify(best))
        try:
            yield best
        finally:
            check.take(wait=True)

    def end(self, reason: str) -> None:
        """Writes the last event and closes the journal. A run that ended well is not over before that is on disk."""
        try:
            if reason in GOOD_ENDS:
                self._take_save(wait=True)
            self._settle_save()
            super().end(reason)
        except (TunesmithError, OSError) as error:
            if reason in GOOD_ENDS:
                if isinstance(error, OSError):
                    raise disk_error(error, self.run.journal_file) from error
                raise
        finally:
            self.close()

    def close(self) -> None:
        """Closes the journal; raises nothing, as it runs while another error is on its way out."""
        self._settle_save()
        super().close()
