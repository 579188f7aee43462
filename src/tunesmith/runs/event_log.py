"""The event log of a run (one event per line, appended as it happens, truncated when a run goes back to a checkpoint) and its
learning curves.

A line counts once its newline is on disk. A process killed while writing leaves at most one line without a newline: readers
ignore it, and the next writer removes it. `SafePoint` is not stored. `read_columns` reads a log as arrays, `ColumnsTail`
follows one that is being written.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import CheckpointError, ResourceError
from tunesmith.events import (
    EpochStarted,
    Evaluated,
    Event,
    Improved,
    NonFinite,
    Note,
    Resumed,
    RowsEvaluated,
    RunEnded,
    RunStarted,
    SafePoint,
    StepDone,
    from_json,
    to_json,
)
from tunesmith.files import (
    BadFile,
    disk_error,
    in_the_way,
    kind_of,
    open_in_place,
    open_plain,
    open_regular,
    parse_json,
    read_plain,
    replacing,
    require_same,
)
from tunesmith.metrics.table import greater_is_better

log = logging.getLogger(__name__)

MAX_BYTES = 512_000_000
"""About two million steps."""
MAX_LINE = 1_000_000
"""The longest lines that we write are those of `RowsEvaluated`, some ten thousand bytes."""

_STEP_DONE, _RESUMED = b'{"event": "StepDone", "step": ', b'{"event": "Resumed", "step": '
"""Start of a StepDone line, which identifies it without parsing."""


class Journal:
    """The writer. Only the process with the lock of the run folder writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(open_in_place(self.path), "r+b")  # noqa: SIM115  (lives as long as the run)
        _drop_cut_line(self._file, self.path)

    def append(self, event: Event) -> None:
        """Write one line and flush it, so that it survives the end of this process. A failed write is a ResourceError."""
        if isinstance(event, SafePoint):
            return
        # pure ASCII: no text in the data can break a line
        line = json.dumps(to_json(event), allow_nan=False).encode("ascii") + b"\n"
        with self._reporting():
            self._file.write(line)
            self._file.flush()

    def sync(self) -> None:
        """Sync to disk before a checkpoint is published; a ResourceError if the file is no longer at its path."""
        with self._reporting():
            os.fsync(self._file.fileno())
        require_same(self.path, os.fstat(self._file.fileno()))

    def close(self) -> None:
        """Sync the event log to disk and close it. May be called twice."""
        if not self._file.closed:
            with self._reporting(), self._file:
                self._file.flush()
                os.fsync(self._file.fileno())

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise disk_error(error, self.path) from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def open_journal(path: Path, event: RunStarted | Resumed) -> tuple[Journal, list[str]]:
    """Open a new event log, or the old one at the step of a checkpoint; also return what to note about it."""
    if isinstance(event, RunStarted):
        path.unlink(missing_ok=True)
        return Journal(path), []
    lost = [] if path.exists() else ["journal.jsonl was missing: earlier curves are lost"]
    truncate_journal(path, event.step)
    return Journal(path), lost


def is_journal(path: Path) -> bool:
    """Return whether this is a plain file that a tunesmith run wrote (damaged or not), or an empty one."""
    try:
        with open(open_regular(path, follow=False), "rb") as file:
            start = file.read(1 << 16)
    except (OSError, ResourceError):
        return False
    return not start or b'{"event": "' in start


def require_journal(path: Path) -> None:
    """Raise a ResourceError if this is not our event log."""
    if kind_of(path) is not None and not is_journal(path):
        raise in_the_way(path, "is not a journal that tunesmith wrote, so it is neither replaced nor added to")


def _drop_cut_line(file: BinaryIO, path: Path) -> None:
    """Remove the text after the last newline, which a killed writer left."""
    size = os.fstat(file.fileno()).st_size
    start = max(0, size - MAX_LINE)
    file.seek(start)
    end = file.read().rfind(b"\n") + 1
    if start and not end:
        raise CheckpointError(f"its last line has more than {MAX_LINE:,} bytes and no end", where=str(path))
    removed = size - start - end
    if removed:
        file.truncate(start + end)
        os.fsync(file.fileno())
        log.warning("%s: the last line was incomplete (%d bytes) and was removed", path, removed)


