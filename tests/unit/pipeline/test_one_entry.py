"""What is added in one file: a metric, an optimizer, a file format and a model family are one entry of one table each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from equivalence.strategy_cases import (
    RAGGED,
    gradients,
    largest_difference,
    make_labels,
    make_model,
    make_rows,
    pad_rows,
)
from tiny_model import sentences, write_csv
from tunesmith.config.options import OPTIMIZERS, list_options
from tunesmith.data.read import KINDS
from tunesmith.metrics import table as metric_table
from tunesmith.models.families import FAMILIES, why_not
from tunesmith.speedups.packing import enable_padding_free, pack


@pytest.fixture
def options_listed_again() -> Iterator[None]:
    """Options are listed once in a process, the choices of each among them."""
    list_options.cache_clear()
    yield
    list_options.cache_clear()


@pytest.mark.usefixtures("options_listed_again")
def test_a_metric_an_optimizer_and_a_file_format_are_one_entry_each(
    train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracy = next(m for m in metric_table.METRICS if m.name == "accuracy")
    new = replace(accuracy, name="share_right", aliases=("hit_rate",))
    monkeypatch.setattr(metric_table, "METRICS", (*metric_table.METRICS, new))
    monkeypatch.setitem(OPTIMIZERS, "sgd", ("torch.optim:SGD", {"momentum": 0.9}))
    monkeypatch.setitem(KINDS, ".rows", "csv")
    rows = [{"text": text, "label": "good" if good else "bad"} for text, good in sentences(60)]
    file = write_csv(tmp_path / "new.rows", rows)
    names = ("accuracy", "hit_rate")
    result, _ = train(
        train_file=file, optim="sgd", metric_name=names, metric_for_best_model="share_right", save_strategy="epoch"
    )
    scores = json.loads(result.run.metrics_file.read_text())["validation"]
    assert scores["share_right"] == scores["accuracy"]
    assert "share_right" in result.run.report_file.read_text()
    [state] = result.run.path.glob("checkpoint-*/optimizer.safetensors")
    assert any("momentum_buffer" in name for name in load_file(state))


def test_a_model_family_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, labels = make_model("ernie"), make_rows(RAGGED), make_labels(len(RAGGED))
    assert why_not(model) == "ernie does not fit, no description of its parts is known"
    loss, _, plain = gradients(model, pad_rows(rows, kind="bert"), labels)
    family = replace(FAMILIES["bert"], classifier="ErnieForSequenceClassification")
    monkeypatch.setitem(FAMILIES, "ernie", family)
    strategy = enable_padding_free(model)
    batch = pack(rows, first_position=strategy.first_position, keys=strategy.keys)
    ours_loss, _, ours = gradients(model, batch, labels)
    assert abs(loss - ours_loss) < 1e-6
    assert largest_difference(plain, ours) < 1e-5
