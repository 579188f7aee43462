"""A run's JSON files as a stranger may have written them: refused with the file's name, or read with every value of its type."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tunesmith.errors import CheckpointError
from tunesmith.files import BadFile, open_plain, parse_json
from tunesmith.runs.folder import read_environment, read_metrics, read_summary

DAMAGED = {
    "nested": "[" * 100_000,
    "nested objects": '{"a":' * 2000 + "1" + "}" * 2000,
    "400 digits": '{"rows": {"train": ' + "1" * 400 + "}}",
    "not JSON": '{"rows": +-e}',
    "a list": "[1]",
    "text for a count": '{"rows": {"train": "many"}}',
    "a truth for a count": '{"rows": {"train": true}}',
    "below 0": '{"label_counts": {"train": {"a": -1}}}',
    "a count for a split": '{"label_counts": {"train": 3}}',
    "names that are numbers": '{"labels": [1, 2]}',
    "a cut that is a text": '{"truncation": {"train": {"rows_cut": "x"}}}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_summary_is_named(tmp_path: Path, name: str) -> None:
    file = tmp_path / "data_summary.json"
    file.write_text(DAMAGED[name])
    with pytest.raises(CheckpointError, match=r"data_summary\.json: ") as caught:
        read_summary(file)
    assert len(str(caught.value)) < 400


def test_what_is_absent_is_empty_and_what_is_new_is_kept(tmp_path: Path) -> None:
    assert read_environment(tmp_path / "environment.json") == {}
    (tmp_path / "data_summary.json").write_text('{"task": null, "rows": {"train": 3}, "of tomorrow": [[1]]}')
    assert read_summary(tmp_path / "data_summary.json")["of tomorrow"] == [[1]]
    (tmp_path / "metrics.json").write_text('{"test": {"f1": {"value": NaN, "low": -Infinity}}}')
    assert read_metrics(tmp_path / "metrics.json") == {"test": {"f1": {"value": None, "low": None}}}


def test_half_a_character_can_be_printed() -> None:
    assert parse_json(b'{"a\\ud800": "\\uDC00 \\ud83d\\ude00"}') == {"a?": "? \U0001f600"}
    assert parse_json(b'"\\ud800"', mend=False) == "\ud800"


def test_only_plain_files_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the name of a socket may have 107 bytes
    os.mkfifo("pipe")
    Path("folder").mkdir()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    Path("plain").write_text("x")
    Path("link").symlink_to("plain")
    Path("nowhere").symlink_to("absent")
    Path("device").symlink_to("/dev/null")
    for name in ("pipe", "folder", "socket", "link", "nowhere", "device", "a\0b"):
        with pytest.raises(BadFile):
            open_plain(name)
    with open_plain("link", follow=True) as file:
        assert file.read() == b"x"
    with pytest.raises(FileNotFoundError):
        open_plain("absent")