def truncate_journal(path: str | Path, step: int) -> None:
    """Drop everything after the safe point of `step`, in one atomic rename.

    Kept: events with `event.step <= step`, so that a resumed run writes the rest again, once. Two exceptions:
    `EpochStarted(step=step)`, which begins the next epoch, and every `RunEnded`. With `step` 0, only RunStarted, Resumed and Note
    of step 0 stay. A log that ends before `step` is a CheckpointError: its steps would be missing.
    """
    path = Path(path)
    if not path.exists():
        return
    last = 0
    with open(open_regular(path), "rb") as lines, replacing(path) as out:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n") or not _survives(line, step, where=f"{path}:{number}"):
                continue
            out.write(line)
            if line.startswith((_STEP_DONE, _RESUMED)):
                last = max(last, int(line.split(b'"step": ', 1)[1].split(b",", 1)[0]))
        if last < step:
            raise CheckpointError(
                f"ends after step {last}, but the checkpoint is from step {step}: steps {last + 1} to {step} are missing",
                where=str(path),
                fix="Restore the file from a copy, or delete it to resume without the earlier curves.",
            )


def _survives(line: bytes, step: int, *, where: str) -> bool:
    if line.startswith(_STEP_DONE):
        number = line[len(_STEP_DONE) :].split(b",", 1)[0]
        if number.isdigit() and line.endswith(b"}\n"):
            return 0 < step >= int(number)
    event = decode_line(line, where=where)
    if event is None or event.step > step or isinstance(event, RunEnded):
        return False
    if isinstance(event, EpochStarted):
        return event.step < step
    return step > 0 or isinstance(event, (RunStarted, Resumed, Note))


def read_journal(path: str | Path) -> list[Event]:
    """Yield all events in order. An incomplete last line is skipped; a damaged line elsewhere is a CheckpointError."""
    return list(parse_events(read_bytes(path), path))


def read_bytes(path: str | Path) -> bytes:
    """Open the event log unchanged, with an incomplete last line. A missing one is a FileNotFoundError."""
    try:
        return read_plain(path, MAX_BYTES, follow=True)
    except BadFile as error:
        raise CheckpointError(str(error), where=str(path), fix="Move it away, or restore it from a copy.") from None


def first_event(path: str | Path) -> Event | None:
    """Return the first event; None if there is no complete line or the event is of a newer version."""
    try:
        with open_plain(path, follow=True) as file:
            line = file.readline(MAX_LINE)
    except BadFile as error:
        raise CheckpointError(str(error), where=str(path)) from None
    return decode_line(line, where=f"{path}:1") if line.endswith(b"\n") else None


def parse_events(data: bytes, path: str | Path, *, first_line: int = 1) -> Iterator[Event]:
    """Yield the events of complete lines; text after the last newline is being written or was truncated by a kill."""
    end = data.rfind(b"\n") + 1
    for number, line in enumerate(data[:end].splitlines(), start=first_line):
        event = decode_line(line, where=f"{path}:{number}")
        if event is not None:
            yield event
    if len(data) - end > MAX_LINE:
        raise _damage(f"{path}", f"its last line has {len(data) - end:,} bytes and no end")


def decode_line(line: bytes, *, where: str) -> Event | None:
    """Return the event of a line; None for an event of a newer version, which is logged."""
    if len(line) > MAX_LINE:
        raise _damage(where, f"a line of {len(line):,} bytes")
    try:
        return from_json(parse_json(line, mend=False))
    except KeyError as error:
        log.info("%s: unknown event %s ignored (written by a newer tunesmith?)", where, str(error)[:60])
        return None
    except ValueError as error:
        raise _damage(where, str(error)) from None


