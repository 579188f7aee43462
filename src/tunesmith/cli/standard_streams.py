"""stdout and stderr may be closed, full, broken or ASCII only. A command must handle each case or fail with a clear message."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO


class LostOutput(io.StringIO):
    """Replaces a stdout that the caller closed; remembers whether anything was printed to it."""

    lost = False

    def write(self, text: str) -> int:
        """Keeps nothing."""
        self.lost = self.lost or bool(text)
        return len(text)


def prepare_streams() -> None:
    """Makes both streams usable. Occupies descriptors 0 to 2, to which a library may print, so that our files never get them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    if sys.stdout is None:
        sys.stdout = LostOutput()
    if sys.stderr is None:
        sys.stderr = LostOutput()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def drop(stream: TextIO) -> None:
    """Redirects a stream to the null device, so that the flush at exit does not fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_data(stream: TextIO) -> TextIO:
    """The stream for data: always UTF-8, as in files, whatever the locale is."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors="strict")
    return stream
