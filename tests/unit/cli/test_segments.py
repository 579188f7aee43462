"""A tokenizer that doesn't match its model is reported before anything is computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_model import save_tiny_bert, write_csv
from tunesmith.cli.main import main


@pytest.mark.parametrize("verb", ["train", "predict"])
def test_missing_segment_embedding_is_reported(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:

    model = save_tiny_bert(tmp_path / "model", labels=("0", "1") if verb == "predict" else None, type_vocab_size=1)
    rows = [{"sentence1": f"the film {i}", "sentence2": f"a book {i}", "label": i % 2} for i in range(20)]
    table = str(write_csv(tmp_path / "pairs.csv", rows))
    words = {
        "train": [
            "train",
            "--train_file",
            table,
            "--model_name_or_path",
            str(model),
            "--output_dir",
            f"{tmp_path}/run",
        ],
        "predict": ["predict", str(model), "--input", table, "--text_column_names", "sentence1,sentence2"],
    }
    assert main([*words[verb], *(["--output", f"{tmp_path}/out.csv"] if verb == "predict" else [])]) == 2
    assert "segment 1 to the second text, but the model has type_vocab_size 1" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()
