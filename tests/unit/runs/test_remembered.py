"""A file that was hashed before is read again as soon as anything about it changed; the memory itself cannot lie."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from tunesmith.runs import remembered
from tunesmith.runs.remembered import SMALL_BYTES, known_hash
from tunesmith.runs.writing import hash_file


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The files that were really read; all of them count as settled, as if two seconds had passed."""
    seen: list[Path] = []

    def spy(file: Path) -> str:
        seen.append(file)
        return hash_file(file)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remembered, "hash_file", spy)
    monkeypatch.setattr(remembered, "SETTLED_NS", -(10**12))
    return seen


def large(path: Path) -> Path:
    path.write_bytes(os.urandom(SMALL_BYTES + 5))
    return path


def entries(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "cache" / "tunesmith" / "hashes").iterdir())


def test_a_large_file_is_read_once_and_a_small_one_always(tmp_path: Path, reads: list[Path]) -> None:
    file, small = large(tmp_path / "large"), tmp_path / "small"
    small.write_bytes(b"x")
    for _ in range(3):
        assert known_hash(file) == hashlib.sha256(file.read_bytes()).hexdigest()
        assert known_hash(small) == hashlib.sha256(b"x").hexdigest()
    assert reads.count(file) == 1
    assert reads.count(small) == 3


@pytest.mark.parametrize("how", ["in place", "in place, mtime put back", "replaced, mtime put back", "link moved"])
def test_a_changed_file_is_read_again(how: str, tmp_path: Path, reads: list[Path]) -> None:
    file = large(tmp_path / "real")
    named = tmp_path / "link"
    named.symlink_to(file)
    before, times = known_hash(named), file.stat()
    data = bytearray(file.read_bytes())
    data[1000] ^= 4
    if how == "link moved":
        (tmp_path / "other").write_bytes(data)
        named.unlink()
        named.symlink_to(tmp_path / "other")
    elif how.startswith("replaced"):
        (tmp_path / "other").write_bytes(data)
        os.replace(tmp_path / "other", file)
    else:
        with file.open("r+b") as handle:
            handle.write(data)
    if "mtime" in how:
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert known_hash(named) == hashlib.sha256(data).hexdigest() != before


def test_a_file_that_was_just_written_is_not_remembered(
    tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "SETTLED_NS", 10**12)
    file = large(tmp_path / "large")
    known_hash(file)
    known_hash(file)
    assert reads == [file, file], "a second write within one tick of the clock would not be seen"
    ahead = time.time_ns() + 10**15
    monkeypatch.setattr(remembered, "SETTLED_NS", 0)
    os.utime(file, ns=(ahead, ahead))
    known_hash(file)
    known_hash(file)
    assert len(reads) == 4, "a file from the future is not settled either"


@pytest.mark.parametrize(
    "how", ["another hash", "garbage", "writable by others", "a link", "folder writable by others"]
)
def test_a_memory_that_others_could_have_written_is_not_believed(how: str, tmp_path: Path, reads: list[Path]) -> None:
    file = large(tmp_path / "large")
    right = known_hash(file)
    [entry] = entries(tmp_path)
    noted = json.loads(entry.read_text())
    if how == "another hash":
        entry.write_text(json.dumps({**noted, "sha256": "0" * 64}))
    elif how == "garbage":
        entry.write_text("[" * 5000)
    elif how == "writable by others":
        entry.chmod(0o666)
    elif how == "a link":
        entry.rename(tmp_path / "elsewhere")
        entry.symlink_to(tmp_path / "elsewhere")
    else:
        entry.parent.chmod(0o777)
    assert known_hash(file) == right
    assert len(reads) == 2


def test_a_memory_that_cannot_be_written_costs_time_alone(tmp_path: Path, reads: list[Path]) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    file = large(tmp_path / "large")
    assert known_hash(file) == known_hash(file)
    assert len(reads) == 2


def test_the_memory_is_bounded(tmp_path: Path, reads: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "MOST_ENTRIES", 3)
    for name in "abcde":
        known_hash(large(tmp_path / name))
    assert len(entries(tmp_path)) == 3
