"""A run folder: its paths, its lock, whether a run may write there, its JSON files, and folders with a manifest.

A JSON file may be missing; if it exists, the types of all known values are checked. A lock lets one process write; the
kernel releases it when that process ends, so it is never stale.

A folder with a manifest is complete or absent: it is written to a temporary folder, hashed, fsynced, then renamed. Order of
durability: every file is on disk before MANIFEST.json, the manifest before the rename, the rename before the parent's fsync.
A folder whose manifest verifies is complete; `remove_leftovers` deletes the others.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tunesmith.errors import CheckpointError, ConfigError, ResourceError, TunesmithError, did_you_mean
from tunesmith.events import Event, RunEnded
from tunesmith.files import (
    MAX_JSON_BYTES,
    SYSTEM_FILES,
    TMP_PREFIX,
    BadFile,
    disk_error,
    fault_point,
    fsync_path,
    hash_file,
    in_the_way,
    kind_of,
    known_hash,
    open_in_place,
    parse_json,
    read_json,
    read_plain,
    write_new,
)
from tunesmith.runs.event_log import Curves, build_curves, is_journal, read_columns, read_journal

log = logging.getLogger(__name__)

MANIFEST = "MANIFEST.json"
FORMAT = 1
RESULTS = "results"
"""The entry in the manifest of model/ with the sha256 of the result files of its run."""
_ONLY_OURS = ("generators.safetensors", "tunesmith.json")
"""File names that identify our folder if its manifest is missing."""

_LEFTOVER = re.compile(
    r"\.tmp-(?:(old|gone)-)?(checkpoint-\d+|model|\w+\.(?:jsonl?|yaml|md|html|png|svg|parquet)|\.lock)-\d+"
    r"|\.tmp-journal-\w+"
)
"""Exactly the names that this package writes, because an output_dir may contain other files."""


def publish_folder(target: Path, fill: Callable[[Path], None], meta: dict[str, Any], *, bytes_needed: int = 0) -> None:
    """Publish a folder that `fill` writes. After a failure, `target` is unchanged and nothing is left behind."""
    tmp = _aside(target)
    require_own_target(target)
    try:
        require_space(target.parent, bytes_needed)
        remove_tree(tmp)
        tmp.mkdir()
        fault_point("save.begin")
        fill(tmp)
        fault_point("save.filled")
        write_manifest(tmp, meta)
        fault_point("save.sealed")
        _publish(tmp, target)
    except BaseException as error:
        shutil.rmtree(tmp, ignore_errors=True)
        number = None if isinstance(error, TunesmithError) else os_error_number(error)
        if number is None:
            raise
        raise disk_error(OSError(number, os.strerror(number)), target, bytes_needed) from error


def _publish(tmp: Path, target: Path) -> None:
    """Rename a complete folder into place. If the fsync fails, the rename is undone."""
    old = _aside(target, "old-")
    replaces = target.exists()
    try:
        if replaces:
            remove_tree(old)
            os.rename(target, old)
            fault_point("save.moved")
        os.rename(tmp, target)
        fault_point("save.renamed")
        fsync_path(target.parent)
    except BaseException:
        if not tmp.exists() and target.exists():
            os.rename(target, tmp)
        if replaces and not target.exists():
            os.rename(old, target)
        raise
    if replaces:
        _keep_added_files(old, target)
        remove_tree(old)


def has_manifest(folder: Path) -> bool:
    """Return whether we wrote this folder, intact or damaged: it has our manifest, or one that is no longer JSON."""
    if kind_of(folder) != "a folder":
        return False
    if kind_of(folder / MANIFEST) is None:
        return any(kind_of(folder / name) == "a file" for name in _ONLY_OURS)
    try:
        manifest = json.loads(read_plain(folder / MANIFEST, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return kind_of(folder / MANIFEST) == "a file"
    return isinstance(manifest, dict) and {"self", "files"} <= manifest.keys()


def require_own_target(target: Path) -> None:
    """Raise a ResourceError if something that we didn't write is in place of the folder."""
    if kind_of(target) is not None and not has_manifest(target):
        raise in_the_way(target, "was not written by tunesmith, so it is not replaced")


def added_files(folder: Path) -> list[str]:
    """Return files that a person added to a folder; unknown if the manifest is damaged."""
    try:
        known = {MANIFEST, *read_manifest(folder)["files"]}
    except CheckpointError:
        return []
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(str(name) for name in found if str(name) not in known)


