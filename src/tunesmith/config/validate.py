"""Check a config: ranges of single options, and options that must agree. Needs no heavy import: all problems are reported
together before a file is read or a model is loaded."""

from __future__ import annotations

import codecs
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tunesmith.config.options import PATH_OPTIONS, SCHEDULE_OPTIONS, Range, RunConfig, list_options
from tunesmith.errors import did_you_mean

LARGEST_NUMBER = 10**15
"""Limit for options without their own: libraries can't handle larger integers."""

DATA_SOURCES = ("train_file", "task_name", "dataset_name")
"""Options that name the training data; a run has exactly one of them."""


Problem = tuple[str, str, str]
"""The option to change, what is wrong with it, and what to do."""


def find_problems(
    config: RunConfig, *, need_data: bool = True, wheres: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return one line per problem, none if the config is valid. `wheres` names the place where each option was set."""
    problems = [
        *_check_ranges(config),
        *_check_sources(config, need_data=need_data),
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
    for name in ("validation_file", "test_file"):
        path = getattr(config, name)
        if path is not None and path in files:
            kind = "training" if files[path] == "train_file" else "validation"
            why = "fitted the model" if kind == "training" else "selected the checkpoint"
            fix = f"The {kind} examples {why}, so a score on them is too optimistic. Use a different file"
            yield name, f"is the same file as {files[path]}", fix
        elif path is not None:
            files[path] = name


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
    if config.delimiter is not None and len(config.delimiter) != 1:
        yield "delimiter", f"{config.delimiter!r} is not one character", "Use one, or comma, tab, semicolon, pipe"
    yield from _check_encoding(config)
    yield from _check_class_weights(config)


def _check_encoding(config: RunConfig) -> Iterator[Problem]:
    if config.encoding is None:
        return
    try:
        codecs.lookup(config.encoding)
    except LookupError:
        known = ("utf-8", "utf-16", "latin-1", "cp1252", "shift_jis", "gb18030", "ascii")
        fix = did_you_mean(config.encoding, known) or "Use a name such as utf-8 or cp1252"
        yield "encoding", f"{config.encoding!r} is not a known encoding", fix


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
    no_rows = config.validation_file is None and config.train_file is not None and config.validation_split_fraction == 0
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
        yield "fp16", "cannot be used together with bf16", "Set one of them; bf16 if the GPU supports it"
    if config.use_cpu and config.cuda_graphs == "on":
        yield "cuda_graphs", "on needs a GPU, but use_cpu is set", "Omit one of them"
    options = (config.lr_scheduler_type, config.lr_scheduler_kwargs, config.decided.learning_rate)
    for text, fix in schedule_problems(*options):
        yield "lr_scheduler_kwargs", text, fix


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


_SHAPES = ("linear", "cosine", "1-sqrt")
_WHOLE_NUMBERS = ("timescale", "num_decay_steps", "num_stable_steps")
_LARGEST = 1e9


def schedule_problems(kind: str, options: Mapping[str, Any], learning_rate: float) -> Iterator[tuple[str, str]]:
    """Yield (problem, fix) for each option that the schedule doesn't accept and each one that is missing."""
    known = SCHEDULE_OPTIONS[kind]
    for name, value in options.items():
        if name not in known:
            takes = f"It accepts {', '.join(known)}" if known else "It accepts none: omit them"
            yield f"{kind} has no {name!r}", did_you_mean(name, known) or takes
        elif not name.endswith("_type"):
            yield from _number_problems(name, value)
        elif value not in _SHAPES:
            yield f"{name} {value!r} is not a shape", f"Use one of {', '.join(_SHAPES)}"
    if kind.endswith("min_lr") and ("min_lr" in options) == ("min_lr_rate" in options):
        yield f"{kind} needs min_lr or min_lr_rate, one of them", 'Add {"min_lr_rate": 0.1}'
    if kind == "warmup_stable_decay" and "num_decay_steps" not in options:
        yield f"{kind} needs num_decay_steps", 'Add {"num_decay_steps": 100}'
    end = options.get("lr_end", 1e-7)
    if kind == "polynomial" and isinstance(end, (int, float)) and not end < learning_rate:
        yield f"lr_end {end:g} is not below the learning rate {learning_rate:g}", "Use a smaller lr_end"


def _number_problems(name: str, value: Any) -> Iterator[tuple[str, str]]:
    whole, low = name in _WHOLE_NUMBERS, 1 if name == "timescale" else 0
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        yield f"{name} {value!r} is not a {'whole ' if whole else ''}number", f"Write {name}: 1"
    elif not low <= value <= _LARGEST:
        yield f"{name} {value} is out of range", f"Use a number from {low} to {_LARGEST:.0e}"


_PARTS = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")
_SECONDS = (86400.0, 3600.0, 60.0, 1.0)


def read_duration(text: str) -> float:
    """Parse a duration in seconds. A ValueError explains the format."""
    match = _PARTS.fullmatch(text.strip().lower())
    seconds = sum(float(n or 0) * unit for n, unit in zip(match.groups(), _SECONDS, strict=True)) if match else 0.0
    if not 0 < seconds < 10**9:
        raise ValueError(f"{text!r} is not a length of time. Write 90s, 20m, 2h or 1h30m")
    return seconds
