"""Rows 1 to 3: kill -9 at any moment, at any syscall, twice; the same command goes on and ends with the same bits."""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from faults.trials import (
    clean,
    damaged_checkpoints,
    fingerprint,
    intact_checkpoints,
    leftovers,
    memory_folder,
    seed_of,
    size,
)
from tunesmith.runs.folder import RunDir

CALLS = "openat,write,pwrite64,fsync,rename,renameat,renameat2,mkdir,unlink,unlinkat,rmdir,link,ftruncate"
"""Every syscall by which a run changes its folder."""
SHORT = {"rows": 16, "epochs": 1, "evaluate_every": 2}
"""4 steps: two saves, two best/, one rotation, the export."""

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace (apt-get install strace)")


def test_row_01_kill_at_random_moments(bench: Any) -> None:
    seed = seed_of("row_01")
    rng = random.Random(seed)
    kills = size(full=200, ci=10)
    landed = []
    seconds = bench.seconds_now()
    for trial in range(kills):
        folder = bench.root / f"kill-{trial}"
        at = rng.uniform(0.0, seconds)
        ended = bench.server.engine(folder, signals=[[at, "KILL"]])
        where = f"seed {seed}, trial {trial}, killed after {at:.3f} s of {seconds:.3f} s"
        assert damaged_checkpoints(folder) == [], where
        steps = intact_checkpoints(folder)
        landed.append(steps[-1] if steps else 0)
        if ended.code != 0:
            again = bench.server.engine(folder)
            assert again.code == 0, f"{where}: {again.log[-1500:]}"
        else:  # done before the signal came: the machine was busier when the run was timed
            seconds *= 0.8
        assert fingerprint(folder) == bench.whole, where
        assert leftovers(folder) == [], where
        clean(folder)
    assert len(set(landed)) > min(kills, 12) / 3, f"the kills hit few places: {landed}"


def test_row_01_kill_aimed_at_saves(bench: Any) -> None:
    """The time at which a save is going on is most of this run: aimed by name at each stage of a save."""
    stages = ["begin", "filled", "sealed", "renamed"]
    for trial in range(size(full=30, ci=4)):
        folder = bench.root / f"aimed-{trial}"
        fault = f"save.{stages[trial % 4]}:kill:{1 + trial}"
        assert bench.server.engine(folder, env={"TUNESMITH_FAULT": fault}).code in (-9, 0), fault
        assert damaged_checkpoints(folder) == [], fault
        bench.same_as_whole(folder)
        clean(folder)


@pytest.fixture(scope="module")
def short(bench: Any) -> dict[str, Any]:
    """The fingerprint of the short run."""
    folder = bench.root / "short"
    assert bench.server.engine(folder, options=SHORT).code == 0
    found = fingerprint(folder)
    clean(folder)
    return found


def list_calls(bench: Any, folder: Path) -> list[tuple[str, int]]:
    """(name, how many of that name came before, plus 1) of each syscall of the main thread in an unbroken short run."""
    log = bench.root / "calls.log"
    ended = bench.server.engine(folder, options=SHORT, strace=["-e", f"trace={CALLS}"], strace_log=str(log))
    assert ended.code == 0, ended.log
    seen = [m.groups() for line in log.read_text().splitlines() if (m := re.match(r"(\d+) +(\w+)\(", line))]
    pids = [pid for pid, _ in seen]
    main = max(set(pids), key=pids.count)
    counts: Counter[str] = Counter()
    calls = []
    for pid, name in seen:
        if pid == main:
            counts[name] += 1
            calls.append((name, counts[name]))
    clean(folder)
    return calls


def kill_at(name: str, count: int) -> list[str]:
    """strace's arguments for a kill on the count-th entry of a syscall (strace counts each name by itself)."""
    return ["-e", f"trace={name}", "-e", f"inject={name}:signal=SIGKILL:when={count}"]


def chosen(calls: list[Any], count: int, rng: random.Random) -> list[Any]:
    """All calls, or so many of them, spread evenly with a random offset."""
    if count >= len(calls):
        return calls
    step = len(calls) / count
    return [calls[int((i + rng.random()) * step)] for i in range(count)]