def _damage(where: str, what: str) -> CheckpointError:
    fix = "Delete that line to read the rest; its step becomes a gap."
    return CheckpointError(f"the journal is damaged ({what})", where=where, fix=fix)


FLOATS = ("epoch", "loss", "grad_norm", "learning_rate", "seconds")
INTEGERS = ("step", "examples", "tokens", "padded_tokens")
MOST_BYTES = 64_000_000
"""Bytes that `ColumnsTail` reads line by line per poll; the rest waits for the next one."""


@dataclass(frozen=True, slots=True)
class JournalColumns:
    """`steps[name]` has one value per StepDone (NaN for null)."""

    steps: dict[str, NDArray[Any]]
    others: list[Event]


def read_columns(path: str | Path) -> JournalColumns:
    """Read an event log as columns."""
    return columns_of(read_journal(path))


def columns_of(events: list[Event]) -> JournalColumns:
    """Return columns of events in memory."""
    done = [e for e in events if isinstance(e, StepDone)]
    steps: dict[str, NDArray[Any]] = {name: _with_gaps([getattr(e, name) for e in done]) for name in FLOATS}
    steps |= {name: np.array([getattr(e, name) for e in done], dtype=np.int64) for name in INTEGERS}
    return JournalColumns(steps, [e for e in events if not isinstance(e, StepDone)])


def _with_gaps(values: list[float | None]) -> NDArray[np.float64]:
    return np.array([np.nan if v is None else v for v in values], dtype=np.float64)


