"""What a run leaves behind when memory runs out inside an update, and what its predictions say about cut rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import adam

from tiny_model import sentences, write_csv
from tunesmith.errors import ResourceError
from tunesmith.reading.row_cache import read_prediction_columns


def files(folder: Path, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(40)]
    more = [{"text": text, "label": "good"} for text in extra]
    train, validation = write_csv(folder / "train.csv", rows), write_csv(folder / "validation.csv", rows[:6] + more)
    return {"train_file": train, "validation_file": validation}


def test_memory_that_runs_out_in_the_second_group_ends_with_the_last_checkpoint_named_and_the_run_resumes_exactly(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**files(tmp_path), "save_strategy": "steps", "save_steps": 1, "weight_decay": 0.1, "max_steps": 4}
    options["recipe"] = "hf"  # two groups: with and without decay
    whole, _ = train(**options, output_dir=tmp_path / "whole")
    real, calls = adam.adam, [0]

    def fail(*args: Any, **kwargs: Any) -> None:
        calls[0] += 1
        if calls[0] == 6:  # the second group of step 3
            raise torch.OutOfMemoryError("no memory, as the test asked")
        real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(adam, "adam", fail)
        with pytest.raises(ResourceError, match=r"update of step 3.*last checkpoint: checkpoint-2"):
            train(**options)
    again, _ = train(**options)
    expected, got = (load_file(r.run.model / "model.safetensors") for r in (whole, again))
    assert all(torch.equal(expected[n], got[n]) for n in expected)


def test_a_row_of_exactly_the_longest_length_is_not_called_cut(train: Any, tmp_path: Path) -> None:
    exact, longer = "the film was very good .", "the film was very very good ."
    result, _ = train(**files(tmp_path, (exact, longer)), max_seq_length=8)
    found = read_prediction_columns(result.run.predictions_file)
    cut = dict(zip(found["text"], found["truncated"], strict=True))
    assert (cut[exact], cut[longer]) == (False, True)


def test_the_journal_is_parsed_and_diagnosed_once_at_the_end_of_a_run(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tunesmith.curves import series
    from tunesmith.report import diagnosis
    from tunesmith.run import journal, reader

    calls: dict[str, int] = {}

    def count(module: Any, name: str) -> None:
        real = getattr(module, name)

        def counted(*args: Any, **options: Any) -> Any:
            calls[name] = calls.get(name, 0) + 1
            return real(*args, **options)

        monkeypatch.setattr(module, name, counted)

    count(series, "read_columns")
    count(series, "build_curves")
    count(diagnosis, "judge_reading")
    count(journal, "read_bytes")
    count(reader, "read_bytes")
    result, _ = train(**files(tmp_path), max_steps=2)
    assert result.run.report_file.is_file()
    assert result.run.curves_png.is_file()
    assert calls == {"read_columns": 1, "build_curves": 1, "judge_reading": 1, "read_bytes": 1}
