"""Which exact speed-ups a run uses. Each computes what the plain step computes; what is off says why."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tunesmith.data.batches import Batch, Collate, Padding
from tunesmith.data.token_rows import TokenRows
from tunesmith.errors import ConfigError
from tunesmith.model import cls_only, padding_free, vocabulary
from tunesmith.model.cpu_speed import enable_cpu_speed
from tunesmith.model.packing import pack
from tunesmith.model.vocabulary import VocabularyCut

Wish = Literal["auto", "on", "off"]


@dataclass(frozen=True)
class Packing:
    """Collates rows into one packed row: no padding at all."""

    first_position: int
    keys: tuple[str, ...]

    def __call__(self, tokens: dict[str, list[npt.NDArray[Any]]]) -> dict[str, Any]:
        """Model inputs of a packed batch."""
        return dict(pack(tokens, first_position=self.first_position, keys=self.keys))

    def split(self, batch: Batch, limit: int) -> list[Batch]:
        """Packed batches of at most `limit` rows each, from one that did not fit in memory."""
        layout: Any = batch.inputs["layout"]
        starts = layout.starts[layout.order].tolist()
        lengths = [layout.lengths[i] for i in layout.order.tolist()]
        out = []
        for at in range(0, len(batch), limit):
            some = range(at, min(at + limit, len(batch)))
            tokens = {
                name: [batch.inputs[name][0, starts[i] : starts[i] + lengths[i]].cpu().numpy() for i in some]
                for name in self.keys
                if name in batch.inputs
            }
            size = sum(lengths[i] for i in some)
            labels = None if batch.labels is None else batch.labels[at : at + limit]
            out.append(Batch(self(tokens), labels, np.asarray(batch.rows[at : at + limit]), size, size, batch.extra))
        return out


@dataclass(frozen=True)
class Remapped:
    """Collates after token ids became row numbers of a cut vocabulary."""

    inner: Any
    cut: VocabularyCut

    def __call__(self, tokens: dict[str, list[npt.NDArray[Any]]]) -> dict[str, Any]:
        """Model inputs with remapped ids. Padding comes after: its id is remapped as well."""
        remapped = {**tokens, "input_ids": [self.cut.remap(ids) for ids in tokens["input_ids"]]}
        inputs: dict[str, Any] = self.inner(remapped)
        return inputs

    def split(self, batch: Batch, limit: int) -> list[Batch]:
        """As the collator inside does; ids are remapped already."""
        pieces: list[Batch] = self.inner.split(batch, limit)
        return pieces


@dataclass
class Strategies:
    """What was switched on. `train_collate` is for training batches, `collate` for evaluation (whole vocabulary)."""

    train_collate: Collate
    collate: Collate
    cut: VocabularyCut | None
    on: tuple[str, ...]
    notes: tuple[str, ...]
    undo: tuple[Any, ...]

    def whole(self) -> AbstractContextManager[None]:
        """Inside, the model takes plain token ids."""
        return nullcontext() if self.cut is None else self.cut.whole()

    def disable(self) -> None:
        """Leaves the model as it was, with its whole vocabulary."""
        for strategy in reversed(self.undo):
            strategy.disable()
        if self.cut is not None:
            self.cut.restore()
            self.cut = None


def choose_strategies(
    model: nn.Module,
    rows: TokenRows | None,
    padding: Padding,
    *,
    device: torch.device,
    sharded: bool = False,
    pack_rows: Wish = "auto",
    first_token_only: Wish = "auto",
    restrict_vocabulary: Wish = "auto",
) -> Strategies:
    """Applies to the model what it supports and was not refused. Call it before the optimizer is made.

    `sharded`: the weights are, or will be, dealt out over the ranks. These speed-ups reach into whole ones.
    """
    notes: list[str] = []
    on: list[str] = []
    undo: list[Any] = []
    collate: Any = padding
    fixed = "rows of a fixed length were asked for" if padding.fixed_length or padding.multiple_of else None
    checkpointing = (
        "gradient checkpointing repeats layers" if getattr(model, "is_gradient_checkpointing", False) else None
    )
    parts = "the weights are sharded (fsdp)" if sharded else None
    if _wanted("padding_free", pack_rows, parts or fixed or checkpointing or padding_free.supports(model), notes):
        strategy = padding_free.enable_padding_free(model)
        collate = Packing(strategy.first_position, strategy.keys)
        undo.append(strategy)
        on.append("padding-free")
    if _wanted("cls_only_last_layer", first_token_only, parts or checkpointing or cls_only.supports(model), notes):
        undo.append(cls_only.enable_first_token_only(model))
        on.append("last layer for the first token only")
    cut, train_collate = None, collate
    if rows is not None and _wanted(
        "restrict_vocabulary", restrict_vocabulary, parts or _no_cut(model, rows, restrict_vocabulary), notes
    ):
        size = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        cut = VocabularyCut.apply(model, rows.used_ids(size))
        if isinstance(collate, Padding):
            collate_ids = cut.remap(np.array([padding.pad_token_id]))
            train_collate = Remapped(replace(padding, pad_token_id=int(collate_ids[0])), cut)
        else:
            train_collate = Remapped(collate, cut)
        on.append(f"vocabulary of {len(cut.ids)} of {size} tokens")
    if device.type == "cpu" and not sharded:
        undo.append(enable_cpu_speed(model))
    return Strategies(train_collate, collate, cut, tuple(on), tuple(notes), tuple(undo))


def _no_cut(model: nn.Module, rows: TokenRows, wish: Wish) -> str | None:
    reason = vocabulary.supports(model)
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
