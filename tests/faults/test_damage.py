"""Rows 8, 9 and 12: damaged files, missing state, a stale lock, and `tunesmith doctor`."""

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

from faults.trials import NOBODY, clean, engine, fingerprint, rewrite_manifest
from patience import patient
from sampling import crossed
from tunesmith.cli.main import main
from tunesmith.errors import ResourceError
from tunesmith.events import Note, Resumed, StepDone
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir, RunLock

PIECES = ["model.safetensors", "optimizer.safetensors", "generators.safetensors", "state.json", "config.json"]


def cut_to(count: Callable[[int], int]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        data = file.read_bytes()
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
    """Return a run killed after step 12, with the checkpoints of steps 8, 10 and 12."""
    folder = bench.root / "stopped"
    ended = engine(folder, env={"TUNESMITH_FAULT": "step.end:kill:12"}, options={"keep": 3})
    assert ended.code == -9
    assert [p.name for p in RunDir(folder).checkpoints()] == ["checkpoint-8", "checkpoint-10", "checkpoint-12"]
    yield folder
    clean(folder)


@pytest.fixture
def copy(stopped: Path, folder: Path) -> Path:
    shutil.copytree(stopped, folder)
    return folder


@pytest.mark.parametrize(("piece", "damage"), crossed([*PIECES, "MANIFEST.json"], DAMAGES))
def test_damaged_checkpoint_is_named_and_skipped(bench: Any, stopped: Path, piece: str, damage: str) -> None:
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
        ended = engine(run.path, options={"keep": 3}, **job)
        assert ended.code == 0, ended.log
        resumed = [e for e in read_journal(run.journal_file) if isinstance(e, Resumed)]
        assert [(e.step, e.checkpoint) for e in resumed] == [(10, "checkpoint-10")]
        assert f"checkpoint-12/{piece}" in resumed[0].skipped[0]
        assert fingerprint(run.path) == bench.whole
    finally:
        shutil.rmtree(own)


def test_rotation_does_not_count_damaged_checkpoints(bench: Any, copy: Path) -> None:
    """Rotation keeps one: after a resume from step 10 because 12 is damaged, it must not delete the save of step 11."""
    flip(RunDir(copy).checkpoint(12) / "model.safetensors")
    ended = engine(copy, fault="signal:forward:1:TERM")
    assert ended.code == 143, ended.log
    assert [p.name for p in RunDir(copy).checkpoints()] == ["checkpoint-11", "checkpoint-12"]
    bench.same_as_whole(copy)


def test_run_without_intact_checkpoint_is_refused(bench: Any, copy: Path) -> None:
    for folder in RunDir(copy).checkpoints():
        flip(folder / "optimizer.safetensors")
    before = sorted(p.name for p in copy.rglob("*"))
    ended = engine(copy)
    assert ended.code == 5
    assert "no valid checkpoint is left" in ended.last_line
    assert all(f"checkpoint-{step}/optimizer.safetensors" in ended.last_line for step in (8, 10, 12))
    assert sorted(p.name for p in copy.rglob("*")) == before


def test_best_deleted_for_a_damaged_checkpoint_is_repeated(bench: Any, folder: Path) -> None:
    engine(folder, env={"TUNESMITH_FAULT": "step.end:kill:12"}, options={"keep": 2})
    run = RunDir(folder)
    best = [json.loads((c / "state.json").read_text())["progress"]["step"] for c in run.checkpoints()]
    assert ([c.name for c in run.checkpoints()], best) == (["checkpoint-10", "checkpoint-12"], [4, 12])
    flip(run.checkpoint(12) / "model.safetensors")
    bench.same_as_whole(folder, keep=2)


def test_lost_best_without_a_copy_is_refused(bench: Any, copy: Path) -> None:
    run = RunDir(copy)
    for step in (8, 12):
        shutil.rmtree(run.checkpoint(step))
    ended = engine(copy)
    assert ended.code == 5, ended.log
    assert "there is no other copy" in ended.last_line


def test_damaged_event_log_is_named_by_line(bench: Any, copy: Path) -> None:
    journal = RunDir(copy).journal_file
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[3] = b'{"event": "StepDone", "step": x, "epoch":\n'
    journal.write_bytes(b"".join(lines))
    ended = engine(copy)
    assert ended.code == 5
    assert "journal.jsonl:4" in ended.last_line


def test_event_log_shorter_than_its_checkpoint_is_refused(copy: Path) -> None:
    journal = RunDir(copy).journal_file
    whole, _, _ = journal.read_bytes().partition(b'{"event": "StepDone", "step": 6,')
    journal.write_bytes(whole)
    ended = engine(copy)
    assert ended.code == 5, ended.log
    assert "ends after step 5, but the checkpoint is from step 12: steps 6 to 12 are missing" in ended.last_line
    assert journal.read_bytes() == whole


def test_deleted_event_log_is_noted_and_resumed_twice(copy: Path) -> None:
    run = RunDir(copy)
    run.journal_file.unlink()
    assert engine(copy, env={"TUNESMITH_FAULT": "step.end:kill:3"}).code == -9
    assert engine(copy).code == 0
    events = read_journal(run.journal_file)
    assert any(isinstance(e, Note) and "was missing: earlier curves are lost" in e.text for e in events)
    assert [e.step for e in events if isinstance(e, StepDone)] == list(range(13, 25))


@pytest.mark.parametrize("piece", PIECES[:4])
def test_missing_state_file_is_refused(bench: Any, copy: Path, piece: str) -> None:
    folder = RunDir(copy).checkpoint(12)
    (folder / piece).unlink()
    rewrite_manifest(folder)
    ended = engine(copy)
    assert ended.code == 5, ended.log
    assert piece in ended.last_line
    assert f"--model_name_or_path {folder}" in ended.last_line


@pytest.mark.parametrize("key", ["progress", "step", "exp_avg:classifier.weight"])
def test_missing_part_of_the_state_is_refused(bench: Any, copy: Path, key: str) -> None:
    from safetensors.numpy import load_file, save_file

    folder = RunDir(copy).checkpoint(12)
    if ":" in key:
        tensors = load_file(folder / "optimizer.safetensors")
        del tensors[key]
        save_file(tensors, folder / "optimizer.safetensors")
    else:
        state = json.loads((folder / "state.json").read_text())
        del state[key]
        (folder / "state.json").write_text(json.dumps(state))
    rewrite_manifest(folder)
    ended = engine(copy)
    assert ended.code == 5, ended.log
    assert key in ended.last_line


def test_different_library_version_is_a_warning(bench: Any, copy: Path) -> None:
    ended = engine(copy, options={"versions": {"torch": "1.0"}})
    assert ended.code == 0, ended.log
    notes = [e.text for e in read_journal(RunDir(copy).journal_file) if isinstance(e, Note)]
    assert any("torch was None and is 1.0" in note for note in notes)


def test_orphaned_worker_does_not_hold_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, sys, time, pathlib\n"
        "from tunesmith.runs.folder import RunLock\n"
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


def test_new_run_starts_from_weights_without_optimizer(lab: Any, run_folder: Path) -> None:
    assert lab.train(run_folder, env={"TUNESMITH_FAULT": "step.end:kill:6"}).code == -9
    folder = RunDir(run_folder).checkpoint(6)
    (folder / "optimizer.safetensors").unlink()
    rewrite_manifest(folder)
    ended = lab.train(run_folder)
    assert ended.code == 5
    assert f"--model_name_or_path {folder}" in ended.last_line
    new = lab.root / "from-weights"
    ended = lab.train(new, "--model_name_or_path", str(folder))
    assert ended.code == 0, ended.log[-1500:]
    losses = [e["loss"] for e in fingerprint(new, outcome=False)["journal"] if e["event"] == "StepDone"]
    fresh = [e["loss"] for e in lab.whole["journal"] if e["event"] == "StepDone"]
    assert len(losses) == 24
    assert losses[0] != fresh[0], "the new run must start from the weights of the old one"


def test_resume_names_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["resume", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    run = tmp_path / "run"
    run.mkdir()
    (run / "journal.jsonl").write_text("")
    (run / "run.yaml").write_text("learning_rate: 0.001\n")
    assert main(["resume", str(run)]) == 2
    assert "the data was passed in Python" in capsys.readouterr().err


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_doctor_reports_no_fault_in_finished_run(lab: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, str(lab.root / "whole"))
    assert code == 0
    assert {p["health"] for p in found["parts"]} == {"sound"}
    assert found["parts"][-1]["text"] == "finished after step 24 (completed)"
    assert main(["doctor", str(lab.root / "whole")]) == 0
    assert "ok      model" in capsys.readouterr().out


def test_doctor_names_what_the_next_start_removes(
    lab: Any, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = {"TUNESMITH_FAULT": "save.filled:kill:6"}
    assert lab.train(run_folder, "--save_total_limit", "3", env=fault).code == -9
    folders = RunDir(run_folder).checkpoints()
    file = folders[-1] / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with RunDir(run_folder).journal_file.open("ab") as journal:
        journal.write(b'{"event": "Step')
    (run_folder / "notes.txt").write_text("mine")
    code, found = doctor(capsys, str(run_folder))
    by_name = {p["name"]: p for p in found["parts"] if p["health"] == "useless"}
    assert code == 0
    assert folders[-1].name in by_name
    assert "optimizer.safetensors" in by_name[folders[-1].name]["text"]
    assert any(name.startswith(".tmp-checkpoint-") for name in by_name)
    assert lab.train(run_folder, "--save_total_limit", "3").code == 0
    assert {p["health"] for p in doctor(capsys, str(run_folder))[1]["parts"]} == {"sound"}
    assert (run_folder / "notes.txt").read_text() == "mine"
    (run_folder / "notes.txt").unlink()
    lab.same(run_folder)


def test_doctor_reports_lost_checkpoints(lab: Any, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.train(run_folder, "--save_total_limit", "2", env={"TUNESMITH_FAULT": "step.end:kill:6"}).code == -9
    for folder in RunDir(run_folder).checkpoints():
        (folder / "state.json").write_text("{}")
    before = sorted(p.name for p in run_folder.iterdir())
    code, found = doctor(capsys, str(run_folder))
    assert code == 5
    assert sorted(p.name for p in run_folder.iterdir()) == before
    assert found["parts"][-1]["health"] == "broken"
    assert main(["doctor", str(run_folder / "nothing")]) == 2


def test_doctor_ignores_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-6" / "notes.json").write_text("{}")
    assert main(["doctor", str(tmp_path)]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-6"]


def test_doctor_names_missing_steps_and_damaged_files(
    lab: Any, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(lab.root / "whole", run_folder)
    journal = RunDir(run_folder).journal_file
    lines = [line for line in journal.read_text().splitlines(keepends=True) if '"StepDone", "step": 5,' not in line]
    journal.write_text("".join(lines))
    (run_folder / "model" / "config.json").write_text("{}")
    flip(RunDir(run_folder).predictions_file)
    code, found = doctor(capsys, str(run_folder))
    texts = {p["name"]: p["text"] for p in found["parts"] if p["health"] == "broken"}
    assert code == 5
    assert "no line for step 5" in texts["journal.jsonl"]
    assert "config.json" in texts["model"]
    assert "predictions.parquet: was modified" in texts["results"]
    RunDir(run_folder).predictions_file.unlink()
    assert "predictions.parquet: is missing" in str(doctor(capsys, str(run_folder)))
