"""What a predictor asks: token rows in, logits out, whether torch or a graph runtime computes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from tunesmith.tokens.encoding_processes import ChunkEncoder
from tunesmith.tokens.token_encoder import TokenEncoder
from tunesmith.tokens.token_rows import TokenRows


class Network(Protocol):
    """A loaded model: a torch module, or an exported graph."""

    name: str
    """What computes, and where: "torch on cpu", "onnxruntime on cpu"."""
    encoder: TokenEncoder
    chunks: ChunkEncoder
    """The same encoder for many rows at once."""
    has_types: bool
    """Whether the model is given token type ids."""
    max_length: int
    special: tuple[int, int]
    """Special tokens of a row with one text, and with two."""

    @property
    def vocab_size(self) -> int:
        """Number of token embeddings."""

    def answer(
        self, rows: TokenRows, *, max_rows: int | None = None, on_batch: Callable[[int], None] | None = None
    ) -> npt.NDArray[np.float32]:
        """Logits of each row, in input order; in batches of the size that suits the device, or of `max_rows` rows."""

    def require_segments(self, text_columns: int) -> None:
        """A ConfigError when the model cannot take so many texts a row."""
