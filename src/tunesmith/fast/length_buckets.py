"""Padded steps of any encoder captured as CUDA graphs: batches of few widths, and nothing known about the model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from tunesmith.encoder.families import why_not_original
from tunesmith.tokens.batches import Batch, Padding


class LengthBuckets:
    """The strategy as applied to one run: whether batches are padded to one of few widths."""

    def __init__(self) -> None:
        self.on = True

    def enable(self) -> None:
        """Few widths."""
        self.on = True

    def disable(self) -> None:
        """Each batch as wide as its longest row."""
        self.on = False


@dataclass(frozen=True)
class BucketPadding(Padding):
    """Pads to a multiple that grows with the length, never beyond the longest row of the data: positions end somewhere."""

    longest: int = 0
    switch: LengthBuckets = field(default_factory=LengthBuckets)

    def width(self, longest: int) -> int:
        """Columns of a batch whose longest row has `longest` tokens."""
        if not self.switch.on:
            return longest
        multiple = 16 if longest <= 128 else 32 if longest <= 256 else 64
        return max(longest, min(-(-longest // multiple) * multiple, self.longest))


def bucketed(padding: Padding, longest: int) -> BucketPadding:
    """The same padding, in buckets."""
    return BucketPadding(padding.pad_token_id, padding.pad_token_type_id, padding.side, longest=longest)


def is_too_wide(batch: Batch) -> bool:
    """Whether a padded batch has columns that no row reaches."""
    mask = batch.inputs.get("attention_mask")
    return isinstance(mask, torch.Tensor) and not (bool(mask[:, 0].any()) and bool(mask[:, -1].any()))


def why_not_captured(model: nn.Module) -> str | None:
    """Why padded steps of this model are not captured; None where they can be tried.

    Code of the user's may do what a replay would not repeat. transformers' own does so in two ways: it waits for the device,
    which ends the capture, or it draws on the host, which `no_host_randomness` notices.
    """
    if not type(model).__module__.startswith("transformers.models."):
        return f"{type(model).__name__} is not a class of transformers, and may do on the host what a replay would leave out"
    if getattr(model, "is_gradient_checkpointing", False):
        return "gradient checkpointing repeats layers"
    return why_not_original(model, ())


@contextmanager
def no_host_randomness() -> Iterator[None]:
    """Raises a RuntimeError if random numbers were drawn on the host inside: a captured step would never draw them again."""
    before = _host_generators()
    yield
    if _host_generators() != before:
        raise RuntimeError("the step draws random numbers on the host")


def _host_generators() -> tuple[bytes, str, str]:
    """Where Python's, NumPy's and torch's generators on the host stand."""
    return torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), repr(np.random.get_state())
