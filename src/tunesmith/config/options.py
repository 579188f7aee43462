"""The options of a run: one table with name, type, range, default and help.

Flags, config files and the reference page are made from this table. The string below a field is its help text.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Range:
    """The numbers that an option accepts. `share` means 0 <= x < 1."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    share: bool = False
    whole_from_one: bool = False
    """Values below 1 are a share of all steps, values of 1 or more a number of steps: 1.5 is neither."""


FromOne = Annotated[int, Range(at_least=1)]
FromZero = Annotated[int, Range(at_least=0)]
NotNegative = Annotated[float, Range(at_least=0)]
Positive = Annotated[float, Range(above=0)]
Share = Annotated[float, Range(share=True)]
Steps = Annotated[int | float, Range(above=0, whole_from_one=True)]
Seed = Annotated[int, Range(at_least=0, at_most=2**32 - 1)]  # the largest seed of NumPy
GlueTaskName = Literal["cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "wnli"]
AutoOnOff = Literal["auto", "on", "off"]

ScheduleName = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The complete configuration of a run. Names and meanings follow transformers v5 if it has the option.

    The string below a field is its help; a comment starts a section.
    """

    # Data
    train_file: str | None = None
    """Training data: csv, tsv or jsonl, optionally gzipped (.gz); xlsx, parquet or arrow."""
    validation_file: str | None = None
    """Labeled data to evaluate on during training. Default: a tenth of the training data."""
    test_file: str | None = None
    """Data to evaluate (if labeled) or predict (if not) once, after training."""
    task_name: GlueTaskName | None = None
    """Name of a GLUE task to train on instead of a file."""
    dataset_name: str | None = None
    """Hub id of a dataset, or a folder written by `save_to_disk`, to train on instead of a file."""
    dataset_config_name: str | None = None
    """Configuration of `dataset_name`, such as mrpc for glue."""
    train_split_name: str | None = None
    """Dataset split to train on. Default: train."""
    validation_split_name: str | None = None
    """Dataset split to evaluate on. Default: validation, or a split with a similar name."""
    test_split_name: str | None = None
    """Dataset split to test on. Default: test, if it exists."""
    validation_split_fraction: Share = 0.1
    """Share of the training data to hold out (seeded, stratified) if there is no validation data. 0: none."""
    folds: Annotated[int, Range(at_least=2, at_most=1000)] | None = None
    """Number of cross-validation folds: trains one model per fold and pools the scores."""
    fold: FromOne | None = None
    """Train only this fold of `folds`."""
    seeds: Annotated[int, Range(at_least=1, at_most=1000)] = 1
    """Number of models to train with consecutive seeds, to see how much the score depends on chance."""
    max_train_samples: FromOne | None = None
    """Maximum number of training examples, sampled with the seed and stratified by label."""
    max_eval_samples: FromOne | None = None
    """Maximum number of validation and of test examples, sampled in the same way."""

    # Columns and reading
    text_column_names: tuple[str, ...] | None = None
    """Text column, two columns for text pairs, or more (also numbers) to render into one text. Default: detected."""
    label_column_name: str | None = None
    """Label column, several 0/1 columns, or one probability column per class, separated by commas. Default: detected."""
    label_confidence_column_name: str | None = None
    """Column with the probability that the label is right. The rest is spread evenly over the other classes."""
    label_separator: str | None = None
    """Separator of labels in a cell: a character, comma, semicolon, pipe, slash, json (list) or none. Default: detected."""
    positive_label: str | None = None
    """Class that F1, precision and recall refer to in binary tasks. Default: 1 for 0/1 labels, otherwise the rarer class."""
    merge_label_variants: bool = False
    """Merge labels that differ only in case, spaces, Unicode form or invisible characters."""
    split_column_name: str | None = None
    """Column with the split of each row; none: ignore it. Default: a column named split, set, subset or partition."""
    skip_bad_rows: bool = False
    """Skip rows with missing text or label, or with a wrong number of columns. They are listed in bad_rows.jsonl."""
    label_names: tuple[str, ...] | None = None
    """All label names, in id order. Default: sorted; in binary tasks the positive label comes second."""
    do_regression: bool | None = None
    """Treat the label as a number (true) or as a class (false). Default: detected."""
    encoding: str | None = None
    """Text encoding of the files, such as cp1252. Default: UTF-8, or the one of the byte order mark."""
    delimiter: str | None = None
    """Column separator of csv and tsv files. Default: by file name, checked against the header."""
    quoting: Literal["minimal", "none"] | None = None
    """How quotes are read. minimal: as in RFC 4180. none: as plain characters. Default: minimal for csv, none for tsv."""
    sheet_name: str | None = None
    """Sheet of a spreadsheet. Default: the one that contains a table."""
    allow_empty_text: bool = False
    """Accept rows with empty text."""
    gold_file: str | None = None
    """Human labels, if the training labels are from an LLM: measures and corrects those, and all scores are on human labels."""
    labels_file: str | None = None
    """Corrected labels: a review file of `tunesmith audit` whose label column was edited."""
    strict_data: bool = False
    """Stop with exit code 3 if the data audit reports a warning."""
    allow_changed_data: bool = False
    """Allow resuming when the data has changed since the checkpoint. The change is recorded in the run."""

    # Tokens and batches
    max_seq_length: Annotated[int, Range(at_least=3)] | None = None
    """Maximum number of tokens per example; longer ones are truncated. Default: the limit of the model, at most 512."""
    long_texts: Literal["auto", "head", "head_tail", "full"] = "auto"
    """How to read longer examples: head, head_tail or full (the limit of the model). auto: by the recipe."""
    cache_dir: str | None = None
    """Folder for cached tokens and downloads. Default: ~/.cache/tunesmith and the Hugging Face cache."""
    train_sampling_strategy: Literal["random", "sequential", "group_by_length"] | None = None
    """Order of the training examples. Default: group_by_length (similar lengths per batch); random on a GPU without padding."""

    # Model
    model_name_or_path: str | None = None
    """Folder or Hub id of an encoder. Default: the bundled all-MiniLM-L6-v2."""
    tokenizer_name: str | None = None
    """Folder or Hub id of a different tokenizer. Default: the tokenizer of the model."""
    model_revision: str = "main"
    """Branch, tag or commit of a Hub model."""
    ignore_mismatched_sizes: bool = False
    """Re-initialize the classification head if its size doesn't match the labels, instead of failing."""
    freeze: tuple[str, ...] = ()
    """Parts that are not trained: embeddings, encoder (everything except the head), layers.3 or layers.0-3."""
    pooling: Literal["pooler", "first", "mean"] | None = None
    """How token vectors are pooled for the head: pooler (the model's own), first (token) or mean. Default: by the recipe."""
    head_start: AutoOnOff = "auto"
    """Initialize the head with a linear probe instead of random values. auto: by the recipe."""
    pair_start: FromZero | None = None
    """For text pairs: warm-up steps without labels that distill separate text embeddings. 0: off. Default: by the recipe."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: needs less memory and about a third more time."""

    # Training
    recipe: Literal["auto", "hf", "best"] = "auto"
    """How to choose options you don't set. auto: from model and data. hf: transformers defaults. best: search in time_budget."""
    time_budget: str | None = None
    """Time limit of --recipe best or `tunesmith search`, such as 20m or 2h."""
    num_train_epochs: Annotated[float, Range(above=0, at_most=1_000_000)] | None = None
    """Number of passes over the training data; may be a fraction. Default: by the recipe (hf: 3)."""
    max_steps: int = -1
    """Number of optimizer steps; overrides `num_train_epochs`. -1: unset."""
    per_device_train_batch_size: FromOne | None = None
    """Training examples per batch and device. Default: by the recipe (hf: 8)."""
    per_device_eval_batch_size: FromOne = 8
    """Evaluation examples per batch and device."""
    gradient_accumulation_steps: Annotated[int, Range(at_least=1, at_most=1_000_000_000)] = 1
    """Number of batches per optimizer step."""
    learning_rate: Positive | None = None
    """Peak learning rate, after warmup. Default: by the recipe (hf: 5e-05)."""
    layerwise_lr_decay: Positive | None = None
    """Learning rate of each layer relative to the layer above it. Default: by the recipe (hf: 1)."""
    head_lr_scale: Positive = 1.0
    """Learning rate of the head relative to the top layer."""
    lr_scheduler_type: ScheduleName = "linear"
    """Learning rate schedule."""
    warmup_steps: Annotated[int | float, Range(at_least=0, whole_from_one=True)] | None = None
    """Number of warmup steps; below 1: share of all steps. Default: by the recipe (hf: 0)."""
    optim: Literal["adamw_torch_fused", "adamw_torch"] = "adamw_torch_fused"
    """Optimizer."""
    weight_decay: NotNegative = 0.0
    """AdamW weight decay, not applied to biases and normalization layers."""
    adam_beta1: Share = 0.9
    """AdamW beta1."""
    adam_beta2: Share = 0.999
    """AdamW beta2."""
    adam_epsilon: Positive = 1e-8
    """AdamW epsilon."""
    max_grad_norm: NotNegative = 1.0
    """Maximum gradient norm; larger gradients are clipped. 0: no clipping."""
    label_smoothing_factor: Share = 0.0
    """Label smoothing: share of the target that is spread over all labels."""
    adversarial: NotNegative = 0.0
    """Adversarial training: size of the perturbation relative to the norm of the word embeddings. 0: off."""
    class_weights: Literal["balanced"] | tuple[float, ...] | None = None
    """Weight of each label in the loss: balanced, or one number per label in id order."""
    move_thresholds: bool = False
    """Fit decision thresholds for F1 on the validation data. They are kept if the gain exceeds its standard error."""
    seed: Seed = 42
    """Random seed of the head, dropout, example order and split."""
    data_seed: Seed | None = None
    """Random seed of only the example order and the split. Default: `seed`."""
    full_determinism: bool = False
    """Use only deterministic kernels, so that repeated runs are bit-identical; may be slower."""

    # Evaluation and stopping
    eval_strategy: Literal["no", "steps", "epoch"] | None = None
    """When to evaluate. Default: epoch if there is validation data, otherwise no."""
    eval_steps: Steps | None = None
    """Steps between evaluations with --eval_strategy steps; below 1: share of all steps. Default: `logging_steps`."""
    train_sample_size: FromZero = 256
    """Number of training examples to evaluate with the validation set, for comparable curves. 0: none."""
    metric_name: tuple[str, ...] | None = None
    """Metrics to report. Default: by task; for GLUE tasks the official ones."""
    metric_for_best_model: str | None = None
    """Metric that selects the best checkpoint. Default: the first metric of the task."""
    load_best_model_at_end: bool | None = None
    """Keep the best model instead of the last one. Default: true if there is validation data."""
    early_stopping_patience: FromOne | None = None
    """Stop after this many evaluations without improvement. Default: never."""

    # Precision and speed
    bf16: bool | None = None
    """Train in bfloat16 with float32 weights. Default: true on a GPU that supports it, false on a CPU."""
    fp16: bool = False
    """Train in float16 with loss scaling and float32 weights. Requires a GPU."""
    tf32: bool | None = None
    """Allow TF32 matmuls on NVIDIA GPUs. Default: the setting of torch."""
    use_cpu: bool = False
    """Train on the CPU even if there is a GPU."""
    padding_free: AutoOnOff = "auto"
    """Pack batches so that no padding is computed. Results don't change."""
    restrict_vocabulary: AutoOnOff = "auto"
    """Train only the embeddings of tokens that occur in the data. Results don't change."""
    cls_only_last_layer: AutoOnOff = "auto"
    """Compute the last layer for the first token only, if the head reads nothing else. Results don't change."""
    fused_layers: AutoOnOff = "auto"
    """Use fused kernels for layers on a GPU in bf16 or fp16. Results don't change."""
    cuda_graphs: AutoOnOff = "auto"
    """Capture training steps as CUDA graphs on a single GPU. Results don't change."""

    # Multiple devices
    ddp_timeout: Annotated[int, Range(at_least=1, at_most=10_000_000)] = 1800
    """Seconds that a rank waits for the others before it fails."""

    # Output
    output_dir: str | None = None
    """Run folder. Default: runs/<run_name>."""
    run_name: str | None = None
    """Name of the run. Default: made from the names of data and model."""
    save_strategy: Literal["no", "steps", "epoch", "best"] | None = None
    """When to save a checkpoint. Default: with each evaluation, or once per epoch without validation data."""
    save_steps: Steps = 500
    """Steps between checkpoints with --save_strategy steps; below 1: share of all steps."""
    save_total_limit: FromOne | None = 1
    """Number of latest checkpoints to keep in addition to the best one. none: keep all."""
    resume_from_checkpoint: bool | None = None
    """Require a checkpoint to resume from. By default, a run is resumed if its folder contains one."""
    logging_steps: Steps | None = None
    """Steps between printed lines if there is no progress bar; below 1: share of all steps. Default: once per 10%."""
    disable_tqdm: bool | None = None
    """Print plain lines instead of progress bars. Default: false on a terminal."""
    report_to: tuple[str, ...] = ("none",)
    """Trackers to use in addition to the event log: tensorboard, wandb, trackio, mlflow or none."""

    def __post_init__(self) -> None:
        """Normalize spellings: `tab` becomes a tab, `eval_mcc` becomes `matthews_correlation`, `~` the home folder."""
        for name in PATH_OPTIONS:
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, os.path.expanduser(value))
        if self.delimiter is not None:
            object.__setattr__(self, "delimiter", DELIMITER_WORDS.get(self.delimiter.lower(), self.delimiter))
        if self.metric_for_best_model is not None:
            object.__setattr__(self, "metric_for_best_model", _spell_metric(self.metric_for_best_model))
        if self.metric_name is not None:
            object.__setattr__(self, "metric_name", tuple(_spell_metric(name) for name in self.metric_name))

    @property
    def name(self) -> str:
        """Return `run_name`, or a name made from the data and the model."""
        if self.run_name is not None:
            return self.run_name
        source = self.task_name or self.dataset_config_name or self.dataset_name
        if source is None:
            bare = (self.train_file or "run").removesuffix(".gz")
            ending = Path(bare).suffix
            source = bare.removesuffix(ending) if ending[1:].isalpha() else bare
        model = self.model_name_or_path or "all-MiniLM-L6-v2"
        return "-".join(Path(part.rstrip("/\\")).name or "run" for part in (source, model))

    @property
    def trains_several(self) -> bool:
        """Return whether `folds` or `seeds` make this several runs."""
        return self.seeds > 1 or (self.folds is not None and self.fold is None)

    @property
    def decided(self) -> Recipe:
        """Return the values that are set or decided by the recipe, with the defaults of transformers for the rest."""
        values = {f.name: getattr(self, f.name) for f in fields(Recipe)}
        return Recipe(**{name: value for name, value in values.items() if value is not None})

    @property
    def evaluation_steps(self) -> int | float | None:
        """Return the steps between evaluations; with --eval_strategy steps the default is `logging_steps`."""
        if self.eval_strategy != "steps":
            return self.eval_steps
        return self.logging_steps if self.eval_steps is None else self.eval_steps

    @property
    def run_folder(self) -> Path:
        """Return `output_dir`, or `runs/<name>`."""
        return Path(self.output_dir) if self.output_dir is not None else Path("runs") / self.name


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options that a recipe decides. The defaults are those of `transformers.TrainingArguments` (`--recipe hf`)."""

    pooling: Literal["pooler", "first", "mean"] = "pooler"
    num_train_epochs: float = 3.0
    per_device_train_batch_size: int = 8
    learning_rate: float = 5e-5
    layerwise_lr_decay: float = 1.0
    warmup_steps: int | float = 0
    pair_start: int = 0


DELIMITER_WORDS = {"comma": ",", "tab": "\t", "\\t": "\t", "semicolon": ";", "pipe": "|", "space": " "}
"""Names of separators that are hard to type in a shell."""
PATH_OPTIONS = (
    *("output_dir", "cache_dir", "train_file", "validation_file", "test_file", "gold_file", "labels_file"),
    *("model_name_or_path", "tokenizer_name", "dataset_name"),
)
"""Options that are, or may be, the path of a file or folder."""


@dataclass(frozen=True)
class Reading:
    """How files are read: options of `train` and `predict` under the same names."""

    encoding: str | None = None
    delimiter: str | None = None
    quoting: str | None = None
    sheet_name: str | None = None
    allow_empty_text: bool = False
    skip_bad_rows: bool | None = None
    """Keep ragged rows, empty and with the reason; None if the user has no such option."""

    @classmethod
    def of(cls, options: Any) -> Reading:
        """Return the options of a config or of parsed arguments."""
        return cls(**{f.name: getattr(options, f.name) for f in fields(cls) if hasattr(options, f.name)})


READ_AS_USUAL = Reading()


def _spell_metric(name: str) -> str:
    """Return the canonical name of a metric; an unknown name is returned unchanged."""
    from tunesmith.metrics.table import canonical_name, metric_names

    plain = canonical_name(name)
    return plain if plain in (*metric_names(), "loss") else name


@dataclass(frozen=True)
class Option:
    """One field of RunConfig: `hint` is its resolved type, `group` the title of its section."""

    name: str
    hint: Any
    default: Any
    help: str
    group: str
    range: Range

    @property
    def kinds(self) -> tuple[Any, ...]:
        """Return the types of a union, or the only type."""
        return get_args(self.hint) if get_origin(self.hint) in (Union, UnionType) else (self.hint,)

    @property
    def is_list(self) -> bool:
        """Return whether the option accepts several values."""
        return any(get_origin(kind) is tuple for kind in self.kinds)

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the fixed values that the option accepts, if any."""
        return tuple(str(c) for kind in self.kinds if get_origin(kind) is Literal for c in get_args(kind))


