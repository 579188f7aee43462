"""The runs below one folder, by id: a request never becomes a path, it is looked up in the list of what was found. And whether a
run is being trained, by whom, and asking it to stop: the lock of the run folder is the truth, not the pid in it.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import CheckpointError, ResourceError
from tunesmith.files import BadFile, is_plain, open_plain, parse_json
from tunesmith.inference.verdicts import Verdict, Verdicts
from tunesmith.report.predictions import scores_in_file
from tunesmith.runs.event_log import Peek, peek_journal
from tunesmith.runs.folder import RunDir, read_metrics
from tunesmith.runs.lock import Holder, is_held, noted_holder, open_lock


def is_running(run: RunDir) -> bool:
    """Whether a living process holds the run folder."""
    handle = open_lock(run.lock_file)
    if handle is None:
        return False
    try:
        holder = noted_holder(handle)
        if holder is not None and holder.host == socket.gethostname():
            if not Path(f"/proc/{holder.pid}").exists() and Path("/proc/self").exists():
                return False
            if _listed(handle, holder.pid):  # answers without touching the lock
                return True
        return is_held(handle)
    finally:
        os.close(handle)


def stop_run(run: RunDir) -> Holder:
    """Sends SIGTERM to the process that trains this run: it saves at the next safe point and ends with 143."""
    fix = "Stop it where it was started."
    handle = open_lock(run.lock_file)
    if handle is None:
        raise ResourceError("the run is not being trained", where=run.name)
    try:
        holder = noted_holder(handle)
        if not is_held(handle):
            raise ResourceError("the run is not being trained", where=run.name)
        if holder is None or holder.host != socket.gethostname():
            where = f"on {holder.host}" if holder is not None else "by an unknown process"
            raise ResourceError(f"the run is being trained {where}, not on this machine", where=run.name, fix=fix)
        _terminate(handle, holder, run)
    finally:
        os.close(handle)
    return holder


def _terminate(handle: int, holder: Holder, run: RunDir) -> None:
    """Sends the signal through a pidfd: if the process ends first, no other process with its number is reached."""
    if holder.pid <= 1 or holder.pid == os.getpid():
        raise ResourceError(f"process {holder.pid} is not one to stop", where=run.name)
    try:
        process = os.pidfd_open(holder.pid)
    except OSError:
        raise ResourceError("the run is not being trained", where=run.name) from None
    try:
        if Path("/proc/locks").exists() and not _listed(handle, holder.pid):
            raise ResourceError(f"process {holder.pid} is named in the lock file but does not hold it", where=run.name)
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except PermissionError:
        raise ResourceError(f"process {holder.pid} belongs to another user", where=run.name) from None
    except ProcessLookupError:
        raise ResourceError("the run is not being trained", where=run.name) from None
    finally:
        os.close(process)


def _listed(handle: int, pid: int) -> bool:
    """Whether the kernel lists the process as holding a lock on this very file."""
    inode = os.fstat(handle).st_ino
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return False
    fields = (line.split() for line in lines if " FLOCK " in line)
    return any(len(f) >= 6 and f[4] == str(pid) and f[5].rpartition(":")[2] == str(inode) for f in fields)


RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")
FRESH_SECONDS = 60
"""A journal without a lock and without an end that grew within this time belongs to a running tool that takes no lock."""
ScoreCell = tuple[str, float, float | None, float | None]
"""Name, value, low and high end of the 95% interval."""
_OPTION = re.compile(r"^(model_name_or_path|run_name): (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class RunRow:
    """One line of the list of runs."""

    id: str
    name: str
    model: str
    status: str
    peek: Peek
    score: ScoreCell | None
    updated: float
    problem: str | None = None
    """The damage of the run folder, if any; the other values could still be read."""
    verdict: Verdict | None = None
    """Kind and title of the first finding; None if there is none or the run was not diagnosed yet."""

    def to_json(self) -> dict[str, Any]:
        """What the page's script needs."""
        peek = self.peek
        return {
            "id": self.id,
            "name": self.name,
            "model": self.model,
            "status": self.status,
            "step": peek.step,
            "num_steps": peek.num_steps,
            "loss": peek.loss,
            "score": self.score,
            "spark": spark_points(peek.spark),
            "updated": self.updated,
            "problem": self.problem,
            "verdict": self.verdict,
        }


