"""Values that a step copies from the host: which calls copy one, and what a capture is given for it.

The meta device stands for the GPU where it matters which calls copy; the host stands for it where it matters what is given.
The capture itself needs a GPU: tests/gpu/test_host_constants.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tunesmith.data.batches import Batch, Padding
from tunesmith.speedups import graphs, host_constants
from tunesmith.speedups.graphs import StepGraphs
from tunesmith.speedups.host_constants import HostConstants

CPU, META = torch.device("cpu"), torch.device("meta")
HOST, THERE = torch.arange(6.0).reshape(2, 3), torch.empty(2, 3, device=META)

COPIES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.tensor(0.0, device=META),
    "as_tensor": lambda: torch.as_tensor([1, 2], device="meta"),
    "asarray": lambda: torch.asarray(np.ones(2), device="meta:0"),
    "new_tensor": lambda: THERE.new_tensor([1.0]),
    "to, by name": lambda: HOST.to("meta"),
    "to, with a dtype": lambda: HOST.to(device=META, dtype=torch.bfloat16),
    "to, as another tensor": lambda: HOST.to(THERE),
    "type_as": lambda: HOST.type_as(THERE),
    "copy_": lambda: THERE.clone().copy_(HOST),
    "where": lambda: torch.where(THERE > 0, torch.tensor(2.0), THERE),
    "an index": lambda: THERE[torch.tensor([1, 0])],
    "a list of positions": lambda: THERE[..., [-1]],
    "a value for a part": lambda: THERE.clone().__setitem__(0, HOST[1]),
    "of bfloat16": lambda: torch.ones(3, dtype=torch.bfloat16).to(META),
    "of complex numbers": lambda: torch.ones(3, dtype=torch.complex64).conj().to(META),
}
NO_COPIES: dict[str, Callable[[], Any]] = {
    "made there": lambda: torch.zeros(2, device=META),
    "made on the host": lambda: torch.tensor([1.0], device="cpu"),
    "another dtype": lambda: HOST.to(torch.float64),
    "of nothing": lambda: torch.tensor([], device=META),
    "of a weight": lambda: torch.nn.Parameter(HOST).to(META),
    "from there to there": lambda: THERE.to(META),
    "a number in arithmetic": lambda: THERE * torch.tensor(2.0),
    "a number as an index": lambda: THERE[torch.tensor(1)],
    "a slice": lambda: THERE[:, 1:],
    "mapped over": lambda: torch.vmap(lambda i: THERE[0] + i.to(torch.float64))(torch.empty(2, device=META)),
}


@pytest.mark.parametrize("name", [*COPIES, *NO_COPIES])
def test_copies_to_the_device_are_heard_and_nothing_else(name: str) -> None:
    constants = HostConstants(META)
    constants.listen()
    with constants.around():
        expected = {**COPIES, **NO_COPIES}[name]()
    assert len(constants) == (name in COPIES)
    constants.give()
    with constants.around():
        given = {**COPIES, **NO_COPIES}[name]()
    if isinstance(expected, torch.Tensor):
        described = [(t.device, t.dtype, t.shape, t.stride()) for t in (expected, given)]
        assert described[0] == described[1]


@pytest.mark.parametrize(
    "read", [lambda: HOST.clone().copy_(THERE), lambda: THERE.to(HOST), lambda: THERE.cpu(), lambda: float(THERE.sum())]
)
def test_a_read_from_the_device_fails_as_before(read: Callable[[], Any]) -> None:
    constants = HostConstants(META)
    constants.listen()
    for _ in range(2):
        with pytest.raises((NotImplementedError, RuntimeError), match="meta"), constants.around():
            read()
        constants.give()
    assert len(constants) == 0


def test_what_is_given_has_the_values_and_may_be_written_into() -> None:
    constants = HostConstants(CPU)
    constants.listen()
    for _ in range(3):
        with constants.around():
            found = torch.tensor([1.0, 2.0], device="cpu"), torch.as_tensor(7, device="cpu")
        assert [t.tolist() for t in found] == [[1.0, 2.0], 7]
        found[0].zero_()
        constants.give()
    assert len(constants) == 2


def test_another_content_is_refused_and_learned_a_few_times() -> None:
    constants, count = HostConstants(CPU), 0

    def passes() -> None:
        nonlocal count
        count += 1
        with constants.around():
            torch.tensor(count, device="cpu")

    constants.listen()
    passes()
    for attempt in range(host_constants.PATIENCE + 1):
        constants.give()
        with pytest.raises(RuntimeError, match="did not have before"):
            passes()
        assert constants.learn() == (attempt < host_constants.PATIENCE)
    assert not constants.learn(), "nothing is lacking any more"
    count = 1
    constants.give()
    passes()


def test_an_error_that_the_model_catches_refuses_the_capture_all_the_same() -> None:
    constants = HostConstants(CPU)

    def passes() -> None:
        with constants.around(), contextlib.suppress(RuntimeError):
            torch.tensor(1.0, device="cpu")

    constants.give()
    with pytest.raises(RuntimeError, match="did not have before"):
        passes()


@pytest.mark.parametrize(("limit", "value"), [("MOST", 2), ("MOST_BYTES", 8)])
def test_no_more_is_kept_than_the_limit(monkeypatch: pytest.MonkeyPatch, limit: str, value: int) -> None:
    monkeypatch.setattr(host_constants, limit, value)
    constants = HostConstants(META)
    constants.listen()
    for number in (1.0, 2.0, 1.0):
        with constants.around():
            torch.tensor(number, device=META)
        assert not constants.full
    with constants.around():
        torch.tensor(3.0, device=META)
    assert constants.full
    assert len(constants) == 2
    constants.clear()
    assert not constants.full
    assert len(constants) == 0


class Steps(StepGraphs):
    """Captures nothing: its body runs as if it were captured."""

    def _capture(self, batches: Any, body: Any) -> Any:
        self._constants.give()
        numbers = body(batches, self._rate, self._factor)
        self._constants.rest()

        class Graph:
            def replay(self) -> None:
                pass

        return graphs._Captured(Graph(), list(batches), numbers)


@pytest.mark.parametrize("padded", [True, False])
def test_the_first_step_of_a_shape_is_listened_to_where_rows_are_padded(padded: bool) -> None:
    steps = Steps(CPU, padded=padded)
    made = Padding()({"input_ids": [np.arange(1, 5), np.arange(1, 3)]})
    batch = Batch(made, torch.arange(2), np.arange(2), 6, 8)

    def body(*_: Any) -> torch.Tensor:
        with steps.around_forward():
            return torch.tensor([1.0, 2.0, 0.0], device="cpu")

    found = []
    for _ in range(4):
        replayed = steps.run((batch,), 0.1, 1.0, body)
        found.append(replayed is not None)
        if replayed is None:
            body()
        assert (steps._constants._meet is not None) == (padded and not any(found))
    assert found == [False, padded, padded, padded]
    assert len(steps._constants) == padded
    steps.close()
    assert len(steps._constants) == len(steps) == 0


def test_a_step_that_is_never_captured_is_not_listened_to() -> None:
    steps = Steps(CPU, padded=True)
    batch = Batch(Padding()({"input_ids": [np.arange(1, 5)]}), torch.arange(1), np.arange(1), 4, 4)
    assert steps.run((batch,), 0.1, 1.0, lambda *_: torch.zeros(3)) is None
    steps.stand_by()
    assert steps._constants._meet is None
    steps._constants.full = True
    assert steps.run((batch,), 0.1, 1.0, lambda *_: torch.zeros(3)) is None
    assert steps._constants._meet is None


@pytest.mark.parametrize("kind", ["mistral", "falcon"])
def test_what_a_model_copies_is_given_to_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of a sliding window, and columns by a list of their numbers."""
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)  # no mask is looked into
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16}
    config = transformers.AutoConfig.for_model(kind, **sizes, vocab_size=32, num_key_value_heads=4, pad_token_id=0)
    model = transformers.AutoModelForSequenceClassification.from_config(config).to(META).train()
    batch = {n: torch.ones(2, 5, dtype=torch.long, device=META) for n in ("input_ids", "attention_mask")}
    constants = HostConstants(META)
    constants.listen()
    for _ in range(2):
        with constants.around():
            model(**batch)
        constants.give()
    assert len(constants) == {"mistral": 1, "falcon": 2}[kind]
