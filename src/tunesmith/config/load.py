"""Load a config: flags over the file over the defaults. All problems are reported together.

YAML files are read without interpreting values: PyYAML's safe loader would read `1e-5` as text, `no` as False and `0123` as 83,
and keep the last of two equal keys. Text is converted by the type of the option. Old names of transformers are accepted
with a note.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from tunesmith.config.options import RunConfig, list_options
from tunesmith.config.validate import DATA_SOURCES, find_problems
from tunesmith.errors import ConfigError, did_you_mean
from tunesmith.files import BadFile, read_plain

logger = logging.getLogger(__name__)

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
"""Old name -> current name."""

IGNORED: dict[str, tuple[Any, str]] = {
    "overwrite_output_dir": (None, "it has no effect, as in transformers v5"),
    "logging_dir": (None, "curves and event log are written to the run folder"),
    "include_inputs_for_metrics": (None, "it has no effect"),
    "do_train": (None, "`tunesmith train` trains"),
    "do_eval": (None, "a run evaluates if there is validation data"),
    "do_predict": (None, "a run predicts if there is test data"),
    "remove_unused_columns": (None, "the model receives only the text and label columns"),
    "length_column_name": (None, "lengths are computed from the tokens"),
    "contrastive_start": (None, "the head is initialized with a linear probe instead"),
    "logging_strategy": ("steps", "the event log contains every step"),
    "logging_first_step": (False, "the event log contains every step"),
    "dataloader_pin_memory": (True, "memory is pinned if there is a GPU"),
    "overwrite_cache": (False, "the cache is checked by content; delete its folder to clear it"),
    "pad_to_multiple_of": (None, "batches are padded to their longest example"),
    "project": ("tunesmith", "set the project with the tracker's own environment variable, such as WANDB_PROJECT"),
    "shuffle_window": (50, "length grouping sorts within 50 batches"),
    "pad_to_max_length": (False, "batches are padded to their longest example, with the same results"),
    "eval_delay": (0, "every evaluation takes place; set eval_strategy steps and eval_steps for fewer"),
    "early_stopping_threshold": (0.0, "any improvement counts; set early_stopping_patience"),
    "greater_is_better": (None, "the direction of every metric is known"),
    "dataloader_num_workers": (0, "batches are prepared in advance if there is a GPU"),
    "preprocessing_num_workers": (None, "fast tokenizers use all cores"),
    "auto_find_batch_size": (True, "a batch that does not fit into memory is always split, with the same results"),
}
"""Name -> (default in earlier versions, why it isn't needed). The default, as in an old run.yaml, is accepted silently."""

_TRAINER_ONLY = "is available through tunesmith.Trainer; the command line trains with DDP (torchrun)"
REFUSED: dict[str, str] = {
    "trust_remote_code": "code from a model repository is never run",
    "problem_type": "the task is detected from the data; set do_regression to treat numbers as values or as classes",
    "token": "a token does not belong in a config; set the environment variable HF_TOKEN",
    "push_to_hub": "upload the model after training with `tunesmith push RUN`",
    "hub_model_id": "upload the model after training with `tunesmith push RUN`",
    "deepspeed": _TRAINER_ONLY,
    "fsdp": _TRAINER_ONLY,
    "fsdp_config": _TRAINER_ONLY,
    "config_name": "the config of the model is used; edit config.json in a copy of its folder to change it",
    "torch_compile": "torch.compile is available through tunesmith.Trainer",
    "torch_compile_backend": "torch.compile is available through tunesmith.Trainer",
    "torch_compile_mode": "torch.compile is available through tunesmith.Trainer",
    "save_only_model": "checkpoints always contain the optimizer; the folder model/ contains only the weights",
    "weights_only": "to start from the weights of a run, set model_name_or_path to its model folder",
    "token_budget": "set per_device_train_batch_size; train_sampling_strategy group_by_length keeps padding low",
    "dataloader_drop_last": "the last batch of an epoch is always used; its loss is the mean over its examples",
    "allow_single_label": "a model needs examples of two labels; add examples of a second label",
    "max_predict_samples": "use max_eval_samples, which limits the validation and the test examples",
    "eval_on_start": "use `tunesmith evaluate` to score a model before training",
}
"""Name -> why it is not supported and what to do instead. A value that means off is accepted silently."""

REMOVED_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("torch_compile", "eval_on_start", "pad_to_max_length", "dataloader_drop_last"), False),
    **dict.fromkeys(("token_budget", "greater_is_better"), None),
    "shuffle_window": 50,
    "eval_delay": 0,
    "early_stopping_threshold": 0.0,
    "allow_single_label": False,
}
"""Removed options that are part of the identity in checkpoints of earlier versions."""

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
    "text": "text_column_names",
    "text_column": "text_column_names",
    "label": "label_column_name",
    "label_column": "label_column_name",
    "class_weight": "class_weights",
    "metric": "metric_name",
    "patience": "early_stopping_patience",
    "warmup": "warmup_steps",
    "scheduler": "lr_scheduler_type",
    "optimizer": "optim",
}
"""Likely guess -> the option that is meant. Only suggested, not accepted."""


