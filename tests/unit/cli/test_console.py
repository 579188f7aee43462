"""Console output during a run: plain lines in a pipe, progress bars on a terminal."""

from __future__ import annotations

import io

import pytest

from tunesmith.cli import console as module
from tunesmith.cli.console import Console, format_bytes, format_duration, uses_color
from tunesmith.events import Evaluated, Improved, NonFinite, Note, Resumed, RunStarted, SafePoint, StepDone


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def step(number: int, loss: float | None = 0.5) -> StepDone:
    return StepDone(number, number / 10, loss, 1.0, 1e-4, 8, 80, 96)


def evaluated(split: str = "validation") -> Evaluated:
    return Evaluated(10, 1.0, split, {"loss": 0.41, "accuracy": 0.9, "f1": None, "auroc": 0.7}, 30)


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_pipe_gets_plain_lines_without_color() -> None:
    stream = io.StringIO()
    console = Console(stream=stream, logging_steps=5)
    console.on(RunStarted("id", 0, 10, 10.0, 1.0, 80))
    for number in range(1, 11):
        console.on(step(number))
        if number == 10:
            console.on(evaluated())
            console.on(evaluated("train_sample"))
            console.on(Improved(10, "accuracy", 0.9))
        console.on(SafePoint(number))
    console.close()
    shown = lines_of(stream)
    assert shown[0] == "Training: 10 steps, 1 epoch of 80 rows."
    assert shown[1].startswith("step 5/10  epoch 0.50  loss 0.5000  lr 1.00e-04")
    assert shown[3] == "epoch 1.00  loss 0.4100 (train 0.4100)  accuracy 0.9000  f1 -  best"
    assert len(shown) == 4
    assert "\x1b" not in stream.getvalue()
    assert "\r" not in stream.getvalue()


def test_terminal_shows_bar_with_loss_speed_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console(stream=stream)
    console.plan(4, 4.0)
    for number in range(1, 5):
        console.on(step(number))
        console.on(SafePoint(number))
    console.close()
    last = stream.getvalue().split("\r")[-1]
    assert last.startswith("training   100% |")
    assert "4/4" in last
    assert "step/s" in last
    assert "left, loss 0.5000" in last
    assert max(len(part) for part in stream.getvalue().replace("\r", "\n").splitlines()) < 80
    assert "\x1b[2m" not in stream.getvalue()
    console.plan(6, 6.0)  # of the next fold
    console.on(step(1))
    console.close()
    assert "1/6" in stream.getvalue().split("\r")[-1]


def test_color_needs_a_terminal_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert uses_color(Terminal())
    assert not uses_color(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not uses_color(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not uses_color(Terminal())
    assert not Console(stream=Terminal()).bars


def test_only_slow_steps_print_a_line_to_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    console = Console(stream=stream)
    console.progress("tokenizing train", 500, 1000)
    console.progress("tokenizing train", 1000, 1000)
    assert lines_of(stream) == []
    for seconds, done in ((0, 0), (11, 1_000_000), (12, 1_100_000), (25, 2_000_000)):
        now[0] = 200.0 + seconds
        console.progress("reading", done, 2_000_000)
    assert lines_of(stream) == ["reading: 1.0 MB of 2.0 MB in 11s, 11s left", "reading: 2.0 MB of 2.0 MB in 25s"]
    for seconds, done in ((0, 1), (11, 50)):
        now[0] = 300.0 + seconds
        console.progress("pair warm-up", done, 200)
    assert lines_of(stream)[2:] == ["pair warm-up: 50 of 200 steps in 11s, 33s left"]


def test_warnings_are_printed_immediately() -> None:
    stream = io.StringIO()
    console = Console(stream=stream)
    console.on(Resumed(5, "checkpoint-5", ("checkpoint-9: a byte differs",)))
    console.on(Note(5, "resumes although the seed changed"))
    console.on(NonFinite(6, "gradient", "classifier.weight", (1, 2)))
    assert lines_of(stream) == [
        "Resumed: after step 5, from checkpoint-5.",
        "Skipped: checkpoint-9: a byte differs",
        "resumes although the seed changed",
        "Step 6: the gradient of classifier.weight is NaN or inf, so the update was skipped.",
    ]


def test_sizes_and_times_are_readable() -> None:
    assert [format_duration(s) for s in (3.9, 65, 7500)] == ["3s", "1m05s", "2h05m"]
    assert [format_bytes(n) for n in (812, 3_400_000, 2e12)] == ["812 B", "3.4 MB", "2000.0 GB"]


def test_details_are_printed_only_if_verbose() -> None:
    for verbose in (False, True):
        stream = io.StringIO()
        console = Console(stream=stream, verbose=verbose)
        console.say("Recipe: pooling mean: best on frozen features.")
        console.say("Warning: 2 rows are in train and test.")
        console.say("Warning: 2 rows are in train and test.")  # as the next fold says
        assert len(lines_of(stream)) == 1 + verbose


def test_lines_without_bars_are_ten_seconds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    stream = io.StringIO()
    console = Console(stream=stream)
    console.plan(200, 50.0)
    for number in range(1, 201):
        now[0] += 0.3
        console.on(step(number))
    assert [line.split()[1] for line in lines_of(stream)] == ["40/200", "80/200", "120/200", "160/200", "200/200"]


def test_at_most_eight_evaluations_are_printed() -> None:
    for verbose, lines in ((False, 8), (True, 30)):
        stream = io.StringIO()
        console = Console(stream=stream, bars=True, verbose=verbose)
        console.plan(300, 10.0)
        for number in range(10, 301, 10):
            console.on(Evaluated(number, number / 10, "validation", {"loss": 0.5}, 30))
            console.on(SafePoint(number))
        assert len(lines_of(stream)) == lines
        assert lines_of(stream)[-1] == "epoch 30.00  loss 0.5000"
