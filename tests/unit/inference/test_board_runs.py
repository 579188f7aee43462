"""The runs of the board: their state equals their event log, and damage is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from patience import patient
from synthetic_runs import make_folder, make_run
from tunesmith.cli.main import main
from tunesmith.events import NonFinite, Note, Resumed, RunEnded, RunStarted, StepDone
from tunesmith.inference import server
from tunesmith.inference.board import LiveRun, RunIndex, encode_message, status_of
from tunesmith.inference.server import load_token
from tunesmith.runs.event_log import Journal, truncate_journal
from tunesmith.runs.folder import RunDir, RunLock, load_curves


def write(path: Path, events) -> None:
    with Journal(path / "journal.jsonl") as journal:
        for event in events:
            journal.append(event)


def line(panels, key: str, name: str) -> dict[int, float | None]:
    panel = next(p for p in panels if p["key"] == key)
    found = next(part for part in panel["lines"] if part["name"] == name)
    return dict(zip(found["x"], found["y"], strict=True))


def test_pushed_numbers_always_equal_the_event_log(tmp_path: Path) -> None:
    events = make_run([0.5, 0.3, 0.2], [0.45, 0.4, 0.42], accuracy=[0.7, 0.8, 0.8], steps_per_epoch=40)
    live = LiveRun(RunDir(tmp_path))
    for begin in range(0, len(events), 17):
        write(tmp_path, events[begin : begin + 17])
        assert live.poll()
        known = load_curves(tmp_path)
        panels = live.snapshot()["panels"]
        losses = line(panels, "loss", "training")
        assert list(losses) == known.train_loss.step.tolist()
        np.testing.assert_allclose(list(losses.values()), known.train_loss.value, rtol=1e-5)
        assert live.snapshot()["step"] == known.last_step
    assert line(panels, "metric", "validation") == {40: 0.7, 80: 0.8, 120: 0.8}
    assert not live.poll()
    assert live.snapshot()["status"] == "finished"


def test_run_resumed_from_checkpoint_is_drawn_once(tmp_path: Path) -> None:
    events = make_run([0.5, 0.3], [0.45, 0.4], steps_per_epoch=20, ended=None)
    write(tmp_path, events)
    live = LiveRun(RunDir(tmp_path))
    live.poll()
    truncate_journal(tmp_path / "journal.jsonl", 20)
    again = [
        Resumed(20, "checkpoint-20"),
        *(StepDone(s, s / 20, 9.0, 1.0, 1e-5, 8, 80, 80, 0.1) for s in range(21, 26)),
    ]
    write(tmp_path, again)
    assert live.poll()
    losses = line(live.snapshot()["panels"], "loss", "training")
    assert list(losses) == list(range(1, 26))
    assert losses[25] == 9.0
    assert live.snapshot()["resumed_at"] == [20]


def test_nan_and_infinite_steps_are_gaps_in_valid_json(tmp_path: Path) -> None:
    write(tmp_path, make_run([0.5], [0.5], steps_per_epoch=30, nan_after=20))
    live = LiveRun(RunDir(tmp_path))
    live.poll()
    state = live.snapshot()
    assert line(state["panels"], "loss", "training")[21] is None
    assert state["findings"][0]["code"] == "diverged"
    assert state["status"] == "failed"
    message = encode_message("run", state).split(b"data: ", 1)[1]
    json.loads(message, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_running_run_is_not_reported_as_stopped_early(tmp_path: Path) -> None:
    falling = {"train": [0.60, 0.52, 0.42], "validation": [0.59, 0.52, 0.44], "accuracy": [0.69, 0.74, 0.80]}
    write(tmp_path, make_run(**falling, planned_epochs=9, ended=None))
    live = LiveRun(RunDir(tmp_path))
    with RunLock(RunDir(tmp_path).lock_file):
        live.poll()
        assert live.snapshot()["status"] == "running"
        assert live.snapshot()["findings"][0]["code"] == "still_learning"
    assert live.poll(), "the end of the process changes the status"
    assert live.snapshot()["findings"][0]["code"] == "stopped_too_early"


def test_text_cannot_end_a_server_sent_event() -> None:
    message = encode_message("run", {"note": "a\n\ndata: evil\r\n\u2028 é"})
    assert message.count(b"\n") == 3
    assert json.loads(message.split(b"data: ", 1)[1])["note"].startswith("a\n\ndata")


@pytest.mark.parametrize(
    ("tail", "ended"),
    [
        ([RunEnded(5, "completed")], "completed"),
        ([RunEnded(5, "SIGTERM"), Resumed(5, "checkpoint-5")], None),
        ([RunEnded(5, "NumericsError")], "NumericsError"),
        ([Note(5, "x"), NonFinite(5, "loss", "loss", ())], None),
    ],
)
def test_only_a_final_event_ends_a_run(tmp_path: Path, tail, ended: str | None) -> None:
    first = [RunStarted("r", 0, 10, 10.0, 1.0, 80), StepDone(1, 0.1, None, None, 1e-5, 8, 8, 8, 0.1)]
    write(tmp_path, [*first, *tail])
    [row] = RunIndex(tmp_path).rows()
    assert (row.ended, row.loss, row.num_steps) == (ended, None, 10)


HOLD = """
import signal, sys, time
from pathlib import Path
from tunesmith.runs.folder import RunLock
signal.signal(signal.SIGTERM, lambda *a: sys.exit(143))
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / ".lock")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_run_is_running_while_its_lock_is_held(tmp_path: Path, holder) -> None:
    run = RunDir(tmp_path)
    assert status_of(run, None, 0.0) == "running"
    holder.terminate()
    assert holder.wait(timeout=patient(10)) == 143
    assert status_of(run, "SIGTERM", 0.0) == status_of(run, "signal 15", 0.0) == "stopped"


