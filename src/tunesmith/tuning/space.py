"""What a search varies: options of a run with a range or a list of values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tunesmith.config.convert import convert
from tunesmith.config.load import raise_problems, suggest
from tunesmith.config.schema import RunConfig, list_options

USUAL = (
    "learning_rate=1e-5..3e-4",
    "num_train_epochs=2,3,5,8",
    "per_device_train_batch_size=8,16,32",
    "layerwise_lr_decay=0.7..1.0",
    "warmup_steps=0.0..0.3",
)
"""What is varied when nothing is said, less the options that have a value already."""
FIXED = ("output_dir", "run_name", "folds", "fold", "seeds", "train_file", "validation_file", "test_file", "data_seed")
"""Options that a search does not vary: the trials would not be judged by the same rows, or not be found."""


@dataclass(frozen=True)
class Vary:
    """One option: a list of `values`, or a range from `low` to `high`."""

    name: str
    values: tuple[Any, ...] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False

    @property
    def log(self) -> bool:
        """Whether factors count, not differences: from a tenfold range on."""
        return not self.values and self.low > 0 and self.high / self.low >= 10

    def text(self) -> str:
        """As it is written on the command line."""
        values = ",".join(map(str, self.values)) if self.values else f"{self.low:g}..{self.high:g}"
        return f"{self.name}={values}"


def read_space(words: Iterable[str], config: RunConfig) -> tuple[Vary, ...]:
    """The space of `--vary NAME=LOW..HIGH NAME=a,b,c`; all problems are listed at once."""
    words = tuple(words)
    if not words:
        words = tuple(w for w in USUAL if getattr(config, w.partition("=")[0]) is None)
    found, problems = [], []
    for word in words:
        try:
            found.append(_read_word(word))
        except ValueError as error:
            problems.append(f"--vary {word}: {error}")
    names = [v.name for v in found]
    problems += [
        f"--vary {name}: is given twice. Give it once" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    if not found and not problems:
        problems.append("every option that a search varies by itself is given. Say what to vary: --vary NAME=LOW..HIGH")
    raise_problems(problems)
    return tuple(found)


def _read_word(word: str) -> Vary:
    name, equals, text = word.partition("=")
    name = name.strip().lstrip("-").replace("-", "_")
    option = list_options().get(name)
    if option is None:
        hint = suggest(name, tuple(list_options()))
        raise ValueError(f"unknown option{f'. {hint}' if hint else '. `tunesmith train --help` lists all'}")
    if name in FIXED:
        raise ValueError("cannot be varied: trials are compared on the same rows. Leave it out")
    if not equals or not text:
        raise ValueError(f"has no values. Write {name}=LOW..HIGH or {name}=a,b,c")
    if ".." not in text:
        return Vary(name, tuple(convert(part.strip(), option.hint) for part in text.split(",")))
    ends = [convert(part.strip(), option.hint) for part in text.split("..", 1)]
    if not all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in ends) or not ends[0] < ends[1]:
        raise ValueError("is not a range of numbers. Write LOW..HIGH")
    whole = all(isinstance(end, int) for end in ends)
    return Vary(name, low=ends[0], high=ends[1], whole=whole)
