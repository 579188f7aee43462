"""Closed, full, broken or ASCII-only stdout and stderr, and launcher variables; in processes of commands that need no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tunesmith.cli.main import main
from tunesmith.errors import ConfigError
from tunesmith.runs.folder import Launch, read_launch


def shell(line: str, folder: Path, **environ: str) -> Any:
    """Run a line in a shell; $T is the tunesmith command."""
    environ = {**os.environ, "T": f"{sys.executable} -m tunesmith", **environ}
    return subprocess.run(["bash", "-c", line], cwd=folder, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("$T --help >&-", 0, ""),
        ("$T --help 2>&- >/dev/null", 0, ""),
        ("$T nope 2>&-", 2, ""),
        ("$T nope >&- 2>&- <&-", 2, ""),
        ("$T --help >/dev/full", 4, "No space left on device"),
        ("$T nope 2>/dev/full", 2, ""),
    ],
)
def test_unwritable_stream_exits_with_documented_code(line: str, code: int, said: str, tmp_path: Path) -> None:
    ended = shell(line, tmp_path)
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "Exception ignored" not in ended.stderr


def test_closed_pipe_prints_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "tunesmith", "--help"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_non_ascii_name_is_escaped_on_ascii_stream(tmp_path: Path) -> None:
    ended = shell("$T train --train_file n\u00f6.csv", tmp_path, PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert ended.returncode == 3, ended.stderr
    assert "n\\xf6.csv: no such file" in ended.stderr


def test_closed_stderr_does_not_write_into_run_files(tmp_path: Path) -> None:
    code = "from tunesmith.cli.main import prepare_streams; prepare_streams(); print(open('x', 'w').fileno() > 2)"
    assert shell(f'{sys.executable} -c "{code}" 2>&- <&-', tmp_path).stdout == "True\n"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "abc"}, "the variable RANK is 'abc'"),
        ({"RANK": "1"}, "RANK is 1 and WORLD_SIZE not set"),
        ({"RANK": "-1"}, "RANK is '-1'"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({"WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE 0"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK is 2 and WORLD_SIZE 2"),
    ],
)
def test_inconsistent_launcher_variables_exit_2(variables: dict[str, str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"torchrun or accelerate launch") as error:
        read_launch(variables)
    assert said in str(error.value)
    assert error.value.exit_code == 2


def test_no_launcher_is_rank_0_of_1() -> None:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert read_launch({}) == Launch(0, 1)
    assert read_launch({"RANK": "", "WORLD_SIZE": "1"}) == Launch(0, 1)
    assert read_launch({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **meeting}) == Launch(1, 2)


def test_half_a_surrogate_pair_in_a_json_key_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a", "label": "x", "\\ud800": 1}\n')
    run = ["--cache_dir", str(tmp_path), "--output_dir", str(tmp_path / "run")]
    assert main(["train", "--train_file", str(rows), *run]) == 3
    assert "rows.jsonl:1: the key '\\ud800' contains half of a surrogate pair" in capsys.readouterr().err
