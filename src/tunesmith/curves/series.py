"""Journal -> curves: raw values by step and by epoch. Smoothing and thinning are views and are never stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.metrics.names import greater_is_better

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One curve. The arrays have one length, steps ascend, NaN is a gap."""

    name: str
    step: NDArray[np.int64]
    epoch: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.step)

    def finite(self) -> Series:
        """The points that are not gaps."""
        return self._at(np.isfinite(self.value))

    def smoothed(self, window: int | None = None) -> Series:
        """A centred mean over about `window` steps (default: 1/25 of the curve, 25 if it is short): nothing moves in time.

        Three running means, O(n): close to a Gaussian. Gaps stay gaps and do not pull on their neighbours.
        """
        usual = max(len(self) // 25, min(len(self) // 5, 25))
        width = max(1, usual if window is None else window)
        value = self.value
        for _ in range(3):
            value = _running_mean(value, max(1, round(width / 3**0.5)))
        return Series(self.name, self.step, self.epoch, np.where(np.isfinite(self.value), value, np.nan))

    def thinned(self, points: int) -> Series:
        """At most about `points` points that keep every bucket's lowest and highest value: no spike is lost."""
        if len(self) <= points:
            return self
        edges = np.linspace(0, len(self), max(1, points // 2) + 1).astype(int)
        keep: set[int] = {0, len(self) - 1}
        for low, high in pairwise(edges):
            part = self.value[low:high]
            good = np.flatnonzero(np.isfinite(part))
            if len(good) < len(part):  # keep a gap visible as a gap
                keep.add(int(low + np.flatnonzero(~np.isfinite(part))[0]))
            if len(good):
                keep |= {int(low + good[np.argmin(part[good])]), int(low + good[np.argmax(part[good])])}
        return self._at(np.array(sorted(keep)))

    def best(self) -> tuple[int, float] | None:
        """(step, value) of the best point, the earliest of equals; None when every point is a gap."""
        good = self.finite()
        if not len(good):
            return None
        at = int(np.argmax(good.value) if greater_is_better(self.name) else np.argmin(good.value))
        return int(good.step[at]), float(good.value[at])

    def _at(self, index: NDArray[Any]) -> Series:
        return Series(self.name, self.step[index], self.epoch[index], self.value[index])


def _running_mean(value: Floats, width: int) -> Floats:
    """Mean over `width` neighbours (fewer at the ends), gaps left out."""
    good = np.isfinite(value)
    total = np.concatenate([[0.0], np.cumsum(np.where(good, value, 0.0))])
    count = np.concatenate([[0], np.cumsum(good)])
    at = np.arange(len(value))
    # Near an end the window shrinks from both sides, or a one-sided mean would bend the curve; not to nothing, or the
    # line would end in one raw point.
    half = np.maximum(np.minimum(width // 2, np.minimum(at, len(value) - 1 - at)), width // 6)
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(value))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((total[high] - total[low]) / (count[high] - count[low]), dtype=np.float64)


@dataclass(frozen=True, slots=True, eq=False)
class Curves:
    """All curves of one run, computed once and drawn as often as wanted (`curves.plot.draw_curves`)."""

    name: str
    train_loss: Series
    learning_rate: Series
    grad_norm: Series
    tokens_per_second: Series
    examples_per_second: Series
    evaluations: dict[str, dict[str, Series]]
    """split -> metric -> curve; splits are "validation", "train_sample" and a user's own."""
    rows: dict[str, int] = field(default_factory=dict)
    """split -> number of rows evaluated."""
    num_steps: int = 0
    steps_per_epoch: float = 0.0
    train_rows: int = 0
    tracked_metric: str | None = None
    """The metric by which the run itself chose its best checkpoint."""
    resumed_at: tuple[int, ...] = ()
    non_finite: tuple[int, ...] = ()
    """Steps whose update was not applied because something was not finite."""
    ended: str | None = None
    """Why the run ended; None while it runs or when it was killed."""
    times: tuple[float, float] = (0.0, 0.0)
    """When it first started and when it ended, in seconds since 1970; 0 where the journal does not say."""
    row_texts: dict[str, dict[int, str]] = field(default_factory=dict)
    """split -> step -> each row's loss and prediction, as `metrics/row_evidence.py` wrote them."""

    @property
    def last_step(self) -> int:
        """The last step the journal knows of."""
        ends = [int(s.step[-1]) for s in (self.train_loss, *self._evaluated()) if len(s)]
        return max(ends, default=0)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Metrics of the validation split (of any split, if there is none), loss first."""
        source = self.evaluations.get("validation") or {k: v for s in self.evaluations.values() for k, v in s.items()}
        return tuple(sorted(source, key=lambda name: name != "loss"))

    def metric(self, split: str, name: str) -> Series:
        """The curve of one metric on one split; empty when it was never evaluated."""
        return self.evaluations.get(split, {}).get(name) or empty_series(name)

    def main_metric(self) -> str | None:
        """The metric worth a panel beside the loss: the tracked one, else the best known, else the first."""
        names = [n for n in self.metric_names if n != "loss"]
        wanted = (self.tracked_metric, "accuracy", "f1", "macro_f1", "f1_macro", "pearson", "mse")
        return next((n for n in wanted if n in names), names[0] if names else None)

    def best(self) -> tuple[str, int, float] | None:
        """(metric, step, value) of the best evaluation by the tracked metric, else by validation loss."""
        for name in (self.tracked_metric, "loss", self.main_metric()):
            found = self.metric("validation", name).best() if name else None
            if name and found:
                return (name, *found)
        return None

    def _evaluated(self) -> list[Series]:
        return [s for metrics in self.evaluations.values() for s in metrics.values()]


def empty_series(name: str) -> Series:
    """A curve without points."""
    return Series(name, np.empty(0, np.int64), np.empty(0), np.empty(0))
