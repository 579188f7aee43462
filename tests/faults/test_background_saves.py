"""A checkpoint that a thread writes while the run goes on holds as much as one that the run waits for."""

from __future__ import annotations

import random
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from faults.trials import clean, damaged_checkpoints, fingerprint, intact_checkpoints, leftovers, seed_of, size
from sampling import crossed
from tunesmith.runs.folder import RunDir
from tunesmith.runs.manifest import read_manifest

BACKGROUND = {"background": True}
SHORT = {"rows": 16, "epochs": 1, "evaluate_every": 2}
CALLS = "openat,write,fsync,rename,mkdir,unlink,unlinkat,rmdir,link"

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace (apt-get install strace)")


def every_checkpoint(folder: Path) -> dict[str, dict[str, str]]:
    return {
        p.name: {n: e["sha256"] for n, e in read_manifest(p)["files"].items()} for p in RunDir(folder).checkpoints()
    }


@pytest.mark.parametrize("fast", [False, True])
def test_each_checkpoint_is_the_one_the_run_would_have_waited_for(bench: Any, folder: Path, fast: bool) -> None:
    options = {"keep": 99, "fast": fast}
    assert bench.server.engine(folder, options=options).code == 0
    waited, ends = every_checkpoint(folder), fingerprint(folder)
    assert len(waited) == 12
    clean(folder)
    assert bench.server.engine(folder, options=options | BACKGROUND).code == 0
    assert every_checkpoint(folder) == waited
    assert fingerprint(folder) == ends
    assert leftovers(folder) == []


def test_row_01_kill_at_random_moments_while_a_thread_saves(bench: Any) -> None:
    options = BACKGROUND
    seed = seed_of("row_01")
    rng = random.Random(seed)
    killed = 0
    seconds = bench.seconds_now()
    for trial in range(size(full=100, ci=5)):
        folder = bench.root / f"background-{trial}"
        at = rng.uniform(0.0, seconds)
        where = f"seed {seed}, trial {trial}, killed after {at:.3f} s"
        ended = bench.server.engine(folder, options=options, signals=[[at, "KILL"]])
        assert damaged_checkpoints(folder) == [], where
        if ended.code != 0:
            killed += 1
            assert bench.server.engine(folder, options=options).code == 0, where
        else:  # done before the signal came: the machine was busier when the run was timed
            seconds *= 0.5
        assert fingerprint(folder) == bench.whole, where
        assert leftovers(folder) == [], where
        clean(folder)
    assert killed, "no kill came before the end of a run"


@pytest.mark.parametrize(
    "point",
    ["save.begin", "save.filled", "save.sealed", "save.renamed", "best.begin", "rotate.begin", "rotate.renamed"],
)
def test_row_01_kill_at_each_stage_while_a_thread_saves(bench: Any, point: str) -> None:
    for n in range(2, size(full=10, ci=2) + 1):
        folder = bench.root / f"background-{point}-{n}"
        ended = bench.server.engine(folder, options=BACKGROUND, env={"TUNESMITH_FAULT": f"{point}:kill:{n}"})
        # best/ is replaced only as often as the run got better
        assert ended.code == -9 or point == "best.begin", (n, ended.log)
        assert damaged_checkpoints(folder) == [], n
        bench.same_as_whole(folder, **BACKGROUND)
        clean(folder)


@needs_strace
def test_row_02_kill_at_every_syscall_of_every_thread(bench: Any) -> None:
    seed = seed_of("row_02")
    log, folder = bench.root / "background-calls.log", bench.root / "background-short"
    options = SHORT | BACKGROUND
    assert bench.server.engine(folder, options=options, strace=["-e", f"trace={CALLS}"], strace_log=str(log)).code == 0
    whole = fingerprint(folder)
    clean(folder)
    # strace counts the calls of each thread by themselves: the k-th call of whichever thread comes to it first is hit
    each = Counter(re.findall(r"^(\d+) +(\w+)\(", log.read_text(), flags=re.MULTILINE))
    assert len({thread for thread, _ in each}) > 1
    most = {name: max(n for (_, other), n in each.items() if other == name) for _, name in each}
    trials = [(name, k) for name, n in sorted(most.items()) for k in range(1, n + 1)]
    random.Random(seed).shuffle(trials)
    killed = 0
    for name, k in trials[: size(full=len(trials), ci=6)]:
        where = f"seed {seed}, {name} number {k}"
        kill = ["-e", f"trace={name}", "-e", f"inject={name}:signal=SIGKILL:when={k}"]
        ended = bench.server.engine(folder, options=options, strace=kill)
        assert ended.code in (-9, 0), where  # a thread of another save may stay below k
        assert damaged_checkpoints(folder) == [], where
        if ended.code != 0:
            killed += 1
            again = bench.server.engine(folder, options=options)
            assert again.code == 0, f"{where}: {again.log[-1500:]}"
        assert fingerprint(folder) == whole, where
        assert leftovers(folder) == [], where
        clean(folder)
    assert killed, "no call was hit"


@needs_strace
@pytest.mark.parametrize(("call", "error"), [("fsync", "EIO"), ("write", "ENOSPC"), ("rename", "EIO")])
def test_row_07_a_failing_disk_is_reported_and_loses_no_checkpoint(
    bench: Any, folder: Path, call: str, error: str
) -> None:
    for k in range(1, size(full=12, ci=2) + 1):
        fail = ["-e", f"trace={call}", "-e", f"inject={call}:error={error}:when={k}"]
        ended = bench.server.engine(folder, options=BACKGROUND, strace=fail)
        # a thread of its own for each save: where no thread comes to the k-th call, nothing fails
        assert ended.code in (4, 0), f"{k}: {ended.code}\n{ended.log[-1500:]}"
        assert ended.code == 4 or k > 1, f"{k}: the first call was not hit"
        # the main thread's own k-th write, which fails too, may be the one that says why
        silenced = call == "write" and not ended.log
        assert ended.code == 0 or silenced or str(folder) in ended.last_line, ended.last_line
        assert damaged_checkpoints(folder) == [], k
        if ended.code == 4:
            bench.same_as_whole(folder, **BACKGROUND)
        clean(folder)


@pytest.mark.parametrize(
    ("stage", "name"), crossed(["save.begin", "save.filled", "save.renamed", "best.begin"], ["TERM", "INT"])
)
def test_row_05_a_signal_while_a_thread_saves_waits_for_it_and_saves(
    bench: Any, folder: Path, stage: str, name: str
) -> None:
    options = BACKGROUND
    ended = bench.server.engine(folder, options=options, env={"TUNESMITH_FAULT": f"{stage}:{name.lower()}:3"})
    assert ended.code == {"TERM": 143, "INT": 130}[name], ended.log
    assert "everything is saved" in ended.last_line
    assert damaged_checkpoints(folder) == []
    assert intact_checkpoints(folder)
    bench.same_as_whole(folder, **options)


def test_row_16_nan_is_refused_after_the_save_before_it_is_whole(bench: Any, folder: Path) -> None:
    ended = bench.server.engine(folder, options=BACKGROUND, fault="nan_gradient:7")
    assert ended.code == 6, ended.log
    assert "last good checkpoint: checkpoint-6" in ended.last_line.replace("0000000", ""), ended.last_line
    assert intact_checkpoints(folder) == [6]
