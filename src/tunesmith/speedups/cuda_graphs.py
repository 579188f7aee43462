"""Whole optimizer steps as CUDA graphs: one launch per step, one graph for each shape of a window."""

from __future__ import annotations

import gc
import logging
import random
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tunesmith.data.batches import Batch, Padding, tensors_of, views_of, with_tensors
from tunesmith.errors import short_text
from tunesmith.models.families import hook_tables, is_watched, why_not_original
from tunesmith.speedups.packing import Layout

log = logging.getLogger(__name__)

Body = Callable[[list[Batch], torch.Tensor, torch.Tensor], torch.Tensor]
"""(micro-batches on the device, learning rate, factor of the summed loss) -> the numbers of the step, after the update."""
Shape = tuple[Any, ...]

MOST = 48
"""Maximum number of captures per run. A graph takes some MB on the host; all graphs share one pool of device memory."""


_REFUSED = (RuntimeError, AssertionError, ValueError, TypeError, NotImplementedError)
"""Errors of a capture whose step does something that can't be captured."""


@dataclass(frozen=True)
class _Captured:
    graph: Any
    batches: list[Batch]
    numbers: torch.Tensor


class StepGraphs:
    """Captures a step when its shape comes for the second time; the first time it runs uncaptured and warms everything up.

    The CUDA graph of a step reads batch, learning rate and factor from fixed memory on the device, and draws dropout from torch's
    generator, which is seeded before the replay. So captured and uncaptured steps are bit-identical, and a run resumes exactly.
    """

    def __init__(self, device: torch.device, before: Callable[[], None] | None = None, *, padded: bool = False) -> None:
        """Prepare for captures; `before` is called before every replay."""
        self._device, self._before, self._padded = device, before, padded
        self._around: Hashable = None
        self._pool: Any = None
        self._seen: Counter[Shape] = Counter()
        self._captures = 0
        self._graphs: dict[Shape, _Captured] = {}
        self._rate = torch.zeros((), dtype=torch.float64, device=device)
        self._factor = torch.zeros((), device=device)
        self.off = False
        """Set after a failed capture: all further steps run uncaptured."""

    def __len__(self) -> int:
        return len(self._graphs)

    def run(
        self, batches: tuple[Batch, ...], rate: float, factor: float, body: Body, around: Hashable = ()
    ) -> torch.Tensor | None:
        """Replay the step and return its numbers; None if it has to run uncaptured, as always if `around` is None.

        `around` identifies everything that a capture has fixed. If it changes, all graphs are dropped.
        """
        shape = tuple(_shape_of(batch, padded=self._padded) for batch in batches)
        if self.off or None in shape or around is None:
            return None
        if around != self._around:
            self._around = around
            self._seen.clear()
            self.close()
        captured = self._graphs.get(shape)
        if captured is None:
            self._seen[shape] += 1
            if self._captures >= MOST or self._seen[shape] < 2:
                return None
            captured = self._capture(batches, body)
            if captured is None:
                return None
            self._captures += 1
            self._graphs[shape] = captured
        if self._before is not None:
            self._before()
        self._rate.fill_(rate)
        self._factor.fill_(factor)
        for fixed, batch in zip(captured.batches, batches, strict=True):
            _copy_into(fixed, batch)
        captured.graph.replay()
        return captured.numbers.clone()

    def _capture(self, batches: tuple[Batch, ...], body: Body) -> _Captured | None:
        fixed = [_place(batch, self._device) for batch in batches]
        numbers = torch.zeros(3, device=self._device)
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        try:
            with capturing(graph, self._pool):
                numbers.copy_(body(fixed, self._rate, self._factor))
        except _REFUSED as error:
            self._graphs.clear()
            self._pool = None  # torch takes nothing from a pool whose graphs are all gone
            self.off = True
            forget_broken_capture(self._device)
            why = capture_failure(error)
            log.warning("the step could not be captured as a CUDA graph (%s); steps run uncaptured", why)
            return None
        return _Captured(graph, fixed, numbers)

    def drop_graphs(self) -> bool:
        """Drop all graphs after an out-of-memory error; return whether there were any. Further steps run uncaptured."""
        if not self._graphs:
            return False
        log.warning("out of memory: the CUDA graphs are released, and steps run without them, which needs less")
        self.off = True
        self.close()
        return True

    def close(self) -> None:
        """Drop all graphs and their memory."""
        if self._graphs and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._graphs.clear()
        self._pool = None


