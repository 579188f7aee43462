"""Reads the header of a safetensors file as if its author meant harm: nothing is allocated that the file does not hold."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

from tunesmith.errors import ConfigError

LONGEST_HEADER = 8_000_000
"""Bytes. Real headers have about 100 bytes a tensor; the library itself would parse 100 MB."""
MOST_TENSORS = 50_000
BITS = {
    dtype: bits
    for bits, dtypes in {
        8: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"),
        16: ("U16", "I16", "F16", "BF16"),
        32: ("U32", "I32", "F32"),
        64: ("U64", "I64", "F64"),
    }.items()
    for dtype in dtypes
}


def check_tensor_file(file: Path) -> None:
    """A ConfigError unless the file is a regular one whose header describes exactly the bytes behind it."""
    _read_header(file)


def count_parameters(folder: Path) -> int:
    """Numbers in the weights of a model folder, by the headers of its files."""
    headers = [_read_header(file) for file in sorted(folder.glob("*.safetensors"))]
    return sum(math.prod(entry["shape"]) for header in headers for entry in header.values())


def _read_header(file: Path) -> dict[str, Any]:
    try:
        return _check(file)
    except (ValueError, RecursionError, TypeError, KeyError, OverflowError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"is not a safetensors file ({str(reason)[:120]})", where=str(file), fix="Download it again."
        ) from None


def _check(file: Path) -> dict[str, Any]:
    info = file.stat()  # before it is opened: a pipe would wait forever
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("not a regular file")
    with file.open("rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length < 2 or length > info.st_size - 8:
            raise ValueError(f"a header of {length} bytes in a file of {info.st_size}")
        if length > LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes; the limit is {LONGEST_HEADER}")
        text = stream.read(length)
    if not text.startswith(b"{"):
        raise ValueError("the header does not begin with {")
    header: dict[str, Any] = json.loads(text.decode("utf-8"), object_pairs_hook=_without_duplicates)
    header.pop("__metadata__", None)
    if len(header) > MOST_TENSORS:
        raise ValueError(f"{len(header)} tensors; the limit is {MOST_TENSORS}")
    _check_places(header, info.st_size - 8 - length)
    return header


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands in the header twice")
    return found


def _check_places(header: dict[str, Any], size: int) -> None:
    """Tensors follow each other without hole or overlap and fill the file."""
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        start, end = entry["data_offsets"]
        count = 1
        for side in entry["shape"]:
            if type(side) is not int or side < 0:
                raise ValueError(f"{name} has the shape {entry['shape']}")
            count *= side
        if (
            type(start) is not int
            or type(end) is not int
            or start != at
            or (end - start) * 8 != count * BITS[entry["dtype"]]
        ):
            raise ValueError(f"{name} does not lie where the one before it ends, or has another size than its shape")
        at = end
    if at != size:
        raise ValueError(f"the tensors have {at} bytes, the file has {size} for them")
