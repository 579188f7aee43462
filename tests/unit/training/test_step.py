"""One optimizer step: divided once, clipped, gated when not finite, split when memory runs out."""

from __future__ import annotations

import traceback
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batch, Batches, Padding
from tunesmith.data.tokens import TokenRows
from tunesmith.errors import ConfigError, ResourceError
from tunesmith.events import NonFinite, SafePoint, StepDone
from tunesmith.labels import Task
from tunesmith.speedups.apply import Speedups, apply_speedups
from tunesmith.speedups.cuda_graphs import StepGraphs, _Captured
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss, resolve_class_weights
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Calendar, Plan, Schedule, epoch_ends_for, warmup_steps_for
from tunesmith.training.state import TrainState, seed_step, step_seed
from tunesmith.training.step import train_step


def make_state(objective: Any = None, *, dropout: float = 0.0, fused: bool = True) -> TrainState:
    model = tiny_bert(dropout=dropout)
    optimizer = make_optimizer(model, learning_rate=1e-2, optim="adamw_torch_fused" if fused else "adamw_torch")
    return TrainState(model, optimizer, objective or TaskLoss(Task.BINARY, 2), make_runtime(use_cpu=True))


def weights(state: TrainState) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in state.model.state_dict().items()}


def batches(size: int, accumulation: int, collate: Any = None) -> Batches:
    rows = TokenRows.from_lists(token_lists(22))
    return Batches(rows, collate or Padding(), size, seed=3, accumulation=accumulation, sampling="random")


