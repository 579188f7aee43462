"""Append, read and truncate."""

from __future__ import annotations

import os
from pathlib import Path

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
from tunesmith.runs.event_log import Journal, read_journal, truncate_journal


def step_done(step: int, loss: float | None = 0.5) -> StepDone:
    return StepDone(step, step / 4, loss, 1.0, 5e-5, 8, 200, 256, 0.1)


def two_epochs() -> list[Event]:
    """Two epochs of four steps, an evaluation and a checkpoint after each, no SafePoint."""
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


def test_what_was_appended_is_read_back_equal_and_safe_points_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "j.jsonl", [*two_epochs()[:3], SafePoint(1)])
    assert read_journal(path) == two_epochs()[:3]


def test_an_event_is_on_disk_before_append_returns(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.append(step_done(1))
    assert read_journal(tmp_path / "j.jsonl") == [step_done(1)]
    journal.close()
    journal.close()


def test_a_loss_that_is_not_finite_is_null_never_a_number(tmp_path: Path) -> None:
    path = write(tmp_path / "j.jsonl", [step_done(1, float("nan"))])
    assert b'"loss": null' in path.read_bytes()
    assert read_journal(path) == [step_done(1, None)]


def test_a_text_with_newlines_and_lone_surrogates_stays_on_one_line(tmp_path: Path) -> None:
    note = Note(0, "a\nb\u2028c\x85d\udc80</script>")
    path = write(tmp_path / "j.jsonl", [note, step_done(1)])
    assert path.read_bytes().count(b"\n") == 2
    assert read_journal(path) == [note, step_done(1)]


def test_every_cut_of_the_last_line_leaves_the_lines_before_it(path: Path) -> None:
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        assert read_journal(path) == two_epochs()[:-1]


def test_appending_after_a_cut_line_removes_the_rest_of_it_first(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])
    write(path, [RunEnded(8, "SIGTERM")])
    assert read_journal(path) == [*two_epochs()[:-1], RunEnded(8, "SIGTERM")]


def test_a_journal_that_is_one_cut_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"event": "RunSt' + b"x" * 200_000)
    assert read_journal(path) == []
    Journal(path).close()
    assert path.read_bytes() == b""


def test_a_damaged_line_in_the_middle_is_named_by_file_and_line(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = b"\0" * 40 + b"\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(CheckpointError, match=r"journal\.jsonl:5: the journal is damaged"):
        read_journal(path)


def test_an_event_of_a_newer_version_is_passed_over(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b'{"event": "FromTheFuture", "step": 9}\n')
    assert read_journal(path) == two_epochs()


@pytest.mark.parametrize("step", range(9))
def test_truncating_and_writing_the_rest_again_gives_the_same_journal(path: Path, step: int) -> None:
    truncate_journal(path, step)
    kept = read_journal(path)
    write(path, [e for e in two_epochs() if e not in kept])
    assert read_journal(path) == two_epochs()
    assert all(e.step <= step for e in kept)


def test_truncating_at_an_epoch_end_keeps_the_evaluation_and_drops_the_next_epochs_start(path: Path) -> None:
    dropped = truncate_journal(path, 4)
    assert read_journal(path) == two_epochs()[:8]
    assert dropped == len(two_epochs()) - 8


def test_a_run_that_goes_on_has_not_ended(path: Path) -> None:
    truncate_journal(path, 8)
    assert not any(isinstance(e, RunEnded) for e in read_journal(path))


def test_earlier_resumptions_stay_in_the_record(path: Path) -> None:
    truncate_journal(path, 4)
    write(path, [RunStarted("r", 4, 8, 4.0, 2.0, 32), Resumed(4, "checkpoint-4"), step_done(5)])
    truncate_journal(path, 4)
    assert read_journal(path)[-1] == Resumed(4, "checkpoint-4")


def test_truncating_drops_a_cut_last_line_and_leaves_no_temporary_file(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])
    truncate_journal(path, 100)
    assert read_journal(path) == two_epochs()[:-1]
    assert os.listdir(path.parent) == ["journal.jsonl"]


def test_a_failed_truncation_leaves_the_journal_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = path.read_bytes()

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(ResourceError, match="No space"):
        truncate_journal(path, 2)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["journal.jsonl"]


def test_truncating_an_absent_journal_does_nothing(tmp_path: Path) -> None:
    assert truncate_journal(tmp_path / "none.jsonl", 3) == 0
