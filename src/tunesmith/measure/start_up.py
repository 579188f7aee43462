"""Whole commands from Enter to prompt, ours and a script with transformers: where their seconds are spent."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.config.schema import RunConfig, to_dict
from tunesmith.errors import WorkerError
from tunesmith.measure.contest import last_words
from tunesmith.measure.table import aligned
from tunesmith.runs.writing import create

COMMANDS = {
    "train": "tunesmith train",
    "script": "script with transformers",
    "script_bf16": "script with transformers, bf16",
    "predict": "tunesmith predict --text",
    "import": "import torch, transformers",
}
PHASES = (
    *("options", "data", "libraries", "device", "tokens", "model", "recipe", "first step", "training"),
    *("scores", "model folder", "curves and report", "end"),
)
"""In reading order; a script may have another order and not all of them."""
TRAINING = ("first step", "training")


@dataclass(frozen=True)
class Took:
    """Seconds of the clock and of the processors (threads and child processes too)."""

    clock: float
    processor: float


Phases = dict[str, Took]


@dataclass
class Timed:
    """All rounds of one command. A first one that fills caches is not among the medians."""

    kind: str
    rounds: list[Phases]
    fills: bool = True
    """Whether the first round fills the caches."""

    @property
    def counted(self) -> list[Phases]:
        """The rounds that medians are of."""
        return self.rounds[1:] if self.fills and len(self.rounds) > 1 else self.rounds

    def median(self, phase: str) -> Took | None:
        """Of one phase; None when the command has no such phase."""
        found = [one[phase] for one in self.counted if phase in one]
        if not found:
            return None
        return Took(statistics.median(t.clock for t in found), statistics.median(t.processor for t in found))

    def total(self, *, without: Sequence[str] = ()) -> Took:
        """From process start to exit: the median over rounds."""
        sums = []
        for one in self.counted:
            kept = [took for phase, took in one.items() if phase not in without]
            sums.append(Took(sum(t.clock for t in kept), sum(t.processor for t in kept)))
        return Took(statistics.median(t.clock for t in sums), statistics.median(t.processor for t in sums))

    @property
    def first(self) -> float:
        """Seconds of the first round."""
        return sum(took.clock for took in self.rounds[0].values())


def run_timed(words: Callable[[int], Sequence[str]], log: Path) -> Phases:
    """Runs a command that is given the number of a pipe for its milestones; the time after the last one is `end`.

    Its modules are compiled once, as pip compiles what it installs, also where PYTHONDONTWRITEBYTECODE is set.
    """
    around = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    read, write = os.pipe()
    began = time.time()
    with create(log) as out:
        process = subprocess.Popen(list(words(write)), stdout=out, stderr=out, env=around, pass_fds=(write,))
        os.close(write)
        with open(read, encoding="utf-8") as pipe:
            marks = [json.loads(line) for line in pipe]
        _, status, used = os.wait4(process.pid, 0)
    ended = time.time()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        lines = log.read_text(errors="replace").strip().splitlines()
        raise WorkerError(f"{words(0)[2]} ended with {process.returncode}: {last_words(lines)[:300]}", where=str(log))
    marks.append({"name": "end", "clock": ended, "processor": used.ru_utime + used.ru_stime})
    phases: Phases = {}
    clock, processor = began, 0.0
    for mark in marks:
        phases[mark["name"]] = Took(mark["clock"] - clock, mark["processor"] - processor)
        clock, processor = mark["clock"], mark["processor"]
    return phases


def time_commands(
    config: RunConfig,
    columns: tuple[tuple[str, ...], str],
    *,
    kinds: Sequence[str],
    rounds: int,
    folder: Path,
    say: Any,
    after: Callable[[list[Timed]], None] = lambda timed: None,
    filled_by: int | None = None,
    script_rounds: int | None = None,
) -> list[Timed]:
    """One round more than asked for, as the first of each command fills its caches; not when a run of so many steps does.

    `after` is called after each command with what is there until then. `script_rounds`: fewer of the scripts, which take longest.
    """
    warm = filled_by is not None
    if filled_by is not None:
        _fill(replace(config, max_steps=filled_by), columns, kinds, folder)
    found = {kind: Timed(kind, [], fills=not warm) for kind in kinds}
    for number in range(rounds if warm else rounds + 1):
        for kind in kinds:
            if script_rounds is not None and kind.startswith("script") and number >= script_rounds + (not warm):
                continue
            name = f"{kind}-{number}"
            phases = run_timed(_words(kind, config, columns, folder, name), folder / f"{name}.log")
            found[kind].rounds.append(phases)
            total = sum(took.clock for took in phases.values())
            say(f"{COMMANDS[kind]}{', fills caches' if number == 0 and not warm else ''}: {total:.1f} s")
            after([one for one in found.values() if one.rounds])
    return list(found.values())


def _fill(config: RunConfig, columns: tuple[tuple[str, ...], str], kinds: Sequence[str], folder: Path) -> None:
    """A short run of each command that trains, all at the same time: they are not timed."""
    trains = [kind for kind in kinds if kind not in ("predict", "import")]
    with ThreadPoolExecutor(max(1, len(trains))) as pool:
        jobs = [_words(kind, config, columns, folder, f"{kind}-filling") for kind in trains]
        logs = [folder / f"{kind}-filling.log" for kind in trains]
        list(pool.map(run_timed, jobs, logs))


def _words(
    kind: str, config: RunConfig, columns: tuple[tuple[str, ...], str], folder: Path, name: str
) -> Callable[[int], Sequence[str]]:
    python = [sys.executable, "-P"]
    run = folder / "train-0"
    if kind == "train":
        options = {k: v for k, v in to_dict(config).items() if v is not None} | {"output_dir": str(folder / name)}
        file = folder / f"{name}.json"
        with create(file) as out:
            out.write(json.dumps(options).encode())
        return lambda pipe: [*python, "-m", "tunesmith.cli.timed_command", str(pipe), "train", str(file)]
    if kind == "predict":
        texts = ["It rained all day.", *["The sun did not come out."] * (len(columns[0]) - 1)]
        timed = [*python, "-m", "tunesmith.cli.timed_command"]
        return lambda pipe: [*timed, str(pipe), "predict", str(run), "--text", *texts]
    if kind == "import":
        return lambda pipe: [*python, "-c", "import torch, transformers"]
    given = json.dumps(_script_options(config, columns, folder, name, half=kind == "script_bf16"))
    return lambda pipe: [*python, "-m", "tunesmith.measure.glue_script", str(pipe), given]


def _script_options(
    config: RunConfig, columns: tuple[tuple[str, ...], str], folder: Path, name: str, *, half: bool
) -> dict[str, Any]:
    same = ("num_train_epochs", "max_steps", "per_device_train_batch_size", "learning_rate", "use_cpu")
    from tunesmith.models.files import resolve_model

    model = resolve_model(config.model_name_or_path, cache_dir=config.cache_dir, allow_download=config.allow_download)
    arguments = {option: getattr(config, option) for option in same if getattr(config, option) is not None}
    return {
        "train_file": config.train_file,
        "validation_file": config.validation_file,
        "text_columns": list(columns[0]),
        "label_column": columns[1],
        "model": str(model),
        "seed": config.seed,
        "max_length": config.max_seq_length or 512,
        "cache_dir": str(folder / "datasets"),
        "output_dir": str(folder / name),
        "arguments": {**arguments, **({"bf16": True} if half else {})},
    }


def format_phases(timed: Sequence[Timed]) -> str:
    """A table of medians: seconds of the clock, and of the processors in brackets."""
    head = ["seconds (processor seconds)", *(COMMANDS[one.kind] for one in timed)]
    rows = [[phase, *(_cell(one.median(phase)) for one in timed)] for phase in PHASES]
    rows = [row for row in rows if any(row[1:])]
    rows.append(["in all", *(_cell(one.total()) for one in timed)])
    rows.append(["all but training", *(_cell(one.total(without=TRAINING)) for one in timed)])
    if timed[0].fills:
        rows.append(["first time", *(f"{one.first:.2f}" for one in timed)])
    return "\n".join(aligned([head, *rows]))


def _cell(took: Took | None) -> str:
    return "" if took is None else f"{took.clock:.2f} ({took.processor:.2f})"


def phases_to_json(timed: Sequence[Timed], **facts: Any) -> dict[str, Any]:
    """Everything for a file: medians, and every round."""
    found = {}
    for one in timed:
        medians = {phase: vars(took) for phase in PHASES if (took := one.median(phase)) is not None}
        totals: dict[str, Any] = {"in_all": vars(one.total()), "fixed": vars(one.total(without=TRAINING))}
        totals |= {"first": one.first} if one.fills else {}
        rounds = [{phase: vars(took) for phase, took in phases.items()} for phases in one.rounds]
        found[one.kind] = {"name": COMMANDS[one.kind], "phases": medians, **totals, "rounds": rounds}
    return {**facts, "commands": found}
