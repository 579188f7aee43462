"""The ways to train that `--recipe best` tries beside `auto`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunesmith.config.options import RunConfig

PUSH = 0.02
"""Of adversarial steps: gained most on the tasks that it was chosen on (docs/research/recipes.md)."""
LONG_PAIR_START = 600
"""Steps: with 500 rows they gained twice what the 200 of `auto` did."""


@dataclass(frozen=True)
class Variant:
    """A way to train. `options` are set over the given config.

    `settled` is what `auto` decided on the first fold, for the other folds: models of one kind. With all rows it decides anew.
    `expected` to be better, from other tasks: it is deployed unless held-out rows show it worse.
    """

    name: str
    said: str
    options: Mapping[str, Any] = field(default_factory=dict)
    settled: Mapping[str, Any] = field(default_factory=dict)
    expected: bool = False


def variations(lead: Variant, decided: Mapping[str, Any], config: RunConfig) -> Iterator[Variant]:
    """Other values of what was left open, the most promising first. A flag wins: what is given is not varied."""
    push = {} if config.adversarial else {"adversarial": PUSH}
    longer: dict[str, Any] = {}
    if config.pair_start is None and decided["pair_start"]:
        longer = {"pair_start": max(LONG_PAIR_START, 2 * decided["pair_start"])}
    tried = [{**longer, **push}, longer, push] if longer and push else [longer or push]
    if config.pooling is None:
        tried.append({"pooling": "first" if decided["pooling"] == "mean" else "mean"})
    for number, options in enumerate(tried, 1):
        if options:
            said = ", ".join(f"{name} {value}" for name, value in options.items())
            expected = "pooling" not in options
            yield Variant(f"{lead.name}-{number}", said, {**lead.options, **options}, decided, expected)
