"""The journal of a run: one event a line, appended while it happens, truncated when a run goes back to a checkpoint, and read:
plain files of bounded size, lines of bounded length, every event checked field by field.

A line counts once its newline is on disk. A process killed while writing leaves at most one line without a newline:
readers leave it out, the next writer removes it. `SafePoint` is not stored: it says when a checkpoint may be written
and nothing about the run.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tunesmith.errors import CheckpointError, ResourceError
from tunesmith.events import EpochStarted, Event, Note, Resumed, RunEnded, RunStarted, SafePoint, from_json, to_json
from tunesmith.files import BadFile, open_plain, parse_json, read_plain
from tunesmith.runs.writing import (
    disk_error,
    in_the_way,
    kind_of,
    open_in_place,
    open_regular,
    replacing,
    require_same,
    require_same_folder,
)

log = logging.getLogger(__name__)

MAX_BYTES = 512_000_000
"""About two million steps."""
MAX_LINE = 1_000_000
"""The longest lines that we write are those of `RowsEvaluated`, some ten thousand bytes."""
LOST_JOURNAL = "journal.jsonl was gone: the curves begin here, what came before is lost"
"""What a resume notes where there is no journal."""

_STEP_DONE = b'{"event": "StepDone", "step": '
"""How `encode_event` begins a StepDone line: lets a million of them be told apart without parsing."""


def encode_event(event: Event) -> bytes:
    """The line of one event, newline included. Pure ASCII: no text in the data can break a line."""
    return json.dumps(to_json(event), allow_nan=False).encode("ascii") + b"\n"


class Journal:
    """The writing end. One process writes a journal at a time, the one that holds the lock of the run folder."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(open_in_place(self.path), "r+b")  # noqa: SIM115  (lives as long as the run)
        _drop_cut_line(self._file, self.path)

    def append(self, event: Event) -> None:
        """Writes one line and flushes it, so that it survives the end of this process."""
        if isinstance(event, SafePoint):
            return
        self._file.write(encode_event(event))
        self._file.flush()

    def fsync(self) -> None:
        """Everything appended so far survives a power failure, too."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def settle(self) -> None:
        """`fsync` before a checkpoint is published; a ResourceError when the file no longer stands at its path."""
        require_same_folder(self.path.parent)
        try:
            self.fsync()
        except OSError as error:
            raise disk_error(error, self.path) from error
        require_same(self.path, os.fstat(self._file.fileno()))

    def close(self) -> None:
        """Syncs the journal to disk and closes it. It may be called twice."""
        if not self._file.closed:
            try:
                self.fsync()
            finally:
                self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def is_journal(path: Path) -> bool:
    """Whether this is a plain file that a run of ours wrote, damaged or not, or an empty one."""
    try:
        with open(open_regular(path, follow=False), "rb") as file:
            start = file.read(1 << 16)
    except (OSError, ResourceError):
        return False
    return not start or b'{"event": "' in start


def require_journal(path: Path) -> None:
    """A ResourceError when there is something other than a journal of ours here."""
    if kind_of(path) is not None and not is_journal(path):
        raise in_the_way(path, "is not a journal that tunesmith wrote, so it is neither replaced nor added to")


def drop_cut_line(path: Path) -> int:
    """Removes the text after the last newline; returns the number of bytes removed."""
    if not path.exists():
        return 0
    with open(open_in_place(path), "r+b") as file:
        return _drop_cut_line(file, path)


def _drop_cut_line(file: BinaryIO, path: Path) -> int:
    size = os.fstat(file.fileno()).st_size
    keep = _end_of_last_line(file, path, size)
    if keep < size:
        file.truncate(keep)
        os.fsync(file.fileno())
        log.warning("%s: the last line was cut short (%d bytes) and was removed", path, size - keep)
    return size - keep


def _end_of_last_line(file: BinaryIO, path: Path, size: int) -> int:
    end, block = size, 1 << 16
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
        if size - end > MAX_LINE:
            raise CheckpointError(f"its last line has more than {MAX_LINE:,} bytes and no end", where=str(path))
    return 0


def truncate_journal(path: str | Path, step: int) -> int:
    """Drops everything that came after the safe point of `step`, in one atomic rename; gives the lines dropped.

    Kept: events with `event.step <= step`, so that the run that resumes there writes the rest again, once.
    Two exceptions: `EpochStarted(step=step)`, which begins the next epoch, and every `RunEnded`, since a run that
    resumes has not ended. With `step` 0 nothing was computed yet: only RunStarted, Resumed and Note of step 0 stay.
    """
    path = Path(path)
    if not path.exists():
        return 0
    dropped = 0
    with open(open_regular(path), "rb") as lines, replacing(path) as out:
        for number, line in enumerate(lines, start=1):
            if line.endswith(b"\n") and _survives(line, step, where=f"{path}:{number}"):
                out.write(line)
            else:
                dropped += 1
    return dropped


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
    """All events, in the order written. A cut last line is left out; a damaged line elsewhere is a CheckpointError."""
    return list(parse_events(read_bytes(path), path))


def read_bytes(path: str | Path) -> bytes:
    """The journal as it is, with a last line that was cut. An absent one is a FileNotFoundError."""
    try:
        return read_plain(path, MAX_BYTES, follow=True)
    except BadFile as error:
        raise CheckpointError(str(error), where=str(path), fix="Move it away, or restore it from a copy.") from None


def first_event(path: str | Path) -> Event | None:
    """The event of the first line; None when there is no whole line, or the event is of a newer version."""
    try:
        with open_plain(path, follow=True) as file:
            line = file.readline(MAX_LINE)
    except BadFile as error:
        raise CheckpointError(str(error), where=str(path)) from None
    return decode_line(line, where=f"{path}:1") if line.endswith(b"\n") else None


def parse_events(data: bytes, path: str | Path, *, first_line: int = 1) -> Iterator[Event]:
    """The events of whole lines; the text after the last newline is being written, or was cut by a kill."""
    end = data.rfind(b"\n") + 1
    for number, line in enumerate(data[:end].splitlines(), start=first_line):
        event = decode_line(line, where=f"{path}:{number}")
        if event is not None:
            yield event
    if len(data) - end > MAX_LINE:
        raise _damage(f"{path}", f"its last line has {len(data) - end:,} bytes and no end")


def decode_line(line: bytes, *, where: str) -> Event | None:
    """The event of a line; None for an event of a newer version, which is left out with a log line."""
    if len(line) > MAX_LINE:
        raise _damage(where, f"a line of {len(line):,} bytes")
    try:
        return from_json(parse_json(line, mend=False))
    except KeyError as error:
        log.info("%s: unknown event %s left out (written by a newer tunesmith?)", where, str(error)[:60])
        return None
    except ValueError as error:
        raise _damage(where, str(error)) from None


def _damage(where: str, what: str) -> CheckpointError:
    fix = "Delete that line to read the rest; its step becomes a gap."
    return CheckpointError(f"the journal is damaged ({what})", where=where, fix=fix)
