"""Processes of `Dataset.map` that die: an error that says which rows they had."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tunesmith.errors import WorkerError
from tunesmith.run.writing import write_new

_NOTE = "rows-of-worker-"


def note_rows(folder: Path, indices: Sequence[int]) -> None:
    """Leaves a note of the rows that this process works on now; one that is killed can say nothing later."""
    note = folder / f"{_NOTE}{os.getpid()}"
    note.unlink(missing_ok=True)
    write_new(note, f"{indices[0] + 1}-{indices[-1] + 1}".encode())


@contextmanager
def naming_map_workers(folder: Path) -> Iterator[None]:
    """Inside, the death of a process of `map` becomes a WorkerError with the rows that were under way."""
    try:
        yield
    except RuntimeError as error:
        if "abruptly died" not in str(error):  # datasets' words; it has no class for it
            raise
        notes = {note.name.removeprefix(_NOTE): note.read_text() for note in sorted(folder.glob(f"{_NOTE}*"))}
        had = ", ".join(f"process {pid} rows {rows}" for pid, rows in notes.items())
        problem = f"a preprocessing worker died while it tokenized ({had or 'before its first rows'})"
        fix = "Memory may have run out, or a text ended it. Give a smaller --preprocessing_num_workers or leave it out."
        raise WorkerError(problem, fix=fix) from error
    finally:
        for note in folder.glob(f"{_NOTE}*"):
            note.unlink()
