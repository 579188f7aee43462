"""Rows 1 to 4: after kill -9 at any time, the same command resumes and its result is bit-identical."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from faults.trials import (
    SHORT,
    clean,
    cli,
    damaged_checkpoints,
    engine,
    fingerprint,
    intact_checkpoints,
    leftovers,
    new_seed,
    size,
)
from patience import patient
from sampling import crossed
from tunesmith.runs.folder import RunDir, read_manifest

CALLS = "openat,write,pwrite64,fsync,rename,renameat,renameat2,mkdir,unlink,unlinkat,rmdir,link,ftruncate"
"""System calls by which a run changes its folder."""
POINTS = ["save.begin", "save.filled", "save.sealed", "save.renamed", "rotate.begin", "rotate.renamed"]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation 4 with a tail": {"accumulation": 4, "rows": 46},
    "random order": {"sampling": "random"},
    "early stop": {"patience": 2, "learning_rate": 5e-2},
    "bf16": {"precision": "bf16"},
    "padding-free and smaller vocabulary": {"fast": True},
    "two ranks": {"ranks": 2},
    "batches made ahead by a thread": {"ahead": 2},
}
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace (apt-get install strace)")
either_save = pytest.mark.parametrize("background", [False, True], ids=["waits", "thread"])


@either_save
def test_random_kills_resume_identically(bench: Any, background: bool) -> None:
    seed = new_seed()
    rng = random.Random(seed)
    killed = 0
    seconds = bench.seconds_now()
    for trial in range(size(full=100, ci=4)):
        folder = bench.root / f"kill-{trial}"
        at = rng.uniform(0.0, seconds)
        where = f"seed {seed}, trial {trial}, killed after {at:.3f} s of {seconds:.3f} s"
        ended = engine(folder, options={"background": background}, signals=[[at, "KILL"]])
        killed += ended.code != 0
        if ended.code == 0:  # the machine was busier while timing the run
            seconds = min(seconds, ended.seconds[0])
        bench.same_after_kill(folder, where=where, background=background)
    assert killed, "no kill came before the end of a run"


@pytest.mark.parametrize(("point", "background"), crossed(POINTS, [False, True]))
def test_kill_in_a_save_resumes_identically(bench: Any, folder: Path, point: str, background: bool) -> None:
    for n in range(2, size(full=10, ci=2) + 1):
        ended = engine(folder, options={"background": background}, env={"TUNESMITH_FAULT": f"{point}:kill:{n}"})
        assert ended.code == -9, (n, ended.log)
        assert intact_checkpoints(folder) or point.startswith("save"), "no valid checkpoint is left"
        bench.same_after_kill(folder, background=background)


@needs_strace
@either_save
def test_kill_at_any_syscall_resumes_identically(bench: Any, folder: Path, background: bool) -> None:
    seed = new_seed()
    options = SHORT | {"background": background}
    trials, whole = list_calls(bench, folder, options)
    assert len(trials) > 100 or background
    random.Random(seed).shuffle(trials)
    killed = 0
    for name, k in trials[: size(full=len(trials), ci=6)]:
        where = f"seed {seed}, {name} number {k}"
        ended = engine(folder, options=options, strace=kill_at(name, k))
        assert ended.code == -9 or (background and ended.code == 0), f"{where}: {ended.code} {ended.log[-500:]}"
        killed += ended.code != 0
        bench.same_after_kill(folder, whole=whole, where=where, **options)
    assert killed, "no call was interrupted"


def list_calls(bench: Any, folder: Path, options: dict[str, Any]) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Return each (system call, number) of an uninterrupted short run, and its fingerprint; strace counts by thread and name."""
    log = bench.root / "calls.log"
    ended = engine(folder, options=options, strace=["-e", f"trace={CALLS}"], strace_log=log)
    assert ended.code == 0, ended.log
    whole = fingerprint(folder)
    clean(folder)
    each = Counter(re.findall(r"^(\d+) +(\w+)\(", log.read_text(), flags=re.MULTILINE))
    assert len({thread for thread, _ in each}) > 1 or not options["background"]
    most = {name: max(n for (_, other), n in each.items() if other == name) for _, name in each}
    return [(name, k) for name, n in sorted(most.items()) for k in range(1, n + 1)], whole


def kill_at(name: str, count: int) -> list[str]:
    return ["-e", f"trace={name}", "-e", f"inject={name}:signal=SIGKILL:when={count}"]


