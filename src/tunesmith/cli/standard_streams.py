"""stdout and stderr as they were given: closed, full, broken or ASCII only. None of it may end a command in confusion."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TextIO


class LostOutput(io.StringIO):
    """Stands for a stdout that was closed by the caller; remembers that something was to be printed."""

    lost = False

    def write(self, text: str) -> int:
        """Keeps nothing."""
        self.lost = self.lost or bool(text)
        return len(text)


def prepare_streams() -> None:
    """Makes both streams usable. Descriptors 0 to 2 are never free for a file of ours: a library may print to them."""
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
    """Sends the rest of a stream nowhere, so that Python does not fail once more when it flushes it at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_data(stream: TextIO) -> TextIO:
    """The stream for data of a person: always UTF-8, as in the files we write, whatever the locale says."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding="utf-8", errors="strict")
    return stream
