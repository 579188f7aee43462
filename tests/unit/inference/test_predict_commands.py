"""`tunesmith predict` and `tunesmith evaluate` on a trained folder keep columns and order; spreadsheets run no formulas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from read_predictions import read_predictions
from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.pipeline.train import finetune


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model, a training file and a finished run."""
    folder = tmp_path_factory.mktemp("home")
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(60)]
    model = save_tiny_bert(folder / "tiny")
    file = write_csv(folder / "train.csv", rows)
    finetune(
        train_file=file,
        model_name_or_path=model,
        output_dir=folder / "run",
        cache_dir=folder / "cache",
        max_steps=3,
        use_cpu=True,
    )
    return folder


def new_rows() -> list[dict[str, Any]]:
    return [{"id": f"{i:03}", "text": text, "note": f"=HYPERLINK({i})"} for i, (text, _) in enumerate(sentences(11, 5))]


def read_back(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.suffix == ".parquet":
        import pyarrow.parquet

        return list(pyarrow.parquet.read_table(path).to_pylist())
    columns = read_predictions(path)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize(
    ("source", "target"), [("csv", "csv"), ("csv", "tsv"), ("jsonl", "parquet"), ("parquet", "jsonl")]
)
def test_predictions_keep_columns_and_order(source: str, target: str, home: Path, tmp_path: Path) -> None:
    rows = new_rows()
    file = tmp_path / f"new.{source}"
    if source == "csv":
        write_csv(file, rows)
    elif source == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        import pyarrow as pa
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file)
    output = tmp_path / f"out.{target}"
    assert main(["predict", str(home / "run"), "--input", str(file), "--output", str(output), "--use_cpu"]) == 0
    found = read_back(output)
    assert [{k: row[k] for k in ("id", "text", "note")} for row in found] == rows
    assert list(found[0]) == ["id", "text", "note", "prediction", "prob_bad", "prob_good"]
    for row in found:
        probabilities = {name: float(row[f"prob_{name}"]) for name in ("bad", "good")}
        assert sum(probabilities.values()) == pytest.approx(1.0, abs=1e-6)
        assert row["prediction"] == max(probabilities, key=lambda name: probabilities[name])


def test_evaluate_prints_scores_as_json(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(20, 9)]
    file = write_csv(tmp_path / "test.csv", rows)
    assert main(["evaluate", str(home / "run"), "--test_file", str(file), "--json", "--use_cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy"]["n"] == 20
    assert 0 <= found["accuracy"]["low"] <= found["accuracy"]["value"] <= found["accuracy"]["high"] <= 1
    assert main(["evaluate", str(home / "run"), "--test_file", str(file), "--metric_name", "f1", "--use_cpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("f1 of 'good'  ")
    assert "n=20" in shown


def test_prediction_of_one_text_is_printed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(home / "run"), "--text", "the film was good", "--use_cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] in ("bad", "good")
    assert [line.split()[0] for line in lines[1:]] == [lines[0], "good" if lines[0] == "bad" else "bad"]
    assert main(["predict", str(home / "run"), "--text", "one", "--text_pair", "two", "--use_cpu"]) == 2
    for text in ("", " \n"):  # as in a file and in `serve`
        assert main(["predict", str(home / "run"), "--text", text, "--use_cpu"]) == 2
    assert main(["predict", str(home / "run"), "--text", "", "--allow_empty_text", "--use_cpu"]) == 0


def test_predict_removes_leftovers_of_a_killed_process(home: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "new.csv", new_rows())
    dead, alive = tmp_path / ".tmp-out.csv-999999999", tmp_path / f".tmp-out.csv-{os.getppid()}"
    for leftover in (dead, alive):
        leftover.write_text("half")
    words = ["predict", str(home / "run"), "--input", str(file), "--output", str(tmp_path / "out.csv"), "--use_cpu"]
    assert main(words) == 0
    assert (dead.exists(), alive.exists()) == (False, True)


def test_sigterm_during_predict_exits_143_and_leaves_nothing(home: Path, tmp_path: Path) -> None:
    file = write_csv(tmp_path / "new.csv", new_rows())
    words = ["predict", str(home / "run"), "--input", str(file), "--output", str(tmp_path / "out.csv"), "--use_cpu"]
    code = (
        "import os, signal, sys; from tunesmith.inference import tables; from tunesmith.cli.main import main\n"
        "tables.fill_table = lambda *a: os.kill(os.getpid(), signal.SIGTERM)\n"
        f"sys.exit(main({words!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 143, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["new.csv"]


@pytest.fixture(scope="module")
def broken(home: Path) -> Path:
    """Return a model that predicts NaN for texts with the word "sour"."""
    import shutil

    from safetensors.torch import load_file, save_file

    from tiny_model import WORDS

    folder = home / "broken"
    shutil.copytree(home / "run" / "model", folder, ignore=shutil.ignore_patterns("MANIFEST.json"))
    weights = load_file(folder / "model.safetensors")
    weights["bert.embeddings.word_embeddings.weight"][WORDS.index("sour")] = (
        3e38  # finite weights that overflow in the forward pass
    )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("verb", ["predict", "evaluate"])
def test_nan_prediction_is_an_error_with_its_row(
    verb: str, broken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ["the film was good", "it is fine", "a sour meal", "the day was sour"]
    source = write_csv(tmp_path / "in.csv", [{"text": text, "label": "good"} for text in texts])
    args = (
        ["--input", str(source), "--output", str(tmp_path / "out.csv")]
        if verb == "predict"
        else ["--test_file", str(source)]
    )
    assert main([verb, str(broken), "--use_cpu", *args]) == 6
    assert "row 3" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()
