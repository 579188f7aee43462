"""Which steps take the time of their launches: small batches of any model, larger ones of a narrow one; what fails in bf16."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from tunesmith.speedups.launches import is_launch_bound, why_not_half
from tunesmith.training.distributed import make_runtime


@pytest.mark.parametrize(("width", "tokens", "expected"), [(768, 500, True), (768, 5000, False), (384, 5000, True)])
def test_it_is_decided_by_tokens_and_the_size_of_matrices(width: int, tokens: int, expected: bool) -> None:
    config = BertConfig(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=2)
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
    assert is_launch_bound(model, tokens) is expected


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize(("kind", "fails"), [("deberta", True), ("bert", False)])
def test_a_model_that_fails_under_autocast_is_found_before_the_first_step(kind: str, fails: bool) -> None:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 9,
    }
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **sizes))
    reason = why_not_half(model, make_runtime(precision="bf16", use_cpu=True))
    assert "BFloat16" in reason if fails else reason is None, reason
    assert model.training
