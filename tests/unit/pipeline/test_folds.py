"""Folds and seeds: ordinary runs in one folder, and one score over all held-out examples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiny_model import mood, sentences, write_csv
from tunesmith.cli.doctor import examine
from tunesmith.cli.main import main
from tunesmith.config.load import load_config
from tunesmith.config.options import RunConfig
from tunesmith.data.rows import read_prediction_columns
from tunesmith.errors import CheckpointError, ConfigError
from tunesmith.pipeline.folds import each_run, run_repeats
from tunesmith.pipeline.train import RunObserver, finetune
from tunesmith.report.compare import compare_runs
from tunesmith.runs.folder import RunDir


@pytest.fixture
def config(tiny: Path, cache: Path, tmp_path: Path) -> Any:
    rows = mood(45)
    given = {"train_file": write_csv(tmp_path / "rows.csv", rows), "model_name_or_path": tiny, "cache_dir": cache}
    more = {"output_dir": tmp_path / "runs", "use_cpu": True, "max_steps": 2, "train_sample_size": 0, "folds": 3}
    return load_config(None, {name: str(v) if isinstance(v, Path) else v for name, v in (given | more).items()})


def test_every_row_is_held_out_and_counted_once(config: Any, tmp_path: Path) -> None:
    found = run_repeats(config, RunObserver())
    assert [path.name for path in found.runs] == ["fold-1", "fold-2", "fold-3"]
    texts: list[str] = []
    for path in found.runs:
        texts += read_prediction_columns(path / "predictions.parquet")["text"]
    assert sorted(texts) == sorted(text for text, _ in sentences(45))
    assert found.pooled[42]["accuracy"].n == 45
    stored = json.loads((tmp_path / "runs" / "repeats.json").read_text())
    assert stored["held_out"]["42"]["accuracy"]["n"] == 45
    assert stored["runs"] == ["fold-1", "fold-2", "fold-3"]


def test_finished_fold_of_same_config_is_kept(config: Any) -> None:
    first = next(each_run(config))
    finetune(first)
    before = (first.run_folder / "metrics.json").stat().st_mtime_ns
    said: list[str] = []
    run_repeats(config, RunObserver(log=said.append))
    assert (first.run_folder / "metrics.json").stat().st_mtime_ns == before
    assert any("fold-1 is finished and is kept" in line for line in said)


def reword(config: Any) -> RunConfig:
    file = Path(config.train_file)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], "changed " + lines[1], *lines[2:]]) + "\n")
    return config


def no_lowercase(config: Any) -> RunConfig:
    folder = Path(config.output_dir).parent / "cased"
    shutil.copytree(config.model_name_or_path, folder)
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["normalizer"]["lowercase"] = not stored["normalizer"]["lowercase"]
    file.write_text(json.dumps(stored))
    return replace(config, model_name_or_path=str(folder))


def add_test_file(config: Any) -> RunConfig:
    file = Path(config.output_dir).parent / "test.csv"
    return replace(config, test_file=str(write_csv(file, mood(10))))


CHANGES: dict[str, tuple[Callable[[Any], RunConfig], str]] = {
    "number of folds": (lambda c: replace(c, folds=4), "folds was 3 and is 4"),
    "training file": (reword, "the training data changed"),
    "test file": (add_test_file, "the test data changed"),
    "tokenizer": (no_lowercase, "tokenizer.json changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_finished_fold_of_changed_config_is_refused(config: Any, change: str) -> None:
    finetune(next(each_run(config)))
    alter, expected = CHANGES[change]
    with pytest.raises(CheckpointError, match=f"fold-1: contains a finished run.*{expected}"):
        run_repeats(alter(config), RunObserver())


def test_option_that_is_no_longer_set_is_refused(config: Any) -> None:
    set_ = replace(config, learning_rate=1e-3)
    run_repeats(set_, RunObserver())
    shutil.rmtree(Path(config.output_dir) / "fold-3")
    with pytest.raises(CheckpointError, match="contains runs with a different learning_rate"):
        run_repeats(config, RunObserver())
    assert run_repeats(set_, RunObserver()).pooled[42]["accuracy"].n == 45
    for damage in (b"", b"\0["):
        (Path(config.output_dir) / "repeats.yaml").write_bytes(damage)
        with pytest.raises(CheckpointError, match=r"repeats.yaml: is (empty|not YAML)"):
            run_repeats(set_, RunObserver())


@pytest.mark.parametrize("damage", ["missing", "modified"])
def test_damaged_predictions_of_a_fold_are_refused(config: Any, damage: str) -> None:
    run_repeats(config, RunObserver())
    run = RunDir(Path(config.output_dir) / "fold-2")
    if damage == "missing":
        run.predictions_file.unlink()
    else:
        run.predictions_file.write_bytes((run.path.parent / "fold-1" / "predictions.parquet").read_bytes())
    with pytest.raises(CheckpointError, match=rf"fold-2/predictions.parquet.*{damage}"):
        run_repeats(config, RunObserver())
    others = [str(run.path), str(run.path.parent / "fold-3")]
    with pytest.raises(CheckpointError, match=rf"predictions.parquet.*{damage}"):
        compare_runs(others)
    assert any(part.health == "broken" and "predictions.parquet" in part.text for part in examine(run))


def test_fold_without_event_log_is_refused(config: Any) -> None:
    run = finetune(next(each_run(config))).run
    run.journal_file.unlink()
    with pytest.raises(CheckpointError, match=r"without their event log \(journal.jsonl\)"):
        run_repeats(config, RunObserver())


def test_seeds_share_the_held_out_rows(config: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--seeds",
        "2",
        "--max_steps",
        "1",
        "--use_cpu",
        "--disable_tqdm",
        "--output_dir",
        f"{config.output_dir}-s",
    ]
    files = ["--train_file", config.train_file, "--model_name_or_path", config.model_name_or_path]
    assert main(["train", *files, *words, "--cache_dir", config.cache_dir]) == 0
    shown = capsys.readouterr().out
    assert "over 2 seeds:" in shown
    folder = Path(f"{config.output_dir}-s")
    tables = [read_prediction_columns(folder / name / "predictions.parquet") for name in ("seed-42", "seed-43")]
    assert tables[0]["text"] == tables[1]["text"]
    assert main(["compare", str(folder / "seed-42"), str(folder / "seed-43")]) == 0


def test_one_call_trains_one_run(config: Any) -> None:
    with pytest.raises(ConfigError, match="finetune trains one"):
        finetune(config)
    with pytest.raises(ConfigError, match="there is no fold 4 of 3"):
        load_config(None, {"fold": 4, "folds": 3, "train_file": "x.csv"})
    with pytest.raises(ConfigError, match="makes its own validation splits"):
        load_config(None, {"folds": 3, "train_file": "x.csv", "validation_file": "y.csv"})
