"""Which steps are captured, and what a captured step is given. The capture itself needs a GPU: tests/gpu/test_graphs.py."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from conftest import tiny_bert
from tunesmith.data.batches import Batch, Padding, pin_batch, tensors_of
from tunesmith.errors import ConfigError
from tunesmith.speedups import cuda_graphs
from tunesmith.speedups.apply import apply_speedups
from tunesmith.speedups.cuda_graphs import Fingerprint, StepGraphs
from tunesmith.speedups.packing import Packing, bucket_of
from tunesmith.training.checkpoint import pack_optimizer, unpack_optimizer

CPU = torch.device("cpu")


def make_batch(*lengths: int, start: int = 1, filled: bool = True) -> Batch:
    ids = [np.arange(start, start + n) for n in lengths]
    inputs = Packing(0, ("input_ids",), filled=filled)({"input_ids": ids})
    return Batch(inputs, torch.arange(len(lengths)), np.arange(len(lengths)), sum(lengths), sum(lengths))


class Recorder(StepGraphs):
    """Captures nothing: notes what a replay would have read."""

    def __init__(self, **options: Any) -> None:
        super().__init__(CPU, **options)
        self.replays: list[tuple[float, float, list[torch.Tensor]]] = []
        self.captures = 0

    def _capture(self, batches: Any, body: Any) -> Any:
        self.captures += 1
        fixed = [cuda_graphs._place(batch, CPU) for batch in batches]
        recorder = self

        class Graph:
            def replay(self) -> None:
                values = [t.clone() for batch in fixed for t in tensors_of(batch)]
                recorder.replays.append((float(recorder._rate), float(recorder._factor), values))

        return cuda_graphs._Captured(Graph(), fixed, torch.tensor([1.0, 2.0, 0.0]))


def no_body(*_: Any) -> torch.Tensor:
    raise AssertionError("a captured step does not run its body again")


@pytest.mark.parametrize("finest", [64, 128])
@pytest.mark.parametrize("longest", [1, 60, 65, 128, 300])
def test_a_bucket_holds_the_batch_and_little_more(longest: int, finest: int) -> None:
    for tokens in range(longest, 20_000, 37):
        total, bound, fillers = bucket_of(tokens, longest, finest)
        spare = total - tokens
        assert spare >= fillers >= 1
        assert -(-spare // fillers) <= bound >= longest
        assert spare <= max(65, tokens / 8 + fillers)


def test_there_are_few_buckets() -> None:
    assert len({bucket_of(tokens, 60)[0] for tokens in range(200, 900)}) <= 13
    assert len({bucket_of(tokens, 60)[0] for tokens in range(8_000, 16_000)}) <= 18


def test_a_shape_runs_as_it_is_the_first_time_and_is_captured_the_second() -> None:
    steps = Recorder()
    assert steps.run((make_batch(5, 9),), 0.1, 0.5, no_body) is None
    assert steps.captures == 0
    first = make_batch(7, 8, start=3)
    assert steps.run((first,), 0.2, 0.25, no_body) is not None
    assert steps.run((make_batch(9, 5, start=20),), 0.3, 0.125, no_body) is not None
    assert steps.captures == 1, "all three are of one shape"
    assert [replay[:2] for replay in steps.replays] == [(0.2, 0.25), (0.3, 0.125)]


@pytest.mark.parametrize("pinned", [False, True])
def test_a_replay_reads_the_batch_it_was_given(pinned: bool) -> None:
    steps = Recorder()
    batches = [make_batch(4, 9, start=s) for s in (1, 1, 30)]
    for batch in batches:
        steps.run((pin_batch(batch) if pinned else batch,), 0.1, 1.0, no_body)
    for given, replay in zip(batches[1:], steps.replays, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(given), replay[2], strict=True))


def test_other_rows_sizes_and_numbers_of_micro_batches_are_other_shapes() -> None:
    steps = Recorder()
    for window in ((make_batch(5, 9),), (make_batch(5, 9, 3),), (make_batch(60, 60),), (make_batch(5, 9),) * 2):
        assert steps.run(window, 0.1, 1.0, no_body) is None
        assert steps.run(window, 0.1, 1.0, no_body) is not None
    assert steps.captures == len(steps) == 4


def test_padded_batches_and_a_capture_given_up_run_as_they_are() -> None:
    steps = Recorder()
    ids = {"input_ids": [np.arange(1, 5), np.arange(1, 3)]}
    padded = Batch(Padding()(ids), torch.arange(2), np.arange(2), 6, 8)
    assert [steps.run((padded,), 0.1, 1.0, no_body) for _ in range(3)] == [None] * 3
    steps.off = True
    assert [steps.run((make_batch(5, 9),), 0.1, 1.0, no_body) for _ in range(3)] == [None] * 3
    assert steps.captures == 0


def test_no_more_graphs_are_kept_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MOST", 1)
    steps = Recorder()
    for batch in (make_batch(5, 9), make_batch(60, 60)):
        steps.run((batch,), 0.1, 1.0, no_body)
        steps.run((batch,), 0.1, 1.0, no_body)
    assert steps.captures == 1


@pytest.mark.parametrize("change", ["load_state_dict", "checkpoint", "settings", "nothing"])
def test_moments_and_settings_that_a_captured_step_does_not_know_are_noticed(change: str) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    fingerprint = Fingerprint(model, optimizer)
    found = []
    for _ in range(4):
        found.append(fingerprint.of_step())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    assert len(set(found)) == 1, "the first step makes the moments: that is not a change"
    saved, (tensors, plain) = copy.deepcopy(optimizer.state_dict()), pack_optimizer(optimizer)
    held = [v for state in optimizer.state.values() for v in state.values()]  # so that nothing is put in its place
    if change == "load_state_dict":
        optimizer.load_state_dict(saved)
    elif change == "checkpoint":
        unpack_optimizer(optimizer, {n: t.clone() for n, t in tensors.items()}, plain, "here")
    elif change == "settings":
        optimizer.param_groups[0]["betas"] = (0.8, 0.9)
    assert len(held) == 6
    assert (fingerprint.of_step() == found[0]) == (change == "nothing")


def test_copies_of_weights_are_looked_after_before_every_replay() -> None:
    asked: list[int] = []
    steps = Recorder(before=lambda: asked.append(len(steps.replays)))
    for _ in range(3):
        steps.run((make_batch(5, 9),), 0.1, 1.0, no_body)
    assert asked == [0, 1]


def test_what_needs_a_gpu_is_refused_by_name_without_one_and_not_missed() -> None:
    with pytest.raises(ConfigError, match="--cuda_graphs on is not possible: they are for a GPU"):
        apply_speedups(tiny_bert(), None, Padding(), device=CPU, cuda_graphs="on")
    assert apply_speedups(tiny_bert(), None, Padding(), device=CPU).notes == ()


@pytest.mark.parametrize(
    ("device", "pack_rows", "order"),
    [("cuda", "auto", "random"), ("cuda", "off", "group_by_length"), ("cpu", "auto", "group_by_length")],
)
def test_rows_of_similar_length_share_a_batch_where_that_saves_something(
    device: str, pack_rows: Any, order: str
) -> None:
    chosen = apply_speedups(tiny_bert(), None, Padding(), device=CPU, pack_rows=pack_rows)
    assert chosen.best_order(torch.device(device)) == order
