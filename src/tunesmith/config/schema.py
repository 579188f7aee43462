"""The config of a run: one frozen dataclass with flat names, and what is known about each of its options.

The string under a field is its only help text: `--help`, the reference page and the error messages read it from there.
"""

from __future__ import annotations

import ast
import os
import sys
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_type_hints

from tunesmith.config.data_options import DataOptions, ReadingOptions, TokenOptions
from tunesmith.config.metric_names import spell_metric
from tunesmith.config.model_options import ModelOptions, SpeedOptions
from tunesmith.config.output_options import OutputOptions
from tunesmith.config.rank_options import RankOptions
from tunesmith.config.train_options import EvaluationOptions, TrainOptions

GROUPS: tuple[type, ...] = (
    DataOptions,
    ReadingOptions,
    TokenOptions,
    ModelOptions,
    TrainOptions,
    EvaluationOptions,
    SpeedOptions,
    RankOptions,
    OutputOptions,
)
"""The sections of the config, in the order a person reads them."""

DELIMITER_WORDS = {"comma": ",", "tab": "\t", "\\t": "\t", "semicolon": ";", "pipe": "|", "space": " "}
"""Separators that are hard to type in a shell."""


PATH_OPTIONS = (
    *("output_dir", "cache_dir", "resume_from_checkpoint", "train_file", "validation_file", "test_file"),
    *("model_name_or_path", "tokenizer_name", "config_name", "dataset_name"),
)
"""Options that are, or may be, the path of a file or folder."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(
    OutputOptions,
    RankOptions,
    SpeedOptions,
    EvaluationOptions,
    TrainOptions,
    ModelOptions,
    TokenOptions,
    ReadingOptions,
    DataOptions,
):
    """Everything a run is made from. Names and meanings follow transformers v5 where it has them."""

    def __post_init__(self) -> None:
        """One spelling inside: a tab is a tab, `eval_mcc` is `matthews_correlation`, `~` is the home folder."""
        for name in PATH_OPTIONS:
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, os.path.expanduser(value))
        if self.delimiter is not None:
            object.__setattr__(self, "delimiter", DELIMITER_WORDS.get(self.delimiter.lower(), self.delimiter))
        if self.metric_for_best_model is not None:
            object.__setattr__(self, "metric_for_best_model", spell_metric(self.metric_for_best_model))
        if self.metric_name is not None:
            object.__setattr__(self, "metric_name", tuple(spell_metric(name) for name in self.metric_name))

    @property
    def name(self) -> str:
        """`run_name`, or a name made from the data and the model."""
        if self.run_name is not None:
            return self.run_name
        source = self.task_name or self.dataset_config_name or self.dataset_name or self.train_file or "run"
        model = self.model_name_or_path or "all-MiniLM-L6-v2"
        return f"{_stem(source)}-{_stem(model)}"

    @property
    def evaluation_steps(self) -> int | float | None:
        """Steps between evaluations, or a share of all: with eval_strategy steps `logging_steps` by default."""
        if self.eval_strategy != "steps":
            return self.eval_steps
        return self.logging_steps if self.eval_steps is None else self.eval_steps

    @property
    def run_folder(self) -> Path:
        """`output_dir`, or `runs/<name>`."""
        return Path(self.output_dir) if self.output_dir is not None else Path("runs") / self.name


@dataclass(frozen=True)
class Option:
    """One field of RunConfig. `hint` is its resolved type, `group` the title of its section."""

    name: str
    hint: Any
    default: Any
    help: str
    group: str


@cache
def list_options() -> dict[str, Option]:
    """All options by name, in reading order."""
    hints = get_type_hints(RunConfig)
    options: dict[str, Option] = {}
    for group in GROUPS:
        texts = _help_texts(group)
        for spec in fields(group):
            options[spec.name] = Option(
                spec.name, hints[spec.name], _default(spec), texts[spec.name], group.__doc__ or group.__name__
            )
    return options


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Name -> value in reading order; tuples become lists, so that it can be written as JSON."""
    values = {name: getattr(config, name) for name in list_options()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _default(spec: Field[Any]) -> Any:
    return spec.default_factory() if spec.default_factory is not MISSING else spec.default


def _stem(source: str) -> str:
    """The last part of a path or Hub id, without the suffixes of data files."""
    text = Path(source.rstrip("/\\")).name or "run"
    for suffix in (".gz", ".csv", ".tsv", ".jsonl", ".json", ".parquet", ".arrow"):
        text = text.removesuffix(suffix)
    return text or "run"


def _help_texts(group: type) -> dict[str, str]:
    """The string under each field of a class, read from its source."""
    tree = ast.parse(Path(sys.modules[group.__module__].__file__ or "").read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == group.__name__)
    texts: dict[str, str] = {}
    for node, after in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(after, ast.Expr):
            texts[node.target.id] = str(ast.literal_eval(after.value))
    return texts
