"""Every path of a run, whether a run may write there, and its JSON files: no other file spells a file name of the run folder.

A JSON file may be absent; where it is there, every known value has its type."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunesmith.errors import CheckpointError, ConfigError, ResourceError, did_you_mean
from tunesmith.files import BadFile, read_json
from tunesmith.runs.event_log import is_journal
from tunesmith.runs.lock import is_lock
from tunesmith.runs.manifest import RESULTS, is_leftover, is_sealed, read_manifest
from tunesmith.runs.writing import disk_error, kind_of, known_hash

SEARCH_RESULT = "search.json"
BEST_RESULT = "best.json"
BEST_OPTIONS = Path("tries") / "run.yaml"
"""The options that a run of `--recipe best` was started with: run.yaml has those of its last model."""
_ELSEWHERE = "Give a new or empty folder as --output_dir."
_CHECKPOINT = re.compile(r"checkpoint-\d+")


class RunDir:
    """The paths of one run folder. Nothing is created or read until a method is called for it."""

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
        """Files that a run writes at its end, once."""
        return (self.metrics_file, self.predictions_file, self.card_file)

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that is written whole: all but the journal and the lock."""
        return (*self.remade_files, *self.result_files)

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders next to the checkpoints."""
        return (self.best, self.model)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def name(self) -> str:
        """The folder's own name: what a picture or a list of runs calls this run."""
        return self.path.resolve().name

    def checkpoint(self, step: int) -> Path:
        """The published checkpoint folder of a step, spelled as transformers spells it."""
        return self.path / f"checkpoint-{step}"

    def checkpoints(self) -> list[Path]:
        """The published checkpoint folders, oldest step first. Sorted by number, never by name or time."""
        if not self.path.is_dir():
            return []
        found = [p for p in self.path.iterdir() if _CHECKPOINT.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]
        return sorted(found, key=checkpoint_step)


def checkpoint_step(path: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(path.name.removeprefix("checkpoint-"))


def trial_folder(search: Path, number: int) -> Path:
    """The run folder of a trial."""
    return search / f"trial-{number}"


def best_trial_of(path: str | Path) -> Path:
    """The best trial of a search folder; any other folder as it is."""
    folder = Path(path)
    try:
        found = read_json(folder / SEARCH_RESULT)
    except (FileNotFoundError, BadFile):
        return folder
    best = found.get("best") if isinstance(found, dict) else None
    return trial_folder(folder, best) if type(best) is int else folder


def open_run(path: str | Path) -> RunDir:
    """The run folder at `path`, which must hold a journal, or the best trial of a search; a ConfigError says what was found
    instead."""
    run = RunDir(best_trial_of(path))
    if os.path.lexists(run.journal_file):  # what it is, the reader says
        return run
    if not run.path.exists():
        parent = run.path.parent
        siblings = [p.parent.name for p in parent.glob("*/journal.jsonl")] if parent.is_dir() else []
        raise ConfigError("there is no such run folder", where=str(path), fix=did_you_mean(run.path.name, siblings))
    if run.path.is_file():
        raise ConfigError("is a file, not a run folder", where=str(path), fix="Give the output_dir of a run.")
    inside = sorted(p.parent.name for p in run.path.glob("*/journal.jsonl"))
    fix = f"Did you mean one of its runs: {', '.join(inside[:5])}?" if inside else "Give the output_dir of a run."
    raise ConfigError("holds no journal.jsonl, so it is not a run folder", where=str(path), fix=fix)


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
    """A ResourceError when a requested output would replace a file of a run."""
    run = RunDir(file.parent)
    if is_run(run) and file.name in {p.name for p in (*run.files, run.journal_file)}:
        raise ResourceError("is a file of a run", where=str(file), fix="Give another name.")


def is_run(run: RunDir) -> bool:
    """Return whether tunesmith started a run here, even if it was killed before its first event or is damaged."""
    locks = (run.lock_file, run.path / BEST_OPTIONS.parent / run.lock_file.name)
    if any(map(is_lock, locks)) or any(is_sealed(folder) for folder in (*run.checkpoints(), run.best)):
        return True
    return is_journal(run.journal_file) and run.journal_file.stat().st_size > 0


def is_foreign(run: RunDir, path: Path) -> bool:
    """Return whether something that a run did not write has one of its names."""
    if path in run.folders or _CHECKPOINT.fullmatch(path.name):
        return not is_sealed(path)
    if path == run.journal_file:
        return not is_journal(path)
    return path in (run.lock_file, *run.files) and kind_of(path) != "a file"


def _is_debris(run: RunDir, path: Path) -> bool:
    """What a start leaves that was killed before its first file."""
    return kind_of(path) == "a file" and (path == run.lock_file or is_leftover(path.name))


def _require_apart(output: Path, inputs: Mapping[str, str | None]) -> None:
    """The output folder neither is, contains, nor is in a folder that the run reads."""
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
    """data_summary.json; empty when it is absent."""
    return _read(file, SUMMARY)


def read_environment(file: Path) -> dict[str, Any]:
    """environment.json; empty when it is absent."""
    return _read(file, ENVIRONMENT)


def read_metrics(file: Path) -> dict[str, Any]:
    """metrics.json, ours or one of another tool; empty when it is absent."""
    return _read(file, {})


def _read(file: Path, shapes: dict[str, Any]) -> dict[str, Any]:
    try:
        data = read_json(file, follow=True)
    except FileNotFoundError:
        return {}
    except BadFile as error:
        raise _damage(file, str(error)) from None
    if not isinstance(data, dict):
        raise _damage(file, "does not hold an object")
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
