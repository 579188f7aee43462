"""The probe: what the frozen encoder and a linear model already know about the task, before the first step.

It sees a sample of the training rows. From it come the pooling that suits checkpoint and data, floors for the report,
probabilities of rows by a model that has not seen them, and a measured rate. The floor of words is a linear model on TF-IDF of
words and word pairs: a fine-tuned encoder must be better.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tunesmith.data.batches import Padding
from tunesmith.data.tokens import TokenRows
from tunesmith.errors import ConfigError
from tunesmith.labels import LabelMap
from tunesmith.metrics.evidence import BestConstant, encode_rows, keep_rows
from tunesmith.metrics.table import Suite
from tunesmith.models.pooling import Pooling, last_linear, pooled_features, poolings_of
from tunesmith.pipeline.linear_fit import FrozenFeatures, LinearFit, cached_features, compute_features, fit_linear
from tunesmith.pipeline.pairs import PairReadings, read_alone
from tunesmith.pipeline.word_floor import word_scores
from tunesmith.training.distributed import Runtime

Floors = dict[str, dict[str, dict[str, Any]]]
"""By split, by floor ("frozen features + linear head", "TF-IDF + linear model"), by metric: a score as in metrics.json."""
TextsOf = Callable[[str, npt.NDArray[np.int64]], Sequence[str]]
"""The texts of these rows of a split; the two texts of a pair as one."""

FEWEST_ROWS = 50
"""Below, left-out predictions say nothing about the choice between poolings."""
SHARE_OF_ROWS, FEWEST_SEEN, MOST_SEEN = 0.2, 256, 4000
"""Training rows that are looked at. A pass over one costs about a ninth of three epochs over it: a fifth is 2%."""
SHARE_JUDGED, FEWEST_JUDGED, MOST_JUDGED = 0.06, 200, 500
"""Rows of another split that a floor is measured on, as a share of the training rows: with both, about 1.3%."""
PROBE_ROWS = 400
"""Of the probe's answers so many are kept in data_summary.json: about 4 kB."""


@dataclass(frozen=True)
class ProbeResult:
    """`rows` are the training rows seen, ascending; `fits[pooling].held_out[i]` are the logits of row `rows[i]`."""

    rows: npt.NDArray[np.int64]
    fits: Mapping[Pooling, LinearFit]
    pooling: Pooling
    why: str
    floors: Floors
    seconds: float
    rows_per_second: float | None
    """Of the forward pass; None when the features were found on disk."""
    read: Mapping[Pooling, torch.Tensor] = field(default_factory=dict)
    """What the last layer of the head would read of these rows with each pooling."""

    @property
    def fit(self) -> LinearFit:
        """The linear model of the chosen pooling."""
        return self.fits[self.pooling]


def rows_to_see(count: int) -> npt.NDArray[np.int64]:
    """Which of so many rows the probe looks at: the same ones each time, so that their features are found again."""
    wanted = min(count, max(FEWEST_SEEN, round(SHARE_OF_ROWS * count)), MOST_SEEN)
    return np.sort(np.random.default_rng(0).choice(count, wanted, replace=False))


