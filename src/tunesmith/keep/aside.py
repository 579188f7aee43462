"""Work that a run does in a thread of its own: checkpoints, the model folder, hashes; and its copies of what is on a GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch


@dataclass
class Aside:
    """At most one job at a time, in a thread of its own. What it raises is raised again in the thread that asks for it."""

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    _job: Future[float] | None = None

    def start(self, job: Callable[[], object]) -> None:
        """Runs the job. The one before must have been taken."""
        assert self._job is None
        future: Future[float] = Future()
        self._job = future
        started = time.perf_counter()

        def run() -> None:
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(time.perf_counter() - started)

        # A daemon: a process that receives a second signal does not wait for it, and an unpublished folder is swept later.
        threading.Thread(target=run, name="tunesmith-save", daemon=True).start()

    def take(self, *, wait: bool) -> float | None:
        """The seconds of the job that ended, once; None when there is none, or none that ended and `wait` is off."""
        job = self._job
        if job is None or not (wait or job.done()):
            return None
        try:
            return job.result()
        finally:
            self._job = None


STAGE = "stage"
"""Key of the buffer that copies go through."""


@contextmanager
def beside_steps(device: torch.device) -> Iterator[None]:
    """Inside, what is copied from the device does not hold up what it computes meanwhile."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        yield


def buffered(buffers: dict[str, torch.Tensor], tensor: torch.Tensor, key: str) -> torch.Tensor:
    """A copy on the host; `buffers` is used again where it fits: fresh memory costs five times as much as the copy."""
    held = buffers.get(key)
    if held is tensor:
        return held
    if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
        held = buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
    if not tensor.is_cuda:
        return held.copy_(tensor)
    if STAGE not in buffers:
        buffers[STAGE] = torch.empty(1 << 25, dtype=torch.uint8, pin_memory=True)
    copy_staged(tensor, buffers[STAGE], held)
    return held


def copy_staged(tensor: torch.Tensor, stage: torch.Tensor, held: torch.Tensor) -> None:
    """Copies a tensor piece by piece through `stage`, memory that the system does not move: a GPU copies faster into it."""
    there, here = tensor.contiguous().view(-1).view(torch.uint8), held.view(-1).view(torch.uint8)
    for start in range(0, len(here), len(stage)):
        part = stage[: len(here) - start]
        part.copy_(there[start : start + len(stage)], non_blocking=True)
        if tensor.is_cuda:
            torch.cuda.current_stream(tensor.device).synchronize()
        here[start : start + len(stage)].copy_(part)
