"""The real tracker packages write to local files, without network and login."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers.integrations import TensorBoardCallback

from tiny_model import mood

SCRIPT = """
import json, os, socket, sys
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
from tiny_model import mood, save_tiny_bert
from tunesmith.pipeline.train import finetune

data = mood()
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
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
    }
    words = [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[2]), name, str(folder)]
    done = subprocess.run(
        words, env=clean, capture_output=True, text=True, check=False, timeout=400, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(x for x in reversed(done.stdout.splitlines()) if x.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_tracker_gets_the_curves_of_a_run(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}: pip install 'tunesmith[trackers]'")
    found = run_with(name, tmp_path)
    if name == "mlflow":
        assert found == {"command": [[2, 4, 5], True, "FINISHED", True]}
    else:
        assert [sorted(v) for v in found.values()] == [["eval/loss", "train/loss"]]


def test_failing_tracker_is_disabled_and_the_run_goes_on(
    train: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("the server is gone\nreally")

    monkeypatch.setattr(TensorBoardCallback, "on_log", fail)
    with caplog.at_level(logging.WARNING):
        result, _ = train(train_data=mood(), report_to=("tensorboard",), logging_steps=1)
    assert result.steps == 4
    assert [line for line in caplog.messages if "disabled" in line] == [
        "TensorBoard stopped working and is disabled: ConnectionError: the server is gone"
    ]
