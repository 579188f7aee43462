"""Reading by columns gives what reading by lines gives.

Speed, by hand: write 1,000,000 StepDone lines with `encode_event`, time `read_columns` and `read_journal`.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tunesmith.errors import CheckpointError
from tunesmith.events import Evaluated, Event, Note, RunStarted, StepDone
from tunesmith.run.columns import read_columns
from tunesmith.run.journal import encode_event

PLAIN, FAST = 10**9, 0


def some_events(seed: int) -> list[Event]:
    pick = random.Random(seed)
    events: list[Event] = [RunStarted("r", 0, 50, 10.0, 5.0, 80)]
    for step in range(1, 51):
        loss = None if pick.random() < 0.2 else pick.random() * 3
        norm = None if pick.random() < 0.2 else pick.random() * 1e-12
        events.append(StepDone(step, step / 10, loss, norm, 5e-5, 8, pick.randrange(999), 512, pick.random()))
        if pick.random() < 0.2:
            events.append(Evaluated(step, step / 10, "validation", {"loss": loss, 'a"b': 1.0}, 40, 0.1))
        if pick.random() < 0.1:
            events.append(Note(step, '{"event": "StepDone", "step": 999}\n' * 3))
    return events


@pytest.mark.parametrize("seed", range(5))
def test_both_ways_of_reading_agree_to_the_bit(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b"".join(map(encode_event, some_events(seed))) + b'{"event": "StepDone", "st')
    slow, fast = read_columns(path, small_bytes=PLAIN), read_columns(path, small_bytes=FAST)
    assert slow.others == fast.others
    assert slow.steps.keys() == fast.steps.keys()
    for name, values in slow.steps.items():
        np.testing.assert_array_equal(values, fast.steps[name], err_msg=name)


@pytest.mark.parametrize("small_bytes", [PLAIN, FAST])
def test_a_damaged_line_is_named_whichever_way_it_is_read(tmp_path: Path, small_bytes: int) -> None:
    path = tmp_path / "j.jsonl"
    lines = [encode_event(e) for e in some_events(0)]
    lines[20] = b'{"event": "StepDone", "step": 7, "loss": 0.1.2}\n'
    path.write_bytes(b"".join(lines))
    with pytest.raises(CheckpointError, match="jsonl:21"):
        read_columns(path, small_bytes=small_bytes)


def test_a_line_from_another_writer_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(
        b'{"step":1,"event":"StepDone","epoch":0.1,"loss":0.5,"grad_norm":null,"learning_rate":1e-5,'
        b'"examples":8,"tokens":100,"padded_tokens":128}\n'
    )
    for small_bytes in (PLAIN, FAST):
        assert read_columns(path, small_bytes=small_bytes).steps["loss"].tolist() == [0.5]


def test_an_empty_journal_has_empty_columns(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.touch()
    assert len(read_columns(path).steps["step"]) == 0
