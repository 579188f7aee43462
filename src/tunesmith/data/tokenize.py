"""Text columns -> token rows, cached by content, every cut token counted."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import chain
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tunesmith.data.cache import RowCache, content_hash, release_pages
from tunesmith.data.tokens import Ragged, TextWindows, TokenRows
from tunesmith.errors import ConfigError, DataError, WorkerError, short_text
from tunesmith.files import MAX_JSON_BYTES, BadFile, read_plain
from tunesmith.runs.environment import answer_within
from tunesmith.runs.remembered import own_cache
from tunesmith.runs.writing import hash_file

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
    cache, key = RowCache(Path(cache_dir) if cache_dir is not None else own_cache() / "tokens"), writer.key()
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


@dataclass(frozen=True)
class PlainTokenizer:
    """The Rust core, and the settings that transformers keeps beside it."""

    backend_tokenizer: Any
    truncation_side: str
    split_special_tokens: bool

    @property
    def special(self) -> tuple[int, int]:
        """Special tokens of a row with one text, and with two."""
        count = self.backend_tokenizer.num_special_tokens_to_add
        return int(count(False)), int(count(True))


def load_plain_tokenizer(file: Path, *, truncation_side: str, split_special_tokens: bool) -> PlainTokenizer:
    """The tokenizer in a tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        core = Tokenizer.from_str(read_plain(file, MAX_JSON_BYTES, follow=True).decode("utf-8"))
    except (OSError, BadFile) as error:
        raise ConfigError("cannot be read", where=str(file)) from error
    except Exception as error:  # the library raises plain Exception for a damaged file
        raise ConfigError(f"is not a tokenizer ({short_text(error)})", where=str(file)) from None
    return PlainTokenizer(core, truncation_side, split_special_tokens)


T = TypeVar("T")
_BATCH_CHARS = 2_000_000  # an Encoding takes about 100 bytes a token: a batch of long documents stays near 50 MB
_SECONDS_FLOOR = 60.0
_CHARS_PER_SECOND = 20_000.0  # one core does about 1,000,000: 50x slower is a bomb, not a tokenizer


class TokenEncoder(Protocol):
    """`fingerprint` is equal for tokenizers that give equal tokens."""

    fingerprint: str
    windows: TextWindows | None
    """The windows in which the model reads rows that are too long for it."""

    def encode(self, texts: Sequence[list[str]]) -> list[EncodedRow]:
        """One row for each element of the one or two text columns."""
        ...


def make_token_encoder(tokenizer: Any, max_length: int, long_texts: LongTexts = "head") -> TokenEncoder:
    """The encoder that gives the rows of `tokenizer(*texts, truncation=True, max_length=max_length)`, except for long texts."""
    if getattr(tokenizer, "is_fast", False):
        return RustEncoder(tokenizer, max_length, long_texts)
    if long_texts in ("head_tail", "windows"):
        raise ConfigError(
            f"long_texts {long_texts} needs a tokenizer with a tokenizer.json, and {type(tokenizer).__name__} has none",
            fix="Use --long_texts head.",
        )
    return PythonEncoder(tokenizer, max_length)


