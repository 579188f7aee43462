"""A journal as arrays, for curves: `read_columns` reads it whole, `ColumnsTail` follows one that is being written, `peek_journal`
gives a few facts from both ends. What is tolerated and what is an error is that of `read_journal`.

By columns, a million StepDone lines (240 MB) take 1.7 s and 0.64 GB; `json.loads` of each took 10.0 s (2 shared cores).
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import CheckpointError
from tunesmith.events import Evaluated, Event, RunEnded, RunStarted, StepDone
from tunesmith.files import BadFile, open_plain
from tunesmith.runs.journal import MAX_LINE, decode_line, parse_events, read_bytes

log = logging.getLogger(__name__)

FLOATS = ("epoch", "loss", "grad_norm", "learning_rate", "seconds")
INTEGERS = ("step", "examples", "tokens", "padded_tokens")
SMALL_BYTES = 2_000_000
"""Below this many bytes (about 8,000 steps, 80 ms) reading line by line is as quick as importing pyarrow."""
MOST_BYTES = 64_000_000
"""Bytes that `ColumnsTail` reads line by line in one poll; what is left waits for the next."""
HEAD, TAIL, FAR_TAIL = 4096, 65_536, 2_000_000
"""Bytes at the ends that `peek_journal` reads; the far tail only where the near one holds no evaluation."""
SPARK_POINTS = 40

_STEP, _EVALUATED = b'{"event": "StepDone"', b'{"event": "Evaluated"'
_LOSS = re.compile(rb'"event": "StepDone", [^\n]{,400}?"loss": (-?\d{1,20}(?:\.\d{1,30})?(?:[eE][-+]?\d{1,3})?),')


@dataclass(frozen=True, slots=True)
class JournalColumns:
    """`steps[name]` holds one value per StepDone (NaN for null); `steps["line"]` and `others` give the order."""

    steps: dict[str, NDArray[Any]]
    others: list[tuple[int, Event]]


def read_columns(path: str | Path, *, small_bytes: int = SMALL_BYTES) -> JournalColumns:
    """The same content as `read_journal`, which also sets what is tolerated and what is an error."""
    return _parse(read_bytes(path), path, small_bytes)


def columns_of(events: list[Event], first: int = 0) -> JournalColumns:
    """Columns of events in memory, the first of which has the line number `first`."""
    numbered = list(enumerate(events, start=first))
    done = [(line, e) for line, e in numbered if isinstance(e, StepDone)]
    steps: dict[str, NDArray[Any]] = {
        name: np.array([np.nan if (v := getattr(e, name)) is None else v for _, e in done], dtype=np.float64)
        for name in FLOATS
    }
    steps |= {name: np.array([getattr(e, name) for _, e in done], dtype=np.int64) for name in INTEGERS}
    steps["line"] = np.array([line for line, _ in done], dtype=np.int64)
    return JournalColumns(steps, [(line, e) for line, e in numbered if not isinstance(e, StepDone)])


class ColumnsTail:
    """The live reading end: follows a journal that another process writes, also across a truncation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: JournalColumns | None = None
        self._offset, self._lines, self._inode = 0, 0, 0

    def poll(self) -> bool:
        """Reads what was appended since the last call; gives whether there is anything. A line being written waits."""
        try:
            with open_plain(self.path) as file:
                info = os.fstat(file.fileno())
                old = self.columns if info.st_ino == self._inode and info.st_size >= self._offset else None
                if old is not None:
                    file.seek(self._offset)
                    data = file.read(MOST_BYTES)
        except BadFile as error:
            raise CheckpointError(str(error), where=str(self.path)) from None
        if old is None:  # the first time, or truncated or replaced by a resumed run
            data = read_bytes(self.path)
            self.columns = _parse(data, self.path, SMALL_BYTES)
            self._inode, self._offset, self._lines = info.st_ino, 0, 0
        else:
            events = list(parse_events(data, self.path, first_line=self._lines + 1))
            new = columns_of(events, first=self._lines)
            steps: dict[str, NDArray[Any]] = {k: np.concatenate([v, new.steps[k]]) for k, v in old.steps.items()}
            self.columns = JournalColumns(steps, old.others + new.others) if events else old
        self._offset += data.rfind(b"\n") + 1
        self._lines += data.count(b"\n")
        return old is not self.columns


def _parse(data: bytes, path: str | Path, small_bytes: int) -> JournalColumns:
    if len(data) > small_bytes:
        from pyarrow import ArrowInvalid

        try:
            return _by_column(data, path)
        except ArrowInvalid as error:
            log.info("%s: read line by line, since %s", path, error)
    return columns_of(list(parse_events(data, path)))


