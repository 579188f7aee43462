"""Rows 8, 9, 12, 14: damaged files, missing pieces, two processes, a run that was started with something else."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from faults.trials import clean, fingerprint
from patience import patient
from sampling import crossed
from tunesmith.errors import ResourceError
from tunesmith.events import Note, Resumed
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir
from tunesmith.runs.lock import RunLock, read_holder
from tunesmith.runs.manifest import _own_hash

NOBODY = 65534
PIECES = ["model.safetensors", "optimizer.safetensors", "generators.safetensors", "state.json", "config.json"]


def cut_to(count: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        data = file.read_bytes()
        file.unlink()  # it may be a hard link to the same bytes in best/
        file.write_bytes(data[: count(len(data))])

    return damage


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    file.write_bytes(bytes(data))


def take_away(file: Path) -> None:
    os.chown(file, 0, 0)
    file.chmod(0o600)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": cut_to(lambda n: 0),
    "one-byte": cut_to(lambda n: 1),
    "half": cut_to(lambda n: n // 2),
    "last-byte-gone": cut_to(lambda n: n - 1),
    "flipped-byte": flip,
    "deleted": Path.unlink,
    "wrong-owner": take_away,
}


@pytest.fixture(scope="module")
def stopped(bench: Any) -> Iterator[Path]:
    """A run killed after step 12, with the checkpoints of steps 8, 10 and 12."""
    folder = bench.root / "stopped"
    ended = bench.server.engine(folder, env={"TUNESMITH_FAULT": "step.end:kill:12"}, options={"keep": 3})
    assert ended.code == -9
    assert [p.name for p in RunDir(folder).checkpoints()] == ["checkpoint-8", "checkpoint-10", "checkpoint-12"]
    yield folder
    clean(folder)


@pytest.fixture
def copy(stopped: Path, folder: Path) -> Path:
    shutil.copytree(stopped, folder)
    return folder


@pytest.mark.parametrize(("piece", "damage"), crossed([*PIECES, "MANIFEST.json"], DAMAGES))
def test_row_08_a_damaged_newest_checkpoint_is_named_and_passed_over(
    bench: Any, stopped: Path, piece: str, damage: str
) -> None:
    own = bench.root / f"damaged-{damage}-{piece}"
    own.mkdir()
    run = RunDir(own / "run")
    try:
        shutil.copytree(stopped, run.path)
        job: dict[str, Any] = {}
        if damage == "wrong-owner":
            if os.geteuid() != 0:
                pytest.skip("needs root to give a file to somebody else")
            job["uid"] = NOBODY
            for path in [own, *own.rglob("*")]:
                os.chown(path, NOBODY, NOBODY)
        DAMAGES[damage](run.checkpoint(12) / piece)
        ended = bench.server.engine(run.path, options={"keep": 3}, **job)
        assert ended.code == 0, ended.log
        resumed = [e for e in read_journal(run.journal_file) if isinstance(e, Resumed)]
        assert [(e.step, e.checkpoint) for e in resumed] == [(10, "checkpoint-10")]
        assert f"checkpoint-12/{piece}" in resumed[0].skipped[0]
        assert fingerprint(run.path) == bench.whole
    finally:
        shutil.rmtree(own)


def test_row_08_damage_that_reaches_best_through_a_hard_link_is_mended(bench: Any, folder: Path) -> None:
    bench.server.engine(folder, env={"TUNESMITH_FAULT": "step.end:kill:12"}, options={"keep": 3})
    run = RunDir(folder)
    weights = run.checkpoint(12) / "model.safetensors"
    assert weights.stat().st_ino == (run.best / "model.safetensors").stat().st_ino, "best is not a hard link"
    flip(weights)
    bench.same_as_whole(folder, keep=3)


def test_row_08_a_damaged_checkpoint_never_stands_in_for_an_intact_one(bench: Any, copy: Path) -> None:
    """Rotation keeps one: after a resume from 10 past a damaged 12, the save of step 11 must not be deleted for it."""
    flip(RunDir(copy).checkpoint(12) / "model.safetensors")
    ended = bench.server.engine(copy, fault="signal:forward:1:TERM")
    assert ended.code == 143, ended.log
    assert [p.name for p in RunDir(copy).checkpoints()] == ["checkpoint-11", "checkpoint-12"]
    bench.same_as_whole(copy)


def test_row_08_when_all_are_damaged_the_run_is_refused(bench: Any, copy: Path) -> None:
    for folder in RunDir(copy).checkpoints():
        flip(folder / "optimizer.safetensors")
    before = sorted(p.name for p in copy.rglob("*"))
    ended = bench.server.engine(copy)
    assert ended.code == 5
    assert "no intact checkpoint is left" in ended.last_line
    assert all(f"checkpoint-{step}/optimizer.safetensors" in ended.last_line for step in (8, 10, 12))
    assert sorted(p.name for p in copy.rglob("*")) == before


def test_row_08_a_lost_best_is_made_again_from_its_checkpoint(bench: Any, folder: Path) -> None:
    bench.server.engine(folder, env={"TUNESMITH_FAULT": "step.end:kill:6"}, options={"keep": 9})
    run = RunDir(folder)
    assert json.loads((run.checkpoint(6) / "state.json").read_text())["progress"]["step"] == 4
    shutil.rmtree(run.best)
    bench.same_as_whole(folder)


def test_row_08_a_lost_best_without_another_copy_is_refused(bench: Any, copy: Path) -> None:
    run = RunDir(copy)
    for step in (8, 12):
        shutil.rmtree(run.checkpoint(step))
    shutil.rmtree(run.best)
    ended = bench.server.engine(copy)
    assert ended.code == 5, ended.log
    assert "there is no other copy" in ended.last_line


def test_row_08_a_damaged_journal_is_named_by_line(bench: Any, copy: Path) -> None:
    journal = RunDir(copy).journal_file
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[3] = b'{"event": "StepDone", "step": x, "epoch":\n'
    journal.write_bytes(b"".join(lines))
    ended = bench.server.engine(copy)
    assert ended.code == 5
    assert "journal.jsonl:4" in ended.last_line


def rewrite_manifest(folder: Path) -> None:
    """Makes the manifest agree with what is there, as somebody who hides a loss would."""
    import hashlib

    file = folder / "MANIFEST.json"
    manifest = json.loads(file.read_text())
    manifest["files"] = {
        p.name: {"size": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for p in folder.iterdir()
        if p.name != "MANIFEST.json"
    }
    manifest["self"] = _own_hash(manifest)
    file.write_text(json.dumps(manifest))


@pytest.mark.parametrize("piece", PIECES[:4])
def test_row_09_a_missing_piece_is_refused_even_when_the_manifest_agrees(bench: Any, copy: Path, piece: str) -> None:
    folder = RunDir(copy).checkpoint(12)
    (folder / piece).unlink()
    rewrite_manifest(folder)
    ended = bench.server.engine(copy)
    assert ended.code == 5, ended.log
    assert piece in ended.last_line
    assert f"--model_name_or_path {folder}" in ended.last_line


@pytest.mark.parametrize("key", ["progress", "optimizer", "generators", "rows_limit", "extra", "step"])
def test_row_09_a_missing_part_of_the_state_is_refused(bench: Any, copy: Path, key: str) -> None:
    file = RunDir(copy).checkpoint(12) / "state.json"
    state = json.loads(file.read_text())
    del state[key]
    file.write_text(json.dumps(state))
    rewrite_manifest(file.parent)
    ended = bench.server.engine(copy)
    assert ended.code == 5, ended.log
    assert key in ended.last_line


def test_row_09_a_missing_moment_of_the_optimizer_is_refused(bench: Any, copy: Path) -> None:
    from safetensors.numpy import load_file, save_file

    file = RunDir(copy).checkpoint(12) / "optimizer.safetensors"
    tensors = load_file(file)
    del tensors["exp_avg:classifier.weight"]
    save_file(tensors, file)
    rewrite_manifest(file.parent)
    ended = bench.server.engine(copy)
    assert ended.code == 5, ended.log
    assert "exp_avg:classifier.weight" in ended.last_line


def test_row_12_a_second_process_is_refused_by_name_at_once(bench: Any, folder: Path) -> None:
    with RunLock(RunDir(folder).lock_file):
        assert f"process {os.getpid()} on " in (read_holder(RunDir(folder).lock_file) or "")
        ended = bench.server.engine(folder)
    assert ended.code == 4
    assert f"is in use by process {os.getpid()} on {os.uname().nodename}" in ended.last_line
    assert ended.seconds[0] < patient(1)
    assert read_holder(RunDir(folder).lock_file) is None
    bench.same_as_whole(folder)


def test_row_12_a_worker_that_outlives_its_run_does_not_hold_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys, time, pathlib\n"
        "from tunesmith.runs.lock import RunLock\n"
        "lock = RunLock(pathlib.Path(sys.argv[1])); lock.__enter__()\n"
        "pid = os.fork()\n"
        "if pid == 0: print(os.getpid(), flush=True); time.sleep(30); os._exit(0)\n"
        "time.sleep(30)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / ".lock")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    worker = int(holder.stdout.readline())
    try:
        with pytest.raises(ResourceError, match=f"process {holder.pid}"), RunLock(tmp_path / ".lock"):
            pass
        holder.kill()
        holder.wait()
        started = time.monotonic()
        with RunLock(tmp_path / ".lock"):
            assert time.monotonic() - started < patient(1)
    finally:
        os.kill(worker, signal.SIGKILL)
        holder.stdout.close()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"data": "other rows"}, "the training data changed"),
        ({"labels": ["b", "a"]}, "the labels were"),
        ({"accumulation": 2}, "accumulation was 1 and is 2"),
        ({"rows": 44}, "rows was 48 and is 44"),
    ],
)
def test_row_14_something_else_than_before_is_refused_and_named(
    bench: Any, copy: Path, changed: dict[str, Any], says: str
) -> None:
    before = (copy / "journal.jsonl").read_bytes()
    ended = bench.server.engine(copy, options=changed)
    assert ended.code == 5, ended.log
    assert says in ended.last_line
    assert "--allow_changed_data" in ended.last_line
    assert (copy / "journal.jsonl").read_bytes() == before
    bench.same_as_whole(copy)


def test_row_14_a_change_that_is_allowed_is_recorded_in_the_run(bench: Any, copy: Path) -> None:
    ended = bench.server.engine(copy, options={"data": "other rows", "allow_changed": True})
    assert ended.code == 0, ended.log
    notes = [e.text for e in read_journal(RunDir(copy).journal_file) if isinstance(e, Note)]
    assert notes == ["resumes although the training data changed"]


def test_row_14_another_version_of_a_library_is_a_loud_warning(bench: Any, copy: Path) -> None:
    ended = bench.server.engine(copy, options={"versions": {"torch": "1.0"}})
    assert ended.code == 0, ended.log
    notes = [e.text for e in read_journal(RunDir(copy).journal_file) if isinstance(e, Note)]
    assert any("torch was None and is 1.0" in note for note in notes)
