"""Whose files these are: which files of a folder we wrote, and whether a run may write there.

The ledger holds sha256 and size of each file we wrote, noted before the file gets its name. A file whose bytes are not in the
ledger belongs to the user, whatever its name is, and is never replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO

from tunesmith.errors import ResourceError
from tunesmith.run.journal import is_journal
from tunesmith.run.layout import RunDir, is_checkpoint_name
from tunesmith.run.sealed import is_leftover, is_sealed
from tunesmith.run.writing import (
    disk_error,
    hash_file,
    in_the_way,
    kind_of,
    open_in_place,
    read_regular,
    replacing,
    require_plain,
)

LEDGER = ".written"
_ELSEWHERE = "Give a new or empty folder as --output_dir."


def is_ours(file: Path) -> bool:
    """Whether the bytes at this name are some that we wrote there. A name that is free is ours to take."""
    kind = kind_of(file)
    if kind != "a file":
        return kind is None
    noted = _hashes(file)
    return bool(noted) and hash_file(file) in noted


def has_ledger(folder: Path) -> bool:
    """Whether this folder is one of a run that notes what it writes."""
    return kind_of(folder / LEDGER) == "a file"


def start_ledger(folder: Path, adopted: tuple[Path, ...] = ()) -> None:
    """A ledger for a folder that has none. `adopted` are files of a run from before there were ledgers."""
    if not has_ledger(folder):
        _note(folder, *(file for file in adopted if kind_of(file) == "a file"))


def require_own(file: Path) -> None:
    """A ResourceError when there is something other than a plain file here, or, in a folder with a ledger, a file of the user."""
    require_plain(file)
    if has_ledger(file.parent) and not is_ours(file):
        raise in_the_way(file, "is not a file that tunesmith wrote, so it is not replaced")


@contextmanager
def writing_own(file: Path) -> Iterator[BinaryIO]:
    """Like `replacing`; in a folder with a ledger a file of the user is not replaced, and ours is noted."""
    require_own(file)
    note = partial(_note, file.parent, name=file.name) if has_ledger(file.parent) else None
    with replacing(file, before=note) as out:
        yield out


def write_own(file: Path, data: bytes) -> None:
    """Replaces a small file of a run folder, whole or not at all; see `writing_own`."""
    with writing_own(file) as out:
        out.write(data)


def _note(folder: Path, *files: Path, name: str | None = None) -> None:
    lines = "".join(f"{hash_file(file)}  {file.stat().st_size}  {name or file.name}\n" for file in files)
    with open(open_in_place(folder / LEDGER), "r+b") as ledger:
        size = os.fstat(ledger.fileno()).st_size
        cut = size > 0 and os.pread(ledger.fileno(), 1, size - 1) != b"\n"
        ledger.write((("\n" if cut else "") + lines).encode())
        ledger.flush()
        os.fsync(ledger.fileno())


def _hashes(file: Path) -> set[str]:
    """The noted hashes of this name and size: a file of another size is not read, however large it is."""
    try:
        lines = read_regular(file.parent / LEDGER).decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return set()
    ending = f"  {file.stat().st_size}  {file.name}"
    return {line.removesuffix(ending) for line in lines if line.endswith(ending)}


def require_own_folder(run: RunDir, inputs: Mapping[str, str | None], *, cache: str | None = None) -> None:
    """A ResourceError that names what is in the way. `inputs` are the options that name what a run reads.

    The folder of caches may lie in the run folder: a start that failed may have left it there.
    """
    try:
        _require_apart(run.path, inputs)
        kind = kind_of(run.path)
        if kind not in (None, "a folder") and not (kind == "a link" and run.path.is_dir()):
            raise ResourceError(f"is {kind}, not a folder", where=str(run.path), fix=_ELSEWHERE)
        found = sorted(run.path.iterdir()) if kind is not None else []
        caches = () if cache is None else (Path(cache).resolve(), *Path(cache).resolve().parents)
        mine = is_run(run)
        taken = [p for p in found if (is_foreign(run, p) if mine else not _is_debris(run, p))]
        taken = [p for p in taken if p.resolve() not in caches]
    except OSError as error:
        raise disk_error(error, run.path) from error
    if not taken:
        return
    shown = ", ".join(p.name for p in taken[:4]) + (f" and {len(taken) - 4} more" if len(taken) > 4 else "")
    if mine:
        problem = f"holds {shown}, which tunesmith did not write, where the run would write"
        raise ResourceError(problem, where=str(run.path), fix=f"Move it away, or: {_ELSEWHERE}")
    raise ResourceError(f"holds {shown} and is not a run of tunesmith", where=str(run.path), fix=_ELSEWHERE)


def require_not_of_a_run(file: Path) -> None:
    """A ResourceError when an output that was asked for would replace a file of a run."""
    run = RunDir(file.parent)
    if is_run(run) and file.name in {p.name for p in (*run.files, run.journal_file)}:
        raise ResourceError("is a file of a run", where=str(file), fix="Give another name.")


def is_run(run: RunDir) -> bool:
    """Whether a run of ours was started here, however damaged it is."""
    if has_ledger(run.path) or any(is_sealed(folder) for folder in (*run.checkpoints(), run.best)):
        return True
    return is_journal(run.journal_file) and run.journal_file.stat().st_size > 0


def is_foreign(run: RunDir, path: Path) -> bool:
    """Whether a file, folder, link or pipe of the user has a name of ours."""
    if path in run.folders or is_checkpoint_name(path.name):
        return not is_sealed(path)
    if path == run.journal_file:
        return not is_journal(path)
    if path == run.lock_file:
        return kind_of(path) != "a file"
    if path not in run.files:
        return False
    return kind_of(path) != "a file" if not has_ledger(run.path) and path in run.remade_files else not is_ours(path)


def _is_debris(run: RunDir, path: Path) -> bool:
    """What a start leaves that was killed before its first file."""
    return kind_of(path) == "a file" and (path == run.lock_file or is_leftover(path.name))


def _require_apart(output: Path, inputs: Mapping[str, str | None]) -> None:
    """The output folder neither is, nor holds, nor lies in a folder that the run reads."""
    here = output.resolve()
    for name, text in inputs.items():
        if text is None or not Path(text).exists():
            continue
        read = Path(text).resolve()
        if here == read or here in read.parents or (read.is_dir() and read in here.parents):
            how = "is" if here == read else "holds" if here in read.parents else "lies in"
            raise ResourceError(f"{how} what --{name} reads ({read})", where=str(output), fix=_ELSEWHERE)