class ColumnsTail:
    """A live reader: follows an event log that another process writes, also across a truncation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: JournalColumns | None = None
        self._offset, self._lines, self._inode = 0, 0, 0

    def poll(self) -> bool:
        """Read what was appended since the last call; return whether there is anything. Incomplete lines wait."""
        try:
            with open_plain(self.path) as file:
                info = os.fstat(file.fileno())
                old = self.columns if info.st_ino == self._inode and info.st_size >= self._offset else None
                if old is not None:
                    file.seek(self._offset)
                    data = file.read(MOST_BYTES)
        except BadFile as error:
            raise CheckpointError(str(error), where=str(self.path)) from None
        if old is None:  # first call, or truncated or replaced by a resumed run
            data = read_bytes(self.path)
            self.columns = columns_of(list(parse_events(data, self.path)))
            self._inode, self._offset, self._lines = info.st_ino, 0, 0
        else:
            events = list(parse_events(data, self.path, first_line=self._lines + 1))
            new = columns_of(events)
            steps: dict[str, NDArray[Any]] = {k: np.concatenate([v, new.steps[k]]) for k, v in old.steps.items()}
            self.columns = JournalColumns(steps, old.others + new.others) if events else old
        self._offset += data.rfind(b"\n") + 1
        self._lines += data.count(b"\n")
        return old is not self.columns


# --- curves -----------------------------------------------------------------------------------------------------------

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One curve: arrays of equal length with ascending steps; NaN is a gap."""

    name: str
    step: NDArray[np.int64]
    epoch: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.step)

    def finite(self) -> Series:
        """Return the points that are not gaps."""
        return self._at(np.isfinite(self.value))

    def smoothed(self, window: int | None = None) -> Series:
        """Return a centered mean over about `window` steps (default: 1/25 of the curve, 25 if it is short).

        Three running means, O(n), approximate a Gaussian. Gaps stay gaps and don't affect adjacent points.
        """
        usual = max(len(self) // 25, min(len(self) // 5, 25))
        width = max(1, usual if window is None else window)
        value = self.value
        for _ in range(3):
            value = _running_mean(value, max(1, round(width / 3**0.5)))
        return Series(self.name, self.step, self.epoch, np.where(np.isfinite(self.value), value, np.nan))

    def thinned(self, points: int) -> Series:
        """Return about `points` points that keep the lowest and highest value of every bucket, so that no spike is lost."""
        if len(self) <= points:
            return self
        edges = np.linspace(0, len(self), max(1, points // 2) + 1).astype(int)
        keep: set[int] = {0, len(self) - 1}
        for low, high in pairwise(edges):
            part = self.value[low:high]
            good = np.flatnonzero(np.isfinite(part))
            if len(good) < len(part):  # keep a gap visible as a gap
                keep.add(int(low + np.flatnonzero(~np.isfinite(part))[0]))
            if len(good):
                keep |= {int(low + good[np.argmin(part[good])]), int(low + good[np.argmax(part[good])])}
        return self._at(np.array(sorted(keep)))

    def best(self) -> tuple[int, float] | None:
        """Return (step, value) of the best point, the earliest of equals; None if every point is a gap."""
        good = self.finite()
        if not len(good):
            return None
        at = int(np.argmax(good.value) if greater_is_better(self.name) else np.argmin(good.value))
        return int(good.step[at]), float(good.value[at])

    def _at(self, index: NDArray[Any]) -> Series:
        return Series(self.name, self.step[index], self.epoch[index], self.value[index])


def _running_mean(value: Floats, width: int) -> Floats:
    """Return the mean over `width` adjacent points (fewer at the ends), without gaps."""
    good = np.isfinite(value)
    total = np.concatenate([[0.0], np.cumsum(np.where(good, value, 0.0))])
    count = np.concatenate([[0], np.cumsum(good)])
    at = np.arange(len(value))
    # Near an end the window shrinks on both sides, because a one-sided mean would bend the curve; but not to 0, because the
    # line would end in one raw point.
    half = np.maximum(np.minimum(width // 2, np.minimum(at, len(value) - 1 - at)), width // 6)
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(value))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((total[high] - total[low]) / (count[high] - count[low]), dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """All curves of one run, computed once and drawn as often as wanted (`curves.plot.draw_curves`)."""

    name: str
    train_loss: Series
    learning_rate: Series
    grad_norm: Series
    tokens_per_second: Series
    examples_per_second: Series
    evaluations: dict[str, dict[str, Series]]
    """split -> metric -> curve; splits are "validation", "train_sample" and a user's own."""
    rows: dict[str, int] = field(default_factory=dict)
    """split -> number of evaluated rows."""
    num_steps: int = 0
    steps_per_epoch: float = 0.0
    train_rows: int = 0
    tracked_metric: str | None = None
    """The metric that selected the best checkpoint of the run."""
    resumed_at: tuple[int, ...] = ()
    non_finite: tuple[int, ...] = ()
    """Steps whose update was not applied because something was NaN or infinite."""
    ended: str | None = None
    """Why the run ended; None while it runs or when it was killed."""
    times: tuple[float, float] = (0.0, 0.0)
    """First start and end, in seconds since 1970; 0 if the event log doesn't contain them."""
    row_texts: dict[str, dict[int, str]] = field(default_factory=dict)
    """split -> step -> each row's loss and prediction, as `metrics/evidence.py` wrote them."""

    @property
    def last_step(self) -> int:
        """Return the last step in the event log."""
        ends = [int(s.step[-1]) for s in (self.train_loss, *self._evaluated()) if len(s)]
        return max(ends, default=0)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the metrics of the validation split (of any split, if there is none), loss first."""
        source = self.evaluations.get("validation") or {k: v for s in self.evaluations.values() for k, v in s.items()}
        return tuple(sorted(source, key=lambda name: name != "loss"))

    def metric(self, split: str, name: str) -> Series:
        """Return the curve of a metric on a split; empty if it was never evaluated."""
        return self.evaluations.get(split, {}).get(name) or empty_series(name)

    def main_metric(self) -> str | None:
        """Return the metric to draw next to the loss: the tracked one, else the best known, else the first."""
        names = [n for n in self.metric_names if n != "loss"]
        wanted = (self.tracked_metric, "accuracy", "f1", "macro_f1", "f1_macro", "pearson", "mse")
        return next((n for n in wanted if n in names), names[0] if names else None)

    def best(self) -> tuple[str, int, float] | None:
        """Return (metric, step, value) of the best evaluation by the tracked metric, else by validation loss."""
        for name in (self.tracked_metric, "loss", self.main_metric()):
            found = self.metric("validation", name).best() if name else None
            if name and found:
                return (name, *found)
        return None

    def _evaluated(self) -> list[Series]:
        return [s for metrics in self.evaluations.values() for s in metrics.values()]


def empty_series(name: str) -> Series:
    """Return a curve without points."""
    return Series(name, np.empty(0, np.int64), np.empty(0), np.empty(0))


def curves_from_events(events: Iterable[Event], *, name: str = "run") -> Curves:
    """Return the curves of events in memory, in chronological order."""
    return build_curves(columns_of(list(events)), name=name)


def build_curves(columns: JournalColumns, *, name: str) -> Curves:
    """Return the content of the event log as arrays."""
    steps, events = _kept_steps(columns.steps), columns.others
    started = [e for e in events if isinstance(e, RunStarted)]
    improved = [e for e in events if isinstance(e, Improved)]
    ended = [e for e in events if isinstance(e, RunEnded)]
    evaluated = [e for e in events if isinstance(e, Evaluated)]
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.where(steps["seconds"] > 0, steps["seconds"], np.nan)
        tokens = np.where(steps["tokens"] > 0, steps["tokens"], np.nan) / seconds  # other writers don't count tokens
        examples = steps["examples"] / seconds

    def series(label: str, value: NDArray[Any]) -> Series:
        return Series(label, steps["step"], steps["epoch"], np.asarray(value, dtype=np.float64))

    return Curves(
        name=name,
        train_loss=series("loss", steps["loss"]),
        learning_rate=series("learning_rate", steps["learning_rate"]),
        grad_norm=series("grad_norm", steps["grad_norm"]),
        tokens_per_second=series("tokens_per_second", tokens),
        examples_per_second=series("examples_per_second", examples),
        evaluations=_evaluations(evaluated),
        rows={e.split: e.n for e in evaluated},
        num_steps=started[-1].num_steps if started else 0,
        steps_per_epoch=started[-1].steps_per_epoch if started else 0.0,
        train_rows=started[-1].train_rows if started else 0,
        tracked_metric=improved[-1].metric if improved else None,
        resumed_at=tuple(e.step for e in events if isinstance(e, Resumed)),
        non_finite=tuple(sorted({e.step for e in events if isinstance(e, NonFinite)})),
        ended=ended[-1].reason if ended and ended[-1] is events[-1] else None,
        times=(started[0].time if started else 0.0, ended[-1].time if ended else 0.0),
        row_texts={
            split: {e.step: e.rows for e in events if isinstance(e, RowsEvaluated) and e.split == split}
            for split in dict.fromkeys(e.split for e in events if isinstance(e, RowsEvaluated))
        },
    )


def _kept_steps(steps: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the entries that count: events in memory may repeat steps after a resume, and the last entry counts."""
    if np.all(np.diff(steps["step"]) > 0):
        return steps
    _, last = np.unique(steps["step"][::-1], return_index=True)
    return {name: values[::-1][last] for name, values in steps.items()}


def _evaluations(events: list[Evaluated]) -> dict[str, dict[str, Series]]:
    """Return split -> metric -> curve; the last evaluation of a step counts."""
    found: dict[str, dict[str, Series]] = {}
    for split in dict.fromkeys(e.split for e in events):
        by_step = {e.step: e for e in events if e.split == split}
        mine = [by_step[step] for step in sorted(by_step)]
        step = np.array([e.step for e in mine], dtype=np.int64)
        epoch = np.array([e.epoch for e in mine], dtype=np.float64)
        names = dict.fromkeys(name for e in mine for name in e.metrics)
        found[split] = {n: Series(n, step, epoch, _with_gaps([e.metrics.get(n) for e in mine])) for n in names}
    return found
