"""Load a config: flags over the file over the defaults. All problems are reported together.

YAML files are read without interpreting values: PyYAML's safe loader would read `1e-5` as text, `no` as False and `0123` as 83,
and keep the last of two equal keys. Text is converted by the type of the option. Old names of transformers are accepted
with a note.
"""

from __future__ import annotations

import codecs
import logging
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from tunesmith.config.options import PATH_OPTIONS, Range, RunConfig, list_options
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


IGNORED: dict[str, str] = {
    "overwrite_output_dir": "it has no effect, as in transformers v5",
    "logging_dir": "curves and event log are written to the run folder",
    "include_inputs_for_metrics": "it has no effect",
    "do_train": "`tunesmith train` trains",
    "do_eval": "a run evaluates if there is validation data",
    "do_predict": "a run predicts if there is test data",
    "remove_unused_columns": "the model receives only the text and label columns",
    "length_column_name": "lengths are computed from the tokens",
    "logging_strategy": "the event log contains every step",
    "logging_first_step": "the event log contains every step",
    "dataloader_pin_memory": "memory is pinned if there is a GPU",
    "overwrite_cache": "the cache is checked by content; delete its folder to clear it",
    "pad_to_multiple_of": "batches are padded to their longest example",
    "project": "set the project with the tracker's own variable, such as WANDB_PROJECT",
    "pad_to_max_length": "batches are padded to their longest example, with the same results",
    "eval_delay": "every evaluation takes place; set eval_strategy steps and eval_steps for fewer",
    "early_stopping_threshold": "any improvement counts; set early_stopping_patience",
    "greater_is_better": "the direction of every metric is known",
    "dataloader_num_workers": "batches are prepared in advance if there is a GPU",
    "preprocessing_num_workers": "fast tokenizers use all cores",
    "auto_find_batch_size": "a batch that does not fit into memory is always split, with the same results",
}
"""Options of transformers that are accepted with a note."""

_PUSH = "upload the model after training with `tunesmith push RUN`"
_SHARDED = "is available through tunesmith.Trainer; the command line trains with DDP (torchrun)"
_COMPILE = "torch.compile is available through tunesmith.Trainer"
REFUSED: dict[str, str] = {
    "trust_remote_code": "code from a model repository is never run",
    "problem_type": "the task is detected from the data; set do_regression for numbers or classes",
    "token": "a token does not belong in a config; set the environment variable HF_TOKEN",
    "push_to_hub": _PUSH,
    "hub_model_id": _PUSH,
    "deepspeed": _SHARDED,
    "fsdp": _SHARDED,
    "fsdp_config": _SHARDED,
    "lr_scheduler_kwargs": "is available through tunesmith.Trainer",
    "config_name": "to change the model's config, edit config.json in a copy of its folder",
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "save_only_model": "checkpoints contain the optimizer; the folder model/ has only weights",
    "weights_only": "to start from a run, set model_name_or_path to its model folder",
    "dataloader_drop_last": "the last batch of an epoch is always used",
    "eval_on_start": "use `tunesmith evaluate` to score a model before training",
}
"""Options that would change the result. Values that mean off are accepted."""

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
    if name in IGNORED:
        return None, value, None if value is None else f"is ignored: {IGNORED[name]}"
    if name in REFUSED:
        if value and not (isinstance(value, str) and WORDS.get(value.lower()) is False):
            raise ValueError(REFUSED[name])
        return None, value, None
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
    entries, problems = read_entries(file) if file is not None else ([], [])
    resolved = resolve(entries)
    given = resolve(Entry(name, value, f"--{name}") for name, value in (flags or {}).items())
    problems += [*resolved.problems, *given.problems]
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
"""Options hold a value or a list: deeper nesting is a mistake or an attack."""


@dataclass(frozen=True)
class Entry:
    """`where` is `file:line:column` or the flag."""

    name: str
    value: Any
    where: str


def read_entries(path: str | Path) -> tuple[list[Entry], list[str]]:
    """Return the top-level entries of a YAML file and its problems. A file that cannot be read at all is a ConfigError."""
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


def read_top_level(text: str, file: str) -> tuple[list[Entry], list[str]]:
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
        return [], []
    if not isinstance(top, yaml.MappingNode):
        _refuse(top, file, "expected option names and values, such as `learning_rate: 2e-5`")
    problems: list[str] = []
    return list(_pairs(top, file, problems).values()), problems


