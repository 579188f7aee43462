"""Which files of a folder are ours: the sha256 of each file we wrote there, a line each, noted before the file gets its name.

A file whose bytes are not in the ledger is a person's, whatever its name is, and is never replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tunesmith.errors import ResourceError
from tunesmith.run.remembered import hash_file
from tunesmith.run.writing import kind_of, open_in_place, read_regular, replacing, require_plain

LEDGER = ".written"


def is_ours(file: Path) -> bool:
    """Whether the bytes at this name are some that we wrote there. A name that is free is ours to take."""
    kind = kind_of(file)
    return kind is None or (kind == "a file" and f"{hash_file(file)}  {file.name}" in _lines(file.parent))


def has_ledger(folder: Path) -> bool:
    """Whether this folder is one of a run that notes what it writes."""
    return kind_of(folder / LEDGER) == "a file"


def start_ledger(folder: Path, adopted: tuple[Path, ...] = ()) -> None:
    """A ledger for a folder that has none. `adopted` are files of a run from before there were ledgers."""
    if not has_ledger(folder):
        _note(folder, *(file for file in adopted if kind_of(file) == "a file"))


def require_own(file: Path) -> None:
    """A ResourceError when something else than a plain file, or in a folder with a ledger a person's file, stands here."""
    require_plain(file)
    if has_ledger(file.parent) and not is_ours(file):
        raise ResourceError(
            "is not a file that tunesmith wrote, so it is not replaced",
            where=str(file),
            fix="Move it to another name or folder, then give the same command again.",
        )


@contextmanager
def writing_own(file: Path) -> Iterator[BinaryIO]:
    """Like `replacing`; in a folder with a ledger a person's file is not replaced, and ours is noted."""
    require_own(file)
    note = partial(_note, file.parent, name=file.name) if has_ledger(file.parent) else None
    with replacing(file, before=note) as out:
        yield out


def write_own(file: Path, data: bytes) -> None:
    """Replaces a small file of a run folder, whole or not at all; see `writing_own`."""
    with writing_own(file) as out:
        out.write(data)


def _note(folder: Path, *files: Path, name: str | None = None) -> None:
    lines = "".join(f"{hash_file(file)}  {name or file.name}\n" for file in files)
    with open(open_in_place(folder / LEDGER), "r+b") as ledger:
        size = os.fstat(ledger.fileno()).st_size
        cut = size > 0 and os.pread(ledger.fileno(), 1, size - 1) != b"\n"
        ledger.write((("\n" if cut else "") + lines).encode())
        ledger.flush()
        os.fsync(ledger.fileno())


def _lines(folder: Path) -> set[str]:
    try:
        return set(read_regular(folder / LEDGER).decode("utf-8", "replace").splitlines())
    except FileNotFoundError:
        return set()
