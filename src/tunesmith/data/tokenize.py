"""Text columns -> token rows, cached by content; every truncated token is counted.

A fast tokenizer's Rust core is copied and called directly: the caller's tokenizer is never changed, and one that hangs or panics
ends in an error. An exported model needs only tokenizer.json and the `tokenizers` library: no pyarrow, no transformers.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from tunesmith.data.batches import Ragged, TokenRows, labels_from_arrow
from tunesmith.data.rows import LINE, content_hash
from tunesmith.errors import ConfigError, DataError, ResourceError, short_text
from tunesmith.files import MAX_JSON_BYTES, BadFile, cache_folder, hash_file, make_folder, read_plain, write_file
from tunesmith.models.files import answer_within

if TYPE_CHECKING:
    from datasets import Dataset

    from tunesmith.data.rows import Columns, Part

log = logging.getLogger(__name__)
VERSION = 7
"""Part of every cache key: raise it when the stored arrays or their meaning change."""
MAX_CACHE_BYTES = 1_000_000_000
"""About 200 million tokens."""
BATCH_ROWS = 1000
USUAL_LENGTH = 512
LONGEST_LENGTH = 8192
"""The longest row when the full length of the model is requested: some models set no limit."""
LongTexts = Literal["head", "head_tail", "full"]
"""Which part of a row that is too long the model sees."""
OnProgress = Callable[[int, int], None]
"""Called with (rows done, rows in total)."""


# --- a split ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tokenized:
    """One split, tokenized."""

    rows: TokenRows
    cut: npt.NDArray[np.int32]
    """Number of tokens that were dropped from each row."""
    truncated: TruncationCount
    empty: tuple[int, ...] = ()
    """Rows that have special tokens only."""


def tokenize(
    dataset: Dataset,
    tokenizer: Any,
    columns: Columns | Sequence[str],
    *,
    max_length: int,
    long_texts: LongTexts = "head",
    cache_dir: str | Path | None = None,
    vocab_size: int | None = None,
    on_progress: OnProgress | None = None,
) -> Tokenized:
    """Return the rows of `tokenizer(*texts, truncation=True, max_length=max_length)`, unpadded; "labels" is kept.

    `vocab_size` is the number of token embeddings of the model; a larger token id is a DataError.
    """
    text = tuple(columns if isinstance(columns, Sequence) else columns.text)
    _check(dataset, tokenizer, text, max_length)
    rendered = not isinstance(columns, Sequence) and bool(columns.rendered)
    encoder = make_token_encoder(tokenizer, max_length, long_texts, rendered=rendered)
    has_types = "token_type_ids" in tokenizer.model_input_names
    key = _hash(content_hash(dataset, text), encoder.fingerprint, text, has_types, VERSION)[:32]
    file = (Path(cache_dir) if cache_dir is not None else cache_folder()) / f"{key}.tokens"
    found = _read_arrays(file)
    if found is None:
        found = _encode_all(dataset, encoder, text, has_types=has_types, on_progress=on_progress)
        _write_arrays(file, found)
    offsets, cut = found.pop("offsets"), found.pop("cut")
    labels = None
    if "labels" in dataset.column_names:
        labels = labels_from_arrow(dataset.select_columns(["labels"]).with_format("arrow")[:].column("labels"))
    rows = TokenRows(
        {name: Ragged(values, offsets) for name, values in found.items()}, np.diff(offsets).astype(np.int32), labels
    )
    largest = max(int(found["input_ids"].max(initial=0)), getattr(tokenizer, "pad_token_id", None) or 0)
    if vocab_size is not None and largest >= vocab_size:
        problem = f"the tokenizer returns token id {largest}, but the model has only {vocab_size} token embeddings"
        raise DataError(problem, fix="Use the tokenizer that belongs to the model.")
    empty = np.flatnonzero(rows.lengths <= tokenizer.num_special_tokens_to_add(pair=len(text) == 2))
    return Tokenized(rows, cut, TruncationCount.of(cut, max_length), tuple(empty.tolist()))


def longest_allowed(
    tokenizer: Any, *, model_max: int | None = None, asked: int | None = None, usual: int = USUAL_LENGTH
) -> int:
    """Return the row length to use: `asked`, or `usual`, but never more than the model and the tokenizer support."""
    # transformers says 1e30 for "unknown"
    limits = [int(n) for n in (model_max, tokenizer.model_max_length) if n is not None and 0 < n < 10_000_000]
    return min([usual if asked is None else asked, *limits])


def describe_lowered_length(asked: int | None, length: int) -> str | None:
    """Return a sentence if a shorter length than requested is used."""
    if asked is None or length >= asked:
        return None
    return f"Warning: --max_seq_length {asked} was lowered to {length}, the longest input that the model supports."


def _check(dataset: Dataset, tokenizer: Any, text: tuple[str, ...], max_length: int) -> None:
    missing = [name for name in text if name not in dataset.column_names]
    if missing or len(text) not in (1, 2):
        fix = f"Name one or two of: {', '.join(dataset.column_names)}."
        raise DataError(f"cannot tokenize the columns {', '.join(text) or '(none)'}", fix=fix)
    if len(dataset) == 0:
        raise DataError("there are no rows to tokenize")
    least = tokenizer.num_special_tokens_to_add(pair=len(text) == 2) + len(text)
    if max_length < least:  # transformers returns such rows untruncated, without a warning
        fix = f"Use {least} or more: the special tokens and one token for each text."
        raise ConfigError(f"max_length {max_length} leaves no room for text", fix=fix)


def _encode_all(
    dataset: Dataset, encoder: TokenEncoder, text: tuple[str, ...], *, has_types: bool, on_progress: OnProgress | None
) -> dict[str, npt.NDArray[Any]]:
    """Return the token columns of all rows, the `offsets` of the rows, and `cut`, the dropped tokens of each row."""
    parts: list[TokenRows] = []
    cuts: list[npt.NDArray[np.int32]] = []
    done = 0
    for table in dataset.select_columns(list(text)).with_format("arrow").iter(batch_size=BATCH_ROWS):
        texts = [table.column(name).to_pylist() for name in text]
        for name, cells in zip(text, texts, strict=True):
            require_text_cells(cells, done, f", column {name}")
        rows, cut = encode_texts(encoder, texts, has_types=has_types)
        parts.append(rows)
        cuts.append(cut)
        done += len(rows)
        if on_progress is not None:
            on_progress(done, len(dataset))
    columns = {name: np.concatenate([part.columns[name].values for part in parts]) for name in parts[0].columns}
    offsets = np.append(0, np.cumsum(np.concatenate([part.lengths for part in parts]), dtype=np.int64))
    return {**columns, "offsets": offsets, "cut": np.concatenate(cuts)}


def _read_arrays(file: Path) -> dict[str, npt.NDArray[Any]] | None:
    """Return the arrays of a cache file; None if it is missing or damaged."""
    try:
        data = read_plain(file, MAX_CACHE_BYTES)
    except (OSError, BadFile):
        return None
    from safetensors.numpy import load

    return load(data[32:]) if hashlib.sha256(data[32:]).digest() == data[:32] else None


def _write_arrays(file: Path, arrays: dict[str, npt.NDArray[Any]]) -> None:
    """Store the arrays, after their checksum. Without a cache, the next run tokenizes again."""
    from safetensors.numpy import save

    data = save(arrays)
    if len(data) > MAX_CACHE_BYTES - 32:
        return
    try:
        make_folder(file.parent)
        write_file(file, hashlib.sha256(data).digest() + data)
    except ResourceError as error:
        log.warning("the tokens are not cached: %s", error)


def require_text_cells(cells: Sequence[Any], before: int, column: str = "") -> None:
    """Refuse the first cell that is not text; there are `before` rows before these."""
    bad = next((i for i, cell in enumerate(cells) if not isinstance(cell, str)), None)
    if bad is not None:
        where = f"row {before + bad + 1}{column}"
        raise DataError(f"{cells[bad]!r} is not text", where=where, fix="Fill the cell or drop the row.")


# --- tokenizers -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainTokenizer:
    """The Rust core, and the settings that transformers stores outside of it."""

    backend_tokenizer: Any
    truncation_side: str
    split_special_tokens: bool

    @property
    def special(self) -> tuple[int, int]:
        """Special tokens of a row with one text, and with two."""
        count = self.backend_tokenizer.num_special_tokens_to_add
        return int(count(False)), int(count(True))


def load_plain_tokenizer(file: Path, *, truncation_side: str, split_special_tokens: bool) -> PlainTokenizer:
    """Load a tokenizer.json."""
    from tokenizers import Tokenizer

    try:
        core = Tokenizer.from_str(read_plain(file, MAX_JSON_BYTES, follow=True).decode("utf-8"))
    except (OSError, BadFile) as error:
        raise ConfigError("cannot be read", where=str(file)) from error
    except Exception as error:  # the library raises plain Exception for a damaged file
        raise ConfigError(f"is not a tokenizer ({short_text(error)})", where=str(file)) from None
    return PlainTokenizer(core, truncation_side, split_special_tokens)


T = TypeVar("T")
_BATCH_CHARS = 2_000_000  # an Encoding takes about 100 bytes per token: a batch of long documents stays near 50 MB
_SECONDS_FLOOR = 60.0
_CHARS_PER_SECOND = 20_000.0  # one core does about 1,000,000: 50x slower is a bomb, not a tokenizer


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One row of tokens; `cut` is the number of dropped tokens."""

    ids: list[int]
    types: list[int]
    cut: int = 0