def _check_events(events: Iterable[Any], file: str, yaml: Any) -> None:
    """Refuse anchors, tags, deep nesting and a second document before values are built."""
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
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    hint_text = did_you_mean(value, choices) if isinstance(value, str) else None
    raise ValueError(f"expected {describe(hint)}, got {shown}{f'. {hint_text}' if hint_text else ''}")


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
    reader = {bool: _as_bool, int: _as_int, float: _as_float, str: _as_str}[origin]
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


# Validation: ranges of single options, and options that must agree. It needs no heavy import: all problems are reported
# together before a file is read or a model is loaded.

LARGEST_NUMBER = 10**15
"""Limit for options without their own: libraries can't handle larger integers."""

DATA_SOURCES = ("train_file", "task_name", "dataset_name")
"""Options that name the training data; a run has exactly one of them."""


LABEL_SEPARATORS = ("comma", "semicolon", "pipe", "slash", "space", "tab", "json", "none")

Problem = tuple[str, str, str]
"""The option to change, what is wrong with it, and what to do."""


def find_problems(
    config: RunConfig, *, need_data: bool = True, wheres: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return one line per problem, none if the config is valid. `wheres` names the place where each option was set."""
    problems = [
        *_check_ranges(config),
        *_check_sources(config, need_data=need_data),
        *_check_gold(config),
        *_check_folds(config),
        *_check_best(config),
        *_check_columns(config),
        *_check_metrics(config),
        *_check_evaluation(config),
        *_check_engine(config),
        *_check_saving(config),
        *_check_paths(config),
    ]
    return tuple(_line(problem, wheres or {}) for problem in problems)


def _line(problem: Problem, wheres: Mapping[str, str]) -> str:
    """Format a problem: where the option was set, what is wrong, what to do."""
    name, text, fix = problem
    where = wheres.get(name)
    start = name if where is None else where if where.startswith("--") else f"{where}: {name}"
    return f"{start}: {text}" + (f". {fix}" if fix else "")


def _check_ranges(config: RunConfig) -> Iterator[Problem]:
    for name, option in list_options().items():
        value, limits = getattr(config, name), option.range
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            for text, fix in _range_problems(value, limits, option.default):
                yield name, text, fix
    if config.max_steps == 0 or config.max_steps < -1:
        yield "max_steps", f"{config.max_steps} is not a number of steps", "Use 1 or more, or -1 for epochs"
    if config.time_budget is not None:
        try:
            read_duration(config.time_budget)
        except ValueError as error:
            yield "time_budget", str(error), ""
    decay = config.decided.layerwise_lr_decay
    if decay > 1:
        yield "layerwise_lr_decay", f"{decay} is above 1", "Use a value such as 0.9"


def _range_problems(value: int | float, limits: Range, default: float | None) -> Iterator[tuple[str, str]]:
    hint = "" if default is None else f"; the default is {default:g}"
    if limits.at_least is not None and value < limits.at_least:
        yield f"{value} is too small", f"Use {limits.at_least:g} or more{hint}"
    if limits.above is not None and value <= limits.above:
        yield f"{value} is not above {limits.above:g}", f"Use a larger value{hint}"
    if limits.share and not 0 <= value < 1:
        yield f"{value} is not between 0 and 1", "Use a share from 0, below 1"
    high = limits.at_most or (LARGEST_NUMBER if isinstance(value, int) else math.inf)
    if value > high:
        shown = value if isinstance(value, float) or value < 10**30 else "this number"
        yield f"{shown} is too large", f"Use at most {high}"
    if limits.whole_from_one and isinstance(value, float) and value > 1 and not value.is_integer():
        yield f"{value} is neither a share below 1 nor whole steps", f"Write {round(value)}"


def _check_sources(config: RunConfig, *, need_data: bool) -> Iterator[Problem]:
    given = [name for name in DATA_SOURCES if getattr(config, name) is not None]
    if len(given) > 1:
        yield given[1], f"cannot be used together with {given[0]}", "Set one source of training data"
    if need_data and not given:
        fix = "Use --train_file FILE, --task_name mrpc or --dataset_name NAME"
        yield "train_file", "no training data", fix
    if config.dataset_config_name is not None and config.dataset_name is None:
        yield "dataset_config_name", "needs dataset_name", "Add --dataset_name glue, for example"
    for name in ("train_split_name", "validation_split_name", "test_split_name"):
        if getattr(config, name) is not None and config.train_file is not None:
            yield name, "has no meaning for files", "It names a split of task_name or dataset_name"
    files = {config.train_file: "train_file"} if config.train_file else {}
    for name in ("validation_file", "gold_file", "test_file"):
        path = getattr(config, name)
        if path is not None and path in files:
            kind = "training" if files[path] == "train_file" else "validation"
            why = "fitted the model" if kind == "training" else "selected the checkpoint"
            fix = f"The {kind} examples {why}, so a score on them is too optimistic. Use a different file"
            yield name, f"is the same file as {files[path]}", fix
        elif path is not None:
            files[path] = name


def _check_gold(config: RunConfig) -> Iterator[Problem]:
    if config.gold_file is None:
        return
    for name in ("validation_file", "folds", "fold", "label_confidence_column_name"):
        if getattr(config, name) is not None:
            yield "gold_file", f"cannot be used together with {name}", "Set one of them"
    if config.recipe == "best":
        yield "gold_file", "cannot be used together with --recipe best", "Omit --recipe"


def _check_folds(config: RunConfig) -> Iterator[Problem]:
    if config.fold is not None and (config.folds is None or config.fold > config.folds):
        yield "fold", f"there is no fold {config.fold} of {config.folds or 0}", "Set --folds, and a fold up to it"
    if config.folds is not None and config.validation_file is not None:
        yield "folds", "makes its own validation splits, but validation_file is set", "Set one of them"


def _check_best(config: RunConfig) -> Iterator[Problem]:
    if config.recipe != "best":
        return
    if config.time_budget is None:
        yield "recipe", "best needs a time_budget", "Add --time_budget 20m, for example"
    given = [name for name, usual in (("folds", None), ("fold", None), ("seeds", 1)) if getattr(config, name) != usual]
    for name in given:
        yield name, "cannot be used together with recipe best, which makes its own folds", "Omit it"
    if config.resume_from_checkpoint:
        yield "resume_from_checkpoint", "has no meaning for recipe best", "The same command resumes by itself"


def _check_columns(config: RunConfig) -> Iterator[Problem]:
    names = config.text_column_names
    if names is not None and not all(names or [""]):
        yield "text_column_names", "a name is empty", "Name one column, two for a sentence pair, or more"
    if names is not None and len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        yield "text_column_names", f"{twice!r} is named twice", "Name different columns"
    if config.label_column_name is not None and config.label_column_name in (names or ()):
        yield "label_column_name", f"{config.label_column_name!r} is also a text column", "Name another column"
    labels = config.label_names
    if labels is not None and len(set(labels)) < len(labels):
        twice = Counter(labels).most_common(1)[0][0]
        yield "label_names", f"{twice!r} is named twice", "Name each label once"
    if labels is not None and not all(labels):
        yield "label_names", "a name is empty", "Name each label"
    separator = config.label_separator
    if separator not in (None, *LABEL_SEPARATORS) and any(char.isalnum() for char in separator or ""):
        fix = did_you_mean(separator or "", LABEL_SEPARATORS) or f"Use a character, or {', '.join(LABEL_SEPARATORS)}"
        yield "label_separator", f"{separator!r} is not a separator", fix
    try:
        check_encoding(config.encoding)
    except ConfigError as error:
        yield "encoding", error.problem, error.fix or ""
    yield from _check_class_weights(config)


def check_encoding(encoding: str | None) -> str | None:
    """Return the canonical name of a text encoding; an unknown one is a ConfigError."""
    if encoding is None:
        return None
    try:
        "".encode(encoding)  # refuses codecs that are not text encodings (hex, zlib) as well as unknown names
        return codecs.lookup(encoding).name
    except (LookupError, ValueError):
        known = ("utf-8", "utf-16", "latin-1", "cp1252", "shift_jis", "gb18030", "ascii")
        fix = did_you_mean(encoding, known) or "Use a name such as utf-8 or cp1252"
        raise ConfigError(f"{encoding!r} is not a known text encoding", where="--encoding", fix=fix) from None


def _check_class_weights(config: RunConfig) -> Iterator[Problem]:
    weights = config.class_weights
    if weights is None:
        return
    if config.do_regression:
        yield "class_weights", "has no meaning for regression", "Omit it"
    if weights == "balanced":
        return
    if any(weight <= 0 for weight in weights):
        yield "class_weights", f"{min(weights)} is not above 0", "Set a positive weight for each label"
    if config.label_names is not None and len(weights) != len(config.label_names):
        yield "class_weights", f"{len(weights)} weights for {len(config.label_names)} labels", "Set one per label"


def _check_metrics(config: RunConfig) -> Iterator[Problem]:
    best = config.metric_for_best_model
    if config.metric_name is None and best is None:
        return
    from tunesmith.metrics.table import metric_names

    for name in config.metric_name or ():
        if name not in metric_names():
            yield _unknown_metric("metric_name", name, metric_names())
    if best is None:
        return
    if best not in (*metric_names(), "loss"):
        yield _unknown_metric("metric_for_best_model", best, (*metric_names(), "loss"))
    elif config.metric_name is not None and best != "loss" and best not in config.metric_name:
        yield "metric_for_best_model", f"{best} is not among metric_name", f"Add {best} to metric_name"


def _unknown_metric(option: str, name: str, known: tuple[str, ...]) -> Problem:
    from tunesmith.metrics.table import metric_aliases

    near = did_you_mean(name, (*known, *metric_aliases()))
    return (option, f"{name!r} is not a metric", near or f"Use one of {', '.join(known)}")


def _check_evaluation(config: RunConfig) -> Iterator[Problem]:
    if config.eval_strategy == "steps" and config.eval_steps is None and config.logging_steps is None:
        yield "eval_steps", "eval_strategy steps needs a number of steps", "Add eval_steps, such as 500"
    given = config.validation_file or config.gold_file
    no_rows = given is None and config.train_file is not None and config.validation_split_fraction == 0
    why = "eval_strategy is no" if config.eval_strategy == "no" else "there is no evaluation set" if no_rows else None
    if why is None:
        return
    if config.eval_strategy not in (None, "no"):
        yield "eval_strategy", f"is {config.eval_strategy}, but {why}", "Set validation_file"
    fix = "Set eval_strategy to epoch or steps" if config.eval_strategy == "no" else "Set validation_file"
    if config.load_best_model_at_end:
        yield "load_best_model_at_end", f"needs evaluations, but {why}", fix
    if config.early_stopping_patience is not None:
        yield "early_stopping_patience", f"needs evaluations, but {why}", fix
    if config.save_strategy == "best":
        yield "save_strategy", f"best needs evaluations, but {why}", fix


def _check_engine(config: RunConfig) -> Iterator[Problem]:
    if config.bf16 and config.fp16:
        yield "fp16", "cannot be used together with bf16", "Set bf16 if the GPU supports it, otherwise fp16"
    if config.use_cpu and config.cuda_graphs == "on":
        yield "cuda_graphs", "on needs a GPU, but use_cpu is set", "Omit one of them"


def _check_saving(config: RunConfig) -> Iterator[Problem]:
    if config.save_strategy == "no" and config.load_best_model_at_end:
        yield "load_best_model_at_end", "needs checkpoints, but save_strategy is no", "Set save_strategy to epoch"
    trackers = ("none", "all", "tensorboard", "wandb", "trackio", "mlflow")
    for name in config.report_to:
        if name not in trackers:
            fix = did_you_mean(name, trackers) or f"Use one of {', '.join(trackers)}"
            yield "report_to", f"{name!r} is not a known tracker", fix


def _check_paths(config: RunConfig) -> Iterator[Problem]:
    """Refuse invalid names of files and folders before anything is read or written."""
    for name in list_options():
        value = getattr(config, name)
        texts = (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ()
        if any(isinstance(text, str) and not _is_text(text) for text in texts):
            yield name, "is not UTF-8 text, or contains a NUL character", "Use another name"
        elif name in PATH_OPTIONS and isinstance(value, str) and value.startswith("~"):
            yield name, f"{value.split('/')[0]} is not a home folder", "Write the path out, or ./~name"
    asked = config.run_name
    if asked is None or config.output_dir is not None:
        return
    if not asked.strip() or asked in (".", "..") or any(c in "/\\" or not c.isprintable() for c in asked):
        fix = "Use one name without slashes, or set --output_dir"
        yield "run_name", f"{asked!r} cannot be the name of a folder in runs/", fix


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


_PARTS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
_SECONDS = (86400.0, 3600.0, 60.0, 1.0)


def read_duration(text: str) -> float:
    """Parse a duration in seconds. A ValueError explains the format."""
    match = _PARTS.fullmatch(text.strip().lower())
    seconds = sum(float(n or 0) * unit for n, unit in zip(match.groups(), _SECONDS, strict=True)) if match else 0.0
    if not 0 < seconds < 10**9:
        raise ValueError(f"{text!r} is not a length of time. Write 90s, 20m, 2h or 1h30m")
    return seconds
