"""Event logs as columns, and damaged ones."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tunesmith.errors import CheckpointError
from tunesmith.events import StepDone
from tunesmith.runs.event_log import (
    MAX_LINE,
    ColumnsTail,
    Journal,
    JournalColumns,
    encode_event,
    read_columns,
    read_journal,
    truncate_journal,
)


def test_a_line_from_another_writer_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(
        b'{"step":1,"event":"StepDone","epoch":0.1,"loss":0.5,"grad_norm":null,"learning_rate":1e-5,'
        b'"examples":8,"tokens":100,"padded_tokens":128}\n'
    )
    assert read_columns(path).steps["loss"].tolist() == [0.5]


def test_an_empty_journal_has_empty_columns(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.touch()
    assert len(read_columns(path).steps["step"]) == 0


def steps_of(columns: JournalColumns | None) -> list[int]:
    assert columns is not None
    return [int(step) for step in columns.steps["step"]]


def append(path: Path, *steps: int) -> None:
    with Journal(path) as journal:
        for step in steps:
            journal.append(StepDone(step, step / 4, 0.5, 1.0, 5e-5, 8, 200, 256, 0.1))


def test_the_tail_gives_each_step_once_and_waits_for_a_line_being_written(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    tail = ColumnsTail(path)
    with pytest.raises(FileNotFoundError):
        tail.poll()
    append(path, 1)
    assert tail.poll()
    line = encode_event(StepDone(2, 0.5, None, None, 5e-5, 8, 200, 256, 0.1))
    with open(path, "ab") as file:
        file.write(line[:20])
        file.flush()
        assert not tail.poll()
        file.write(line[20:])
    assert tail.poll()
    assert not tail.poll()
    assert steps_of(tail.columns) == [1, 2]


def test_the_tail_starts_over_when_the_journal_was_truncated(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    append(path, 1, 2, 3)
    tail = ColumnsTail(path)
    tail.poll()
    truncate_journal(path, 2)
    assert tail.poll()
    assert steps_of(tail.columns) == [1, 2]


GOOD = b'{"event": "StepDone", "step": 1, "epoch": 0.1, "loss": 0.5, "grad_norm": 1.0, "learning_rate": 1e-5, '
GOOD += b'"examples": 8, "tokens": 9, "padded_tokens": 9, "seconds": 0.1}\n'
HOSTILE = {
    "nested": b'{"event": "Diagnosed", "step": 1, "finding": {"a": ' + b"[" * 9000 + b"]" * 9000 + b"}}\n",
    "no number": GOOD.replace(b"0.5", b"+-e"),
    "text for a number": GOOD.replace(b"0.5", b'"low"'),
    "a truth for a number": GOOD.replace(b'"tokens": 9', b'"tokens": true'),
    "a step below 0": GOOD.replace(b'"step": 1', b'"step": -1'),
    "half a step": GOOD.replace(b'"step": 1', b'"step": 1.5'),
    "a step of 400 digits": GOOD.replace(b'"step": 1', b'"step": ' + b"1" * 400),
    "no step": GOOD.replace(b'"step": 1, ', b""),
    "null for a count": GOOD.replace(b'"tokens": 9', b'"tokens": null'),
    "metrics that are a list": b'{"event": "Evaluated", "step": 1, "epoch": 1, "split": "v", "metrics": [1], "n": 4}\n',
    "a score that is a text": b'{"event": "Evaluated", "step": 1, "epoch": 1, "split": "v", "metrics": {"f1": "x"}, "n": 4}\n',
    "a name that is a number": b'{"event": "RunEnded", "step": 1, "reason": 4}\n',
    "not an object": b"[1]\n",
    "not UTF-8": b'{"event": "Note", "step": 1, "text": "\xff"}\n',
    "a long line": b'{"event": "Note", "step": 1, "text": "' + b"x" * MAX_LINE + b'"}\n',
    "an endless last line": b"x" * 2_000_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_value_that_does_not_belong_is_damage_with_its_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(GOOD * 3 + HOSTILE[name])
    with pytest.raises(CheckpointError, match="the journal is damaged") as caught:
        read_columns(path)
    assert str(caught.value.where).endswith(("j.jsonl:4", "j.jsonl"))
    assert len(str(caught.value)) < 500


def test_numbers_that_are_not_finite_are_gaps(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(
        b"".join(GOOD.replace(b"0.5", word) for word in (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"null"))
    )
    assert np.isnan(read_columns(path).steps["loss"]).tolist() == [True] * 5


def test_what_is_no_file_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "zero").symlink_to("/dev/zero")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10**12)
    for name, says in (
        ("pipe", "named pipe"),
        ("folder", "a folder"),
        ("zero", "a device"),
        ("sparse", "larger than"),
    ):
        for read in (read_journal, read_columns):
            with pytest.raises(CheckpointError, match=says):
                read(tmp_path / name)