def _keep_added_files(old: Path, target: Path) -> None:
    """Move files that a person added to a folder into its replacement."""
    for name in added_files(old):
        if kind_of(target / name) is None:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.rename(old / name, target / name)


def _aside(target: Path, why: str = "") -> Path:
    """Return the temporary name of a folder before publication or after removal; `remove_leftovers` finds these."""
    return target.parent / f"{TMP_PREFIX}{why}{target.name}-{os.getpid()}"


def os_error_number(error: BaseException) -> int | None:
    """Return the errno behind an error. Rust libraries (safetensors, tokenizers) put it into their text: "(os error 28)"."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"\(os error (\d+)\)", str(error)) if isinstance(error, Exception) else None
    return None if found is None else int(found.group(1))


def require_space(folder: Path, bytes_needed: int) -> None:
    """Raise a ResourceError if the disk has less than 1.1 times these bytes free."""
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    if bytes_needed and free < bytes_needed * 1.1:
        raise ResourceError(
            f"{bytes_needed / 1e6:.1f} MB are needed and {free / 1e6:.1f} MB are free",
            where=str(folder),
            fix="Free some space, or put --output_dir on another disk; then run the same command again.",
        )


def verify(
    folder: Path, *, names: Container[str] | None = None, hashed: Callable[[Path], str] = hash_file
) -> dict[str, Any]:
    """Return the manifest of an intact folder; a CheckpointError names the first modified file.

    `names` limits the check to these files. `hashed` returns the SHA-256 of a file.
    """
    manifest = read_manifest(folder)
    wanted = {name: entry for name, entry in manifest["files"].items() if names is None or name in names}
    for name, entry in sorted(wanted.items()):
        file = folder / name
        try:
            if not file.is_file():
                raise CheckpointError("is missing" if not file.exists() else "is not a file", where=str(file))
            size = file.stat().st_size
            if size != entry["size"]:
                raise CheckpointError(f"has {size} bytes instead of {entry['size']}", where=str(file))
            if hashed(file) != entry["sha256"]:
                raise CheckpointError("was modified (sha256 differs)", where=str(file))
        except OSError as error:
            raise CheckpointError(f"cannot be read ({error.strerror})", where=str(file)) from error
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest, checked against its own hash; the listed files are not read."""
    file = folder / MANIFEST
    try:
        manifest = json.loads(read_plain(file, MAX_JSON_BYTES, follow=True))
        stored = manifest.pop("self")
    except OSError as error:
        raise CheckpointError(f"cannot be read ({error.strerror})", where=str(file)) from error
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError("is damaged", where=str(file)) from error
    if stored != _own_hash(manifest):
        raise CheckpointError("is damaged (its own sha256 differs)", where=str(file))
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"has format {manifest.get('format')}, this version reads {FORMAT}", where=str(file))
    if not isinstance(manifest.get("files"), dict):
        raise CheckpointError("lists no files", where=str(file))
    for name, entry in manifest["files"].items():
        known = isinstance(entry, dict) and isinstance(entry.get("size"), int) and isinstance(entry.get("sha256"), str)
        if not known or os.path.isabs(name) or not {"..", "\0"}.isdisjoint((*Path(name).parts, *name)):
            raise CheckpointError(f"lists {name[:60]!r}, which tunesmith does not write", where=str(file))
    return dict(manifest)


def is_leftover(name: str) -> bool:
    """Return whether this is a temporary name of a folder or file before publication or after removal."""
    return _LEFTOVER.fullmatch(name) is not None


def remove_leftovers(parent: Path) -> None:
    """Remove leftovers of killed writers. Requires the lock of the run.

    A folder that was moved aside is restored if its replacement is missing.
    """
    for path in sorted(parent.glob(f"{TMP_PREFIX}*")):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None or kind_of(path) not in ("a file", "a folder"):
            continue
        if match.group(1) == "old":
            home = parent / match.group(2)
            if kind_of(home) is None:
                os.rename(path, home)
                fsync_path(parent)
                continue
            if kind_of(home) == "a folder":
                _keep_added_files(path, home)
        remove_tree(path)


def delete_folder(folder: Path) -> None:
    """Rename a folder and delete it, so that it is never partially deleted under its own name."""
    extra = added_files(folder) if has_manifest(folder) else ["it"]
    if extra:
        log.warning("%s is kept: %s was not written by tunesmith", folder, ", ".join(extra[:3]))
        return
    aside = _aside(folder, "gone-")
    remove_tree(aside)
    fault_point("rotate.begin")
    os.rename(folder, aside)
    fault_point("rotate.renamed")
    fsync_path(folder.parent)
    remove_tree(aside)