def make_token_encoder(
    tokenizer: Any, max_length: int, long_texts: LongTexts = "head", *, rendered: bool = False
) -> TokenEncoder:
    """Return the encoder for a tokenizer. `rendered`: the texts were made by `render_rows`."""
    if getattr(tokenizer, "is_fast", False):
        return RustEncoder(tokenizer, max_length, long_texts, rendered=rendered)
    if long_texts == "head_tail" or rendered:
        what = "--long_texts head_tail needs" if not rendered else "three or more text columns need"
        problem = f"{what} a tokenizer.json, which {type(tokenizer).__name__} does not have"
        raise ConfigError(problem, fix="Use --long_texts head." if not rendered else "Use one or two text columns.")
    return PythonEncoder(tokenizer, max_length)


class RustEncoder:
    """For tokenizers backed by the `tokenizers` library, as nearly all are."""

    def __init__(
        self, tokenizer: Any, max_length: int, long_texts: LongTexts = "head", *, rendered: bool = False
    ) -> None:
        core = tokenizer.backend_tokenizer
        self._core = type(core).from_str(core.to_str())
        self._core.no_padding()
        self._core.no_truncation()
        self._core.encode_special_tokens = tokenizer.split_special_tokens
        self._max_length = max_length
        # A rendered column begins with its name, which is kept.
        self._side = "both" if long_texts == "head_tail" else "right" if rendered else tokenizer.truncation_side
        self._rendered = rendered
        # Without offsets it is faster. They show which tokens belong to which column.
        self._encode = self._core.encode_batch if rendered else self._core.encode_batch_fast
        settings = (self._max_length, self._side, tokenizer.split_special_tokens, *(["rendered"] * rendered))
        self.fingerprint = _hash(self._core.to_str(), *settings)

    def encode(self, texts: Sequence[list[str]]) -> list[EncodedRow]:
        """Encode whole rows, so that the number of dropped tokens is exact; then truncate the long ones."""
        short, unread = shorten(texts, self._max_length, self._side, rendered=self._rendered)
        rows: list[EncodedRow] = []
        for part in _parts(short):
            inputs: list[Any] = part[0] if len(part) == 1 else list(zip(*part, strict=True))
            seconds = _SECONDS_FLOOR + sum(len(cell) for column in part for cell in column) / _CHARS_PER_SECOND
            for text, whole in zip(inputs, call_within(seconds, partial(self._encode, inputs)), strict=True):
                fits = len(whole) <= self._max_length
                # Truncated here: Rust builds all combinations of the overflowing parts of a pair, 5 to 10x slower.
                ends = find_ends(text) if self._rendered and not fits else ()
                rows.append(
                    EncodedRow(whole.ids, whole.type_ids)
                    if fits
                    else cut_row(whole, self._max_length, self._side, ends)
                )
        return _count_unread(rows, unread)


