"""A run on disk: resume it, record every event, save checkpoints and the best weights, stop on a signal, end."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from tunesmith.errors import CheckpointError, NumericsError, ResourceError, StoppedBySignal, TunesmithError, short_text
from tunesmith.events import Event, Improved, NonFinite, Note, Resumed, RunEnded, RunStarted, SafePoint, Saved
from tunesmith.files import disk_error, fault_point
from tunesmith.models.load import free_memory
from tunesmith.runs.event_log import Journal, open_journal
from tunesmith.runs.folder import (
    RunDir,
    checkpoint_step,
    remove_leftovers,
    require_space,
    verify,
)
from tunesmith.training.checkpoint import (
    Identity,
    Snapshot,
    bytes_of,
    capture,
    differences,
    load_checkpoint,
    newest_intact,
    rotate,
)
from tunesmith.training.loop import BatchSource, Evaluate, Interrupted, train_events
from tunesmith.training.schedule import Plan
from tunesmith.training.state import TrainState

Listener = Callable[[Event], None]

log = logging.getLogger(__name__)


SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """A context manager around a run. `signal` is the signal that arrived, or None."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}
        self._immediately = False

    def raise_immediately(self) -> None:
        """Let signals raise StoppedBySignal, including one that came already, because nothing is left to save."""
        self._immediately = True
        if self.signal is not None:
            self._leave(self.signal)

    def run_is_complete(self) -> None:
        """Ignore further signals; raise one that a library caught."""
        if self._immediately and self.signal is not None:
            self._leave(self.signal)
        self._immediately = False

    def interrupt(self, *_: object) -> None:
        """Raise `Interrupted` after a signal. Call it between the batches of an evaluation."""
        if self.signal is not None:
            raise Interrupted

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._arrived)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        replaced = error is None or (isinstance(error, Exception) and not isinstance(error, StoppedBySignal))
        if replaced and self._immediately and self.signal:
            # A library caught the exception, or raised a different one (safetensors: ValueError).
            self._leave(self.signal)

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            # The last checkpoint is complete in any case: exit immediately.
            os._exit(128 + number)
        self.signal = number
        if self._immediately:
            self._leave(number)

    def _leave(self, number: int) -> None:
        raise StoppedBySignal(number, "after the last step; every step is saved: the same command finishes it")


BACKGROUND_BYTES = 64 << 20
"""For a smaller checkpoint, a thread is not worth it. BERT-base: 1.3 GB, written in 0.8 s, copied in 0.1 s."""