@needs_strace
def test_killed_resumes_lose_no_checkpoint(bench: Any, folder: Path) -> None:
    seed = new_seed()
    rng = random.Random(seed)
    calls, whole = list_calls(bench, folder, SHORT | {"background": False})
    for trial in range(size(full=100, ci=2)):
        before: list[int] = []
        for crash in range(3):
            name, k = rng.choice(calls)
            engine(folder, options=SHORT, strace=kill_at(name, k if crash == 0 else max(1, k // 2)))
            where = f"seed {seed}, trial {trial}, crash {crash} at {name} number {k}"
            steps = intact_checkpoints(folder)
            assert damaged_checkpoints(folder) == [], where
            assert not before or (steps and steps[-1] >= before[-1]), f"{where}: had {before}, has {steps}"
            before = steps
        bench.same_after_kill(folder, whole=whole, where=f"seed {seed}, trial {trial}", **SHORT)


@pytest.mark.parametrize(("stage", "published"), [("begin", False), ("sealed", False), ("renamed", True)])
def test_killed_export_is_absent_or_complete(bench: Any, folder: Path, stage: str, published: bool) -> None:
    assert engine(folder, env={"TUNESMITH_FAULT": f"save.{stage}:kill:13"}).code == -9, "there are 12 saves before"
    assert RunDir(folder).model.is_dir() == published
    bench.same_after_kill(folder)


def test_run_keeps_files_of_others(bench: Any, folder: Path) -> None:
    folder.mkdir()
    theirs = [".tmp-mine", ".tmp-checkpoint-5", ".tmp-notes.txt-12", "checkpoint-x"]
    for name in theirs:
        (folder / name).write_text("mine")
    (folder / ".tmp-checkpoint-6-123").mkdir()
    assert engine(folder).code == 0
    assert all((folder / name).read_text() == "mine" for name in theirs)
    assert not (folder / ".tmp-checkpoint-6-123").exists()


@pytest.mark.parametrize("fast", [False, True])
def test_background_checkpoints_equal_awaited_ones(bench: Any, folder: Path, fast: bool) -> None:
    found = []
    for background in (False, True):
        assert engine(folder, options={"keep": 99, "fast": fast, "background": background}).code == 0
        checkpoints = RunDir(folder).checkpoints()
        assert len(checkpoints) == 12
        found.append(([read_manifest(p)["files"] for p in checkpoints], fingerprint(folder)))
        assert leftovers(folder) == []
        clean(folder)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", SETTINGS)
def test_any_checkpoint_resumes_identically(bench: Any, folder: Path, name: str) -> None:
    options = {**SETTINGS[name], "save_every": 1, "keep": 999}
    job = {"ranks": options.pop("ranks", 1), "timeout": 120}
    ended = engine(folder, options=options, **job)
    assert set(ended.codes) == {0}, ended.log
    whole = fingerprint(folder)
    assert (whole["outcome"]["step"] < 24) == (name == "early stop")
    steps = [int(p.name.rsplit("-", 1)[1]) for p in RunDir(folder).checkpoints()]
    assert len(steps) >= 8
    for step in steps[:-1] if size(full=1, ci=0) else [steps[len(steps) // 3 + len(name) % 4]]:
        broken = Path(f"{folder}-{step}")
        shutil.copytree(folder, broken)
        for later in (s for s in steps if s > step):
            shutil.rmtree(RunDir(broken).checkpoint(later))
        shutil.rmtree(RunDir(broken).model)
        again = engine(broken, options=options, **job)
        assert set(again.codes) == {0}, f"from step {step}: {again.log}"
        assert fingerprint(broken) == whole, f"from step {step}"
        clean(broken)


@pytest.mark.parametrize("point", ["step.end:kill:3", pytest.param("save.filled:kill:5", marks=pytest.mark.long)])
def test_resume_command_continues_after_a_kill(lab: Any, run_folder: Path, point: str) -> None:
    assert lab.train(run_folder, env={"TUNESMITH_FAULT": point}).code == -9
    ended = cli("resume", str(run_folder))
    assert ended.code == 0, ended.log
    lab.same(run_folder)


def test_used_run_folder_is_refused_until_its_process_dies(lab: Any, run_folder: Path) -> None:
    """Rows 1 and 12 with a real process: a second command names it; after kill -9, `resume` continues."""
    command = [sys.executable, "-m", "tunesmith", *lab.words(run_folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TUNESMITH_FAULT": "step.end:sleep:3"}
    first = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + patient(120)
        while not list(run_folder.glob("checkpoint-*")) and time.monotonic() < until and first.poll() is None:
            time.sleep(0.05)
        for words in (lab.words(run_folder), ["resume", str(run_folder)]):
            ended = cli(*words)
            assert ended.code == 4
            assert f"is in use by process {first.pid} on {os.uname().nodename}" in ended.last_line
            assert ended.seconds[0] < patient(1.5)
        assert f"held by process {first.pid}" in cli("doctor", str(run_folder)).log
    finally:
        first.kill()
        first.wait()
    assert damaged_checkpoints(run_folder) == []
    ended = cli("resume", str(run_folder))
    assert ended.code == 0, ended.log
    assert "Resumed: after step" in ended.log
    lab.same(run_folder)


@pytest.mark.parametrize("lost", ["report.html", "model"])
def test_run_killed_while_finishing_is_finished(lab: Any, run_folder: Path, lost: str) -> None:
    shutil.copytree(lab.root / "whole", run_folder)
    (run_folder / "report.html").unlink()
    if lost == "model":
        shutil.rmtree(run_folder / "model")
    assert lab.train(run_folder).code == 0
    lab.same(run_folder)


def test_resume_of_a_finished_run_reports_it(lab: Any) -> None:
    ended = cli("resume", str(lab.root / "whole"))
    assert ended.code == 0
    assert "finished after step 24 (completed); there is nothing to resume" in ended.log
    ended = lab.train(lab.root / "whole")
    assert ended.code == 5
    assert "contains a finished run of this config" in ended.last_line
