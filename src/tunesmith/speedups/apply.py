"""Which exact speed-ups a run uses. Each computes what the plain step computes; what is off says why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tunesmith.data.batches import Batch, Collate, Padding
from tunesmith.data.tokens import TokenRows
from tunesmith.errors import ConfigError
from tunesmith.models.families import hook_tables, is_watched, why_not
from tunesmith.models.load import compute_row
from tunesmith.speedups.cuda_graphs import StepGraphs, bucketed, is_too_wide, why_not_captured
from tunesmith.speedups.determinism import SteadyTables
from tunesmith.speedups.first_token import enable_first_token_only, why_not_first_token
from tunesmith.speedups.packing import FILLER, Packing, collated, enable_padding_free, is_packed
from tunesmith.speedups.vocabulary import VocabularyCut, why_not_restricted
from tunesmith.training.distributed import Precision, Runtime

if TYPE_CHECKING:
    from tunesmith.data.tokens import Sampling
    from tunesmith.speedups.fused import FusedStack

Wish = Literal["auto", "on", "off"]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
ON_A_GPU = ("fused_layers", "cuda_graphs")
"""What a CPU does not need: not reported there."""


CAPTURED = "one launch a step"
"""How captured steps are called where speed-ups are listed."""


@dataclass
class Speedups:
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

    def adapted(self, batch: Batch) -> Batch:
        """The micro-batch as the model takes it now."""
        packed = is_packed(batch)
        unfit = packed if "padding_free" in self.dropped else "length_buckets" in self.dropped and is_too_wide(batch)
        return collated(batch, self.padding) if unfit else batch

    def close(self) -> None:
        """Leaves the model as it was, with its whole vocabulary, and the memory of captured steps to others."""
        if self.graphs is not None:
            self.graphs.close()
        if self.cut is not None:
            self.parts.pop("restrict_vocabulary").restore()
            self.cut = None
        while self.parts:
            self.parts.popitem()[1].disable()


def apply_speedups(
    model: nn.Module,
    rows: TokenRows | None,
    padding: Padding,
    *,
    device: torch.device,
    world: int = 1,
    precision: Precision = "no",
    pack_rows: Wish = "auto",
    first_token_only: Wish = "auto",
    restrict_vocabulary: Wish = "auto",
    fused_layers: Wish = "auto",
    cuda_graphs: Wish = "auto",
    longest: int | None = None,
) -> Speedups:
    """Applies to the model what it supports and was not refused. Call it before the optimizer is made.

    `longest`: tokens of a row, where `rows` is None.
    """
    notes, on, applied = list[str](), list[str](), dict[str, Any]()
    collate = cast(Any, padding)
    padded = _why_padded(padding) or _repeats_layers(model) or why_not(model)
    if _wanted("padding_free", pack_rows, padded, notes):
        applied["padding_free"] = free = enable_padding_free(model)
        collate = Packing(free.first_position, free.keys, free.skipped_id)
        on.append("padding-free")
    whole = why_not_first_token(model) or (None if "padding_free" in applied else "it needs padding_free")
    if _wanted("cls_only_last_layer", first_token_only, whole, notes):
        applied["cls_only_last_layer"] = enable_first_token_only(model)
        on.append("last layer for the first token only")
    packed, fused, graphs, cut = "padding_free" in applied, None, None, None
    if _wanted("fused_layers", fused_layers, _no_fusing(model, device, precision, packed), notes):
        applied["fused_layers"] = fused = _fuse(model, precision, first_token_only="cls_only_last_layer" in applied)
        on.append("fused layers")
    unknown = None if packed or device.type != "cuda" else why_not_captured(model)
    if _wanted("cuda_graphs", cuda_graphs, _no_graphs(device, world, unknown), notes):
        graphs = StepGraphs(device, before=None if fused is None else fused.refresh_if_changed, padded=not packed)
        on.append(CAPTURED)
    shaped = collate if graphs is None else _shaped(collate, fused, rows, longest, applied)
    whole = _no_cut(model, rows, restrict_vocabulary)
    if rows is not None and _wanted("restrict_vocabulary", restrict_vocabulary, whole, notes):
        applied["restrict_vocabulary"] = cut = VocabularyCut.apply(model, _ids_of_batches(model, rows, padding))
        on.append(f"vocabulary of {len(cut.ids)} of {cut.size} tokens")
    if packed and device.type == "cuda":
        applied["steady_tables"] = SteadyTables(model)
    told = _worth_telling(notes, device)
    return Speedups(model, padding, shaped, collate, cut, tuple(on), told, applied, CHECKS, graphs, fused)


def _why_padded(padding: Padding) -> str | None:
    """Why rows must stay padded as they are, whatever the model."""
    if padding.fixed_length or padding.multiple_of:
        return "rows of a fixed length were asked for"
    # The positions of padding count, and a head that reads the first token reads padding: not what packed rows give.
    return "rows are padded on the left" if padding.side == "left" else None


def _shaped(
    collate: Any, fused: FusedStack | None, rows: TokenRows | None, longest: int | None, applied: dict[str, Any]
) -> Collate:
    """Batches of few shapes: packed ones filled up, padded ones in buckets where it is known where rows end."""
    if isinstance(collate, Packing):  # fused attention ends with each row
        return replace(collate, filled=True, finest=64 if fused is None else 128)
    longest = longest if rows is None else int(rows.lengths.max(initial=0))
    if not longest or collate.fixed_length or collate.multiple_of:
        return collate  # type: ignore[no-any-return]
    made = bucketed(collate, longest)
    applied["length_buckets"] = made.switch
    return made


def _worth_telling(notes: list[str], device: torch.device) -> tuple[str, ...]:
    return tuple(note for note in notes if device.type == "cuda" or not note.startswith(ON_A_GPU))


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
    return _why_not_fused(model) or (None if packed else "rows are padded")


def _why_not_fused(model: nn.Module) -> str | None:
    from tunesmith.speedups.fused import why_not_fused

    return why_not_fused(model)


def _fuse(model: nn.Module, precision: Precision, *, first_token_only: bool) -> FusedStack:
    from tunesmith.speedups.fused import fuse_layers

    return fuse_layers(model, HALF[precision], first_token_only=first_token_only)


CHECKS = {
    "padding_free": why_not,
    "cls_only_last_layer": why_not_first_token,
    "fused_layers": _why_not_fused,
}
"""Why a model does not fit a speed-up, by the name of its option."""


def _no_graphs(device: torch.device, world: int, unknown: str | None) -> str | None:
    if device.type != "cuda":
        return "they are for a GPU"
    return "several ranks exchange gradients inside the step" if world > 1 else unknown


def _why_not_cut(model: nn.Module) -> str | None:
    return why_not_restricted(model) or (
        "hooks listen to its modules" if is_watched(hook_tables(model.modules())) else None
    )


def _no_cut(model: nn.Module, rows: TokenRows | None, wish: Wish) -> str | None:
    reason = _why_not_cut(model)
    if reason or rows is None:
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


def why_not_half(model: nn.Module, runtime: Runtime) -> str | None:
    """Why this model cannot compute in half precision: transformers' DeBERTa (v1) fills masks with float32's smallest number."""
    if runtime.precision == "no":
        return None
    try:
        with runtime.autocast():
            compute_row(model)
    except RuntimeError as error:
        return f"as this model fails in {runtime.precision} ({str(error).splitlines()[0]})"
    return None
