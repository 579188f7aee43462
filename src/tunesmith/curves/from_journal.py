"""From a run folder, a journal or events in memory to `Curves`. Steps that a resumed run repeated count once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tunesmith.curves.series import Curves, Series
from tunesmith.events import Evaluated, Event, Improved, NonFinite, Resumed, RowsEvaluated, RunEnded, RunStarted
from tunesmith.run.layout import open_run
from tunesmith.run.reader import JournalColumns, columns_of, read_columns


def load_curves(run: str | Path) -> Curves:
    """The curves of a run folder (or of a journal file), named after the folder."""
    path = Path(run)
    if path.is_file():
        return build_curves(read_columns(path), name=path.resolve().parent.name)
    folder = open_run(path)
    return build_curves(read_columns(folder.journal_file), name=folder.name)


def curves_from_events(events: Iterable[Event], *, name: str = "run") -> Curves:
    """The curves of events in memory, in the order they happened."""
    return build_curves(columns_of(list(events)), name=name)


def build_curves(columns: JournalColumns, *, name: str) -> Curves:
    """Everything the journal says, as arrays."""
    going_back = [(line, e.step) for line, e in columns.others if isinstance(e, (RunStarted, Resumed))]
    steps = _kept_steps(columns.steps, going_back)
    events = [e for line, e in columns.others if not any(at > line and back < e.step for at, back in going_back)]
    started = [e for e in events if isinstance(e, RunStarted)]
    improved = [e for e in events if isinstance(e, Improved)]
    ended = [e for e in events if isinstance(e, RunEnded)]
    evaluated = [e for e in events if isinstance(e, Evaluated)]
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds = np.where(steps["seconds"] > 0, steps["seconds"], np.nan)
        tokens = np.where(steps["tokens"] > 0, steps["tokens"], np.nan) / seconds  # other writers do not count them
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
    """A run that resumed at step s wrote again what came after s: of each step the last entry counts."""
    keep = np.ones(len(steps["step"]), dtype=bool)
    for line, step in going_back:
        keep &= (steps["line"] > line) | (steps["step"] <= step)
    kept = {name: values[keep] for name, values in steps.items()}
    if len(kept["step"]) and np.any(np.diff(kept["step"]) <= 0):  # another writer, without Resumed
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
