"""Text columns -> token rows, cached by content, every cut token counted."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tunesmith.data.row_cache import RowCache, content_hash, release_pages
from tunesmith.data.token_encoder import TokenEncoder, make_token_encoder, require_text_cells
from tunesmith.data.token_rows import Ragged, TokenRows
from tunesmith.data.truncation import CutCount, LongTexts, TruncationCount
from tunesmith.errors import ConfigError, DataError
from tunesmith.runs.writing import cache_folder

if TYPE_CHECKING:
    from datasets import Dataset

    from tunesmith.data.columns import Columns

VERSION = 4
"""Part of every cache key: raise it when the stored columns or their meaning change."""
BATCH_ROWS = 1000
USUAL_LENGTH = 512
LONGEST_LENGTH = 8192
"""The longest row when the whole length that the model takes is asked for: some models set no limit."""

OnProgress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""


@dataclass(frozen=True, slots=True)
class Tokenized:
    """One split, tokenized. `dataset` holds the same rows on disk; `reused` says that they came from the cache."""

    rows: TokenRows
    truncated: TruncationCount
    dataset: Dataset
    reused: bool = False
    empty: tuple[int, ...] = ()
    """Rows that have special tokens only."""


def tokenize(
    dataset: Dataset,
    tokenizer: Any,
    columns: Columns | Sequence[str],
    *,
    max_length: int,
    long_texts: LongTexts = "head",
    num_proc: int | None = None,
    cache_dir: str | Path | None = None,
    overwrite_cache: bool = False,
    vocab_size: int | None = None,
    on_progress: OnProgress | None = None,
) -> Tokenized:
    """The rows as `tokenizer(*texts, truncation=True, max_length=max_length)` gives them, unpadded; "labels" is kept.
    `long_texts`: what is kept of a row that is too long. `num_proc=None`: the Rust core uses all cores (why:
    bench/tokenize_speed.py). `vocab_size`: token embeddings of the model; an id beyond them is a DataError.
    """
    text = tuple(columns if isinstance(columns, Sequence) else columns.text)
    _check(dataset, tokenizer, text, max_length)
    encoder = make_token_encoder(tokenizer, max_length, long_texts)
    writer = _TokenWriter(dataset, encoder, text, has_types="token_type_ids" in tokenizer.model_input_names)
    cache, key = RowCache(Path(cache_dir) if cache_dir is not None else cache_folder() / "tokens"), writer.key()
    if overwrite_cache:
        cache.remove(key)
    found = cache.open(key)
    stored = found or cache.build(key, writer.batches(num_proc or 1, on_progress), writer.facts)
    assert stored is not None, "there are rows, so there is a batch"
    release_pages(dataset)
    if on_progress is not None:
        on_progress(len(dataset), len(dataset))
    largest = max(stored.facts["max_id"], getattr(tokenizer, "pad_token_id", None) or 0)
    if vocab_size is not None and largest >= vocab_size:
        problem = f"the tokenizer makes token id {largest}, but the model has only {vocab_size} token embeddings"
        raise DataError(problem, fix="Use the tokenizer that belongs to the model.")
    longest = max_length if encoder.windows is None else encoder.windows.longest
    truncated = CutCount(*stored.facts["cut"]).in_split(len(dataset), len(text), longest)
    known = _unpack_ids(stored.facts["used_ids"])
    tokens = stored.dataset()
    rows = TokenRows.from_arrow(tokens.data.table, known_ids=known).in_windows(encoder.windows)
    empty = np.flatnonzero(rows.lengths <= tokenizer.num_special_tokens_to_add(pair=len(text) == 2))
    release_pages(tokens)  # lengths and labels were copied out: their pages, and those read along with them
    return Tokenized(rows, truncated, tokens, reused=found is not None, empty=tuple(empty.tolist()))


def longest_allowed(
    tokenizer: Any, *, model_max: int | None = None, asked: int | None = None, usual: int = USUAL_LENGTH
) -> int:
    """The row length to use: what was asked for, else `usual`, and never more than the model and the tokenizer take."""
    # transformers says 1e30 for "unknown"
    limits = [int(n) for n in (model_max, tokenizer.model_max_length) if n is not None and 0 < n < 10_000_000]
    return min([usual if asked is None else asked, *limits])


def _check(dataset: Dataset, tokenizer: Any, text: tuple[str, ...], max_length: int) -> None:
    missing = [name for name in text if name not in dataset.column_names]
    if missing or len(text) not in (1, 2):
        fix = f"Name one or two of: {', '.join(dataset.column_names)}."
        raise DataError(f"cannot tokenize the columns {', '.join(text) or '(none)'}", fix=fix)
    if len(dataset) == 0:
        raise DataError("there are no rows to tokenize")
    least = tokenizer.num_special_tokens_to_add(pair=len(text) == 2) + len(text)
    if max_length < least:  # transformers gives such rows uncut, without a word
        fix = f"Use {least} or more: the special tokens and one token for each text."
        raise ConfigError(f"max_length {max_length} leaves no room for text", fix=fix)


class _TokenWriter:
    """Encodes the rows of a dataset batch by batch, and counts what every later use asks of them."""

    def __init__(self, dataset: Dataset, encoder: TokenEncoder, text: tuple[str, ...], *, has_types: bool) -> None:
        self._dataset = dataset
        self._encoder = encoder
        self._text = text
        self._has_types = has_types
        self._labels = ("labels",) if "labels" in dataset.column_names else ()
        self._cut = CutCount()
        self._used = np.zeros(1, dtype=bool)

    def key(self) -> str:
        """Names the tokens: the content of the rows and everything that changes their tokens."""
        content = content_hash(self._dataset, (*self._text, *self._labels))
        parts = (content, self._encoder.fingerprint, self._text, self._has_types, VERSION)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    def batches(self, processes: int, on_progress: OnProgress | None) -> Iterator[pa.RecordBatch]:
        """The tokens, lengths, cuts and labels of all rows. Fewer than two processes: all of it in this one."""
        from tunesmith.data.encoding_processes import ChunkEncoder  # only where tokens are not cached

        shared = 0 if processes < 2 else processes
        chunks = ChunkEncoder(self._encoder, has_types=self._has_types, processes=shared)
        view = self._dataset.select_columns([*self._text, *self._labels]).with_format("arrow")
        done = 0
        for table in view.iter(batch_size=BATCH_ROWS * max(1, 4 * shared)):
            texts = [table.column(name).to_pylist() for name in self._text]
            for name, cells in zip(self._text, texts, strict=True):
                require_text_cells(cells, done, f", column {name}")
            rows, cuts = chunks.encode_rows(texts)
            self._count(rows, cuts)
            columns = {name: _as_lists(column) for name, column in rows.columns.items()}
            columns["length"] = pa.array(rows.lengths)
            columns |= {"cut": pa.array(cuts[:, 0]), "cut_second": pa.array(cuts[:, 1])}
            columns["unread"] = pa.array(cuts[:, 2].astype(bool))
            columns |= {name: table.column(name).combine_chunks() for name in self._labels}
            yield pa.record_batch(columns)
            done += len(rows)
            if on_progress is not None:
                on_progress(done, len(self._dataset))

    def _count(self, rows: TokenRows, cuts: npt.NDArray[np.int32]) -> None:
        self._cut += CutCount.of(cuts)
        for ids, _ in rows.columns["input_ids"].chunks:
            self._used = np.pad(self._used, (0, max(0, int(ids.max(initial=0)) + 1 - len(self._used))))
            self._used[ids] = True

    def facts(self) -> dict[str, Any]:
        """The sums of what was cut, and the token ids that occur: one bit an id."""
        used = base64.b64encode(np.packbits(self._used).tobytes()).decode()
        return {"cut": astuple(self._cut), "max_id": len(self._used) - 1, "used_ids": used}


def _as_lists(column: Ragged) -> pa.ListArray:
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(column.lengths(), dtype=np.int32)])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate([ids for ids, _ in column.chunks])))


def _unpack_ids(packed: str) -> npt.NDArray[np.int64]:
    """The sorted ids of a bit map."""
    bits = np.frombuffer(base64.b64decode(packed), dtype=np.uint8)
    return np.flatnonzero(np.unpackbits(bits))
