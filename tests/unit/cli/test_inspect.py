from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tunesmith.cli.main import main

WORDS = ["the", "cat", "sat", "on", "mat", "a", "dog", "ran", "home", "##s"]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    model = tmp_path / "tiny"
    model.mkdir()
    (model / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    (model / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (model / "config.json").write_text(
        json.dumps({"model_type": "bert", "vocab_size": 15, "max_position_embeddings": 12})
    )
    rows = ["sentence1,sentence2,label"]
    rows += [
        f"the cats sat on the mat{' home' * (i % 9)},a dog ran home {'x' * (i + 1)},{'yes' if i % 2 else 'no'}"
        for i in range(40)
    ]
    data = tmp_path / "pairs.csv"
    data.write_text("\n".join(rows) + "\n")
    return str(data), str(model)


def inspect(files: tuple[str, str], *more: str, cache: Path) -> int:
    data, model = files
    words = ["inspect", "--train_file", data, "--model_name_or_path", model, "--cache_dir", str(cache), *more]
    return main(words)


def test_a_person_sees_tokens_lengths_cuts_and_padding(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = inspect(
        files, "--rows", "0,1", "--validation_split_fraction", "0", "--batch_size", "4", cache=tmp_path / "c"
    )
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "40 rows; pairs of texts from sentence1 + sentence2" in out
    assert "binary: no, yes" in out
    assert "rows of at most 12" in out
    assert "label: no (0)" in out
    table = [line.split() for line in out.splitlines() if re.match(r"  (token|id|type|mask) ", line)]
    assert table[0][:5] == ["token", "[CLS]", "the", "cat", "##s"]
    assert table[1][:5] == ["id", "2", "5", "6", "14"]
    assert set(table[3][1:]) == {"1"}
    assert {len(line) for line in table[:4]} == {13}
    assert "more were cut" in out
    assert re.search(r"train: 40 of 40 rows \(100.0%\) were truncated to 12 tokens", out)
    assert "padding in batches of 4" in out
    assert "every row padded to 12" in out
    assert "0.0% of 480 places" in out


def test_shorter_rows_show_their_padding(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    single = tmp_path / "single.csv"
    single.write_text("text,label\nthe cat sat on the mat,a\na dog,b\n")
    code = inspect((str(single), files[1]), "--rows", "0,1", "--validation_split_fraction", "0", cache=tmp_path / "c")
    out, err = capsys.readouterr()
    assert code == 0, err
    assert "[PAD] x4" in out
    assert "train: no row is longer than 12 tokens" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rows", "0,x"], "is not a list of row numbers"),
        (["--rows", "99"], "train has rows 0 to"),
        (["--split", "dev"], "there is no split 'dev'"),
        (["--batch_size", "0"], "is not a positive number"),
    ],
)
def test_wrong_flags_are_one_line_and_exit_code_2(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert inspect(files, *flags, cache=tmp_path / "c") == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.strip().splitlines()) == 1