def _by_column(data: bytes, path: str | Path) -> JournalColumns:
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.json

    end = data.rfind(b"\n") + 1
    if len(data) - end > MAX_LINE:
        raise pa.ArrowInvalid("its last line is too long")
    data = data[:end]
    view = np.frombuffer(data, dtype=np.uint8)
    starts = _line_starts(view)
    ends = np.append(starts[1:], end)
    if len(starts) and not ((ends - starts).min() > 13 and (ends - starts).max() <= MAX_LINE):
        raise pa.ArrowInvalid("a line is too short or too long")
    # {"event": "St... : StepDone is the only event whose name begins with St.
    is_step = (view[starts + 11] == ord("S")) & (view[starts + 12] == ord("t"))
    schema = pa.schema([(n, pa.float64()) for n in FLOATS] + [(n, pa.int64()) for n in INTEGERS])
    table = pyarrow.json.read_json(
        pa.BufferReader(data),
        read_options=pyarrow.json.ReadOptions(block_size=1 << 22),
        parse_options=pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
    if table.num_rows != len(starts):
        raise pa.ArrowInvalid(f"{len(starts)} lines hold {table.num_rows} objects")
    table = table.filter(pa.array(is_step))
    lowest = pyarrow.compute.min(table.column("step")).as_py()
    if any(table.column(name).null_count for name in ("epoch", "learning_rate", *INTEGERS)) or (
        lowest is not None and lowest < 0
    ):
        raise pa.ArrowInvalid("a step lacks a number")
    steps: dict[str, NDArray[Any]] = {n: table.column(n).to_numpy() for n in FLOATS + INTEGERS}
    for name in FLOATS:
        steps[name] = np.where(np.isfinite(steps[name]), steps[name], np.nan)
    steps["line"] = np.flatnonzero(is_step)
    others: list[tuple[int, Event]] = []
    for line in np.flatnonzero(~is_step):
        event = decode_line(data[starts[line] : ends[line]], where=f"{path}:{line + 1}")
        if isinstance(event, StepDone):
            raise pa.ArrowInvalid("its lines are spelled another way than `encode_event` does")
        if event is not None:
            others.append((int(line), event))
    return JournalColumns(steps, others)


def _line_starts(view: NDArray[np.uint8], block: int = 1 << 24) -> NDArray[np.int64]:
    ends = [np.flatnonzero(view[at : at + block] == ord("\n")) + at for at in range(0, len(view), block)]
    return np.concatenate([[0], np.concatenate(ends)[:-1] + 1]).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Peek:
    """What the ends of a journal tell. `score` is the newest validation score; `spark` a few losses over the whole run."""

    num_steps: int = 0
    step: int = 0
    ended: str | None = None
    loss: float | None = None
    score: tuple[str, float] | None = None
    spark: tuple[float, ...] = ()
    problem: str | None = None
    """What is damaged, as far as this was read."""


def peek_journal(path: Path) -> Peek:
    """Facts from both ends, read in about a millisecond: an absent journal has none, an unreadable one a problem."""
    try:
        with open_plain(path) as file:
            handle = file.fileno()
            size = os.fstat(handle).st_size
            head = os.pread(handle, HEAD, 0)
            tail, far = _end_lines(handle, size, TAIL), []
            if not any(line.startswith(_EVALUATED) for line in tail) and size > TAIL:
                far = _end_lines(handle, size, FAR_TAIL)
            spark = _sample_losses(handle, size)
            endless = size > MAX_LINE and b"\n" not in os.pread(handle, MAX_LINE, size - MAX_LINE)
    except OSError:
        return Peek()
    except BadFile as error:
        return Peek(problem=f"{path.name} {error}")
    problems = [f"its last line has more than {MAX_LINE:,} bytes"] if endless else []
    first = _decoded(head[: head.rfind(b"\n") + 1].split(b"\n")[:1], problems)
    started = first[0] if first and isinstance(first[0], RunStarted) else None
    newest = next((line for line in reversed(tail or far) if line.startswith(_STEP)), None)
    last = _decoded([line for line in reversed(tail or far) if line is newest or not line.startswith(_STEP)], problems)
    evaluated = next((e for e in last if isinstance(e, Evaluated) and e.split == "validation"), None)
    if evaluated is None:
        found = _decoded([line for line in far if line.startswith(_EVALUATED)][-1:], problems)
        evaluated = next((e for e in found if isinstance(e, Evaluated)), None)
    step = next((e for e in last if isinstance(e, StepDone)), None)
    end = next((e for e in last if not (isinstance(e, Evaluated) and e.split != "validation")), None)
    return Peek(
        num_steps=max(0, started.num_steps) if started else 0,
        step=step.step if step else 0,
        ended=end.reason if isinstance(end, RunEnded) else None,
        loss=step.loss if step else None,
        score=_score(evaluated.metrics) if evaluated else None,
        spark=spark,
        problem=problems[0] if problems else None,
    )


def _end_lines(handle: int, size: int, count: int) -> list[bytes]:
    """The whole lines of the last `count` bytes; the first of a part may be the second half of one."""
    data = os.pread(handle, count, max(0, size - count))
    lines = data[: data.rfind(b"\n") + 1].split(b"\n")
    return [line for line in lines[1 if size > count else 0 :] if line]


def _decoded(lines: list[bytes], problems: list[str]) -> list[Event]:
    found = []
    for line in filter(None, lines):
        try:
            found.append(decode_line(line, where=""))
        except CheckpointError as error:
            problems.append(error.problem)
    return [event for event in found if event is not None]


def _score(metrics: dict[str, float | None]) -> tuple[str, float] | None:
    names = ("accuracy", "f1", "f1_macro", "f1_micro", "pearson", *sorted(metrics))
    found = ((name, metrics.get(name)) for name in names if name != "loss")
    return next(((name, value) for name, value in found if value is not None), None)


def _sample_losses(handle: int, size: int) -> tuple[float, ...]:
    if size <= 65_536:
        every = [m.group(1) for m in _LOSS.finditer(os.pread(handle, size, 0))]
        chosen = every[:: max(1, len(every) // SPARK_POINTS)]
    else:
        found = (_LOSS.search(os.pread(handle, 1024, k * size // SPARK_POINTS)) for k in range(SPARK_POINTS))
        chosen = [m.group(1) for m in found if m]
    return tuple(value for text in chosen if abs(value := float(text)) < 1e30)
