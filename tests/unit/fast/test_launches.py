"""Which steps take the time of their launches: small batches of any model, larger ones of a narrow model."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification

from tunesmith.fast.launches import is_launch_bound


@pytest.mark.parametrize(("width", "tokens", "expected"), [(768, 500, True), (768, 5000, False), (384, 5000, True)])
def test_it_is_decided_by_tokens_and_the_size_of_matrices(width: int, tokens: int, expected: bool) -> None:
    config = BertConfig(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=2)
    with torch.device("meta"):
        model = BertForSequenceClassification(config)
    assert is_launch_bound(model, tokens) is expected
