"""Values that a forward pass copies from the host, kept on the device so that the step can be captured.

transformers makes constants on the host in the middle of a forward pass: the 0.0 of a mask, an identity matrix, the number of
a column. Such a copy ends the capture of a CUDA graph. The first step of a shape runs uncaptured and is listened to: each value
that it copies is kept on the device, by its content. In the capture the copy is made from there, and is a part of the graph.

Only a value that a step had before is given: a captured step computes what it would compute uncaptured. No such value is a
function of the batch: that lies on the device, and reading from there ends a capture. A counter or a clock has another content
in every step, and is refused.

Python's calls are listened to, not torch's operators: under a mode of operators torch itself takes other routes, and its
attention has the seeds of dropout on the host. What torch copies below Python's calls, and in a backward pass, ends a capture as
before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

MOST, MOST_BYTES = 512, 64 << 20
"""What is kept at most. A step that needs more is not captured."""
PATIENCE = 2
"""Captures that may meet a value they lack: in a capture transformers makes masks that it leaves out where no row is padded."""

_MAKE = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
"""Of Python's numbers, or an array. torch makes the copy below its operators."""
_MOVE = {torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.type_as, torch.as_tensor, torch.asarray}
"""The first argument to where the others say."""
_INDEX = {torch.Tensor.__getitem__, torch.Tensor.__setitem__}
_CHOOSE = {torch.where, torch.Tensor.where}
_MIX = {torch.Tensor.copy_} | _INDEX | _CHOOSE
"""They take tensors of the host beside those of the device, and copy them. Others read a number on the host (`masked_fill`,
arithmetic), which a capture allows, or refuse it."""

Meet = Callable[[torch.Tensor], torch.Tensor]


class HostConstants:
    """The values of one run by dtype, shape, strides and content. They must outlive the graphs that read them.

    Where they are not `wanted`, nothing is listened to or given.
    """

    def __init__(self, device: torch.device, *, wanted: bool = True) -> None:
        self._device, self._wanted = device, wanted
        self._known: dict[Hashable, torch.Tensor] = {}
        self._bytes, self._patience = 0, PATIENCE
        self._meet: Meet | None = None
        self._lacking: torch.Tensor | None = None
        self.full = False
        """Whether there was a value that is not kept: no further shape can be captured."""

    def __len__(self) -> int:
        return len(self._known)

    def rest(self) -> None:
        """Steps pass by unheard."""
        self._meet = None

    def listen(self) -> None:
        """The forward passes that follow show what they copy; they run as they are."""
        self._meet = self._hear if self._wanted else None

    def give(self) -> None:
        """The forward passes that follow are captured, with what was heard."""
        self._meet, self._lacking = self._look_up if self._wanted else None, None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around a forward pass."""
        if self._meet is None:
            yield
            return
        with _Calls(self._device, self._meet):
            yield
        if self._lacking is not None:  # the model's code has caught the error
            raise _unheard()

    def learn(self) -> bool:
        """Keeps the value that the last capture lacked; False where it lacked none, or too many captures did."""
        lacking, self._lacking = self._lacking, None
        if lacking is None or self._patience == 0:
            return False
        self._patience -= 1
        self._hear(lacking)
        return True

    def clear(self) -> None:
        """Gives the memory back, and begins anew."""
        self._known.clear()
        self._bytes, self._patience, self.full, self._lacking = 0, PATIENCE, False, None

    def _hear(self, value: torch.Tensor) -> torch.Tensor:
        key = _content(value)
        if key not in self._known:
            size = value.numel() * value.element_size()
            if len(self._known) >= MOST or self._bytes + size > MOST_BYTES:
                self.full = True
                return value
            self._bytes += size
            self._known[key] = value.to(self._device, copy=True)
        return value

    def _look_up(self, value: torch.Tensor) -> torch.Tensor:
        known = self._known.get(_content(value))
        if known is None:
            self._lacking = value.clone()
            raise _unheard()
        return known.clone()  # the step may write into it


def _unheard() -> RuntimeError:
    return RuntimeError("the step copies a value from the host that it did not have before")


def _content(value: torch.Tensor) -> Hashable:
    plain = value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return value.dtype, value.shape, value.stride(), hashlib.sha256(plain.numpy().data).digest()


class _Calls(TorchFunctionMode):
    """Has a value of the host met before it is copied to the device."""

    def __init__(self, device: torch.device, meet: Meet) -> None:
        super().__init__()
        self._device, self._meet = device, meet

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _makes_on(func, args, kwargs, self._device):
            made = func(*args, **{**kwargs, "device": "cpu"})
            return self._met(made).to(self._device)
        if _moves_to(func, args, kwargs, self._device):
            args = self._met(args[0]), *args[1:]
        elif _mixes_on(func, args, self._device):
            args, kwargs = self._mixed(func, args, kwargs)
        return func(*args, **kwargs)

    def _met(self, value: Any) -> Any:
        return self._meet(value) if _is_plain(value) else value

    def _mixed(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if func not in _INDEX:
            return tree_map_only(torch.Tensor, self._met, (args, kwargs))  # type: ignore[no-any-return]
        index, values = args[1], map(self._met, args[2:])
        index = tuple(map(self._place, index)) if isinstance(index, tuple) else self._place(index)
        return (args[0], index, *values), kwargs

    def _place(self, index: Any) -> Any:
        """One index. A list of positions is a tensor; a tensor without dimensions is a number, which is read on the host."""
        if isinstance(index, list) and index and all(type(i) is int for i in index):
            index = torch.tensor(index)
        return self._met(index) if isinstance(index, torch.Tensor) and index.ndim else index


def _makes_on(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> bool:
    """Whether the call makes a tensor of the device of what is not a tensor."""
    own = func is torch.Tensor.new_tensor
    if func not in _MAKE or len(args) <= own or isinstance(args[own], torch.Tensor) or kwargs.get("requires_grad"):
        return False
    place = kwargs.get("device")
    return _is_on(args[0] if own and place is None else place, device)


def _moves_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> bool:
    """Whether the call has a tensor, its first argument, on the device."""
    if func not in _MOVE or not args or not isinstance(args[0], torch.Tensor):
        return False
    return func is torch.Tensor.cuda or any(_is_on(value, device) for value in (*args[1:], *kwargs.values()))


def _mixes_on(func: Any, args: tuple[Any, ...], device: torch.device) -> bool:
    """Whether the call takes tensors of the host for a result on the device. The other way is a read, and stays one."""
    return func in _MIX and any(_is_on(value, device) for value in (args if func in _CHOOSE else args[:1]))


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor of the host whose values can be kept: pinned memory is read again by every replay."""
    if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or value.layout != torch.strided:
        return False
    if value.requires_grad or value.numel() == 0 or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return False
    return not value.is_pinned()


def _is_on(value: Any, device: torch.device) -> bool:
    """Whether a tensor lies on the device, or a word means it."""
    if isinstance(value, torch.Tensor):
        return value.device.type == device.type
    if isinstance(value, str):
        return value.partition(":")[0] == device.type
    return isinstance(value, torch.device) and value.type == device.type
