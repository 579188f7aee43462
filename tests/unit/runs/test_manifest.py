"""Folders with a checksum manifest are complete or absent."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tunesmith.errors import CheckpointError, ResourceError
from tunesmith.runs.folder import MANIFEST, delete_folder, publish_folder, read_manifest, remove_leftovers, verify


def fill(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"abc" * 1000)
    (folder / "b.json").write_text("{}")


def test_published_folder_verifies(tmp_path: Path) -> None:
    publish_folder(tmp_path / "x", fill, {"step": 7})
    manifest = verify(tmp_path / "x")
    assert manifest["step"] == 7
    assert set(manifest["files"]) == {"a.bin", "b.json"}
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("file", ["a.bin", "b.json", MANIFEST])
@pytest.mark.parametrize("damage", ["empty", "short", "flip", "delete"])
def test_every_damage_to_every_file_is_found(tmp_path: Path, file: str, damage: str) -> None:
    publish_folder(tmp_path / "x", fill, {"step": 7})
    path = tmp_path / "x" / file
    data = path.read_bytes()
    size = {"empty": 0, "short": len(data) - 1}
    if damage == "delete":
        path.unlink()
    elif damage == "flip":
        middle = len(data) // 2
        path.write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    else:
        path.write_bytes(data[: size[damage]])
    with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
        verify(tmp_path / "x")


def test_changed_manifest_that_parses_is_found(tmp_path: Path) -> None:
    publish_folder(tmp_path / "x", fill, {"step": 7})
    file = tmp_path / "x" / MANIFEST
    file.write_text(file.read_text().replace('"step": 7', '"step": 8'))
    with pytest.raises(CheckpointError, match="its own sha256 differs"):
        read_manifest(tmp_path / "x")


def test_leftovers_are_removed_and_a_folder_restored(tmp_path: Path) -> None:
    publish_folder(tmp_path / "model", fill, {"step": 1})
    os.rename(tmp_path / "model", tmp_path / ".tmp-old-model-123")
    (tmp_path / ".tmp-checkpoint-4-99").mkdir()
    (tmp_path / ".tmp-journal-x").write_text("cut")
    remove_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    assert verify(tmp_path / "model")["step"] == 1


def test_replaced_folder_keeps_user_files(tmp_path: Path) -> None:
    publish_folder(tmp_path / "model", fill, {"step": 1})
    (tmp_path / "model" / "notes").mkdir()
    (tmp_path / "model" / "notes" / "a.txt").write_text("mine")
    (tmp_path / "model" / "link").symlink_to("/etc")
    publish_folder(tmp_path / "model", fill, {"step": 2})
    assert verify(tmp_path / "model")["step"] == 2
    assert (tmp_path / "model" / "notes" / "a.txt").read_text() == "mine"
    assert os.readlink(tmp_path / "model" / "link") == "/etc"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_deleted_folder_keeps_user_files(tmp_path: Path) -> None:
    publish_folder(tmp_path / "x", fill, {})
    (tmp_path / "x" / "a.txt").write_text("mine")
    delete_folder(tmp_path / "x")
    assert (tmp_path / "x" / "a.txt").read_text() == "mine"


@pytest.mark.parametrize("manifest", [None, "{}", '{"files": []}'])
def test_folder_of_another_program_is_not_replaced(tmp_path: Path, manifest: str | None) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights.bin").write_text("mine")
    if manifest is not None:
        (tmp_path / "model" / MANIFEST).write_text(manifest)
    with pytest.raises(ResourceError, match="was not written by tunesmith"):
        publish_folder(tmp_path / "model", fill, {})
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(ResourceError, match="was not written by tunesmith"):
        publish_folder(tmp_path / "link", fill, {})
    assert (tmp_path / "model" / "weights.bin").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "model"]


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
def test_consistent_manifest_of_another_program_is_refused(tmp_path: Path, files: Any) -> None:
    body: dict[str, Any] = {"format": 1, "files": files}
    body["self"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (tmp_path / MANIFEST).write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match="which tunesmith does not write"):
        verify(tmp_path)
