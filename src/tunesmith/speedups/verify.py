"""Speedups verify themselves: before the first step, a few examples pass through the plain step and the fast one.

Speedups whose loss or gradients differ are switched off and reported. Weights, gradients, buffers, random generators and
attributes of the model are restored afterwards. `ready` verifies the steps of `tunesmith train`, `packed_calls` the calls of a
model inside a user's script; both compare `Gradients` with a `Judge`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from tunesmith.errors import short_text
from tunesmith.models.families import hook_tables, is_watched, why_not
from tunesmith.speedups.packing import collated, tokens_of
from tunesmith.training.state import generator_states, restore_generators, seed_everything

if TYPE_CHECKING:
    from tunesmith.data.batches import Batch, Window
    from tunesmith.speedups.apply import Speedups
    from tunesmith.training.state import TrainState

ROWS = 4
"""Maximum number of examples to compare."""
MOST_STEPS, SHARE = 2.0, 0.01
"""Maximum cost: this many steps, or this share of the run if that is less."""
ORDER = ("fused_layers", "cls_only_last_layer", "padding_free", "length_buckets", "restrict_vocabulary")
"""The order in which speedups are switched off to find the wrong one: those that change most of the model come first."""

Judge = Callable[["Gradients"], "str | None"]


def ready(state: TrainState, window: Window) -> Window:
    """Verify the speedups if the model is new or has changed; return the window in the form that the model accepts."""
    state.require_exact_vocabulary()
    speedups = state.speedups
    if speedups is None or not (speedups.parts or speedups.dropped):
        return window
    if state.verified is None or not (speedups.undisturbed or state.verified == state.fingerprint.of_model()):
        first = state.verified is None
        dropped = _unsupported(speedups)
        dropped |= _find_wrong(state, speedups, window.micro_batches[0], without=set(dropped))
        for name, reason in _agree_on_ranks(state, dropped, first).items():
            if name == "restrict_vocabulary" and state.vocabulary is not None:
                state.restore_vocabulary(reason)
            elif name in speedups.parts:
                speedups.drop(name)
                state.notes.append(f"{name} is off: {reason}")
        state.verified = state.fingerprint.of_model()
    if not speedups.dropped & {"padding_free", "length_buckets"}:
        return window
    return replace(window, micro_batches=tuple(speedups.adapted(b) for b in window.micro_batches))


def _unsupported(speedups: Speedups) -> dict[str, str]:
    """Return the speedups that no longer fit the model because it was changed, and why."""
    reasons = {name: speedups.why_not(name) for name in speedups.parts}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _agree_on_ranks(state: TrainState, dropped: dict[str, str], first: bool) -> dict[str, str]:
    """Let all ranks switch off the same speedups before the first step. Later they may differ, because gradients are equal."""
    if not first or state.runtime.world == 1:
        return dropped
    found: dict[str, str] = {}
    for rank in state.runtime.gather_objects(dropped):
        found = {**rank, **found}
    return found


def _find_wrong(state: TrainState, speedups: Speedups, batch: Batch, *, without: set[str]) -> dict[str, str]:
    """Return the speedups whose step differs from the plain one, and how."""
    left = [name for name in ORDER if name in speedups.parts and name not in without]
    if "length_buckets" in left and not _widened_rows(speedups, batch):
        found = _find_wrong(state, speedups, batch, without={*without, "length_buckets"})
        return found | {"length_buckets": "the first batch has no row that would get more padding"}
    # User hooks are not called for a proof. While they listen, only what needs no knowledge of a model is on.
    if not left or is_watched(hook_tables(state.model.modules())):
        return {}
    try:
        with speedups.without(without):
            return _search(state, speedups, batch, left)
    except torch.OutOfMemoryError:
        state.notes.append("the speedups were not compared with the plain step, which needs more memory")
        return {}


def _search(state: TrainState, speedups: Speedups, batch: Batch, left: list[str]) -> dict[str, str]:
    """Compare with all of `left` on; if the step differs, find those that must be off."""
    judge, rows = _plain_steps(state, speedups, batch, left)

    def fails(off: set[str]) -> str | None:
        shaped = {"padding_free", "length_buckets"} & (set(left) - off)
        fast = rows(speedups.train_collate if shaped else speedups.padding)
        with speedups.without(off):
            return failure(judge, lambda: measure(state, fast))

    wrong = fails(set())
    if wrong is None:
        return {}
    off: list[str] = []
    for name in left:
        off.append(name)
        if fails(set(off)) is None:
            break
    for name in off[:-1]:  # those taken off before the one that was wrong
        if fails(set(off) - {name}) is None:
            off.remove(name)
    return dict.fromkeys(off, f"its results differ from those of the plain step ({wrong})")


def _plain_steps(
    state: TrainState, speedups: Speedups, batch: Batch, left: list[str]
) -> tuple[Judge, Callable[..., Batch]]:
    """Compute the plain step; return a judge for fast steps, and a function that collates the compared examples."""
    half = state.runtime.precision != "no"
    chosen = _rows_for(state, speedups, batch, passes=3 if half else 2)
    lengths = [len(ids) for ids in tokens_of(batch)["input_ids"]]
    known = why_not(state.model) is None and len({lengths[i] for i in chosen}) == 1
    longest = max(1, lengths[chosen[0]] // 2) if known else None  # rows of one length would leave nothing to pad

    def rows(collate: object) -> Batch:
        return state.runtime.move(collated(batch, collate, chosen, longest))  # type: ignore[arg-type]

    plain = rows(speedups.padding)
    with speedups.without(left):
        try:
            exact = measure(state, plain, half=False)
        except Exception:
            if len(chosen) == len(batch):
                raise  # the user's own error: the step would fail in the same way
            chosen, longest = list(range(len(batch))), None
            plain = rows(speedups.padding)
            exact = measure(state, plain, half=False)
        return judge_by(exact, measure(state, plain) if half else None), rows


def _widened_rows(speedups: Speedups, batch: Batch) -> list[int]:
    """Return the examples that are padded further in length buckets; others would verify nothing."""
    lengths = [len(ids) for ids in tokens_of(batch)["input_ids"]]
    bucket: Any = speedups.train_collate
    longest = max((n for n in lengths if bucket.width(n) > n), default=0)
    return [i for i, n in enumerate(lengths) if n <= longest]


def _rows_for(state: TrainState, speedups: Speedups, batch: Batch, *, passes: int) -> list[int]:
    """Return the examples to compare, as many as the cost limit allows: the longest, the shortest, and some in between."""
    bucketed = "length_buckets" in speedups.parts and _widened_rows(speedups, batch)
    rows = np.array(bucketed or range(len(batch)))
    budget = min(MOST_STEPS, SHARE * state.planned_steps) * len(batch) / passes
    count = min(len(rows), max(2, min(ROWS, int(budget))))
    lengths = np.array([len(ids) for ids in tokens_of(batch)["input_ids"]])[rows]
    return [int(rows[i]) for i in spread_by_length(lengths, count)]


def spread_by_length(lengths: NDArray[np.integer], count: int) -> list[int]:
    """Return the indices of the longest example, the shortest, and some in between."""
    spread = np.unique(np.linspace(0, len(lengths) - 1, count).round().astype(int))
    return sorted(int(i) for i in np.argsort(-lengths, kind="stable")[spread])


TOLERANCE = 1e-4
"""Relative tolerance of the loss and of each parameter's gradient in float32."""
NOISE = 2e-6
"""Absolute tolerance as a share of the norm of all gradients, for parameters whose true gradient is zero (the bias of keys)."""
TIMES_AUTOCAST = 2.0
"""Maximum error of half-precision gradients, as a multiple of the error of autocast. Both are measured against float32."""
FP16_SCALE = 1024.0
_CONTAINERS = (list, dict, OrderedDict, set, deque)


