"""Rows 6, 7 and 15: full disks, failing writes, the order of fsync and rename, and maximum disk usage."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.trials import (
    NOBODY,
    SHORT,
    clean,
    damaged_checkpoints,
    engine,
    fingerprint,
    intact_checkpoints,
    leftovers,
    new_seed,
    size,
)
from tunesmith.errors import ResourceError
from tunesmith.files import write_file
from tunesmith.runs.folder import RunDir, checkpoint_step, publish_folder, require_space

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace (apt-get install strace)")


@contextlib.contextmanager
def small_disk(place: Path, size_of_it: str) -> Iterator[Path]:
    """Mount a tmpfs of this size, which can be resized."""
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small disk")
    place.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_of_it}", "tmpfs", str(place)], check=False)
    if done.returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def grow(place: Path, size_of_it: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size_of_it}", str(place)], check=True)


def test_full_disk_keeps_checkpoints_and_resumes(bench: Any) -> None:
    with small_disk(bench.root / "disk", "3m") as disk:
        folder = disk / "run"
        ended = engine(folder, options={"keep": 99})
        assert ended.code == 4, ended.log
        assert re.search(r"/disk/run.*: \d+\.\d MB are needed and \d+\.\d MB are free", ended.last_line)
        assert "then run the same command again" in ended.last_line
        had = intact_checkpoints(folder)
        assert had
        assert damaged_checkpoints(folder) == []
        assert leftovers(folder) == []
        assert engine(folder, options={"keep": 99}).code == 4
        assert intact_checkpoints(folder) == had
        grow(disk, "64m")
        bench.same_after_kill(folder)


@pytest.mark.parametrize(
    "free", [0, 40_000, 380_000, *(pytest.param(n, marks=pytest.mark.long) for n in (1000, 200_000))]
)
def test_disk_filled_by_others_loses_nothing(bench: Any, free: int) -> None:
    """The space check passes; then other programs fill the disk, except for `free` bytes."""
    with small_disk(bench.root / "disk", "8m") as disk:
        folder = disk / "run"
        assert engine(folder, env={"TUNESMITH_FAULT": "step.end:kill:5"}).code == -9
        had = intact_checkpoints(folder)
        with (disk / "filler").open("wb") as filler, contextlib.suppress(OSError):
            filler.write(bytes(shutil.disk_usage(disk).free - free))
            filler.flush()
        ended = engine(folder)
        assert ended.code == 4, ended.log
        assert str(disk) in ended.last_line
        assert intact_checkpoints(folder) == had
        grow(disk, "64m")
        bench.same_after_kill(folder)


def test_space_is_checked_before_the_first_step(bench: Any) -> None:
    with small_disk(bench.root / "disk", "500k") as disk:
        ended = engine(disk / "run")
        assert ended.code == 4, ended.log
        assert "MB are needed and" in ended.last_line
        assert not RunDir(disk / "run").checkpoints()


def test_file_size_limit_is_a_disk_error(bench: Any, folder: Path) -> None:
    for limit in (4_000, 100_000, 200_000):
        ended = engine(folder, fsize=limit)
        assert ended.code == 4, f"{limit}: {ended.log}"
        assert "File too large" in ended.last_line
        assert damaged_checkpoints(folder) == []
        assert leftovers(folder) == []
    bench.same_after_kill(folder)


ERRORS = [
    *(("fsync", "EIO"), ("rename", "EIO"), ("mkdir", "ENOSPC")),
    *(("write", error) for error in ("ENOSPC", "EDQUOT", "EIO")),
]


@needs_strace
@pytest.mark.parametrize("background", [False, True], ids=["waits", "thread"])
def test_failing_call_exits_with_4_and_loses_nothing(bench: Any, folder: Path, background: bool) -> None:
    seed = new_seed()
    options = SHORT | {"background": background}
    log = bench.root / "disk-calls.log"
    names = ",".join(sorted({name for name, _ in ERRORS}))
    engine(folder, options=options, strace=["-e", f"trace={names}"], strace_log=log)
    expected = fingerprint(folder)
    clean(folder)
    text = log.read_text()
    trials = [(name, error, k) for name, error in ERRORS for k in range(1, len(re.findall(rf" {name}\(", text)) + 1)]
    random.Random(seed).shuffle(trials)
    failed = 0
    for name, error, k in trials[: size(full=len(trials), ci=6)]:
        where = f"seed {seed}, {error} at {name} number {k}"
        fail = ["-e", f"trace={name}", "-e", f"inject={name}:error={error}:when={k}"]
        ended = engine(folder, options=options, strace=fail)
        # mkdir of an existing folder, or a thread that makes fewer calls
        if ended.code == 0 and ((background and k > 1) or name == "mkdir"):
            assert fingerprint(folder) == expected, where
            clean(folder)
            continue
        failed += 1
        assert ended.code == 4, f"{where}: {ended.code}\n{ended.log[-1500:]}"
        # in the run with a thread, the write that reports the error may be the one that fails
        silenced = background and name == "write" and not ended.log
        assert silenced or str(bench.root) in ended.last_line, f"{where}: {ended.last_line}"
        bench.same_after_kill(folder, whole=expected, where=where, **options)
    assert failed or background


@needs_strace
def test_broken_disk_keeps_the_last_checkpoint(bench: Any, folder: Path) -> None:
    for name, error in [("fsync", "EIO"), ("write", "ENOSPC")]:
        engine(folder, env={"TUNESMITH_FAULT": "step.end:kill:5"})
        had = intact_checkpoints(folder)
        ended = engine(folder, strace=["-e", f"trace={name}", "-e", f"inject={name}:error={error}:when=4+"])
        assert ended.code == 4, f"{ended.code} {ended.log}"
        assert set(had) <= set(intact_checkpoints(folder)) or intact_checkpoints(folder)[-1] > had[-1]
        bench.same_after_kill(folder)


@needs_strace
def test_every_save_is_durable_in_order(bench: Any, folder: Path) -> None:
    """Each save orders data fsync < manifest fsync < rename < parent fsync, without writes after a file's fsync."""
    log = bench.root / "order.log"
    trace = ["-y", "-s", "0", "-e", "trace=write,pwrite64,writev,fsync,rename,renameat,renameat2"]
    assert engine(folder, strace=trace, strace_log=log).code == 0
    calls = parse_calls(log.read_text())
    published = [(i, old, new) for i, (name, old, new) in enumerate(calls) if name == "rename" and "/.tmp-" in old]
    folders = [(i, old, new) for i, old, new in published if re.search(r"/(checkpoint-\d+|model)$", new)]
    assert len(folders) >= 12 + 1
    for at, old, new in folders:
        since = max((i for i, before, _ in folders if before == old and i < at), default=-1)
        mine = [(i, name, path) for i, (name, path, _) in enumerate(calls) if since < i < at]
        inside = [c for c in mine if c[2].startswith(old + "/") and c[1] != "rename"]
        synced = {path: i for i, name, path in inside if name == "fsync"}
        written = {path: i for i, name, path in inside if name != "fsync"}
        manifest = synced.pop(f"{old}/MANIFEST.json")
        assert synced, new
        assert all(i < manifest for i in synced.values()), new
        assert set(written) <= {*synced, f"{old}/MANIFEST.json"}, f"{new}: written and not fsynced"
        assert all(i < synced.get(path, manifest) for path, i in written.items()), f"{new}: a write after its fsync"
        own = [i for i, name, path in mine if name == "fsync" and path == old]
        parent = [i for i, (name, path, _) in enumerate(calls) if name == "fsync" and path == str(folder) and i > at]
        assert manifest < own[-1] < at < parent[0], new
        later = [c for c in calls[at + 1 : parent[0]] if c[0] == "rename" or c[1].startswith(str(folder / "journal"))]
        assert later == [], f"{new}: a call happened before the rename was durable"


