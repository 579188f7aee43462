"""Texts to logits, chunk by chunk: a thread tokenizes the next chunk while the model works on this one.

A network takes token rows and gives logits, whether torch or a graph runtime computes them. No token file is written, and
memory holds the tokens of a few chunks however long the input is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tunesmith.errors import DataError, NumericsError
from tunesmith.tokens.encoding_processes import ChunkEncoder, CutCount, prefetched
from tunesmith.tokens.token_encoder import TokenEncoder, require_text_cells
from tunesmith.tokens.token_rows import TokenRows
from tunesmith.tokens.truncation import TruncationCount


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


CHUNK_ROWS = 8192
"""Rows sorted by length together. On the long tail of bench/predict_speed.py more changed nothing: packed batches have
no padding, and a chunk still fills some ten batches of a GPU."""

Chunk = Sequence[list[str]]
"""One list of texts for each text column."""


@dataclass(frozen=True)
class TextPredictions:
    """`logits[i]` belongs to text i; `truncated` says what was cut."""

    logits: npt.NDArray[np.float32]
    truncated: TruncationCount
    empty: tuple[int, ...] = ()
    """Rows of which the model saw special tokens alone."""


def predict_chunks(
    predict: Callable[[TokenRows], npt.NDArray[np.float32]],
    encode: Callable[[Chunk], tuple[TokenRows, CutCount]],
    chunks: Iterator[Chunk],
    *,
    max_length: int,
    vocab_size: int,
    special: tuple[int, int] = (0, 0),
) -> TextPredictions:
    """Logits of all texts, in input order. `special`: the special tokens of a row with one text, and with two."""
    logits: list[npt.NDArray[np.float32]] = []
    rows = sides = 0
    cut = CutCount()
    empty: list[int] = []

    def prepare(chunk: Chunk) -> tuple[int, TokenRows, CutCount]:
        return len(chunk), *encode(chunk)

    for sides, tokens, cuts in prefetched(_checked(chunks), prepare, ahead=1):
        logits.append(answer_tokens(predict, tokens, vocab_size=vocab_size, before=rows))
        empty += (rows + np.flatnonzero(tokens.lengths <= special[sides - 1])).tolist()
        rows += len(tokens)
        cut += cuts
    by_side = None if cut.unknown else (cut.tokens - cut.second, cut.second)[:sides]
    found = np.concatenate(logits) if logits else np.zeros((0, 0), dtype=np.float32)
    truncated = TruncationCount(rows, cut.rows, cut.tokens, by_side, max_length, cut.unread)
    return TextPredictions(found, truncated, tuple(empty))


def answer_tokens(
    predict: Callable[[TokenRows], npt.NDArray[np.float32]], tokens: TokenRows, *, vocab_size: int, before: int = 0
) -> npt.NDArray[np.float32]:
    """Logits of rows whose token ids the model has; all of them numbers. `before`: rows that errors count, too."""
    highest = int(max((values.max(initial=0) for values, _ in tokens.columns["input_ids"].chunks), default=0))
    if highest >= vocab_size:
        problem = f"the tokenizer makes token id {highest}, but the model has only {vocab_size} token embeddings"
        raise DataError(problem, fix="Use the tokenizer that belongs to the model.")
    logits = predict(tokens)
    require_numbers(logits, before=before)
    return logits


def require_numbers(answers: npt.NDArray[Any], *, before: int = 0) -> None:
    """A NumericsError that names the first row whose answer is not finite: it is not a class, not even the first one."""
    bad = np.flatnonzero(~np.isfinite(answers).all(axis=tuple(range(1, answers.ndim))))
    if len(bad):
        problem = f"the model's answer for row {before + int(bad[0]) + 1} is not a number ({len(bad):,} of {len(answers):,} rows)"
        fix = "Look for weights that are not finite (tunesmith doctor), or predict without bf16."
        raise NumericsError(problem, fix=fix)


def chunks_of(columns: Sequence[Sequence[str]]) -> Iterator[Chunk]:
    """Columns that are in memory already, in chunks."""
    for start in range(0, len(columns[0]), CHUNK_ROWS):
        yield [list(column[start : start + CHUNK_ROWS]) for column in columns]


def chunks_of_dataset(dataset: Any, names: Sequence[str]) -> Iterator[Chunk]:
    """The text columns of a Dataset, in chunks."""
    some = dataset.select_columns(list(names))
    for start in range(0, len(some), CHUNK_ROWS):
        part = some[start : start + CHUNK_ROWS]
        yield [part[name] for name in names]


def _checked(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    before = 0
    for chunk in chunks:
        for column in chunk:
            require_text_cells(column, partial(_row_name, before))
        before += len(chunk[0])
        yield chunk


def _row_name(before: int, index: int) -> str:
    return f"row {before + index + 1}"
