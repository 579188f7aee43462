"""Seconds of a run from a few of its steps, on a clock that a test moves."""

from __future__ import annotations

import pytest
from tunesmith.pipeline.forecast import Pace, RunClock, StepsRead

from tunesmith.events import EpochStarted, Evaluated, Event, RowsEvaluated, SafePoint, Saved, StepDone
from tunesmith.pipeline import forecast


def reads_of(sizes: list[int], *, steps: int = 1, slow: float = 0.0) -> list[StepsRead]:
    """0.2 s a step and 1 ms a token; the first two reads are slower."""
    return [
        StepsRead(steps, size, 0.2 * steps + 0.001 * size + (slow if at < forecast.WARM_READS else 0.0))
        for at, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("steps", [1, 16])
def test_the_line_through_the_reads_is_found_and_what_is_slow_once_counts_once(steps: int) -> None:
    found = Pace.of(reads_of([900, 300, 500, 700, 400, 600], steps=steps, slow=3.0), saved=False)
    assert (found.once, found.step, found.token) == pytest.approx((6.0, 0.2, 0.001))
    assert found.seconds(1_000, 500_000) == pytest.approx(200 + 500)


def test_a_save_before_the_last_step_is_no_part_of_a_step() -> None:
    reads = reads_of([900, 300, 500, 700, 400, 600])
    reads[-1].seconds += 5.0
    found = Pace.of(reads, saved=True)
    assert (found.step, found.token, found.save) == pytest.approx((0.2, 0.001, 5.0))


def test_where_tokens_make_no_difference_steps_are_counted() -> None:
    found = Pace.of([StepsRead(16, size, 1.6) for size in (900, 300, 500, 700)], saved=False)
    assert (found.step, found.token) == pytest.approx((0.1, 0.0))


def test_steps_that_are_read_together_are_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(forecast.time, "monotonic", lambda: now[0])
    phases = RunClock()

    def after(seconds: float, event: Event) -> None:
        now[0] += seconds
        phases.on(event)

    def done(step: int, shared: float) -> StepDone:
        return StepDone(step, 0.0, 1.0, 1.0, 1e-4, 8, 100, 128, seconds=shared)

    after(7.0, EpochStarted(0, 0))
    for first, shared in ((1, 0.5), (3, 0.25)):
        after(shared, SafePoint(first))
        after(shared, done(first, shared))
        after(0.01, done(first + 1, shared))
    after(4.0, RowsEvaluated(4, "validation", ""))
    after(0.0, Evaluated(4, 1.0, "validation", {}, 10, 4.0))
    after(0.5, Evaluated(4, 1.0, "train_sample", {}, 10, 4.5))
    after(0.2, SafePoint(4))
    after(0.5, Saved(4, "checkpoint-4", 0.5))
    after(0.3, done(5, 0.3))
    assert [(read.steps, read.tokens) for read in phases.reads] == [(2, 200), (2, 200), (1, 100)]
    assert [read.seconds for read in phases.reads] == pytest.approx([1.01, 0.51, 1.0])
    assert phases.evaluations == pytest.approx([4.0])
