"""A journal as arrays: the steps column by column, the few other events as they are.

A million StepDone lines are 240 MB: `json.loads` of each took 10.0 s, by columns the whole takes 1.7 s and 0.64 GB
(2 shared cores). A run of ordinary length needs neither the speed nor the import.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.errors import CheckpointError
from tunesmith.events import Event, StepDone
from tunesmith.files import BadFile, open_plain
from tunesmith.run.reader import MAX_LINE, decode_line, parse_events, read_bytes

log = logging.getLogger(__name__)

FLOATS = ("epoch", "loss", "grad_norm", "learning_rate", "seconds")
INTEGERS = ("step", "examples", "tokens", "padded_tokens")
SHORTEST = 13
"""Bytes of a line up to where the name of its event tells a StepDone."""
NEVER_NULL = ("epoch", "learning_rate", *INTEGERS)
SMALL_BYTES = 2_000_000
"""Below this many bytes (about 8,000 steps, 80 ms) reading line by line is as quick as importing pyarrow."""
MOST_BYTES = 64_000_000
"""Bytes that `ColumnsTail` reads line by line in one poll; what is left waits for the next."""


@dataclass(frozen=True, slots=True)
class JournalColumns:
    """`steps[name]` holds one value per StepDone (NaN for null); `steps["line"]` and `others` tell the order."""

    steps: dict[str, NDArray[Any]]
    others: list[tuple[int, Event]]


def read_columns(path: str | Path, *, small_bytes: int = SMALL_BYTES) -> JournalColumns:
    """The same content as `read_journal`, which also sets what is tolerated and what is an error."""
    return _parse(read_bytes(path), path, small_bytes)


class ColumnsTail:
    """The live reading end: follows a journal that another process writes, also across a truncation."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: JournalColumns | None = None
        self._offset, self._lines, self._inode = 0, 0, 0

    def poll(self) -> bool:
        """Reads what was appended since the last time; gives whether that is anything. A line being written waits."""
        try:
            with open_plain(self.path) as file:
                info = os.fstat(file.fileno())
                again = self.columns is None or info.st_ino != self._inode or info.st_size < self._offset
                if not again:
                    file.seek(self._offset)
                    data = file.read(MOST_BYTES)
        except BadFile as error:
            raise CheckpointError(str(error), where=str(self.path)) from None
        if again:  # truncated or replaced by a resumed run
            data = read_bytes(self.path)
            self.columns = _parse(data, self.path, SMALL_BYTES)
            self._inode, self._offset, self._lines = info.st_ino, data.rfind(b"\n") + 1, data.count(b"\n")
            return True
        assert self.columns is not None
        events = list(parse_events(data, self.path, first_line=self._lines + 1))
        self._offset += data.rfind(b"\n") + 1
        self._lines += data.count(b"\n")
        if events:
            self.columns = _joined(self.columns, columns_of(events))
        return bool(events)


def _joined(old: JournalColumns, new: JournalColumns) -> JournalColumns:
    last = max([int(old.steps["line"][-1]) if len(old.steps["line"]) else -1, *(line for line, _ in old.others[-1:])])
    new.steps["line"] = new.steps["line"] + (last + 1)
    steps: dict[str, NDArray[Any]] = {k: np.concatenate([old.steps[k], new.steps[k]]) for k in old.steps}
    return JournalColumns(steps, [*old.others, *((line + last + 1, e) for line, e in new.others)])


def _parse(data: bytes, path: str | Path, small_bytes: int) -> JournalColumns:
    if len(data) <= small_bytes:
        return columns_of(list(parse_events(data, path)))
    from pyarrow import ArrowInvalid

    try:
        return _by_column(data, path)
    except ArrowInvalid as error:
        log.info("%s: read line by line, since %s", path, error)
        return columns_of(list(parse_events(data, path)))


def columns_of(events: list[Event]) -> JournalColumns:
    """Columns of events already in memory (a live tail, a test)."""
    done = [(line, e) for line, e in enumerate(events) if isinstance(e, StepDone)]
    steps: dict[str, NDArray[Any]] = {
        name: np.array([np.nan if (v := getattr(e, name)) is None else v for _, e in done], dtype=np.float64)
        for name in FLOATS
    }
    steps |= {name: np.array([getattr(e, name) for _, e in done], dtype=np.int64) for name in INTEGERS}
    steps["line"] = np.array([line for line, _ in done], dtype=np.int64)
    return JournalColumns(steps, [(line, e) for line, e in enumerate(events) if not isinstance(e, StepDone)])


def _by_column(data: bytes, path: str | Path) -> JournalColumns:
    import pyarrow as pa
    import pyarrow.json

    end = data.rfind(b"\n") + 1
    if len(data) - end > MAX_LINE:
        raise pa.ArrowInvalid("its last line is too long")
    data = data[:end]
    starts = _line_starts(data)
    view = np.frombuffer(data, dtype=np.uint8)
    lengths = np.diff(starts, append=end)
    if len(starts) and not (lengths.min() > SHORTEST and lengths.max() <= MAX_LINE):
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
    if any(table.column(name).null_count for name in NEVER_NULL) or (table.num_rows and _lowest(table, "step") < 0):
        raise pa.ArrowInvalid("a step lacks a number")
    steps: dict[str, NDArray[Any]] = {n: table.column(n).to_numpy() for n in FLOATS + INTEGERS}
    for name in FLOATS:
        steps[name] = np.where(np.isfinite(steps[name]), steps[name], np.nan)
    steps["line"] = np.flatnonzero(is_step)
    others: list[tuple[int, Event]] = []
    for line in np.flatnonzero(~is_step):
        end = starts[line + 1] if line + 1 < len(starts) else len(data)
        event = decode_line(data[starts[line] : end], where=f"{path}:{line + 1}")
        if isinstance(event, StepDone):
            raise pa.ArrowInvalid("its lines are spelled another way than `encode_event` does")
        if event is not None:
            others.append((int(line), event))
    return JournalColumns(steps, others)


def _lowest(table: Any, name: str) -> int:
    import pyarrow.compute

    return int(pyarrow.compute.min(table.column(name)).as_py())


def _line_starts(data: bytes) -> NDArray[np.int64]:
    block = 1 << 24
    view = np.frombuffer(data, dtype=np.uint8)
    ends = [np.flatnonzero(view[at : at + block] == ord("\n")) + at for at in range(0, len(data), block)]
    newlines = np.concatenate(ends)
    return np.concatenate([[0], newlines[:-1] + 1]).astype(np.int64)
