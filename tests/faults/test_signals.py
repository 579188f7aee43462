"""Row 5: a signal stops the run at the next safe point, with everything saved; a second one ends it at once."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from faults.trials import clean, damaged_checkpoints, fingerprint, intact_checkpoints, seed_of, size
from patience import patient
from sampling import crossed
from tunesmith.events import Evaluated
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir

POINTS = ["forward", "backward", "optimizer", "evaluate", "data"]
CODES = {"TERM": 143, "INT": 130}


@pytest.mark.parametrize(("point", "name"), crossed(POINTS, ["TERM", "INT"]))
def test_row_05_a_signal_in_a_step_saves_and_stops(bench: Any, folder: Path, point: str, name: str) -> None:
    n = 3 if point == "evaluate" else 7
    ended = bench.server.engine(folder, fault=f"signal:{point}:{n}:{name}")
    assert ended.code == CODES[name], ended.log
    assert "everything is saved: the same command resumes" in ended.last_line
    step = read_journal(RunDir(folder).journal_file)[-1].step
    assert intact_checkpoints(folder)[-1] == step == (4 if point == "evaluate" else 7)
    bench.same_as_whole(folder)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_row_05_a_signal_does_not_wait_for_the_rest_of_an_evaluation(bench: Any, folder: Path, n: int) -> None:
    """3 batches an evaluation; the run goes on with the evaluation that was given up, and it counts once."""
    ended = bench.server.engine(folder, fault=f"signal:evaluate:{n}:TERM")
    assert ended.code == 143, ended.log
    assert intact_checkpoints(folder) == [4]
    events = read_journal(RunDir(folder).journal_file)
    assert not [e for e in events if isinstance(e, Evaluated)]
    assert events[-1].step == 4
    bench.same_as_whole(folder)


@pytest.mark.parametrize(
    ("stage", "name"),
    crossed(["save.begin", "save.filled", "save.sealed", "save.renamed", "best.begin"], ["term", "int"]),
)
def test_row_05_a_signal_in_a_save_saves_and_stops(bench: Any, folder: Path, stage: str, name: str) -> None:
    ended = bench.server.engine(folder, env={"TUNESMITH_FAULT": f"{stage}:{name}:3"})
    assert ended.code == CODES[name.upper()], ended.log
    assert damaged_checkpoints(folder) == []
    bench.same_as_whole(folder)


def test_row_05_random_signals_all_resume_exactly(bench: Any) -> None:
    seed = seed_of("row_05")
    rng = random.Random(seed)
    stopped, seconds = 0, bench.seconds_now()
    for trial in range(size(full=80, ci=5)):
        folder = bench.root / f"signal-{trial}"
        name = rng.choice(["TERM", "INT"])
        at = rng.uniform(0.05, max(0.1, seconds))
        where = f"seed {seed}, trial {trial}: {name} after {at:.3f} s"
        ended = bench.server.engine(folder, signals=[[at, name]])
        started = (folder / "journal.jsonl").exists()
        codes = {0, CODES[name]} if started else {CODES[name], -2, -15}
        assert ended.code in codes, f"{where}: {ended.code}\n{ended.log[-800:]}"
        assert ended.seconds[0] < at + bench.seconds / 6 + patient(2), where
        stopped += ended.code == CODES[name]
        if ended.code != 0:
            assert bench.server.engine(folder).code == 0, where
        else:  # done before the signal came: the machine was busier when the run was timed
            seconds *= 0.5
        assert fingerprint(folder) == bench.whole, where
        clean(folder)
    assert stopped


@pytest.mark.parametrize("point", ["forward", "evaluate"])
def test_row_05_a_second_signal_ends_at_once(bench: Any, folder: Path, point: str) -> None:
    ended = bench.server.engine(folder, fault=f"signal:{point}:5:TERM:2")
    assert ended.code == 143
    assert "everything is saved" not in ended.log
    assert intact_checkpoints(folder)[-1] == (4 if point == "forward" else 6)
    assert damaged_checkpoints(folder) == []
    bench.same_as_whole(folder)


def test_row_05_a_signal_after_the_last_step_does_not_wait_for_the_export(bench: Any, folder: Path) -> None:
    ended = bench.server.engine(folder)
    saves = 12 + sum('"Improved"' in line for line in RunDir(folder).journal_file.read_text().splitlines())
    clean(folder)
    ended = bench.server.engine(folder, env={"TUNESMITH_FAULT": f"save.begin:term:{saves + 1}"})
    assert ended.code == 143
    assert not RunDir(folder).model.exists()
    assert "every step is saved" in ended.last_line
    bench.same_as_whole(folder)