class RunIndex:
    """Looks for runs on every call, so that new runs appear and removed ones disappear."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).resolve()
        self._known: dict[tuple[Any, ...], Glance] = {}
        self._verdicts = Verdicts()
        self._lock = threading.Lock()

    def find_all(self) -> dict[str, RunDir]:
        """Id -> run folder: direct subfolders with a journal, whatever it is, or the root itself when it is a run."""
        root = RunDir(self.root)
        found = {run_id(self.root.name): root} if os.path.lexists(root.journal_file) else {}
        try:
            with os.scandir(self.root) as listing:
                entries = list(listing)
        except OSError:
            return found
        for entry in entries:
            if entry.name.startswith(".") or not entry.is_dir(follow_symlinks=False):
                continue
            run = RunDir(entry.path)
            if os.path.lexists(run.journal_file):
                found[run_id(entry.name)] = run
        return found

    def find(self, wanted: str) -> RunDir | None:
        """The run with this id; None when there is none, or when it leads out of its folder through a link."""
        if not RUN_ID.fullmatch(wanted) or set(wanted) == {"."}:
            return None
        run = self.find_all().get(wanted)
        return run if run is not None and has_no_links(run) else None

    def rows(self, *, seconds: float = 0.0) -> list[RunRow]:
        """All runs, the newest first. Only journals that changed since the last call are read.

        Verdicts are those known already; further runs are diagnosed for about `seconds`.
        """
        until = time.monotonic() + seconds
        with self._lock:
            found = [row for key, run in self.find_all().items() if (row := self._row(key, run, until)) is not None]
        return sorted(found, key=lambda row: (row.status != "running", -row.updated))

    def _row(self, key: str, run: RunDir, until: float) -> RunRow | None:
        try:
            info = os.lstat(run.journal_file)
        except OSError:
            return None
        scored = os.lstat(run.metrics_file).st_mtime_ns if is_plain(run.metrics_file) else 0
        mark = (key, info.st_ino, info.st_size, info.st_mtime_ns, scored)
        if mark not in self._known:
            self._known = {k: v for k, v in self._known.items() if k[0] != key}
            self._known[mark] = _glance(run)
        seen = self._known[mark]
        status = "damaged" if seen.problem else status_of(run, seen.peek.ended, info.st_mtime)
        verdict = None
        if not seen.problem and has_no_links(run):
            verdict = self._verdicts.find(key, run, (mark, status), until=until)
        return RunRow(key, seen.name, seen.model, status, seen.peek, seen.score, info.st_mtime, seen.problem, verdict)


def run_id(name: str) -> str:
    """The name of the folder if it is valid in an address, else a name made from its hash."""
    if RUN_ID.fullmatch(name) and set(name) != {"."}:
        return name
    return "run-" + hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def status_of(run: RunDir, ended: str | None, updated: float) -> str:
    """running, finished, stopped, failed, or interrupted (it ended without a record and can be resumed)."""
    if is_running(run):
        return "running"
    if ended is None:
        fresh = not run.lock_file.exists() and time.time() - updated < FRESH_SECONDS
        return "running" if fresh else "interrupted"
    if ended in ("completed", "early_stopping"):
        return "finished"
    by_signal = ended in ("SIGTERM", "SIGINT", "break") or ended.startswith("signal ")
    return "stopped" if by_signal else "failed"


def has_no_links(run: RunDir) -> bool:
    """Whether the folder and everything read from it are real: a link could show any file of this machine."""
    files = [run.path, run.journal_file, run.config_file, run.environment_file, run.data_summary_file]
    files += [run.metrics_file, run.predictions_file, run.lock_file, run.model]
    if any(os.path.islink(file) for file in files):
        return False
    return not run.model.is_dir() or not any(file.is_symlink() for file in run.model.iterdir())


@dataclass(frozen=True, slots=True)
class Glance:
    """What a row shows of the files of a run."""

    peek: Peek
    name: str
    model: str
    score: ScoreCell | None
    problem: str | None


def _glance(run: RunDir) -> Glance:
    peek = peek_journal(run.journal_file)
    score: ScoreCell | None = (
        (f"validation {peek.score[0]}", peek.score[1], None, None) if peek.score is not None else None
    )
    problem = peek.problem
    try:
        if os.path.islink(run.metrics_file):  # a link could show any file of this machine
            raise CheckpointError("is a link, not a file")
        score = _first_score(read_metrics(run.metrics_file)) or score
    except CheckpointError as error:
        problem = problem or f"{run.metrics_file.name} {error.problem}"
    return Glance(peek, *_names(run), score, problem)


def _names(run: RunDir) -> tuple[str, str]:
    """Run name and model by a glance at run.yaml: parsing 200 of them takes seconds. A value is one line of JSON."""
    found: dict[str, str] = {}
    try:
        with open_plain(run.config_file) as file:
            text = file.read(100_000).decode("utf-8", "replace")
    except (OSError, BadFile):
        text = ""
    for name, value in _OPTION.findall(text):
        try:
            read = parse_json(value)
        except BadFile:
            read = value
        found[name] = str(read)[:200] if read is not None and read != "null" else ""
    return found.get("run_name") or run.name, Path(found.get("model_name_or_path") or "").name


def _first_score(metrics: dict[str, Any]) -> ScoreCell | None:
    """The first score of the test or validation rows with its interval."""
    for split in ("test", "validation"):
        found = scores_in_file({split: metrics[split]}) if isinstance(metrics.get(split), dict) else []
        best = next((score for score in found if score.name != "loss"), None)
        if best is not None:
            return f"{split} {best.name}", best.value, best.low, best.high
    return None


def spark_points(losses: tuple[float, ...]) -> str:
    """Points of an SVG polyline in a box of 100 by 24."""
    if len(losses) < 2:
        return ""
    low, high = min(losses), max(losses)
    span = (high - low) or 1.0
    width = len(losses) - 1
    return " ".join(f"{100 * k / width:.1f},{22 - 20 * (v - low) / span:.1f}" for k, v in enumerate(losses))
