"""Work that a run does in a thread of its own: checkpoints, the model folder, hashes; and its copies of what is on a GPU."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass
class Aside:
    """Jobs one behind the other, in threads of their own. What one raises is raised again in the thread that takes it, and those
    behind it are not run."""

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    _jobs: deque[tuple[int, Future[float]]] = field(default_factory=deque)
    _rests_until: float = 0.0

    def start(self, job: Callable[[], object], step: int = 0) -> None:
        """Runs the job, which is of this step, as soon as those before it have ended."""
        before = self._jobs[-1][1] if self._jobs else None
        future: Future[float] = Future()
        self._jobs.append((step, future))

        def run() -> None:
            failed = None if before is None else before.exception()
            if failed is not None:
                future.set_exception(failed)
                return
            started = time.perf_counter()
            try:
                job()
            except BaseException as error:
                future.set_exception(error)
            else:
                ended = time.perf_counter()
                self._rests_until = ended + (ended - started)
                future.set_result(ended - started)

        # A daemon: a process that receives a second signal does not wait for it, and an unpublished folder is swept later.
        threading.Thread(target=run, name="tunesmith-save", daemon=True).start()

    def take(self, *, wait: bool) -> tuple[int, float] | None:
        """Step and seconds of the oldest job, once; None when there is none, or it still runs and `wait` is off."""
        if not self._jobs or not (wait or self._jobs[0][1].done()):
            return None
        step, job = self._jobs[0]
        error = job.exception()  # waits; what a signal raises meanwhile leaves the job here, and the end waits again
        if error is not None:
            self._jobs.clear()
            raise error
        self._jobs.popleft()
        return step, job.result()

    def steps(self) -> list[int]:
        """The steps of the jobs that were not taken yet."""
        return [step for step, _ in self._jobs]

    def is_busy(self) -> bool:
        """Whether a job runs, or the last one ended less time ago than it took."""
        return any(not job.done() for _, job in self._jobs) or time.perf_counter() < self._rests_until


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


def has_room(size: int) -> bool:
    """Whether a copy of this many bytes leaves as much again free, also within the limit of a container."""
    free = [int(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    limits, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limits and used and limits[0].isdigit():
        # memory.current counts the page cache, which can be reclaimed: the answer is cautious
        free.append(int(limits[0]) - int(used[0]))
    return bool(free) and min(free) > 2 * size


def has_device_room(device: torch.device, size: int) -> bool:
    """Whether a copy of this many bytes on a GPU leaves three times as much free there."""
    return device.type == "cuda" and torch.cuda.mem_get_info(device)[0] > 4 * size


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
