"""`tunesmith report` writes page and curves and prints the diagnosis; `tunesmith doctor` describes the machine."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from synthetic_runs import make_folder, make_run
from tunesmith.cli.main import main
from tunesmith.cli.report import next_command
from tunesmith.config.load import load_config
from tunesmith.events import Finding
from tunesmith.files import cache_folder
from tunesmith.runs.folder import RunDir


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    make_folder(folder, make_run([0.5, 0.3, 0.15], [0.45, 0.40, 0.46], accuracy=[0.78, 0.85, 0.86]))
    return folder


def test_report_writes_page_and_curves_and_prints_diagnosis(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("healthy: ")
    assert f"report: {run / 'report.html'}" in out
    assert all((run / name).is_file() for name in ("report.html", "curves.png", "curves.svg"))


def test_report_json_prints_findings_and_writes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(p.name for p in run.iterdir())
    assert main(["report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"] == str(run)
    assert found["findings"][0]["code"]
    assert sorted(p.name for p in run.iterdir()) == before


@pytest.mark.parametrize(
    ("advice", "flags"),
    [
        ("--learning_rate 3e-5", ["--learning_rate", "3e-5"]),
        ("remove --freeze: this trains the whole encoder", ["--freeze", ""]),
        (
            "--validation_file '' --validation_split_fraction 0.1: rows of one source",
            ["--validation_file", "", "--validation_split_fraction", "0.1"],
        ),
    ],
)
def test_next_command_applies_advised_options(tmp_path: Path, advice: str, flags: list[str]) -> None:
    (tmp_path / "run.yaml").write_text("train_file: a.csv\nvalidation_file: b.csv\nfreeze: [encoder]\n")
    words = shlex.split(next_command(RunDir(tmp_path), Finding("underfitting", "warning", "", (advice,))) or "")
    assert words[:3] == ["tunesmith", "train", str(tmp_path / "run.yaml")]
    assert words[-len(flags) :] == flags
    given = {name.removeprefix("--"): value for name, value in zip(words[5::2], words[6::2], strict=True)}
    config = load_config(tmp_path / "run.yaml", given)
    if "freeze" in given:
        assert config.freeze == ()
    if "validation_file" in given:
        assert config.validation_file is None


def test_advised_epochs_unset_max_steps(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train_file: a.csv\nmax_steps: 2\n")
    advice = Finding("underfitting", "warning", "", ("--num_train_epochs 3",))
    words = shlex.split(next_command(RunDir(tmp_path), advice) or "")
    assert words[-4:] == ["--num_train_epochs", "3", "--max_steps", "-1"]


def test_report_ignores_an_invalid_matplotlib_backend(run: Path) -> None:
    command = [sys.executable, "-m", "tunesmith", "report", str(run)]
    done = subprocess.run(
        command, env={**os.environ, "MPLBACKEND": "junk"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_next_command_keeps_advice_that_is_a_command(tmp_path: Path) -> None:
    audit = Finding("no_signal", "error", "", ("tunesmith audit 'my rows.csv': lists labels", "--num_train_epochs 6"))
    assert next_command(RunDir(tmp_path), audit) == "tunesmith audit 'my rows.csv'"
    resume = Finding("stopped_too_early", "warning", "", ("tunesmith resume: the run ended at step 3 of 9",))
    assert next_command(RunDir(tmp_path), resume) == f"tunesmith resume {tmp_path}"


def test_doctor_describes_the_machine_without_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", "/there")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["transformers"]
    assert found["devices"][0].startswith("cpu")
    assert found["variables"]["HF_HUB_OFFLINE"] == "1"
    assert found["caches"]["tunesmith"] == str(cache_folder()) == "/there/tunesmith"
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert found["packages"]["torch"] in text
    assert "hf_secret" not in text
