"""Values come back as they were, with their types, from JSON and tensors."""

from __future__ import annotations

import json
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch

from tunesmith.errors import ConfigError
from tunesmith.training.serialization import from_bytes, from_plain, to_bytes, to_plain

VALUES: list[Any] = [
    None, True, 3, 2**70, -0.1, float("inf"), "text", [1, (2, [3.5])], (), {1: "a", (2, "b"): {"c": None}}, {"__kind__": 1},
    Counter({3: 1, 8: 2}), {4, 5}, deque([1, 2]), torch.float16, np.float32(0.1), np.int64(7), {"a:b": {"c": 1}},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    for back in (from_plain(json.loads(json.dumps(to_plain(value, "x")))), from_bytes(to_bytes(value))):
        assert back == value
        assert type(back) is type(value)


def test_tensors_and_arrays_come_back_bit_for_bit_inline_and_aside() -> None:
    numbers = torch.tensor([0.1, float("nan"), -0.0, 1e-42])
    value = {
        "c": {"a:b": numbers, "rest": [numbers.to(torch.bfloat16), torch.tensor(3)]},
        "b:c": {"a": torch.arange(6).view(2, 3)},
        "array": np.array([[1.5, np.inf]], dtype=np.float16),
        "none": np.zeros((0, 3)),
    }
    sent = from_bytes(to_bytes(value))
    written = from_plain(json.loads(json.dumps(to_plain(value, "x"))))
    for back in (sent, written):
        assert back["c"]["a:b"].view(torch.int32).tolist() == numbers.view(torch.int32).tolist()
        assert back["c"]["rest"][0].dtype == torch.bfloat16
        assert torch.equal(back["b:c"]["a"], value["b:c"]["a"])
        assert back["array"].dtype == np.float16
        assert back["array"].tolist() == [[1.5, np.inf]]
    assert sent["none"].shape == (0, 3)


def test_what_has_no_place_in_json_is_named() -> None:
    with pytest.raises(ConfigError, match="inner:outer is a object"):
        to_plain({"inner": object()}, "outer")
