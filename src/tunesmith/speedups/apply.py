"""Apply exact speedups to a model: packing, first token only, fused layers, CUDA graphs, restricted vocabulary.

The interface of all speedups:
- `apply_speedups` changes the model and returns a `Speedups` object, which the training loop passes around;
- `verify.ready` compares it with the plain step before the first one, and switches off what differs;
- `Speedups.replay`, `after_update` and `free_memory` do its work inside a step;
- `Speedups.close` restores the plain model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tunesmith.data.batches import Batch, Collate, Padding, TokenRows
from tunesmith.errors import ConfigError
from tunesmith.models.families import hook_tables, is_watched, why_not
from tunesmith.models.load import compute_row
from tunesmith.speedups.cuda_graphs import StepGraphs, bucketed, is_too_wide, why_not_captured
from tunesmith.speedups.determinism import DeterministicEmbeddings
from tunesmith.speedups.packing import (
    FILLER,
    FirstTokenOnly,
    Packing,
    PaddingFree,
    collated,
    is_packed,
    why_not_first_token,
)
from tunesmith.speedups.vocabulary import RestrictedVocabulary, why_not_restricted

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from tunesmith.data.batches import Sampling, Window
    from tunesmith.speedups.cuda_graphs import Body
    from tunesmith.speedups.fused_layers import FusedStack
    from tunesmith.training.distributed import Precision, Runtime

Setting = Literal["auto", "on", "off"]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
ON_A_GPU = ("fused_layers", "cuda_graphs")
"""Options that only matter on a GPU; on a CPU they are not reported."""


@dataclass
class Speedups:
    """The speedups of one model. `train_collate` makes training batches, `collate` evaluation batches."""

    model: nn.Module
    padding: Padding
    train_collate: Collate
    collate: Collate
    vocabulary: RestrictedVocabulary | None
    on: tuple[str, ...]
    notes: tuple[str, ...]
    parts: dict[str, Any]
    """Option -> object with `enable` and `disable`."""
    graphs: StepGraphs | None = None
    fused: FusedStack | None = None
    dropped: set[str] = field(default_factory=set)
    """Options of speedups that were switched off during the run."""

    def best_order(self, device: torch.device) -> Sampling:
        """Return the default order of the examples: packed batches on a GPU don't profit from batches of similar length."""
        return "random" if device.type == "cuda" and "padding_free" in self.parts else "group_by_length"

    @property
    def undisturbed(self) -> bool:
        """Return whether no user code runs between two steps that could change the model."""
        return self.fused is not None and self.fused.kept_fresh

    def whole(self) -> AbstractContextManager[None]:
        """Restore the whole vocabulary of the model inside this context."""
        return nullcontext() if self.vocabulary is None else self.vocabulary.whole()

    def why_not(self, name: str) -> str | None:
        """Return why a speedup no longer fits a model that was changed; None if it fits."""
        checks = {
            "padding_free": why_not,
            "cls_only_last_layer": why_not_first_token,
            "fused_layers": _why_not_fused,
        }
        return checks[name](self.model) if name in checks else None

    @contextmanager
    def without(self, names: Iterable[str]) -> Iterator[None]:
        """Switch these speedups off inside this context."""
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
        """Switch a speedup off for the rest of the run. `adapted` unpacks batches that are already packed."""
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

    def forget_vocabulary(self) -> None:
        """Train the whole vocabulary from now on. The model already has its whole table."""
        self.dropped.add("restrict_vocabulary")
        self.parts.pop("restrict_vocabulary", None)
        self.vocabulary = None

    def adapted(self, batch: Batch) -> Batch:
        """Return the micro-batch in the form that the model accepts now."""
        packed = is_packed(batch)
        unfit = packed if "padding_free" in self.dropped else "length_buckets" in self.dropped and is_too_wide(batch)
        return collated(batch, self.padding) if unfit else batch

    def replay(
        self, window: Window, rate: float, factor: float, body: Body, fingerprint: Callable[[], Hashable | None]
    ) -> torch.Tensor | None:
        """Replay the step as a CUDA graph and return its numbers; None if the caller has to run it."""
        if self.graphs is None:
            return None
        return self.graphs.run(window.micro_batches, rate, factor, body, fingerprint())

    def after_update(self, rate: float | torch.Tensor, weight_decay: float, skip: torch.Tensor) -> None:
        """Apply weight decay to the embedding rows that are not trained, as the update does for the others."""
        if self.vocabulary is not None:
            self.vocabulary.decay(1.0 - rate * weight_decay * (1.0 - skip.double()))

    def free_memory(self) -> bool:
        """Free memory that only makes steps faster; return whether there was any."""
        return self.graphs is not None and self.graphs.drop_graphs()

    def close(self) -> None:
        """Restore the plain model, and free the memory of CUDA graphs."""
        if self.graphs is not None:
            self.graphs.close()
        if self.vocabulary is not None:
            self.parts.pop("restrict_vocabulary").restore()
            self.vocabulary = None
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
    pack_rows: Setting = "auto",
    first_token_only: Setting = "auto",
    restrict_vocabulary: Setting = "auto",
    fused_layers: Setting = "auto",
    cuda_graphs: Setting = "auto",
    longest: int | None = None,
) -> Speedups:
    """Apply every speedup that the model supports and the options allow. Call it before you create the optimizer.

    "auto" skips unsupported speedups with a note; "on" raises a ConfigError. `longest` is the number of tokens of the longest
    example, needed for CUDA graphs of padded steps if `rows` is None.
    """
    notes, on, applied = list[str](), list[str](), dict[str, Any]()
    collate = cast(Any, padding)
    padded = _why_padded(model, padding) or why_not(model)
    if _wanted("padding_free", pack_rows, padded, notes):
        applied["padding_free"] = free = PaddingFree(model)
        collate = Packing(free.first_position, free.keys, free.skipped_id)
        on.append("packing")
    whole = why_not_first_token(model) or (None if "padding_free" in applied else "it needs padding_free")
    if _wanted("cls_only_last_layer", first_token_only, whole, notes):
        applied["cls_only_last_layer"] = FirstTokenOnly(model)
        on.append("first token only in the last layer")
    packed, fused, graphs, vocabulary = "padding_free" in applied, None, None, None
    if _wanted("fused_layers", fused_layers, _no_fusing(model, device, precision, packed), notes):
        applied["fused_layers"] = fused = _fuse(model, precision, first_token_only="cls_only_last_layer" in applied)
        on.append("fused layers")
    unknown = None if packed or device.type != "cuda" else why_not_captured(model)
    if _wanted("cuda_graphs", cuda_graphs, _no_graphs(device, world, unknown), notes):
        graphs = StepGraphs(device, before=None if fused is None else fused.refresh_if_changed, padded=not packed)
        on.append("CUDA graphs")
    shaped = collate if graphs is None else _shaped(collate, fused, rows, longest, applied)
    whole = _why_whole_vocabulary(model, rows, restrict_vocabulary)
    if rows is not None and _wanted("restrict_vocabulary", restrict_vocabulary, whole, notes):
        vocabulary = RestrictedVocabulary(model, _ids_of_batches(model, rows, padding))
        applied["restrict_vocabulary"] = vocabulary
        on.append(f"vocabulary of {len(vocabulary.ids):,} of {vocabulary.size:,} tokens")
    if packed and device.type == "cuda":
        applied["deterministic_embeddings"] = DeterministicEmbeddings(model)
    reported = tuple(note for note in notes if device.type == "cuda" or not note.startswith(ON_A_GPU))
    return Speedups(model, padding, shaped, collate, vocabulary, tuple(on), reported, applied, graphs, fused)