def forget_broken_capture(device: torch.device) -> None:
    """Reset the device after a failed capture, whose generator would refuse to draw."""
    torch.cuda.synchronize()
    fresh = torch.Generator(device=device)
    torch.cuda.default_generators[device.index or 0].graphsafe_set_state(fresh)


_READS = ("cudaErrorStreamCapture", "Cannot copy between CPU and CUDA tensors")


def capture_failure(error: BaseException) -> str:
    """Return why a capture failed, in words: the messages of torch and CUDA name neither the model nor the operation."""
    if any(text in str(error) for text in _READS):
        return "the model reads values back from the GPU in the middle of a step"
    return short_text(error)


@contextmanager
def capturing(graph: Any, pool: Any) -> Iterator[None]:
    """Capture without garbage collection: if pinned memory of an earlier run were freed meanwhile, its event would be recorded in
    the captured stream, and every later use of pinned memory would fail. Other threads continue to pin batches and to copy
    checkpoints; only this thread must not use the device otherwise.
    """
    was_on, stream = gc.isenabled(), torch.cuda.current_stream()
    gc.disable()
    try:
        with (
            warnings.catch_warnings(),
            no_host_randomness(),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
        ):
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")  # of a capture that broke off at its beginning
            yield
    finally:
        torch.cuda.set_stream(stream)  # torch leaves the captured one current if the capture failed
        if was_on:
            gc.enable()


def _shape_of(batch: Batch, *, padded: bool = False) -> Shape | None:
    """Return what two batches must have in common to share a graph; None for a batch that isn't packed, unless `padded`."""
    layout = batch.inputs.get("layout")
    if batch.labels is None or not (padded or isinstance(layout, Layout)):
        return None
    tensors = [(n, tuple(t.shape), t.dtype) for n, t in sorted(batch.inputs.items()) if isinstance(t, torch.Tensor)]
    if len(tensors) + isinstance(layout, Layout) != len(batch.inputs):
        return None
    labels = (tuple(batch.labels.shape), batch.labels.dtype)
    if not isinstance(layout, Layout):
        return (*tensors, labels)
    return (*tensors, labels, layout.longest, tuple(layout.bounds.shape), tuple(layout.order.shape))


def _place(batch: Batch, device: torch.device) -> Batch:
    """Return a copy of the batch on the device, in separate memory."""
    tensors = tensors_of(batch)
    if batch.block is None:
        return with_tensors(batch, [tensor.to(device, copy=True) for tensor in tensors])
    block = batch.block.to(device)
    return with_tensors(batch, views_of(block, tensors), block=block)


def _copy_into(fixed: Batch, batch: Batch) -> None:
    """Copy a batch into the memory that a graph reads."""
    if fixed.block is not None and batch.block is not None:
        fixed.block.copy_(batch.block, non_blocking=True)
        return
    for place, value in zip(tensors_of(fixed), tensors_of(batch), strict=True):
        place.copy_(value, non_blocking=True)


class LengthBuckets:
    """Switch of one run: whether batches are padded to one of few widths."""

    def __init__(self) -> None:
        self.on = True

    def enable(self) -> None:
        """Pad to few widths."""
        self.on = True

    def disable(self) -> None:
        """Pad each batch to its longest example."""
        self.on = False


@dataclass(frozen=True)
class BucketPadding(Padding):
    """Pads to a multiple that grows with the length, but never beyond the longest example, because positions are limited."""

    longest: int = 0
    switch: LengthBuckets = field(default_factory=LengthBuckets)

    def width(self, longest: int) -> int:
        """Return the width of a batch whose longest row has `longest` tokens."""
        return max(longest, min(bucket_width(longest), self.longest)) if self.switch.on else longest


def bucket_width(longest: int) -> int:
    """Round a number of columns up to one of few widths."""
    multiple = 16 if longest <= 128 else 32 if longest <= 256 else 64
    return -(-longest // multiple) * multiple


def bucketed(padding: Padding, longest: int) -> BucketPadding:
    """Return the same padding with few widths."""
    return BucketPadding(padding.pad_token_id, padding.pad_token_type_id, padding.side, longest=longest)


def is_too_wide(batch: Batch) -> bool:
    """Return whether a padded batch has columns that contain only padding."""
    mask = batch.inputs.get("attention_mask")
    return isinstance(mask, torch.Tensor) and not (bool(mask[:, 0].any()) and bool(mask[:, -1].any()))


def why_not_captured(model: nn.Module) -> str | None:
    """Return why padded steps of this model are not captured; None if a capture can be tried.

    A replay would not repeat work of user code on the host. Models of transformers do such work in two ways: they wait for the
    device, which makes the capture fail, or they draw random numbers on the host, which `no_host_randomness` detects.
    """
    if not type(model).__module__.startswith("transformers.models."):
        return f"{type(model).__name__} is not a class of transformers, and may do work on the host that a replay would skip"
    if getattr(model, "is_gradient_checkpointing", False):
        return "gradient checkpointing repeats layers"
    return why_not_original(model, ())


@contextmanager
def no_host_randomness() -> Iterator[None]:
    """Raise a RuntimeError if random numbers were drawn on the host in this block: a replay would not draw them again."""
    before = _host_generators()
    yield
    if _host_generators() != before:
        raise RuntimeError("the step draws random numbers on the host")


def _host_generators() -> tuple[bytes, str, str]:
    """Return the states of the host's generators of Python, NumPy and torch."""
    return torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), repr(np.random.get_state())


STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_SETTINGS = ("weight_decay", "betas", "eps", "amsgrad", "maximize")
REQUIRES_GRAD, DTYPE = attrgetter("requires_grad"), attrgetter("dtype")
HOOKS = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")
"""Hooks on the gradient of a parameter; they are read for all parameters before every step."""


class Fingerprint:
    """Identity of a model and its optimizer, compared before each step, because a replay would not notice changes."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        self._model, self._optimizer = model, optimizer
        self._places, self._moves = list[int](), 0
        self._list_modules()

    def _list_modules(self) -> None:
        self._modules = list(self._model.modules())
        self._attributes = [vars(module) for module in self._modules]
        self._inside = [module._modules for module in self._modules]
        self._tables = [module._parameters for module in self._modules]
        self._hooks = hook_tables(self._modules)
        self._dropouts = [m for m in self._modules if isinstance(m, nn.Dropout)]
        self._shares = [(a, n) for a in self._attributes for n, v in a.items() if "drop" in n and isinstance(v, float)]
        self._children = self._child_ids()

    def _child_ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._inside))))

    def _parameters(self) -> list[torch.Tensor]:
        return [p for p in chain.from_iterable(map(dict.values, self._tables)) if p is not None]

    def of_model(self) -> Hashable:
        """Return a value that changes if modules, their classes, their hooks or their parameters are replaced."""
        if self._child_ids() != self._children:
            self._list_modules()
        parts = (*map(id, self._modules), *map(id, map(type, self._modules)))
        forwards = tuple(id(a["forward"]) for a in self._attributes if "forward" in a)
        hooks = tuple(id(hook) for table in filter(None, self._hooks) for hook in table.values())
        parameters = self._parameters()
        trained = (*map(id, parameters), *map(REQUIRES_GRAD, parameters), *map(DTYPE, parameters))
        config = getattr(self._model, "config", None)
        asked = ("_attn_implementation", "output_hidden_states", "output_attentions")
        return parts, forwards, hooks, trained, tuple(getattr(config, name, None) for name in asked)

    def of_step(self) -> Hashable | None:
        """Return a value that changes if the CUDA graph would no longer equal the plain step; None if a hook listens."""
        assert self._optimizer is not None
        parameters = self._parameters()
        of_optimizer = [getattr(self._optimizer, name) for name in STEP_HOOKS if hasattr(self._optimizer, name)]
        if is_watched(filter(None, [*self._hooks, *of_optimizer])) or any(any(map(of, parameters)) for of in HOOKS):
            return None
        settings = tuple(tuple(g.get(n) for n in _SETTINGS) for g in self._optimizer.param_groups)
        trained = (*[len(g["params"]) for g in self._optimizer.param_groups], *map(REQUIRES_GRAD, parameters))
        places = tuple(map(torch.Tensor.data_ptr, parameters))
        return places, self._drop_shares(), settings, trained, self._changes_of_moments()

    def of_call(self) -> Hashable | None:
        """Return a value that changes if a captured call would no longer equal the plain one; None if a hook listens."""
        model = self.of_model()
        if is_watched(filter(None, self._hooks)):
            return None
        return model, self._drop_shares(), tuple([module.training for module in self._modules])

    def _drop_shares(self) -> tuple[Any, ...]:
        return (*[m.p for m in self._dropouts], *[a.get(n) for a, n in self._shares])

    def _changes_of_moments(self) -> int:
        """Return how often the state of the optimizer moved to other memory, as after `load_state_dict`.

        The first step creates the state, which doesn't count.
        """
        assert self._optimizer is not None
        values = chain.from_iterable(state.values() for state in self._optimizer.state.values())
        places = [v.data_ptr() for v in values if isinstance(v, torch.Tensor)]
        if places != self._places:
            self._moves += bool(self._places)
            self._places = places
        return self._moves
