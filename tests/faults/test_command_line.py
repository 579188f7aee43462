"""The same faults through the command line itself: `train`, `resume`, `doctor`, their exit codes and their one line."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from faults.trials import Ended, Server, damaged_checkpoints, fingerprint, leftovers, memory_folder, seed_of, size
from patience import patient
from tunesmith.cli.main import main
from tunesmith.runs.folder import RunDir


@dataclass
class Lab:
    """A data file, a tiny model and a fork server for the command line."""

    server: Server
    root: Path
    whole: dict[str, Any]
    seconds: float

    def train(self, run: Path, *more: str, **job: Any) -> Ended:
        """`tunesmith train` in a forked child."""
        return self.server.run("cli", {"argv": self.words(run, *more)}, **job)

    def words(self, run: Path, *more: str) -> list[str]:
        """The command's words."""
        return [
            *("train", "--train_file", str(self.root / "train.csv"), "--validation_file", str(self.root / "val.csv")),
            *("--model_name_or_path", str(self.root / "model"), "--output_dir", str(run), "--use_cpu"),
            *("--per_device_train_batch_size", "4", "--num_train_epochs", "2", "--learning_rate", "1e-3"),
            *("--load_best_model_at_end", "true"),
            *("--save_strategy", "steps", "--save_steps", "2", "--eval_strategy", "steps", "--eval_steps", "4"),
            *("--cache_dir", str(self.root / "cache"), *more),
        ]

    def same(self, run: Path) -> None:
        """The run ended like the unbroken one."""
        assert fingerprint(run, outcome=False) == self.whole
        assert leftovers(run) == []
        assert RunDir(run).report_file.is_file()


def write_rows(file: Path, rows: int, seed: int) -> None:
    rng = random.Random(seed)
    lines = ["text,label"]
    for _ in range(rows):
        words = [rng.randrange(99) for _ in range(rng.randrange(4, 14))]
        lines.append(f"{' '.join(f'word{w}' for w in words)},{'even' if words[0] % 2 == 0 else 'odd'}")
    file.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = memory_folder("cli", tmp_path_factory.mktemp("cli"))
    server = Server(root)
    try:
        write_rows(root / "train.csv", 48, 1)
        write_rows(root / "val.csv", 20, 2)
        assert server.run("model", {"folder": str(root / "model")}).code == 0
        lab = Lab(server, root, {}, 0.0)
        for _ in range(2):  # the second one finds the caches filled: that is the time that kills are spread over
            shutil.rmtree(root / "whole", ignore_errors=True)
            ended = lab.train(root / "whole")
            assert ended.code == 0, ended.log[-3000:]
        lab.whole, lab.seconds = fingerprint(root / "whole", outcome=False), float(ended.seconds[0] or 0)
        yield lab
    finally:
        server.close()
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def run(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Path]:
    path = lab.root / f"run-{abs(hash(request.node.nodeid))}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_row_01_kills_of_the_command_at_any_moment(lab: Lab, run: Path) -> None:
    seed = seed_of("row_01_cli")
    rng = random.Random(seed)
    for trial in range(size(full=40, ci=2)):
        at = rng.uniform(0.0, lab.seconds)
        where = f"seed {seed}, trial {trial}, killed after {at:.2f} of {lab.seconds:.2f} s"
        ended = lab.train(run, signals=[[at, "KILL"]])
        assert damaged_checkpoints(run) == [] if run.exists() else True, where
        if ended.code != 0:
            again = lab.train(run)
            assert again.code == 0, f"{where}: {again.log[-1500:]}"
        lab.same(run)
        shutil.rmtree(run)


