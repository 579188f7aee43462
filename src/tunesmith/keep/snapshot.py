"""One moment of a run as it goes to disk, and a thread that writes it while the run continues.

Tensors become safetensors files whose bytes are hashed while they are written; nothing is read back. The format: 8 bytes of
header length, the header in JSON padded to 8 bytes, then the tensors without gaps.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
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
from safetensors.torch import save_file

from tunesmith.encoder.params import ADAPTER
from tunesmith.run.remembered import hash_file
from tunesmith.run.sealed import write_sealed
from tunesmith.run.writing import create, write_new

DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""In the order in which the library puts them into a file."""
BLOCK = 1 << 22
"""Bytes written and hashed at a time."""


def write_tensors(
    file: Path, tensors: dict[str, torch.Tensor], *, metadata: dict[str, str] | None = None
) -> Future[str]:
    """Writes contiguous CPU tensors, byte for byte as the library would; gives the sha256 in hex, when it is ready.

    The tensors must stay as they are until then: their memory is hashed by a thread that the writing does not wait for.
    """
    if any(tensor.dtype not in DTYPES for tensor in tensors.values()):
        save_file(tensors, file, metadata=metadata)
        ready: Future[str] = Future()
        ready.set_result(hash_file(file))
        return ready
    parts = _parts(tensors, metadata)
    digest = _hash_aside(parts, tensors)
    try:
        with create(file) as out:
            for part in parts:
                for at in range(0, len(part), BLOCK):
                    out.write(part[at : at + BLOCK])
    except BaseException:
        digest.cancel()
        raise
    return digest


def hash_tensors(tensors: dict[str, torch.Tensor], *, metadata: dict[str, str] | None = None) -> str | None:
    """The sha256 of the file that `write_tensors` would write; None where that is left to the library."""
    if any(tensor.dtype not in DTYPES for tensor in tensors.values()):
        return None
    return _hash_aside(_parts(tensors, metadata), tensors).result()


def _parts(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> list[memoryview]:
    """The bytes of a safetensors file: header, then tensor after tensor."""
    place = list(DTYPES).index
    ordered = sorted(tensors.items(), key=lambda item: (place(item[1].dtype), item[0]))
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    start = 0
    for name, tensor in ordered:
        assert tensor.is_contiguous()
        assert tensor.device.type == "cpu"
        end = start + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(8, "little") + text), *(_bytes_of(tensor) for _, tensor in ordered)]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor, without a copy (numpy has no bfloat16)."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _hash_aside(parts: list[memoryview], owners: dict[str, torch.Tensor]) -> Future[str]:
    """sha256 of the parts, made by a thread of its own: one file is hashed while the next is written and synced.

    `owners` are the tensors whose memory the parts look at: the thread keeps them alive.
    """
    digest: Future[str] = Future()

    def run(_owners: object) -> None:
        total = hashlib.sha256()
        for part in parts:
            for start in range(0, len(part), BLOCK):
                if digest.cancelled():
                    return
                total.update(part[start : start + BLOCK])
        if digest.set_running_or_notify_cancel():
            digest.set_result(total.hexdigest())

    threading.Thread(target=run, args=(owners,), name="tunesmith-hash", daemon=True).start()
    return digest


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
        """The same in memory of its own."""
        files = {
            file: {name: buffered(tensor, buffers, f"{file}/{name}") for name, tensor in tensors.items()}
            for file, tensors in self.files.items()
        }
        return replace(self, files=files)


def buffered(tensor: torch.Tensor, buffers: dict[str, torch.Tensor], key: str) -> torch.Tensor:
    """A copy on the host; `buffers` is used again where it fits: fresh memory costs five times as much as the copy."""
    held = buffers.get(key)
    if held is tensor:
        return held
    if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
        held = buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
    return held.copy_(tensor)


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
    """Whether a copy of this many bytes leaves as much again free, also within the limit of a container."""
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