@dataclass(frozen=True)
class Prober:
    """All that a probe reads: the loaded model on its device, the tokens of each split, and where features are kept."""

    model: nn.Module
    splits: Mapping[str, TokenRows]
    texts: TextsOf
    padding: Padding
    labels: LabelMap
    suite: Suite
    runtime: Runtime
    fresh: Sequence[str]
    """Names of the parameters that are not in the checkpoint."""
    content: str
    """Equal for equal weights."""
    cache_dir: str | None = None

    def look(self, on_rows: Callable[[int, int], None] = lambda done, total: None) -> ProbeResult | None:
        """The result, or None for too few rows. Tells `on_rows` how many of how many rows are done."""
        began = time.perf_counter()
        train = self.splits["train"]
        if len(train) < FEWEST_ROWS or train.labels is None or not is_known(train.labels).all():
            return None
        seen = rows_to_see(len(train))
        most = min(max(FEWEST_JUDGED, round(SHARE_JUDGED * len(train))), MOST_JUDGED)
        judged = {name: _some(rows, most) for name, rows in self.splits.items() if name != "train"}
        judged = {name: rows for name, rows in judged.items() if len(rows)}
        total = len(seen) + sum(map(len, judged.values()))
        words = self._start_words(judged)
        features, rate = self._features(train.select(seen), on_rows, 0, total)
        labels = torch.from_numpy(train.labels[seen])
        read = {pooling: self._pooled(features, pooling) for pooling in self._candidates()}
        fits = {name: fit_linear(some, labels, self.labels.task, len(self.labels)) for name, some in read.items()}
        pooling, why = choose_pooling(fits)
        floors: Floors = {}
        by_words = dict(zip(judged, words(), strict=True))
        done = len(seen)
        for name, rows in judged.items():
            other, _ = self._features(self.splits[name].select(rows), on_rows, done, total)
            done += len(rows)
            logits = fits[pooling].logits(self._pooled(other, pooling).double()).cpu().numpy()
            gold = self.splits[name].labels
            assert gold is not None
            pairs = {"frozen features + linear head": logits, "TF-IDF + linear model": by_words[name]}
            floors[name] = {
                floor: {m: s.to_json() for m, s in self.suite.compute_with_intervals(scores, gold[rows]).items()}
                for floor, scores in pairs.items()
            }
        return ProbeResult(seen, fits, pooling, why, floors, time.perf_counter() - began, rate, read)

    def look_at_pairs(self, probe: ProbeResult | None, *, asked: bool) -> tuple[PairReadings | None, str]:
        """The two texts of rows read alone, or None, and why; where they are asked for, they are not judged."""
        train = self.splits["train"]
        if train.labels is None or not is_known(train.labels).all():
            return None, "some rows have no label"
        if probe is None and not asked:
            return None, "too few rows for a probe"
        try:
            last_linear(self.model)
        except ConfigError as error:
            return None, error.problem
        together = None if probe is None or asked else probe.fit
        seen = rows_to_see(len(train))
        return read_alone(
            train, seen, self.labels, lambda rows: self._features(rows, lambda *_: None, 0, 0)[0], together
        )

    def _candidates(self) -> tuple[Pooling, ...]:
        """A pooler that is not in the checkpoint is a random projection: the first token itself is better."""
        possible = poolings_of(self.model)
        if not any(name.startswith("classifier") for name in self.fresh):
            return ("pooler",)  # a trained head reads what it was trained on
        new = any("pooler.dense" in name or "classifier.dense" in name for name in self.fresh)
        return tuple(p for p in possible if p != "pooler" or len(possible) == 1 or not new)

    def _pooled(self, features: FrozenFeatures, pooling: Pooling) -> torch.Tensor:
        with torch.no_grad():
            return pooled_features(self.model, features.first.float(), features.mean.float(), pooling)

    def _features(
        self, rows: TokenRows, on_rows: Callable[[int, int], None], done: int, total: int
    ) -> tuple[FrozenFeatures, float | None]:
        at = done

        def count(n: int) -> None:
            nonlocal at
            at += n
            on_rows(at, total)

        began = time.perf_counter()
        found, known = cached_features(
            f"{self.content} {self.runtime.precision} {self.runtime.device.type}",
            self.cache_dir,
            rows,
            lambda: compute_features(self.model, rows, self.padding, self.runtime, on_batch=count),
            self.runtime.device,
        )
        return found, None if known else len(rows) / max(time.perf_counter() - began, 1e-9)

    def _start_words(self, judged: Mapping[str, npt.NDArray[np.int64]]) -> Callable[[], list[Any]]:
        train = self.splits["train"]
        assert train.labels is not None
        some = rows_to_see(len(train)) if len(train) > 20 * MOST_SEEN else np.arange(len(train))
        others = [self.texts(name, rows) for name, rows in judged.items()]
        if not others:
            return list
        texts = self.texts("train", some)
        return partial(word_scores, texts, train.labels[some], others, self.labels.task, len(self.labels))


def choose_pooling(fits: Mapping[Pooling, LinearFit]) -> tuple[Pooling, str]:
    """The pooling whose linear model errs least on left-out rows; the mean unless another is better beyond doubt."""
    best = min(fits, key=lambda name: float(fits[name].errors.mean()))
    shown = ", ".join(f"{name} {fit.explained:.3f}" for name, fit in fits.items())
    if len(fits) == 1:
        return best, "the only way this model has"
    if best != "mean" and "mean" in fits:
        gain = fits["mean"].errors - fits[best].errors
        doubt = float(gain.std() / len(gain) ** 0.5)
        if float(gain.mean()) < 2 * doubt:
            return "mean", f"no other is surely better on frozen features (R2 of left-out rows: {shown})"
    return best, f"best on frozen features (R2 of left-out rows: {shown})"


def is_known(labels: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Which rows have a label, or all their labels."""
    known = labels >= 0 if labels.dtype.kind == "i" else np.isfinite(labels)
    return np.asarray(known if known.ndim == 1 else known.all(axis=1))


def _some(rows: TokenRows, most: int) -> npt.NDArray[np.int64]:
    """At most so many labelled rows, the same ones each time."""
    known = np.flatnonzero(is_known(rows.labels)) if rows.labels is not None else np.zeros(0, dtype=np.int64)
    if len(known) <= most:
        return known
    return np.sort(np.random.default_rng(0).choice(known, most, replace=False))


def probe_evidence(probe: ProbeResult, train: TokenRows, labels: LabelMap) -> str | None:
    """What the probe says of training rows that it has not seen, as text."""
    assert train.labels is not None
    constant = BestConstant.of(labels.task, train.labels, len(labels))
    kept = keep_rows(constant, probe.fit.held_out.cpu().numpy(), train.labels[probe.rows], PROBE_ROWS)
    return None if kept is None else encode_rows(kept)