class RustEncoder:
    """For tokenizers backed by the `tokenizers` library, as nearly all are."""

    def __init__(self, tokenizer: Any, max_length: int, long_texts: LongTexts = "head") -> None:
        core = tokenizer.backend_tokenizer
        self._core = type(core).from_str(core.to_str())
        self._core.no_padding()
        self._core.no_truncation()
        self._core.encode_special_tokens = tokenizer.split_special_tokens
        self.windows = self._make_windows(max_length) if long_texts == "windows" else None
        self._max_length = max_length if self.windows is None else self.windows.longest
        self._side = "both" if long_texts == "head_tail" else tokenizer.truncation_side
        self._others = (max_length, long_texts, tokenizer.truncation_side, tokenizer.split_special_tokens)
        self.fingerprint = _hash(self._core.to_str(), self._max_length, self._side, tokenizer.split_special_tokens)

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: plain values, of which `_rebuild` makes an encoder like this one."""
        return _rebuild, (self._core.to_str(), *self._others)

    def encode(self, texts: Sequence[list[str]]) -> list[EncodedRow]:
        """Rows are encoded whole, so that what is cut is known exactly; then the long ones are cut."""
        if self.windows is not None and len(texts) == 2:
            raise ConfigError("long_texts windows is for rows of one text, not for pairs", fix="Use --long_texts head.")
        short, unread = shorten(texts, self._max_length, self._side)
        rows: list[EncodedRow] = []
        for part in _parts(short):
            whole = self._call(part)
            long = [i for i, e in enumerate(whole) if len(e) > self._max_length]
            cut = self._cut([whole[i] for i in long], [[column[i] for i in long] for column in part])
            done = dict(zip(long, cut, strict=True))
            rows.extend(done.get(i) or EncodedRow(e.ids, e.type_ids) for i, e in enumerate(whole))
        return _mark_unread(rows, unread)

    def _make_windows(self, length: int) -> TextWindows:
        special = self._core.encode("a").special_tokens_mask
        return TextWindows(length, special.index(0), special[::-1].index(0))

    def _cut(self, whole: Sequence[Any], texts: Sequence[list[str]]) -> list[EncodedRow]:
        """Cut here and not in Rust, which builds all combinations of the overflowing parts of a pair: 5 to 10x slower.

        One row of the batch is cut both ways; should the two ever differ, Rust cuts all.
        """
        rows = [cut_row(e, self._max_length, self._side) for e in whole]
        if self._side == "both":  # Rust cuts one side only
            return rows
        sample = next((i for i, e in enumerate(whole) if len(e) < 8 * self._max_length), None)
        if sample is None:
            return rows
        [checked] = self._cut_in_rust([whole[sample]], [[column[sample]] for column in texts])
        return rows if rows[sample] == checked else self._cut_in_rust(whole, texts)

    def _cut_in_rust(self, whole: Sequence[Any], texts: Sequence[list[str]]) -> list[EncodedRow]:
        self._core.enable_truncation(self._max_length, direction=self._side)
        try:
            short = self._call(texts)
        finally:
            self._core.no_truncation()
        pairs = [(e, before.sequence_ids, e.sequence_ids) for before, e in zip(whole, short, strict=True)]
        return [
            EncodedRow(e.ids, e.type_ids, len(before) - len(after), before.count(1) - after.count(1))
            for e, before, after in pairs
        ]

    def _call(self, texts: Sequence[list[str]]) -> list[Any]:
        inputs = texts[0] if len(texts) == 1 else list(zip(*texts, strict=True))
        size = sum(len(cell) for column in texts for cell in column)
        found: list[Any] = call_within(
            _SECONDS_FLOOR + size / _CHARS_PER_SECOND, partial(self._core.encode_batch_fast, inputs)
        )
        return found


def _rebuild(core: str, max_length: int, long_texts: LongTexts, side: str, split: bool) -> RustEncoder:
    from tokenizers import Tokenizer

    return RustEncoder(PlainTokenizer(Tokenizer.from_str(core), side, split), max_length, long_texts)


class PythonEncoder:
    """For the few tokenizers written in Python (BERTweet, CANINE, BertJapanese)."""

    windows: TextWindows | None = None

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), default=str)
        options = {k: v for k, v in tokenizer.init_kwargs.items() if not _names_a_file(k, v)}
        settings = json.dumps(options, sort_keys=True, default=str)
        self.fingerprint = _hash(
            type(tokenizer).__name__,
            vocabulary,
            settings,
            _hash_files(tokenizer),
            max_length,
            tokenizer.truncation_side,
        )

    def encode(self, texts: Sequence[list[str]]) -> list[EncodedRow]:
        """As `RustEncoder.encode`; for pairs the side of a cut is not known."""
        short, unread = shorten(texts, self._max_length, self._tokenizer.truncation_side)
        options = {"padding": False, "return_token_type_ids": True, "return_attention_mask": False, "verbose": False}
        whole = self._tokenizer(*short, truncation=False, **options)["input_ids"]
        cut = self._tokenizer(*short, truncation=True, max_length=self._max_length, **options)
        rows = []
        for full, ids, types in zip(whole, cut["input_ids"], cut["token_type_ids"], strict=True):
            lost = len(full) - len(ids)
            rows.append(EncodedRow(ids, types, lost, UNKNOWN if lost and len(texts) == 2 else 0))
        return _mark_unread(rows, unread)


def call_within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns; a DataError when it takes longer, or when the Rust side panics."""
    try:
        return answer_within(seconds, work)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except TimeoutError:
        fix = "Look for a runaway regular expression in its tokenizer.json."
        raise DataError(f"the tokenizer did not finish a batch within {seconds:.0f} s", fix=fix) from None
    except BaseException as error:  # pyo3's PanicException is not an Exception
        fix = "Its tokenizer.json may be damaged or hostile; use another copy."
        raise DataError(f"the tokenizer failed ({short_text(error)})", fix=fix) from error