def _rename(name: str, value: Any) -> tuple[str | None, Any, str | None]:
    """Return the current name of an option (None: not used), its value and a note. A refused option is a ValueError."""
    if name in REFUSED:
        if not value or (isinstance(value, str) and WORDS.get(value.lower()) is False):
            return None, value, None
        raise ValueError(REFUSED[name])
    if name in IGNORED:
        default, reason = IGNORED[name]
        is_default = value == default or str(value).lower() == str(default).lower()
        return None, value, None if is_default else f"is ignored: {reason}"
    if name not in RENAMED:
        return name, value, None
    new = RENAMED[name]
    note = None if name == "max_length" else f"is an old name: use {new}"  # max_length is equally valid
    if name == "group_by_length":
        value = "group_by_length" if convert(str(value), bool) else "random"
        note = f"is an old name: use {new}, here with the value {value}"
    elif name == "warmup_ratio":
        value = _ratio(value)
    return new, value, note


def suggest(name: str, known: tuple[str, ...]) -> str | None:
    """Return "Did you mean 'x'?" for an unknown name, or None."""
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


@dataclass(frozen=True)
class Resolved:
    """Converted values by name, the place of each, notes about old names and all problems."""

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
    """Return the validated config. `flags` maps names to text or values; `start` replaces the defaults.

    Notes about old names are logged. A ConfigError lists all problems, each with its file:line:column or flag.
    With `need_data=False` a config without training data is accepted.
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
    # If a misspelled or wrong data source was reported already, "no training data" would only confuse.
    told = any(name in problem for problem in problems for name in DATA_SOURCES)
    problems += find_problems(config, need_data=need_data and not told, wheres=wheres)
    raise_problems(problems)
    return config


def resolve(entries: Iterable[Entry]) -> Resolved:
    """Rename old names and convert every value to the type of its option."""
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
            problems.append(f"{entry.where}: {name} is already set at {wheres[name]}. Keep one of them")
        values[name] = value
        wheres[name] = entry.where
    return Resolved(values, wheres, tuple(notes), tuple(problems))


def raise_problems(problems: Iterable[str]) -> None:
    """Raise a ConfigError that lists all problems, if there are any."""
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
        raise ValueError(f"unknown option{f'. {hint}' if hint else '. `tunesmith train --help_all` lists all'}")
    try:
        return convert(value, option.hint)
    except ValueError:
        if name == "resume_from_checkpoint":
            raise ValueError(
                "doesn't accept a folder. Omit the value to resume from the latest valid checkpoint"
            ) from None
        raise


def _start(entry: Entry) -> str:
    """Return place and name of an entry; for a flag, only the flag."""
    return entry.where if entry.where.startswith("--") else f"{entry.where}: {entry.name}"


# Reading YAML files

MAX_BYTES = 1_000_000
"""A config larger than this is not a config."""

MAX_ENTRIES = 500
"""More names than this are not options. Without the limit 60,000 unknown names took 30 s to compare with the known ones."""

MAX_DEPTH = 4
"""Options hold a value, a list or a flat mapping: deeper nesting is a mistake or an attack."""


@dataclass(frozen=True)
class Entry:
    """`where` is `file:line:column` or the flag."""

    name: str
    value: Any
    where: str


@dataclass(frozen=True)
class FileEntries:
    """The entries of a file, and the problems found while reading it."""

    entries: tuple[Entry, ...]
    problems: tuple[str, ...]


def read_entries(path: str | Path) -> FileEntries:
    """Return the top-level entries of a YAML file. A file that cannot be read at all is a ConfigError."""
    path = Path(path)
    if path.suffix.lower() in (".json", ".toml"):
        raise ConfigError("config files are written in YAML", where=str(path), fix="Save it as a .yaml file.")
    if path.suffix.lower() not in (".yaml", ".yml"):
        fix = f"To train on a data file, use --train_file {path}"
        raise ConfigError("is not a config file (.yaml)", where=str(path), fix=fix)
    return read_top_level(_read_text(path), str(path))


def _read_text(path: Path) -> str:
    try:
        content = read_plain(path, MAX_BYTES, follow=True)
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read the config: {error.strerror}", where=str(path), fix="Check the path") from None
    except BadFile as error:
        fix = "Is it a data file?" if path.is_file() else "Pass a config file."
        raise ConfigError(str(error), where=str(path), fix=fix) from None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError("is not UTF-8 text", where=f"{path}:{line}", fix="Save it as UTF-8") from None


_NULLS = ("", "~", "null", "Null", "NULL")


def read_top_level(text: str, file: str) -> FileEntries:
    """Parse the top-level mapping of a YAML file. Values stay as written: tags and anchors are never interpreted."""
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_events(yaml.parse(text, Loader=loader), file, yaml)
        top = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        where = f"{file}:{_mark(error.problem_mark)}" if error.problem_mark else file
        raise ConfigError(f"is not YAML: {error.problem}", where=where) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"is not YAML: {str(error).splitlines()[0]}", where=file) from None
    if top is None or (isinstance(top, yaml.ScalarNode) and _as_written(top) is None):
        return FileEntries((), ())
    if not isinstance(top, yaml.MappingNode):
        _refuse(top, file, "expected option names and values, such as `learning_rate: 2e-5`")
    problems: list[str] = []
    entries = _pairs(top, file, problems)
    return FileEntries(tuple(entries.values()), tuple(problems))


def _check_events(events: Iterable[Any], file: str, yaml: Any) -> None:
    """Refuses what a config does not need, before values are built: anchors, tags, deep nesting, a second document."""
    depth = documents = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            _refuse(event, file, "anchors and aliases are not accepted", fix="Write the value out")
        if getattr(event, "tag", None) is not None:
            _refuse(event, file, f"the tag {event.tag!r} is not accepted", fix="Write the plain value")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            _refuse(event, file, "is nested too deeply")
        documents += isinstance(event, yaml.DocumentStartEvent)
        if documents > 1:
            raise ConfigError("contains more than one YAML document", where=file, fix="Keep one")


def _pairs(mapping: Any, file: str, problems: list[str]) -> dict[str, Entry]:
    if len(mapping.value) > MAX_ENTRIES:
        raise ConfigError(f"contains more than {MAX_ENTRIES} names", where=file, fix="Is it a data file?")
    entries: dict[str, Entry] = {}
    for key, value in mapping.value:
        if key.id != "scalar":
            _refuse(key, file, "a name must be plain text")
        where = f"{file}:{_mark(key.start_mark)}"
        if key.value in entries:
            before = entries[key.value].where
            problems.append(f"{where}: {key.value} is set twice, first at {before}. Keep one of them")
        entries[key.value] = Entry(key.value, _value(value, file, problems), where)
    return entries


def _value(node: Any, file: str, problems: list[str]) -> Any:
    if node.id == "mapping":
        return {name: entry.value for name, entry in _pairs(node, file, problems).items()}
    return [_value(item, file, problems) for item in node.value] if node.id == "sequence" else _as_written(node)


def _as_written(scalar: Any) -> str | None:
    """Return the text of a scalar; None for an unquoted null."""
    return None if not scalar.style and scalar.value in _NULLS else str(scalar.value)


def _refuse(at: Any, file: str, problem: str, *, fix: str | None = None) -> NoReturn:
    raise ConfigError(problem, where=f"{file}:{_mark(at.start_mark)}", fix=fix)


def _mark(mark: Any) -> str:
    return f"{mark.line + 1}:{mark.column + 1}"


# Converting text to the types of options

WORDS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
"""The spellings of true and false."""

_WHOLE = re.compile(r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*)")


def convert(value: Any, hint: Any) -> Any:
    """Convert a value to the type of the hint. A ValueError names what was expected and what was found."""
    kinds = _kinds(hint)
    if value is None or (isinstance(value, str) and NoneType in kinds and _means_none(value, kinds)):
        if NoneType in kinds:
            return None
        raise ValueError(f"expected {describe(hint)}, got nothing")
    for kind in kinds:
        if kind is not NoneType:
            with suppress(
                ValueError, OverflowError, RecursionError
            ):  # not this type; another member of the union may fit
                return _convert_one(value, kind)
    shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:77]}..."
    raise ValueError(f"expected {describe(hint)}, got {shown}{_how_to_write(value, kinds)}")


def describe(hint: Any) -> str:
    """Return the type in plain words: "a whole number", "auto, on or off"."""
    words: list[str] = []
    for kind in _kinds(hint):
        if kind is NoneType:
            continue
        if get_origin(kind) is Literal:
            words += [str(choice) for choice in get_args(kind)]
        elif get_origin(kind) is tuple:
            words.append("a list of numbers" if get_args(kind)[0] is float else "a list of names")
        else:
            words.append(_NAMES[get_origin(kind) or kind])
    if "a whole number" in words and "a number" in words:
        words.remove("a whole number")
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a mapping of names to numbers",
}


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _means_none(text: str, kinds: tuple[Any, ...]) -> bool:
    """Parse text for any type. Empty text unsets an option; so do none and null, unless the option is text."""
    if text == "":
        return True
    free_text = str in kinds or any(get_origin(kind) is tuple and get_args(kind)[0] is str for kind in kinds)
    listed = any("none" in get_args(kind) for kind in kinds if get_origin(kind) is Literal)
    return not free_text and not listed and text.lower() in ("none", "null")


def _convert_one(value: Any, kind: Any) -> Any:
    origin = get_origin(kind) or kind
    if origin is Literal:
        return _as_choice(value, get_args(kind))
    if origin is tuple:
        return _as_tuple(value, get_args(kind)[0])
    reader = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_str, dict: _as_dict}[origin]
    return reader(value)


def _as_choice(value: Any, choices: tuple[Any, ...]) -> Any:
    """Return one of the choices. True and False (from Python) mean on/off or yes/no."""
    meant = [c for c in choices if c == value or (isinstance(value, bool) and WORDS.get(str(c)) is value)]
    if not meant:
        raise ValueError
    return meant[0]


def _as_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in WORDS:
        return WORDS[value.lower()]
    raise ValueError


def _as_int(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and _WHOLE.fullmatch(value.strip()) and len(value) < 20:
        return int(value)
    raise ValueError


def _as_float(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    number = float(value)
    if not math.isfinite(number) or (isinstance(value, str) and re.match(r"[+-]?0[0-9]", value.strip())):
        raise ValueError
    return number


def _as_str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _as_tuple(value: Any, item: Any) -> tuple[Any, ...]:
    """Return a list unchanged; split text at commas, so that empty text is an empty list."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",")] if value.strip() else []
    if not isinstance(value, (list, tuple)):
        raise ValueError
    return tuple(_convert_one(part, item) for part in value)


def _as_dict(value: Any) -> dict[str, Any]:
    """Return a mapping of names to numbers, words or switches; on the command line it is JSON."""
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError
    return {str(name): _as_scalar(part) for name, part in value.items()}


def _as_scalar(value: Any) -> Any:
    for reader in (_as_int, _as_float):
        with suppress(ValueError):
            return reader(value)
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return _as_str(value)


def _how_to_write(value: Any, kinds: tuple[Any, ...]) -> str:
    """Return how to write the number so that it is accepted, or ""."""
    number = math.nan
    if isinstance(value, (str, float)) and {int, float}.intersection(kinds):
        with suppress(ValueError):
            number = float(value)
    return f". Write {int(number)}" if number.is_integer() and abs(number) < 1e15 else ""
