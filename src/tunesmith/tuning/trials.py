"""Shared by `search` and `best`: the time budget, the score of a trial, and the check that all trials use the same inputs."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from tunesmith.config.load import load_config
from tunesmith.config.options import RunConfig
from tunesmith.errors import CheckpointError, ConfigError, NumericsError, TunesmithError
from tunesmith.files import BadFile, known_hash, read_json, write_file
from tunesmith.metrics.table import greater_is_better
from tunesmith.pipeline.inputs import RunData, load_run_tokenizer
from tunesmith.runs.folder import RunDir, read_metrics

SAVE_SECONDS = 1.0
MODEL_FILES = ("*.safetensors", "*.json", "*.txt", "*.model")
"""Files of a base model that determine what a trial computes: weights, config and tokenizer."""


class TimeUp(KeyboardInterrupt):
    """The time budget is spent. A KeyboardInterrupt, so that code that handles other failures lets it through."""


class TrialPruned(TunesmithError):
    """A trial that was stopped because it is behind the others or would not finish in time."""


class Clock:
    """Measures the time spent on a folder over all processes; `budget` is in seconds, None means no limit.

    The file stores the seconds spent so far. Pauses between two commands don't count, and processes that run at the same time
    count once. Changes of the system time have no effect.
    """

    def __init__(self, file: Path, budget: float | None) -> None:
        self._file, self._budget = file, budget
        self._began = self._saved = time.monotonic()
        self._before = self._stored()
        self.reserve = 0.0
        """Seconds at the end of the budget that are reserved for something else."""

    def _stored(self) -> float:
        if not self._file.is_file():
            return 0.0
        seconds = read_record(self._file).get("seconds")
        if not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            raise damaged(self._file, "does not contain a number of seconds")
        return float(seconds)

    def spent(self) -> float:
        """Return the seconds in which at least one process worked on the folder."""
        return self._before + time.monotonic() - self._began

    def left(self) -> float:
        """Return the seconds until the budget without the reserve is spent; infinite without a budget."""
        return math.inf if self._budget is None else self._budget - self.reserve - self.spent()

    def beat(self, *_: object) -> None:
        """Store the time spent, at most once per second. Raises TimeUp when the budget is spent."""
        now = time.monotonic()
        if self.left() <= 0:
            raise TimeUp
        if now - self._saved > SAVE_SECONDS:
            self._saved = now
            self.save()

    def save(self) -> None:
        """Store the time spent."""
        write_file(self._file, f'{{"seconds": {max(self.spent(), self._stored()):.3f}}}\n'.encode())


def read_record(file: Path) -> dict[str, Any]:
    """Return a JSON object that `search` or `best` wrote; a CheckpointError names a damaged file."""
    try:
        found = read_json(file)
    except BadFile as error:
        raise damaged(file, str(error)) from None
    if not isinstance(found, dict):
        raise damaged(file, "does not contain a JSON object")
    return found


def damaged(file: Path, problem: str) -> CheckpointError:
    """Return the error for a file that cannot be used to continue."""
    return CheckpointError(problem, where=str(file), fix="Restore the file, or use a new --output_dir.")


def inputs_identity(config: RunConfig, data: RunData) -> dict[str, str]:
    """Return what all trials must have in common: the examples of each split, and the files of base model and tokenizer."""
    found = {f"the {split} data": mark for split, mark in data.bundle.split_fingerprints.items()}
    folders = {"the base model": data.folder}
    if config.tokenizer_name is not None:
        folders["the tokenizer"] = Path(load_run_tokenizer(config, data.folder).name_or_path)
    for name, folder in folders.items():
        files = sorted({file for pattern in MODEL_FILES for file in folder.glob(pattern) if file.is_file()})
        found[name] = " ".join(f"{file.name}:{known_hash(file)[:16]}" for file in files)
    return found


def require_same_inputs(known: dict[str, str], found: dict[str, str], folder: Path) -> None:
    """Raise a CheckpointError that lists the inputs that changed since the first trial."""
    changed = sorted(name for name in {*known, *found} if known.get(name) != found.get(name))
    if changed:
        raise CheckpointError(
            f"{', '.join(changed)} changed since the first trial",
            where=str(folder),
            fix="Restore the inputs, or use a new --output_dir.",
        )


def main_metric_of(run: RunDir, metrics: dict[str, Any]) -> str:
    """Return the metric that a run is judged by."""
    chosen = load_config(run.config_file, need_data=False).metric_for_best_model
    return chosen or next(name for name in metrics if name != "loss")


def larger_is_better(metric: str, value: float) -> float:
    """Return the value, negated for metrics that are better when smaller."""
    return value if metric != "loss" and greater_is_better(metric) else -value


def trial_score(run: RunDir) -> tuple[str, float]:
    """Return the metric and its value on the validation examples; larger is better."""
    if not run.metrics_file.is_file():
        raise CheckpointError(
            f"the trial has no {run.metrics_file.name}: its folder was removed or is incomplete",
            where=str(run.path),
            fix="Restore the folder, or use a new --output_dir.",
        )
    scores = read_metrics(run.metrics_file).get("validation")
    if not scores:
        raise ConfigError(
            "there are no labeled validation examples to compare trials",
            fix="Set --validation_file or --validation_split_fraction.",
        )
    metric = main_metric_of(run, scores)
    value = scores[metric]["value"]
    if value is None:
        raise NumericsError(f"{metric} is not defined on the validation examples")
    return metric, larger_is_better(metric, float(value))