def require_text_cells(cells: Sequence[Any], before: int, column: str = "") -> None:
    """Refuses the first cell that is not text; there are `before` rows before these."""
    bad = next((i for i, cell in enumerate(cells) if not isinstance(cell, str)), None)
    if bad is not None:
        raise DataError(
            f"{cells[bad]!r} is not text", where=f"row {before + bad + 1}{column}", fix="Fill the cell or drop the row."
        )


def _mark_unread(rows: list[EncodedRow], unread: dict[int, bool]) -> list[EncodedRow]:
    """An unread end counts as one token cut, so that the row is counted as cut."""
    for i, second in unread.items():
        row = rows[i]
        beside = row.cut_second if row.cut_second == UNKNOWN else row.cut_second + second
        rows[i] = replace(row, cut=row.cut + 1, cut_second=beside, unread=True)
    return rows


def _parts(texts: Sequence[list[str]]) -> Iterator[list[list[str]]]:
    start = chars = 0
    for i, row in enumerate(zip(*texts, strict=True)):
        size = sum(map(len, row))
        if chars and chars + size > _BATCH_CHARS:
            yield [column[start:i] for column in texts]
            start, chars = i, 0
        chars += size
    yield [column[start:] for column in texts]


def padded_fingerprint(tokenizer: Any, max_length: int) -> str:
    """Equal for tokenizers that give equal tokens and pad them alike: what a run compares when it is resumed."""
    names = ("pad_token_id", "pad_token_type_id", "padding_side", "model_input_names")
    padding = [getattr(tokenizer, name, None) for name in names]
    return _hash(make_token_encoder(tokenizer, max_length).fingerprint, padding)


def _names_a_file(name: str, value: object) -> bool:
    return name in ("name_or_path", "tokenizer_file") or name.endswith("_file") or isinstance(value, os.PathLike)


def _hash_files(tokenizer: Any) -> str:
    """A hash of the files that the tokenizer writes: they hold merges and the like, which are in no vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_vocabulary(folder)
        except (NotImplementedError, OSError, AttributeError):
            return ""
        files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
        return _hash(*((p.name, hash_file(p)) for p in files))


def _hash(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()


CHARS_A_TOKEN = 256
LEAST_CHARS = 65_536
"""Of a text, `max_length` times 256 characters are read, and at least 65,536, up to a blank near that place. A text takes
some 200 bytes a character while it is tokenized: one of 16 MB took 4.3 GB. Words that blanks set apart are tokenized one by
one, so the tokens up to `max_length` are the same, unless a token has more than 256 characters on average."""
UNKNOWN = -1
LongTexts = Literal["head", "head_tail", "windows", "full"]
"""What the model sees of a row that is too long: docs/research/recipes.md."""


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One row as the model gets it; `cut` tokens were dropped, `cut_second` of them from the second text, or UNKNOWN.

    `unread`: a text was so long that its end was never tokenized: it counts as one more token cut.
    """

    ids: list[int]
    types: list[int]
    cut: int = 0
    cut_second: int = 0
    unread: bool = False


