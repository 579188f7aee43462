"""Equal and nearly equal texts. One pass computes a key and a MinHash signature for each text; texts that share a band of the
signature are then compared. Also an evenly spread sample of the rows of a split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.data.source import Ints, Part

GRAM = 5
"""Letters per shingle; spaces and punctuation are ignored."""
BANDS, BAND_ROWS = 16, 3
HASHES = BANDS * BAND_ROWS
NEAR = 29
"""Equal MinHash values at which two texts are nearly equal: an estimated Jaccard similarity of 0.6."""
MOST_BYTES = 4_096
"""Bytes of a text that are compared for near-duplicates."""
BLOCK_BYTES = 1 << 20
_CHUNK = 100_000
_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
_IS_LETTER = np.array([byte >= 128 or chr(byte).isalnum() for byte in range(256)])


@dataclass
class TextSurvey:
    """Facts about each text. Text numbers: split after split, column after column, row after row.

    `keys` are equal if texts are equal after `" ".join(text.lower().split())`.
    """

    shapes: dict[str, tuple[int, int]]
    """Split -> (first text number, rows)."""
    columns: int
    keys: Ints
    characters: Ints
    signatures: Ints
    """(texts, HASHES)."""

    def of(self, split: str, values: Ints) -> Ints:
        """Return (rows, columns) of a split, from one value per text."""
        first, rows = self.shapes[split]
        return values[first : first + rows * self.columns].reshape(self.columns, rows).T


def survey_texts(parts: Mapping[str, Part], text: Sequence[str]) -> TextSurvey:
    """Read every text once."""
    shapes, at = {}, 0
    for split, part in parts.items():
        shapes[split] = (at, len(part))
        at += len(part) * len(text)
    tables = (table.column(name) for part in parts.values() for name in text for table in part.scan([name]))
    found = [_survey(cells) for column in tables for cells in _pieces(column)]
    return TextSurvey(shapes, len(text), *(np.concatenate(values) for values in zip(*found, strict=True)))


def _pieces(column: Any) -> Iterator[Any]:
    """Yield the cells in lower case with single spaces, in pieces of about BLOCK_BYTES."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for chunk in column.chunks if hasattr(column, "chunks") else [column]:
        step = max(1, int(len(chunk) * BLOCK_BYTES / max(chunk.nbytes, 1)))
        for at in range(0, len(chunk), step):
            cells = pc.utf8_lower(chunk.slice(at, step).cast(pa.large_string()))
            spaced = pc.replace_substring_regex(cells, pattern=r"[\s\v\x1c-\x1f\x85\pZ]+", replacement=" ")
            yield pc.utf8_trim(spaced, characters=" ")


def _survey(cells: Any) -> tuple[Ints, Ints, Ints]:
    """Return keys, characters and signatures of some texts."""
    import pyarrow.compute as pc

    offsets = np.frombuffer(cells.buffers()[1], np.int64)[cells.offset : cells.offset + len(cells) + 1]
    data = cells.buffers()[2]
    raw = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.empty(0, np.uint8)
    offsets = offsets - offsets[0]
    keys = hash_texts(raw, offsets)
    is_letter = _IS_LETTER[raw]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_letter)])[offsets]
    characters = pc.utf8_length(cells).to_numpy(zero_copy_only=False).astype(np.int32)
    return keys, characters, sign_texts(raw[is_letter], starts, keys)


def hash_texts(data: Ints, offsets: Ints) -> Ints:
    """Return 64 bits per text: a polynomial of its bytes, mixed with its length."""
    powers, inverse = (np.full(len(data) + 1, base, np.uint64) for base in (_BASE, _INVERSE))
    powers[:1] = inverse[:1] = 1
    np.cumprod(powers, out=powers)
    np.cumprod(inverse, out=inverse)
    sums = np.zeros(len(data) + 1, np.uint64)
    np.cumsum((data.astype(np.uint64) + np.uint64(1)) * powers[:-1], out=sums[1:])
    found = (sums[offsets[1:]] - sums[offsets[:-1]]) * inverse[offsets[:-1]] ^ np.diff(offsets).astype(np.uint64)
    found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)  # splitmix64
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Ints = found ^ (found >> np.uint64(31))
    return mixed


