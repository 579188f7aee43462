"""`tunesmith train` on two ranks equals one rank with twice the batch, for each launcher; only one rank writes and prints."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from distributed.launching import Ended, accelerate_launch, environment, finish, free_port, start, torchrun
from patience import patient
from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.events import Evaluated, Improved, Note, Resumed, RunEnded, Saved, StepDone
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny model without dropout and two data files; 41 rows leave one row for the last step of 8."""
    root = tmp_path_factory.mktemp("job")
    save_tiny_bert(root / "model", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(62)]
    write_csv(root / "train.csv", rows[:41])
    write_csv(root / "validation.csv", rows[41:])
    return root


def words(place: Path, run: Path, *more: str, batch: int = 4) -> list[str]:
    """Return the command without a launcher."""
    return [
        *("train", "--train_file", str(place / "train.csv"), "--validation_file", str(place / "validation.csv")),
        *("--model_name_or_path", str(place / "model"), "--output_dir", str(run), "--use_cpu"),
        *("--per_device_train_batch_size", str(batch), "--num_train_epochs", "2", "--learning_rate", "1e-3"),
        *("--load_best_model_at_end", "true"),
        *("--eval_strategy", "steps", "--eval_steps", "3", "--cache_dir", str(place / "cache"), *more),
    ]


def alone(*arguments: str) -> Ended:
    """Run the command on one rank, in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return Ended(code, out.getvalue(), err.getvalue())


def numbers(run: Path) -> dict[str, Any]:
    """Return the logged numbers of a run."""
    events = read_journal(RunDir(run).journal_file)
    table = pq.read_table(RunDir(run).predictions_file).to_pydict()
    return {
        "losses": [e.loss for e in events if isinstance(e, StepDone)],
        "examples": [e.examples for e in events if isinstance(e, StepDone)],
        "evaluated": [(e.step, e.split, e.n) for e in events if isinstance(e, Evaluated)],
        "metrics": [e.metrics for e in events if isinstance(e, Evaluated)],
        "improved": [e.step for e in events if isinstance(e, Improved)],
        "saved": [e.step for e in events if isinstance(e, Saved)],
        "texts": table["text"],
        "probabilities": [table["prob_bad"], table["prob_good"]],
        "scores": json.loads(RunDir(run).metrics_file.read_text()),
    }


def compare(both: dict[str, Any], one: dict[str, Any]) -> None:
    """Assert that two ranks logged the same numbers as one."""
    np.testing.assert_allclose(both["losses"], one["losses"], atol=1e-6, rtol=0)
    for name in ("examples", "evaluated", "improved", "saved", "texts"):
        assert both[name] == one[name], name
    np.testing.assert_allclose(both["probabilities"], one["probabilities"], atol=1e-5)
    for mine, other in zip(both["metrics"], one["metrics"], strict=True):
        assert mine == pytest.approx(other, abs=1e-5)


@pytest.fixture(scope="module")
def one(place: Path) -> dict[str, Any]:
    """Return the run on one rank with the full batch."""
    ended = alone(*words(place, place / "one", batch=8))
    assert ended.code == 0, ended.err
    return numbers(place / "one")


@pytest.fixture(scope="module")
def two(place: Path) -> tuple[Path, Ended]:
    """Return the run on two ranks by torchrun, and its output."""
    run = place / "two"
    command = [word for word in words(place, run) if word != "--use_cpu"]
    ended = finish(start(torchrun("-m", "tunesmith", *command), CUDA_VISIBLE_DEVICES=""))
    assert ended.code == 0, ended.err[-3000:]
    return run, ended


def test_torchrun_equals_one_rank_with_the_full_batch(two: tuple[Path, Ended], one: dict[str, Any]) -> None:
    assert len(one["losses"]) == 12
    assert one["examples"][5] == 1, "the last step of an epoch has one row, so one rank is idle"
    compare(numbers(two[0]), one)


def test_only_rank_0_writes_and_prints(two: tuple[Path, Ended]) -> None:
    run, ended = two
    assert ended.out.count("run folder:") == 1
    said = ended.err.lower()
    for line in ("epoch 2.00 ", "training: 12 steps", "data: "):
        assert said.count(line) == 1, line
    assert [type(e).__name__ for e in read_journal(RunDir(run).journal_file)].count("RunStarted") == 1
    assert not list(run.rglob(".tmp*"))


def test_accelerate_launch_equals_torchrun(place: Path, two: tuple[Path, Ended]) -> None:
    run = place / "launched"
    ended = finish(start(accelerate_launch("-m", "tunesmith", *words(place, run))))
    assert ended.code == 0, ended.err[-3000:]
    assert numbers(run)["losses"] == numbers(two[0])["losses"]
    assert ended.out.count("run folder:") == 1


NOTEBOOK = """
import json, os, sys
from accelerate import notebook_launcher

