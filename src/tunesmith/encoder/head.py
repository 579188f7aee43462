"""What a trained classification head says about itself: the names of its outputs, in order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.labels import match_names


@dataclass(frozen=True)
class HeadNames:
    """`names` in id order; empty when the model has no trained head, or one whose outputs were never named."""

    names: tuple[str, ...]

    def fits(self, names: Sequence[str]) -> bool:
        """Whether these labels, in this order, mean what the outputs of the head mean."""
        return match_names(self.names, names) == tuple(names)

    def refusal(self, names: Sequence[str], where: str) -> ConfigError:
        """The error for labels that could mean anything to this head."""
        theirs, ours = ", ".join(self.names[:6]), ", ".join(names[:6])
        if match_names(self.names, names) is not None:
            fix = "Leave --label_names out: the order of the model is used."
        else:
            fix = (
                f"If they mean the same in this order, give --label_names {','.join(self.names)}; "
                "--ignore_mismatched_sizes starts a new head."
            )
        return ConfigError(f"its head was trained for {theirs} and the data has {ours}", where=where, fix=fix)


def read_head_names(config: dict[str, Any]) -> HeadNames:
    """The names in a model's config.json. LABEL_0, LABEL_1, ... name nothing: they mean the ids."""
    kinds = config.get("architectures")
    classifier = isinstance(kinds, list) and any(str(kind).endswith("ForSequenceClassification") for kind in kinds)
    table = config.get("id2label")
    if not classifier or not isinstance(table, dict) or not all(str(key).isdecimal() for key in table):
        return HeadNames(())
    ordered = tuple(str(table[key]) for key in sorted(table, key=int))
    if all(re.fullmatch(r"LABEL_\d+", name) for name in ordered):
        return HeadNames(())
    return HeadNames(ordered)


def start_head_afresh(model: Any) -> tuple[str, ...]:
    """Draws everything above the encoder anew, as the model's own class does; gives the names of those parameters."""
    import torch

    fresh: list[str] = []
    for name, part in model.named_children():
        if name == model.base_model_prefix:
            continue
        for module in part.modules():
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = False
            with torch.no_grad():
                model._init_weights(module)
        fresh += [f"{name}.{key}" for key, _ in part.named_parameters()]
    return tuple(fresh)
