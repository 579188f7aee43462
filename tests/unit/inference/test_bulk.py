"""Bulk prediction: each row once and in place, the same after kills and with any number of processes."""

from __future__ import annotations

import csv
import gzip
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from patience import patient
from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith.cli.main import main
from tunesmith.errors import CheckpointError, DataError
from tunesmith.inference import places, units
from tunesmith.inference.facts import ModelFacts
from tunesmith.inference.places import SharedFolder, Store
from tunesmith.inference.predictor import Predictor
from tunesmith.inference.units import find_inputs, units_of
from tunesmith.inference.work import BulkJob, join_job, work_off
from tunesmith.labels import LabelMap
from warm import ENVIRONMENT, warm_python

ROWS = [{"id": i, "text": text} for i, (text, _) in enumerate(sentences(240, 3))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny_bert(tmp_path_factory.mktemp("model") / "tiny", labels=("bad", "good"))
    ModelFacts(LabelMap.for_classes(["bad", "good"]), ("text",), "label", 32).write(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four files of 60 rows: parquet of six row groups, csv, jsonl, gzipped jsonl."""
    folder = tmp_path_factory.mktemp("data")
    pq.write_table(pa.Table.from_pylist(ROWS[:60]), folder / "a.parquet", row_group_size=10)
    write_csv(folder / "b.csv", ROWS[60:120])
    lines = ["".join(json.dumps(row) + "\n" for row in ROWS[start : start + 60]) for start in (120, 180)]
    (folder / "c.jsonl").write_text(lines[0])
    (folder / "d.jsonl.gz").write_bytes(gzip.compress(lines[1].encode()))
    return folder


def read_all(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for file in sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix in (".parquet", ".csv", ".jsonl")):
        if file.suffix == ".parquet":
            rows += pq.read_table(file).to_pylist()
        elif file.suffix == ".csv":
            with file.open(newline="") as lines:
                rows += list(csv.DictReader(lines))
        else:
            rows += [json.loads(line) for line in file.read_text().splitlines()]
    return rows


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file() and not p.name.endswith(".lock") and p.name != "job.json")
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def make_job(data: Path, output: Path) -> BulkJob:
    return BulkJob(find_inputs(str(data / "*")), SharedFolder(output), ("text",), None, {})


@pytest.fixture(scope="module")
def unbroken(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of one process that is never disturbed."""
    output = tmp_path_factory.mktemp("unbroken") / "out"
    assert main(["predict", str(model), "--input", str(data / "*"), "--output", f"{output}/", "--use_cpu"]) == 0
    return output


def test_every_row_is_there_once_and_in_place_with_the_predictors_answer(unbroken: Path, model: Path) -> None:
    rows = read_all(unbroken)
    assert [int(row["id"]) for row in rows] == list(range(240))
    expected = Predictor.load(model, use_cpu=True).predict([row["text"] for row in ROWS])
    assert [row["prediction"] for row in rows] == expected
    assert {"a-00005.parquet", "b-00000.csv", "c-00000.jsonl", "d-00000.jsonl"} <= contents(unbroken).keys()


def test_the_same_command_again_does_nothing_and_another_job_is_refused(
    unbroken: Path, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.stat().st_mtime_ns for p in unbroken.rglob("*.*") if p.suffix != ".lock"}
    command = ["predict", str(model), "--input", str(data / "*"), "--output", str(unbroken), "--use_cpu"]
    assert main(command) == 0
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert main([*command, "--top_k", "1"]) == 5
    assert "the folder belongs to another job: top_k differ" in capsys.readouterr().err


def test_processes_share_the_threads_and_leave_claimed_units_to_each_other(
    data: Path, model: Path, tmp_path: Path
) -> None:
    job = make_job(data, tmp_path / "out")
    assert join_job(job, model, where="out", threads=3) == (False, 3)
    assert join_job(job, model, where="out", threads=1) == (True, 3), "bits depend on the threads: the first decides"
    with job.output.claimed("a-00000.parquet") as first, job.output.claimed("a-00000.parquet") as second:
        assert (first, second) == (True, False)
    with job.output.claimed("a-00000.parquet") as third:
        assert third


def test_text_files_are_cut_into_runs_of_the_same_rows_however_they_are_read(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "UNIT_ROWS", 25)
    [file] = find_inputs(str(data / "b.csv"))
    runs = [unit.load() for unit in units_of(file)]
    assert [len(run["id"]) for run in runs] == [25, 25, 10]
    assert [int(i) for run in runs for i in run["id"]] == list(range(60, 120))


def test_a_large_row_group_is_several_units_and_its_rows_stay_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "UNIT_ROWS", 25)
    pq.write_table(pa.Table.from_pylist(ROWS[:60]), tmp_path / "a.parquet", row_group_size=40)
    [file] = find_inputs(str(tmp_path / "a.parquet"))
    found = [(unit.name, unit.load().column("id").to_pylist()) for unit in units_of(file)]
    assert [(name, len(ids)) for name, ids in found] == [("a-00000", 25), ("a-00001", 15), ("a-00002", 20)]
    assert [i for _, ids in found for i in ids] == list(range(60))


def test_an_empty_text_and_a_foreign_folder_are_refused(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"text": "a film"}\n{"text": " "}\n')
    job = BulkJob(find_inputs(str(file)), SharedFolder(tmp_path / "out"), ("text",), None, {})
    join_job(job, model, where="out")
    with pytest.raises(DataError, match="x-00000, row 2: column 'text' is empty"):
        work_off(job, Predictor.load(model, use_cpu=True))
    with pytest.raises(DataError, match="holds other files"):
        join_job(BulkJob(job.inputs, SharedFolder(tmp_path), ("text",), None, {}), model, where=".")
    (tmp_path / "out" / "job.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        join_job(job, model, where="out")


def test_urls_of_fsspec_are_read_and_written_as_paths_are(
    unbroken: Path, model: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for file in data.iterdir():
        memory.pipe_file(f"/bucket/in/{file.name}", file.read_bytes())
    command = ["predict", str(model), "--input", "memory://bucket/in/*", "--output", "memory://bucket/out", "--use_cpu"]
    try:
        assert main(command) == 0
        found = {path.removeprefix("/bucket/out/"): memory.cat_file(path) for path in memory.find("/bucket/out")}
        assert found.pop("job.json")
        assert found == contents(unbroken)
        assert main(command) == 0
        assert "joins or resumes the job that is there" in capsys.readouterr().err
        memory.pipe_file("/bucket/in/b.csv", b"text\na film\n")
        assert main(command) == 5
        assert "inputs differ" in capsys.readouterr().err
        assert main([*command[:3], "nowhere://x/*", *command[4:]]) == 2
        assert "is not a URL that fsspec knows" in capsys.readouterr().err
    finally:
        memory.rm("/bucket", recursive=True)


def test_an_s3_bucket_is_read_and_written_as_a_folder_is(
    unbroken: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real client against a server on loopback, where both are installed: pip install s3fs 'moto[server]'."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    address = "http://{}:{}".format(*server.get_host_and_port())
    settings = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    import fsspec

    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": address})
    try:
        s3 = fsspec.filesystem("s3")
        s3.mkdir("bucket")
        for file in data.iterdir():
            s3.pipe_file(f"bucket/in/{file.name}", file.read_bytes())
        assert (
            main(["predict", str(model), "--input", "s3://bucket/in/*", "--output", "s3://bucket/out", "--use_cpu"])
            == 0
        )
        found = {path.removeprefix("bucket/out/"): s3.cat_file(path) for path in s3.find("bucket/out")}
    finally:
        server.stop()
    assert found.pop("job.json")
    assert found == contents(unbroken)


def test_a_claim_in_a_store_holds_while_its_process_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    monkeypatch.setattr(places, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(places, "LEASE_SECONDS", 0.4)
    mine, other = (Store(fsspec.filesystem("file"), str(tmp_path)) for _ in range(2))
    with mine.claimed("a/b.csv") as first:
        for _ in range(3):
            with other.claimed("a/b.csv") as second:
                assert (first, second) == (True, False)
            time.sleep(0.25)
    with other.claimed("a/b.csv") as third:
        assert third
    other.write(".claims/dead.csv", b"a process that was killed 3")
    with mine.claimed("dead.csv") as early:
        assert not early
    time.sleep(0.5)
    with mine.claimed("dead.csv") as late:
        assert late
    assert mine.names() == set()


def test_processes_that_are_killed_and_started_again_leave_the_output_of_one_unbroken_process(
    unbroken: Path, model: Path, data: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    words = ["predict", str(model), "--input", str(data / "*"), "--output", f"{output}/", "--use_cpu"]
    code = "import time; from tunesmith.inference import work; from tunesmith.cli.main import main; old = work.predict_unit\n"
    code += "def slow(*a):\n    time.sleep(0.05); return old(*a)\n"
    code += f"work.predict_unit = slow; raise SystemExit(main({words!r}))"
    command = [warm_python(), "-c", code]
    workers = [subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL) for _ in range(2)]
    until = time.monotonic() + patient(120)
    while len(contents(output) if output.exists() else {}) < 3 and time.monotonic() < until:
        time.sleep(0.02)
    for worker in workers:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    assert 3 <= len(contents(output)) < len(contents(unbroken))
    assert main(words) == 0
    assert contents(output) == contents(unbroken)
