"""`--recipe best` trains one model within a time budget, is resumable, selects on held-out rows, and uses the test rows once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from faults.trials import run_killed
from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.config.load import load_config
from tunesmith.data.rows import read_prediction_columns
from tunesmith.errors import ConfigError
from tunesmith.events import StepDone
from tunesmith.inference.predictor import Predictor
from tunesmith.labels import Task
from tunesmith.metrics.calibration import Temperature
from tunesmith.pipeline.train import finetune
from tunesmith.tuning import best
from tunesmith.tuning.best import HeldOut, Variant, pick
from tunesmith.tuning.trials import Clock


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a base model, rows that a tiny model can learn, and test rows."""
    folder = tmp_path_factory.mktemp("best")
    save_tiny_bert(folder / "a")
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(72)]
    write_csv(folder / "rows.csv", rows[:48])
    write_csv(folder / "test.csv", rows[48:])
    return folder


def words(home: Path, output: Path, *more: str, budget: str = "1h") -> list[str]:
    """Return the command with few steps; its options leave adversarial steps to try."""
    given = {"train_file": home / "rows.csv", "test_file": home / "test.csv", "model_name_or_path": home / "a"}
    given |= {"cache_dir": home / "cache", "output_dir": output, "max_steps": 8, "learning_rate": 3e-3}
    given |= {"pooling": "pooler", "per_device_train_batch_size": 8, "time_budget": budget, "recipe": "best"}
    flags = [str(word) for name, value in given.items() for word in (f"--{name}", value)]
    return ["train", *flags, "--use_cpu", "--disable_tqdm", *more]


def table(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "best.json").read_text())
    return found


def what(folder: Path) -> Any:
    """Return the results that don't depend on time."""
    found = table(folder)
    runs = {name: (run["state"], run["score"]) for one in found["tried"] for name, run in one["runs"].items()}
    return runs, found["deployed"], found["held_out"], found["temperature"], found["test"]


