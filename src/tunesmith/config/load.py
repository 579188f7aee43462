"""File and flags -> RunConfig. Flags go over the file, the file over the defaults; all problems are reported at once.

Names of earlier transformers versions are accepted with a one-line note; names of peers that mean nothing here are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.config.check import DATA_SOURCES, find_problems
from tunesmith.config.convert import WORDS, convert
from tunesmith.config.entries import Entry, FileEntries, read_entries
from tunesmith.config.schema import RunConfig, list_options
from tunesmith.errors import ConfigError, did_you_mean

RENAMED: dict[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "warmup_ratio": "warmup_steps",
    "group_by_length": "train_sampling_strategy",
    "tokenizer": "tokenizer_name",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "max_length": "max_seq_length",
}
"""Old name -> the name it has now."""

SILENT_ALIASES = ("max_length",)
"""Equally valid second names, without a note."""

IGNORED: dict[str, str] = {
    "overwrite_output_dir": "it has no effect, as in transformers v5",
    "logging_dir": "curves and journal go into the run folder",
    "include_inputs_for_metrics": "it has no effect here",
    "do_train": "`tunesmith train` trains",
    "do_eval": "a run evaluates whenever there is an evaluation set",
    "do_predict": "a run predicts whenever there is a test set",
    "remove_unused_columns": "only the text and label columns reach the model",
    "length_column_name": "lengths come from the tokenized rows",
    "contrastive_start": "a fitted head does the same in less time",
}
"""Name -> why it is not needed. A note is given, the value is not used."""

REFUSED: dict[str, str] = {
    "trust_remote_code": "code from a model repository is never run",
    "problem_type": "the task is found in the data; do_regression (true or false) decides about numbers",
    "token": "a token does not belong in a config; set the environment variable HF_TOKEN",
    "push_to_hub": "this version does not upload; use `hf upload` on the model folder",
    "hub_model_id": "this version does not upload; use `hf upload` on the model folder",
    "deepspeed": "the command line trains with DDP (torchrun); use tunesmith.Trainer for DeepSpeed",
    "fsdp": "the command line trains with DDP (torchrun); use tunesmith.Trainer for FSDP",
    "fsdp_config": "the command line trains with DDP (torchrun); use tunesmith.Trainer for FSDP",
}
"""Name -> why it cannot be given. A value that means off is accepted without a note."""

SHORT_NAMES: dict[str, str] = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size",
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "model": "model_name_or_path",
    "model_name": "model_name_or_path",
    "output": "output_dir",
    "name": "run_name",
    "task": "task_name",
    "dataset": "dataset_name",
    "data": "train_file",
    "text_column": "text_column_names",
    "label_column": "label_column_name",
    "metric": "metric_name",
    "patience": "early_stopping_patience",
    "warmup": "warmup_steps",
    "scheduler": "lr_scheduler_type",
    "optimizer": "optim",
}
"""What people write first -> the name they mean. Only a hint: these are not accepted."""


def _rename(name: str, value: Any) -> tuple[str | None, Any, str | None]:
    """The present name of an option (None if it is no longer used), its value, and a note about an old name.

    A ValueError says what is not possible.
    """
    if name in REFUSED:
        if not value or (isinstance(value, str) and WORDS.get(value.lower()) is False):
            return None, value, None
        raise ValueError(REFUSED[name])
    if name in IGNORED:
        return None, value, f"is ignored: {IGNORED[name]}"
    if name not in RENAMED:
        return name, value, None
    new = RENAMED[name]
    note = None if name in SILENT_ALIASES else f"is an old name: use {new}"
    if name == "group_by_length":
        value = "group_by_length" if convert(str(value), bool) else "random"
        note = f"is an old name: use {new}, here with the value {value}"
    elif name == "warmup_ratio":
        value = _ratio(value)
    return new, value, note


def suggest(name: str, known: tuple[str, ...]) -> str | None:
    """The sentence "Did you mean 'x'?" for an unknown name, or None."""
    plain = name.replace("-", "_").lower()
    if SHORT_NAMES.get(plain) in known:
        return f"Did you mean {SHORT_NAMES[plain]!r}?"
    return did_you_mean(plain, known)


def _ratio(value: Any) -> float | int:
    try:
        ratio = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"expected a number from 0 to 1, got {value!r}") from None
    if not 0 <= ratio < 1:
        raise ValueError(f"expected a number from 0 to 1 (1 excluded), got {value!r}")
    return ratio or 0


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resolved:
    """Converted values by name, where each came from, the notes about old names, and every problem."""

    values: dict[str, Any]
    wheres: dict[str, str]
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def load_config(
    file: str | Path | None = None,
    flags: Mapping[str, Any] | None = None,
    *,
    need_data: bool = True,
    start: RunConfig | None = None,
) -> RunConfig:
    """The checked config. `flags` holds names with text or values; `start` takes the place of the defaults.

    Notes about old names go to the log. A ConfigError carries all problems, each with its file:line:column or flag.
    `need_data=False` leaves out the question where the training rows come from.
    """
    from_file = read_entries(file) if file is not None else FileEntries((), ())
    resolved = resolve(from_file.entries)
    given = resolve(Entry(name, value, f"--{name}") for name, value in (flags or {}).items())
    problems = [*from_file.problems, *resolved.problems, *given.problems]
    for note in (*resolved.notes, *given.notes):
        logger.warning("%s", note)
    values = {**resolved.values, **given.values}
    wheres = {**resolved.wheres, **given.wheres}
    known = {name: getattr(start, name) for name in list_options()} if start is not None else {}
    config = RunConfig(**{**known, **values})
    # A misspelt or wrong source is already reported; "no training rows" beside it would only confuse.
    told = any(name in problem for problem in problems for name in DATA_SOURCES)
    problems += find_problems(config, need_data=need_data and not told, wheres=wheres)
    raise_problems(problems)
    return config


def resolve(entries: Iterable[Entry]) -> Resolved:
    """Old names renamed, every value in the type of its option."""
    values: dict[str, Any] = {}
    wheres: dict[str, str] = {}
    notes: list[str] = []
    problems: list[str] = []
    for entry in entries:
        try:
            name, value, note = _rename(entry.name, entry.value)
            if note is not None:
                notes.append(f"{_start(entry)} {note}")
            if name is None:
                continue
            value = _convert(name, value)
        except ValueError as error:
            problems.append(f"{_start(entry)}: {error}")
            continue
        if name in values:
            problems.append(f"{entry.where}: {name} is already given at {wheres[name]}. Keep one of them")
        values[name] = value
        wheres[name] = entry.where
    return Resolved(values, wheres, tuple(notes), tuple(problems))


def raise_problems(problems: Iterable[str]) -> None:
    """A ConfigError with all problems, or nothing when there are none."""
    found = tuple(dict.fromkeys(problems))
    if len(found) == 1:
        raise ConfigError(found[0], problems=found)
    if found:
        lines = "\n".join(f"  {problem}" for problem in found)
        raise ConfigError(f"{len(found)} problems in the configuration:\n{lines}", problems=found)


def _convert(name: str, value: Any) -> Any:
    option = list_options().get(name)
    if option is None:
        hint = suggest(name, tuple(list_options()))
        raise ValueError(f"unknown option{f'. {hint}' if hint else '. `tunesmith train --help` lists all'}")
    return convert(value, option.hint)


def _start(entry: Entry) -> str:
    """Place and name of an entry; for a flag both are the flag itself."""
    return entry.where if entry.where.startswith("--") else f"{entry.where}: {entry.name}"
