"""What a step does on the host, for steps of encoders that nothing is known about: a captured step does none of it again.

A rehearsal, which is an uncaptured step, notes in order what is copied to the device and what is read from it. The capture of
the next step of that shape is given the same answers, so that it needs not wait for the device:

- a tensor that is made on the host and copied must have the same values again; the captured step has a copy on the device;
- a value that is read must be the same in every replay. The device compares, and nothing is updated by a replay that differs;
- a random number that is drawn on the host must decide nothing: compared with a bound that no draw reaches, or not used.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_VALUES = (aten._local_scalar_dense.default, aten.equal.default)
_SIZED_BY_VALUES = (aten.nonzero.default, aten.masked_select.default, aten.unique_consecutive.default)
_INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
_COPIES = (aten._to_copy.default, aten.copy_.default)
_BELOW, _ABOVE = (aten.lt.Scalar, aten.ge.Scalar), (aten.le.Scalar, aten.gt.Scalar)
DRAWS = "the step draws random numbers on the host"


class NotRepeatable(RuntimeError):
    """The step does on the host what a replay would leave out."""


@dataclass
class Rehearsal:
    """What one uncaptured step did on the host, in order; `why_not` if no replay could do without it."""

    notes: list[tuple[str, str, Any]] = field(default_factory=list)
    """(kind, the line of code that asked, the answer)"""
    why_not: str | None = None
    drew: bool = False
    """Random numbers that decided nothing."""

    @property
    def is_plain(self) -> bool:
        """Nothing was done on the host that a capture has to be given."""
        return not (self.notes or self.drew)


class HostWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes notes of a step, or gives a captured one the answers of a rehearsal. `device` is where the model is.

    What is `given` to the step, its batch, a replay finds on the device: copies of it are none of the step's.
    """

    def __init__(
        self, device: torch.device, answers: Rehearsal | None = None, given: Iterable[torch.Tensor] = ()
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rehearsal = Rehearsal()
        self.differs: list[torch.Tensor] = []
        """Of a capture: true on the device when what was read is not what the rehearsal read."""
        self._device, self._answers = device, None if answers is None else list(answers.notes)
        self._given = {tensor.data_ptr() for tensor in given}
        self._drawn: dict[int, torch.Tensor] = {}
        self._bounded: set[int] = set()

    def __enter__(self) -> HostWatch:
        self._lifting = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # else a tensor made of Python numbers is copied unseen
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(self._lifting)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operator of the step, backward pass included."""
        given = kwargs or {}
        if self._drawn and self._uses_a_draw(func, args, given):
            self._refuse(DRAWS)
        if func in _COPIES:
            return self._copy(func, args, given)
        if func in _INDEXED:
            return self._index(func, args, given)
        if func in _VALUES and self._is_ours(args[0]):
            return self._answer(func, args, given)
        if func in _SIZED_BY_VALUES and self._is_ours(args[0]):
            return self._answer(func, args, given)
        found = func(*args, **given)
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(found, torch.Tensor) and self.is_host(found):
            self._note_draw(found, bounded=func is aten.rand.default)
        elif func is aten.detach.default and id(args[0]) in self._drawn:
            self._note_draw(found, bounded=id(args[0]) in self._bounded)
        return found

    def _note_draw(self, found: torch.Tensor, *, bounded: bool) -> None:
        self.rehearsal.drew = True
        self._drawn[id(found)] = found
        if bounded:
            self._bounded.add(id(found))

    def is_host(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the host."""
        return tensor.device.type == "cpu"

    def _is_ours(self, tensor: Any) -> bool:
        return (
            isinstance(tensor, torch.Tensor)
            and tensor.device.type == self._device.type
            and id(tensor) not in self._drawn
        )

    def _uses_a_draw(self, func: Any, args: Any, given: Any) -> bool:
        """Whether the operator is given a draw, and what comes out depends on it. Draws of `rand` are in [0, 1)."""
        used = [id(t) for t in _tensors(args, given) if id(t) in self._drawn]
        if not used or func is aten.detach.default:
            return False
        if func not in _BELOW + _ABOVE or used[0] not in self._bounded:
            return True
        bound = float(args[1])
        return not (bound >= 1 or (bound <= 0 if func in _BELOW else bound < 0))

    def _refuse(self, why: str) -> None:
        if self._answers is not None:
            raise NotRepeatable(why)
        self.rehearsal.why_not = self.rehearsal.why_not or why

    def _note(self, kind: str, answer: Any) -> None:
        self.rehearsal.notes.append((kind, _asking_line(), answer))

    def _next(self, kind: str) -> Any:
        """The answer to the same line of code. Others before it were asked for outside of captures only."""
        assert self._answers is not None
        asking = kind, _asking_line()
        while self._answers and self._answers[0][:2] != asking:
            self._answers.pop(0)
        if not self._answers:
            raise NotRepeatable("the step does not do on the host what it did before")
        return self._answers.pop(0)[2]

    def _copy(self, func: Any, args: Any, given: Any) -> Any:
        source = args[0] if func is aten._to_copy.default else args[1]
        target = torch.device(given.get("device") or source.device) if func is aten._to_copy.default else args[0].device
        if source.device.type == target.type or source.data_ptr() in self._given:
            return func(*args, **given)
        if target.type == "cpu":
            self._refuse("the step copies a tensor to the host")
            return func(*args, **given)
        there = self._on_device(source)
        if func is aten._to_copy.default:
            made = {k: v for k, v in given.items() if k not in ("device", "non_blocking", "pin_memory")}
            return func(there, **made)
        return func(args[0], there)

    def _on_device(self, source: torch.Tensor) -> torch.Tensor:
        """The values of a tensor of the host: copied in a rehearsal, its copy in a capture."""
        if self._answers is None:
            copy = source.to(self._device)
            self._note("copied", (source.clone(), copy))
            return copy.clone()
        before, copy = self._next("copied")
        if before.dtype != source.dtype or before.shape != source.shape or not torch.equal(before, source):
            raise NotRepeatable("the step copies other values from the host each time")
        return copy.clone()  # type: ignore[no-any-return]

    def _answer(self, func: Any, args: Any, given: Any) -> Any:
        """A value that the host reads, or a size that it learns."""
        if self._answers is None:
            found = func(*args, **given)
            kept = [t.clone() if self._is_ours(t) else t for t in args] if func in _SIZED_BY_VALUES else []
            self._note("read", (kept, _kept(found)))
            return found
        before, found = self._next("read")
        if func is aten._local_scalar_dense.default:
            same = args[0] == found
        elif func is aten.equal.default:
            same = (args[0] == args[1]).all() == found
        else:
            same = torch.stack([(a == b).all() for a, b in zip(args, before, strict=True) if self._is_ours(a)]).all()
        self.differs.append(~same.reshape(()))
        return _kept(found)

    def _index(self, func: Any, args: Any, given: Any) -> Any:
        """An index on the host is copied; a mask becomes as many indices as it had in the rehearsal."""
        if not self._is_ours(args[0]):
            return func(*args, **given)
        indices: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is None:
                indices.append(None)
                continue
            if index.device.type != self._device.type:
                index = self._on_device(index)
            indices += self._unmasked(index) if index.dtype in (torch.bool, torch.uint8) else [index]
        return func(args[0], indices, *args[2:], **given)

    def _unmasked(self, mask: torch.Tensor) -> Sequence[torch.Tensor]:
        if self._answers is None:
            found = aten.nonzero.default(mask)
            self._note("mask", len(found))
        else:
            count = self._next("mask")
            self.differs.append(mask.count_nonzero() != count)
            found = aten.nonzero_static.default(mask, size=count, fill_value=0)
        return found.unbind(1)  # type: ignore[no-any-return]


def _asking_line() -> str:
    """Where in the model's code an operator was called; empty in a backward pass, which no line of it calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _tensors(args: Any, given: Any) -> list[torch.Tensor]:
    found = []
    for value in (*args, *given.values()):
        inner = value if isinstance(value, (list, tuple)) else (value,)
        found += [v for v in inner if isinstance(v, torch.Tensor)]
    return found


def _kept(found: Any) -> Any:
    """A copy that nothing else writes to."""
    if isinstance(found, tuple):
        return tuple(t.clone() for t in found)
    return found.clone() if isinstance(found, torch.Tensor) else found


@contextmanager
def no_host_randomness(*, watched: bool = False) -> Iterator[None]:
    """Raises a RuntimeError if random numbers were drawn on the host inside: a captured step would never draw them again.

    With `watched`, a HostWatch judges those of torch.
    """
    before = _host_generators()[watched:]
    yield
    if _host_generators()[watched:] != before:
        raise NotRepeatable(DRAWS)


def _host_generators() -> tuple[bytes, str, str]:
    """Where torch's, Python's and NumPy's generators on the host stand."""
    return torch.get_rng_state().numpy().tobytes(), repr(random.getstate()), repr(np.random.get_state())