def parse_calls(text: str) -> list[tuple[str, str, str]]:
    """Return (call, path, second path) in order of completion."""
    found = []
    pending: dict[str, str] = {}
    for line in text.splitlines():
        pid, _, rest = line.partition(" ")
        rest = rest.strip()
        if rest.endswith("<unfinished ...>"):
            pending[pid] = rest.removesuffix("<unfinished ...>")
            continue
        if rest.startswith("<..."):
            rest = pending.pop(pid, "") + rest.partition("resumed>")[2]
        if match := re.match(r'rename\w*\((?:AT_FDCWD<[^>]*>, )?"([^"]+)", (?:AT_FDCWD<[^>]*>, )?"([^"]+)"', rest):
            old, new = match.groups()
            if Path(old).parent == Path(new).parent and Path(old).parent.name.startswith(".tmp-"):
                # safetensors also writes to a temporary file: writes to the old name belong to the new one
                found = [(name, new if path == old else path, second) for name, path, second in found]
            found.append(("rename", old, new))
        elif match := re.match(r"(\w+)\(\d+<([^>]+)>", rest):
            name = "fsync" if match.group(1) == "fsync" else "write"
            found.append((name, match.group(2), ""))
    return found


def test_run_keeps_the_newest_and_the_best_checkpoint(bench: Any, folder: Path) -> None:
    """During 50 saves with defaults there is one checkpoint more at most, while it is written."""
    options = {"rows": 200, "epochs": 1, "save_every": 1, "evaluate_every": 5, "watch_bytes": True}
    ended = engine(folder, options=options)
    assert ended.code == 0, ended.log
    peaks = [int(n) for n in Path(f"{folder}.bytes").read_text().split()]
    Path(f"{folder}.bytes").unlink()
    run = RunDir(folder)
    assert len(peaks) >= 50
    one = sum(f.stat().st_size for f in run.checkpoints()[0].iterdir())
    bound = 3 * one + 100_000
    assert max(peaks) <= bound, (max(peaks), bound)
    best = json.loads((run.checkpoint(50) / "state.json").read_text())["progress"]["step"]
    assert [checkpoint_step(p) for p in run.checkpoints()] == sorted({best, 50})
    assert leftovers(folder) == []


def test_read_only_folder_is_a_disk_error(bench: Any, folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become somebody else")
    folder.mkdir()
    ended = engine(folder, uid=NOBODY)
    assert ended.code == 4
    assert "Permission denied" in ended.last_line
    assert str(folder) in ended.last_line


def test_failed_save_keeps_the_previous_folder(tmp_path: Path, monkeypatch: Any) -> None:
    target = tmp_path / "checkpoint-5"
    publish_folder(target, lambda tmp: (tmp / "a").write_text("old"), {"step": 5})
    for failing in ("save.filled", "save.sealed", "save.moved", "save.renamed"):
        monkeypatch.setenv("TUNESMITH_FAULT", f"{failing}:eio:1")
        monkeypatch.setattr("tunesmith.files._counts", {})
        with pytest.raises(ResourceError, match="Input/output error"):
            publish_folder(target, lambda tmp: (tmp / "a").write_text("new"), {"step": 5})
        assert (target / "a").read_text() == "old", failing
        assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-5"], failing


def test_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    write_file(file, b"old")
    with pytest.raises(ResourceError, match=r"run\.yaml"):
        write_file(tmp_path / "missing" / "run.yaml", b"new")
    assert file.read_bytes() == b"old"
    with pytest.raises(ResourceError, match=r"MB are needed"):
        require_space(tmp_path, 10**18)