def test_row_01_true_processes_killed_and_started_again(lab: Lab, run: Path) -> None:
    """No fork server: start-up, imports and exit are part of the trial. `resume` goes on from another folder."""
    command = [sys.executable, "-m", "tunesmith", *lab.words(run)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for _ in range(size(full=5, ci=1)):
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + patient(120)
        while not list(run.glob("checkpoint-*")) and time.monotonic() < until and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert damaged_checkpoints(run) == []
        done = subprocess.run(
            [sys.executable, "-m", "tunesmith", "resume", str(run)],
            cwd="/",
            env=env,
            capture_output=True,
            text=True,
            timeout=patient(300),
        )
        assert done.returncode == 0, done.stderr
        assert "resumed after step" in done.stderr
        lab.same(run)
        shutil.rmtree(run)


@pytest.mark.parametrize("point", ["step.end:kill:3", "save.filled:kill:5", "best.begin:kill:1"])
def test_resume_continues_after_a_kill(lab: Lab, run: Path, point: str) -> None:
    assert lab.train(run, env={"TUNESMITH_FAULT": point}).code == -9
    ended = lab.server.run("cli", {"argv": ["resume", str(run)]})
    assert ended.code == 0, ended.log
    lab.same(run)


@pytest.mark.parametrize("name", ["term", "int"])
def test_row_05_a_signal_to_the_command(lab: Lab, run: Path, name: str) -> None:
    ended = lab.train(run, env={"TUNESMITH_FAULT": f"step.end:{name}:5"})
    assert ended.code == {"term": 143, "int": 130}[name], ended.log
    assert "the same command resumes from here" in ended.last_line
    assert lab.train(run).code == 0
    lab.same(run)


def test_resume_of_a_finished_run_reports_it(lab: Lab) -> None:
    ended = lab.server.run("cli", {"argv": ["resume", str(lab.root / "whole")]})
    assert ended.code == 0
    assert "finished after step 24 (completed); there is nothing to resume" in ended.log
    ended = lab.train(lab.root / "whole")
    assert ended.code == 5
    assert "contains a finished run of this config" in ended.last_line


@pytest.mark.parametrize("lost", ["report.html", "model"])
def test_a_run_killed_while_it_finished_is_finished_by_the_same_command(lab: Lab, run: Path, lost: str) -> None:
    shutil.copytree(lab.root / "whole", run)
    (run / "report.html").unlink()
    if lost == "model":
        shutil.rmtree(run / "model")
    assert lab.train(run).code == 0
    lab.same(run)


def test_resume_names_what_is_missing(lab: Lab, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["resume", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["resume", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    run.mkdir()
    (run / "journal.jsonl").write_text("")
    (run / "run.yaml").write_text("learning_rate: 0.001\n")
    assert main(["resume", str(run)]) == 2
    assert "the data was passed in Python" in capsys.readouterr().err


def test_row_12_two_commands_on_one_folder(lab: Lab, run: Path) -> None:
    command = [sys.executable, "-m", "tunesmith", *lab.words(run)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TUNESMITH_FAULT": "step.end:sleep:3"}
    first = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + patient(120)
        while not list(run.glob("checkpoint-*")) and time.monotonic() < until and first.poll() is None:
            time.sleep(0.05)
        for words in (lab.words(run), ["resume", str(run)]):
            ended = lab.server.run("cli", {"argv": words})
            assert ended.code == 4
            assert f"is in use by process {first.pid} on {os.uname().nodename}" in ended.last_line
            assert ended.seconds[0] < patient(1.5)
        ended = lab.server.run("cli", {"argv": ["doctor", str(run)]})
        assert f"held by process {first.pid}" in ended.log
    finally:
        first.kill()
        first.wait()
    assert lab.train(run).code == 0
    lab.same(run)


CHANGES = {
    "one row edited": (lambda text: text.replace("word", "ward", 1), (), "the training data changed"),
    "four rows dropped": (lambda text: "\n".join(text.splitlines()[:-4]) + "\n", (), "the training data changed"),
    "accumulation": (None, ("--gradient_accumulation_steps", "2"), "gradient_accumulation_steps was 1 and is 2"),
    "batch": (None, ("--per_device_train_batch_size", "8"), "per_device_train_batch_size was 4 and is 8"),
    "seed": (None, ("--seed", "7"), "seed was 42 and is 7"),
    "labels": (lambda text: text.replace("even", "eben"), (), "labels"),
}


def test_row_14_a_changed_run_is_refused_and_resumes_unharmed(lab: Lab, run: Path) -> None:
    assert lab.train(run, env={"TUNESMITH_FAULT": "step.end:kill:7"}).code == -9
    before = {f.name: f.read_bytes() for f in run.iterdir() if f.is_file() and f.name != ".lock"}
    files = {file: file.read_text() for file in (lab.root / "train.csv", lab.root / "val.csv")}
    for what, (edit, flags, says) in CHANGES.items():
        try:
            for file, text in files.items():
                if edit is not None and (what == "labels" or file.name == "train.csv"):
                    file.write_text(edit(text))
            ended = lab.train(run, *flags)
        finally:
            for file, text in files.items():
                file.write_text(text)
        assert ended.code == 5, (what, ended.log[-1500:])
        assert says in ended.last_line, what
        after = {f.name: f.read_bytes() for f in run.iterdir() if f.is_file() and f.name != ".lock"}
        assert after == before, what
    assert lab.server.run("cli", {"argv": ["resume", str(run)]}).code == 0
    lab.same(run)


def test_row_09_a_new_run_can_start_from_the_weights_of_a_checkpoint_that_lost_a_piece(lab: Lab, run: Path) -> None:
    from faults.test_damage import rewrite_manifest

    assert lab.train(run, env={"TUNESMITH_FAULT": "step.end:kill:6"}).code == -9
    folder = RunDir(run).checkpoint(6)
    (folder / "optimizer.safetensors").unlink()
    rewrite_manifest(folder)
    ended = lab.train(run)
    assert ended.code == 5
    assert f"--model_name_or_path {folder}" in ended.last_line
    new = lab.root / "from-weights"
    ended = lab.train(new, "--model_name_or_path", str(folder))
    assert ended.code == 0, ended.log[-1500:]
    losses = [e["loss"] for e in fingerprint(new, outcome=False)["journal"] if e["event"] == "StepDone"]
    fresh = [e["loss"] for e in lab.whole["journal"] if e["event"] == "StepDone"]
    assert len(losses) == 24
    assert losses[0] != fresh[0], "the new run must start from the weights of the old one"


def test_row_16_base_weights_that_are_not_finite_are_refused(lab: Lab, run: Path, tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import load_file, save_file

    model = tmp_path / "model"
    shutil.copytree(lab.root / "model", model)
    tensors = load_file(model / "model.safetensors")
    tensors["bert.pooler.dense.bias"] = np.full_like(tensors["bert.pooler.dense.bias"], np.nan)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    ended = lab.train(run, "--model_name_or_path", str(model))
    assert ended.code == 6, ended.log
    assert "bert.pooler.dense.bias" in ended.last_line
    assert not RunDir(run).checkpoints()


def test_row_16_an_exploding_rate_through_the_command(lab: Lab, run: Path) -> None:
    ended = lab.train(run, "--learning_rate", "1e30")
    assert ended.code == 6, ended.log[-1500:]
    assert not RunDir(run).model.exists()


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_doctor_finds_a_finished_run_sound(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(capsys, str(lab.root / "whole"))
    assert code == 0
    assert {p["health"] for p in found["parts"]} == {"sound"}
    assert found["parts"][-1]["text"] == "finished after step 24 (completed)"
    assert main(["doctor", str(lab.root / "whole")]) == 0
    assert "ok      model" in capsys.readouterr().out


def test_doctor_repairs_by_removing_only_what_is_useless(
    lab: Lab, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fault = {"TUNESMITH_FAULT": "save.filled:kill:6"}
    assert lab.train(run, "--save_total_limit", "3", env=fault).code == -9
    folders = RunDir(run).checkpoints()
    file = folders[-1] / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with RunDir(run).journal_file.open("ab") as journal:
        journal.write(b'{"event": "Step')
    (run / "notes.txt").write_text("mine")
    code, found = doctor(capsys, str(run))
    by_name = {p["name"]: p for p in found["parts"] if p["health"] == "useless"}
    assert code == 0
    assert folders[-1].name in by_name
    assert "optimizer.safetensors" in by_name[folders[-1].name]["text"]
    assert any(name.startswith(".tmp-checkpoint-") for name in by_name)
    kept = [f.name for f in folders[:-1]]
    code, found = doctor(capsys, str(run), "--repair")
    assert code == 0
    assert folders[-1].name in found["removed"]
    assert [f.name for f in RunDir(run).checkpoints()] == kept
    assert (run / "notes.txt").read_text() == "mine"
    assert {p["health"] for p in found["parts"]} == {"sound"}
    assert doctor(capsys, str(run), "--repair")[1]["removed"] == []
    assert lab.train(run, "--save_total_limit", "3").code == 0
    (run / "notes.txt").unlink()
    lab.same(run)


def test_doctor_never_removes_the_last_copies(lab: Lab, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.train(run, "--save_total_limit", "2", env={"TUNESMITH_FAULT": "step.end:kill:6"}).code == -9
    for folder in RunDir(run).checkpoints():
        (folder / "state.json").write_text("{}")
    before = sorted(p.name for p in run.iterdir())
    code, found = doctor(capsys, str(run), "--repair")
    assert code == 5
    assert found["removed"] == []
    assert sorted(p.name for p in run.iterdir()) == before
    assert found["parts"][-1]["health"] == "broken"
    assert main(["doctor", str(run / "nothing")]) == 2


def test_doctor_leaves_a_folder_alone_that_only_looks_like_a_run(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-6").mkdir()
    (tmp_path / "checkpoint-6" / "notes.json").write_text("{}")
    assert main(["doctor", str(tmp_path), "--repair"]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-6"]


def test_doctor_names_a_gap_in_the_journal_and_a_damaged_model(
    lab: Lab, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(lab.root / "whole", run)
    journal = RunDir(run).journal_file
    lines = [line for line in journal.read_text().splitlines(keepends=True) if '"StepDone", "step": 5,' not in line]
    journal.write_text("".join(lines))
    (run / "model" / "config.json").write_text("{}")
    code, found = doctor(capsys, str(run))
    texts = {p["name"]: p["text"] for p in found["parts"] if p["health"] == "broken"}
    assert code == 5
    assert "no line for step 5" in texts["journal.jsonl"]
    assert "config.json" in texts["model"]
