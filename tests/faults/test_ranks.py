"""Rows 19 and 20: ranks that die, stop or fail; saves on several ranks; resume on the same or a different number of ranks."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from faults.trials import (
    clean,
    damaged_checkpoints,
    engine,
    fingerprint,
    free_port,
    intact_checkpoints,
    leftovers,
    new_seed,
    size,
)
from patience import patient
from tunesmith.events import Saved
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir

TWO = {"ranks": 2, "timeout": 90}


@pytest.fixture(scope="module")
def pair(bench: Any) -> dict[str, Any]:
    """Return the fingerprint of the uninterrupted run on two ranks."""
    folder = bench.root / "pair"
    ended = engine(folder, **TWO)
    assert ended.codes == [0, 0], ended.log
    found = fingerprint(folder)
    clean(folder)
    return found


def same_as_pair(folder: Path, pair: dict[str, Any], where: str = "", **options: Any) -> None:
    """Resume on two ranks and assert that the run is bit-identical to the uninterrupted one."""
    assert damaged_checkpoints(folder) == [], where
    again = engine(folder, options=options, **TWO)
    assert again.codes == [0, 0], f"{where}: {again.log[-2000:]}"
    assert fingerprint(folder) == pair, where
    clean(folder)


@pytest.mark.parametrize("lost", [0, 1])
def test_killed_rank_ends_the_others_and_is_named(bench: Any, pair: dict[str, Any], folder: Path, lost: int) -> None:
    seed = new_seed()
    rng = random.Random(seed)
    for _ in range(size(full=25, ci=1)):
        at = rng.uniform(0.0, 1.5)  # with the delay, the 24 steps take at least 3.6 s on any machine
        where = f"seed {seed}, rank {lost} killed {at:.2f} s after the run began"
        # timed from the first log entry: the launcher must notice ranks that die before initialization
        job = {"signals": [[at, "KILL", lost]], "signals_after": RunDir(folder).journal_file, **TWO}
        ended = engine(folder, fault="slow:150", **job)
        other = 1 - lost
        assert ended.codes[lost] == -9, where
        assert ended.codes[other] == 7, f"{where}: {ended.codes} {ended.log[-1500:]}"
        assert ended.seconds[other] - ended.sent[0] < patient(15), where
        assert re.search(rf"rank {lost} \(process \d+ on .*\) (has died|is gone)", ended.log), ended.log[-1500:]
        same_as_pair(folder, pair, where)


def test_stopped_rank_ends_the_others_after_the_timeout(bench: Any, pair: dict[str, Any], folder: Path) -> None:
    ended = engine(
        folder,
        signals=[[1.0, "STOP", 1]],
        signals_after=RunDir(folder).journal_file,
        until_rank_0_ends=True,
        options={"rank_timeout": 8},
        fault="slow:150",
        **TWO,
    )
    assert ended.codes[0] == 7, ended.log[-1500:]
    assert ended.seconds[0] - ended.sent[0] < 8 + patient(15)
    assert re.search(r"rank 1 \(process \d+ on .*\) is stopped", ended.log), ended.log[-1500:]
    same_as_pair(folder, pair)


def test_missing_rank_is_awaited_until_the_timeout(bench: Any, folder: Path) -> None:
    alone = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = engine(folder, env=alone | meeting, options={"rank_timeout": 2})
    assert ended.code == 7, ended.log[-1500:]
    assert "rank 0 of 2 could not connect to the others" in ended.last_line
    assert ended.seconds[0] < patient(15)


@pytest.mark.parametrize("lost", [0, 1])
def test_error_on_one_rank_ends_all(bench: Any, pair: dict[str, Any], folder: Path, lost: int) -> None:
    ended = engine(folder, fault=f"on_rank:{lost}:5:error", **TWO)
    assert ended.codes[lost] == 1
    assert ended.codes[1 - lost] == 7, ended.log[-1500:]
    assert max(ended.seconds) < patient(15)
    same_as_pair(folder, pair)


def test_different_number_of_ranks_is_refused(bench: Any, pair: dict[str, Any], folder: Path) -> None:
    engine(folder, env={"TUNESMITH_FAULT": "step.end:kill:6"}, **TWO)
    assert intact_checkpoints(folder)
    ended = engine(folder)
    assert ended.code == 5
    assert "world was 2 and is 1" in ended.last_line
    assert engine(folder, options={"allow_changed": True}).code == 0


def test_signal_to_one_rank_stops_all_at_one_step(bench: Any, pair: dict[str, Any], folder: Path) -> None:
    ended = engine(folder, fault="on_rank:1:7:TERM", **TWO)
    assert ended.codes == [143, 143], ended.log
    assert intact_checkpoints(folder) == [4, 7], "the best and the newest"
    same_as_pair(folder, pair)


def test_saves_of_two_ranks_do_not_race(bench: Any, folder: Path) -> None:
    """Sleep randomly before and after every barrier, and save at every step."""
    saves = size(full=200, ci=12)
    options = {"rows": 4 * saves, "epochs": 1, "save_every": 1, "evaluate_every": 10, "keep": 2}
    longest = 200 if saves == 200 else 40
    ended = engine(folder, fault=f"sleepy_save:{longest}", options=options, ranks=2, timeout=300)
    assert ended.codes == [0, 0], ended.log[-2000:]
    saved = [e.step for e in read_journal(RunDir(folder).journal_file) if isinstance(e, Saved)]
    assert saved == list(range(1, saves + 1))
    assert damaged_checkpoints(folder) == []
    assert leftovers(folder) == []
    assert "ENOENT" not in ended.log
    assert "No such file" not in ended.log


def test_save_at_the_same_step_replaces_the_first(bench: Any, pair: dict[str, Any], folder: Path) -> None:
    """A damaged checkpoint of step 6 exists; the run reaches step 6 again and replaces it."""
    engine(folder, env={"TUNESMITH_FAULT": "step.end:kill:6"}, options={"keep": 3}, **TWO)
    (RunDir(folder).checkpoint(6) / "state.json").write_text("{}")
    ended = engine(folder, options={"keep": 3}, **TWO)
    assert ended.codes == [0, 0], ended.log
    assert fingerprint(folder) == pair
