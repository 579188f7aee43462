"""Turns a run folder, an event log or events in memory into `Curves`: raw values by step and by epoch.

Steps that a resumed run repeated count once. Smoothing and thinning are views and are never stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.events import Evaluated, Event, Improved, NonFinite, Resumed, RowsEvaluated, RunEnded, RunStarted
from tunesmith.metrics.table import greater_is_better
from tunesmith.runs.event_log import JournalColumns, columns_of, read_columns
from tunesmith.runs.folder import open_run

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One curve: arrays of equal length with ascending steps; NaN is a gap."""

    name: str
    step: NDArray[np.int64]
    epoch: Floats
    value: Floats

    def __len__(self) -> int:
        return len(self.step)

    def finite(self) -> Series:
        """Return the points that are not gaps."""
        return self._at(np.isfinite(self.value))

    def smoothed(self, window: int | None = None) -> Series:
        """Return a centered mean over about `window` steps (default: 1/25 of the curve, 25 if it is short).

        Three running means, O(n), approximate a Gaussian. Gaps stay gaps and don't affect adjacent points.
        """
        usual = max(len(self) // 25, min(len(self) // 5, 25))
        width = max(1, usual if window is None else window)
        value = self.value
        for _ in range(3):
            value = _running_mean(value, max(1, round(width / 3**0.5)))
        return Series(self.name, self.step, self.epoch, np.where(np.isfinite(self.value), value, np.nan))

    def thinned(self, points: int) -> Series:
        """Return about `points` points that keep the lowest and highest value of every bucket, so that no spike is lost."""
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
        """Return (step, value) of the best point, the earliest of equals; None if every point is a gap."""
        good = self.finite()
        if not len(good):
            return None
        at = int(np.argmax(good.value) if greater_is_better(self.name) else np.argmin(good.value))
        return int(good.step[at]), float(good.value[at])

    def _at(self, index: NDArray[Any]) -> Series:
        return Series(self.name, self.step[index], self.epoch[index], self.value[index])


def _running_mean(value: Floats, width: int) -> Floats:
    """Return the mean over `width` adjacent points (fewer at the ends), without gaps."""
    good = np.isfinite(value)
    total = np.concatenate([[0.0], np.cumsum(np.where(good, value, 0.0))])
    count = np.concatenate([[0], np.cumsum(good)])
    at = np.arange(len(value))
    # Near an end the window shrinks on both sides, because a one-sided mean would bend the curve; but not to 0, because the
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
    """split -> number of evaluated rows."""
    num_steps: int = 0
    steps_per_epoch: float = 0.0
    train_rows: int = 0
    tracked_metric: str | None = None
    """The metric that selected the best checkpoint of the run."""
    resumed_at: tuple[int, ...] = ()
    non_finite: tuple[int, ...] = ()
    """Steps whose update was not applied because something was NaN or infinite."""
    ended: str | None = None
    """Why the run ended; None while it runs or when it was killed."""
    times: tuple[float, float] = (0.0, 0.0)
    """First start and end, in seconds since 1970; 0 if the event log doesn't contain them."""
    row_texts: dict[str, dict[int, str]] = field(default_factory=dict)
    """split -> step -> each row's loss and prediction, as `metrics/evidence.py` wrote them."""

    @property
    def last_step(self) -> int:
        """Return the last step in the event log."""
        ends = [int(s.step[-1]) for s in (self.train_loss, *self._evaluated()) if len(s)]
        return max(ends, default=0)

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Return the metrics of the validation split (of any split, if there is none), loss first."""
        source = self.evaluations.get("validation") or {k: v for s in self.evaluations.values() for k, v in s.items()}
        return tuple(sorted(source, key=lambda name: name != "loss"))

    def metric(self, split: str, name: str) -> Series:
        """Return the curve of a metric on a split; empty if it was never evaluated."""
        return self.evaluations.get(split, {}).get(name) or empty_series(name)

    def main_metric(self) -> str | None:
        """Return the metric to draw next to the loss: the tracked one, else the best known, else the first."""
        names = [n for n in self.metric_names if n != "loss"]
        wanted = (self.tracked_metric, "accuracy", "f1", "macro_f1", "f1_macro", "pearson", "mse")
        return next((n for n in wanted if n in names), names[0] if names else None)

    def best(self) -> tuple[str, int, float] | None:
        """Return (metric, step, value) of the best evaluation by the tracked metric, else by validation loss."""
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


def load_curves(run: str | Path) -> Curves:
    """Load the curves of a run folder (or of an event log), named after the folder."""
    path = Path(run)
    if path.is_file():
        return build_curves(read_columns(path), name=path.resolve().parent.name)
    folder = open_run(path)
    return build_curves(read_columns(folder.journal_file), name=folder.name)


def curves_from_events(events: Iterable[Event], *, name: str = "run") -> Curves:
    """Return the curves of events in memory, in chronological order."""
    return build_curves(columns_of(list(events)), name=name)


def build_curves(columns: JournalColumns, *, name: str) -> Curves:
    """Return the content of the event log as arrays."""
    going_back = [(line, e.step) for line, e in columns.others if isinstance(e, (RunStarted, Resumed))]
    steps = _kept_steps(columns.steps, going_back)
    events = [e for line, e in columns.others if not any(at > line and back < e.step for at, back in going_back)]
    started = [e for e in events if isinstance(e, RunStarted)]
    improved = [e for e in events if isinstance(e, Improved)]
    ended = [e for e in events if isinstance(e, RunEnded)]
    evaluated = [e for e in events if isinstance(e, Evaluated)]
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.where(steps["seconds"] > 0, steps["seconds"], np.nan)
        tokens = np.where(steps["tokens"] > 0, steps["tokens"], np.nan) / seconds  # other writers don't count tokens
        examples = steps["examples"] / seconds

    def series(label: str, value: NDArray[Any]) -> Series:
        return Series(label, steps["step"], steps["epoch"], np.asarray(value, dtype=np.float64))

    return Curves(
        name=name,
        train_loss=series("loss", steps["loss"]),
        learning_rate=series("learning_rate", steps["learning_rate"]),
        grad_norm=series("grad_norm", steps["grad_norm"]),
        tokens_per_second=series("tokens_per_second", tokens),
        examples_per_second=series("examples_per_second", examples),
        evaluations=_evaluations(evaluated),
        rows={e.split: e.n for e in evaluated},
        num_steps=started[-1].num_steps if started else 0,
        steps_per_epoch=started[-1].steps_per_epoch if started else 0.0,
        train_rows=started[-1].train_rows if started else 0,
        tracked_metric=improved[-1].metric if improved else None,
        resumed_at=tuple(e.step for e in events if isinstance(e, Resumed)),
        non_finite=tuple(sorted({e.step for e in events if isinstance(e, NonFinite)})),
        ended=ended[-1].reason if ended and ended[-1] is events[-1] else None,
        times=(started[0].time if started else 0.0, ended[-1].time if ended else 0.0),
        row_texts=_row_texts(events),
    )


def _row_texts(events: list[Event]) -> dict[str, dict[int, str]]:
    found: dict[str, dict[int, str]] = {}
    for event in events:
        if isinstance(event, RowsEvaluated):
            found.setdefault(event.split, {})[event.step] = event.rows
    return found


def _kept_steps(steps: dict[str, NDArray[Any]], going_back: list[tuple[int, int]]) -> dict[str, NDArray[Any]]:
    """A run that resumed at step s repeats the steps after s; the last entry of each step counts."""
    keep = np.ones(len(steps["step"]), dtype=bool)
    for line, step in going_back:
        keep &= (steps["line"] > line) | (steps["step"] <= step)
    kept = {name: values[keep] for name, values in steps.items()}
    if len(kept["step"]) and np.any(np.diff(kept["step"]) <= 0):  # a different writer, without Resumed events
        _, last = np.unique(kept["step"][::-1], return_index=True)
        kept = {name: values[::-1][last] for name, values in kept.items()}
    return kept


def _evaluations(events: list[Evaluated]) -> dict[str, dict[str, Series]]:
    by_split: dict[str, dict[int, Evaluated]] = {}
    for event in events:
        by_split.setdefault(event.split, {})[event.step] = event
    return {split: _metrics([found[step] for step in sorted(found)]) for split, found in by_split.items()}


def _metrics(events: list[Evaluated]) -> dict[str, Series]:
    step = np.array([e.step for e in events], dtype=np.int64)
    epoch = np.array([e.epoch for e in events], dtype=np.float64)
    names = dict.fromkeys(name for e in events for name in e.metrics)
    return {name: Series(name, step, epoch, _values(events, name)) for name in names}


def _values(events: list[Evaluated], name: str) -> NDArray[np.float64]:
    found = (e.metrics.get(name) for e in events)
    return np.array([np.nan if v is None else v for v in found], dtype=np.float64)
