"""Bulk prediction writes each row once and in order, even after kills, truncated outputs and changed inputs."""

from __future__ import annotations

import csv
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patience import patient
from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.errors import CheckpointError, DataError
from tunesmith.inference import bulk
from tunesmith.inference.bulk import BulkJob, find_inputs, parts_of, run_job
from tunesmith.inference.model_folder import ModelFacts
from tunesmith.inference.predictor import Predictor
from tunesmith.labels import LabelMap

ROWS = [{"id": i, "text": text} for i, (text, _) in enumerate(sentences(240, 3))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_bert(tmp_path_factory.mktemp("model") / "tiny", labels=("bad", "good"))
    ModelFacts(LabelMap.for_classes(["bad", "good"]), ("text",), "label", 32).write(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return four files of 60 rows: Parquet with six row groups, CSV, JSON Lines, and gzipped JSON Lines."""
    folder = tmp_path_factory.mktemp("data")
    pq.write_table(pa.Table.from_pylist(ROWS[:60]), folder / "a.parquet", row_group_size=10)
    write_csv(folder / "b.csv", ROWS[60:120])
    lines = ["".join(json.dumps(row) + "\n" for row in ROWS[start : start + 60]) for start in (120, 180)]
    (folder / "c.jsonl").write_text(lines[0])
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines[1].encode()))
    return folder


def read_all(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for file in sorted(
        p
        for p in folder.rglob("*")
        if p.is_file() and p.suffix in (".parquet", ".csv", ".jsonl") and p.name != "parts.jsonl"
    ):
        if file.suffix == ".parquet":
            rows += pq.read_table(file).to_pylist()
        elif file.suffix == ".csv":
            with file.open(newline="") as lines:
                rows += list(csv.DictReader(lines))
        else:
            rows += [json.loads(line) for line in file.read_text().splitlines()]
    return rows


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file() and p.name not in (".lock", "job.json", "parts.jsonl"))
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


@pytest.fixture(scope="module")
def unbroken(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of an uninterrupted job."""
    output = tmp_path_factory.mktemp("unbroken") / "out"
    assert main(["predict", str(model), "--input", str(data / "*"), "--output", f"{output}/", "--use_cpu"]) == 0
    return output


def test_bulk_output_contains_every_row_once_in_order(unbroken: Path, model: Path) -> None:
    rows = read_all(unbroken)
    assert [int(row["id"]) for row in rows] == list(range(240))
    expected = Predictor.load(model, use_cpu=True).predict([row["text"] for row in ROWS])
    assert [row["prediction"] for row in rows] == expected
    assert {"a-00005.parquet", "b-00000.csv", "c-00000.jsonl", "d-00000.jsonl"} <= contents(unbroken).keys()


def test_bulk_rerun_changes_nothing_and_refuses_other_options(
    unbroken: Path, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in unbroken.rglob("*.*") if p.name != ".lock"}
    command = ["predict", str(model), "--input", str(data / "*"), "--output", str(unbroken), "--use_cpu"]
    assert main(command) == 0
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert main([*command, "--top_k", "1"]) == 5
    assert "the folder belongs to a different job: top_k changed" in capsys.readouterr().err


@pytest.mark.parametrize("size", [0, 0.5])
def test_bulk_truncated_output_is_predicted_again(
    size: float, unbroken: Path, model: Path, data: Path, tmp_path: Path
) -> None:
    output = shutil.copytree(unbroken, tmp_path / "out")
    part = output / "b-00000.csv"
    os.truncate(part, int(part.stat().st_size * size))
    command = ["predict", str(model), "--input", str(data / "*"), "--output", str(output), "--use_cpu"]
    assert main(command) == 0
    assert contents(output) == contents(unbroken)


def test_bulk_input_changed_with_same_size_and_mtime_is_refused(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a good film"}\n')
    command = ["predict", str(model), "--input", str(file), "--output", f"{tmp_path / 'out'}/", "--use_cpu"]
    assert main(command) == 0
    before = file.stat()
    file.write_text('{"text": "a dull film"}\n')
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size
    assert main(command) == 5
    assert "inputs changed" in capsys.readouterr().err


def test_bulk_leftovers_and_damaged_lists_do_not_stop_a_resume(
    unbroken: Path, model: Path, data: Path, tmp_path: Path
) -> None:
    output = shutil.copytree(unbroken, tmp_path / "out")
    (output / ".tmp-b-00000.csv-123").write_text("half")
    lines = (output / "parts.jsonl").read_text().splitlines()
    (output / "parts.jsonl").write_text("\n".join(["{", "[]", *lines[1:], lines[0][:20]]))
    command = ["predict", str(model), "--input", str(data / "*"), "--output", str(output), "--use_cpu"]
    assert main(command) == 0
    assert contents(output) == contents(unbroken)


def test_large_row_groups_are_split_into_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "PART_ROWS", 25)
    pq.write_table(pa.Table.from_pylist(ROWS[:60]), tmp_path / "a.parquet", row_group_size=40)
    [file] = find_inputs(str(tmp_path / "a.parquet"))
    found = [(name, load().column("id").to_pylist()) for name, load in parts_of(file)]
    assert [(name, len(ids)) for name, ids in found] == [("a-00000", 25), ("a-00001", 15), ("a-00002", 20)]
    assert [i for _, ids in found for i in ids] == list(range(60))


def test_bulk_refuses_empty_texts_and_folders_with_other_files(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a film"}\n{"text": " "}\n')
    predictor = Predictor.load(model, use_cpu=True)
    job = BulkJob(find_inputs(str(file)), tmp_path / "out", ("text",), None)
    job.output.mkdir()
    with pytest.raises(DataError, match=r"x-00000\.jsonl, row 2: column 'text' is empty"):
        run_job(job, predictor)
    with pytest.raises(DataError, match="contains other files"):
        run_job(replace(job, output=tmp_path), predictor)
    assert not (tmp_path / ".lock").exists()
    for damaged in ("{", "", "[]"):
        (tmp_path / "out" / "job.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"cannot be read|a different job"):
            run_job(job, predictor)


def test_system_files_in_input_and_output_folders_are_ignored(model: Path, tmp_path: Path) -> None:
    for folder in (tmp_path / "in", tmp_path / "out"):
        folder.mkdir()
        for name in ("Thumbs.db", "desktop.ini", ".DS_Store"):
            (folder / name).write_bytes(b"\0")
    (tmp_path / "in" / "x.jsonl").write_text('{"text": "a film"}\n')
    assert main(["predict", str(model), "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "x-00000.jsonl").is_file()


def test_bulk_refuses_urls(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(model), "--input", "s3://bucket/*", "--output", "out/", "--use_cpu"]) == 2
    assert "--input doesn't accept a URL" in capsys.readouterr().err


def test_bulk_killed_and_resumed_equals_an_unbroken_job(
    unbroken: Path, model: Path, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    words = ["predict", str(model), "--input", str(data / "*"), "--output", f"{output}/", "--use_cpu"]
    code = "import time; from tunesmith.inference import bulk; from tunesmith.cli.main import main; old = bulk._predict_part\n"
    code += "def slow(*a):\n    time.sleep(0.05); return old(*a)\n"
    code += f"bulk._predict_part = slow; raise SystemExit(main({words!r}))"
    worker = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until = time.monotonic() + patient(120)
    while len(contents(output) if output.exists() else {}) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    assert 3 <= len(contents(output)) < len(contents(unbroken))
    assert main(words) == 0
    assert contents(output) == contents(unbroken)
