"""Is the config possible? Ranges of single options, and options that must agree. Needs nothing heavy: all of it is
known before a file is read or a model is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tunesmith.config.metric_names import METRIC_ALIASES, METRIC_NAMES
from tunesmith.config.paths import find_path_problems
from tunesmith.config.schedule_options import schedule_problems
from tunesmith.config.schema import RunConfig, list_options
from tunesmith.errors import did_you_mean

_AT_LEAST: dict[str, float] = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "max_seq_length": 3,
    "pad_to_multiple_of": 1,
    "preprocessing_num_workers": 1,
    "shuffle_window": 1,
    "token_budget": 1,
    "dataloader_num_workers": 0,
    "ddp_timeout": 1,
    "max_train_samples": 1,
    "max_eval_samples": 1,
    "max_predict_samples": 1,
    "warmup_steps": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "seed": 0,
    "data_seed": 0,
    "eval_delay": 0,
    "train_sample_size": 0,
    "early_stopping_patience": 1,
    "early_stopping_threshold": 0,
    "save_total_limit": 1,
}
"""Smallest value of an option."""

_AT_MOST: dict[str, float] = {
    "num_train_epochs": 1_000_000,
    "gradient_accumulation_steps": 1_000_000_000,
    "pad_to_multiple_of": 4096,
    "preprocessing_num_workers": 1024,
    "ddp_timeout": 10_000_000,
    "seed": 2**32 - 1,
    "data_seed": 2**32 - 1,
}
"""Largest value of an option: a list is made of it, or a library counts it in 32 bits (NumPy takes no larger seed)."""

LARGEST_NUMBER = 10**15
"""Of any other option: larger whole numbers do not fit the arithmetic of the libraries."""

_ABOVE_ZERO = (
    "learning_rate",
    "num_train_epochs",
    "adam_epsilon",
    "layerwise_lr_decay",
    "eval_steps",
    "save_steps",
    "logging_steps",
)

_BELOW_ONE = ("validation_split_fraction", "label_smoothing_factor", "adam_beta1", "adam_beta2")
"""Options from 0 to 1, 1 excluded."""

_WHOLE_FROM_ONE = ("warmup_steps", "eval_steps", "save_steps", "logging_steps")
"""Below 1 a share, from 1 on a number of steps: 1.5 is neither."""

DATA_SOURCES = ("train_file", "task_name", "dataset_name")
"""The options that say where training rows come from: a run has one of them."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with the option `name` (the one to change), and what to do."""

    name: str
    text: str
    fix: str | None = None

    def line(self, wheres: Mapping[str, str]) -> str:
        """The one line a person reads: where the option was given, what is wrong, what to do."""
        where = wheres.get(self.name)
        start = self.name if where is None else where if where.startswith("--") else f"{where}: {self.name}"
        return f"{start}: {self.text}" + (f". {self.fix}" if self.fix else "")


