"""Writes safetensors files and hashes the bytes on their way: what was meant is what is hashed, and nothing is read back.

The format: 8 bytes of header length, the header in JSON padded to 8 bytes, then the tensors without gaps.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import queue
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file

from tunesmith.run.sealed import hash_file

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
"""Bytes written and hashed at a time: one thread writes a block while another hashes the one before."""


def write_tensors(file: Path, tensors: dict[str, torch.Tensor], *, metadata: dict[str, str] | None = None) -> str:
    """Writes contiguous CPU tensors, byte for byte as the library would; gives the sha256 in hex."""
    if any(tensor.dtype not in DTYPES for tensor in tensors.values()):
        save_file(tensors, file, metadata=metadata)
        return hash_file(file)
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
    with HashingWriter(file) as out:
        out.write(memoryview(len(text).to_bytes(8, "little") + text))
        for _, tensor in ordered:
            out.write(_bytes_of(tensor))
    return out.digest


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor, without a copy (numpy has no bfloat16)."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


class HashingWriter:
    """A file whose bytes are hashed by a second thread while they are written. `digest` is set at the end."""

    def __init__(self, file: Path) -> None:
        self.digest = ""
        self._file = file.open("wb", buffering=0)
        self._todo: queue.Queue[memoryview | None] = queue.Queue(maxsize=8)
        self._thread = threading.Thread(target=self._hash, name="tunesmith-hash", daemon=True)
        self._thread.start()

    def write(self, data: memoryview) -> None:
        """Writes all of the bytes. They must stay as they are until the end of the file."""
        for start in range(0, len(data), BLOCK):
            block = data[start : start + BLOCK]
            self._todo.put(block)
            done = 0
            while done < len(block):
                done += self._file.write(block[done:])

    def _hash(self) -> None:
        total = hashlib.sha256()
        while (block := self._todo.get()) is not None:
            total.update(block)
        self.digest = total.hexdigest()

    def __enter__(self) -> HashingWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._todo.put(None)
        self._thread.join()
        self._file.close()
