"""Curves equal the event log, whatever happened to the run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from tunesmith.events import Evaluated, Event, Resumed, RunStarted, StepDone
from tunesmith.runs.event_log import Journal, Series, curves_from_events, read_journal, truncate_journal
from tunesmith.runs.folder import load_curves


def series(values: list[float]) -> Series:
    step = np.arange(1, len(values) + 1)
    return Series("loss", step, step / 10, np.array(values, dtype=float))


def healthy(synthetic: SimpleNamespace) -> list[Event]:
    events: list[Event] = synthetic.make_run([0.5, 0.3, 0.2], [0.45, 0.40, 0.41], accuracy=[0.78, 0.84, 0.85])
    return events


def write(path: Path, events: list[Event]) -> None:
    with Journal(path) as journal:
        for event in events:
            journal.append(event)


def test_curve_equals_the_event_log(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    events = healthy(synthetic)
    write(tmp_path / "journal.jsonl", events)
    curves = load_curves(tmp_path)
    done = [e for e in events if isinstance(e, StepDone)]
    assert curves.train_loss.value.tolist() == [e.loss for e in done]
    assert curves.train_loss.step.tolist() == [e.step for e in done]
    assert curves.train_loss.epoch.tolist() == [e.epoch for e in done]
    assert curves.tokens_per_second.value[0] == done[0].tokens / done[0].seconds
    assert curves.metric("validation", "accuracy").value.tolist() == [0.78, 0.84, 0.85]
    assert curves.metric("train_sample", "accuracy").step.tolist() == [100, 200, 300]
    assert curves.rows == {"train_sample": 256, "validation": 408}
    assert (curves.ended, curves.num_steps, curves.last_step) == ("completed", 300, 300)
    assert curves.best() == ("accuracy", 300, 0.85)
    assert curves.name == tmp_path.name


def test_nan_or_infinite_evaluation_is_a_gap() -> None:
    events: list[Event] = [
        Evaluated(s, s / 10, "validation", {"loss": v}, 40) for s, v in ((10, 0.5), (20, None), (30, 0.4))
    ]
    found = curves_from_events(events).metric("validation", "loss")
    assert np.isnan(found.value[1])
    assert found.best() == (30, 0.4)


def test_resumed_run_has_the_same_curve(synthetic: SimpleNamespace, tmp_path: Path) -> None:
    events = healthy(synthetic)
    path = tmp_path / "journal.jsonl"
    write(path, [e for e in events if e.step <= 250])
    truncate_journal(path, 200)
    again: list[Event] = [RunStarted("run", 200, 300, 100.0, 3.0, 1600), Resumed(200, "checkpoint-200")]
    write(path, [*again, *(e for e in events if e not in read_journal(path))])
    assert_same(load_curves(tmp_path).train_loss, curves_from_events(events).train_loss)
    assert load_curves(tmp_path).resumed_at == (200,)


def test_repeated_steps_count_once_without_truncation(synthetic: SimpleNamespace) -> None:
    events = healthy(synthetic)
    stale: list[Event] = [StepDone(s, s / 100, 9.0, 1.0, 1e-5, 16, 850, 880, 0.1) for s in range(201, 251)]
    before = [e for e in events if e.step <= 200]
    after = [e for e in events if e.step > 200]
    curves = curves_from_events([*before, *stale, Resumed(200, "checkpoint-200"), *after])
    assert_same(curves.train_loss, curves_from_events(events).train_loss)


def assert_same(a: Series, b: Series) -> None:
    np.testing.assert_array_equal(a.step, b.step)
    np.testing.assert_array_equal(a.value, b.value)


def test_no_events_give_empty_curves() -> None:
    curves = curves_from_events([])
    assert len(curves.train_loss) == 0
    assert (curves.best(), curves.main_metric(), curves.last_step) == (None, None, 0)
    assert len(curves.train_loss.smoothed()) == 0


def test_smoothing_keeps_straight_lines_and_gaps() -> None:
    line = [1.0 - k / 200 for k in range(100)]
    np.testing.assert_allclose(series(line).smoothed(15).value[10:-10], line[10:-10], atol=1e-12)
    np.testing.assert_allclose(series(line).smoothed(15).value, line, atol=0.01)
    line[50] = np.nan
    found = series(line).smoothed(15).value
    assert np.isnan(found[50])
    assert np.isfinite(np.delete(found, 50)).all()


def test_thinning_keeps_extremes_and_gaps() -> None:
    values = [0.5] * 10_000
    values[1234], values[7777], values[5000] = 9.0, -9.0, np.nan
    thin = series(values).thinned(200)
    assert len(thin) < 320
    assert np.nanmax(thin.value) == 9.0
    assert np.nanmin(thin.value) == -9.0
    assert np.isnan(thin.value).any()
