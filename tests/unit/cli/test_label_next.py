"""`tunesmith audit RUN --unlabeled FILE --next N`: what to label next, and the forecast of the gain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.data.read import read_source
from tunesmith.pipeline.label_next import choose_examples, forecast_gain, measure_curve, power_law_gain
from tunesmith.pipeline.train import finetune


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a finished run and new.csv: 60 texts, of which 10 repeat training texts and 10 repeat each other."""
    folder = tmp_path_factory.mktemp("home")
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(100)]
    finetune(
        train_file=write_csv(folder / "train.csv", rows),
        model_name_or_path=save_tiny_bert(folder / "tiny"),
        output_dir=folder / "run",
        cache_dir=folder / "cache",
        max_steps=3,
        use_cpu=True,
    )
    fresh = [text for text, _ in sentences(40, 9)]
    texts = [*fresh, *(f"{row['text'].upper()} " for row in rows[:10]), *fresh[:10]]
    write_csv(folder / "new.csv", [{"id": str(i), "text": text} for i, text in enumerate(texts)])
    return folder


def audit(home: Path, *words: str) -> int:
    return main(["audit", str(home / "run"), "--unlabeled", str(home / "new.csv"), *words])


def test_next_examples_have_no_near_duplicates_and_a_forecast(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit(home, "--next", "60", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    texts = [" ".join(one["columns"]["text"].lower().split()) for one in found["examples"]]
    known = {" ".join(text.lower().split()) for text, _ in sentences(100)}
    assert len(texts) == len(set(texts)) <= 40
    assert not known & set(texts)
    assert found["duplicates"] >= 10
    assert [one["more"] for one in found["forecasts"]] == [60, 600]
    assert all(one["low"] <= one["gain"] <= one["high"] for one in found["forecasts"])
    assert audit(home, "--next", "5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{home / 'new.csv'}:")
    assert sum("new.csv:" in line for line in lines) == 5
    assert any(line.startswith("Forecast: 5 more labels: ") and "points of accuracy (" in line for line in lines)


@pytest.mark.parametrize("tool", ["label_studio", "argilla"])
def test_annotation_tool_file_reads_back_with_the_same_texts(home: Path, tmp_path: Path, tool: str) -> None:
    assert audit(home, "--next", "7", "--output", str(tmp_path / "next.json"), "--output_tool", tool) == 0
    assert audit(home, "--next", "7", "--output", str(tmp_path / "next.csv")) == 0
    read, table = (read_source(tmp_path / f"next.{kind}", name="t").dataset for kind in ("json", "csv"))
    assert read["text"][:] == table["text"][:]
    assert [str(i) for i in read["id"][:]] == [str(i) for i in table["id"][:]]
    assert {"prediction", "probability"} <= set(table.column_names)


def test_suggestion_for_soft_labels_is_for_the_control_label(home: Path, tmp_path: Path) -> None:
    soft = [
        {"text": text, "p_good": 0.9 if good else 0.2, "p_bad": 0.1 if good else 0.8} for text, good in sentences(60)
    ]
    finetune(
        train_file=write_csv(tmp_path / "soft.csv", soft),
        label_column_name="p_good,p_bad",
        model_name_or_path=home / "tiny",
        output_dir=tmp_path / "run",
        cache_dir=tmp_path,
        max_steps=1,
        use_cpu=True,
    )
    words = ["--unlabeled", str(home / "new.csv"), "--next", "2", "--output", str(tmp_path / "next.json")]
    assert main(["audit", str(tmp_path / "run"), *words]) == 0
    for one in json.loads((tmp_path / "next.json").read_text()):
        (choice,) = one["predictions"][0]["result"]
        assert choice["from_name"] == "label"
        assert choice["value"]["choices"][0] in ("good", "bad")


def test_invalid_requests_are_refused(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(code: int, message: str, *words: Any) -> None:
        assert main(["audit", *map(str, words)]) == code
        assert message in capsys.readouterr().err

    run, new = home / "run", home / "new.csv"
    write_csv(tmp_path / "labeled.csv", [{"review": "a film", "label": "good"}])
    (tmp_path / "started").mkdir()
    (tmp_path / "started" / "journal.jsonl").touch()
    fails(3, "no column 'text'", run, "--unlabeled", tmp_path / "labeled.csv")
    fails(2, "--next 61 is more than the 60 rows", run, "--unlabeled", new, "--next", "61")
    fails(2, "not finished", tmp_path / "started", "--unlabeled", new)
    fails(2, "is not a run", run / "model", "--unlabeled", new)
    fails(2, "require --unlabeled", run, "--next", "5")
    fails(2, "cannot write .txt", run, "--unlabeled", new, "--output", tmp_path / "x.txt")
    fails(2, "ends in .json", run, "--unlabeled", new, "--output", tmp_path / "x.csv", "--output_tool", "argilla")
    (home / "train.csv").rename(home / "moved.csv")
    fails(3, "train.csv: no such file", run, "--unlabeled", new)
    (home / "moved.csv").rename(home / "train.csv")


def test_chosen_examples_are_uncertain_and_apart() -> None:
    angles = np.array([0.0, 0.01, 0.02, 1.5, 1.51, 0.7])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    unsure = np.array([0.9, 1.0, 0.9, 0.8, 0.8, 0.0])
    assert choose_examples(unsure, vectors, np.array([0, 1, 2, 3, 3, 5]), 2) == [1, 4]
    assert set(choose_examples(unsure, vectors, np.array([0, 1, 1, 3, 3, 5]), 9)) == {0, 1, 4, 5}


def test_power_law_is_recovered_and_a_flat_curve_has_no_gain() -> None:
    sizes = np.array([20, 40, 80, 160, 320])
    errors = np.stack([0.1 + 1.0 * sizes**-0.5, np.full(5, 0.2)])
    gains = power_law_gain(sizes, errors, 400, 400)
    assert gains == pytest.approx([400**-0.5 - 800**-0.5, 0.0], abs=1e-6)


def test_forecast_interval_contains_the_gain_of_a_known_curve() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(2, size=160)
    features = rng.normal(size=(160, 8)) + 0.8 * ids[:, None]
    found = forecast_gain(measure_curve(features, ids), 160, 160)
    assert found.low < 2.0
    assert found.high > 0.0
    assert found.low <= found.gain <= found.high
