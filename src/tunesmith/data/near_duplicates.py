"""Equal and nearly equal texts: one pass computes a key, a length and a MinHash signature for each text; candidates that share a
band of the signature are then compared. Also an evenly spread sample of the rows of a split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tunesmith.data.source import Ints, Part

BANDS, BAND_ROWS = 16, 3
"""A pair whose shingles have Jaccard similarity 0.6 shares a band with probability 0.98, one with 0.2 with 0.12."""
GRAM = 4
"""Bytes of a shingle: it fits one uint32 exactly."""
LONG_GRAM, LONG_TEXT = 16, 400
"""Shingles of texts of so many bytes or more: texts of one subject share most runs of four bytes when they are long."""
MOST_BYTES = 4_096
"""Of one text that are compared for near-duplicates."""
BLOCK_BYTES = 1 << 20


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
    data: Ints
    """The folded texts as bytes; text i is `data[starts[i] : starts[i] + sizes[i]]`."""
    starts: Ints
    sizes: Ints
    bands: list[Ints]

    def of(self, split: str, values: Ints) -> Ints:
        """(rows, columns) of a split, from one value a text."""
        first, rows = self.shapes[split]
        return values[first : first + rows * self.columns].reshape(self.columns, rows).T


def survey_texts(parts: Mapping[str, Part], text: Sequence[str]) -> TextSurvey:
    """Read every text once."""
    shapes, at = {}, 0
    for split, part in parts.items():
        shapes[split] = (at, len(part))
        at += len(part) * len(text)
    found: list[tuple[Ints, ...]] = []
    written = 0
    for part in parts.values():
        for name in text:
            for table in part.scan([name]):
                for cells in _pieces(table.column(name)):
                    found.append(_survey(cells, written))
                    written += len(found[-1][2])
    keys, characters, data, starts, sizes, *bands = (np.concatenate(values) for values in zip(*found, strict=True))
    return TextSurvey(shapes, len(text), keys, characters, data, starts, sizes, bands)


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


def _survey(cells: Any, written: int) -> tuple[Ints, ...]:
    """Return keys, characters, bytes, starts, sizes and bands of some texts; `written` bytes are before them."""
    import pyarrow.compute as pc

    exact = fold_block(cells, _EXACT)
    characters = pc.utf8_length(cells).to_numpy(zero_copy_only=False) * (exact.ends > exact.starts)
    folded = fold_block(cells, _LOOSE)
    loose = FoldedBlock(folded.data, folded.starts, np.minimum(folded.ends, folded.starts + MOST_BYTES))
    sizes = (loose.ends - loose.starts).astype(np.int32)
    where = (written + loose.starts).astype(np.int64)
    return (hash_texts(exact), characters.astype(np.int32), loose.data, where, sizes, *sign_texts(loose))


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


def read_texts(survey: TextSurvey, numbers: Ints) -> FoldedBlock:
    """Return the folded texts with these numbers."""
    starts, sizes = survey.starts[numbers], survey.sizes[numbers].astype(np.int64)
    ends = np.cumsum(sizes)
    places = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - sizes), sizes)
    return FoldedBlock(survey.data[places], ends - sizes, ends)


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


CLOSE, COPIED = 65, 93
"""Percent of the pairs of neighboring bytes, each as often as it occurs, that two texts have in common: below the first they
are never nearly equal, from the second on always."""
BY_NATURE, FEW = 0.006, 4
"""Share of the texts that may be between both before the lower bound is raised (bench/audit_near.py), and a number of them."""
SHARED_SHINGLES = 0.45
"""The same for the set of runs of four bytes: what only has like letters is not nearly equal."""
LONG_PAIR = 200
"""From so many bytes on as many runs of sixteen bytes must be shared as well."""
MOST_PAIRS = 4_000_000
"""Candidates checked in all; a file of texts from one template has more, and then the counts are lower bounds."""
_CHUNK = 4_000


class Nearest:
    """The closest earlier text for each text, and how close it is in percent."""

    def __init__(self, count: int) -> None:
        self.text, self.percent = np.full(count, -1, np.int32), np.zeros(count, np.uint8)

    def add(self, pairs: Ints, percent: Ints) -> None:
        """(earlier, later) in order of their percent, so that the closest of a text is written last."""
        better = percent > self.percent[pairs[:, 1]]
        self.text[pairs[better, 1]], self.percent[pairs[better, 1]] = pairs[better, 0], percent[better]

    def open(self, pairs: Ints) -> Ints:
        """Whether a pair can still change something."""
        opened: Ints = (self.percent[pairs[:, 1]] < COPIED) & (self.text[pairs[:, 1]] != pairs[:, 0])
        return opened

    def at_least(self, percent: int) -> Ints:
        """The text where it is close enough, else -1."""
        return np.where(self.percent >= percent, self.text, np.int32(-1))


@dataclass(frozen=True)
class NearTexts:
    """For each text an earlier one that is equal (-1 for none), the closest earlier one, and the closest one of train.

    `least`: percent in common from which texts are nearly equal here; `by_nature`: share of texts that are close to another.
    """

    equal: Ints
    nearest: Nearest
    in_train: Nearest
    complete: bool
    least: int
    by_nature: float

    def earlier(self, percent: int) -> Ints:
        """A text so close, in train if there is one, else -1."""
        here = self.in_train.at_least(percent)
        return np.where(here >= 0, here, self.nearest.at_least(percent))


def find_near(survey: TextSurvey, train_texts: int) -> NearTexts:
    """Compares each text that has no equal one. Texts below `train_texts` are those of train."""
    equal = first_equal(survey.keys)
    only = np.flatnonzero(equal < 0).astype(np.int32)
    near, in_train = Nearest(len(equal)), Nearest(len(equal))
    closest = np.zeros(train_texts or len(equal), np.uint8)
    left = MOST_PAIRS
    for band in survey.bands:
        pairs = _candidates(_numbered(band, only), len(equal), train_texts)
        pairs = pairs[near.open(pairs) | ((pairs[:, 0] < train_texts) & in_train.open(pairs))]
        for at in range(0, min(len(pairs), left), _CHUNK):
            some = pairs[at : at + _CHUNK]
            percent = (100 * similarity(survey, some)).astype(np.uint8)
            order = np.argsort(percent, kind="stable")
            some, percent = some[order], percent[order]
            near.add(some, percent)
            from_train = some[:, 0] < train_texts
            in_train.add(some[from_train], percent[from_train])
            inside = some[:, 1] < len(closest)
            for side in (0, 1):
                np.maximum.at(closest, some[inside, side], percent[inside])
        left -= len(pairs)
        if left <= 0:
            break
    return NearTexts(equal, near, in_train, left > 0, *_least_percent(closest))


def _least_percent(closest: Ints) -> tuple[int, float]:
    """Where rows are close to each other by nature (templates, one word changed), only what is closer is nearly equal.

    By nature is what lies between the bounds: copies are closer, texts of their own are further apart.
    """
    above = np.bincount(closest, minlength=101)[CLOSE:COPIED][::-1].cumsum()[::-1]
    return CLOSE + int((above > max(BY_NATURE * len(closest), FEW)).sum()), float(above[0] / max(len(closest), 1))


def first_equal(keys: Ints) -> Ints:
    """For each key the place of its first occurrence; -1 for the first ones themselves."""
    order = np.argsort(keys, kind="stable").astype(np.int32)
    new = np.ones(len(keys), bool)
    ordered = keys[order]
    new[1:] = ordered[1:] != ordered[:-1]
    del ordered
    leader = np.where(new, np.arange(len(keys), dtype=np.int32), np.int32(0))
    np.maximum.accumulate(leader, out=leader)
    again = np.flatnonzero(~new)
    found = np.full(len(keys), -1, np.int32)
    found[order[again]] = order[leader[again]]
    return found


def _numbered(band: Ints, only: Ints) -> Ints:
    """The band values of some texts, each with the number of its text in the low bits; sorted."""
    packed = band[only]
    packed <<= np.uint64(_bits(len(band)))
    packed |= only.view(np.uint32)
    packed.sort()
    return packed


def _bits(texts: int) -> int:
    return max(texts.bit_length(), 1)


def _candidates(packed: Ints, texts: int, train_texts: int) -> Ints:
    """(earlier, later) text numbers in one bucket: neighbors, and the last text of train before the later one."""
    bits = _bits(texts)
    numbers = (packed.astype(np.uint32) & np.uint32((1 << bits) - 1)).view(np.int32)
    packed >>= np.uint64(bits)
    same = np.zeros(len(packed), bool)
    same[1:] = packed[1:] == packed[:-1]
    later = np.flatnonzero(same)
    neighbors = np.stack([numbers[later - 1], numbers[later]], axis=1)
    places = np.arange(len(same), dtype=np.int32)
    begin = np.maximum.accumulate(np.where(same, np.int32(0), places))
    place = np.where(numbers < train_texts, places, np.int32(0))
    last = np.maximum.accumulate(place)[later]
    apart = (numbers[later] >= train_texts) & (last >= begin[later]) & (numbers[last] < train_texts)
    across = np.stack([numbers[last[apart]], numbers[later[apart]]], axis=1)
    return np.unique(np.concatenate([neighbors, across]), axis=0) if len(later) else neighbors


def similarity(survey: TextSurvey, pairs: Ints) -> Ints:
    """How much two texts have in common, from 0 to 1; 0 for those that cannot be nearly equal."""
    result = np.zeros(len(pairs))
    sizes = survey.sizes[pairs]
    alike = np.flatnonzero(100 * sizes.min(axis=1) >= CLOSE * sizes.max(axis=1))
    blocks = [read_texts(survey, pairs[alike, side]) for side in (0, 1)]
    letters = _letter_overlap(*map(_letter_counts, blocks))
    close = alike[100 * letters >= CLOSE]
    close_blocks = [read_texts(survey, pairs[close, side]) for side in (0, 1)]
    shared = _shingle_overlap([_shingles(block) for block in close_blocks], len(close))
    long = sizes[close].min(axis=1) >= LONG_PAIR
    if long.any():
        wide = _shingle_overlap([_shingles(block, long=True) for block in close_blocks], len(close))
        shared = np.where(long, np.minimum(shared, wide), shared)
    result[alike] = letters
    result[close[shared < SHARED_SHINGLES]] = 0.0
    return result


def _letter_counts(block: FoldedBlock) -> Ints:
    """(texts, 1024): how often each pair of neighboring bytes occurs, bytes by their last five bits (a letter has its own)."""
    grams, counts = list_grams(block, 2)
    codes = ((grams & np.uint32(31)) << np.uint32(5)) | ((grams >> np.uint32(8)) & np.uint32(31))
    owners = np.repeat(np.arange(len(counts), dtype=np.int64) << 10, counts)
    return np.bincount(owners + codes, minlength=len(counts) << 10).reshape(len(counts), 1 << 10)


def _letter_overlap(one: Ints, two: Ints) -> Ints:
    shared = np.minimum(one, two).sum(axis=1)
    result: Ints = shared / np.maximum(one.sum(axis=1) + two.sum(axis=1) - shared, 1)
    return result


def _shingle_overlap(sides: list[Ints], pairs: int) -> Ints:
    both = np.intersect1d(sides[0], sides[1], assume_unique=True)
    shared, one, two = (np.bincount(s >> np.uint64(32), minlength=pairs) for s in (both, *sides))
    result: Ints = shared / np.maximum(one + two - shared, 1)
    return result


def _shingles(block: FoldedBlock, *, long: bool = False) -> Ints:
    """text << 32 | shingle, each once, sorted."""
    grams, counts = list_grams(block)
    owners = np.repeat(np.arange(len(counts), dtype=np.uint64), counts)
    if long:
        grams, whole = lengthen(grams, counts)
        grams, owners = grams[whole], owners[whole]
    return np.unique((owners << np.uint64(32)) | grams)
