"""Weights of a checkpoint in files, and back into the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from tunesmith.errors import CheckpointError
from tunesmith.training.checkpoint import contiguous, load_weights


def tied(seed: int, vocabulary: int = 20) -> BertForMaskedLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForMaskedLM(BertConfig(vocab_size=vocabulary, **sizes))


@pytest.mark.parametrize("shards", ["1KB", "1GB"])
def test_weights_that_save_pretrained_wrote_are_read_although_it_stores_tied_ones_once(
    tmp_path: Path, shards: str
) -> None:
    stored, model = tied(0), tied(1)
    stored.save_pretrained(tmp_path, max_shard_size=shards)
    load_weights(model, tmp_path)
    expected, got = contiguous(stored.state_dict()), contiguous(model.state_dict())
    assert len(got) > len(list(model.parameters())), "some tensor must have two names"
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_weights_of_another_model_do_not_fit(tmp_path: Path) -> None:
    tied(0).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        load_weights(tied(0, vocabulary=21), tmp_path)
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        load_weights(tied(0), tmp_path / "elsewhere")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7)])
def test_buffered_copy_is_independent_and_reused(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    given = torch.randn(shape[::-1]).mul(9).to(dtype).T if len(shape) == 2 else torch.tensor(3).to(dtype)
    buffers: dict[str, torch.Tensor] = {}
    copy = contiguous({"a": given, "b": given}, buffers, "file")
    assert torch.equal(copy["a"], given)
    assert given.numel() == 0 or len({copy["a"].data_ptr(), copy["b"].data_ptr(), given.data_ptr()}) == 3
    assert contiguous({"a": given}, buffers, "file")["a"] is copy["a"]