@needs_strace
def test_row_02_kill_at_every_syscall_of_save_rotate_best_and_export(bench: Any, short: dict[str, Any]) -> None:
    seed = seed_of("row_02")
    calls = list_calls(bench, bench.root / "counted")
    assert len(calls) > 100
    for name, k in chosen(calls, size(full=10**6, ci=12), random.Random(seed)):
        folder = bench.root / f"call-{name}-{k}"
        where = f"seed {seed}, {name} number {k}"
        ended = bench.server.engine(folder, options=SHORT, strace=kill_at(name, k))
        assert ended.code == -9, f"{where}: {ended.code} {ended.log[-500:]}"
        assert damaged_checkpoints(folder) == [], where
        again = bench.server.engine(folder, options=SHORT)
        assert again.code == 0, f"{where}: {again.log[-1500:]}"
        assert fingerprint(folder) == short, where
        assert leftovers(folder) == [], where
        clean(folder)


@needs_strace
def test_row_03_kill_the_run_then_kill_its_resume(bench: Any, short: dict[str, Any]) -> None:
    seed = seed_of("row_03")
    rng = random.Random(seed)
    calls = list_calls(bench, bench.root / "counted-again")
    for trial in range(size(full=100, ci=4)):
        folder = bench.root / f"double-{trial}"
        before: list[int] = []
        for crash in range(3):
            name, k = rng.choice(calls[: len(calls) if crash == 0 else len(calls) // 2])
            bench.server.engine(folder, options=SHORT, strace=kill_at(name, k))
            where = f"seed {seed}, trial {trial}, crash {crash} at {name} number {k}"
            steps = intact_checkpoints(folder)
            assert damaged_checkpoints(folder) == [], where
            assert not before or (steps and steps[-1] >= before[-1]), f"{where}: had {before}, has {steps}"
            before = steps
        again = bench.server.engine(folder, options=SHORT)
        assert again.code == 0, f"seed {seed}, trial {trial}: {again.log[-1500:]}"
        assert fingerprint(folder) == short, f"seed {seed}, trial {trial}"
        clean(folder)


@pytest.mark.parametrize("point", ["best.begin", "rotate.begin", "rotate.renamed"])
def test_row_03_kill_in_rotation_and_best(bench: Any, folder: Path, point: str) -> None:
    ended = bench.server.engine(folder, env={"TUNESMITH_FAULT": f"{point}:kill:2"})
    assert ended.code == -9
    assert intact_checkpoints(folder), "no intact checkpoint is left"
    assert damaged_checkpoints(folder) == []
    bench.same_as_whole(folder)


def test_row_03_an_export_is_absent_or_complete(bench: Any, folder: Path) -> None:
    stages = {"begin": False, "filled": False, "sealed": False, "renamed": True}
    whole = bench.server.engine(folder)
    assert whole.code == 0
    saves = 12 + len([e for e in RunDir(folder).journal_file.read_text().splitlines() if '"Improved"' in e])
    clean(folder)
    for stage, published in stages.items():
        ended = bench.server.engine(folder, env={"TUNESMITH_FAULT": f"save.{stage}:kill:{saves + 1}"})
        assert ended.code == -9
        assert RunDir(folder).model.is_dir() == published
        assert damaged_checkpoints(folder) == []
        bench.same_as_whole(folder)
        clean(folder)


def test_a_folder_with_other_peoples_files_is_left_alone(bench: Any, folder: Path) -> None:
    folder.mkdir()
    theirs = [".tmp-mine", ".tmp-checkpoint-5", ".tmp-notes.txt-12", "checkpoint-x"]
    for name in theirs:
        (folder / name).write_text("mine")
    (folder / ".tmp-checkpoint-6-123").mkdir()
    assert bench.server.engine(folder).code == 0
    assert all((folder / name).read_text() == "mine" for name in theirs)
    assert not (folder / ".tmp-checkpoint-6-123").exists()


def test_memory_folder_is_fresh(tmp_path: Path) -> None:
    first = memory_folder("fresh", tmp_path)
    (first / "x").write_text("")
    assert list(memory_folder("fresh", tmp_path).iterdir()) == []
    shutil.rmtree(first)
