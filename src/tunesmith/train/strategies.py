"""Which exact speed-ups a run uses. Each computes what the plain step computes; what is off says why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tunesmith.data.batches import Batch, Collate, Padding
from tunesmith.data.order import Sampling
from tunesmith.data.token_rows import TokenRows
from tunesmith.errors import ConfigError
from tunesmith.model import cls_only, padding_free, vocabulary
from tunesmith.model.cpu_speed import enable_cpu_speed
from tunesmith.model.fused_layers import FusedLayers
from tunesmith.model.layer_parts import why_not_fused
from tunesmith.model.packing import FILLER
from tunesmith.model.recognition import hook_tables, is_watched
from tunesmith.model.vocabulary import VocabularyCut
from tunesmith.train.graphs import StepGraphs
from tunesmith.train.packed_batches import Packing, collated, is_packed
from tunesmith.train.runtime import Precision

Wish = Literal["auto", "on", "off"]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
ON_A_GPU = ("fused_layers", "cuda_graphs")
"""What nobody misses on a CPU: not said there."""


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
    graphs: StepGraphs | None = None
    fused: FusedLayers | None = None
    dropped: set[str] = field(default_factory=set)
    """Options of what was taken off since."""

    def __post_init__(self) -> None:
        _IN_FORCE[id(self.model)] = self

    def best_order(self, device: torch.device) -> Sampling:
        """The order of rows where nobody asked for one: on a GPU batches without padding need no rows of similar length."""
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
        asked = {
            "padding_free": padding_free.supports,
            "cls_only_last_layer": cls_only.supports,
            "fused_layers": why_not_fused,
        }
        return asked[name](self.model) if name in asked else None

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

    def forget_cut(self) -> None:
        """The whole vocabulary is trained from now on; the model has its table back already."""
        self.dropped.add("restrict_vocabulary")
        self.parts.pop("restrict_vocabulary", None)
        self.cut = None

    def adapted(self, batch: Batch) -> Batch:
        """The micro-batch as the model takes it now."""
        return collated(batch, self.padding) if is_packed(batch) and "padding_free" in self.dropped else batch

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


def choose_strategies(
    model: nn.Module,
    rows: TokenRows | None,
    padding: Padding,
    *,
    device: torch.device,
    sharded: bool = False,
    world: int = 1,
    precision: Precision = "no",
    pack_rows: Wish = "auto",
    first_token_only: Wish = "auto",
    restrict_vocabulary: Wish = "auto",
    fused_layers: Wish = "auto",
    cuda_graphs: Wish = "auto",
) -> Strategies:
    """Applies to the model what it supports and was not refused. Call it before the optimizer is made.

    `sharded`: the weights are, or will be, dealt out over the ranks. These speed-ups reach into whole ones.
    """
    notes, on, applied = list[str](), list[str](), dict[str, Any]()
    collate: Any = padding
    parts = "the weights are sharded (fsdp)" if sharded else None
    padded = _why_padded(padding) or _repeats_layers(model) or padding_free.supports(model)
    if _wanted("padding_free", pack_rows, parts or padded, notes):
        applied["padding_free"] = free = padding_free.enable_padding_free(model)
        collate = Packing(free.first_position, free.keys, free.skipped_id)
        on.append("padding-free")
    cannot = parts or _repeats_layers(model) or cls_only.supports(model)
    if _wanted("cls_only_last_layer", first_token_only, cannot, notes):
        applied["cls_only_last_layer"] = cls_only.enable_first_token_only(model)
        on.append("last layer for the first token only")
    packed, fused, graphs = "padding-free" in on, None, None
    if _wanted("fused_layers", fused_layers, _no_fusing(model, device, precision, packed), notes):
        fused = FusedLayers(model, HALF[precision], first_token_only="last layer for the first token only" in on)
        applied["fused_layers"] = fused
        on.append("fused layers")
    if _wanted("cuda_graphs", cuda_graphs, _no_graphs(device, world, packed), notes):
        graphs = StepGraphs(device, before=None if fused is None else fused.refresh_if_changed)
        on.append("one launch a step")
    cut, train_collate = None, collate if graphs is None else _filled(collate, fused)
    if rows is not None and _wanted(
        "restrict_vocabulary", restrict_vocabulary, parts or _no_cut(model, rows, restrict_vocabulary), notes
    ):
        applied["restrict_vocabulary"] = cut = VocabularyCut.apply(model, _ids_of_batches(model, rows, padding))
        on.append(f"vocabulary of {len(cut.ids)} of {cut.size} tokens")
    if device.type == "cpu" and not sharded:
        applied["cpu_parts"] = enable_cpu_speed(model)
    said = tuple(note for note in notes if device.type == "cuda" or not note.startswith(ON_A_GPU))
    return Strategies(model, padding, train_collate, collate, cut, tuple(on), said, applied, graphs, fused)


def _why_padded(padding: Padding) -> str | None:
    """Why rows must stay padded as they are, whatever the model."""
    if padding.fixed_length or padding.multiple_of:
        return "rows of a fixed length were asked for"
    # The positions of padding count, and a head that reads the first token reads padding: not what packed rows give.
    return "rows are padded on the left" if padding.side == "left" else None


def _filled(collate: Packing, fused: FusedLayers | None) -> Packing:
    return replace(collate, filled=True, finest=64 if fused is None else 128)  # fused attention ends with each row


def _repeats_layers(model: nn.Module) -> str | None:
    again = getattr(model, "is_gradient_checkpointing", False)
    return "gradient checkpointing repeats layers" if again else None


def _ids_of_batches(model: nn.Module, rows: TokenRows, padding: Padding) -> npt.NDArray[np.int64]:
    """Every id a batch can hold: those of the rows, of padding, and of what fills up a packed batch."""
    used = rows.used_ids(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    return np.union1d(used, [padding.pad_token_id, FILLER])


def _no_fusing(model: nn.Module, device: torch.device, precision: Precision, packed: bool) -> str | None:
    if device.type != "cuda":
        return "they are for a GPU"
    if any(p.device.type != "cuda" for p in model.parameters()):
        return "the model is not on the GPU yet"
    if precision not in HALF:
        return "they are for bf16 and fp16"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "this GPU is older than compute capability 8.0"
    return why_not_fused(model) or (None if packed else "rows are padded")


def _no_graphs(device: torch.device, world: int, packed: bool) -> str | None:
    if device.type != "cuda":
        return "they are for a GPU"
    if world > 1:
        return "several ranks exchange gradients inside the step"
    return None if packed else "rows are padded, and shapes change from batch to batch"


def _why_not_cut(model: nn.Module) -> str | None:
    return vocabulary.supports(model) or (
        "hooks listen to its modules" if is_watched(hook_tables(model.modules())) else None
    )


def _no_cut(model: nn.Module, rows: TokenRows, wish: Wish) -> str | None:
    reason = _why_not_cut(model)
    if reason:
        return reason
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if not embedding.weight.requires_grad:
        return "the embeddings are frozen"
    used = len(rows.used_ids(embedding.num_embeddings))
    pays = used < 0.9 * embedding.num_embeddings or wish == "on"
    return None if pays else "the data uses nearly the whole vocabulary"


def _wanted(name: str, wish: Wish, reason: str | None, notes: list[str]) -> bool:
    """Whether to switch it on; "on" where it cannot be is an error, "auto" a note."""
    if wish == "off":
        return False
    if reason is None:
        return True
    if wish == "on":
        raise ConfigError(f"--{name} on is not possible: {reason}")
    notes.append(f"{name} is off: {reason}")
    return False
