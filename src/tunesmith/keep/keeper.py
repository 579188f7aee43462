"""Keeps a run on disk: journal, checkpoints, the best weights. A listener of the loop; decides nothing about the maths."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tunesmith.engine.plan import Plan
from tunesmith.engine.state import TrainState
from tunesmith.engine.stopping import StopRequest, is_exhausted
from tunesmith.errors import CheckpointError, TunesmithError, short_text
from tunesmith.events import Event, Improved, NonFinite, Resumed, RunStarted, SafePoint, Saved
from tunesmith.keep.checkpoint import (
    PIECES,
    VOCABULARY,
    Identity,
    bytes_of,
    capture,
)
from tunesmith.keep.record import GOOD_ENDS, Listener, RunRecord
from tunesmith.keep.snapshot import ASIDE_FROM, Aside, Snapshot, has_room, link_files
from tunesmith.keep.weight_files import newest_intact, rotate
from tunesmith.run.environment import fault_point
from tunesmith.run.layout import RunDir
from tunesmith.run.sealed import read_manifest, require_space, sweep, verify, write_sealed
from tunesmith.run.writing import disk_error

log = logging.getLogger(__name__)


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
    """Bytes of a checkpoint from which on the run copies it and continues while a thread writes it."""
    _aside: Aside = field(init=False, default_factory=Aside)
    _aside_step: int = field(init=False, default=0)
    _improved: bool = field(init=False, default=False)
    record: RunRecord = field(init=False)

    def __post_init__(self) -> None:
        self.record = RunRecord(self.run, self.state, self.identity, stop=self.stop, listeners=self.listeners)
        self.record.refuses_nan = False  # a checkpoint may be on its way to the disk

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
        else:
            self.record.open(started)
        self.state.runtime.barrier()

    def _resume(self, folder: Path, skipped: tuple[str, ...]) -> None:
        self.record.allow_changed = self.allow_changed
        found, notes = self.record.compare(folder)
        self.record.restore(folder, settings=not found)
        self.record.open(Resumed(self.state.step, folder.name, skipped, time.time()), notes)
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
        self.record.on(event)
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
        number = self.record.agreed_signal()
        over = is_exhausted(self.state.progress, self.plan.patience)
        due = self.plan.save.due(step) or (self._improved and self.keep_best) or number is not None or over
        if due and step > 0:
            self.save(step, wait=number is not None)
        elif number is not None:
            self._take_save(wait=True)
        fault_point("step.end")
        if number is not None:
            self.end(f"signal {number}")
            raise self.record.stopped(number, step)

    def save(self, step: int, *, wait: bool = True) -> None:
        """Publishes checkpoint, then best weights, then removes older checkpoints: in this order.

        Without `wait` a large checkpoint may be written after this returns; the next save, a signal and the end wait.
        """
        self._take_save(wait=True)
        started = time.perf_counter()
        if self.record.journal is not None:
            self.record.journal.settle()
        snapshot = capture(self.state, self.identity, self._aside.buffers)
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
        self.end("NumericsError")
        raise self.record.numerics_error(event)

    def best_weights(self) -> Path | None:
        """The folder of the best weights, verified; None when the model has them: no evaluation was the best, or the last one."""
        if not self.keep_best or self.state.progress.step in (None, self.state.step):
            return None
        self._take_save(wait=self.state.progress.step == self._aside_step)
        found = verify(self.run.best)
        if found["step"] != self.state.progress.step:
            raise CheckpointError(
                f"holds the weights of step {found['step']}, the best are those of step {self.state.progress.step}",
                where=str(self.run.best),
            )
        return self.run.best

    def end(self, reason: str) -> None:
        """Writes the last event and closes the journal. A run that ended well is not over before that is on disk."""
        try:
            if reason in GOOD_ENDS:
                self._take_save(wait=True)
            self._settle_save()
            self.record.end(reason)
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
        self.record.close()
