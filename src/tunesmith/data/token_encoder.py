"""Texts -> token ids, and how many tokens `max_length` cut.

A fast tokenizer's Rust core is copied and called directly: the caller's tokenizer is never changed, and one that
hangs or panics ends in an error, not in a dead process.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from tunesmith.errors import DataError

T = TypeVar("T")
_BATCH_CHARS = 2_000_000  # an Encoding takes about 100 bytes a token: a batch of long documents stays near 50 MB
_SECONDS_FLOOR = 60.0
_CHARS_PER_SECOND = 20_000.0  # one core does about 1,000,000: 50x slower is a bomb, not a tokenizer
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """One row as the model gets it; `cut` tokens were dropped, `cut_second` of them from the second text (-1: unknown)."""

    ids: list[int]
    types: list[int]
    cut: int = 0
    cut_second: int = 0


class Encoder(Protocol):
    """`fingerprint` is equal for tokenizers that give equal tokens."""

    fingerprint: str

    def encode(self, texts: Sequence[list[str]]) -> list[EncodedRow]:
        """One row for each element of the one or two text columns."""
        ...


def make_encoder(tokenizer: Any, max_length: int) -> Encoder:
    """The encoder that equals `tokenizer(*texts, truncation=True, max_length=max_length)`."""
    if getattr(tokenizer, "is_fast", False):
        return RustEncoder(tokenizer, max_length)
    return PythonEncoder(tokenizer, max_length)


class RustEncoder:
    """For tokenizers backed by the `tokenizers` library: nearly all of them."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        core = tokenizer.backend_tokenizer
        self._core = type(core).from_str(core.to_str())
        self._core.no_padding()
        self._core.no_truncation()
        self._core.encode_special_tokens = tokenizer.split_special_tokens
        self._max_length = max_length
        self._side = tokenizer.truncation_side
        self.fingerprint = _hash(self._core.to_str(), max_length, self._side, tokenizer.split_special_tokens)

    def encode(self, texts: Sequence[list[str]]) -> list[EncodedRow]:
        """Rows are encoded whole, and those that are too long once more with truncation: so the cut is known exactly."""
        rows: list[EncodedRow] = []
        for part in _parts(texts):
            whole = self._call(part)
            long = [i for i, e in enumerate(whole) if len(e.ids) > self._max_length]
            done = [EncodedRow(e.ids, e.type_ids) if len(e.ids) <= self._max_length else None for e in whole]
            for i, cut in zip(long, self._cut([[column[i] for i in long] for column in part]), strict=True):
                lost = _side_sizes(whole[i]) - _side_sizes(cut)
                done[i] = EncodedRow(cut.ids, cut.type_ids, lost.first + lost.second, lost.second)
            rows.extend(row for row in done if row is not None)
        return rows

    def _call(self, texts: Sequence[list[str]]) -> list[Any]:
        inputs = texts[0] if len(texts) == 1 else list(zip(*texts, strict=True))
        size = sum(len(cell) for column in texts for cell in column)
        found: list[Any] = call_within(
            _SECONDS_FLOOR + size / _CHARS_PER_SECOND, partial(self._core.encode_batch_fast, inputs)
        )
        return found

    def _cut(self, texts: Sequence[list[str]]) -> list[Any]:
        if not texts[0]:
            return []
        self._core.enable_truncation(self._max_length, direction=self._side)
        try:
            return self._call(texts)
        finally:
            self._core.no_truncation()


class PythonEncoder:
    """For the few tokenizers written in Python (BERTweet, CANINE, BertJapanese)."""

    def __init__(self, tokenizer: Any, max_length: int) -> None:
        self._tokenizer = tokenizer
        self._max_length = max_length
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()), default=str)
        settings = json.dumps(tokenizer.init_kwargs, sort_keys=True, default=str)
        self.fingerprint = _hash(type(tokenizer).__name__, vocabulary, settings, max_length, tokenizer.truncation_side)

    def encode(self, texts: Sequence[list[str]]) -> list[EncodedRow]:
        """As `RustEncoder.encode`; for pairs the side of a cut is not known."""
        options = {"padding": False, "return_token_type_ids": True, "return_attention_mask": False, "verbose": False}
        whole = self._tokenizer(*texts, truncation=False, **options)["input_ids"]
        cut = self._tokenizer(*texts, truncation=True, max_length=self._max_length, **options)
        rows = []
        for full, ids, types in zip(whole, cut["input_ids"], cut["token_type_ids"], strict=True):
            lost = len(full) - len(ids)
            rows.append(EncodedRow(ids, types, lost, UNKNOWN if lost and len(texts) == 2 else 0))
        return rows


def call_within(seconds: float, work: Callable[[], T]) -> T:
    """What `work` returns; a DataError when it takes longer, or when the Rust side panics.

    The call runs in a daemon thread: Ctrl-C is heard while Rust works, and an endless call cannot hold the process.
    """
    box: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            box.append(work())
        except BaseException as error:  # pyo3's PanicException is no Exception
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="tokenize")
    thread.start()
    thread.join(seconds)
    if box:
        return box[0]
    if not failure:
        raise DataError(
            f"the tokenizer did not finish a batch within {seconds:.0f} s",
            fix="Look for a runaway regular expression in its tokenizer.json.",
        )
    if isinstance(failure[0], (KeyboardInterrupt, SystemExit, MemoryError)):
        raise failure[0]
    text = " ".join(str(failure[0]).split())[:200]
    raise DataError(
        f"the tokenizer failed ({text})", fix="Its tokenizer.json may be damaged or hostile; use another copy."
    ) from failure[0]


@dataclass(frozen=True, slots=True)
class _Sides:
    first: int
    second: int

    def __sub__(self, other: _Sides) -> _Sides:
        return _Sides(self.first - other.first, self.second - other.second)


def _side_sizes(encoding: Any) -> _Sides:
    sides = encoding.sequence_ids
    return _Sides(sides.count(0), sides.count(1))


def _parts(texts: Sequence[list[str]]) -> Iterator[list[list[str]]]:
    start = chars = 0
    for i, row in enumerate(zip(*texts, strict=True)):
        size = sum(map(len, row))
        if chars and chars + size > _BATCH_CHARS:
            yield [column[start:i] for column in texts]
            start, chars = i, 0
        chars += size
    yield [column[start:] for column in texts]


def _hash(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()