@dataclass(frozen=True)
class Gradients:
    """Loss and gradients of one step by parameter name; zeros for parameters without a gradient."""

    loss: torch.Tensor
    of: dict[str, torch.Tensor]
    tolerance: float = TOLERANCE
    """Relative tolerance; larger if the weights are stored in half precision."""

    def norm(self) -> torch.Tensor:
        """Return the norm over all gradients."""
        total: torch.Tensor = torch.stack([g.norm() for g in self.of.values()]).norm()
        return total


def judge_by(exact: Gradients, rounded: Gradients | None) -> Judge:
    """Return a judge of fast gradients, from plain gradients in float32 and, for a half-precision run, under autocast."""
    if rounded is None:
        return lambda fast: difference(exact, fast)
    return lambda fast: half_difference(exact, rounded, fast)


_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, AssertionError, KeyError)


def failure(judge: Judge, run: Callable[[], Gradients]) -> str | None:
    """Return how a fast computation differs, or the error it raises; None if it is correct. Out-of-memory is raised."""
    try:
        return judge(run())
    except torch.OutOfMemoryError:
        raise
    except _ERRORS as error:
        return f"{type(error).__name__}: {short_text(error) or 'no message'}"


def measure(state: TrainState, batch: Batch, *, half: bool = True) -> Gradients:
    """Return loss and gradients of a micro-batch; with `half` in the precision of the run."""
    with nothing_left_behind(state.model, state.runtime.device):
        seed_everything(0)
        return _measure(state, batch, half)


