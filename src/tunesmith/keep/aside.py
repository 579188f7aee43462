"""Work that a run does in a thread of its own: checkpoints, the model folder, hashes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
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
