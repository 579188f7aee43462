"""Trackers: the real packages, writing to local files, without a network and without a login."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunesmith.events import EpochStarted, Evaluated, RunEnded, RunStarted, StepDone
from tunesmith.pipeline import trackers
from tunesmith.pipeline.trackers import TrackerArguments, Trackers, lines_every
from warm import warm_python

SCRIPT = """
import gc, json, os, socket, sys
from pathlib import Path

tests, name, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
sys.path.insert(0, tests)
os.chdir(out)
connect = socket.socket.connect


def connect_here(self, address):
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
        raise OSError(f"no network in this test: {address}")
    return connect(self, address)


socket.socket.connect = connect_here
from tiny_model import save_tiny_bert, sentences
from trainer_toys import PretrainedRegression, RegressionConfig, RegressionDataset, arguments
from tunesmith import Trainer
from tunesmith.pipeline.train import finetune

args = arguments(
    out / "script", report_to=name, run_name="script", project="demo", logging_steps=2, max_steps=4,
    eval_strategy="steps", eval_steps=4,
)
rows = RegressionDataset()
Trainer(PretrainedRegression(RegressionConfig()), args, train_dataset=rows, eval_dataset=rows).train()
gc.collect()  # when transformers' MLflowCallback is collected, it ends whichever run of MLflow is active then
if name == "wandb":
    import wandb

    wandb.finish()
data = [{"text": t, "label": "good" if good else "bad"} for t, good in sentences(40)]
finetune(
    train_data=data, validation_data=data[:10], model_name_or_path=str(save_tiny_bert(out / "model")),
    output_dir=str(out / "command"), num_train_epochs=1, logging_steps=2, report_to=(name,), run_name="command",
    use_cpu=True,
)


def read_wandb():
    files = Path("wandb").glob("offline-*/*.wandb")
    return {f.parent.name: [w for w in ("train/loss", "eval/loss") if w.encode() in f.read_bytes()] for f in files}


def read_mlflow():
    import mlflow

    found = {}
    for run in mlflow.search_runs(search_all_experiments=True, output_format="list"):
        history = mlflow.tracking.MlflowClient().get_metric_history(run.info.run_id, "loss")
        steps, data = [m.step for m in history], run.data
        found[run.info.run_name] = [steps, "eval_loss" in data.metrics, run.info.status, len(data.params) > 50]
    return found


def read_trackio():
    import sqlite3

    query = "select run_name, metrics from metrics"
    rows = [row for file in Path("trackio").glob("*.db") for row in sqlite3.connect(file).execute(query).fetchall()]
    found = {}
    for run, text in rows:
        found[run] = sorted(set(found.get(run, [])) | {k for k in json.loads(text) if k in ("train/loss", "eval/loss")})
    return found


def read_tensorboard():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for file in out.rglob("events.out*"):
        board = EventAccumulator(str(file.parent)).Reload()
        name = file.relative_to(out).parts[0]
        found[name] = [t for t in board.Tags()["scalars"] if t in ("train/loss", "eval/loss")]
    return found


readers = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}
print("FOUND " + json.dumps(readers[name]()))
"""


def run_with(name: str, folder: Path) -> Any:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    clean |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "BLANK_PICTURES": "1",
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    words = [warm_python(), "-c", SCRIPT, str(Path(__file__).parents[2]), name, str(folder)]
    done = subprocess.run(
        words, env=clean, capture_output=True, text=True, check=False, timeout=400, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(x for x in reversed(done.stdout.splitlines()) if x.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_tracker_gets_the_curves_of_a_script_and_of_a_command(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}: pip install 'tunesmith[trackers]'")
    found = run_with(name, tmp_path)
    if name == "mlflow":
        assert found == {"script": [[2, 4], True, "FINISHED", True], "command": [[2, 4, 5], True, "FINISHED", True]}
    else:
        assert len(found) == 2
        assert [sorted(v) for v in found.values()] == [["eval/loss", "train/loss"]] * 2
    if name in ("trackio", "tensorboard"):
        assert set(found) == {"script", "command"}


class Spy:
    def __init__(self) -> None:
        self.calls: list[tuple[str, int, Any]] = []
        self.fails_at = 10**9

    def note(self, event: str, state: Any, logs: Any = None) -> None:
        if state.global_step >= self.fails_at:
            raise ConnectionError("the server is gone\nreally")
        self.calls.append((event, state.global_step, logs))

    def on_train_begin(self, args: Any, state: Any, control: Any, **extra: Any) -> None:
        self.note("begin", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **extra: Any) -> None:
        self.note("log", state, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **extra: Any) -> None:
        self.note("end", state)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    made = Spy()
    monkeypatch.setattr(trackers, "get_reporting_integration_callbacks", lambda names: [lambda: made])
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    return made


def play(every: int = 2) -> None:
    listen = Trackers(["any"], TrackerArguments({"names": ("a",)}, "out", "demo"), SimpleNamespace(), every, 3)
    listen(RunStarted("id", 0, 3, 3.0, 1.0, 9))
    listen(EpochStarted(0, 0))
    for step, loss in ((1, 4.0), (2, 2.0), (3, 1.0)):
        listen(StepDone(step, step / 3, loss, 0.5, 0.1, 3, 9, 9))
    listen(Evaluated(3, 1.0, "validation", {"loss": 0.5, "f1": None}, 4, 0.1))
    listen(Evaluated(3, 1.0, "train_sample", {"loss": 0.4}, 4, 0.1))
    listen(RunEnded(3, "completed"))


def test_lines_hold_the_mean_loss_since_the_last_one_and_every_evaluation(spy: Spy) -> None:
    play()
    assert [(name, step) for name, step, _ in spy.calls] == [
        ("begin", 0),
        ("log", 2),
        ("log", 3),
        ("log", 3),
        ("log", 3),
        ("end", 3),
    ]
    lines = [logs for name, _, logs in spy.calls if name == "log"]
    assert lines[0] == {"learning_rate": 0.1, "grad_norm": 0.5, "loss": 3.0, "epoch": 2 / 3}
    assert lines[1:3] == [{"eval_loss": 0.5, "epoch": 1.0}, {"train_sample_loss": 0.4, "epoch": 1.0}]
    assert lines[3]["loss"] == 1.0
    assert os.environ["WANDB_PROJECT"] == "mine"


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(spy: Spy, caplog: pytest.LogCaptureFixture) -> None:
    spy.fails_at = 3
    with caplog.at_level(logging.WARNING):
        play()
    assert [name for name, _, _ in spy.calls] == ["begin", "log"]
    assert [r.message for r in caplog.records] == [
        "Spy stopped working and is left out: ConnectionError: the server is gone"
    ]


def test_lines_follow_logging_strategy_and_steps() -> None:
    assert lines_every("no", 5, num_steps=100, steps_per_epoch=50) == 0
    assert lines_every("epoch", None, num_steps=100, steps_per_epoch=50) > 100
    assert lines_every("steps", None, num_steps=100, steps_per_epoch=50) == 2
    assert lines_every("steps", 7, num_steps=100, steps_per_epoch=50) == 7
    assert lines_every("steps", 0.1, num_steps=95, steps_per_epoch=50) == 10
