"""The speed-ups in force on a model: switched on by `choose_strategies`, taken off where they do not prove themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from tunesmith.data.batches import Batch, Collate, Padding
from tunesmith.speedups.cuda_graphs import is_too_wide
from tunesmith.speedups.packing import collated, is_packed

if TYPE_CHECKING:
    from tunesmith.data.tokens import Sampling
    from tunesmith.speedups.cuda_graphs import StepGraphs
    from tunesmith.speedups.fused import FusedStack
    from tunesmith.speedups.vocabulary import VocabularyCut


CAPTURED = "one launch a step"
"""How captured steps are called where speed-ups are listed."""


@dataclass
class Strategies:
    """What was switched on. `train_collate` is for training batches, `collate` for evaluation (whole vocabulary)."""

    model: nn.Module
    padding: Padding
    train_collate: Collate
    collate: Collate
    cut: VocabularyCut | None
    on: tuple[str, ...]
    notes: tuple[str, ...]
    parts: dict[str, Any]
    """By the name of its option, what can be enabled and disabled."""
    checks: Mapping[str, Callable[[nn.Module], str | None]]
    """By the name of its option, what gives the reason why a model does not fit a part; None where it fits."""
    graphs: StepGraphs | None = None
    fused: FusedStack | None = None
    dropped: set[str] = field(default_factory=set)
    """Options of what was taken off since."""

    def __post_init__(self) -> None:
        _IN_FORCE[id(self.model)] = self

    def best_order(self, device: torch.device) -> Sampling:
        """The order of rows where none was asked for: on a GPU batches without padding need no rows of similar length."""
        return "random" if device.type == "cuda" and "padding_free" in self.parts else "group_by_length"

    @property
    def undisturbed(self) -> bool:
        """Whether no code of the user's runs between two steps, so that the model stays what it was."""
        return self.fused is not None and self.fused.kept_fresh

    def whole(self) -> AbstractContextManager[None]:
        """Inside, the model has its whole vocabulary."""
        return nullcontext() if self.cut is None else self.cut.whole()

    def why_not(self, name: str) -> str | None:
        """Why a part that was switched on may not stay on: the model is no longer what it was."""
        return self.checks[name](self.model) if name in self.checks else None

    @contextmanager
    def without(self, names: Iterable[str]) -> Iterator[None]:
        """Inside, these parts are off."""
        off = [name for name in self.parts if name in names]
        for name in off:
            self.parts[name].disable()
        first = self.fused is not None and self.fused.first_token_only
        if self.fused is not None:
            self.fused.first_token_only = first and "cls_only_last_layer" not in off
        try:
            yield
        finally:
            for name in off:
                self.parts[name].enable()
            if self.fused is not None:
                self.fused.first_token_only = first

    def drop(self, name: str) -> None:
        """Takes a part off for good; batches that are packed already are taken apart by `adapted`."""
        self.dropped.add(name)
        self.parts.pop(name).disable()
        if name == "cls_only_last_layer" and self.fused is not None:
            self.fused.first_token_only = False
        if name == "fused_layers":
            self.fused = None
        if name == "padding_free":
            self.collate = self.train_collate = self.padding
        if name == "length_buckets":
            self.train_collate = self.padding

    def forget_cut(self) -> None:
        """The whole vocabulary is trained from now on; the model has its table back already."""
        self.dropped.add("restrict_vocabulary")
        self.parts.pop("restrict_vocabulary", None)
        self.cut = None

    def stop_capturing(self) -> None:
        """Steps run uncaptured, and rows are padded to the longest of their batch: before there are batches."""
        self.on = tuple(name for name in self.on if name != CAPTURED)
        if self.parts.pop("length_buckets", None) is not None:
            self.train_collate = self.padding

    def adapted(self, batch: Batch) -> Batch:
        """The micro-batch as the model takes it now."""
        packed = is_packed(batch)
        unfit = packed if "padding_free" in self.dropped else "length_buckets" in self.dropped and is_too_wide(batch)
        return collated(batch, self.padding) if unfit else batch

    def disable(self) -> None:
        """Leaves the model as it was, with its whole vocabulary, and the memory of captured steps to others."""
        if self.graphs is not None:
            self.graphs.close()
        if self.cut is not None:
            self.parts.pop("restrict_vocabulary").restore()
            self.cut = None
        while self.parts:
            self.parts.popitem()[1].disable()
        if _IN_FORCE.get(id(self.model)) is self:
            del _IN_FORCE[id(self.model)]


_IN_FORCE: WeakValueDictionary[int, Strategies] = WeakValueDictionary()
"""By the id of the model, which lives as long as they do."""


def strategies_of(model: nn.Module) -> Strategies | None:
    """What `choose_strategies` applied to this model, as long as it is in use."""
    return _IN_FORCE.get(id(model))
