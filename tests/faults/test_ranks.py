"""Rows 19 and 20: ranks that die, stop or fail; saves on several ranks; resume on the same and on another number of ranks."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from faults.trials import (
    clean,
    damaged_checkpoints,
    fingerprint,
    free_port,
    intact_checkpoints,
    leftovers,
    seed_of,
    size,
)
from patience import patient
from tunesmith.events import Saved
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir

TWO = {"ranks": 2, "timeout": 90}


@pytest.fixture(scope="module")
def pair(bench: Any) -> dict[str, Any]:
    """The fingerprint of the unbroken run on two ranks."""
    folder = bench.root / "pair"
    ended = bench.server.engine(folder, **TWO)
    assert ended.codes == [0, 0], ended.log
    found = fingerprint(folder)
    clean(folder)
    return {"whole": found, "seconds": max(s or 0 for s in ended.seconds)}


@pytest.mark.parametrize("lost", [0, 1])
def test_row_19_a_killed_rank_ends_the_others_by_name(
    bench: Any, pair: dict[str, Any], folder: Path, lost: int
) -> None:
    seed = seed_of("row_19")
    rng = random.Random(seed)
    for _ in range(size(full=25, ci=1)):
        at = rng.uniform(0.0, 0.6) * pair["seconds"]
        where = f"seed {seed}, rank {lost} killed {at:.2f} s after the run began"
        # counted from the journal on: a rank that dies before the ranks have met is the launcher's to notice
        job = {"signals": [[at, "KILL", lost]], "signals_after": str(RunDir(folder).journal_file), **TWO}
        ended = bench.server.engine(folder, fault="slow:100", **job)
        other = 1 - lost
        assert ended.codes[lost] == -9, where
        assert ended.codes[other] == 7, f"{where}: {ended.codes} {ended.log[-1500:]}"
        assert ended.seconds[other] - ended.sent[0] < patient(15), where
        assert re.search(rf"rank {lost} \(process \d+ on .*\) (has died|is gone)", ended.log), ended.log[-1500:]
        assert damaged_checkpoints(folder) == [], where
        again = bench.server.engine(folder, **TWO)
        assert again.codes == [0, 0], again.log
        assert fingerprint(folder) == pair["whole"], where
        clean(folder)


def test_row_19_a_stopped_rank_ends_the_others_after_the_timeout(
    bench: Any, pair: dict[str, Any], folder: Path
) -> None:
    ended = bench.server.engine(
        folder,
        signals=[[0.3 * pair["seconds"], "STOP", 1], [13, "KILL", 1]],
        signals_after=str(RunDir(folder).journal_file),
        options={"rank_timeout": 4},
        fault="slow:60",
        **TWO,
    )
    assert ended.codes[0] == 7, ended.log[-1500:]
    assert ended.seconds[0] - ended.sent[0] < 4 + patient(15)
    assert re.search(r"rank 1 \(process \d+ on .*\) is stopped", ended.log), ended.log[-1500:]
    assert bench.server.engine(folder, **TWO).codes == [0, 0]
    assert fingerprint(folder) == pair["whole"]


def test_row_19_a_rank_that_never_comes_is_waited_for_no_longer_than_the_timeout(bench: Any, folder: Path) -> None:
    alone = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "ACCELERATE_USE_CPU": "true"}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = bench.server.engine(folder, env=alone | meeting, options={"rank_timeout": 2})
    assert ended.code == 7, ended.log[-1500:]
    assert "rank 0 of 2 did not meet the others" in ended.last_line
    assert ended.seconds[0] < patient(15)


@pytest.mark.parametrize("lost", [0, 1])
def test_row_19_an_error_on_one_rank_ends_all(bench: Any, pair: dict[str, Any], folder: Path, lost: int) -> None:
    ended = bench.server.engine(folder, fault=f"raise_on_rank:{lost}:5", **TWO)
    assert ended.codes[lost] == 1
    assert ended.codes[1 - lost] == 7, ended.log[-1500:]
    assert max(s or 99 for s in ended.seconds) < patient(15)
    assert bench.server.engine(folder, **TWO).codes == [0, 0]
    assert fingerprint(folder) == pair["whole"]


def test_row_19_another_number_of_ranks_is_refused_with_the_difference(
    bench: Any, pair: dict[str, Any], folder: Path
) -> None:
    bench.server.engine(folder, env={"TUNESMITH_FAULT": "step.end:kill:6"}, **TWO)
    assert intact_checkpoints(folder)
    ended = bench.server.engine(folder)
    assert ended.code == 5
    assert "world was 2 and is 1" in ended.last_line
    assert bench.server.engine(folder, options={"allow_changed": True}).code == 0


def test_row_19_a_signal_to_one_rank_stops_all_at_one_step(bench: Any, pair: dict[str, Any], folder: Path) -> None:
    ended = bench.server.engine(folder, fault="signal_rank:1:7:TERM", **TWO)
    assert ended.codes == [143, 143], ended.log
    assert intact_checkpoints(folder) == [7]
    assert bench.server.engine(folder, **TWO).codes == [0, 0]
    assert fingerprint(folder) == pair["whole"]


def test_row_20_saves_of_two_ranks_do_not_race(bench: Any, folder: Path) -> None:
    """Random sleeps on each side of every barrier; as many saves as steps."""
    saves = size(full=200, ci=12)
    options = {"rows": 4 * saves, "epochs": 1, "save_every": 1, "evaluate_every": 10, "keep": 2}
    longest = 200 if saves == 200 else 40
    ended = bench.server.engine(folder, fault=f"sleepy_save:{longest}", options=options, ranks=2, timeout=300)
    assert ended.codes == [0, 0], ended.log[-2000:]
    saved = [e.step for e in read_journal(RunDir(folder).journal_file) if isinstance(e, Saved)]
    assert saved == list(range(1, saves + 1))
    assert damaged_checkpoints(folder) == []
    assert leftovers(folder) == []
    assert "ENOENT" not in ended.log
    assert "No such file" not in ended.log


def test_row_20_a_save_at_the_same_step_replaces_the_first(bench: Any, pair: dict[str, Any], folder: Path) -> None:
    """A checkpoint of step 6 is there, damaged; the run comes to step 6 again and replaces it."""
    bench.server.engine(folder, env={"TUNESMITH_FAULT": "step.end:kill:6"}, options={"keep": 3}, **TWO)
    (RunDir(folder).checkpoint(6) / "state.json").write_text("{}")
    ended = bench.server.engine(folder, options={"keep": 3}, **TWO)
    assert ended.codes == [0, 0], ended.log
    assert fingerprint(folder) == pair["whole"]


@pytest.mark.slow
@pytest.mark.long  # of forks, the same is asserted by tests/distributed/test_command_ranks.py
def test_row_19_torchrun_leaves_no_orphans(bench: Any, folder: Path, tmp_path: Path) -> None:
    """True processes: torchrun starts two ranks, one is killed, all are gone soon after."""
    from faults.trials import free_port, tests_first

    script = tmp_path / "rank.py"
    script.write_text(
        "import sys\nfrom faults import engine_trial\n"
        f"sys.exit(engine_trial.main({{'folder': {str(folder)!r}, 'fault': 'slow:100'}}))\n"
    )
    env = {**os.environ, "PYTHONPATH": tests_first(), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(free_port())]
    launcher = subprocess.Popen(
        [*words, str(script)], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    until = time.monotonic() + patient(120)
    while not RunDir(folder).checkpoints() and time.monotonic() < until and launcher.poll() is None:
        time.sleep(0.05)
    listed = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=False)
    ranks = [int(pid) for pid in listed.stdout.split()]
    assert len(ranks) == 2, launcher.communicate(timeout=5)
    os.kill(ranks[1], 9)
    killed = time.monotonic()
    text, _ = launcher.communicate(timeout=patient(60))
    assert time.monotonic() - killed < patient(15), text
    assert launcher.returncode != 0
    assert re.search(r"tunesmith: error: rank \d \(process", text), text[-2000:]
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert damaged_checkpoints(folder) == []
