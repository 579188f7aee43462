"""Keeps a run on disk: journal, checkpoints, the best weights. A listener of the loop; decides nothing about the maths."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tunesmith.errors import CheckpointError, NumericsError, StoppedBySignal, TunesmithError, short_text
from tunesmith.events import Event, Improved, NonFinite, Note, Resumed, RunEnded, RunStarted, SafePoint, Saved
from tunesmith.run.fault_points import fault_point
from tunesmith.run.journal import LOST_JOURNAL, Journal, truncate_journal
from tunesmith.run.layout import RunDir
from tunesmith.run.sealed import read_manifest, require_space, sweep, verify, write_sealed
from tunesmith.run.writing import disk_error
from tunesmith.train.checkpoint import (
    PIECES,
    VOCABULARY,
    Identity,
    bytes_of,
    capture,
    differences,
    load_checkpoint,
    version_changes,
)
from tunesmith.train.history import newest_intact, rotate
from tunesmith.train.plan import Plan
from tunesmith.train.signals import StopRequest
from tunesmith.train.snapshot import ASIDE_FROM, Aside, Snapshot, has_room, link_files
from tunesmith.train.state import TrainState
from tunesmith.train.stopping import is_exhausted

Listener = Callable[[Event], None]

log = logging.getLogger(__name__)
_GOOD_ENDS = ("completed", "early_stopping")


@dataclass
class RunKeeper:
    """`describe` writes what makes a weights folder loadable (config, tokenizer). Rank 0 alone touches the disk."""

    run: RunDir
    state: TrainState
    plan: Plan
    identity: Identity
    describe: Callable[[Path], None]
    keep_checkpoints: int = 1
    keep_best: bool = True
    allow_changed: bool = False
    stop: StopRequest = field(default_factory=StopRequest)
    listeners: list[Listener] = field(default_factory=list)
    aside_from: int = ASIDE_FROM
    """Bytes of a checkpoint from which on the run copies it and goes on while a thread writes it."""
    _aside: Aside = field(init=False, default_factory=Aside)
    _aside_step: int = field(init=False, default=0)
    _journal: Journal | None = field(init=False, default=None)
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
        # Rank 0 looks and the others follow it: on a shared disk two ranks may see two things.
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
        elif main:
            self.run.journal_file.unlink(missing_ok=True)
            self._journal = Journal(self.run.journal_file)
            self.on(started)
        self.state.runtime.barrier()

    def _resume(self, folder: Path, skipped: tuple[str, ...]) -> None:
        found = differences(folder, self.identity)
        if found and not self.allow_changed:
            raise CheckpointError(
                f"this run was started with something else: {'; '.join(found)}",
                where=str(folder),
                fix="Put it back, give another --output_dir, or --allow_changed_data to go on all the same.",
            )
        load_checkpoint(folder, self.state, settings=not found)
        if not self.state.runtime.is_main:
            return
        lost = [] if self.run.journal_file.exists() else [LOST_JOURNAL]
        truncate_journal(self.run.journal_file, self.state.step)
        self._journal = Journal(self.run.journal_file)
        self.on(Resumed(self.state.step, folder.name, skipped, time.time()))
        for text in lost + [f"resumes although {f}" for f in found] + version_changes(folder, self.identity):
            self.on(Note(self.state.step, text))
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
        """best/ must hold the weights that the checkpoint's counters speak of, or the run would end with other ones."""
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
        if self._journal is not None:
            try:
                self._journal.append(event)
            except OSError as error:
                raise disk_error(error, self.run.journal_file) from error
        for listener in self.listeners:
            listener(event)
        if isinstance(event, Improved):
            self._improved = True
        elif isinstance(event, NonFinite):
            self._refuse(event)
        elif isinstance(event, SafePoint):
            self._at_safe_point(event.step)

    def wants_read_back(self, step: int) -> bool:
        """Whether the numbers of all steps up to here are needed now."""
        return self._improved or self.stop.signal is not None

    def _at_safe_point(self, step: int) -> None:
        self._take_save(wait=False)
        runtime = self.state.runtime
        number = runtime.largest(self.stop.signal or 0) or None
        over = is_exhausted(self.state.progress, self.plan.patience)
        due = self.plan.save.due(step) or (self._improved and self.keep_best) or number is not None or over
        wait = number is not None or over or step >= self.plan.num_steps
        if due and step > 0:
            self.save(step, wait=wait)
        elif wait:
            self._take_save(wait=True)
        fault_point("step.end")
        if number is not None:
            self.end(f"signal {number}")
            raise StoppedBySignal(
                number,
                f"stopped by signal {number} after step {step}; everything is saved: the same command goes on from here",
            )

    def save(self, step: int, *, wait: bool = True) -> None:
        """Publishes checkpoint, then best weights, then removes older checkpoints: in this order.

        Without `wait` a large checkpoint may be written after this returns; the next save, a signal and the end wait.
        """
        self._take_save(wait=True)
        started = time.perf_counter()
        if self._journal is not None:
            self._journal.settle()
        snapshot = capture(self.state, self.identity)
        improved, self._improved = self._improved and self.keep_best, False
        if snapshot is not None:
            alone = self.state.runtime.world == 1
            if wait or not alone or snapshot.size < self.aside_from or not has_room(snapshot.size):
                self._publish(step, snapshot, improved)
                self._say_saved(step, time.perf_counter() - started)
            else:
                copy = snapshot.copied(self._aside.buffers)
                self._aside_step = step
                self._aside.start(lambda: self._publish(step, copy, improved))
        self.state.runtime.barrier()

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
        """Says that the checkpoint written aside is there, once it is; raises what went wrong with it."""
        seconds = self._aside.take(wait=wait)
        if seconds is not None:
            self._say_saved(self._aside_step, seconds)

    def _settle_save(self) -> None:
        """Waits for the checkpoint written aside while another error is on its way out: its own is only logged."""
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
        if self.plan.nan_action == "skip":
            return
        self._settle_save()
        last = max((p.name for p in self.run.checkpoints()), default=None, key=lambda n: int(n.rsplit("-", 1)[1]))
        rows = ", ".join(str(r) for r in event.rows[:8]) + (", ..." if len(event.rows) > 8 else "")
        self.end("NumericsError")
        raise NumericsError(
            f"step {event.step}: {event.what} {event.tensor} is not finite (training rows {rows}); the update was not applied"
            + (f"; last good checkpoint: {last}" if last else ""),
            where=str(self.run.path),
            fix="Lower --learning_rate, use --bf16 instead of --fp16, or look at these rows.",
        )

    def best_weights(self) -> Path | None:
        """The folder of the best weights, verified, or None when no evaluation was the best."""
        if not self.keep_best or self.state.progress.step is None:
            return None
        found = verify(self.run.best)
        if found["step"] != self.state.progress.step:
            raise CheckpointError(
                f"holds the weights of step {found['step']}, the best are those of step {self.state.progress.step}",
                where=str(self.run.best),
            )
        return self.run.best

    def end(self, reason: str) -> None:
        """Writes the last event and closes the journal. A run that ended well is not over before that is on disk."""
        journal = self._journal
        try:
            if reason in _GOOD_ENDS:
                self._take_save(wait=True)
            self._settle_save()
            if journal is not None:
                if reason in _GOOD_ENDS:
                    journal.settle()
                self.on(RunEnded(self.state.step, reason, time.time()))
                journal.close()
        except (TunesmithError, OSError) as error:
            if reason in _GOOD_ENDS:
                if isinstance(error, OSError):
                    raise disk_error(error, self.run.journal_file) from error
                raise
        finally:
            self.close()

    def close(self) -> None:
        """Lets go of the journal; raises nothing, as it runs while another error is on its way out."""
        self._settle_save()
        journal, self._journal = self._journal, None
        if journal is not None:
            try:
                journal.close()
            except OSError as error:
                log.warning("%s: cannot be closed: %s", self.run.journal_file, error.strerror)