class Poison(TaskLoss):
    """A loss that is NaN on its n-th call."""

    calls: list[int] = []  # noqa: RUF012  (a frozen dataclass cannot count by itself)

    def sum(self, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.calls.append(1)
        loss, logits = super().sum(model, batch)
        return (loss * float("nan") if len(self.calls) == 2 else loss), logits


@pytest.mark.parametrize("weighted", [None, (0.3, 2.5)])
@pytest.mark.parametrize(("size", "accumulation"), [(4, 2), (2, 4), (1, 8)])
def test_a_step_does_not_depend_on_how_it_is_cut_into_micro_batches(
    size: int, accumulation: int, weighted: Any
) -> None:
    objective = TaskLoss(Task.BINARY, 2, weighted)
    one, many = make_state(objective), make_state(objective)
    for a, b in zip(batches(8, 1).windows(0), batches(size, accumulation).windows(0), strict=True):
        first = train_step(one, a, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
        second = train_step(many, b, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
        assert float(first.loss) == pytest.approx(float(second.loss), abs=1e-6)
        assert float(first.grad_norm) == pytest.approx(float(second.grad_norm), rel=1e-4)


def test_class_weights_and_smoothing_are_those_of_torch() -> None:
    logits, labels = torch.randn(6, 3), torch.tensor([0, 2, 1, -1, 2, 0])
    objective = TaskLoss(Task.MULTICLASS, 3, (0.5, 1.0, 3.0), 0.1)
    expected = torch.nn.functional.cross_entropy(
        logits, torch.where(labels < 0, -100, labels), torch.tensor([0.5, 1.0, 3.0]), label_smoothing=0.1
    )
    got = objective.of_logits(logits, labels) / objective.weight(labels.numpy(), 6)
    assert float(got) == pytest.approx(float(expected), rel=1e-6)


def test_balanced_weights_are_those_of_scikit_learn() -> None:
    labels = np.array([0, 0, 0, 1, 2, 2])
    assert resolve_class_weights("balanced", labels, ["a", "b", "c"]) == pytest.approx((6 / 9, 2.0, 1.0))
    assert resolve_class_weights({"a": 1, "b": 2, "c": 3}, labels, ["a", "b", "c"]) == (1.0, 2.0, 3.0)
    with pytest.raises(ConfigError, match="2 numbers for 3 labels"):
        resolve_class_weights([1.0, 2.0], labels, ["a", "b", "c"])


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_and_the_update_are_those_of_torch(fused: bool) -> None:
    ours, plain = make_state(fused=fused), make_state()
    window = next(batches(8, 1).windows(0))
    result = train_step(ours, window, learning_rate=1e-2, max_grad_norm=1e-3, seed=0)
    optimizer = torch.optim.AdamW(plain.model.parameters(), lr=1e-2, weight_decay=0.0)
    batch = window.micro_batches[0]
    torch.nn.functional.cross_entropy(plain.model(**batch.inputs).logits, batch.labels).backward()  # type: ignore[arg-type, no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1e-3)
    assert float(norm) > 1.5e-3, "clipping must have something to do"
    optimizer.step()
    assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    for name, tensor in plain.model.state_dict().items():
        assert torch.allclose(ours.model.state_dict()[name], tensor, atol=2e-6), name
    for name, parameter in plain.model.named_parameters():
        # the first moment is 0.1 times the clipped gradient: Adam's own step would hide its scale
        mine = ours.optimizer.state[ours.model.get_parameter(name)]["exp_avg"]
        assert torch.allclose(mine, optimizer.state[parameter]["exp_avg"], rtol=1e-3, atol=1e-10), name


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_is_not_finite_leaves_the_weights_alone_and_is_told_with_its_rows(fused: bool) -> None:
    Poison.calls.clear()
    state = make_state(Poison(Task.BINARY, 2), fused=fused)
    source = batches(4, 1)
    steps, ends = epoch_ends_for([source.steps_in_epoch(0)], max_steps=2, num_epochs=1)
    plan = Plan(steps, ends, Schedule("constant", 1e-2, 0, steps), seed=0)
    before: dict[str, torch.Tensor] = {}
    events = []
    for event in train_events(state, source, plan):
        events.append(event)
        if isinstance(event, StepDone) and event.step == 1:
            before = weights(state)
    assert [e.loss is None for e in events if isinstance(e, StepDone)] == [False, True]
    bad = next(e for e in events if isinstance(e, NonFinite))
    assert bad.step == 2
    assert list(bad.rows) == source.order(0).window(1).tolist()
    assert before.keys() == weights(state).keys()
    assert all(torch.equal(before[n], t) for n, t in weights(state).items())


@pytest.mark.parametrize("action", ["stop", "skip"])
def test_steps_after_a_bad_one_are_held_back_only_when_the_run_is_about_to_stop(action: Any) -> None:
    """Numbers are read back five steps later, as on a GPU."""
    Poison.calls.clear()
    state = make_state(Poison(Task.BINARY, 2))
    plan = Plan(5, (6,), Schedule("constant", 1e-2, 0, 5), seed=0, nan_action=action, read_back_every=5)
    after: list[dict[str, torch.Tensor]] = []
    for event in train_events(state, batches(4, 1), plan):
        if isinstance(event, SafePoint):
            after.append(weights(state))
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in pairwise(after)]
    assert moved == [False, *[action == "skip"] * 3]


def test_nan_in_a_weight_is_named() -> None:
    state = make_state()
    with torch.no_grad():
        state.model.get_parameter("bert.encoder.layer.1.output.dense.weight")[0, 0] = float("nan")
    plan = Plan(1, (5,), Schedule("constant", 1e-2, 0, 1), seed=0)
    bad = next(e for e in train_events(state, batches(4, 1), plan) if isinstance(e, NonFinite))
    assert (bad.what, bad.tensor) == ("weight", "bert.encoder.layer.1.output.dense.weight")


@pytest.mark.parametrize("packed", [False, True])
def test_out_of_memory_splits_the_micro_batch_and_keeps_the_maths(packed: bool) -> None:
    class Greedy(TaskLoss):
        def sum(self, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
            if len(batch) > 3:
                raise torch.OutOfMemoryError("too many rows")
            return super().sum(model, batch)

    plain, small = make_state(), make_state(Greedy(Task.BINARY, 2))
    collate = None
    if packed:
        collate = apply_speedups(
            small.model, None, Padding(), device=torch.device("cpu"), restrict_vocabulary="off"
        ).collate
    for a, b in zip(batches(8, 1).windows(0), batches(8, 1, collate).windows(0), strict=True):
        first = train_step(plain, a, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
        second = train_step(small, b, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
        assert float(first.loss) == pytest.approx(float(second.loss), abs=1e-6)
    assert small.step == plain.step == 3
    assert small.rows_limit == 2


def test_out_of_memory_lets_go_of_captured_steps_before_it_splits_anything() -> None:
    class Full(TaskLoss):
        def sum(self, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
            if len(held):
                raise torch.OutOfMemoryError("captured steps hold the memory")
            return super().sum(model, batch)

    plain, state = make_state(dropout=0.1), make_state(Full(Task.BINARY, 2), dropout=0.1)
    held = StepGraphs(torch.device("cpu"))
    state.speedups = Speedups(state.model, Padding(), Padding(), Padding(), None, (), (), {}, graphs=held)
    held._graphs[("a shape",)] = _Captured(None, [], torch.zeros(3))
    state.may_split = False
    for window in batches(8, 1).windows(0):
        first, second = (train_step(s, window, learning_rate=1e-2, max_grad_norm=1.0, seed=0) for s in (plain, state))
        assert torch.equal(first.numbers, second.numbers)
    assert held.off
    assert state.rows_limit is None


def test_out_of_memory_with_one_row_says_what_to_do() -> None:
    class Hopeless(TaskLoss):
        def sum(self, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
            raise torch.OutOfMemoryError("no")

    with pytest.raises(ResourceError, match="max_seq_length"):
        train_step(
            make_state(Hopeless(Task.BINARY, 2)),
            next(batches(4, 1).windows(0)),
            learning_rate=1e-2,
            max_grad_norm=1,
            seed=0,
        )


def test_out_of_memory_ends_the_run_where_splitting_is_not_wanted() -> None:
    class Greedy(TaskLoss):
        def sum(self, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
            if len(batch) > 3:
                raise torch.OutOfMemoryError("too many rows")
            return super().sum(model, batch)

    state = make_state(Greedy(Task.BINARY, 2))
    state.may_split = False
    with pytest.raises(ResourceError, match=r"with 4 row\(s\)"):
        train_step(state, next(batches(4, 1).windows(0)), learning_rate=1e-2, max_grad_norm=1, seed=0)
    assert state.step == 0
    assert state.rows_limit is None


def test_dropout_of_a_step_depends_on_its_number_and_not_on_what_was_drawn_before() -> None:
    window = next(batches(8, 1).windows(0))
    one, two = make_state(dropout=0.3), make_state(dropout=0.3)
    first = train_step(one, window, learning_rate=0.0, max_grad_norm=1.0, seed=5)
    torch.rand(17)
    second = train_step(two, window, learning_rate=0.0, max_grad_norm=1.0, seed=5)
    assert torch.equal(first.loss, second.loss)
    third = train_step(one, window, learning_rate=0.0, max_grad_norm=1.0, seed=5)
    assert not torch.equal(first.loss, third.loss)


def test_a_step_seeds_as_torch_does_without_its_work_for_devices_that_are_not_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch.manual_seed writes the call's stack down as text for each of them, at every call."""
    state, window = make_state(dropout=0.5), next(batches(8, 1).windows(0))
    written: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(traceback, "format_stack", lambda *_: written.append(1) or [])
        train_step(state, window, learning_rate=1e-3, max_grad_norm=1.0, seed=5)
    assert written == []
    seed_step(5, 2, 0, torch.device("cpu"))
    drawn = torch.rand(8)
    torch.manual_seed(step_seed(5, 2, 0))
    assert torch.equal(torch.rand(8), drawn)


def test_a_calendar_is_due_when_its_words_say_so() -> None:
    assert [s for s in range(1, 13) if Calendar("steps", 5, last=12).due(s)] == [5, 10, 12]
    assert [s for s in range(1, 13) if Calendar("epoch", ends=frozenset({4, 8})).due(s)] == [4, 8]
    assert [s for s in range(1, 13) if Calendar("both", 3, frozenset({4})).due(s)] == [3, 4, 7, 10]
    both = Calendar("both", 500, frozenset({459, 918, 1377, 3000}), 3000)
    assert [s for s in range(1, 3001) if both.due(s)] == [459, 918, 1377, 1877, 2377, 2877, 3000]
    assert both.count(3000) == 7
    assert [s for s in range(1, 13) if Calendar("steps", 2, delay=7).due(s)] == [8, 10, 12]
    assert not any(Calendar("no").due(s) for s in range(1, 13))


def test_the_number_of_steps_is_that_of_transformers() -> None:
    assert epoch_ends_for([459], max_steps=0, num_epochs=3) == (1377, (459, 918, 1377))
    assert epoch_ends_for([10], max_steps=25, num_epochs=1) == (25, (10, 20, 30))
    assert epoch_ends_for([10], max_steps=0, num_epochs=2.5)[0] == 25
    assert epoch_ends_for([10], max_steps=0, num_epochs=0.33)[0] == 4
    assert epoch_ends_for(lambda epoch: 10 + epoch, max_steps=35, num_epochs=1) == (35, (10, 21, 33, 46))
    for options in ({"max_steps": 10**12, "num_epochs": 3}, {"max_steps": 0, "num_epochs": 1e308}):
        with pytest.raises(ConfigError, match=r"epochs.*; the limit is 1000000"):
            epoch_ends_for([4], **options)
    assert warmup_steps_for(0.1, 1377) == 138
    assert warmup_steps_for(30, 1377) == 30


def test_progress_within_an_epoch_is_a_fraction() -> None:
    plan = Plan(20, (10, 20), Schedule("linear", 1.0, 0, 20), seed=0)
    assert [plan.fraction(s) for s in (0, 5, 10, 15, 20)] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert plan.epoch_of(10) == (1, 0)
    assert replace(plan, num_steps=5).epoch_of(3) == (0, 3)