class PythonEncoder:
    """For the few tokenizers written in Python (BERTweet, CANINE, BertJapanese)."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), default=str)
        # paths of files differ between machines
        options = {
            name: value
            for name, value in tokenizer.init_kwargs.items()
            if name != "name_or_path" and not name.endswith("_file") and not isinstance(value, os.PathLike)
        }
        settings = json.dumps(options, sort_keys=True, default=str)
        files, side = _hash_files(tokenizer), tokenizer.truncation_side
        self.fingerprint = _hash(type(tokenizer).__name__, vocabulary, settings, files, max_length, side)

    def encode(self, texts: Sequence[list[str]]) -> list[EncodedRow]:
        """As `RustEncoder.encode`."""
        short, unread = shorten(texts, self._max_length, self._tokenizer.truncation_side)
        options = {"padding": False, "return_token_type_ids": True, "return_attention_mask": False, "verbose": False}
        whole = self._tokenizer(*short, truncation=False, **options)["input_ids"]
        cut = self._tokenizer(*short, truncation=True, max_length=self._max_length, **options)
        kept = zip(whole, cut["input_ids"], cut["token_type_ids"], strict=True)
        rows = [EncodedRow(ids, types, len(full) - len(ids)) for full, ids, types in kept]
        return _count_unread(rows, unread)


TokenEncoder = RustEncoder | PythonEncoder
"""Both have a `fingerprint`, which is equal for tokenizers that return equal tokens."""


def call_within(seconds: float, work: Callable[[], T]) -> T:
    """Return the result of `work`; a DataError if it takes longer, or if the Rust code panics."""
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


def padded_fingerprint(tokenizer: Any, max_length: int) -> str:
    """Return a hash of everything that changes tokens or padding; a resumed run compares it."""
    names = ("pad_token_id", "pad_token_type_id", "padding_side", "model_input_names")
    padding = [getattr(tokenizer, name, None) for name in names]
    return _hash(make_token_encoder(tokenizer, max_length).fingerprint, padding)


def _parts(texts: Sequence[list[str]]) -> Iterator[list[list[str]]]:
    """Split the rows into parts of at most _BATCH_CHARS characters."""
    start = chars = 0
    for i, row in enumerate(zip(*texts, strict=True)):
        size = sum(map(len, row))
        if chars and chars + size > _BATCH_CHARS:
            yield [column[start:i] for column in texts]
            start, chars = i, 0
        chars += size
    yield [column[start:] for column in texts]


def _hash_files(tokenizer: Any) -> str:
    """Hash the files that the tokenizer writes: they contain merges and the like, which are not in the vocabulary."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_vocabulary(folder)
        except (NotImplementedError, OSError, AttributeError):
            return ""
        files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
        return _hash(*((p.name, hash_file(p)) for p in files))


