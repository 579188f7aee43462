"""Texts -> token ids, and how many tokens `max_length` cut.

A fast tokenizer's Rust core is copied and called directly: the caller's tokenizer is never changed, and one that hangs or panics
ends in an error, not in a dead process. A graph runtime has tokenizer.json and the `tokenizers` library alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tunesmith.data.truncation import UNKNOWN, EncodedRow, LongTexts, TextWindows, cut_row, shorten
from tunesmith.errors import ConfigError, DataError, short_text
from tunesmith.files import MAX_JSON_BYTES, BadFile, read_plain
from tunesmith.runs.environment import answer_within
from tunesmith.runs.writing import hash_file


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
