"""The ways to train that `--recipe best` tries beside `auto`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tunesmith.config.schema import RunConfig

PUSH = 0.02
"""Of adversarial steps: gained most on the tasks that it was chosen on (docs/how_to/better_models.md)."""


@dataclass(frozen=True)
class Variant:
    """A way to train. `options` are set over the given config, `epochs` multiplies the passes that `auto` makes.

    `settled` is what `auto` decided on the first fold, for the other folds: models of one kind. With all rows it decides anew.
    `expected` to be better, from other tasks: it is deployed unless held-out rows show it worse.
    """

    name: str
    said: str
    options: Mapping[str, Any] = field(default_factory=dict)
    epochs: float = 1.0
    settled: Mapping[str, Any] = field(default_factory=dict)
    expected: bool = False


def variations(lead: Variant, decided: Mapping[str, Any], config: RunConfig) -> Iterator[Variant]:
    """Other values of what was left open, the most promising first. A flag wins: what is given is not varied."""
    rates = [float(f"{decided['learning_rate'] * factor:.2g}") for factor in (2.0, 0.5)]
    tried: list[tuple[str, Any]] = [
        ("adversarial", PUSH),
        ("num_train_epochs", None),
        ("pooling", "first" if decided["pooling"] == "mean" else "mean"),
        *(("learning_rate", rate) for rate in rates),
        ("per_device_train_batch_size", 2 * decided["per_device_train_batch_size"]),
    ]
    for number, (name, value) in enumerate(tried, 1):
        longer = value is None
        if not getattr(config, name) and not (longer and config.max_steps > 0):
            options = {**lead.options} if longer else {**lead.options, name: value}
            yield Variant(
                f"{lead.name}-{number}",
                "twice the epochs" if longer else f"{name} {value}",
                options,
                epochs=2.0 if longer else 1.0,
                settled=decided,
                expected=name == "adversarial",
            )
