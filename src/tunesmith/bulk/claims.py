"""Who works on which unit: a lock file for each, which the system releases when a process dies, however it dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tunesmith.run.writing import make_folder, open_in_place

CLAIMS = ".claims"


@contextmanager
def claimed(folder: Path, name: str, *, wait: bool = False) -> Iterator[bool]:
    """Whether this process has the unit for as long as the block runs; False when another one has it now.

    With `wait` the block starts when the other one is done.
    """
    file = folder / CLAIMS / f"{name.replace('/', '%2F')}.lock"
    make_folder(file.parent)
    descriptor = open_in_place(file)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
