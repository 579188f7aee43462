"""One pass over the texts of all splits: a key, a length and a signature for each text, in bounded memory; and an evenly spread
sample of the rows of a part, with their columns.

Texts are compared as bytes after folding. Two keys are kept in memory, the folded bytes and the signatures go to scratch files,
so that ten million rows need some hundred megabytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tunesmith.data.source import Part
from tunesmith.runs.writing import create

BANDS, BAND_ROWS = 16, 3
"""A pair whose shingles have Jaccard similarity 0.6 shares a band with probability 0.98, one with 0.2 with 0.12."""
GRAM = 4
"""Bytes of a shingle: it fits one uint32 exactly."""
LONG_GRAM, LONG_TEXT = 16, 400
"""Shingles of texts of so many bytes or more: texts of one subject share most runs of four bytes when they are long."""
MOST_BYTES = 4_096
"""Of one text that are compared for near-duplicates."""
BLOCK_BYTES = 1 << 20

Ints = np.ndarray[Any, Any]
_BASE = np.uint64(0x9E3779B97F4A7C15)
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 1 << 64))
_SPACES = "\u00a0\u2009\u202f\u3000"
"""Spaces outside of ASCII that tables really hold; the others are letters of their own here."""


def _fold_table(*, loose: bool) -> Ints:
    """What becomes of each byte: white space a space; `loose`: ASCII punctuation too."""
    table = np.arange(256, dtype=np.uint8)
    table[:33] = 32
    if loose:
        table[[b for b in range(33, 128) if not chr(b).isalnum()]] = 32
    return table


_EXACT, _LOOSE = _fold_table(loose=False), _fold_table(loose=True)


@dataclass(frozen=True)
class FoldedBlock:
    """Texts one after another as bytes; text i is `data[starts[i]:ends[i]]`."""

    data: Ints
    starts: Ints
    ends: Ints


@dataclass
class TextSurvey:
    """What is known about each text. Text numbers: split after split, column after column, row after row.

    `keys` are equal when texts are after `" ".join(text.lower().split())`.
    """

    shapes: dict[str, tuple[int, int]]
    """Split -> (first text number, rows)."""
    columns: int
    keys: Ints
    characters: Ints
    starts: Ints
    sizes: Ints
    bytes_file: Path
    band_files: list[Path]

    def of(self, split: str, values: Ints) -> Ints:
        """(rows, columns) of a split, from one value a text."""
        first, rows = self.shapes[split]
        return values[first : first + rows * self.columns].reshape(self.columns, rows).T


def survey_texts(parts: Mapping[str, Part], text: Sequence[str], folder: Path) -> TextSurvey:
    """Reads every text once. `folder` takes the scratch files; the caller removes it."""
    total = sum(len(part) for part in parts.values()) * len(text)
    shapes, at = {}, 0
    for split, part in parts.items():
        shapes[split] = (at, len(part))
        at += len(part) * len(text)
    files = [folder / f"band{band}" for band in range(BANDS)]
    survey = TextSurvey(
        shapes,
        len(text),
        np.empty(total, np.uint64),
        np.empty(total, np.int32),
        np.empty(total, np.int64),
        np.empty(total, np.int32),
        folder / "texts",
        files,
    )
    number = written = 0
    with ExitStack() as stack:
        texts, *bands = (stack.enter_context(create(path)) for path in (survey.bytes_file, *files))
        for part in parts.values():
            for name in text:
                for table in part.scan([name]):
                    for cells in _pieces(table.column(name)):
                        written = _note(survey, cells, number, texts, bands, written)
                        number += len(cells)
    return survey


def _pieces(column: Any) -> Iterator[Any]:
    """The cells in lower case, in pieces of about BLOCK_BYTES."""
    import pyarrow as pa
    import pyarrow.compute as pc

    for chunk in column.chunks if hasattr(column, "chunks") else [column]:
        cells = pc.utf8_lower(chunk.cast(pa.large_string()))
        if cells.nbytes > len(cells) * 9 and not pc.all(pc.string_is_ascii(cells)).as_py():
            for space in _SPACES:
                cells = pc.replace_substring(cells, space, " ")
        step = max(1, int(len(cells) * BLOCK_BYTES / max(cells.nbytes, 1)))
        for at in range(0, len(cells), step):
            yield cells.slice(at, step)


def _note(survey: TextSurvey, cells: Any, number: int, texts: BinaryIO, bands: Sequence[BinaryIO], written: int) -> int:
    import pyarrow.compute as pc

    here = slice(number, number + len(cells))
    exact = fold_block(cells, _EXACT)
    survey.keys[here] = hash_texts(exact)
    survey.characters[here] = pc.utf8_length(cells).to_numpy(zero_copy_only=False) * (exact.ends > exact.starts)
    loose = cut_block(fold_block(cells, _LOOSE), MOST_BYTES)
    survey.starts[here] = written + loose.starts
    survey.sizes[here] = loose.ends - loose.starts
    texts.write(loose.data.tobytes())
    for file, values in zip(bands, sign_texts(loose), strict=True):
        file.write(values.tobytes())
    return written + len(loose.data)


def fold_block(cells: Any, table: Ints) -> FoldedBlock:
    """Runs of white space become one space, none at either end."""
    offsets = np.frombuffer(cells.buffers()[1], np.int64)[cells.offset : cells.offset + len(cells) + 1]
    data = cells.buffers()[2]
    raw = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.empty(0, np.uint8)
    flat = table[raw]
    offsets = offsets - offsets[0]
    space = flat == 32
    before = np.empty_like(space)
    before[1:] = space[:-1]
    before[offsets[:-1][offsets[:-1] < len(flat)]] = True
    keep = ~(space & before)
    packed = flat[keep]
    place = np.concatenate([np.zeros(1, np.int64), np.cumsum(keep)])[offsets]
    starts, ends = place[:-1], place[1:].copy()
    full = ends > starts
    ends[full] -= packed[ends[full] - 1] == 32
    return FoldedBlock(packed, starts, ends)


def cut_block(block: FoldedBlock, most: int) -> FoldedBlock:
    """The same texts, each cut to `most` bytes; the bytes between texts stay."""
    return FoldedBlock(block.data, block.starts, np.minimum(block.ends, block.starts + most))


def hash_texts(block: FoldedBlock) -> Ints:
    """64 bits for each text: a polynomial of its bytes, then mixed with its length."""
    count = len(block.data)
    powers = np.full(count + 1, _BASE, np.uint64)
    inverse = np.full(count + 1, _INVERSE, np.uint64)
    powers[:1] = inverse[:1] = 1
    np.cumprod(powers, out=powers)
    np.cumprod(inverse, out=inverse)
    sums = np.zeros(count + 1, np.uint64)
    np.cumsum((block.data.astype(np.uint64) + np.uint64(1)) * powers[:count], out=sums[1:])
    found = (sums[block.ends] - sums[block.starts]) * inverse[block.starts]
    return mix(found ^ (block.ends - block.starts).astype(np.uint64))


def mix(values: Ints) -> Ints:
    """Each bit of the answer depends on all bits of the value (splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Ints = values ^ (values >> np.uint64(31))
    return mixed


def list_grams(block: FoldedBlock, length: int = GRAM) -> tuple[Ints, Ints]:
    """(the runs of `length` bytes of all texts one after another, how many each text has)."""
    counts = np.maximum(block.ends - block.starts - (length - 1), 0)
    wide = block.data.astype(np.uint32)
    size = max(len(wide) - (length - 1), 0)
    grams = wide[:size].copy()
    for place in range(1, length):
        grams |= wide[place : place + size] << np.uint32(8 * place)
    edges = np.zeros(size + 1, np.int8)
    some = counts > 0
    np.add.at(edges, block.starts[some], 1)
    np.add.at(edges, block.starts[some] + counts[some], -1)
    return grams[np.cumsum(edges[:-1], dtype=np.int8).astype(bool)], counts


def lengthen(grams: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """(hashes of LONG_GRAM bytes that begin with each run of GRAM bytes, which of them lie within their text)."""
    left = np.repeat(np.cumsum(counts), counts) - np.arange(len(grams))
    hashed = grams
    for step in range(GRAM, LONG_GRAM, GRAM):
        hashed = (hashed ^ (hashed >> np.uint32(15))) * np.uint32(0x9E3779B1) + np.roll(grams, -step)
    return hashed, left > LONG_GRAM - GRAM


def _mix_grams(grams: Ints) -> Ints:
    mixed = (grams ^ (grams >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    found: Ints = mixed ^ (mixed >> np.uint32(16))
    return found


def sign_texts(block: FoldedBlock) -> list[Ints]:
    """For each band one uint64 a text; a text too short for a shingle gets a value of its own (its hash)."""
    grams, counts = list_grams(block)
    some = np.flatnonzero(counts)
    firsts = (np.cumsum(counts) - counts)[some]
    sources = [_mix_grams(grams)] * BANDS
    long = counts >= LONG_TEXT
    if long.any():  # half of the bands: a text that an edit makes shorter than that still shares the others
        hashed, whole = lengthen(grams, counts)
        sources[BANDS // 2 :] = [_mix_grams(np.where(np.repeat(long, counts) & whole, hashed, grams))] * (BANDS // 2)
    rng = np.random.default_rng(20_261_117)
    own = hash_texts(block) if len(some) < len(counts) else None
    bands = []
    scratch = np.empty_like(grams)
    for mixed in sources:
        key = np.zeros(len(some), np.uint64)
        for _ in range(BAND_ROWS):
            factor, shift = rng.integers(0, 1 << 32, 2, dtype=np.uint32)
            np.multiply(mixed, factor | np.uint32(1), out=scratch)
            np.add(scratch, shift, out=scratch)
            if len(some):
                key = mix(key + np.minimum.reduceat(scratch, firsts))
        band = key if own is None else own.copy()
        band[some] = key
        bands.append(band)
    return bands


def read_texts(file: Any, survey: TextSurvey, numbers: Ints) -> FoldedBlock:
    """The folded texts with these numbers."""
    starts, sizes = survey.starts[numbers].tolist(), survey.sizes[numbers].tolist()
    data = b"".join([os.pread(file.fileno(), size, start) for start, size in zip(starts, sizes, strict=True)])
    long = np.asarray(sizes, np.int64)
    ends = np.cumsum(long)
    return FoldedBlock(np.frombuffer(data, np.uint8), ends - long, ends)


@dataclass(frozen=True)
class RowSample:
    """`rows` are places within the part, ascending; `columns` hold the cells of these rows."""

    rows: Ints
    columns: dict[str, list[Any]]

    def joined(self, names: Sequence[str]) -> list[str]:
        """The texts of each row as one."""
        return [" ".join(row) for row in zip(*(self.columns[name] for name in names), strict=True)]


def sample_rows(part: Part, names: list[str], most: int) -> RowSample:
    """At most `most` rows, from the whole length of the part."""
    count = len(part)
    rows = np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(np.int64))
    table = part.source.dataset.select(rows if part.rows is None else part.rows[rows])
    cells = table.select_columns(names).with_format("arrow")[:] if names else None
    return RowSample(rows, {name: cells.column(name).to_pylist() for name in names} if cells is not None else {})
