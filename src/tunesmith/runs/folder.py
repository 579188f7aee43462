"""The paths of a run folder, whether a run may write there, and its JSON files. All file names are defined here.

A JSON file may be missing; if it exists, the types of all known values are checked. A lock lets one process write; the
kernel releases it when that process ends, so it is never stale.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tunesmith.errors import CheckpointError, ConfigError, ResourceError, TunesmithError, did_you_mean
from tunesmith.events import Event, RunEnded
from tunesmith.files import (
    SYSTEM_FILES,
    BadFile,
    disk_error,
    in_the_way,
    kind_of,
    known_hash,
    open_in_place,
    parse_json,
    read_json,
)
from tunesmith.runs.event_log import is_journal, read_journal
from tunesmith.runs.manifest import RESULTS, has_manifest, is_leftover, read_manifest

log = logging.getLogger(__name__)

READERS_SECONDS = 5.0
"""How long a starting run waits for readers that only test whether the folder is in use."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The owner of a lock, as stored in the lock file."""

    pid: int
    host: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


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
        """The descriptor of the locked file, which is still the file at this path after the lock was taken."""
        while True:
            descriptor = open_in_place(self.file)
            _require_own(descriptor, self.file)
            try:
                _lock_alone(descriptor)
            except BlockingIOError:
                holder = noted_holder(descriptor)
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
    descriptor = open_lock(file)
    if descriptor is None:
        return False
    holder = noted_holder(descriptor)
    os.close(descriptor)
    return holder is not None


def open_lock(file: Path) -> int | None:
    """Open a lock file for a test; None if there is none."""
    try:
        return os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None


def read_holder(file: Path) -> str | None:
    """Describe the process that has the lock of a run; None if it is free."""
    descriptor = open_lock(file)
    if descriptor is None:
        return None
    holder = str(noted_holder(descriptor) or "another process") if is_held(descriptor) else None
    os.close(descriptor)
    return holder


def is_held(descriptor: int) -> bool:
    """Return whether a process has the exclusive lock: take a shared lock and release it immediately."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def noted_holder(descriptor: int) -> Holder | None:
    """Return the process in a lock file, whether or not it still has the lock."""
    try:
        data = parse_json(os.pread(descriptor, 4096, 0))
        return Holder(int(data["pid"]), str(data["host"]))
    except (ValueError, KeyError, TypeError, OSError):
        return None


def _close_in_child() -> None:
    """A forked child shares its parent's lock: without this, a worker that outlives a killed run would block the next."""
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
        self.best = self.path / "best"
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
        """Files that are written in one piece: all but the event log and the lock."""
        return (*self.remade_files, *self.result_files)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders next to the checkpoints."""
        return (self.best, self.model)

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
    """The run folder of a trial."""
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
        raise ConfigError("is a file, not a run folder", where=str(path), fix="Give the output_dir of a run.")
    inside = sorted(p.parent.name for p in run.path.glob("*/journal.jsonl"))
    fix = f"Did you mean one of its runs: {', '.join(inside[:5])}?" if inside else "Give the output_dir of a run."
    raise ConfigError("contains no journal.jsonl, so it is not a run folder", where=str(path), fix=fix)


def require_own_folder(run: RunDir, inputs: Mapping[str, str | None], *, cache: str | None = None) -> None:
    """Raise a ResourceError that names what is in the way. `inputs` are the options that name files to read.

    The cache may be in the run folder, where a failed start may have left it.
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
    if any(map(is_lock, locks)) or any(has_manifest(folder) for folder in (*run.checkpoints(), run.best)):
        return True
    return is_journal(run.journal_file) and run.journal_file.stat().st_size > 0


def is_foreign(run: RunDir, path: Path) -> bool:
    """Return whether something that a run did not write has one of its names."""
    if path in run.folders or _CHECKPOINT.fullmatch(path.name):
        return not has_manifest(path)
    if path == run.journal_file:
        return not is_journal(path)
    return path in (run.lock_file, *run.files) and kind_of(path) != "a file"


def _is_debris(run: RunDir, path: Path) -> bool:
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
            raise ResourceError(f"{how} what --{name} reads ({read})", where=str(output), fix=_ELSEWHERE)


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
    "floors": {str: {str: {str: Any}}},
    "best_constant": {"metrics": {str: Any}},
}
ENVIRONMENT: dict[str, Any] = {"run_id": str, "folder": str, "command": [str], "packages": {str: Any}}
_WORDS = {str: "a text", int: "a whole number from 0", list: "a list", dict: "an object"}


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
_FIX = (
    "Start it with torchrun or accelerate launch, which set these variables, or unset RANK, LOCAL_RANK and WORLD_SIZE."
)


def package_versions() -> dict[str, str | None]:
    """Return the installed versions of the packages that a result depends on; None for a missing one."""
    return {name: _version_of(name) for name in PACKAGES.split()}


@cache
def _version_of(name: str) -> str | None:
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
        "commit": current_commit(),
    }


def current_commit(folder: Path | None = None) -> str | None:
    """Return the commit that is checked out; None outside of git. `rev-parse` runs nothing that a repository configures."""
    words = ["git", "-C", str(folder or Path.cwd()), "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=5, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


@dataclass(frozen=True)
class Launch:
    """This process is rank `rank` of `world`."""

    rank: int
    world: int


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Rank and number of ranks; 0 of 1 without a launcher. Contradictory variables are a ConfigError."""
    given = os.environ if environ is None else environ
    world = _number(given, "WORLD_SIZE", 1, low=1)
    rank = _number(given, "RANK", 0)
    _number(given, "LOCAL_RANK", 0)
    _number(given, "MASTER_PORT", 0, high=65535)
    if rank >= world:
        raise ConfigError(f"RANK is {rank} and WORLD_SIZE {given.get('WORLD_SIZE', 'not set')}", fix=_FIX)
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not given.get(name)]
    if world > 1 and missing:
        raise ConfigError(f"WORLD_SIZE is {world}, but {', '.join(missing)} is not set", fix=_FIX)
    return Launch(rank, world)


def _number(given: Mapping[str, str], name: str, default: int, *, low: int = 0, high: int = 1_000_000) -> int:
    text = given.get(name, "").strip()
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        raise ConfigError(f"the variable {name} is {text[:60]!r}, not a number from {low}", fix=_FIX)
    return int(text)
