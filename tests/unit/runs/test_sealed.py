"""Sealed folders: there and whole, or not there; locks and small files."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tunesmith.errors import CheckpointError, ResourceError
from tunesmith.runs.lock import RunLock
from tunesmith.runs.manifest import MANIFEST, read_manifest, require_space, retire, sweep, verify, write_sealed
from tunesmith.runs.writing import disk_error, write_file


def fill(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"abc" * 1000)
    (folder / "b.json").write_text("{}")


def test_a_sealed_folder_verifies_and_keeps_what_it_was_told(tmp_path: Path) -> None:
    write_sealed(tmp_path / "x", fill, {"step": 7})
    manifest = verify(tmp_path / "x")
    assert manifest["step"] == 7
    assert set(manifest["files"]) == {"a.bin", "b.json"}
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("file", ["a.bin", "b.json", MANIFEST])
@pytest.mark.parametrize("damage", ["empty", "one", "half", "short", "flip", "delete"])
def test_every_damage_to_every_file_is_seen(tmp_path: Path, file: str, damage: str) -> None:
    write_sealed(tmp_path / "x", fill, {"step": 7})
    path = tmp_path / "x" / file
    data = path.read_bytes()
    size = {"empty": 0, "one": 1, "half": len(data) // 2, "short": len(data) - 1}
    if damage == "delete":
        path.unlink()
    elif damage == "flip":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    else:
        path.write_bytes(data[: size[damage]])
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        verify(tmp_path / "x")


def test_a_changed_word_in_the_manifest_is_seen_even_when_it_still_parses(tmp_path: Path) -> None:
    write_sealed(tmp_path / "x", fill, {"step": 7})
    file = tmp_path / "x" / MANIFEST
    file.write_text(file.read_text().replace('"step": 7', '"step": 8'))
    with pytest.raises(CheckpointError, match="its own hash differs"):
        read_manifest(tmp_path / "x")


def test_a_failed_save_leaves_what_was_there_and_nothing_beside_it(tmp_path: Path) -> None:
    write_sealed(tmp_path / "x", fill, {"step": 1})

    def fail(folder: Path) -> None:
        fill(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(ResourceError, match="No space left on device") as caught:
        write_sealed(tmp_path / "x", fail, {"step": 2}, bytes_needed=5_000_000)
    assert "5.0 MB needed" in str(caught.value)
    assert verify(tmp_path / "x")["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_checkpoints_are_called_intact_only_where_there_are_some(tmp_path: Path) -> None:
    error = OSError(28, "No space left on device")
    assert "intact" not in disk_error(error, tmp_path / "new").line()
    (tmp_path / "checkpoint-4").mkdir()
    assert "Earlier checkpoints are intact" in disk_error(error, tmp_path / "checkpoint-6").line()


def test_a_folder_is_replaced_by_a_newer_one(tmp_path: Path) -> None:
    write_sealed(tmp_path / "x", fill, {"step": 1})
    write_sealed(tmp_path / "x", fill, {"step": 2})
    assert verify(tmp_path / "x")["step"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_sweep_removes_debris_and_brings_back_what_its_successor_never_replaced(tmp_path: Path) -> None:
    write_sealed(tmp_path / "best", fill, {"step": 1})
    os.rename(tmp_path / "best", tmp_path / ".tmp-old-best-123")
    (tmp_path / ".tmp-checkpoint-4-99").mkdir()
    (tmp_path / ".tmp-journal-x").write_text("cut")
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["best"]
    assert verify(tmp_path / "best")["step"] == 1


def test_a_retired_folder_is_gone(tmp_path: Path) -> None:
    write_sealed(tmp_path / "x", fill, {})
    retire(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="MB are free"):
        require_space(tmp_path, 10**18)
    with pytest.raises(ResourceError, match="MB are free"):
        write_sealed(tmp_path / "x", fill, {}, bytes_needed=10**18)
    assert list(tmp_path.iterdir()) == []


def test_a_small_file_is_replaced_whole(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    write_file(file, b"one")
    write_file(file, json.dumps({"two": 2}).encode())
    assert json.loads(file.read_bytes()) == {"two": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]


def test_a_second_process_is_told_who_holds_the_run_and_a_dead_holder_blocks_nobody(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tunesmith.runs.lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1])); lock.__enter__(); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / ".lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ResourceError, match=f"process {holder.pid} on "):
        RunLock(tmp_path / ".lock").__enter__()
    holder.kill()
    holder.communicate()
    with RunLock(tmp_path / ".lock"):
        pass


def test_what_a_person_put_into_a_folder_is_carried_into_its_successor(tmp_path: Path) -> None:
    write_sealed(tmp_path / "best", fill, {"step": 1})
    (tmp_path / "best" / "notes").mkdir()
    (tmp_path / "best" / "notes" / "a.txt").write_text("mine")
    (tmp_path / "best" / "link").symlink_to("/etc")
    write_sealed(tmp_path / "best", fill, {"step": 2})
    assert verify(tmp_path / "best")["step"] == 2
    assert (tmp_path / "best" / "notes" / "a.txt").read_text() == "mine"
    assert os.readlink(tmp_path / "best" / "link") == "/etc"
    assert [p.name for p in tmp_path.iterdir()] == ["best"]


def test_a_kill_before_that_loses_nothing_either(tmp_path: Path) -> None:
    write_sealed(tmp_path / "best", fill, {"step": 1})
    (tmp_path / "best" / "a.txt").write_text("mine")
    os.rename(tmp_path / "best", tmp_path / ".tmp-old-best-123")
    write_sealed(tmp_path / "best", fill, {"step": 2})
    sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["best"]
    assert (tmp_path / "best" / "a.txt").read_text() == "mine"


def test_a_folder_with_something_of_a_persons_is_not_retired(tmp_path: Path) -> None:
    write_sealed(tmp_path / "x", fill, {})
    (tmp_path / "x" / "a.txt").write_text("mine")
    retire(tmp_path / "x")
    assert (tmp_path / "x" / "a.txt").read_text() == "mine"


@pytest.mark.parametrize("manifest", [None, "{}", '{"files": []}'])
def test_a_folder_that_we_did_not_write_is_not_replaced(tmp_path: Path, manifest: str | None) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_text("mine")
    if manifest is not None:
        (tmp_path / "model" / MANIFEST).write_text(manifest)
    with pytest.raises(ResourceError, match="was not written by tunesmith"):
        write_sealed(tmp_path / "model", fill, {})
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(ResourceError, match="was not written by tunesmith"):
        write_sealed(tmp_path / "link", fill, {})
    assert (tmp_path / "model" / "weights.bin").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "model"]


def test_a_sweep_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in (".tmp-old-best-1", ".tmp-checkpoint-4-9"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    assert sweep(tmp_path) == []
    assert (tmp_path / "mine").is_dir()
    assert not (tmp_path / "best").exists()


@pytest.mark.parametrize(
    "files",
    [
        {"a.bin": 3},
        {"a.bin": {"size": "3", "sha256": "x"}},
        {"a.bin": {"size": 3}},
        {"../a.bin": {"size": 3, "sha256": "x"}},
        {"/etc/passwd": {"size": 3, "sha256": "x"}},
        {"a\0": {"size": 3, "sha256": "x"}},
    ],
    ids=["no entry", "size is a text", "no hash", "outside", "absolute", "zero"],
)
def test_a_manifest_that_agrees_with_itself_and_is_not_ours_is_refused(tmp_path: Path, files: Any) -> None:
    body: dict[str, Any] = {"format": 1, "files": files}
    body["self"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (tmp_path / MANIFEST).write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="which we do not write"):
        verify(tmp_path)
