"""What both doors do alike for a run on disk: find and remove its checkpoints, compare a resume, train with every event in the
journal, refuse a NaN, agree on a stop, end.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tunesmith.errors import CheckpointError, NumericsError, ResourceError, StoppedBySignal, TunesmithError
from tunesmith.events import Event, NonFinite, Note, Resumed, RunEnded, RunStarted
from tunesmith.runs.journal import LOST_JOURNAL, Journal, truncate_journal
from tunesmith.runs.layout import RunDir, checkpoint_step
from tunesmith.runs.sealed import CHANGED, read_manifest, retire, verify
from tunesmith.runs.writing import disk_error
from tunesmith.training.loop import BatchSource, Evaluate, train_events
from tunesmith.training.plan import Plan
from tunesmith.training.roster import RankRoster
from tunesmith.training.state import TrainState
from tunesmith.training.stopping import StopRequest
from tunesmith.training.weight_files import INDEX, WEIGHTS, hash_tensors, read_shards

Listener = Callable[[Event], None]
GOOD_ENDS = ("completed", "early_stopping")
MARK = "sha256:"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """What a checkpoint belongs to. A resume compares every field."""

    run_id: str
    data: str
    config: dict[str, Any]
    labels: dict[str, Any]
    versions: dict[str, str | None]

    def to_json(self) -> dict[str, Any]:
        """A plain dict for the manifest."""
        return asdict(self)


def content_mark(*parts: str) -> str:
    """How an identity holds something too large to be shown: a hash of it, which is reported only as "changed"."""
    return MARK + hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def differences(folder: Path, identity: Identity) -> tuple[list[str], list[str]]:
    """The differences between a checkpoint's run and this one, in words: (those that make it another run; libraries and others
    that are only reported, where an exact resume is not promised)."""
    stored = read_manifest(folder)
    known = isinstance(stored.get("config"), dict) and isinstance(stored.get("versions"), dict)
    if not known or not {"data", "labels"} <= stored.keys():
        raise CheckpointError("does not say what its run was made from", where=str(folder))
    old, new = stored["config"], identity.config
    names = [k for k in sorted(set(old) | set(new)) if old.get(k) != new.get(k)]
    found = []
    if stored["data"] != identity.data and not any(k.endswith(" data") for k in names):
        found.append("the training data changed")
    if stored["labels"] != identity.labels:
        found.append(f"the labels were {stored['labels']} and are {identity.labels}")
    found += [_in_words(k, repr(old.get(k)), repr(new.get(k))) for k in names]
    old, new = stored["versions"], identity.versions
    return found, [_in_words(k, str(old.get(k)), str(new.get(k))) for k in {**new, **old} if old.get(k) != new.get(k)]


def _in_words(name: str, old: str, new: str) -> str:
    return f"{name} changed" if MARK in old + new else f"{name} was {old} and is {new}"


def verify_checkpoint(folder: Path) -> dict[str, Any]:
    """The manifest of an intact checkpoint, as `verify` gives it. Weights that were cut into shards since it was written must
    be the same tensors, bit for bit: put together they have the hash of the file that they replace."""
    files = read_manifest(folder)["files"]
    cut = WEIGHTS in files and INDEX not in files and not (folder / WEIGHTS).exists() and (folder / INDEX).is_file()
    if cut and hash_tensors(read_shards(folder), metadata={"format": "pt"}) != files[WEIGHTS]["sha256"]:
        raise CheckpointError(f"its tensors are not those of the {WEIGHTS} that was written", where=str(folder / INDEX))
    return verify(folder, names=set(files) - {WEIGHTS} if cut else None)


def newest_intact(run: RunDir, run_id: str | None = None) -> tuple[Path | None, tuple[str, ...]]:
    """(the newest checkpoint that verifies, why each newer one was skipped); of one run, where it has any of that run."""
    skipped: list[str] = []
    mine = [f for f in run.checkpoints() if run_id is None or belongs_to(f, run_id, damaged=True)]
    for folder in reversed(mine or run.checkpoints()):
        try:
            verify_checkpoint(folder)
        except CheckpointError as error:
            skipped.append(error.line())
            continue
        return folder, tuple(skipped)
    return None, tuple(skipped)


def belongs_to(folder: Path, run_id: str, *, damaged: bool = False) -> bool:
    """Whether a checkpoint is of this run; `damaged` is the answer for one that cannot be read."""
    try:
        return bool(read_manifest(folder)["run_id"] == run_id)
    except (CheckpointError, KeyError):
        return damaged


def rotate(
    run: RunDir, run_id: str, *, keep: int, last: int, best: Path | None = None, newest: bool = True
) -> list[Path]:
    """Deletes the oldest checkpoints of this run id until `keep` are left, never the `best`, never the `newest` unless
    that is False; `last` is the step of the one that was just published.

    One with a higher step is a damaged one that a resume passed over: it is neither deleted nor counted as kept,
    so that it is never taken for an intact one.
    """
    mine = [f for f in run.checkpoints() if checkpoint_step(f) <= last and belongs_to(f, run_id)]
    home = None if best is None else best.resolve()
    kept = {f for f in mine[-1:] if newest} | {f for f in mine if f.resolve() == home}
    old = [f for f in mine if f not in kept][: max(len(mine) - max(keep, len(kept)), 0)]
    for folder in old:
        retire(folder)
    return old


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
        notes = [f"resumes although {text}" for text in found] + reported
        altered = read_manifest(folder).get(CHANGED, ())
        return found, notes + [f"{name} of {folder} was changed by a callback" for name in altered]

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