@dataclass
class RunWriter:
    """Writes a run to disk: event log, checkpoints, best weights. It listens to the loop and doesn't affect the math.

    Only rank 0 writes: on other ranks `journal` is None.
    """

    run: RunDir
    state: TrainState
    identity: Identity
    plan: Plan
    describe: Callable[[Path], None]
    """Writes config and tokenizer, which make a folder of weights loadable."""
    keep_checkpoints: int = 1
    keep_best: bool = True
    allow_changed: bool = False
    listeners: list[Listener] = field(default_factory=list)
    stop: StopRequest = field(default_factory=StopRequest)
    background_bytes: int = BACKGROUND_BYTES
    """Checkpoints of this size or more are copied and written by a thread while training continues."""
    journal: Journal | None = field(init=False, default=None)
    _pool: ThreadPoolExecutor = field(init=False, default_factory=lambda: ThreadPoolExecutor(1, "tunesmith-save"))
    _saving: tuple[int, Future[float]] | None = field(init=False, default=None)
    """Step and start time of the checkpoint that the thread writes."""
    _buffers: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    _improved: bool = field(init=False, default=False)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around a run: handle signals, and write the error that ended it to the event log."""
        with self.stop:
            try:
                yield
            except (TunesmithError, RuntimeError) as error:  # of a lost rank: a RuntimeError of torch.distributed
                self.end(type(error).__name__)
                last = [folder.name for folder in self.run.checkpoints()][-1:]
                if isinstance(error, ResourceError) and self.state.phase == "update" and last:
                    problem = f"{error.problem}; last checkpoint: {last[0]}"
                    raise ResourceError(problem, where=str(self.run.path), fix=error.fix) from error
                raise
            finally:
                self.close()

    def begin(self, started: RunStarted) -> None:
        """Resume from the newest intact checkpoint if there is one; otherwise start a new event log."""
        main = self.state.runtime.is_main
        if main:
            try:
                self.run.path.mkdir(parents=True, exist_ok=True)
                remove_leftovers(self.run.path)
            except OSError as error:
                raise disk_error(error, self.run.path) from error
        # Rank 0 decides for all: on a shared disk two ranks may see different files.
        newest, skipped = newest_intact(self.run) if main else (None, ())
        name, skipped = self.state.runtime.gather_objects((newest and newest.name, skipped))[0]
        folder = None if name is None else self.run.path / name
        if folder is None and skipped:
            raise CheckpointError(
                f"no valid checkpoint is left: {'; '.join(skipped)}",
                where=str(self.run.path),
                fix="Remove the run folder to train from the start, or restore the files.",
            )
        if main:
            self._require_space(fresh=folder is None)
        if folder is not None:
            self._resume(folder, skipped)
        else:
            self._open(started)
        self.state.runtime.barrier()

    def _resume(self, folder: Path, skipped: tuple[str, ...]) -> None:
        found, versions = differences(folder, self.identity)
        if found and not self.allow_changed:
            # the position in the data would have a different meaning
            raise CheckpointError(
                f"this run was started with different settings or data: {'; '.join(found)}",
                where=str(folder),
                fix="Restore it, set a different --output_dir, or set --allow_changed_data to resume anyway.",
            )
        load_checkpoint(folder, self.state, settings=not found)
        notes = [f"resumes although {text}" for text in found] + versions
        self._open(Resumed(self.state.step, folder.name, skipped, time.time()), notes)
        if not self.state.runtime.is_main:
            return
        if self.keep_best and self.state.progress.step not in (None, self.state.step):
            self._require_best()

    def _open(self, event: RunStarted | Resumed, notes: Sequence[str] = ()) -> None:
        """Start a new event log, or continue it from the step of a checkpoint."""
        if not self.state.runtime.is_main:
            return
        self.journal, lost = open_journal(self.run.journal_file, event)
        self.on(event)
        for text in (*lost, *notes):
            self.on(Note(event.step, text))

    def train(self, batches: BatchSource, evaluate: Evaluate | None = None) -> Iterator[Event]:
        """Train to the end of the plan. `on` has acted on each event before it is yielded."""
        wanted = self.wants_read_back
        for event in train_events(self.state, batches, self.plan, evaluate=evaluate, wants_read_back=wanted):
            self.on(event)
            yield event

    def _require_space(self, *, fresh: bool) -> None:
        """Require disk space for everything that coexists: model/, the best checkpoint, and the newest while it is replaced."""
        weights, whole = bytes_of(self.state)
        saves = self.plan.save.cadence != "no" or self.keep_best
        most = 1 if not fresh else 3 if self.keep_best else 2
        require_space(self.run.path, (whole * most if saves else 0) + weights)

    def _require_best(self) -> None:
        """Require the checkpoint with the best weights; otherwise the run would end with different ones."""
        folder = self.run.checkpoint(self.state.progress.step or 0)
        if not folder.exists() and checkpoint_step(self.run.checkpoints()[-1]) > self.state.step:
            return  # deleted after a better one was saved: the run repeats that step
        try:
            verify(folder)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error.problem}; it has the best weights, and there is no other copy",
                where=error.where,
                fix="Restore it, or remove the run folder to train from the start.",
            ) from None

    def on(self, event: Event) -> None:
        """Pass an event to the event log and the listeners, and act on it."""
        if self.journal is not None:
            self.journal.append(event)
        for listener in self.listeners:
            listener(event)
        if isinstance(event, NonFinite):
            self._refuse(event)
        elif isinstance(event, Improved):
            self._improved = True
        elif isinstance(event, SafePoint):
            self._at_safe_point(event.step)

    def wants_read_back(self, step: int) -> bool:
        """Return whether the numbers of all steps so far are needed now."""
        return self._improved or self.stop.signal is not None

    def _at_safe_point(self, step: int) -> None:
        self._finish_save(wait=False)
        number = self.state.runtime.largest(self.stop.signal or 0) or None  # of any rank
        over = self.state.progress.is_exhausted(self.plan.patience)
        due = self.plan.save.due(step) or (self._improved and self.keep_best) or number is not None or over
        if due and step > 0:
            self.save(step, wait=number is not None)
        fault_point("step.end")
        if number is not None:
            self._finish_save(wait=True)
            self.end(f"signal {number}")
            done = f"after step {step}; everything is saved: the same command resumes from here"
            raise StoppedBySignal(number, done)

    def save(self, step: int, *, wait: bool = True) -> None:
        """Publish the checkpoint, then delete older ones, except for the best.

        Without `wait`, a thread may write a large checkpoint after this returns; the next save, a signal and the end wait for it.
        """
        self._finish_save(wait=True)
        started, runtime = time.perf_counter(), self.state.runtime
        if self.journal is not None:
            self.journal.sync()
        size = 0 if wait or runtime.world > 1 else bytes_of(self.state)[1]
        background = size >= max(self.background_bytes, 1) and free_memory_bytes() > 2 * size
        snapshot = capture(self.state, self.identity, self._buffers if background else None)
        self._improved = False
        best = self.state.progress.step if self.keep_best else None
        if snapshot is not None and background:
            self._saving = (step, self._pool.submit(self._publish, step, snapshot, best))
        elif snapshot is not None:
            self._publish(step, snapshot, best)
            self._report_saved(step, time.perf_counter() - started)
        runtime.barrier()

    def _publish(self, step: int, snapshot: Snapshot, best: int | None) -> float:
        started = time.perf_counter()
        snapshot.write(self.run.checkpoint(step), self.describe)
        home = self.run.checkpoint(step if best is None else best)
        keep = self.keep_checkpoints + (best not in (None, step) and home.exists())
        try:
            rotate(self.run, self.identity.run_id, keep=keep, last=step, best=home)
        except OSError as error:
            raise disk_error(error, self.run.path) from error
        return time.perf_counter() - started

    def _finish_save(self, *, wait: bool) -> None:
        """Report the checkpoint that the thread has written, or raise its error. `wait`: wait for it."""
        if self._saving is None or not (wait or self._saving[1].done()):
            return
        step, future = self._saving
        error = future.exception()  # if a signal raises during the wait, the save stays here and the end waits again
        self._saving = None
        if error is not None:
            raise error
        self._report_saved(step, future.result())

    def _wait_for_save(self) -> None:
        """Wait for the thread while another error propagates; its own error is only logged."""
        try:
            self._finish_save(wait=True)
        except Exception as error:
            log.warning("%s", error.line() if isinstance(error, TunesmithError) else short_text(error))

    def _report_saved(self, step: int, seconds: float) -> None:
        self.on(Saved(step, self.run.checkpoint(step).name, seconds))

    def _refuse(self, event: NonFinite) -> None:
        """End a run with a NaN or infinite number; the weights are those before this step."""
        self.end("NumericsError")
        last = max(self.run.checkpoints(), default=None, key=checkpoint_step)
        rows = ", ".join(str(r) for r in event.rows[:8]) + (", ..." if len(event.rows) > 8 else "")
        raise NumericsError(
            f"step {event.step}: {event.what} {event.tensor} is NaN or infinite (training rows {rows}); the update was skipped"
            + (f"; last good checkpoint: {last.name}" if last is not None else ""),
            where=str(self.run.path),
            fix="Lower --learning_rate, use --bf16 instead of --fp16, or check these rows.",
        )

    @contextmanager
    def best_weights(self) -> Iterator[Path | None]:
        """Yield the folder of the best weights; None if the model has them already.

        They are verified while they are used; damage raises an error at the end of the block.
        """
        wanted = self.state.progress.step
        if not self.keep_best or wanted in (None, self.state.step):
            yield None
            return
        self._finish_save(wait=True)
        folder = self.run.checkpoint(wanted or 0)
        check = self._pool.submit(verify, folder)
        try:
            yield folder
        finally:
            check.result()

    def end(self, reason: str) -> None:
        """Write the last event and close the event log. A run has ended well only if that is on disk."""
        event = RunEnded(self.state.step, reason, time.time())
        try:
            if event.finished:
                self._finish_save(wait=True)
            self._wait_for_save()
            if self.journal is not None:
                if event.finished:
                    self.journal.sync()
                self.on(event)
                self.journal.close()
        except (TunesmithError, OSError):
            if event.finished:
                raise
        finally:
            self.close()

    def close(self) -> None:
        """Close the event log. Raises nothing, because it runs while another error propagates."""
        self._wait_for_save()
        journal, self.journal = self.journal, None
        if journal is not None:
            try:
                journal.close()
            except ResourceError as error:
                log.warning("%s", error.line())


def free_memory_bytes() -> int:
    """Return the available host memory, also within the limit of a container; 0 if unknown."""
    free = free_memory(swap=False) or 0
    try:
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{name}").read_text()) for name in ("max", "current"))
    except (OSError, ValueError):  # no limit
        return free
    return min(free, limit - used)  # the page cache counts as used, although it can be reclaimed: this is cautious
