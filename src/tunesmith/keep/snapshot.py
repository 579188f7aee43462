"""One moment of a run as it goes to disk, and a thread that writes it while the run continues."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tunesmith.encoder.adapters import ADAPTER
from tunesmith.keep.tensor_file import write_tensors
from tunesmith.run.sealed import write_sealed
from tunesmith.run.writing import create, write_new

WEIGHTS, STATE = "model.safetensors", "state.json"
ASIDE_FROM = 64 << 20
"""Bytes. A smaller checkpoint is on disk before a thread is worth its trouble (BERT-base: 1.3 GB, 0.8 s; a copy 0.1 s)."""


@dataclass(frozen=True)
class Snapshot:
    """`files` are tensors by file and name, on the CPU; `state` is the text of state.json; `meta` goes into the manifest."""

    files: dict[str, dict[str, torch.Tensor]]
    state: str
    meta: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for tensors in self.files.values() for t in tensors.values())

    def write(self, folder: Path, describe: Callable[[Path], None] | None) -> None:
        """Publishes it as a sealed folder. `describe` writes what makes it loadable elsewhere (config, tokenizer)."""

        def fill(tmp: Path) -> dict[str, Future[str]]:
            if describe is not None:
                # first: it may write weights of its own, and the hashes below are of what is written here
                describe(tmp)
            known = write_files(tmp, self.files)
            write_new(tmp / STATE, self.state.encode())
            return known

        write_sealed(folder, fill, self.meta, bytes_needed=self.size)

    def copied(self, buffers: dict[str, torch.Tensor]) -> Snapshot:
        """The same in memory of its own; `buffers` is used again where it fits: fresh memory costs five times as much."""
        files: dict[str, dict[str, torch.Tensor]] = {}
        for file, tensors in self.files.items():
            files[file] = {}
            for name, tensor in tensors.items():
                key = f"{file}/{name}"
                held = buffers.get(key)
                if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
                    held = buffers[key] = torch.empty_like(tensor)
                files[file][name] = held.copy_(tensor)
        return replace(self, files=files)


def write_files(folder: Path, files: dict[str, dict[str, torch.Tensor]]) -> dict[str, Future[str]]:
    """Writes tensors by file and name; gives the sha256 of each file, when it is ready. Weights say that they are torch's."""
    known = {}
    for name, tensors in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)  # a model's own way to save may have written it
        metadata = {"format": "pt"} if name.endswith((WEIGHTS, ADAPTER)) else None
        known[name] = write_tensors(folder / name, tensors, metadata=metadata)
    return known


def link_files(source: Path, target: Path, names: list[str]) -> None:
    """Files of one folder in another: hard links where the disk can, so they cost nothing."""
    for name in names:
        (target / name).parent.mkdir(exist_ok=True)
        try:
            os.link(source / name, target / name)
        except OSError:
            with open(source / name, "rb") as old, create(target / name) as new:
                shutil.copyfileobj(old, new)


@dataclass
class Aside:
    """At most one job at a time, in a thread of its own. What it raises is raised again in the thread that asks for it."""

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    _job: Future[float] | None = None

    def start(self, job: Callable[[], None]) -> None:
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


def has_room(size: int) -> bool:
    """Whether a copy of so many bytes leaves as much again free, also within the limit of a container."""
    free = [_number(line.split()[1]) * 1024 for line in _lines("/proc/meminfo") if line.startswith("MemAvailable:")]
    limits, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if limits and used and limits[0].isdigit():
        # memory.current counts the page cache, which gives way: the answer errs on the careful side
        free.append(_number(limits[0]) - _number(used[0]))
    return bool(free) and min(free) > 2 * size


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
