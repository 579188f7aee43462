"""What a run leaves behind when memory runs out inside an update, and what its predictions say about cut rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim import adam

from tiny_model import sentences, write_csv
from tunesmith.data.cache import read_prediction_columns
from tunesmith.errors import ResourceError
from tunesmith.pipeline import results
from tunesmith.pipeline.watch import RunEnding


def files(folder: Path, extra: tuple[str, ...] = ()) -> dict[str, Any]:
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(40)]
    more = [{"text": text, "label": "good"} for text in extra]
    train, validation = write_csv(folder / "train.csv", rows), write_csv(folder / "validation.csv", rows[:6] + more)
    return {"train_file": train, "validation_file": validation}


def fail_in_step_3(train: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_memory_that_runs_out_in_the_second_group_ends_with_the_last_checkpoint_named_and_the_run_resumes_exactly(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**files(tmp_path), "save_strategy": "steps", "save_steps": 1, "weight_decay": 0.1, "max_steps": 4}
    options["recipe"] = "hf"  # two groups: with and without decay
    whole, _ = train(**options, output_dir=tmp_path / "whole")
    fail_in_step_3(train, options, monkeypatch)
    again, _ = train(**options)
    expected, got = (load_file(r.run.model / "model.safetensors") for r in (whole, again))
    assert all(torch.equal(expected[n], got[n]) for n in expected)


def test_a_row_of_exactly_the_longest_length_is_not_called_cut(train: Any, tmp_path: Path) -> None:
    exact, longer = "the film was very good .", "the film was very very good ."
    result, _ = train(**files(tmp_path, (exact, longer)), max_seq_length=8)
    found = read_prediction_columns(result.run.predictions_file)
    cut = dict(zip(found["text"], found["truncated"], strict=True))
    assert (cut[exact], cut[longer]) == (False, True)


@pytest.mark.parametrize("how", ["whole", "resumed", "changed"])
def test_the_best_evaluation_is_computed_again_for_the_scores_only_where_it_is_not_known(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    every = {
        f"{what}_{name}": value for what in ("eval", "save") for name, value in (("strategy", "steps"), ("steps", 1))
    }
    options = {**files(tmp_path), **every, "recipe": "hf", "weight_decay": 0.1}
    options["metric_for_best_model"] = "loss"  # which rises here
    whole, _ = train(**options, output_dir=tmp_path / "whole")
    assert whole.best_step in (1, 2), "before the step that fails below"
    calls: list[int] = []
    real = results.predict_rows
    monkeypatch.setattr(results, "predict_rows", lambda *args, **named: (calls.append(1), real(*args, **named))[1])
    if how == "resumed":
        fail_in_step_3(train, options, monkeypatch)
    change = RunEnding(change=lambda model: model.classifier.weight.data.zero_()) if how == "changed" else None
    again, _ = train(**options, ending=change)
    assert len(calls) == (0 if how == "whole" else 1)
    expected, got = (read_prediction_columns(run.run.predictions_file)["prob_good"] for run in (whole, again))
    assert (max(got) - min(got) < 1e-6) == (how == "changed")
    assert (got == pytest.approx(expected, abs=1e-6)) == (how != "changed")