def sign_texts(data: Ints, offsets: Ints, keys: Ints) -> Ints:
    """Return the MinHash values of the shingles of each text, 16 bits each; of a text without shingles those of its key."""
    grams = np.zeros(max(len(data) - GRAM + 1, 0), np.uint32)
    for place in range(GRAM):
        grams = grams * np.uint32(0x01000193) + data[place : place + len(grams)]
    grams = (grams ^ (grams >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    grams ^= grams >> np.uint32(13)
    starts = offsets[:-1]
    ends = np.maximum(np.minimum(offsets[1:], starts + MOST_BYTES) - (GRAM - 1), starts)
    some = np.flatnonzero(ends > starts)
    bounds = np.stack([starts[some], ends[some]], axis=1).reshape(-1)
    grams = np.append(grams, np.uint32(0))  # reduceat accepts no bound at the end
    rng = np.random.default_rng(20_261_117)
    signatures = np.empty((len(keys), HASHES), np.uint16)
    for column in range(HASHES):
        factor, shift = rng.integers(0, 1 << 32, 2, dtype=np.uint32)
        signatures[:, column] = (keys * np.uint64(factor | np.uint32(1))) >> np.uint64(48)
        if len(some):
            least = np.minimum.reduceat(grams * (factor | np.uint32(1)) + shift, bounds)[::2]
            signatures[some, column] = (least * np.uint32(0x9E3779B1)) >> np.uint32(16)
    return signatures


@dataclass(frozen=True)
class RowSample:
    """Rows of a part: `rows` are their positions, ascending; `columns` are their cells."""

    rows: Ints
    columns: dict[str, list[Any]]


def sample_rows(part: Part, names: list[str], most: int) -> RowSample:
    """Return at most `most` rows, evenly spread over the part."""
    count = len(part)
    rows = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
    table = part.source.dataset.select(rows if part.rows is None else part.rows[rows])
    cells = table.select_columns(names).with_format("arrow")[:] if names else None
    return RowSample(rows, {name: cells.column(name).to_pylist() for name in names} if cells is not None else {})


def find_near(survey: TextSurvey, train_texts: int) -> tuple[Ints, Ints]:
    """Return for each text the first of those equal to it, and the first of those nearly equal to it, itself if there is none.

    Each text is compared with the previous and the first text in its buckets. Texts below `train_texts` are preferred.
    """
    own = np.arange(len(survey.keys), dtype=np.int32)
    first = first_equal(survey.keys)
    only = np.flatnonzero(first < 0).astype(np.int32)
    equal = np.where(first >= 0, first, own)
    near, best = own.copy(), np.full(len(own), NEAR - 1, np.int16)
    for band in range(0, HASHES, BAND_ROWS):
        key = np.zeros(len(only), np.uint64)
        for column in range(band, band + BAND_ROWS):
            key = (key << np.uint64(16)) | survey.signatures[only, column]
        order = np.argsort(key, kind="stable")
        same = np.append(False, key[order][1:] == key[order][:-1])
        numbers, later = only[order], np.flatnonzero(same)
        leader = np.maximum.accumulate(np.where(same, 0, np.arange(len(same))))
        for earlier in (later - 1, leader[later]):
            for at in range(0, len(later), _CHUNK):
                one, two = numbers[earlier[at : at + _CHUNK]], numbers[later[at : at + _CHUNK]]
                agree = (survey.signatures[one] == survey.signatures[two]).sum(axis=1, dtype=np.int16)
                score = np.where(agree >= NEAR, agree + HASHES * (one < train_texts), 0)
                better = score > best[two]
                near[two[better]], best[two[better]] = one[better], score[better]
    near = near[equal]
    while (near[near] != near).any():
        near = near[near]
    return equal, near


def first_equal(keys: Ints) -> Ints:
    """Return for each key the place of its first occurrence; -1 for the first ones themselves."""
    order = np.argsort(keys, kind="stable").astype(np.int32)
    new = np.ones(len(keys), bool)
    ordered = keys[order]
    new[1:] = ordered[1:] != ordered[:-1]
    leader = np.maximum.accumulate(np.where(new, np.arange(len(keys), dtype=np.int32), np.int32(0)))
    again = np.flatnonzero(~new)
    found = np.full(len(keys), -1, np.int32)
    found[order[again]] = order[leader[again]]
    return found
