"""The state of a run folder: what is sound, what is not, and what to do. Repairs only by removing what nothing can use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from tunesmith.errors import CheckpointError, ResourceError, TunesmithError
from tunesmith.events import StepDone
from tunesmith.files import BadFile, disk_error, read_json
from tunesmith.runs.event_log import drop_cut_line, parse_events, read_bytes
from tunesmith.runs.folder import RunDir, checkpoint_step, end_of, verify_results
from tunesmith.runs.lock import RunLock, read_holder
from tunesmith.runs.manifest import is_leftover, retire, sweep, verify

Health = Literal["sound", "note", "useless", "broken"]
"""sound; worth a note; of no use (a repair removes it); damaged, and a person must decide what to do."""


@dataclass(frozen=True)
class Examined:
    """One part of a run folder and its condition."""

    name: str
    health: Health
    text: str


def examine(run: RunDir) -> list[Examined]:
    """Every part of the folder, read and hashed in full; changes nothing."""
    holder = read_holder(run.lock_file)
    held = f"held by {holder}: the run is being trained, so what it writes now may look unfinished"
    parts = [Examined("lock", "sound", "free") if holder is None else Examined("lock", "note", held)]
    parts.append(_check_json(run.environment_file))
    parts += _check_journal(run)
    intact = list(_check_checkpoints(run, parts))
    for folder in (run.best, run.model):
        if folder.exists():
            problem = _problem_of(folder)
            health: Health = "sound" if problem is None else "broken"
            parts.append(Examined(folder.name, health, problem or "every file is as it was written"))
    try:
        verify_results(run)
    except (CheckpointError, ResourceError) as error:
        parts.append(Examined("results", "broken", error.line()))
    for path in sorted(run.path.iterdir()):
        if is_leftover(path.name):
            home = path.name.removeprefix(".tmp-old-").rsplit("-", 1)[0]
            if path.name.startswith(".tmp-old-") and not (run.path / home).exists():
                parts.append(Examined(path.name, "note", "was moved aside and comes back with the next start"))
            else:
                parts.append(Examined(path.name, "useless", "left behind by a killed process"))
    parts.append(_conclude(run, intact))
    return parts


def is_sound(parts: list[Examined]) -> bool:
    """Whether nothing is damaged."""
    return not any(part.health == "broken" for part in parts)


def repair(run: RunDir) -> list[str]:
    """Removes leftovers, the cut end of the journal, and damaged checkpoints where an intact one is kept. Gives the names."""
    with RunLock(run.lock_file):
        try:
            removed = sweep(run.path)
            if drop_cut_line(run.journal_file):
                removed.append(f"the incomplete last line of {run.journal_file.name}")
            for part in examine(run):
                if part.health == "useless" and (run.path / part.name) in run.checkpoints():
                    retire(run.path / part.name)
                    removed.append(part.name)
        except OSError as error:
            raise disk_error(error, run.path) from error
    return removed


def _problem_of(folder: Path) -> str | None:
    """Why a sealed folder cannot be used; None when it can."""
    try:
        verify(folder)
    except (CheckpointError, ResourceError) as error:
        return error.line()
    return None


def _check_json(file: Path) -> Examined:
    try:
        is_object = isinstance(read_json(file, follow=True), dict)
    except FileNotFoundError:
        return Examined(file.name, "note", "is not there; the next start writes it")
    except BadFile as error:
        return Examined(file.name, "note", f"{error}; the next start writes it again")
    if not is_object:
        return Examined(file.name, "note", "is not a JSON object; the next start writes it again")
    return Examined(file.name, "sound", "reads well")


def _check_journal(run: RunDir) -> Iterator[Examined]:
    name = run.journal_file.name
    try:
        data = read_bytes(run.journal_file)
        events = list(parse_events(data, run.journal_file))
    except FileNotFoundError:
        yield Examined(name, "broken", "is not there: the curves of this run are lost")
        return
    except (OSError, TunesmithError) as error:
        yield Examined(name, "broken", str(error))
        return
    if data and not data.endswith(b"\n"):
        yield Examined(name, "note", "its last line is incomplete; the next start removes it")
    steps = [event.step for event in events if isinstance(event, StepDone)]
    seen = set(steps)
    absent = (step for step in range(1, max(steps, default=0) + 1) if step not in seen)
    missing = list(islice(absent, 6))  # a journal may name any step: all that are absent may not fit into memory
    if missing:
        shown = ", ".join(str(s) for s in missing[:5]) + (", ..." if len(missing) > 5 else "")
        yield Examined(name, "broken", f"has no line for step {shown}: the curves have a gap there")
    elif len(steps) != len(seen) or steps != sorted(steps):
        yield Examined(name, "broken", "contains steps twice or out of order")
    else:
        yield Examined(name, "sound", f"{len(events)} events, {len(steps)} steps")


def _check_checkpoints(run: RunDir, parts: list[Examined]) -> Iterator[Path]:
    """Adds a part for each checkpoint; gives the intact ones."""
    problems = {folder: _problem_of(folder) for folder in run.checkpoints()}
    any_intact = any(problem is None for problem in problems.values())
    for folder, problem in problems.items():
        if problem is None:
            size = sum(f.stat().st_size for f in folder.iterdir() if f.is_file())
            parts.append(Examined(folder.name, "sound", f"every file is as it was written ({size / 1e6:.1f} MB)"))
            yield folder
        elif any_intact:
            parts.append(Examined(folder.name, "useless", f"{problem}; another checkpoint is intact"))
        else:
            parts.append(Examined(folder.name, "broken", problem))


def _conclude(run: RunDir, intact: list[Path]) -> Examined:
    end = end_of(run)
    if end is not None:
        return Examined("run", "sound", f"finished after step {end.step} ({end.reason})")
    if intact:
        step = max(checkpoint_step(folder) for folder in intact)
        return Examined("run", "sound", f"can be resumed after step {step}: tunesmith resume {run.path}")
    if run.checkpoints():
        return Examined(
            "run", "broken", "no checkpoint is intact: restore the files from a copy, or train again elsewhere"
        )
    return Examined("run", "note", "has no checkpoint: the same command starts it from the beginning")
