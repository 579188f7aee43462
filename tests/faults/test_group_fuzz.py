"""Groups of runs (`--folds`) that change between two starts: the second start refuses them or trains again.

A seed draws each change: an option, the data, the model, stray files, or damage to a finished run. Pooled scores never
mix two configs and never omit an example.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from faults.trials import run_killed
from tiny_model import mood, save_tiny_bert, write_csv
from tunesmith.cli.main import main

ROWS, FOLDS = 36, 3


def command(place: Path, **options: Any) -> list[str]:
    """Return the command that trains all folds of the data in this folder."""
    values = {
        "train_file": place / "rows.csv",
        "model_name_or_path": place / "bert",
        "output_dir": place / "runs",
        "cache_dir": place / "cache",
        "folds": FOLDS,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "train_sample_size": 0,
        "use_cpu": "true",
        **options,
    }
    given = {name: value for name, value in values.items() if value is not None}
    return ["train", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("group")
    write_csv(place / "rows.csv", mood(ROWS))
    save_tiny_bert(place / "bert")
    assert main(command(place)) == 0
    return place


OPTIONS: dict[str, tuple[Any, ...]] = {
    "learning_rate": (1e-4, 3e-3, None),
    "seed": (1, 7),
    "folds": (2, 4),
    "max_steps": (1, 3),
    "per_device_train_batch_size": (4, 16),
    "weight_decay": (0.05,),
    "max_seq_length": (12, 20),
    "label_smoothing_factor": (0.1,),
}
STRAY = (".DS_Store", "Thumbs.db", ".nfs0001", "notes.txt")


def change(place: Path, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Change something before the second start; return its name and the options that differ."""
    kind = rng.choice(["option", "option", "label", "text", "model", "stray", "damage", "damage"])
    if kind == "option":
        name = rng.choice(sorted(OPTIONS))
        return kind, {name: rng.choice(OPTIONS[name])}
    if kind in ("label", "text"):
        lines = (place / "rows.csv").read_text().splitlines()
        k = rng.randrange(1, len(lines))
        text, _, label = lines[k].rpartition(",")
        other = next(line.rpartition(",")[2] for line in lines[1:] if not line.endswith(label))
        lines[k] = f"{text},{other}" if kind == "label" else f"changed {lines[k]}"
        (place / "rows.csv").write_text("\n".join(lines) + "\n")
    elif kind == "model":
        shutil.rmtree(place / "bert")
        save_tiny_bert(place / "bert", seed=5)
    elif kind == "stray":
        for folder in (place / "runs", place / "runs" / "fold-2"):
            (folder / rng.choice(STRAY)).write_bytes(rng.randbytes(20))
    else:
        folder = place / "runs" / f"fold-{rng.randint(1, FOLDS)}"
        file = rng.choice(sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix != ".html"))
        data = file.read_bytes()
        kept = rng.choice([0, len(data) // 2, None])
        file.unlink() if kept is None else file.write_bytes(data[:kept])
        return f"damage to {file.relative_to(place)}", {}
    return kind, {}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_changed_group_is_refused_or_complete(seed: int, finished: Path, tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "group"
    shutil.copytree(finished, place)
    before = json.loads((place / "runs" / "repeats.json").read_text())
    what, options = change(place, random.Random(seed))
    code = main(command(place, **options))
    printed = capsys.readouterr()
    if code != 0:
        assert code in (3, 5), f"{what}: exit code {code}: {printed.err}"
        assert str(place) in printed.err, f"{what}: no place in {printed.err!r}"
        return
    found = json.loads((place / "runs" / "repeats.json").read_text())
    pooled = next(iter(found["held_out"].values()))
    assert pooled["accuracy"]["n"] == ROWS, what
    for run in found["runs"] if options else ():
        stored = yaml.safe_load((place / "runs" / run / "run.yaml").read_text())
        assert all(stored[name] == value for name, value in options.items()), what
    if what in ("label", "text", "model"):
        pytest.fail(f"a changed {what} was accepted")
    if what == "stray":
        assert found["held_out"] == before["held_out"]


@pytest.mark.parametrize(
    "function", ["tunesmith.training.run_writer:RunWriter.end", "tunesmith.pipeline.results:draw_and_explain"]
)
def test_fold_killed_at_its_end_is_finished_with_its_report(function: str, finished: Path, tmp_path: Path) -> None:
    words = command(finished, output_dir=tmp_path / "runs")
    run_killed(words, function, 2)
    assert not (tmp_path / "runs" / "fold-2" / "report.html").exists()
    assert main(words) == 0
    for fold in range(1, FOLDS + 1):
        assert (tmp_path / "runs" / f"fold-{fold}" / "report.html").is_file()
    found, expected = (json.loads((place / "runs" / "repeats.json").read_text()) for place in (tmp_path, finished))
    assert found == expected
