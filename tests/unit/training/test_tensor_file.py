"""Our writer of safetensors files writes byte for byte what the library writes, and the hash of what was meant."""

from __future__ import annotations

import hashlib
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tunesmith.training.checkpoint import BLOCK, write_tensors

TENSORS = {
    "b": torch.arange(15.0).reshape(3, 5),
    "a": torch.arange(4.0).bfloat16(),
    "long": torch.arange(5),
    "scalar": torch.tensor(3.0),
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False]),
    "é/name": torch.ones(2, 2).half(),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "double": torch.ones(3, dtype=torch.float64),
    "blocks": torch.arange(BLOCK // 4 * 2 + 3, dtype=torch.float32),
}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_bytes_are_those_of_the_library_and_the_hash_is_theirs(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    digest = write_tensors(tmp_path / "ours", TENSORS, metadata=metadata)
    save_file(TENSORS, tmp_path / "theirs", metadata=metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert digest.result() == hashlib.sha256((tmp_path / "ours").read_bytes()).hexdigest()
    loaded = load_file(tmp_path / "ours")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_a_dtype_of_its_own_goes_through_the_library(tmp_path: Path) -> None:
    tensors = {"x": torch.zeros(3, dtype=torch.float8_e4m3fn)}
    digest = write_tensors(tmp_path / "x", tensors)
    assert digest.result() == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()
    assert load_file(tmp_path / "x")["x"].dtype == torch.float8_e4m3fn


def test_an_error_while_writing_reaches_the_caller(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_tensors(tmp_path / "x", {"x": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_memory_that_nobody_else_holds_is_hashed_all_the_same(tmp_path: Path) -> None:
    digests = [write_tensors(tmp_path / f"{i}", {"x": torch.full((BLOCK,), float(i))}) for i in range(6)]
    for i, digest in enumerate(digests):
        assert digest.result(timeout=60) == hashlib.sha256((tmp_path / f"{i}").read_bytes()).hexdigest()
