"""Padded steps of encoders that no speed-up knows: few widths, never beyond the longest row, and only what a replay repeats."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from conftest import tiny_bert
from tunesmith.data.batches import Batch, Padding
from tunesmith.speedups.cuda_graphs import StepGraphs, bucketed, is_too_wide, no_host_randomness, why_not_captured

SIZES = {
    "vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip


def padded(*lengths: int, longest: int = 64) -> Batch:
    inputs = bucketed(Padding(), longest)({"input_ids": [np.arange(1, n + 1) for n in lengths]})
    return Batch(inputs, torch.zeros(len(lengths), dtype=torch.long), np.arange(len(lengths)), sum(lengths), 0)


def test_widths_are_few_and_end_with_the_longest_row() -> None:
    padding = bucketed(Padding(), 300)
    widths = {padding.width(n) for n in range(1, 301)}
    assert len(widths) <= 14
    assert max(widths) == 300
    assert all(n <= padding.width(n) <= n + 63 for n in range(1, 301))
    padding.switch.disable()
    assert padding.width(17) == 17


def test_a_batch_with_columns_that_no_row_reaches_is_known() -> None:
    assert is_too_wide(padded(5, 9))
    assert not is_too_wide(padded(5, 16))
    assert not is_too_wide(padded(5, 9, longest=9))


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random, lambda: np.random.rand()])
def test_a_step_that_draws_on_the_host_is_not_captured(draw: Any) -> None:
    with pytest.raises(RuntimeError, match="random numbers on the host"), no_host_randomness():
        draw()
    with no_host_randomness():
        torch.rand((), generator=torch.Generator())


def test_batches_of_one_width_share_a_capture_and_packed_steps_ask_for_a_layout() -> None:
    class Recorder(StepGraphs):
        captures = 0

        def _capture(self, batches: Any, body: Any) -> Any:
            self.captures += 1

    steps = Recorder(torch.device("cpu"), padded=True)
    for batch in (padded(5, 9), padded(16, 3), padded(7, 1)):
        steps.run((batch,), 0.1, 1.0, lambda *_: torch.zeros(3))
    assert steps.captures == 2
    others = Recorder(torch.device("cpu"))
    for _ in range(3):
        others.run((padded(5, 9),), 0.1, 1.0, lambda *_: torch.zeros(3))
    assert others.captures == 0


def test_only_models_that_are_transformers_own_are_captured() -> None:
    config = transformers.RoFormerConfig(**SIZES, embedding_size=16)
    model = transformers.RoFormerForSequenceClassification(config)
    assert why_not_captured(model) is None

    class Own(transformers.RoFormerForSequenceClassification):
        pass

    assert "may do on the host" in (why_not_captured(Own(config)) or "")
    handle = model.classifier.register_forward_hook(lambda *_: None)
    assert "hooks" in (why_not_captured(model) or "")
    handle.remove()
    bert = tiny_bert()
    bert.gradient_checkpointing_enable()
    assert "repeats layers" in (why_not_captured(bert) or "")