def test_symlinked_lock_file_is_not_followed(tmp_path: Path, holder) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / ".lock").symlink_to(tmp_path / ".lock")
    assert status_of(RunDir(other), None, 0.0) == "interrupted"


def test_index_adds_new_runs_and_drops_removed_ones(runs: Path) -> None:
    index = RunIndex(runs)
    assert {row.id for row in index.rows()} == {"alpha", "beta"}
    make_folder(runs / "gamma", make_run([0.5], [0.5], steps_per_epoch=5), rows=12)
    assert {row.id for row in index.rows()} == {"alpha", "beta", "gamma"}
    (runs / "gamma" / "journal.jsonl").unlink()
    assert {row.id for row in index.rows()} == {"alpha", "beta"}
    assert {row.id for row in RunIndex(runs / "alpha").rows()} == {"alpha"}


def test_list_row_matches_the_run_folder(runs: Path) -> None:
    (runs / "alpha" / "metrics.json").write_text(
        '{"validation": {"loss": {"value": 0.4}, "f1": {"value": 0.9, "low": 0.8, "high": 0.95}}}'
    )
    row = next(row for row in RunIndex(runs).rows() if row.id == "alpha")
    assert (row.name, row.model, row.status) == ("mrpc-bert-base", "bert-base-uncased", "finished")
    assert row.score == ("validation f1", 0.9, 0.8, 0.95)
    assert (row.step, row.num_steps) == (60, 60)


def test_token_file_is_readable_only_by_owner(tmp_path: Path) -> None:
    file = tmp_path / "state" / "token"
    token = load_token(file)
    assert len(token) >= 40
    assert file.stat().st_mode & 0o777 == 0o600
    assert load_token(file) == token
    assert load_token(file, new=True) != token
    kept = load_token(file)
    file.chmod(0o644)
    assert load_token(file) != kept, "a token that other users can read is not secret"
    target = tmp_path / "elsewhere"
    target.write_text("e" * 43)
    file.unlink()
    file.symlink_to(target)
    assert load_token(file) != "e" * 43
    assert target.read_text() == "e" * 43


def test_board_prints_its_token_only_on_a_terminal(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(server, "serve_forever", lambda board, listen, ready: ready("http://127.0.0.1:1"))
    assert main(["board", str(runs)]) == 0
    assert load_token() not in capsys.readouterr().out, "stdout can be a log file"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["board", str(runs)]) == 0
    assert f"http://127.0.0.1:1/?token={load_token()}" in capsys.readouterr().out


STEP = (
    b'{"event": "StepDone", "step": 1, "epoch": 0.1, "loss": %s, "grad_norm": 1.0, "learning_rate": 1e-5, '
    b'"examples": 8, "tokens": 9, "padded_tokens": 9, "seconds": 0.1}\n'
)
JOURNALS = {
    "a loss of +-e": STEP % b"+-e",
    "a text for a number": STEP % b'"low"',
    "nested": b'{"event": "Note", "step": 1, "text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    "a time that is a text": b'{"event": "RunStarted", "run_id": "r", "step": 0, "num_steps": 9, "steps_per_epoch": 3.0,'
    b' "num_epochs": 3.0, "train_rows": 8, "time": "now"}\n',
    "metrics that are a list": b'{"event": "Evaluated", "step": 1, "epoch": 1, "split": "validation", "metrics": [], "n": 4}\n',
    "2 MB without an end": b"x" * 2_000_000,
}


@pytest.mark.parametrize("name", JOURNALS)
def test_damaged_event_log_is_reported_in_the_list(served: Any, runs: Path, name: str) -> None:
    bad = RunDir(runs / "beta")
    bad.journal_file.write_bytes(JOURNALS[name])
    rows = {row.id: row for row in RunIndex(runs).rows()}
    assert rows["beta"].status == "damaged"
    assert rows["beta"].problem
    assert rows["alpha"].problem is None
    assert_served(served)


def test_infinite_values_are_gaps_not_damage(served: Any, runs: Path) -> None:
    bad = RunDir(runs / "beta")
    bad.journal_file.write_bytes(STEP % b"Infinity" + (STEP % b"NaN").replace(b'"step": 1', b'"step": 2'))
    assert {row.id: row.problem for row in RunIndex(runs).rows()} == {"alpha": None, "beta": None}
    assert_served(served, report=200)


METRICS = ("[" * 100_000, '{"test": {"accuracy": {"value": NaN, "low": "x", "high": []}}}')


@pytest.mark.parametrize("text", METRICS, ids=["nested", "NaN"])
def test_damaged_metrics_file_does_not_break_the_list(served: Any, runs: Path, text: str) -> None:
    RunDir(runs / "beta").metrics_file.write_text(text)
    assert_served(served)


@pytest.mark.parametrize("name", ["journal_file", "config_file", "metrics_file", "data_summary_file", "lock_file"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipe_or_device_as_file_does_not_block(served: Any, runs: Path, name: str, kind: str) -> None:
    file: Path = getattr(RunDir(runs / "beta"), name)
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    if name == "journal_file":
        assert {row.id: bool(row.problem) for row in RunIndex(runs).rows()} == {"alpha": False, "beta": True}
    assert_served(served)


def assert_served(served: Any, report: int | None = None) -> None:
    """Assert that all pages of both runs load and that the list shows both."""
    assert {row.id for row in RunIndex(served.root).rows()} == {"alpha", "beta"}
    assert served.ask("GET", "/")[0] == 200
    for path in ("/runs/beta", "/runs/beta/events", "/runs/beta/report"):
        status = served.ask("GET", path)[0]
        assert status in (200, 404, 409), path
    assert report in (None, status)
    assert served.ask("GET", "/runs/alpha")[0] == 200
