"""Event logs are appended, read, truncated and followed; damage is reported with its line."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tunesmith.errors import CheckpointError, ResourceError
from tunesmith.events import (
    EpochStarted,
    Evaluated,
    Event,
    Note,
    Resumed,
    RunEnded,
    RunStarted,
    SafePoint,
    Saved,
    StepDone,
)
from tunesmith.runs.event_log import (
    MAX_LINE,
    ColumnsTail,
    Journal,
    JournalColumns,
    read_columns,
    read_journal,
    truncate_journal,
)


def step_done(step: int, loss: float | None = 0.5) -> StepDone:
    return StepDone(step, step / 4, loss, 1.0, 5e-5, 8, 200, 256, 0.1)


def two_epochs() -> list[Event]:
    """Return two epochs of four steps, each with an evaluation and a checkpoint, without SafePoint events."""
    events: list[Event] = [RunStarted("r", 0, 8, 4.0, 2.0, 32)]
    for epoch in (0, 1):
        events.append(EpochStarted(epoch, epoch * 4))
        events += [step_done(epoch * 4 + k) for k in (1, 2, 3, 4)]
        end = epoch * 4 + 4
        events += [Evaluated(end, epoch + 1.0, "validation", {"loss": 0.4}, 10), Saved(end, f"checkpoint-{end}")]
    return [*events, RunEnded(8, "completed")]


def write(path: Path, events: list[Event]) -> Path:
    with Journal(path) as journal:
        for event in events:
            journal.append(event)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "journal.jsonl", two_epochs())


def test_log_reads_back_appended_events_except_safe_points(tmp_path: Path) -> None:
    path = write(tmp_path / "j.jsonl", [*two_epochs()[:3], SafePoint(1)])
    assert read_journal(path) == two_epochs()[:3]


def test_text_with_newlines_stays_on_one_line(tmp_path: Path) -> None:
    note = Note(0, "a\nb\u2028c\x85d\udc80</script>")
    path = write(tmp_path / "j.jsonl", [note, step_done(1)])
    assert path.read_bytes().count(b"\n") == 2
    assert read_journal(path) == [note, step_done(1)]


def test_truncated_last_line_keeps_the_others(path: Path) -> None:
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        assert read_journal(path) == two_epochs()[:-1]


def test_append_removes_a_truncated_line_first(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])
    write(path, [Note(8, "again"), RunEnded(8, "SIGTERM")])
    assert read_journal(path) == [*two_epochs()[:-1], Note(8, "again"), RunEnded(8, "SIGTERM")]
    path.write_bytes(b"{" * 99)
    assert read_journal(write(path, [step_done(1)])) == [step_done(1)]


@pytest.mark.parametrize("step", range(9))
def test_truncated_log_written_again_is_the_same(path: Path, step: int) -> None:
    truncate_journal(path, step)
    kept = read_journal(path)
    write(path, [e for e in two_epochs() if e not in kept])
    assert read_journal(path) == two_epochs()
    assert all(e.step <= step for e in kept)


def test_truncated_log_keeps_earlier_resumes(path: Path) -> None:
    truncate_journal(path, 4)
    write(path, [RunStarted("r", 4, 8, 4.0, 2.0, 32), Resumed(4, "checkpoint-4"), step_done(5)])
    truncate_journal(path, 4)
    assert read_journal(path)[-1] == Resumed(4, "checkpoint-4")


def test_failed_truncation_keeps_the_log(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(path.read_bytes()[:-3])
    before = path.read_bytes()

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(ResourceError, match="No space"):
        truncate_journal(path, 2)
    assert path.read_bytes() == before
    monkeypatch.undo()
    truncate_journal(path, 8)
    assert read_journal(path) == two_epochs()[:-1], "an incomplete last line is dropped"
    assert os.listdir(path.parent) == ["journal.jsonl"]


def steps_of(columns: JournalColumns | None) -> list[int]:
    assert columns is not None
    return [int(step) for step in columns.steps["step"]]


def test_tail_waits_for_a_line_being_written(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    tail = ColumnsTail(path)
    with pytest.raises(FileNotFoundError):
        tail.poll()
    write(path, [step_done(1)])
    assert tail.poll()
    line = write(tmp_path / "other.jsonl", [step_done(2, None)]).read_bytes()
    with open(path, "ab") as file:
        file.write(line[:20])
        file.flush()
        assert not tail.poll()
        file.write(line[20:])
    assert tail.poll()
    assert not tail.poll()
    assert steps_of(tail.columns) == [1, 2]
    truncate_journal(path, 1)
    assert tail.poll()
    assert steps_of(tail.columns) == [1]


GOOD = b'{"event": "StepDone", "step": 1, "epoch": 0.1, "loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-5, '
GOOD += b'"examples": 8, "tokens": 9, "padded_tokens": 9, "seconds": 0.1}\n'
HOSTILE = {
    "nested": b'{"event": "Note", "step": 1, "text": {"a": ' + b"[" * 9000 + b"]" * 9000 + b"}}\n",
    "text for a number": GOOD.replace(b"0.5", b'"low"'),
    "a truth for a number": GOOD.replace(b'"tokens": 9', b'"tokens": true'),
    "a step below 0": GOOD.replace(b'"step": 1', b'"step": -1'),
    "a step of 400 digits": GOOD.replace(b'"step": 1', b'"step": ' + b"1" * 400),
    "no step": GOOD.replace(b'"step": 1, ', b""),
    "metrics that are a list": b'{"event": "Evaluated", "step": 1, "epoch": 1, "split": "v", "metrics": [1], "n": 4}\n',
    "a score that is a text": b'{"event": "Evaluated", "step": 1, "epoch": 1, "split": "v", "metrics": {"f1": "x"}, "n": 4}\n',
    "not an object": b"[1]\n",
    "not UTF-8": b'{"event": "Note", "step": 1, "text": "\xff"}\n',
    "a long line": b'{"event": "Note", "step": 1, "text": "' + b"x" * MAX_LINE + b'"}\n',
    "an endless last line": b"x" * 2_000_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_line_is_damage_with_its_place(tmp_path: Path, name: str) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(GOOD * 3 + HOSTILE[name])
    with pytest.raises(CheckpointError, match="the journal is damaged") as caught:
        read_columns(path)
    assert str(caught.value.where).endswith(("j.jsonl:4", "j.jsonl"))
    assert len(str(caught.value)) < 500


def test_nan_and_infinite_numbers_are_gaps(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(
        b"".join(GOOD.replace(b"0.5", word) for word in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"null"))
    )
    assert np.isnan(read_columns(path).steps["loss"]).tolist() == [True] * 5
