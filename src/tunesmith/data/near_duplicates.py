"""Near-duplicate texts: candidates from banded MinHash signatures, each checked by its actual similarity."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tunesmith.data.text_survey import FoldedBlock, Ints, TextSurvey, lengthen, list_grams, read_texts

CLOSE, COPIED = 65, 93
"""Percent of the pairs of neighbouring bytes, each as often as it occurs, that two texts have in common: below the first they
are never nearly equal, from the second on always."""
BY_NATURE, FEW = 0.006, 4
"""Share of the texts that may be between both before the lower bound is raised (bench/audit_near.py), and a number of them."""
SHARED_SHINGLES = 0.45
"""The same for the set of runs of four bytes: what only has like letters is not nearly equal."""
LONG_TEXT = 200
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
    with open(survey.bytes_file, "rb") as file:
        for path in survey.band_files:
            pairs = _candidates(_numbered(path, only), len(equal), train_texts)
            pairs = pairs[near.open(pairs) | ((pairs[:, 0] < train_texts) & in_train.open(pairs))]
            for at in range(0, min(len(pairs), left), _CHUNK):
                some = pairs[at : at + _CHUNK]
                percent = (100 * similarity(file, survey, some)).astype(np.uint8)
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


def _numbered(path: Path, only: Ints) -> Ints:
    """The band values of some texts, each with the number of its text in the low bits; sorted."""
    band = np.fromfile(path, np.uint64)
    packed = band[only]
    packed <<= np.uint64(_bits(len(band)))
    packed |= only.view(np.uint32)
    packed.sort()
    return packed


def _bits(texts: int) -> int:
    return max(texts.bit_length(), 1)


def _candidates(packed: Ints, texts: int, train_texts: int) -> Ints:
    """(earlier, later) text numbers in one bucket: neighbours, and the last text of train before the later one."""
    bits = _bits(texts)
    numbers = (packed.astype(np.uint32) & np.uint32((1 << bits) - 1)).view(np.int32)
    packed >>= np.uint64(bits)
    same = np.zeros(len(packed), bool)
    same[1:] = packed[1:] == packed[:-1]
    later = np.flatnonzero(same)
    neighbours = np.stack([numbers[later - 1], numbers[later]], axis=1)
    places = np.arange(len(same), dtype=np.int32)
    begin = np.maximum.accumulate(np.where(same, np.int32(0), places))
    place = np.where(numbers < train_texts, places, np.int32(0))
    last = np.maximum.accumulate(place)[later]
    apart = (numbers[later] >= train_texts) & (last >= begin[later]) & (numbers[last] < train_texts)
    across = np.stack([numbers[last[apart]], numbers[later[apart]]], axis=1)
    return np.unique(np.concatenate([neighbours, across]), axis=0) if len(later) else neighbours


def similarity(file: Any, survey: TextSurvey, pairs: Ints) -> Ints:
    """How much two texts have in common, from 0 to 1; 0 for those that cannot be nearly equal."""
    result = np.zeros(len(pairs))
    sizes = survey.sizes[pairs]
    alike = np.flatnonzero(100 * sizes.min(axis=1) >= CLOSE * sizes.max(axis=1))
    blocks = [read_texts(file, survey, pairs[alike, side]) for side in (0, 1)]
    letters = _letter_overlap(*map(_letter_counts, blocks))
    close = alike[100 * letters >= CLOSE]
    close_blocks = [read_texts(file, survey, pairs[close, side]) for side in (0, 1)]
    shared = _shingle_overlap([_shingles(block) for block in close_blocks], len(close))
    long = sizes[close].min(axis=1) >= LONG_TEXT
    if long.any():
        wide = _shingle_overlap([_shingles(block, long=True) for block in close_blocks], len(close))
        shared = np.where(long, np.minimum(shared, wide), shared)
    result[alike] = letters
    result[close[shared < SHARED_SHINGLES]] = 0.0
    return result


def _letter_counts(block: FoldedBlock) -> Ints:
    """(texts, 1024): how often each pair of neighbouring bytes occurs, bytes by their last five bits (a letter has its own)."""
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