@cache
def list_options() -> dict[str, Option]:
    """Return all options by name, in the order of the table."""
    hints = get_type_hints(RunConfig, include_extras=True)
    plain = get_type_hints(RunConfig)
    defaults = {f.name: f.default for f in fields(RunConfig)}
    source = Path(__file__).read_text(encoding="utf-8")
    listed: dict[str, Option] = {}
    group = ""
    for title, name, text in re.findall(r'^    (?:# (.+)|(\w+): .+\n    """(.+)""")$', source, re.MULTILINE):
        group = title or group
        if name in defaults and name not in listed:
            listed[name] = Option(name, plain[name], defaults[name], text, group, _range_of(hints[name]) or Range())
    return listed


def _range_of(hint: Any) -> Range | None:
    """Return the range of a type or of a member of a union."""
    if get_origin(hint) is Annotated:
        return next(note for note in hint.__metadata__ if isinstance(note, Range))
    return next((found for part in get_args(hint) if (found := _range_of(part)) is not None), None)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Return name -> value in the order of the table, with lists instead of tuples."""
    values = {name: getattr(config, name) for name in list_options()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def dump_config(config: RunConfig) -> str:
    """Return the config as YAML with the help above each option."""
    lines: list[str] = []
    group = None
    for option in list_options().values():
        if option.group != group:
            group = option.group
            lines += ["", f"# --- {group} ---"]
        lines += [f"# {option.help}", f"{option.name}: {dump_value(getattr(config, option.name))}"]
    return "\n".join(lines).lstrip("\n") + "\n"


def dump_value(value: Any) -> str:
    """Return one value as a line of YAML, written as JSON: text is quoted, so that no reader converts it."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() and char != "\ufeff" else _escape(char) for char in text)


def _escape(char: str) -> str:
    return f"\\U{ord(char):08x}" if ord(char) > 0xFFFF else f"\\u{ord(char):04x}"