def shorten(texts: Sequence[list[str]], max_length: int, side: str) -> tuple[Sequence[list[str]], dict[int, bool]]:
    """The texts without what no row of `max_length` tokens can hold; the rows of which something is missing.

    The value says whether it is the second text of the row alone.
    """
    most = max(LEAST_CHARS, CHARS_A_TOKEN * max_length)
    unread: dict[int, bool] = {}
    columns = []
    for number, column in enumerate(texts):
        long = [i for i, cell in enumerate(column) if len(cell) > most]
        if long:
            column = list(column)
        for i in long:
            column[i] = _part_of(column[i], most, side)
            unread.setdefault(i, number == 1)
        columns.append(column)
    return columns, unread


def _part_of(text: str, most: int, side: str) -> str:
    if side == "both":
        return f"{_start_of(text, most // 2)} {_end_of(text, most // 2 - 1)}"
    return _end_of(text, most) if side == "left" else _start_of(text, most)


def _start_of(text: str, most: int) -> str:
    """At most this many characters, ending before a blank if there is one in the second half."""
    blanks = (i for i in range(most, most // 2, -1) if text[i].isspace())
    return text[: next(blanks, most)]


def _end_of(text: str, most: int) -> str:
    blanks = (i for i in range(len(text) - most, len(text) - most // 2) if text[i].isspace())
    return text[next(blanks, len(text) - most) :]


def cut_row(whole: Any, max_length: int, side: str) -> EncodedRow:
    """A whole encoding with tokens of its texts dropped until it fits, as `truncation="longest_first"` does.

    With `side` both, each text that is cut keeps its beginning and its end.
    """
    sides = whole.sequence_ids
    sizes = (sides.count(0), sides.count(1))
    kept = share_longest_first(sizes, max_length - (len(sides) - sum(sizes)))
    ids, types = whole.ids, whole.type_ids
    spans = [(sides.index(s), n, k) for s, (n, k) in enumerate(zip(sizes, kept, strict=True)) if n > k]
    for start, size, keep in sorted(spans, reverse=True):
        before = {"left": 0, "right": keep, "both": keep - keep // 2}[side]
        drop = slice(start + before, start + before + size - keep)
        del ids[drop], types[drop]
    return EncodedRow(ids, types, sum(sizes) - sum(kept), sizes[1] - kept[1])


def share_longest_first(sizes: tuple[int, int], room: int) -> tuple[int, int]:
    """The number of tokens kept of each text: the longer one is cut down to the shorter, then both equally."""
    short, long = sorted(sizes)
    if short + long > room:
        long = max(short, room - short)
    if short + long > room:
        short = room // 2
        long = room - short
    return (short, long) if sizes[0] <= sizes[1] else (long, short)


@dataclass(frozen=True, slots=True)
class CutCount:
    """Sums over rows; `unknown`: rows of which it is not known which text the cut tokens are of."""

    rows: int = 0
    tokens: int = 0
    second: int = 0
    unread: int = 0
    unknown: int = 0

    @classmethod
    def of(cls, cuts: npt.NDArray[np.int32]) -> CutCount:
        """Of rows with (`cut`, `cut_second`, `unread`) each, as in EncodedRow."""
        tokens, second, unread = cuts.sum(axis=0, dtype=np.int64).tolist()
        return cls(int((cuts[:, 0] > 0).sum()), tokens, second, unread, int((cuts[:, 1] == UNKNOWN).sum()))

    def __add__(self, other: CutCount) -> CutCount:
        return CutCount(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    def in_split(self, rows: int, sides: int, max_length: int) -> TruncationCount:
        """The same for a split of so many rows, each of one text or two."""
        by_side = None if self.unknown else (self.tokens - self.second, self.second)[:sides]
        return TruncationCount(rows, self.rows, self.tokens, by_side, max_length, self.unread)


@dataclass(frozen=True, slots=True)
class TruncationCount:
    """What `max_length` cut off in one split. `by_side`: tokens cut of each text; None when the tokenizer cannot tell."""

    rows: int
    rows_cut: int
    tokens_cut: int
    by_side: tuple[int, ...] | None
    max_length: int
    unread: int = 0
    """Rows with a text so long that its end was never tokenized: the tokens in it are not counted."""

    def sentence(self, split: str) -> str:
        """One line for a person."""
        if not self.rows_cut:
            return f"{split}: no row is longer than {self.max_length} tokens"
        share = 100 * self.rows_cut / self.rows
        sides = f" ({' + '.join(str(n) for n in self.by_side)})" if self.by_side and len(self.by_side) > 1 else ""
        return (
            f"{split}: {self.rows_cut} of {self.rows} rows ({share:.1f}%) were cut at {self.max_length} tokens, "
            f"{'at least ' if self.unread else ''}{self.tokens_cut}{sides} tokens lost"
        )


def describe_empty(what: str, rows: Sequence[int]) -> str:
    """One line about rows without a token of text."""
    count = "1 row has" if len(rows) == 1 else f"{len(rows):,} rows have"
    return (
        f"Warning: {what}: {count} no token of text (first: row {rows[0] + 1}): the model sees nothing of them. "
        "Remove them, or look for characters that the tokenizer drops."
    )


EncodedRows = tuple[TokenRows, npt.NDArray[np.int32]]
"""Rows, and of each how many tokens were cut, how many of them from its second text, and whether its end is unread."""


def make_token_rows(encoded: Sequence[EncodedRow], *, has_types: bool) -> TokenRows:
    """The rows as arrays."""
    columns = {"input_ids": Ragged.from_lists([row.ids for row in encoded])}
    if has_types:
        columns["token_type_ids"] = Ragged.from_lists([row.types for row in encoded], np.int8)
    return TokenRows(columns, columns["input_ids"].lengths(), None)


def join_token_rows(parts: Sequence[TokenRows]) -> TokenRows:
    """The rows of all parts, concatenated; only the lengths are copied."""
    if len(parts) == 1:
        return parts[0]
    starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    columns = {}
    for name in parts[0].columns:
        columns[name] = Ragged(tuple(chain.from_iterable(part.columns[name].chunks for part in parts)), starts)
    return TokenRows(columns, np.concatenate([part.lengths for part in parts]), None)


PIECE_ROWS = 256
LEAST_ROWS = 1024
"""Fewer rows are tokenized in this process: starting others would take longer."""
SPARED_CORES = 2
"""One drives the GPU, one makes its batches."""
_PACKAGES = Path(__file__).resolve().parents[2]
_PROGRAM = "import sys; sys.path.append(sys.argv[2]); from tunesmith.data.encoding_processes import work; work()"
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


class ChunkEncoder:
    """`encode(texts)` gives token rows and what was cut of them; with `processes`, large chunks are shared among them."""

    def __init__(self, encoder: TokenEncoder, *, has_types: bool, processes: int = 0) -> None:
        self._encoder = encoder
        self._has_types = has_types
        self._count = processes if sys.executable else 0
        self._crew: _Crew | None = None
        self._lock = threading.Lock()

    def encode(self, texts: Sequence[list[str]]) -> tuple[TokenRows, CutCount]:
        """The rows of one or two columns of texts, in their order, and what was cut of all of them."""
        rows, cuts = self.encode_rows(texts)
        return rows, CutCount.of(cuts)

    def encode_rows(self, texts: Sequence[list[str]]) -> EncodedRows:
        """The same with what was cut of each row."""
        if self._count < 1 or len(texts[0]) < LEAST_ROWS:
            return self.encode_here(texts)
        with self._lock:
            if self._crew is None or self._crew.owner != os.getpid():  # after a fork, the pipes are the parent's
                self._crew = _Crew(self._count, self._encoder, self._has_types)
            try:
                return self._share(self._crew, texts)
            except BaseException:  # answers are still on their way: the next call would take them for its own
                self._crew.end()
                self._crew = None
                raise

    def encode_here(self, texts: Sequence[list[str]]) -> EncodedRows:
        """The same in this process."""
        encoded = self._encoder.encode(texts)
        cuts = np.array([(row.cut, row.cut_second, row.unread) for row in encoded], dtype=np.int32).reshape(-1, 3)
        return make_token_rows(encoded, has_types=self._has_types), cuts

    def _share(self, crew: _Crew, texts: Sequence[list[str]]) -> EncodedRows:
        """Sends pieces to idle processes; while all of them are still starting, encodes pieces here."""
        starts = range(0, len(texts[0]), PIECE_ROWS)
        todo = deque((n, [column[at : at + PIECE_ROWS] for column in texts]) for n, at in enumerate(starts))
        found: dict[int, EncodedRows] = {}
        while len(found) < len(starts):
            crew.give(todo)
            if crew.busy:
                found.update(crew.take())
            elif todo:
                number, piece = todo.popleft()
                found[number] = self.encode_here(piece)
        parts = [found[n] for n in range(len(starts))]
        return join_token_rows([rows for rows, _ in parts]), np.concatenate([cuts for _, cuts in parts])


class _Crew:
    """The worker processes. They end when their pipe is closed: with this object, or with the process that owns it."""

    def __init__(self, count: int, encoder: TokenEncoder, has_types: bool) -> None:
        self.owner = os.getpid()
        started = [_start() for _ in range(count)]
        self.starting: list[Connection] = [pipe for pipe, _ in started]
        self.idle: list[Connection] = []
        self.busy: dict[Connection, int] = {}
        self._settings = (encoder, has_types)
        self.end = weakref.finalize(self, _end, started, self.owner)

    def give(self, todo: deque[tuple[int, list[list[str]]]]) -> None:
        """Sends a piece to each idle process."""
        for pipe in wait(self.starting, timeout=0):
            assert isinstance(pipe, Connection)
            self.starting.remove(pipe)
            try:
                pipe.recv()  # it runs: a send of any size will be read
                pipe.send(self._settings)
                self.idle.append(pipe)
            except (EOFError, OSError):  # it could not start: the others do the work
                pass
        while todo and self.idle:
            pipe, (number, piece) = self.idle.pop(), todo.popleft()
            self.busy[pipe] = number
            try:
                pipe.send(piece)
            except OSError:
                raise self._died(number) from None

    def take(self) -> dict[int, EncodedRows]:
        """The answers that have arrived; waits for one, or for a process to start."""
        found = {}
        for pipe in wait([*self.busy, *self.starting]):
            if not isinstance(pipe, Connection) or pipe not in self.busy:
                continue
            number = self.busy.pop(pipe)
            try:
                answer = pipe.recv()
            except (EOFError, OSError):
                raise self._died(number) from None
            if isinstance(answer, BaseException):
                raise answer
            found[number] = answer
            self.idle.append(pipe)
        return found

    def _died(self, number: int) -> WorkerError:
        first = number * PIECE_ROWS + 1
        problem = f"a process that tokenized rows {first} to {first + PIECE_ROWS - 1} of a chunk died"
        how = "--preprocessing_num_workers 1 (train) or threads=1 (Predictor.load) tokenizes in one process"
        return WorkerError(problem, fix=f"Memory may have run out, or a text ended it; {how}.")


def _start() -> tuple[Connection, subprocess.Popen[bytes]]:
    """A process at the other end of a pipe, in its own process group, so that Ctrl-C reaches the parent only."""
    mine, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(_PACKAGES)],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=os.environ | _QUIET,
            process_group=0,
        )
    return mine, process


def _end(started: list[tuple[Connection, subprocess.Popen[bytes]]], owner: int) -> None:
    for pipe, _ in started:
        pipe.close()
    for _, process in started if os.getpid() == owner else ():
        process.kill()
        process.wait()


def work() -> None:
    """The main loop of a worker: report that it runs, receive the tokenizer, then encode texts until the pipe is closed."""
    pipe = Connection(int(sys.argv[1]))
    try:
        pipe.send(None)
        encoder, has_types = pipe.recv()
        chunks = ChunkEncoder(encoder, has_types=has_types)
        while True:
            texts = pipe.recv()
            try:
                answer: Any = chunks.encode_here(texts)
            except Exception as error:
                answer = error
            pipe.send(answer)
    except (EOFError, OSError):
        return
