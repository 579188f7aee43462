"""The journal of a run: one event a line, appended while it happens, truncated when a run goes back to a checkpoint.

A line counts once its newline is on disk. A process killed while writing leaves at most one line without a newline:
readers leave it out, the next writer removes it. `SafePoint` is not stored: it says when a checkpoint may be written
and nothing about the run.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from tunesmith.errors import CheckpointError, ResourceError
from tunesmith.events import EpochStarted, Event, Note, Resumed, RunEnded, RunStarted, SafePoint, to_json
from tunesmith.run.reader import MAX_LINE, decode_line
from tunesmith.run.writing import (
    disk_error,
    kind_of,
    open_in_place,
    open_regular,
    replacing,
    require_same_folder,
)

log = logging.getLogger(__name__)

LOST_JOURNAL = "journal.jsonl was gone: the curves begin here, what came before is lost"
"""What a resume notes where there is no journal."""

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
        self._file: BinaryIO = open(open_in_place(self.path), "r+b")  # noqa: SIM115  (lives as long as the run)
        _drop_cut_line(self._file, self.path)

    def append(self, event: Event) -> None:
        """Writes one line and hands it to the operating system, so that it outlives this process."""
        if isinstance(event, SafePoint):
            return
        self._file.write(encode_event(event))
        self._file.flush()

    def fsync(self) -> None:
        """Everything appended so far outlives a power cut too."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def settle(self) -> None:
        """`fsync` before a checkpoint is published; a ResourceError when the file no longer stands at its path."""
        require_same_folder(self.path.parent)
        try:
            self.fsync()
        except OSError as error:
            raise disk_error(error, self.path) from error
        try:
            same = os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError:
            same = False
        if not same:
            raise ResourceError(
                "was removed, renamed or replaced while the run wrote to it; nothing more is written",
                where=str(self.path),
                fix="Put it back, then give the same command again.",
            )

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
        raise ResourceError(
            "is not a journal that tunesmith wrote, so it is neither replaced nor added to",
            where=str(path),
            fix="Move it to another name or folder, then give the same command again.",
        )


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