def _hash(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()


# --- rows that are too long -------------------------------------------------------------------------------------------

CHARS_PER_TOKEN = 256
LEAST_CHARS = 65_536
"""Only `max_length` times 256 characters of a text are read, and at least 65,536. Tokenizing takes some 200 bytes per character:
a text of 16 MB took 4.3 GB. The tokens up to `max_length` are the same, unless they have more than 256 characters on average."""


def shorten(
    texts: Sequence[list[str]], max_length: int, side: str, *, rendered: bool = False
) -> tuple[Sequence[list[str]], set[int]]:
    """Return the texts without the part that no row of `max_length` tokens can include, and the rows that were shortened."""
    most = max(LEAST_CHARS, CHARS_PER_TOKEN * max_length)
    unread: set[int] = set()
    columns = []
    for column in texts:
        long = [i for i, cell in enumerate(column) if len(cell) > most]
        if long:
            column = list(column)
        for i in long:
            parts = column[i].split(LINE) if rendered else [column[i]]
            kept = share_longest_first([len(part) for part in parts], most)
            column[i] = LINE.join(_part_of(part, room, side) for part, room in zip(parts, kept, strict=True))
        unread.update(long)
        columns.append(column)
    return columns, unread


def _part_of(text: str, most: int, side: str) -> str:
    if len(text) <= most:
        return text
    if side == "both":
        return f"{text[: most // 2]} {text[1 - most // 2 :]}"
    return text[-most:] if side == "left" else text[:most]


def _count_unread(rows: list[EncodedRow], unread: set[int]) -> list[EncodedRow]:
    """Count an unread end as one dropped token, so that the row is counted as truncated."""
    for i in unread:
        rows[i] = replace(rows[i], cut=rows[i].cut + 1)
    return rows


def find_ends(text: str) -> npt.NDArray[np.int64]:
    """Return where the columns of a rendered text end, but not the last one."""
    return np.cumsum([len(line) + 1 for line in text.split(LINE)])[:-1] - 1


def cut_row(whole: Any, max_length: int, side: str, ends: Sequence[int] | npt.NDArray[np.int64] = ()) -> EncodedRow:
    """Drop tokens of the texts until the encoding fits, as `truncation="longest_first"` does.

    With `side` both, each truncated text keeps its beginning and its end. `ends`: of the columns in a rendered text,
    which are truncated like separate texts.
    """
    sides = whole.sequence_ids
    if len(ends):
        columns = np.searchsorted(ends, [start for start, _ in whole.offsets], side="right").tolist()
        sides = [None if one is None else column for one, column in zip(sides, columns, strict=True)]
    sizes = [sides.count(number) for number in range(max(2, len(ends) + 1))]
    kept = share_longest_first(sizes, max_length - (len(sides) - sum(sizes)))
    ids, types = whole.ids, whole.type_ids
    spans = [(sides.index(s), n, k) for s, (n, k) in enumerate(zip(sizes, kept, strict=True)) if n > k]
    for start, size, keep in sorted(spans, reverse=True):
        before = {"left": 0, "right": keep, "both": keep - keep // 2}[side]
        drop = slice(start + before, start + before + size - keep)
        del ids[drop], types[drop]
    return EncodedRow(ids, types, sum(sizes) - sum(kept))


def share_longest_first(sizes: Sequence[int], room: int) -> list[int]:
    """Return the number of tokens to keep of each text: truncate the longest one first, then all long ones equally."""
    kept = list(sizes)
    for done, at in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        kept[at] = min(sizes[at], room // (len(sizes) - done))
        room -= kept[at]
    return kept


@dataclass(frozen=True, slots=True)
class TruncationCount:
    """Tokens of one split dropped by `max_length`. The unread end of a very long text counts as one token."""

    rows: int
    rows_cut: int
    tokens_cut: int
    max_length: int

    @classmethod
    def of(cls, cut: npt.NDArray[np.int32], max_length: int) -> TruncationCount:
        """Count the tokens dropped from each row."""
        return cls(len(cut), int((cut > 0).sum()), int(cut.sum(dtype=np.int64)), max_length)

    def sentence(self, split: str) -> str:
        """Return one line for the user."""
        if not self.rows_cut:
            return f"{split}: no row is longer than {self.max_length} tokens"
        share = 100 * self.rows_cut / self.rows
        return (
            f"{split}: {self.rows_cut} of {self.rows} rows ({share:.1f}%) were truncated to {self.max_length} tokens, "
            f"{self.tokens_cut} tokens lost"
        )


def describe_empty(what: str, rows: Sequence[int], part: Part | None = None) -> str:
    """Return one line about rows without a token of text."""
    count = "1 row has" if len(rows) == 1 else f"{len(rows):,} rows have"
    first = f"row {rows[0] + 1}" if part is None else part.where(rows[0])
    return (
        f"Warning: {what}: {count} no text tokens (first: {first}), so the model sees only special tokens. "
        "Remove them, or look for characters that the tokenizer drops."
    )


def encode_texts(
    encoder: TokenEncoder, texts: Sequence[list[str]], *, has_types: bool
) -> tuple[TokenRows, npt.NDArray[np.int32]]:
    """Return the rows of one or two columns of texts, in order, and the number of tokens dropped from each."""
    encoded = encoder.encode(texts)
    columns = {"input_ids": Ragged.from_lists([row.ids for row in encoded])}
    if has_types:
        columns["token_type_ids"] = Ragged.from_lists([row.types for row in encoded], np.int8)
    cut = np.array([row.cut for row in encoded], dtype=np.int32)
    return TokenRows(columns, columns["input_ids"].lengths(), None), cut
