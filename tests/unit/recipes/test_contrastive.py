"""The contrastive loss: what it asks for, on vectors that a head reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tunesmith.recipes.contrastive import ContrastiveLoss, read_by_head
from tunesmith.tokens.batches import Batch


class Reader(nn.Module):
    """Its last layer reads what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(2, 3)

    def forward(self, vectors: torch.Tensor) -> Any:
        return self.classifier(vectors)


def batch_of(vectors: list[list[float]], labels: list[int]) -> Batch:
    inputs = {"vectors": torch.tensor(vectors)}
    return Batch(inputs, torch.tensor(labels), np.arange(len(labels)), 0, 0)


def loss_of(vectors: list[list[float]], labels: list[int]) -> float:
    objective = ContrastiveLoss()
    total, logits = objective.sum(Reader(), batch_of(vectors, labels))
    assert logits is None
    return float(total) / objective.weight(np.array(labels), len(labels))


APART = [[1.0, 0.0], [2.0, 0.1], [-1.0, 0.0], [-3.0, 0.1]]


def test_rows_of_one_label_that_lie_together_cost_nothing_and_others_much() -> None:
    assert loss_of(APART, [0, 0, 1, 1]) < 0.01
    assert loss_of(APART, [0, 1, 0, 1]) > 5


def test_the_loss_of_two_pairs_is_the_mean_negative_log_share_of_the_partner() -> None:
    vectors = nn.functional.normalize(torch.tensor(APART), dim=1)
    wanted = []
    for i, partner in enumerate((1, 0, 3, 2)):
        shares = [float(vectors[i] @ vectors[j]) / 0.1 for j in range(4) if j != i]
        wanted.append(float(torch.tensor(shares).logsumexp(0)) - float(vectors[i] @ vectors[partner]) / 0.1)
    assert loss_of(APART, [0, 0, 1, 1]) == pytest.approx(sum(wanted) / 4, abs=1e-5)


def test_a_row_without_partner_or_label_counts_for_nothing() -> None:
    alone = loss_of([*APART, [0.0, 1.0]], [0, 0, 1, 1, 2])
    assert np.isfinite(alone)
    assert ContrastiveLoss().weight(np.array([0, 0, 1, 1, 2, -1, -1]), 7) == 4.0
    total, _ = ContrastiveLoss().sum(Reader(), batch_of([[1.0, 0.0], [0.0, 1.0]], [-1, -1]))
    assert float(total) == 0.0


def test_what_the_last_layer_reads_is_found_and_no_hook_stays() -> None:
    model = Reader()
    found = read_by_head(model, {"vectors": torch.tensor(APART)})
    assert found.tolist() == torch.tensor(APART).tolist()
    assert not model.classifier._forward_pre_hooks
