"""Training only the used rows of the word embedding, and the rest in closed form, equals training all of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from equivalence.strategy_cases import VOCABULARY, largest_difference, make_labels, make_model, make_rows, pad_rows
from tunesmith.errors import CheckpointError
from tunesmith.speedups.vocabulary import RestrictedVocabulary, why_not_restricted

STEPS = 100
DECAY = 0.1


def rate_at(step: int, rate: float) -> float:
    """Return the learning rate of warmup and decay, which changes at each step."""
    return rate * min((step + 1) / 10, (STEPS - step) / (STEPS - 10))


def make_run() -> tuple[list[dict[str, list[np.ndarray]]], list[torch.Tensor], np.ndarray]:
    """Return ragged batches of the lower half of the vocabulary, their labels, and the ids that occur."""
    rng = np.random.default_rng(1)
    rows = [make_rows(rng.integers(1, 15, 5), seed=i) for i in range(STEPS)]
    for batch in rows:
        batch["input_ids"] = [np.where(ids > VOCABULARY // 2, ids // 2, ids) for ids in batch["input_ids"]]
    used = np.concatenate([ids for batch in rows for ids in batch["input_ids"]])
    return rows, [make_labels(5, seed=i) for i in range(STEPS)], used


def train(model: nn.Module, run: Any, *, rate: float, cut: RestrictedVocabulary | None) -> None:
    """Weight decay applies only to matrices, as in transformers; with clipping and a schedule."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    for step, (rows, labels) in enumerate(zip(*run, strict=True)):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, rate)
        optimizer.zero_grad()
        model(**pad_rows(rows, kind="bert"), labels=labels).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if cut is not None:
            cut.decay(1.0 - rate_at(step, rate) * DECAY)


@pytest.mark.parametrize(("dtype", "rate", "tolerance"), [(torch.float32, 5e-5, 1e-4), (torch.float64, 1e-3, 1e-8)])
def test_weights_after_a_whole_run_equal_full_adamw(dtype: torch.dtype, rate: float, tolerance: float) -> None:
    *run, used = make_run()
    plain = make_model("bert").to(dtype)
    ours = copy.deepcopy(plain)
    start = plain.get_input_embeddings().weight.detach().clone()
    train(plain, run, rate=rate, cut=None)
    cut = RestrictedVocabulary(ours, used)
    train(ours, run, rate=rate, cut=cut)
    cut.restore()
    expected, found = dict(plain.named_parameters()), dict(ours.named_parameters())
    assert largest_difference(expected, found) < tolerance
    table = found[next(n for n in found if n.endswith("word_embeddings.weight"))]
    unused = np.setdiff1d(np.arange(VOCABULARY), used)
    assert len(unused) > 20
    factor = float(np.prod([1.0 - rate_at(s, rate) * DECAY for s in range(STEPS)]))
    assert factor < 1 - 50 * rate * DECAY
    assert torch.allclose(table[unused], start[unused] * factor, rtol=1e-6)


def test_whole_accepts_ids_that_training_never_used(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    model = make_model("bert").eval()
    batch = pad_rows(make_rows((5, 9, 3), seed=7), kind="bert")
    expected = model(**batch).logits
    cut = RestrictedVocabulary(model, np.array([4, 4, 9, 2]))
    assert model.get_input_embeddings().weight.shape[0] == 4
    with cut.whole():
        assert torch.equal(model(**batch).logits, expected)
        model.save_pretrained(tmp_path)
    assert model.get_input_embeddings().weight.shape[0] == 4
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(**batch).logits, expected)


def test_state_of_different_vocabulary_raises() -> None:
    cut = RestrictedVocabulary(make_model("bert"), np.array([3, 4]))
    other = RestrictedVocabulary(make_model("bert"), np.array([3, 5]))
    with pytest.raises(CheckpointError, match="training data of the run"):
        cut.load_state_dict(other.state_dict())


def test_padding_keeps_its_row_and_gets_no_gradient() -> None:
    model = make_model("bert")
    cut = RestrictedVocabulary(model, np.array([5, 9]))
    embedding = model.get_input_embeddings()
    assert cut.ids.tolist() == [0, 5, 9]
    assert embedding.padding_idx == 0
    out = embedding(torch.tensor([[9, 0], [5, 5]]))
    assert torch.equal(out, embedding.weight[torch.tensor([[2, 0], [1, 1]])])
    out.sum().backward()
    assert embedding.weight.grad[0].abs().sum() == 0
    with pytest.raises(IndexError):
        embedding(torch.tensor([7]))


def test_tied_embedding_is_trained_as_a_whole() -> None:
    model = make_model("bert")
    model.decoder = nn.Linear(32, VOCABULARY, bias=False)
    model.decoder.weight = model.get_input_embeddings().weight
    assert "tied" in str(why_not_restricted(model))


def test_memory_read_by_cuda_graphs_stays_in_place() -> None:
    model = make_model("bert")
    cut = RestrictedVocabulary(model, np.arange(20))
    table = model.get_input_embeddings()
    places = [(table.rows_of.data_ptr(), table.weight.data_ptr(), cut.kept.data_ptr())]
    with cut.whole():
        pass
    places.append((table.rows_of.data_ptr(), table.weight.data_ptr(), cut.kept.data_ptr()))
    cut.disable()
    cut.enable()
    places.append((table.rows_of.data_ptr(), table.weight.data_ptr(), cut.kept.data_ptr()))
    assert len(set(places)) == 1
