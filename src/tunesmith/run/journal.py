"""The journal of a run: one event a line, appended while it happens, truncated when a run goes back to a checkpoint.

A line counts once its newline is on disk. A process killed while writing leaves at most one line without a newline:
readers leave it out, the next writer removes it. `SafePoint` is not stored: it says when a checkpoint may be written
and nothing about the run.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from tunesmith.events import EpochStarted, Event, Note, Resumed, RunEnded, RunStarted, SafePoint, to_json
from tunesmith.run.reader import decode_line

log = logging.getLogger(__name__)

_STEP_DONE = b'{"event": "StepDone", "step": '
"""How `encode_event` begins a StepDone line: lets a million of them be told apart without parsing."""


def encode_event(event: Event) -> bytes:
    """The line of one event, newline included. Pure ASCII: no text in the data can break a line."""
    return json.dumps(to_json(event), allow_nan=False).encode("ascii") + b"\n"


class Journal:
    """The writing end. One process writes a journal at a time (the run folder's lock sees to that)."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        drop_cut_line(self.path)
        self._file: BinaryIO = open(self.path, "ab")  # noqa: SIM115  (lives as long as the run)

    def append(self, event: Event) -> None:
        """Writes one line and hands it to the operating system, so that it outlives this process."""
        if isinstance(event, SafePoint):
            return
        self._file.write(encode_event(event))
        self._file.flush()

    def fsync(self) -> None:
        """Everything appended so far outlives a power cut too. Called before a checkpoint is published."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Makes the journal durable and closes it. Closing twice is fine."""
        if not self._file.closed:
            try:
                self.fsync()
            finally:
                self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def drop_cut_line(path: Path) -> int:
    """Removes what stands behind the last newline; gives the number of bytes removed."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return 0
    with open(path, "rb+") as file:
        keep = _end_of_last_line(file, size)
        if keep < size:
            file.truncate(keep)
            os.fsync(file.fileno())
            log.warning("%s: the last line was cut short (%d bytes) and was removed", path, size - keep)
    return size - keep


def _end_of_last_line(file: BinaryIO, size: int) -> int:
    end, block = size, 1 << 16
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def truncate_journal(path: str | Path, step: int) -> int:
    """Drops everything that came after the safe point of `step`, in one atomic rename; gives the lines dropped.

    Kept: events with `event.step <= step`, so that the run that goes on from there writes the rest again, once.
    Two exceptions: `EpochStarted(step=step)`, which begins the next epoch, and every `RunEnded`, since a run that
    goes on has not ended. With `step` 0 nothing was computed yet: only RunStarted, Resumed and Note of step 0 stay.
    """
    path = Path(path)
    if not path.exists():
        return 0
    dropped = 0
    handle, temporary = tempfile.mkstemp(prefix=".tmp-journal-", dir=path.parent)
    try:
        with open(handle, "wb") as out, open(path, "rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.endswith(b"\n") and _survives(line, step, where=f"{path}:{number}"):
                    out.write(line)
                else:
                    dropped += 1
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    _fsync_folder(path.parent)
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


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