def remove_tree(path: Path) -> None:
    """Remove a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write_manifest(folder: Path, meta: dict[str, Any]) -> None:
    """Hash and fsync every file, then write the manifest.

    Threads hash while this one waits for the disk; only this thread changes the folder, in a fixed order.
    """
    files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
    with ThreadPoolExecutor(max_workers=2) as pool:
        hashes = {name: pool.submit(hash_file, file) for name, file in files.items()}
        for file in files.values():
            fsync_path(file)
        entries = {n: {"size": file.stat().st_size, "sha256": hashes[n].result()} for n, file in files.items()}
    write_new(folder / MANIFEST, manifest_bytes(meta, entries))
    fsync_path(folder / MANIFEST)
    for sub in sorted(p for p in folder.rglob("*") if p.is_dir()):
        fsync_path(sub)
    fsync_path(folder)


def manifest_bytes(meta: dict[str, Any], entries: dict[str, Any]) -> bytes:
    """Return a manifest with its own hash."""
    manifest = {"format": FORMAT, **meta, "files": entries}
    manifest["self"] = _own_hash(manifest)
    return json.dumps(manifest, indent=1, sort_keys=True).encode()


def _own_hash(manifest: dict[str, Any]) -> str:
    body = {k: v for k, v in manifest.items() if k != "self"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


# --- locks ------------------------------------------------------------------------------------------------------------

READERS_SECONDS = 5.0
"""How long a starting run waits for readers that only test whether the folder is in use."""


class RunLock:
    """A context manager; a second process gets a ResourceError that names the first one's process and host."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = self._take()
            _held.add(self._descriptor)
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        except OSError as error:
            self.release()
            raise disk_error(error, self.file) from error
        return self

    def _take(self) -> int:
        """Return the descriptor of the locked file, which is still the file at this path after the lock was taken."""
        while True:
            descriptor = open_in_place(self.file)
            _require_own(descriptor, self.file)
            try:
                _lock_alone(descriptor)
            except BlockingIOError:
                holder = _noted_holder(descriptor)
                os.close(descriptor)
                raise ResourceError(
                    f"is in use by {holder or 'another process'}",
                    where=str(self.file.parent),
                    fix="Wait for it, stop it, or set a different --output_dir.",
                ) from None
            except OSError as error:
                reason = error.strerror
                log.warning("%s: this file system has no locks (%s); start one run per folder", self.file, reason)
            if os.path.samestat(os.fstat(descriptor), self.file.lstat()):
                return descriptor
            os.close(descriptor)

    def release(self) -> None:
        """Release the lock. May be called twice."""
        if self._descriptor in _held:
            _held.discard(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None

    def __exit__(self, *error: object) -> None:
        self.release()


def _require_own(descriptor: int, file: Path) -> None:
    """Raise a ResourceError if a file of that name is not the lock of a run."""
    held = os.pread(descriptor, 4096, 0)
    if held and not held.startswith(b'{"pid": '):
        os.close(descriptor)
        raise in_the_way(file, "is not the lock of a run, so it is not written to")


def _lock_alone(descriptor: int) -> None:
    """Take the exclusive lock. Waits briefly for readers that test the lock; a BlockingIOError if it is taken."""
    until = time.monotonic() + READERS_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises if another process has the exclusive lock
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            if time.monotonic() > until:
                raise
        time.sleep(0.002)


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Wait for the lock of this file and take it for a small change."""
    descriptor = open_in_place(file)
    _held.add(descriptor)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            raise disk_error(error, file) from error
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def is_lock(file: Path) -> bool:
    """Return whether this is the lock file of a run, held or not."""
    with _opened_lock(file) as descriptor:
        return descriptor is not None and _noted_holder(descriptor) is not None


def read_holder(file: Path) -> str | None:
    """Describe the process that has the lock of a run; None if it is free."""
    with _opened_lock(file) as descriptor:
        if descriptor is None:
            return None
        try:  # a shared lock, which is released immediately
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _noted_holder(descriptor) or "another process"
        except OSError:  # a file system without locks
            return None
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        return None


@contextmanager
def _opened_lock(file: Path) -> Iterator[int | None]:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _noted_holder(descriptor: int) -> str | None:
    """Describe the process in a lock file, whether or not it still has the lock."""
    try:
        data = parse_json(os.pread(descriptor, 4096, 0))
        return f"process {int(data['pid'])} on {data['host']}"
    except (ValueError, KeyError, TypeError, OSError):
        return None


def _close_in_child() -> None:
    """Close the locks that a forked child shares with its parent, or a worker that outlives a killed run blocks the next."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


_held: set[int] = set()
os.register_at_fork(after_in_child=_close_in_child)

# --- the run folder ---------------------------------------------------------------------------------------------------

SEARCH_RESULT = "search.json"
BEST_RESULT = "best.json"
BEST_OPTIONS = Path("tries") / "run.yaml"
"""The options with which `--recipe best` was started; run.yaml has those of its last model."""
_ELSEWHERE = "Set --output_dir to a new or empty folder."
_CHECKPOINT = re.compile(r"checkpoint-\d+")


class RunDir:
    """The paths of a run folder. Nothing is created or read until a method does so."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config_file = self.path / "run.yaml"
        self.environment_file = self.path / "environment.json"
        self.journal_file = self.path / "journal.jsonl"
        self.lock_file = self.path / ".lock"
        self.data_summary_file = self.path / "data_summary.json"
        self.bad_rows_file = self.path / "bad_rows.jsonl"
        self.metrics_file = self.path / "metrics.json"
        self.predictions_file = self.path / "predictions.parquet"
        self.model = self.path / "model"
        self.curves_png = self.path / "curves.png"
        self.curves_svg = self.path / "curves.svg"
        self.report_file = self.path / "report.html"
        self.card_file = self.path / "README.md"

    @property
    def remade_files(self) -> tuple[Path, ...]:
        """Files that every start, or a command about the run, writes again."""
        start = (self.config_file, self.environment_file, self.data_summary_file, self.bad_rows_file)
        return (*start, self.curves_png, self.curves_svg, self.report_file)

    @property
    def result_files(self) -> tuple[Path, ...]:
        """Files that a run writes once, at its end."""
        return (self.metrics_file, self.predictions_file, self.card_file)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that are written in one piece: all except the event log and the lock."""
        return (*self.remade_files, *self.result_files)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def name(self) -> str:
        """Return the name of the folder, which names the run in plots and lists."""
        return self.path.resolve().name

    def checkpoint(self, step: int) -> Path:
        """Return the checkpoint folder of a step, named as in transformers."""
        return self.path / f"checkpoint-{step}"

    def checkpoints(self) -> list[Path]:
        """Return the checkpoint folders, sorted by step number."""
        if not self.path.is_dir():
            return []
        found = [p for p in self.path.iterdir() if _CHECKPOINT.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]
        return sorted(found, key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """Return the step in a checkpoint folder's name."""
    return int(path.name.removeprefix("checkpoint-"))


def trial_folder(search: Path, number: int) -> Path:
    """Return the run folder of a trial."""
    return search / f"trial-{number}"


def best_trial_of(path: str | Path) -> Path:
    """Return the best trial of a search folder; other folders unchanged."""
    folder = Path(path)
    try:
        found = read_json(folder / SEARCH_RESULT)
    except (FileNotFoundError, BadFile):
        return folder
    best = found.get("best") if isinstance(found, dict) else None
    return trial_folder(folder, best) if type(best) is int else folder


def open_run(path: str | Path) -> RunDir:
    """Return the run folder at `path`, or the best trial of a search; a ConfigError if there is no event log."""
    run = RunDir(best_trial_of(path))
    if os.path.lexists(run.journal_file):  # the reader checks its content
        return run
    if not run.path.exists():
        parent = run.path.parent
        siblings = [p.parent.name for p in parent.glob("*/journal.jsonl")] if parent.is_dir() else []
        raise ConfigError("there is no such run folder", where=str(path), fix=did_you_mean(run.path.name, siblings))
    if run.path.is_file():
        raise ConfigError("is a file, not a run folder", where=str(path), fix="Pass the output_dir of a run.")
    inside = sorted(p.parent.name for p in run.path.glob("*/journal.jsonl"))
    fix = f"Did you mean one of its runs: {', '.join(inside[:5])}?" if inside else "Pass the output_dir of a run."
    raise ConfigError("contains no journal.jsonl, so it is not a run folder", where=str(path), fix=fix)


def load_curves(run: str | Path) -> Curves:
    """Load the curves of a run folder (or of an event log), named after the folder."""
    path = Path(run)
    if path.is_file():
        return build_curves(read_columns(path), name=path.resolve().parent.name)
    folder = open_run(path)
    return build_curves(read_columns(folder.journal_file), name=folder.name)


def require_own_folder(run: RunDir, inputs: Mapping[str, str | None]) -> None:
    """Raise a ResourceError that names what is in the way. `inputs` are the options that name files to read."""
    try:
        _require_apart(run.path, inputs)
        kind = kind_of(run.path)
        if kind not in (None, "a folder") and not (kind == "a link" and run.path.is_dir()):
            raise ResourceError(f"is {kind}, not a folder", where=str(run.path), fix=_ELSEWHERE)
        found = sorted(run.path.iterdir()) if kind is not None else []
        mine = is_run(run)
        taken = [p for p in found if (is_foreign(run, p) if mine else not _is_leftover_of_start(run, p))]
    except OSError as error:
        raise disk_error(error, run.path) from error
    if not taken:
        return
    shown = ", ".join(p.name for p in taken[:4]) + (f" and {len(taken) - 4} more" if len(taken) > 4 else "")
    if mine:
        problem = f"contains {shown}, which tunesmith did not write and the run would overwrite"
        raise ResourceError(problem, where=str(run.path), fix=f"Move it away, or: {_ELSEWHERE}")
    raise ResourceError(f"contains {shown} and is not a tunesmith run", where=str(run.path), fix=_ELSEWHERE)


def end_of(run: RunDir) -> RunEnded | None:
    """Return the last event of a finished run; None for a run that can be resumed.

    A finished run has its model, and its report unless it was trained without one. Checkpoints are removed after the report is
    written: a run that was killed in between still has them, and a resume finishes it.
    """
    try:
        events: list[Event] = read_journal(run.journal_file)
    except (OSError, TunesmithError):
        return None
    last = events[-1] if events else None
    whole = run.model.is_dir() and (run.report_file.is_file() or not run.checkpoints())
    return last if isinstance(last, RunEnded) and last.finished and whole else None


def verify_results(run: RunDir) -> None:
    """Raise CheckpointError if a result file of a finished run is missing or is not the file that the run wrote."""
    written = read_manifest(run.model).get(RESULTS) if run.model.is_dir() else None
    for name, expected in (written or {}).items():
        file = run.path / name
        if not file.is_file():
            raise CheckpointError("is missing", where=str(file), fix="Restore it from a copy, or train the run again.")
        if known_hash(file) != expected:
            problem = "was modified after the run wrote it (sha256 differs)"
            raise CheckpointError(problem, where=str(file), fix="Restore it from a copy, or train the run again.")


def require_not_of_a_run(file: Path) -> None:
    """Raise a ResourceError if a requested output would replace a file of a run."""
    run = RunDir(file.parent)
    if is_run(run) and file.name in {p.name for p in (*run.files, run.journal_file)}:
        raise ResourceError("is a file of a run", where=str(file), fix="Choose a different name.")


def is_run(run: RunDir) -> bool:
    """Return whether tunesmith started a run here, even if it was killed before its first event or is damaged."""
    locks = (run.lock_file, run.path / BEST_OPTIONS.parent / run.lock_file.name)
    if any(map(is_lock, locks)) or any(map(has_manifest, run.checkpoints())):
        return True
    return is_journal(run.journal_file) and run.journal_file.stat().st_size > 0


def is_foreign(run: RunDir, path: Path) -> bool:
    """Return whether something that a run did not write has one of its names."""
    if path == run.model or _CHECKPOINT.fullmatch(path.name):
        return not has_manifest(path)
    if path == run.journal_file:
        return not is_journal(path)
    return path in (run.lock_file, *run.files) and kind_of(path) != "a file"


def _is_leftover_of_start(run: RunDir, path: Path) -> bool:
    """Leftovers of a start that was killed before its first file, and files of operating systems."""
    return kind_of(path) == "a file" and (path == run.lock_file or path.name in SYSTEM_FILES or is_leftover(path.name))


def _require_apart(output: Path, inputs: Mapping[str, str | None]) -> None:
    """Check that the output folder is not, does not contain and is not inside a folder that the run reads."""
    here = output.resolve()
    for name, text in inputs.items():
        if text is None or not Path(text).exists():
            continue
        read = Path(text).resolve()
        if here == read or here in read.parents or (read.is_dir() and read in here.parents):
            how = "is" if here == read else "contains" if here in read.parents else "is inside"
            raise ResourceError(f"{how} the path of --{name} ({read})", where=str(output), fix=_ELSEWHERE)


COUNTS = {str: int}
SUMMARY: dict[str, Any] = {
    "task": str,
    "labels": [str],
    "columns": {str: Any},
    "rows": COUNTS,
    "label_counts": {str: COUNTS},
    "truncation": {str: {"rows": int, "rows_cut": int, "tokens_cut": int, "max_length": int}},
    "notes": [str],
    "findings": [{str: Any}],
    "recipe": [str],
    "baselines": {str: {str: {str: Any}}},
    "best_constant": {"metrics": {str: Any}},
}
ENVIRONMENT: dict[str, Any] = {"run_id": str, "folder": str, "command": [str], "packages": {str: Any}}
_WORDS = {str: "a text", int: "a non-negative integer", list: "a list", dict: "an object"}


def read_summary(file: Path) -> dict[str, Any]:
    """Load data_summary.json; {} if it is missing."""
    return _read(file, SUMMARY)


def read_environment(file: Path) -> dict[str, Any]:
    """Load environment.json; {} if it is missing."""
    return _read(file, ENVIRONMENT)


def read_metrics(file: Path) -> dict[str, Any]:
    """Load metrics.json, ours or that of another tool; {} if it is missing."""
    return _read(file, {})


def _read(file: Path, shapes: dict[str, Any]) -> dict[str, Any]:
    try:
        data = read_json(file, follow=True)
    except FileNotFoundError:
        return {}
    except BadFile as error:
        raise _damage(file, str(error)) from None
    if not isinstance(data, dict):
        raise _damage(file, "is not a JSON object")
    _check(file, "", data, shapes)
    return data


def _check(file: Path, name: str, value: Any, shape: Any) -> None:
    """`shape`: a type, a list of one shape, a dict of `str` to the shape of every value, or of names to shapes."""
    if shape is Any:
        return
    kind: Any = shape if isinstance(shape, type) else type(shape)
    good = isinstance(value, kind) and not isinstance(value, bool) and not (kind is int and value < 0)
    if not good:
        raise _damage(file, f"{name} is {str(value)[:40]!r}, not {_WORDS[kind]}")
    if isinstance(shape, list):
        for one in value:
            _check(file, name, one, shape[0])
    elif isinstance(shape, dict):
        for key, one in value.items():
            known = shape.get(str, shape.get(key, Any))
            if one is not None or str in shape:
                _check(file, f"{name}.{key[:40]}".removeprefix("."), one, known)


def _damage(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(problem, where=str(file), fix="Restore it from a copy, or delete it.")


# The environment of this process


PACKAGES = "tunesmith torch transformers accelerate datasets tokenizers safetensors numpy pyarrow"


def package_versions() -> dict[str, str | None]:
    """Return the installed versions of the packages that a result depends on; None for a missing one."""
    return {name: version_of(name) for name in PACKAGES.split()}


@cache
def version_of(name: str) -> str | None:
    """Return a version, cached: a package's metadata is a file of up to 50 kB."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_environment() -> dict[str, Any]:
    """Describe the environment of this process, ready for JSON."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": package_versions(),
        "command": [os.path.basename(sys.argv[0]), *sys.argv[1:]],
        "folder": os.getcwd(),
    }


@dataclass(frozen=True)
class Launch:
    """This process is rank `rank` of `world`."""

    rank: int
    world: int


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Return the rank and number of ranks; 0 of 1 without a launcher. Contradictory variables are a ConfigError."""
    given = os.environ if environ is None else environ
    fix = "Start it with torchrun or accelerate launch, which set these variables, or unset RANK, LOCAL_RANK and WORLD_SIZE."
    numbers = {}
    for name, default in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        text = given.get(name) or default
        if not text.isdecimal() or len(text) > 9:
            raise ConfigError(f"the variable {name} is {text[:60]!r}, not a number", fix=fix)
        numbers[name] = int(text)
    rank, world = numbers["RANK"], numbers["WORLD_SIZE"]
    if rank >= world:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {given.get('WORLD_SIZE', 'not set')}", fix=fix)
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not given.get(name)]
    if world > 1 and missing:
        raise ConfigError(f"WORLD_SIZE is {world}, but {', '.join(missing)} is not set", fix=fix)
    return Launch(rank, world)
