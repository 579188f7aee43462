"""Whether a run may write to a folder: one that is new or empty, or one that holds a run of ours and nothing of a person's
at our names. Nothing is created, replaced or removed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tunesmith.errors import ResourceError
from tunesmith.run.journal import is_journal
from tunesmith.run.layout import RunDir, is_checkpoint_name
from tunesmith.run.ledger import has_ledger, is_ours
from tunesmith.run.sealed import is_leftover, is_sealed
from tunesmith.run.writing import disk_error, kind_of

_ELSEWHERE = "Give a new or empty folder as --output_dir."


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
    raise ResourceError(f"holds {shown} and is no run of tunesmith", where=str(run.path), fix=_ELSEWHERE)


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
    """Whether a person's file, folder, link or pipe stands at a name of ours."""
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
    for name, read in _existing(inputs):
        if here == read or here in read.parents or (read.is_dir() and read in here.parents):
            how = "is" if here == read else "holds" if here in read.parents else "lies in"
            raise ResourceError(f"{how} what --{name} reads ({read})", where=str(output), fix=_ELSEWHERE)


def _existing(inputs: Mapping[str, str | None]) -> Iterable[tuple[str, Path]]:
    return ((name, Path(text).resolve()) for name, text in inputs.items() if text is not None and Path(text).exists())
