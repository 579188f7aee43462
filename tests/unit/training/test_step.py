"""One optimizer step, the loop around it, and numbers that are NaN or infinite."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from conftest import tiny_bert, token_lists
from tunesmith.data.batches import Batch, Batches, Padding, TokenRows
from tunesmith.errors import ConfigError, DataError
from tunesmith.events import NonFinite, SafePoint, StepDone
from tunesmith.labels import Task
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import TaskLoss, resolve_class_weights
from tunesmith.training.loop import train_events
from tunesmith.training.optimizer import make_optimizer
from tunesmith.training.schedule import Plan, Schedule, epoch_ends_for
from tunesmith.training.state import SMALLEST, LossScale, TrainState
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
def test_step_in_micro_batches_equals_one_batch(size: int, accumulation: int, weighted: Any) -> None:
    objective = TaskLoss(Task.BINARY, 2, weighted)
    one, many = make_state(objective), make_state(objective)
    for a, b in zip(batches(8, 1).windows(0), batches(size, accumulation).windows(0), strict=True):
        first = train_step(one, a, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
        second = train_step(many, b, learning_rate=1e-2, max_grad_norm=1.0, seed=0)
        assert float(first.loss) == pytest.approx(float(second.loss), abs=1e-6)
        assert float(first.grad_norm) == pytest.approx(float(second.grad_norm), rel=1e-4)


def test_class_weights_and_smoothing_equal_torch() -> None:
    logits, labels = torch.randn(6, 3), torch.tensor([0, 2, 1, -1, 2, 0])
    objective = TaskLoss(Task.MULTICLASS, 3, (0.5, 1.0, 3.0), 0.1)
    expected = torch.nn.functional.cross_entropy(
        logits, torch.where(labels < 0, -100, labels), torch.tensor([0.5, 1.0, 3.0]), label_smoothing=0.1
    )
    got = objective.of_logits(logits, labels) / objective.weight(labels.numpy(), 6)
    assert float(got) == pytest.approx(float(expected), rel=1e-6)


def test_balanced_weights_equal_scikit_learn() -> None:
    labels = np.array([0, 0, 0, 1, 2, 2])
    assert resolve_class_weights("balanced", labels, ["a", "b", "c"]) == pytest.approx((6 / 9, 2.0, 1.0))
    assert resolve_class_weights([1, 2, 3], labels, ["a", "b", "c"]) == (1.0, 2.0, 3.0)
    with pytest.raises(ConfigError, match="2 numbers for 3 labels"):
        resolve_class_weights([1.0, 2.0], labels, ["a", "b", "c"])


@pytest.mark.parametrize("fused", [True, False])
def test_clipping_and_update_equal_torch(fused: bool) -> None:
    ours, plain = make_state(fused=fused), make_state()
    window = next(batches(8, 1).windows(0))
    result = train_step(ours, window, learning_rate=1e-2, max_grad_norm=1e-3, seed=0)
    optimizer = torch.optim.AdamW(plain.model.parameters(), lr=1e-2, weight_decay=0.0)
    batch = window.micro_batches[0]
    torch.nn.functional.cross_entropy(plain.model(**batch.inputs).logits, batch.labels).backward()  # type: ignore[arg-type, no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1e-3)
    assert float(norm) > 1.5e-3, "gradients must be clipped"
    optimizer.step()
    assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    for name, tensor in plain.model.state_dict().items():
        assert torch.allclose(ours.model.state_dict()[name], tensor, atol=2e-6), name
    for name, parameter in plain.model.named_parameters():
        # the first moment is 0.1 times the clipped gradient; Adam's step would hide its scale
        mine = ours.optimizer.state[ours.model.get_parameter(name)]["exp_avg"]
        assert torch.allclose(mine, optimizer.state[parameter]["exp_avg"], rtol=1e-3, atol=1e-10), name


@pytest.mark.parametrize("fused", [True, False])
def test_nan_step_keeps_the_weights_and_names_its_rows(fused: bool) -> None:
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


def test_steps_after_nan_leave_the_weights_unchanged() -> None:
    """Numbers are read back five steps later, as on a GPU."""
    Poison.calls.clear()
    state = make_state(Poison(Task.BINARY, 2))
    plan = Plan(5, (6,), Schedule("constant", 1e-2, 0, 5), seed=0, read_back_every=5)
    after: list[dict[str, torch.Tensor]] = []
    for event in train_events(state, batches(4, 1), plan):
        if isinstance(event, SafePoint):
            after.append(weights(state))
    moved = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in pairwise(after)]
    assert moved == [False] * 4


@pytest.mark.parametrize("packed", [False, True])
def test_out_of_memory_split_keeps_the_loss(packed: bool) -> None:
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


@pytest.mark.parametrize("weighted", [None, (0.3, 2.5)])
@pytest.mark.parametrize("packed", [False, True])
def test_soft_targets_equal_plain_cross_entropy(packed: bool, weighted: Any) -> None:
    targets = np.random.default_rng(0).dirichlet((1.0, 1.0), 22).astype(np.float32)
    targets[::4] = (0.0, 1.0)
    rows = replace(TokenRows.from_lists(token_lists(22)), labels=targets)
    state, plain = make_state(TaskLoss(Task.BINARY, 2, weighted)), tiny_bert()
    collate = Padding()
    if packed:
        cpu = torch.device("cpu")
        collate = apply_speedups(state.model, None, Padding(), device=cpu, restrict_vocabulary="off").collate
    weight = torch.tensor(weighted or (1.0, 1.0))
    for window in Batches(rows, collate, 4, seed=3, accumulation=2).windows(0):
        soft = torch.from_numpy(targets[window.rows])
        logits = plain(**Padding()(rows.take(window.rows))).logits
        expected = -(soft * weight * logits.log_softmax(-1)).sum() / (soft @ weight).sum()
        step = train_step(state, window, learning_rate=0.0, max_grad_norm=0.0, seed=0)
        gradients = torch.autograd.grad(expected, list(plain.parameters()))
        assert float(step.loss) == pytest.approx(expected.item(), rel=1e-5)
        assert float(step.grad_norm) == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-4)


def test_dropout_depends_on_the_step_number_only() -> None:
    window = next(batches(8, 1).windows(0))
    one, two = make_state(dropout=0.3), make_state(dropout=0.3)
    first = train_step(one, window, learning_rate=0.0, max_grad_norm=1.0, seed=5)
    torch.rand(17)
    second = train_step(two, window, learning_rate=0.0, max_grad_norm=1.0, seed=5)
    assert torch.equal(first.loss, second.loss)
    third = train_step(one, window, learning_rate=0.0, max_grad_norm=1.0, seed=5)
    assert not torch.equal(first.loss, third.loss)


class NanLoss(TaskLoss):
    def sum(self, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        loss, logits = super().sum(model, batch)
        return loss * float("nan"), logits


class NanGradient(TaskLoss):
    """A finite loss whose gradient is NaN or infinite at any scale."""

    def sum(self, model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        loss, logits = super().sum(model, batch)
        return loss + torch.sqrt(model.get_parameter("classifier.bias").abs() * 0.0).sum(), logits


def run_fp16(objective: TaskLoss, *, scale: float = 65536.0, every: int = 1) -> tuple[Any, list[Any]]:
    """Return the state, and the events until the first NaN or infinite one, or of 40 steps."""
    state = make_state(objective)
    state.loss_scale = LossScale.start(torch.device("cpu"), scale)
    batches = Batches(TokenRows.from_lists(token_lists(160)), Padding(), 4, seed=3)
    plan = Plan(40, (40,), Schedule("linear", 1e-2, 0, 40), seed=0, read_back_every=every)
    events = []
    for event in train_events(state, batches, plan):
        events.append(event)
        if isinstance(event, NonFinite):
            break
    return state, events


def non_finite(events: list[Any]) -> list[NonFinite]:
    return [e for e in events if isinstance(e, NonFinite)]


@pytest.mark.parametrize("every", [1, 16])
def test_fp16_nan_loss_is_reported_immediately(every: int) -> None:
    fresh = tiny_bert(dropout=0.0).state_dict()
    state, events = run_fp16(NanLoss(Task.BINARY, 2), every=every)
    assert [(e.step, e.what) for e in non_finite(events)] == [(1, "loss")]
    assert all(torch.equal(fresh[n], t) for n, t in state.model.state_dict().items())


def test_fp16_nan_gradient_is_reported_after_bounded_halvings() -> None:
    state, events = run_fp16(NanGradient(Task.BINARY, 2))
    assert [(e.step, e.what, e.tensor) for e in non_finite(events)] == [(27, "gradient", "classifier.bias")]
    assert float(state.loss_scale.scale) == SMALLEST


def test_fp16_overflow_is_skipped_and_training_continues() -> None:
    state, events = run_fp16(TaskLoss(Task.BINARY, 2), scale=2.0**80)
    steps = [e for e in events if isinstance(e, StepDone)]
    assert non_finite(events) == []
    assert steps[0].loss is not None
    assert steps[0].grad_norm is None, "the first step must overflow"
    skipped = sum(e.grad_norm is None for e in steps)
    assert 0 < skipped < 25
    assert {int(s["step"]) for s in state.optimizer.state.values()} == {40 - skipped}


def make_adversarial(push: float) -> TrainState:
    state = make_state()
    state.push = push
    return state


def steps(state: TrainState, size: int, accumulation: int = 1) -> list[float]:
    found = batches(size, accumulation).windows(0)
    return [float(train_step(state, w, learning_rate=1e-2, max_grad_norm=1.0, seed=0).loss) for w in found]


def test_adversarial_step_in_micro_batches_equals_one_batch() -> None:
    assert steps(make_adversarial(0.1), 8) == pytest.approx(steps(make_adversarial(0.1), 2, 4), abs=1e-5)


def test_adversarial_steps_need_a_trained_embedding() -> None:
    plain, adversarial = make_adversarial(0.0), make_adversarial(0.1)
    losses = [steps(state, 8) for state in (plain, adversarial)]
    assert losses[0][0] == losses[1][0], "the loss of the first pass is reported"
    assert losses[0][-1] != losses[1][-1]
    frozen = [make_adversarial(0.0), make_adversarial(0.1)]
    for state in frozen:
        state.model.get_input_embeddings().weight.requires_grad_(False)  # type: ignore[operator]
    assert steps(frozen[0], 8) == pytest.approx(steps(frozen[1], 8), abs=1e-6)


@pytest.mark.parametrize(("task", "labels"), [(Task.MULTICLASS, 3), (Task.MULTILABEL, 3), (Task.REGRESSION, 1)])
def test_divergence_equals_its_formula(task: Task, labels: int) -> None:
    torch.manual_seed(0)
    objective, before, after = TaskLoss(task, labels), torch.randn(4, labels), torch.randn(4, labels)
    assert float(objective.divergence(before, before)) == pytest.approx(0, abs=1e-6)
    found = float(objective.divergence(after, before))
    if task is Task.REGRESSION:
        assert found == pytest.approx(float((after - before).square().sum()), rel=1e-5)
        return
    p, q = (t.softmax(1) if task is Task.MULTICLASS else t.sigmoid() for t in (before, after))
    wanted = p * (p / q).log()
    if task is Task.MULTILABEL:
        wanted = wanted + (1 - p) * ((1 - p) / (1 - q)).log()
    assert found == pytest.approx(float(wanted.sum()), rel=1e-4)


def test_exhausted_source_is_refused_by_name() -> None:
    class Exhausted:
        def __init__(self) -> None:
            self.windows_left = Batches(TokenRows.from_lists(token_lists(8)), Padding(), 4, seed=3).windows(0)

        def windows(self, epoch: int, skip: int = 0) -> Any:
            return self.windows_left

    plan = Plan(9, (2, 4, 6, 8, 10), Schedule("constant", 1e-3, 0, 9), seed=0)
    with pytest.raises(DataError, match=r"Exhausted.*step 2.*9"):
        list(train_events(make_state(), Exhausted(), plan))
