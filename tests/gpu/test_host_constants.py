"""A captured step with values that it copies from the host: the numbers of the plain step, for every batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch

from tunesmith.data.batches import Batch
from tunesmith.speedups.graphs import StepGraphs

CUDA = torch.device("cuda", 0)
Copies = Callable[[torch.Tensor], torch.Tensor]


def make_batch(seed: int) -> Batch:
    given = torch.from_numpy(np.random.default_rng(seed).normal(size=(4, 3)).astype(np.float32))
    return Batch({"input_ids": given}, torch.arange(4), np.arange(4), 12, 12)


def train(copies: Copies, graphs: StepGraphs, steps: int = 8) -> list[float]:
    """The sum of each step; steps that are not replayed run as they are."""

    def body(batches: Any, *_: Any) -> torch.Tensor:
        given = batches[0].inputs["input_ids"].to(CUDA)
        with graphs.around_forward():
            return torch.stack([copies(given).double().sum().float()] * 3)

    found = []
    for seed in range(steps):
        torch.manual_seed(seed)
        numbers = graphs.run((make_batch(seed),), 0.1, 1.0, body)
        if numbers is None:
            torch.manual_seed(seed)
            numbers = body([make_batch(seed)])
        found.append(float(numbers[0]))
    return found


def written_into(given: torch.Tensor) -> torch.Tensor:
    made = torch.tensor([1.0, 2.0, 3.0], device=given.device)
    made *= given[0]
    return made


CONSTANTS: dict[str, Copies] = {
    "tensor": lambda given: given * torch.tensor([1.0, 2.0, 3.0], device=given.device),
    "as_tensor": lambda given: given + torch.as_tensor(np.arange(3.0), device="cuda"),
    "new_tensor": lambda given: given * given.new_tensor([0.5, 0.25, 2.0]),
    "to": lambda given: given @ -torch.eye(3).to(given),
    "to, with a dtype": lambda given: given + torch.arange(3).to(device="cuda", dtype=torch.bfloat16),
    "to, of another order": lambda given: given @ torch.arange(9.0).reshape(3, 3).t().to(given.device),
    "where": lambda given: torch.where(given > 0, torch.tensor(-2.0), given),
    "an index": lambda given: given[torch.tensor([2, 0])],
    "a list of positions": lambda given: given[..., [-2]],
    "copy_": lambda given: given * torch.empty_like(given).copy_(torch.arange(12.0).reshape(4, 3)),
    "written into": written_into,
}


def in_a_capture(given: torch.Tensor) -> torch.Tensor:
    """As transformers makes a mask in a capture, where a batch without padding needs none."""
    if torch.cuda.is_current_stream_capturing():
        given = given + torch.tensor([0.0, 0.0, 0.0], device=given.device)
    return torch.nn.functional.dropout(given, 0.5)  # of the generator that replaces the one of the broken capture


CONSTANTS["in a capture alone"] = in_a_capture


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_captured(name: str) -> None:
    plain, graphs = StepGraphs(CUDA, padded=True), StepGraphs(CUDA, padded=True)
    plain.off = True
    assert train(CONSTANTS[name], graphs) == train(CONSTANTS[name], plain)
    assert len(graphs) == 1
    assert not graphs.off
    graphs.close()
    assert len(graphs._constants) == 0


def counted(numbers: Iterator[int]) -> Copies:
    return lambda given: given + torch.tensor([float(next(numbers))] * 3, device=given.device)


def read(given: torch.Tensor) -> torch.Tensor:
    return given * given.cpu()[0, 0]


@pytest.mark.parametrize("kind", ["a counter", "a read"])
def test_what_is_another_value_in_every_step_is_not_captured(kind: str) -> None:
    graphs = StepGraphs(CUDA, padded=True)
    train(counted(count()) if kind == "a counter" else read, graphs)
    assert graphs.off
    assert len(graphs) == len(graphs._constants) == 0
