"""Schedules equal transformers' at every step; learning rates by layer; launchers."""

from __future__ import annotations

import logging
from typing import Any, get_args

import pytest
import torch
from transformers import get_scheduler

from conftest import tiny_bert
from tunesmith.config.options import ScheduleName
from tunesmith.errors import ConfigError
from tunesmith.training.distributed import make_runtime
from tunesmith.training.optimizer import count_layers, depth_of, freeze, param_groups
from tunesmith.training.schedule import Schedule, epoch_ends_for, lr_at, warmup_steps_for
from tunesmith.training.state import BestSoFar


@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("kind", get_args(ScheduleName))
@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_schedule_equals_transformers_at_every_step(kind: str, warmup: int) -> None:
    total, peak = 53, 5e-5
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=peak)
    oracle = get_scheduler(kind, optimizer=optimizer, num_warmup_steps=warmup, num_training_steps=total)
    ours = Schedule(kind, peak, warmup, total)
    for step in range(total + 5):
        assert lr_at(step, ours) == pytest.approx(oracle.get_last_lr()[0], abs=1e-12 * peak, rel=1e-12)
        optimizer.step()
        oracle.step()


def test_unknown_schedule_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'linear'"):
        Schedule("liner", 1e-3, 0, 10)


def test_depth_of_each_architecture_is_known() -> None:
    assert depth_of("distilbert.transformer.layer.4.ffn.lin1.weight", 6) == 5
    assert depth_of("roberta.embeddings.LayerNorm.weight", 6) == 0
    assert depth_of("model.layers.3.mlp.Wi.weight", 6) == 4
    assert depth_of("classifier.out_proj.weight", 6) == 7


def test_layerwise_decay_shrinks_from_head_to_embeddings() -> None:
    model = tiny_bert(layers=3)
    assert count_layers(model) == 3
    scale = {n: g.lr_scale for g in param_groups(model, weight_decay=0.0, layerwise_lr_decay=0.5) for n in g.names}
    assert scale["classifier.weight"] == 1.0
    assert scale["bert.pooler.dense.weight"] == 1.0
    assert scale["bert.encoder.layer.2.output.dense.weight"] == 0.5
    assert scale["bert.encoder.layer.0.output.dense.weight"] == 0.125
    assert scale["bert.embeddings.word_embeddings.weight"] == 0.0625


@pytest.mark.parametrize(
    ("part", "text"), [("embedings", "Did you mean"), ("layers.7", "layers 0 to 1"), ("layers.2-1", "layers 0 to 1")]
)
def test_freeze_with_an_unknown_part_is_refused(part: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        freeze(tiny_bert(), (part,))


@pytest.mark.parametrize("name", ["DeepSpeed", "FSDP"])
def test_launcher_requesting_sharding_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    with pytest.raises(ConfigError, match=rf"the launcher requests {name}.*tunesmith.Trainer"):
        make_runtime(use_cpu=True)


def test_mixed_precision_of_the_launcher_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with caplog.at_level(logging.WARNING):
        assert make_runtime(use_cpu=True).precision == "no"
    assert "mixed precision (bf16) is not used" in caplog.text


def test_number_of_steps_equals_transformers() -> None:
    assert epoch_ends_for([459], max_steps=0, num_epochs=3) == (1377, (459, 918, 1377))
    assert epoch_ends_for([10], max_steps=25, num_epochs=1) == (25, (10, 20, 30))
    assert epoch_ends_for([10], max_steps=0, num_epochs=0.33)[0] == 4
    assert epoch_ends_for(lambda epoch: 10 + epoch, max_steps=35, num_epochs=1) == (35, (10, 21, 33, 46))
    for options in ({"max_steps": 10**12, "num_epochs": 3}, {"max_steps": 0, "num_epochs": 1e308}):
        with pytest.raises(ConfigError, match=r"epochs.*; the limit is 1000000"):
            epoch_ends_for([4], **options)
    assert (warmup_steps_for(0.1, 1377), warmup_steps_for(30, 1377)) == (138, 30)


@pytest.mark.parametrize(
    ("values", "greater", "best"),
    [
        ([0.5, 0.7, 0.7, 0.6], True, BestSoFar(0.7, 2, 2)),
        ([0.5, 0.4, 0.45], False, BestSoFar(0.4, 2, 1)),
        ([float("nan"), None, 0.3, float("inf")], True, BestSoFar(0.3, 3, 1)),
    ],
)
def test_best_metric_counts_evaluations_without_gain(values: Any, greater: bool, best: Any) -> None:
    progress = BestSoFar()
    for step, value in enumerate(values, 1):
        progress, _ = progress.updated(value, step, greater_is_better=greater)
    assert progress == best
