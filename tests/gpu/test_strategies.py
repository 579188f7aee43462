"""Each exact speedup on BERT-base's shape: packed batches, first token only, restricted vocabulary, captured passes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tunesmith.speedups.packing import Layout, PaddingFree, enable_first_token_only, enable_padding_free, pack
from tunesmith.speedups.vocabulary import RestrictedVocabulary

Rows = dict[str, list[np.ndarray]]
DEVICE = torch.device("cuda")
FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def make_model(*, dropout: float, layers: int, seed: int = 0) -> nn.Module:
    """Return BERT-base with random weights, in train mode."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    config = BertConfig(
        num_hidden_layers=layers, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=2
    )
    return BertForSequenceClassification(config).to(DEVICE).train()


@pytest.fixture(scope="module")
def ids() -> list[np.ndarray]:
    """Return random token ids with the lengths of MRPC's examples."""
    rng = np.random.default_rng(0)
    return [rng.integers(1000, 12000, n) for n in np.clip(rng.normal(53, 13, 2000), 1, 103).astype(int)]


def take(ids: list[np.ndarray], at: int, batch: int) -> Rows:
    """Return a batch of examples with segments."""
    some = ids[at : at + batch]
    return {"input_ids": some, "token_type_ids": [(np.arange(len(x)) > len(x) // 2).astype(np.int64) for x in some]}


def padded(rows: Rows) -> dict[str, torch.Tensor]:
    """Return a padded batch."""
    longest = max(len(x) for x in rows["input_ids"])
    mask = [np.ones(len(x), np.int64) for x in rows["input_ids"]]
    return {
        k: torch.from_numpy(np.stack([np.pad(x, (0, longest - len(x))) for x in v])).to(DEVICE)
        for k, v in {**rows, "attention_mask": mask}.items()
    }


def packed(rows: Rows, strategy: PaddingFree, **options: Any) -> dict[str, Any]:
    """Return the packed batch on the device."""
    batch = pack(rows, first_position=strategy.first_position, keys=strategy.keys, **options)
    return {k: v.to(DEVICE) for k, v in batch.items()}


def run(
    model: nn.Module, batch: dict[str, Any], labels: torch.Tensor, dtype: torch.dtype
) -> tuple[float, torch.Tensor]:
    """Return the loss, and all gradients as one vector."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
        loss = model(**batch, labels=labels).loss
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("first_token_only", [False, True])
@pytest.mark.parametrize("batch", [1, 8, 32])
def test_packed_loss_and_gradients_match_padded(ids: list[np.ndarray], batch: int, first_token_only: bool) -> None:
    plain = make_model(dropout=0.0, layers=12)
    rows, labels = take(ids, 0, batch), torch.arange(batch, device=DEVICE) % 2
    loss, grad = run(plain, padded(rows), labels, torch.float32)
    bf16_loss, bf16_grad = run(plain, padded(rows), labels, torch.bfloat16)
    ours = copy.deepcopy(plain)
    strategy = enable_padding_free(ours)
    if first_token_only:
        enable_first_token_only(ours)
    total = -(-sum(map(len, rows["input_ids"])) // 64) * 64 + 64
    for options in ({}, {"total": total, "longest": 128}):
        one, found = run(ours, packed(rows, strategy, **options), labels, torch.float32)
        assert abs(one - loss) < 1e-5
        assert float((found - grad).abs().max()) < 1e-5
        one, found = run(ours, packed(rows, strategy, **options), labels, torch.bfloat16)
        assert abs(one - loss) < 2 * abs(bf16_loss - loss) + 2e-3
        assert float((found - grad).norm()) < 2 * float((bf16_grad - grad).norm())


@FLOATS
def test_packed_dropout_has_mean_loss_of_padded_batches(ids: list[np.ndarray], dtype: torch.dtype) -> None:
    draws = 300
    rows, labels = take(ids, 64, 16), torch.arange(16, device=DEVICE) % 2
    model = make_model(dropout=0.2, layers=2)
    ours = copy.deepcopy(model)
    strategy = enable_padding_free(ours)
    enable_first_token_only(ours)
    sides = []
    for one, batch in ((model, padded(rows)), (ours, packed(rows, strategy))):
        with torch.no_grad(), torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
            sides.append(torch.stack([one(**batch, labels=labels).loss for _ in range(draws)]).double())
    a, b = sides
    assert abs(float(a.mean() - b.mean())) < 4 * float((a.var() / draws + b.var() / draws).sqrt())
    assert abs(float((a.std() / b.std()).log())) < 0.3


def copy_into(static: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Copy a new batch into the memory of the captured one."""
    for name, value in fresh.items():
        if isinstance(value, Layout):
            for part in ("bounds", "starts", "order"):
                getattr(static[name], part).copy_(getattr(value, part))
        else:
            static[name].copy_(value)


def run_captured(model: nn.Module, batch: dict[str, Any], labels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Run forward and backward without reading from the device, with new gradients."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32, cache_enabled=False):
        loss: torch.Tensor = model(**batch, labels=labels).loss
    loss.backward()
    return loss.detach()


@FLOATS
def test_captured_pass_is_right_for_different_rows(ids: list[np.ndarray], dtype: torch.dtype) -> None:
    model = make_model(dropout=0.0, layers=12)
    ours = copy.deepcopy(model)
    strategy = enable_padding_free(ours)
    enable_first_token_only(ours)
    labels = torch.arange(8, device=DEVICE) % 2
    options = {"total": 768, "longest": 512}
    static = packed(take(ids, 0, 8), strategy, **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run_captured(ours, static, labels, dtype)
    torch.cuda.current_stream().wait_stream(stream)
    ours.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = run_captured(ours, static, labels, dtype)
    exact = dtype == torch.float32
    for at in (0, 8, 80):
        rows = take(ids, at, 8)
        copy_into(static, packed(rows, strategy, **options))
        graph.replay()
        expected, grad = run(model, padded(rows), labels, torch.float32)
        found = torch.cat([p.grad.flatten() for p in ours.parameters()])
        assert abs(float(loss) - expected) < (1e-5 if exact else 2e-2)
        assert float((found - grad).norm() / grad.norm()) < (1e-4 if exact else 0.1)


def test_restricted_vocabulary_trains_the_same_weights(ids: list[np.ndarray]) -> None:
    plain = make_model(dropout=0.0, layers=2)
    ours = copy.deepcopy(plain)
    cut = RestrictedVocabulary.apply(ours, np.concatenate(ids[:200]))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=5e-5, weight_decay=0.1, fused=True) for m in (plain, ours)]
    labels = torch.arange(8, device=DEVICE) % 2
    for step in range(20):
        rows = take(ids, 8 * step, 8)
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            model(**padded(rows), labels=labels).loss.backward()
            optimizer.step()
        cut.decay(1 - 5e-5 * 0.1)
    cut.restore()
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-4
