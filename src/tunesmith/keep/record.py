"""What both doors do alike for a run on disk: journal its events, compare a resume, refuse a NaN, agree on a stop, end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunesmith.engine.state import TrainState
from tunesmith.engine.stopping import StopRequest
from tunesmith.errors import CheckpointError, NumericsError, StoppedBySignal
from tunesmith.events import Event, NonFinite, Note, Resumed, RunEnded, RunStarted
from tunesmith.keep.checkpoint import Identity, differences, version_changes
from tunesmith.run.journal import LOST_JOURNAL, Journal, truncate_journal
from tunesmith.run.layout import RunDir, checkpoint_step
from tunesmith.run.sealed import CHANGED, read_manifest
from tunesmith.run.writing import disk_error

Listener = Callable[[Event], None]
GOOD_ENDS = ("completed", "early_stopping")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wording:
    """How a door spells what to do: its options, and how a run is resumed."""

    changed: str
    """What to do about a run that is not what it was."""
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
        """(what differs between a checkpoint's run and this one, all that a person should know of it). What differs is
        refused unless that is allowed, as its place in the data means something else now."""
        found = differences(folder, self.identity)
        if found and not self.allow_changed:
            raise self.changed(f"this run was started with something else: {'; '.join(found)}", folder)
        notes = [f"resumes although {text}" for text in found] + version_changes(folder, self.identity)
        altered = read_manifest(folder).get(CHANGED, ())
        return found, notes + [f"{name} of {folder} was changed by a callback" for name in altered]

    def changed(self, problem: str, where: Path) -> CheckpointError:
        """The error for a run that is not what it was."""
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