def _why_padded(model: nn.Module, padding: Padding) -> str | None:
    if padding.multiple_of:
        return "a fixed length was requested"
    if padding.side == "left":  # positions include the padding, and the first token of a row is padding
        return "rows are padded on the left"
    checkpointing = getattr(model, "is_gradient_checkpointing", False)
    return "gradient checkpointing repeats layers" if checkpointing else None


def _shaped(
    collate: Any, fused: FusedStack | None, rows: TokenRows | None, longest: int | None, applied: dict[str, Any]
) -> Collate:
    """Return a collator with few different shapes: packed batches are filled up, padded ones rounded up to a few widths."""
    if isinstance(collate, Packing):
        return replace(collate, filled=True, finest=64 if fused is None else 128)
    longest = longest if rows is None else int(rows.lengths.max(initial=0))
    if not longest or collate.multiple_of:
        return collate  # type: ignore[no-any-return]
    made = bucketed(collate, longest)
    applied["length_buckets"] = made.switch
    return made


def _ids_of_batches(model: nn.Module, rows: TokenRows, padding: Padding) -> npt.NDArray[np.int64]:
    """Return every token id that a batch can contain, including padding and filling."""
    used = rows.used_ids(model.get_input_embeddings().num_embeddings)  # type: ignore[operator]
    return np.union1d(used, [padding.pad_token_id, FILLER])


def _no_fusing(model: nn.Module, device: torch.device, precision: Precision, packed: bool) -> str | None:
    if device.type != "cuda":
        return "they require a GPU"
    if any(p.device.type != "cuda" for p in model.parameters()):
        return "the model is not on the GPU yet"
    if precision not in HALF:
        return "they require bf16 or fp16"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "this GPU is older than compute capability 8.0"
    return _why_not_fused(model) or (None if packed else "rows are padded")


def _why_not_fused(model: nn.Module) -> str | None:
    from tunesmith.speedups.fused_layers import why_not_fused

    return why_not_fused(model)


def _fuse(model: nn.Module, precision: Precision, *, first_token_only: bool) -> FusedStack:
    from tunesmith.speedups.fused_layers import fuse_layers

    return fuse_layers(model, HALF[precision], first_token_only=first_token_only)


def _no_graphs(device: torch.device, world: int, unknown: str | None) -> str | None:
    if device.type != "cuda":
        return "they require a GPU"
    return "several ranks exchange gradients inside the step" if world > 1 else unknown


def _why_whole_vocabulary(model: nn.Module, rows: TokenRows | None, setting: Setting) -> str | None:
    reason = why_not_restricted(model)
    if reason is None and is_watched(hook_tables(model.modules())):
        reason = "its modules have hooks"
    if reason or rows is None:
        return reason
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if not embedding.weight.requires_grad:
        return "the embeddings are frozen"
    used = len(rows.used_ids(embedding.num_embeddings))
    pays = used < 0.9 * embedding.num_embeddings or setting == "on"
    return None if pays else "the data uses nearly the whole vocabulary"


def _wanted(name: str, setting: Setting, reason: str | None, notes: list[str]) -> bool:
    """Return whether to apply the speedup. An unsupported one is an error if the user set "on", else a note."""
    if setting == "off":
        return False
    if reason is None:
        return True
    if setting == "on":
        raise ConfigError(f"--{name} on is not possible: {reason}")
    notes.append(f"{name} is off: {reason}")
    return False


def why_not_half(model: nn.Module, runtime: Runtime) -> str | None:
    """Return why this model can't compute in half precision: DeBERTa (v1) fills masks with the smallest float32 number."""
    if runtime.precision == "no":
        return None
    try:
        with runtime.autocast():
            compute_row(model)
    except RuntimeError as error:
        return f"as this model fails in {runtime.precision} ({str(error).splitlines()[0]})"
    return None