def find_problems(
    config: RunConfig, *, need_data: bool = True, wheres: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """One line for each problem; none when the config is possible. `wheres` says where an option was given."""
    problems = [
        *_check_ranges(config),
        *_check_sources(config, need_data=need_data),
        *_check_columns(config),
        *_check_metrics(config),
        *_check_evaluation(config),
        *_check_batches(config),
        *_check_engine(config),
        *_check_saving(config),
        *(Problem(*found) for found in find_path_problems(config)),
    ]
    return tuple(problem.line(wheres or {}) for problem in problems)


def _check_ranges(config: RunConfig) -> Iterator[Problem]:
    for name, low in _AT_LEAST.items():
        value = getattr(config, name)
        if value is not None and value < low:
            yield Problem(name, f"{value} is too small", f"Use {low:g} or more{_default_hint(name)}")
    for name in list_options():
        value, high = getattr(config, name), _AT_MOST.get(name, LARGEST_NUMBER)
        if isinstance(value, int if name not in _AT_MOST else (int, float)) and value > high:
            shown = value if isinstance(value, float) or value < 10**30 else "this number"
            yield Problem(name, f"{shown} is too large", f"Use at most {high}")
    for name in _ABOVE_ZERO:
        value = getattr(config, name)
        if value is not None and value <= 0:
            yield Problem(name, f"{value} is not above 0", f"Use a larger value{_default_hint(name)}")
    for name in _BELOW_ONE:
        if not 0 <= getattr(config, name) < 1:
            yield Problem(name, f"{getattr(config, name)} is not between 0 and 1", "Use a share from 0, below 1")
    for name in _WHOLE_FROM_ONE:
        value = getattr(config, name)
        if isinstance(value, float) and value > 1 and not value.is_integer():
            yield Problem(name, f"{value} is neither a share below 1 nor whole steps", f"Write {round(value)}")
    if config.max_steps == 0 or config.max_steps < -1:
        yield Problem("max_steps", f"{config.max_steps} is not a number of steps", "Use 1 or more, or -1 for epochs")
    if config.layerwise_lr_decay > 1:
        yield Problem("layerwise_lr_decay", f"{config.layerwise_lr_decay} is above 1", "Use a value such as 0.9")


def _default_hint(name: str) -> str:
    default = list_options()[name].default
    return "" if default is None else f"; the default is {default:g}"


def _check_sources(config: RunConfig, *, need_data: bool) -> Iterator[Problem]:
    given = [name for name in DATA_SOURCES if getattr(config, name) is not None]
    if len(given) > 1:
        yield Problem(given[1], f"cannot be used together with {given[0]}", "Give one source of training rows")
    if need_data and not given:
        yield Problem(
            "train_file", "no training rows are given", "Use --train_file FILE, --task_name mrpc or --dataset_name NAME"
        )
    if config.dataset_config_name is not None and config.dataset_name is None:
        yield Problem("dataset_config_name", "needs dataset_name", "Add --dataset_name glue, for example")
    for name in ("train_split_name", "validation_split_name", "test_split_name"):
        if getattr(config, name) is not None and config.train_file is not None:
            yield Problem(name, "has no meaning for files", "It names a split of task_name or dataset_name")
    files = {config.train_file: "train_file"} if config.train_file else {}
    for name in ("validation_file", "test_file"):
        path = getattr(config, name)
        if path is not None and path in files:
            yield Problem(
                name, f"is the same file as {files[path]}", "A score on training rows says nothing: use other rows"
            )
        elif path is not None:
            files[path] = name


def _check_columns(config: RunConfig) -> Iterator[Problem]:
    names = config.text_column_names
    if names is not None and not 1 <= len(names) <= 2:
        yield Problem("text_column_names", f"{len(names)} columns are named", "Name one, or two for a sentence pair")
    if names is not None and len(set(names)) < len(names):
        yield Problem("text_column_names", f"{names[0]!r} is named twice", "Name two different columns")
    if config.label_column_name is not None and config.label_column_name in (names or ()):
        yield Problem("label_column_name", f"{config.label_column_name!r} is also a text column", "Name another column")
    labels = config.label_names
    if labels is not None and len(set(labels)) < len(labels):
        twice = Counter(labels).most_common(1)[0][0]
        yield Problem("label_names", f"{twice!r} is named twice", "Name each label once")
    if config.delimiter is not None and len(config.delimiter) != 1:
        yield Problem(
            "delimiter", f"{config.delimiter!r} is not one character", "Use one, or comma, tab, semicolon, pipe"
        )
    yield from _check_encoding(config)
    yield from _check_class_weights(config)


def _check_encoding(config: RunConfig) -> Iterator[Problem]:
    if config.encoding is None:
        return
    import codecs

    try:
        codecs.lookup(config.encoding)
    except LookupError:
        known = ("utf-8", "utf-16", "latin-1", "cp1252", "shift_jis", "gb18030", "ascii")
        fix = did_you_mean(config.encoding, known) or "Use a name such as utf-8 or cp1252"
        yield Problem("encoding", f"{config.encoding!r} is not a known encoding", fix)


def _check_class_weights(config: RunConfig) -> Iterator[Problem]:
    weights = config.class_weights
    if weights is None:
        return
    if config.do_regression:
        yield Problem("class_weights", "has no meaning for regression", "Leave it out")
    if weights == "balanced":
        return
    if any(weight <= 0 for weight in weights):
        yield Problem("class_weights", f"{min(weights)} is not above 0", "Give each label a positive weight")
    if config.label_names is not None and len(weights) != len(config.label_names):
        yield Problem(
            "class_weights", f"{len(weights)} weights for {len(config.label_names)} labels", "Give one for each"
        )


def _check_metrics(config: RunConfig) -> Iterator[Problem]:
    for name in config.metric_name or ():
        if name not in METRIC_NAMES:
            yield _unknown_metric("metric_name", name, METRIC_NAMES)
    best = config.metric_for_best_model
    if best is None:
        return
    if best not in (*METRIC_NAMES, "loss"):
        yield _unknown_metric("metric_for_best_model", best, (*METRIC_NAMES, "loss"))
    elif config.metric_name is not None and best != "loss" and best not in config.metric_name:
        yield Problem("metric_for_best_model", f"{best} is not among metric_name", f"Add {best} to metric_name")


def _unknown_metric(option: str, name: str, known: tuple[str, ...]) -> Problem:
    near = did_you_mean(name, (*known, *METRIC_ALIASES))
    return Problem(option, f"{name!r} is not a metric", near or f"Use one of {', '.join(known)}")


def _check_evaluation(config: RunConfig) -> Iterator[Problem]:
    if config.eval_strategy == "steps" and config.eval_steps is None and config.logging_steps is None:
        yield Problem("eval_steps", "eval_strategy steps needs a number of steps", "Add eval_steps, such as 500")
    no_rows = config.validation_file is None and config.train_file is not None and config.validation_split_fraction == 0
    why = "eval_strategy is no" if config.eval_strategy == "no" else "there is no evaluation set" if no_rows else None
    if why is None:
        return
    if config.eval_strategy not in (None, "no"):
        yield Problem("eval_strategy", f"is {config.eval_strategy}, but {why}", "Give validation_file")
    fix = "Set eval_strategy to epoch or steps" if config.eval_strategy == "no" else "Give validation_file"
    if config.load_best_model_at_end:
        yield Problem("load_best_model_at_end", f"needs evaluations, but {why}", fix)
    if config.early_stopping_patience is not None:
        yield Problem("early_stopping_patience", f"needs evaluations, but {why}", fix)
    if config.save_strategy == "best":
        yield Problem("save_strategy", f"best needs evaluations, but {why}", fix)


def _check_batches(config: RunConfig) -> Iterator[Problem]:
    if config.token_budget is not None:
        longest = config.max_seq_length
        if longest is not None and config.token_budget < longest:
            yield Problem("token_budget", f"{config.token_budget} holds not one row of {longest} tokens", "Raise it")
        if config.train_sampling_strategy == "sequential":
            yield Problem(
                "token_budget", "sorts rows, so it contradicts train_sampling_strategy sequential", "Give one"
            )
        if config.num_train_epochs > 10_000:
            yield Problem("num_train_epochs", "is above 10000 with token_budget, which counts each epoch", "Lower it")
    if config.pad_to_max_length and config.padding_free == "on":
        yield Problem("padding_free", "on contradicts pad_to_max_length", "Give one of them")


def _check_engine(config: RunConfig) -> Iterator[Problem]:
    if config.bf16 and config.fp16:
        yield Problem("fp16", "cannot be used together with bf16", "Give one of them; bf16 where the GPU has it")
    if config.torch_compile and config.cuda_graphs == "on":
        yield Problem("cuda_graphs", "on cannot be used together with torch_compile", "Give one of them")
    if config.use_cpu and config.cuda_graphs == "on":
        yield Problem("cuda_graphs", "on needs a GPU, but use_cpu is set", "Leave one of them out")
    options = (config.lr_scheduler_type, config.lr_scheduler_kwargs, config.learning_rate)
    for text, fix in schedule_problems(*options):
        yield Problem("lr_scheduler_kwargs", text, fix)


def _check_saving(config: RunConfig) -> Iterator[Problem]:
    if config.weights_only and not config.resume_from_checkpoint:
        yield Problem("weights_only", "needs resume_from_checkpoint", "Add --resume_from_checkpoint")
    if config.save_strategy == "no" and config.load_best_model_at_end:
        yield Problem(
            "load_best_model_at_end", "needs checkpoints, but save_strategy is no", "Set save_strategy to epoch"
        )
    trackers = ("none", "all", "tensorboard", "wandb", "trackio", "mlflow")
    for name in config.report_to:
        if name not in trackers:
            fix = did_you_mean(name, trackers) or f"Use one of {', '.join(trackers)}"
            yield Problem("report_to", f"{name!r} is not a known tracker", fix)
