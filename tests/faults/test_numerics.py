"""Rows 16 and 17: NaN and infinity stop the run and are reported; out of memory splits the batch without changing results."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from faults.trials import clean, engine, intact_checkpoints, lasting
from tunesmith.events import MicroBatchSplit, NonFinite, StepDone
from tunesmith.runs.event_log import read_journal
from tunesmith.runs.folder import RunDir


@pytest.mark.parametrize(
    ("fault", "names", "background"),
    [
        ("nan_gradient:5", "gradient bert.encoder.layer.1.output.dense.weight is NaN or infinite", True),
        ("nan_output:5", "output bert.pooler.activation is NaN or infinite", False),
    ],
)
def test_nan_stops_the_run_and_is_named(bench: Any, folder: Path, fault: str, names: str, background: bool) -> None:
    ended = engine(folder, fault=fault, options={"background": background})
    assert ended.code == 6, ended.log
    assert "step 5: " in ended.last_line
    assert names in ended.last_line
    assert "last good checkpoint: checkpoint-4" in ended.last_line
    events = read_journal(RunDir(folder).journal_file)
    bad = next(e for e in events if isinstance(e, NonFinite))
    assert bad.step == 5
    assert len(bad.rows) == 4
    assert all(f"{row}" in ended.last_line for row in bad.rows)
    fifth = next(e for e in events if isinstance(e, StepDone) and e.step == 5)
    assert fifth.grad_norm is None, "the event log must contain null, not a number"
    assert intact_checkpoints(folder) == [4]
    assert_finite(folder)
    bench.same_as_whole(folder)


def test_weights_that_overflow_are_never_saved(bench: Any, folder: Path) -> None:
    ended = engine(folder, fault="nan_weight:6")
    assert ended.code == 6, ended.log
    assert "step 6: weight classifier.weight is NaN or infinite" in ended.last_line
    assert intact_checkpoints(folder) == [4]
    assert_finite(folder)
    bench.same_as_whole(folder)


def test_exploding_learning_rate_exits_with_6(lab: Any, run_folder: Path) -> None:
    ended = lab.train(run_folder, "--learning_rate", "1e30")
    assert ended.code == 6, ended.log[-1500:]
    assert_finite(run_folder)
    assert not RunDir(run_folder).model.exists()


def test_nan_in_base_weights_is_refused(lab: Any, run_folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(lab.root / "model", model)
    tensors = load_file(model / "model.safetensors")
    tensors["bert.pooler.dense.bias"] = np.full_like(tensors["bert.pooler.dense.bias"], np.nan)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    ended = lab.train(run_folder, "--model_name_or_path", str(model))
    assert ended.code == 6, ended.log
    assert "bert.pooler.dense.bias" in ended.last_line
    assert not RunDir(run_folder).checkpoints()


def test_ignored_labels_stop_the_run(bench: Any, folder: Path) -> None:
    ended = engine(folder, options={"ignore_labels": True})
    assert ended.code == 6, ended.log
    assert "step 1: loss no labeled row in the batch is NaN or infinite" in ended.last_line


def assert_finite(folder: Path) -> None:
    for file in folder.rglob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert np.isfinite(tensor.astype("float64")).all(), f"{file}: {name}"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_out_of_memory_splits_the_batch(bench: Any, folder: Path, where: str) -> None:
    ended = engine(folder, fault=f"oom:{where}:1")
    assert ended.code == 0, ended.log
    run = RunDir(folder)
    events = read_journal(run.journal_file)
    splits = [(e.step, e.rows_before, e.rows_after) for e in events if isinstance(e, MicroBatchSplit)]
    assert splits == [(1, 4, 1)], "reported once, then remembered"
    assert json.loads((run.checkpoint(24) / "state.json").read_text())["rows_limit"] == 1
    mine = [e for e in lasting(run) if e["event"] == "StepDone"]
    theirs = [e for e in bench.whole["journal"] if e["event"] == "StepDone"]
    assert [(e["step"], e["examples"], e["tokens"], e["learning_rate"]) for e in mine] == [
        (e["step"], e["examples"], e["tokens"], e["learning_rate"]) for e in theirs
    ]


def test_split_gradient_equals_the_unsplit_one(bench: Any, folder: Path) -> None:
    """Without dropout (its masks follow the shape of a batch) the first step's loss and gradient norm agree to 1e-6."""
    options = {"dropout": 0.0, "evaluate_every": 24, "save_every": 24}
    assert engine(folder, options=options).code == 0
    whole = [e for e in lasting(RunDir(folder)) if e["event"] == "StepDone"]
    clean(folder)
    assert engine(folder, fault="oom:forward:1", options=options).code == 0
    split = [e for e in lasting(RunDir(folder)) if e["event"] == "StepDone"]
    assert abs(whole[0]["loss"] - split[0]["loss"]) < 1e-6
    assert abs(whole[0]["grad_norm"] - split[0]["grad_norm"]) < 1e-6
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(whole, split, strict=True)) < 1e-4


def test_out_of_memory_in_evaluation_changes_nothing(bench: Any, folder: Path) -> None:
    ended = engine(folder, fault="oom:evaluate:3")
    assert ended.code == 0, ended.log
    mine = [e for e in lasting(RunDir(folder)) if e["event"] == "StepDone"]
    assert mine == [e for e in bench.whole["journal"] if e["event"] == "StepDone"]


def test_kill_after_a_split_resumes_with_the_split(bench: Any, folder: Path) -> None:
    ended = engine(folder, fault="oom:forward:2")
    whole = lasting(RunDir(folder))
    clean(folder)
    engine(folder, fault="oom:forward:2", env={"TUNESMITH_FAULT": "step.end:kill:7"})
    ended = engine(folder, fault="oom:forward:2")
    assert ended.code == 0
    assert lasting(RunDir(folder)) == whole
    splits = [e for e in read_journal(RunDir(folder).journal_file) if isinstance(e, MicroBatchSplit)]
    assert len(splits) == 1


def test_example_that_does_not_fit_exits_with_4(bench: Any, folder: Path) -> None:
    ended = engine(folder, fault="oom:forward:0")
    assert ended.code == 4, ended.log
    assert "out of memory at step 1 with a micro-batch size of 1" in ended.last_line
