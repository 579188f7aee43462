"""Writes safetensors files and hashes the bytes meanwhile: what was meant is what is hashed, and nothing is read back.

The format: 8 bytes of header length, the header in JSON padded to 8 bytes, then the tensors without gaps.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import threading
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors.torch import save_file

from tunesmith.run.remembered import hash_file
from tunesmith.run.writing import create

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
