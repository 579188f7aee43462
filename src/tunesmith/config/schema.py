"""The config of a run: one frozen dataclass with flat names, and what is known about each of its options.

The string under a field is its only help text: `--help`, the reference page and the error messages read it from there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tunesmith.config import options
from tunesmith.config.convert import Range
from tunesmith.config.options import Options


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Options of the same names. The defaults are those of `transformers.TrainingArguments`: `--recipe hf`."""

    pooling: Literal["pooler", "first", "mean"] = "pooler"
    num_train_epochs: float = 3.0
    per_device_train_batch_size: int = 8
    learning_rate: float = 5e-5
    layerwise_lr_decay: float = 1.0
    head_lr_scale: float = 1.0
    warmup_steps: int | float = 0
    weight_decay: float = 0.0
    pair_start: int = 0


DELIMITER_WORDS = {"comma": ",", "tab": "\t", "\\t": "\t", "semicolon": ";", "pipe": "|", "space": " "}
"""Separators that are hard to type in a shell."""


PATH_OPTIONS = (
    *("output_dir", "cache_dir", "resume_from_checkpoint", "train_file", "validation_file", "test_file", "labels_file"),
    *("model_name_or_path", "tokenizer_name", "config_name", "dataset_name"),
)
"""Options that are, or may be, the path of a file or folder."""


def _spell_metric(name: str) -> str:
    """The name a metric is reported under. An unknown name comes back as it is."""
    from tunesmith.metrics.table import canonical_name, metric_names

    plain = canonical_name(name)
    return plain if plain in (*metric_names(), "loss") else name


@dataclass(frozen=True, kw_only=True)
class RunConfig(Options):
    """Everything a run is made from. Names and meanings follow transformers v5 where it has them."""

    def __post_init__(self) -> None:
        """Normalises spellings: `tab` becomes a tab, `eval_mcc` becomes `matthews_correlation`, `~` the home folder."""
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
        """`run_name`, or a name made from the data and the model."""
        if self.run_name is not None:
            return self.run_name
        given = self.task_name or self.dataset_config_name or self.dataset_name
        source = given or _without_ending(self.train_file or "run")
        model = self.model_name_or_path or "all-MiniLM-L6-v2"
        return f"{_stem(source)}-{_stem(model.split(',')[0])}"

    @property
    def decided(self) -> Recipe:
        """What is given or was decided by the recipe; transformers' values for the rest."""
        values = {f.name: getattr(self, f.name) for f in fields(Recipe)}
        return Recipe(**{name: value for name, value in values.items() if value is not None})

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
    range: Range


@cache
def list_options() -> dict[str, Option]:
    """All options by name, in reading order."""
    hints = get_type_hints(RunConfig, include_extras=True)
    plain = get_type_hints(RunConfig)
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(RunConfig)}
    source = Path(options.__file__).read_text(encoding="utf-8")
    listed: dict[str, Option] = {}
    group = ""
    for title, name, text in re.findall(r'^    (?:# (.+)|(\w+): .+\n    """(.+)""")$', source, re.MULTILINE):
        group = title or group
        if name in defaults:
            limits = _annotation(hints[name]) or Range()
            hint = plain[name] if isinstance(limits, Range) else Literal.__getitem__(tuple(limits))
            known = limits if isinstance(limits, Range) else Range()
            listed[name] = Option(name, hint, defaults[name], text, group, known)
    return listed


def _annotation(hint: Any) -> Any:
    """The annotation of a type, or of a part of a union."""
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    return next((found for part in get_args(hint) if (found := _annotation(part)) is not None), None)


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Name -> value in reading order; tuples become lists, so that it can be written as JSON."""
    values = {name: getattr(config, name) for name in list_options()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _without_ending(file: str) -> str:
    """The path of a data file without its ending, whichever formats can be read."""
    bare = file.removesuffix(".gz")
    ending = Path(bare).suffix
    return bare.removesuffix(ending) if ending[1:].isalpha() else bare


def _stem(source: str) -> str:
    """The last part of a path or Hub id."""
    return Path(source.rstrip("/\\")).name or "run"


def dump_config(config: RunConfig, *, only: Iterable[str] | None = None, header: str = "") -> str:
    """The config as YAML: one line an option, its help above it, a title for each section. `only` limits it to some options."""
    wanted = set(list_options()) if only is None else set(only)
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    group = None
    for option in list_options().values():
        if option.name not in wanted:
            continue
        if option.group != group:
            group = option.group
            lines += ["", f"# --- {group} ---"]
        lines += [f"# {option.help}", f"{option.name}: {dump_value(getattr(config, option.name))}"]
    return "\n".join(lines).lstrip("\n") + "\n"


def dump_value(value: Any) -> str:
    """One value as YAML on one line, written as JSON, which YAML reads: text is quoted, so that no reader converts it."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() and char != "\ufeff" else _escape(char) for char in text)


def _escape(char: str) -> str:
    return f"\\U{ord(char):08x}" if ord(char) > 0xFFFF else f"\\u{ord(char):04x}"