def train(options):
    from tunesmith.pipeline.train import finetune
    result = finetune(**options)
    os.write(1, f"STEPS {result.steps}\\n".encode())  # one write: two ranks share this pipe

notebook_launcher(train, (json.loads(sys.argv[1]),), num_processes=2, use_port=sys.argv[2])
"""


@pytest.mark.long
def test_notebook_launcher_equals_torchrun(place: Path, two: tuple[Path, Ended]) -> None:
    run = place / "notebook"
    flags = words(place, run)[1:]
    options: dict[str, Any] = {"use_cpu": True}
    flags.remove("--use_cpu")
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        number = re.fullmatch(r"[0-9.e-]+", value)
        options[flag.removeprefix("--")] = json.loads(value) if number else value
    script = place / "notebook.py"
    script.write_text(NOTEBOOK)
    ended = finish(start([sys.executable, str(script), json.dumps(options), str(free_port())]))
    assert ended.code == 0, ended.err[-3000:]
    assert ended.out.count("STEPS 12") == 2
    assert numbers(run)["losses"] == numbers(two[0])["losses"]


def test_resume_is_identical_or_names_the_difference(place: Path, two: tuple[Path, Ended], tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    command = words(place, cut, "--save_strategy", "steps", "--save_steps", "1", "--save_total_limit", "100")
    first = finish(start(torchrun("-m", "tunesmith", *command)))
    assert first.code == 0, first.err[-3000:]
    whole = numbers(cut)
    assert whole["losses"] == numbers(two[0])["losses"]
    weights = (cut / "model" / "model.safetensors").read_bytes()
    for step in range(6, 13):
        shutil.rmtree(cut / f"checkpoint-{step}")
    shutil.rmtree(cut / "model")
    (cut / "report.html").unlink()
    less = tmp_path / "less"
    shutil.copytree(cut, less)
    again = finish(start(torchrun("-m", "tunesmith", *command)))
    assert again.code == 0, again.err[-3000:]
    assert [e.step for e in read_journal(RunDir(cut).journal_file) if isinstance(e, Resumed)] == [5]
    found = numbers(cut)
    assert {k: found[k] for k in found if k != "saved"} == {k: whole[k] for k in whole if k != "saved"}
    assert (cut / "model" / "model.safetensors").read_bytes() == weights
    # one rank, the same flags: a different experiment
    command = [str(less) if word == str(cut) else word for word in command]
    refused = alone(*command)
    assert refused.code == 5
    assert "processes was 2 and is 1" in refused.err
    # one rank with the same rows per step
    command += ["--gradient_accumulation_steps", "2", "--allow_changed_data"]
    ended = alone(*command)
    assert ended.code == 0, ended.err
    notes = [e.text for e in read_journal(RunDir(less).journal_file) if isinstance(e, Note)]
    assert any("processes was 2 and is 1" in text for text in notes)
    np.testing.assert_allclose(numbers(less)["losses"], whole["losses"], atol=1e-6, rtol=0)
    assert isinstance(read_journal(RunDir(less).journal_file)[-1], RunEnded)


EARLY = """
import os, signal, sys
from pathlib import Path
import tunesmith.pipeline.train as training
from tunesmith.cli.main import main
if os.environ["RANK"] == sys.argv[1]:
    training.tokenize_run = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
code = main(sys.argv[3:])
Path(sys.argv[2] + "-exit-" + os.environ["RANK"]).write_text(str(code))
sys.exit(code)
"""


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.long), 1])
def test_rank_killed_while_reading_data_is_named(place: Path, tmp_path: Path, victim: int) -> None:
    """The launcher sends SIGTERM to the other rank, which still exits with 7; tests/faults/test_ranks.py kills later."""
    script = tmp_path / "early.py"
    script.write_text(EARLY)
    ended = finish(start(torchrun(str(script), str(victim), str(tmp_path / "run"), *words(place, tmp_path / "run"))))
    assert ended.code != 0
    assert re.search(rf"tunesmith: error: rank {victim} \(process \d+ on .*\) (has died|is gone)", ended.err), ended.err
    assert (tmp_path / f"run-exit-{1 - victim}").read_text() == "7"


def test_rank_blocked_in_c_is_ended(tmp_path: Path) -> None:
    """NCCL may never notice a lost rank: a watchdog thread ends the process."""
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    script = tmp_path / "stuck.py"
    script.write_text(
        "import threading, time\n"
        "from tunesmith.training import distributed as roster\n"
        "import os, socket\n"
        "roster.GRACE_SECONDS = 1.0\n"
        f"ranks = roster.RankRoster(((socket.gethostname(), os.getpid()), (socket.gethostname(), {child.pid})), 0)\n"
        "threading.Thread(target=roster._look, args=(ranks, threading.Event()), daemon=True).start()\n"
        "time.sleep(60)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
    assert done.returncode == 7
    assert f"rank 1 (process {child.pid}" in done.stderr