@pytest.fixture(scope="module")
def whole(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run."""
    output = tmp_path_factory.mktemp("whole") / "run"
    assert main(words(home, output)) == 0
    return output


def test_best_run_folder_works_like_any_other(whole: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = table(whole)
    assert {"auto-fold-1", "auto-fold-2", "auto-fold-3"} <= set(found["tried"][0]["runs"])
    assert len([one for one in found["tried"] if len(one["runs"]) >= 3]) >= 2
    assert found["seconds"] > 0
    assert found["test"]["accuracy"]["n"] == 24
    metrics = json.loads((whole / "metrics.json").read_text())
    assert metrics["out_of_fold"]["accuracy"]["n"] == 48
    assert "best: " in (whole / "README.md").read_text()
    assert not list((whole / "tries").glob("*/model"))
    for words in (["report", str(whole)], ["predict", str(whole), "--text", "a good film"]):
        assert main(words) == 0
    assert main(["evaluate", str(whole), "--test_file", str(home / "test.csv"), "--use_cpu"]) == 0
    assert "best: " in (whole / "report.html").read_text()
    capsys.readouterr()


def test_killed_search_ends_like_an_uninterrupted_one(whole: Path, home: Path, tmp_path: Path) -> None:
    command = words(home, tmp_path / "run")
    ended = subprocess.run(
        [sys.executable, "-m", "tunesmith", *command],
        env=os.environ | {"TUNESMITH_FAULT": "step.end:kill:12"},
        capture_output=True,
        check=False,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-500:]
    assert list((tmp_path / "run" / "tries").glob("*-fold-1"))
    assert main([*command, "--seed", "7"]) == 5
    assert main(["resume", str(tmp_path / "run"), "--disable_tqdm"]) == 0
    assert what(tmp_path / "run") == what(whole)
    assert main(["compare", str(whole), str(tmp_path / "run")]) == 0
    assert main(command) == 5  # finished


def test_only_the_final_run_predicts_test_examples(whole: Path) -> None:
    for part in (whole / "tries").glob("*-fold-*"):
        assert "test" not in json.loads((part / "metrics.json").read_text())
        assert "test" not in json.loads((part / "data_summary.json").read_text())["rows"]
    assert json.loads((whole / "data_summary.json").read_text())["rows"] == {"train": 48, "test": 24}


def test_temperature_is_folded_into_the_weights(home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """transformers computes the probabilities that the run stored: those of `auto` on all rows, with the temperature applied."""
    from transformers import pipeline

    heat = Temperature(2.0, 1.0, 0.9, 0.2, 0.1, 48)
    monkeypatch.setattr("tunesmith.tuning.best.fit_temperature", lambda *_: heat)
    monkeypatch.setattr(best, "variations", lambda *_: iter(()))
    assert main(words(home, tmp_path / "best")) == 0
    assert table(tmp_path / "best")["deployed"].startswith("auto")
    auto = [word if word != "best" else "auto" for word in words(home, tmp_path / "auto")]
    del auto[auto.index("--time_budget") : auto.index("--time_budget") + 2]
    assert main([*auto, "--validation_split_fraction", "0", "--output_dir", str(tmp_path / "auto")]) == 0
    texts = [text for text, _ in sentences(72)[48:]]
    logits = [Predictor.load(tmp_path / name, use_cpu=True).logits(texts) for name in ("auto", "best")]
    np.testing.assert_allclose(logits[0] / (2.0 / 1.5**0.5), logits[1], atol=1e-5)
    wrote = read_prediction_columns(tmp_path / "best" / "predictions.parquet")["prob_good"]
    found: Any = pipeline("text-classification", str(tmp_path / "best" / "model"), device="cpu")(texts, top_k=None)
    good = [next(one["score"] for one in row if one["label"] == "good") for row in found]
    np.testing.assert_allclose(good, wrote, atol=1e-5)


@pytest.mark.parametrize("kind", ["regression", "multilabel"])
def test_validation_file_replaces_folds(home: Path, tmp_path: Path, kind: str) -> None:
    rows = [
        {"text": text, "label": f"{k % 5}.5" if kind == "regression" else "a;b" if good else "b;c" if k % 3 else "c"}
        for k, (text, good) in enumerate(sentences(120))
    ]
    files = [write_csv(tmp_path / f"{n}.csv", part) for n, part in enumerate((rows[:40], rows[40:]))]
    more = [
        "--train_file",
        str(files[0]),
        "--validation_file",
        str(files[1]),
        "--max_steps",
        "2",
        *(["--label_separator", ";"] if kind == "multilabel" else []),
    ]
    command = [word for word in words(home, tmp_path / "run") if word != "--use_cpu"]
    at = command.index("--test_file")
    assert main([*command[:at], *command[at + 2 :], *more, "--use_cpu"]) == 0
    found = table(tmp_path / "run")
    assert list(found["tried"][0]["runs"]) == ["auto-held-out"]
    scores = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert next(iter(scores["out_of_fold"].values()))["n"] == next(iter(scores["validation"].values()))["n"] == 80
    assert (found["thresholds"] is not None) == (kind == "multilabel")
    assert (found["temperature"] is None) or kind == "multilabel"
    assert found["applied_temperature"] == (found["temperature"] or {"value": 1.0})["value"], (
        "one model, one number of rows"
    )


def test_small_budget_is_announced_and_trains_auto_only(
    home: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """At the first timed step, the rest doesn't fit: the run equals `--recipe auto`."""
    monkeypatch.setattr(best, "TIMED_READS", 1)
    monkeypatch.setattr(Clock, "left", lambda self: 1e-9)
    assert main(words(home, tmp_path / "best")) == 0
    lines = capsys.readouterr().err
    announced = lines.index("so there is no time for variants: the auto recipe is used. Set --time_budget ")
    assert announced < lines.index("Trial auto-fold-1: ")
    assert [run["state"] for run in table(tmp_path / "best")["tried"][0]["runs"].values()] == ["stopped"]
    assert table(tmp_path / "best")["deployed"] == "auto"
    auto = [word if word != "best" else "auto" for word in words(home, tmp_path / "auto")]
    del auto[auto.index("--time_budget") : auto.index("--time_budget") + 2]
    assert main(auto) == 0
    metrics = [json.loads((tmp_path / name / "metrics.json").read_text()) for name in ("best", "auto")]
    assert metrics[0] == metrics[1]


def test_small_budget_skips_the_pair_warm_up(home: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    rows = [{"premise": text, "hypothesis": text, "label": "good" if good else "bad"} for text, good in sentences(80)]
    file = write_csv(tmp_path / "pairs.csv", rows)
    monkeypatch.setattr(best, "TIMED_READS", 1)
    monkeypatch.setattr(Clock, "left", lambda self: 1e-9 if self.reserve != best.PAGES_SECONDS else 1e9)
    command = words(home, tmp_path / "run", "--train_file", str(file))
    for name in ("--max_steps", "--test_file"):
        del command[command.index(name) : command.index(name) + 2]
    assert main(command) == 0
    assert "is enough only for auto, without a pair warm-up" in capsys.readouterr().err
    files = [tmp_path / "run" / name / "run.yaml" for name in ("tries/auto-fold-1", ".")]
    trial, final = (load_config(file, need_data=False).pair_start for file in files)
    assert trial
    assert final == 0


def test_steps_stay_within_the_budget(home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Each step counts as a second; time is reserved for the final run."""
    taken = [0]
    beat, budget = Clock.beat, 60

    def count(self: Clock, *events: Any) -> None:
        taken[0] += bool(events) and isinstance(events[0], StepDone)
        beat(self, *events)

    monkeypatch.setattr(best, "time", SimpleNamespace(monotonic=lambda: float(taken[0])))
    monkeypatch.setattr(Clock, "beat", count)
    monkeypatch.setattr(Clock, "left", lambda self: budget - taken[0] - self.reserve)
    monkeypatch.setattr(best, "PAGES_SECONDS", 0.0)
    assert main(words(home, tmp_path / "run")) == 0
    steps = {name: run["steps"] for one in table(tmp_path / "run")["tried"] for name, run in one["runs"].items()}
    last = table(tmp_path / "run")["steps"]
    assert sum(steps.values()) + last <= budget
    assert last == 8
    assert "auto-fold-1" in steps
    assert len(steps) < 8


def test_exhausted_budget_is_reported_and_resumable(home: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(words(home, tmp_path / "run", budget="0.001s")) == 2
    assert "over before a model is trained" in capsys.readouterr().err
    assert not (tmp_path / "run" / "model").exists()


def test_options_that_contradict_the_budget_are_refused() -> None:
    given = {"train_file": "x.csv", "recipe": "best", "time_budget": "20m"}
    for name, value in (("folds", 3), ("seeds", 2)):
        with pytest.raises(ConfigError, match="makes its own folds"):
            load_config(None, {**given, name: value})
    with pytest.raises(ConfigError, match="needs a time_budget"):
        load_config(None, {"train_file": "x.csv", "recipe": "best"})
    with pytest.raises(ConfigError, match="requires --recipe best"):
        finetune(load_config(None, {"train_file": "x.csv", "time_budget": "20m"}))
    assert main(["search", "--train_file", "x.csv", "--recipe", "best", "--time_budget", "1m"]) == 2


def test_best_killed_before_best_json_finishes(whole: Path, home: Path, tmp_path: Path) -> None:
    command = words(home, tmp_path / "run")
    run_killed(command, "tunesmith.tuning.best:BestSearch._table", 1)
    assert (tmp_path / "run" / "report.html").is_file()
    assert not (tmp_path / "run" / "best.json").exists()
    assert main(command) == 0
    assert what(tmp_path / "run") == what(whole)
    assert table(tmp_path / "run")["steps"] == table(whole)["steps"]


@pytest.fixture
def explored(whole: Path, tmp_path: Path) -> Path:
    """Return the folder of a run that was stopped before its final model."""
    shutil.copytree(whole / "tries", tmp_path / "run" / "tries")
    return tmp_path / "run"


def test_stray_files_in_a_best_folder_are_ignored(whole: Path, explored: Path, home: Path) -> None:
    for place in (explored, explored / "tries", explored / "tries" / "auto-fold-1"):
        for name in (".DS_Store", "Thumbs.db", ".nfs0001", "notes.txt"):
            (place / name).write_bytes(b"\0")
    (explored / "tries" / "old-trial").mkdir()
    assert main(words(home, explored)) == 0
    assert what(explored) == what(whole)


@pytest.mark.parametrize("change", ["labels", "model"])
def test_best_with_changed_inputs_is_refused(
    explored: Path, home: Path, tmp_path: Path, change: str, capsys: Any
) -> None:
    for name in ("a", "rows.csv", "test.csv"):
        copy = shutil.copytree if (home / name).is_dir() else shutil.copy
        copy(home / name, tmp_path / name)
    options = explored / "tries" / "run.yaml"
    options.write_text(options.read_text().replace(str(home), str(tmp_path)))
    if change == "labels":
        text = (tmp_path / "rows.csv").read_text()
        flipped = text.replace(",good", ",?").replace(",bad", ",good").replace(",?", ",bad")
        assert flipped != text
        (tmp_path / "rows.csv").write_text(flipped)
    else:
        save_tiny_bert(tmp_path / "a", seed=7)
    assert main(words(tmp_path, explored)) == 5
    changed = "train data" if change == "labels" else "base model"
    assert f"the {changed} changed since the first trial" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\x00\xff",
        b'{"inputs": {}}',
        b'{"inputs": [], "runs": {}}',
        b'{"inputs": INPUTS, "runs": [1]}',
        b'{"inputs": INPUTS, "runs": {"auto-fold-1": {"x": 1}}}',
        b'{"inputs": INPUTS, "runs": {"auto-fold-1": {"state": "done", "score": "high"}}}',
        b'{"inputs": INPUTS, "runs": {"auto-fold-1": {"state": 3}}}',
    ],
)
def test_damaged_record_is_reported_by_name(explored: Path, home: Path, content: bytes, capsys: Any) -> None:
    file = explored / "tries" / "record.json"
    inputs = json.dumps(json.loads(file.read_text())["inputs"]).encode()
    file.write_bytes(content.replace(b"INPUTS", inputs))
    assert main(words(home, explored)) == 5
    assert "record.json" in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["missing", "of another fold"])
def test_changed_predictions_of_a_trial_are_refused(explored: Path, home: Path, damage: str, capsys: Any) -> None:
    file = explored / "tries" / "auto-fold-1" / "predictions.parquet"
    if damage == "missing":
        file.unlink()
    else:
        shutil.copy(explored / "tries" / "auto-fold-2" / "predictions.parquet", file)
    assert main(words(home, explored)) == 5
    assert "auto-fold-1/predictions.parquet: is missing or was modified" in capsys.readouterr().err
    shutil.rmtree(file.parent)
    assert main(words(home, explored)) == 0  # as the message says


def planted(seed: int, right: float, n: int = 400, scale: float = 3.0) -> HeldOut:
    """Return predictions for two classes, correct with this probability."""
    rng = np.random.default_rng(99)
    gold = rng.integers(0, 2, n)
    hit = np.random.default_rng(seed).random(n) < right
    side = np.where(hit, gold, 1 - gold)
    logits = np.zeros((n, 2))
    logits[np.arange(n), side] = scale
    return HeldOut(Task.BINARY, logits, gold, ("bad", "good"))


def test_expected_variant_is_kept_unless_clearly_worse() -> None:
    held = {
        "auto": planted(1, 0.80),
        "equal": planted(2, 0.79, scale=2.0),
        "behind": planted(2, 0.79),
        "bad": planted(3, 0.6),
    }
    plain, equal, behind, bad = (Variant(name, expected=name != "auto") for name in held)
    assert pick([plain, equal], held, "accuracy") is equal
    assert pick([plain, behind], held, "accuracy") is plain  # both score and loss are worse
    assert pick([plain, bad], held, "accuracy") is plain
    assert pick([plain, Variant("equal")], held, "accuracy") is plain
