"""The first day of a user: two commands that work, and ten errors, each reported in one line."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient
from read_predictions import read_predictions
from tiny_model import save_tiny_bert, sentences, write_csv
from tunesmith.cli.main import main


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a table, a model, and files with one error each."""
    folder = tmp_path_factory.mktemp("home")
    rows = [{"comment": text, "verdict": "good" if good else "bad"} for text, good in sentences(80)]
    save_tiny_bert(folder / "tiny")
    write_csv(folder / "comments.csv", rows)
    write_csv(folder / "one_label.csv", [row for row in rows if row["verdict"] == "good"])
    write_csv(folder / "validation.csv", [*rows[:6], {"comment": "so so", "verdict": "middling"}])
    (folder / "semicolons.csv").write_text("comment;verdict\nfine;good\npoor;bad\n" * 3, encoding="utf-8")
    (folder / "empty.csv").write_text("", encoding="utf-8")
    (folder / "not_a_model").mkdir()
    return folder


def tunesmith(home: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return a function that runs a command in the folder and returns exit code, stdout and stderr."""
    with contextlib.chdir(home):
        code = main(words)
    return code, *capsys.readouterr()


def test_two_commands_train_and_predict_string_labels(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = tunesmith(home, capsys, "train", "--train_file", "comments.csv", "--model_name_or_path", "tiny")
    assert code == 0, err
    assert "text 'comment'" in err
    assert "No validation data: 8 of 80 train rows held out" in err
    assert re.search(r"accuracy +\d\.\d{4} \[\d\.\d+, \d\.\d+\] n=8", out)
    assert "tunesmith predict runs/comments-tiny --input new.csv" in out
    assert "Warning" not in err
    write_csv(home / "new.csv", [{"comment": "the film was good"}, {"comment": "it was a dull day"}])
    words = ("predict", "runs/comments-tiny", "--input", "new.csv", "--output", "labeled.csv")
    assert tunesmith(home, capsys, *words)[0] == 0
    found = read_predictions(home / "labeled.csv")
    assert found["comment"] == ["the film was good", "it was a dull day"]
    assert set(found["prediction"]) <= {"good", "bad"}


TRAIN = ("train", "--model_name_or_path", "tiny", "--output_dir", "never", "--train_file")
WRONG = {
    "missing column": ((*TRAIN, "comments.csv", "--text_column_names", "coment"), 3, "Did you mean 'comment'?"),
    "typo in a flag": ((*TRAIN, "comments.csv", "--lerning_rate", "1"), 2, "Did you mean --learning_rate?"),
    "empty file": ((*TRAIN, "empty.csv"), 3, "empty.csv: the file is empty"),
    "one label": ((*TRAIN, "one_label.csv"), 3, "one_label.csv:2:verdict: all 40 rows have the one label 'good'"),
    "label only in validation": (
        (*TRAIN, "comments.csv", "--validation_file", "validation.csv"),
        3,
        "validation.csv:8:verdict: 'middling' is not one of bad, good",
    ),
    "no header": (
        (*TRAIN, "semicolons.csv"),
        3,
        "semicolons.csv:1: the file seems to have no header",
    ),
    "no such model": (
        ("train", "--output_dir", "never", "--train_file", "comments.csv", "--model_name_or_path", "some/modle"),
        4,
        "the model 'some/modle' is not (completely) on this machine",
    ),
    "unreadable model folder": (
        ("train", "--output_dir", "never", "--train_file", "comments.csv", "--model_name_or_path", "./not_a_model"),
        2,
        "has no model.safetensors",
    ),
    "unreadable run folder": (("predict", "not_a_model", "--input", "comments.csv"), 2, "not_a_model"),
    "no such file": ((*TRAIN, "coments.csv"), 3, "coments.csv: no such file"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_call_prints_one_line_and_exit_code(case: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, code, text = WRONG[case]
    found, out, err = tunesmith(home, capsys, *words)
    assert (found, out) == (code, "")
    assert err.startswith("tunesmith: error: ")
    assert err.count("\n") == 1, err
    assert text in err
    assert not (home / "never").exists(), "a run that cannot start leaves no files"


LIGHT = ("missing column", "one label", "no header", "unreadable run folder")
"""Wrong calls that are reported without importing torch."""
BROKEN_TORCH = """
import json, sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from tunesmith.cli.main import main

class Broken(MetaPathFinder, Loader):
    def find_spec(self, name, path, target=None):
        if name in ("torch", "transformers", "accelerate"):
            return ModuleSpec(name, self)

    def exec_module(self, module):
        raise ImportError(module.__name__)

sys.meta_path.insert(0, Broken())
print([main(words) for words in json.loads(sys.argv[1])])
"""


def test_wrong_table_is_reported_before_torch_import(home: Path) -> None:
    words = json.dumps([WRONG[case][0] for case in LIGHT])
    command = [sys.executable, "-c", BROKEN_TORCH, words]
    done = subprocess.run(command, cwd=home, capture_output=True, text=True, timeout=patient(120), check=False)
    assert done.stdout == f"{[WRONG[case][1] for case in LIGHT]}\n", done.stderr


def test_delimiter_suggested_by_error_works(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = tunesmith(home, capsys, "audit", "semicolons.csv", "--delimiter", "semicolon")
    assert code in (0, 3), err
    assert "delimiter" not in err