def _measure(state: TrainState, batch: Batch, half: bool) -> Gradients:
    named = {n: p for n, p in state.model.named_parameters() if p.requires_grad}
    with state.runtime.autocast() if half else nullcontext():
        loss, _ = state.objective.sum(state.model, batch)
    scale = FP16_SCALE if half and state.runtime.precision == "fp16" else 1.0
    found = _differentiate(state.model, loss * scale, list(named.values()))
    gradients = {}
    for (name, parameter), gradient in zip(named.items(), found, strict=True):
        whole = torch.zeros_like(parameter) if gradient is None else gradient.detach() / scale
        if state.vocabulary is not None and parameter is state.vocabulary.parameter:
            whole = state.vocabulary.expand(whole).to(whole.device)
        gradients[name] = whole.to(torch.float64 if whole.dtype == torch.float64 else torch.float32)
    coarsest = max(torch.finfo(p.dtype).eps for p in named.values())
    return Gradients(loss.detach().double(), gradients, max(TOLERANCE, 8 * coarsest))


def float_tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the floating-point tensors in the output of a model."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (Mapping, list, tuple)):
        for value in output.values() if isinstance(output, Mapping) else output:
            yield from float_tensors(value)


def weighted_gradients(outputs: list[torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> Gradients:
    """Return the outputs of a model and the gradients of a weighted sum of them. The norm of the outputs serves as the loss."""
    if not outputs:
        raise ValueError("the model returns no tensors")
    total = torch.stack([(tensor * _sum_weights(tensor)).sum() for tensor in outputs]).sum()
    found = {f"output {number}": tensor.detach() for number, tensor in enumerate(outputs)}
    named = dict(parameters) if total.requires_grad else {}
    gradients = torch.autograd.grad(total, list(named.values()), allow_unused=True) if named else ()
    for (name, parameter), gradient in zip(named.items(), gradients, strict=True):
        found[name] = torch.zeros_like(parameter) if gradient is None else gradient.detach().float()
    size = torch.stack([tensor.detach().double().norm() for tensor in outputs]).norm()
    return Gradients(size, found)


def _sum_weights(tensor: torch.Tensor) -> torch.Tensor:
    """Return weights for a sum in which every element counts differently."""
    return torch.cos(torch.arange(tensor.numel(), device=tensor.device, dtype=tensor.dtype) + 0.5).view(tensor.shape)


def _differentiate(model: nn.Module, loss: torch.Tensor, parameters: list[nn.Parameter]) -> list[torch.Tensor | None]:
    """Return the gradients without calling hooks on parameters."""
    if not getattr(model, "is_gradient_checkpointing", False):
        return list(torch.autograd.grad(loss, parameters, allow_unused=True))
    torch.autograd.backward(loss)  # repeated layers refuse the other way
    found = [p.grad for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return found


def difference(plain: Gradients, fast: Gradients) -> str | None:
    """Return where two steps of equal precision differ by more than rounding; None if they agree or contain NaN or inf."""
    noise = max(NOISE, plain.tolerance / 50) * plain.norm()
    if not torch.isfinite(plain.loss + noise):
        return None
    if not abs(plain.loss - fast.loss) <= plain.tolerance * abs(plain.loss) + 1e-6:
        return f"loss {float(fast.loss):.6f} instead of {float(plain.loss):.6f}"
    for name, expected in plain.of.items():
        if not (fast.of[name] - expected).norm() <= plain.tolerance * expected.norm() + noise:
            return _named(name, expected, fast.of[name])
    return None


def half_difference(exact: Gradients, rounded: Gradients, fast: Gradients) -> str | None:
    """Return where a half-precision step is further from float32 than rounding under autocast explains; None if it isn't."""
    everything = exact.norm()
    if not torch.isfinite(exact.loss + rounded.loss + everything + rounded.norm()):
        return None
    own = {n: (rounded.of[n] - g).norm() for n, g in exact.of.items()}
    ours = {n: (fast.of[n] - g).norm() for n, g in exact.of.items()}
    for name, expected in exact.of.items():
        # The error of one parameter may be chance; a wrong gradient differs by its own size.
        if not ours[name] <= 4 * own[name] + 0.05 * expected.norm() + 1e-3 * everything:
            return _named(name, expected, fast.of[name])
    total, theirs = (torch.stack(list(e.values())).norm() for e in (ours, own))
    allowed = TIMES_AUTOCAST * theirs + TOLERANCE * everything
    if not total <= allowed:
        return f"gradients {float(total / everything):.2%} from float32's, autocast's {float(theirs / everything):.2%}"
    if not abs(fast.loss - exact.loss) <= 4 * abs(rounded.loss - exact.loss) + 0.01 * abs(exact.loss) + 1e-6:
        return f"loss {float(fast.loss):.6f} instead of {float(exact.loss):.6f}"
    return None


def _named(name: str, expected: torch.Tensor, found: torch.Tensor) -> str:
    share = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
    return f"the gradient of {name} differs by {share:.2g} of its norm"


@contextmanager
def nothing_left_behind(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Switch dropout off and make matmuls exact in this block; then restore weights, attributes and generators."""
    precision = torch.get_float32_matmul_precision()
    attributes = [(vars(m), dict(vars(m)), _contents(m)) for m in model.modules()]
    own = why_not(model) is not None  # a custom forward pass might write to weights
    tensors = [*model.buffers(), *(model.parameters() if own else ())]
    values = [t.detach().clone() for t in tensors]
    watched = [(p, p.grad, p._backward_hooks) for p in model.parameters()]
    try:
        torch.set_float32_matmul_precision("highest")
        for parameter, _, hooks in watched:
            parameter.grad = None
            if hooks:
                parameter._backward_hooks = None
        model.train()
        for module in model.modules():
            _stop_dropping(module)
        with generators_unchanged(device):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for parameter, gradient, hooks in watched:
            parameter.grad = gradient
            if hooks:
                parameter._backward_hooks = hooks
        for place, before, contents in attributes:
            _put_back(place, before, contents)
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                if not torch.equal(tensor, value):
                    tensor.copy_(value)


@contextmanager
def generators_unchanged(device: torch.device) -> Iterator[None]:
    """Restore the random generators after this block."""
    found = generator_states(device)
    try:
        yield
    finally:
        restore_generators(found, device)


def _stop_dropping(module: nn.Module) -> None:
    """Set the rates of dropout modules, and rates that are attributes (ModernBERT's `attention_dropout`), to zero."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = 0.0
    for name in [n for n, value in vars(module).items() if "drop" in n and isinstance(value, float)]:
        setattr(module, name, 0.0)


def _contents(module: nn.Module) -> list[tuple[Any, Any]]:
    """Return the containers among a module's attributes, each with a copy of its content."""
    return [(value, copy.copy(value)) for value in vars(module).values() if type(value) in _CONTAINERS]


def _put_back(place: dict[str, Any], before: dict[str, Any], contents: list[tuple[Any, Any]]) -> None:
    for container, kept in contents:
        container.clear()
        container.extend(kept) if isinstance(container, (list, deque)) else container.update(kept)
    if place.keys() != before.keys() or any(place[k] is not v for k, v in before.items()):
        place.clear()
        place.update(before)
