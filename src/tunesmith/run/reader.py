"""The one reader of journals: plain files of bounded size, lines of bounded length, every event checked field by field.

`read_journal` gives the events, `columns.read_columns` arrays, `columns.ColumnsTail` what was appended since, `peek` a few
facts from both ends. A journal that a person or a stranger has changed is a CheckpointError that names the line.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from tunesmith.errors import CheckpointError
from tunesmith.events import Event, from_json
from tunesmith.files import BadFile, open_plain, parse_json, read_plain

log = logging.getLogger(__name__)

MAX_BYTES = 512_000_000
"""About two million steps."""
MAX_LINE = 1_000_000
"""The longest line that we write has some thousand bytes."""


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
    """The events of whole lines; what stands behind the last newline is being written, or was cut by a kill."""
    end = data.rfind(b"\n") + 1
    for number, line in enumerate(data[:end].splitlines(), start=first_line):
        event = decode_line(line, where=f"{path}:{number}")
        if event is not None:
            yield event
    if len(data) - end > MAX_LINE:
        raise _damage(f"{path}", f"its last line has {len(data) - end:,} bytes and no end")


def decode_line(line: bytes, *, where: str) -> Event | None:
    """The event of a line; None for an event of a newer version, which is passed over with a log line."""
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
