"""Batches whose rows are not examples of the dataset: random cases with both Trainers, which must scale the loss alike."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

import tunesmith
from conftest import tiny_bert
from trainer_toys import arguments, arrow


def collate_views(rows: list[dict[str, Any]], views: int, label: str) -> dict[str, torch.Tensor]:
    """Return `views` rows per example, as contrastive learning uses."""
    rows = [row for row in rows for _ in range(views)]
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), label: torch.tensor([row["label"] for row in rows])}


def collate_joined(rows: list[dict[str, Any]], label: str) -> dict[str, torch.Tensor]:
    """Return one row per two examples, with the label of the first."""
    joined = [
        {**a, "input_ids": a["input_ids"] + b["input_ids"][1:]} for a, b in zip(rows[::2], rows[1::2], strict=False)
    ]
    return collate_views(joined or rows, 1, label)


def make_script(rng: random.Random) -> tuple[dict[str, Any], Any, str]:
    """Return training arguments, a collator and the kind of loss of one random script."""
    label = rng.choice(["labels", "target"])
    views = rng.choice([1, 2, 3])
    joined = rng.random() < 0.3
    options: dict[str, Any] = {
        "per_device_train_batch_size": rng.choice([2, 3, 4, 6]),
        "gradient_accumulation_steps": rng.choice([1, 2, 3]),
        "label_names": rng.choice([None, [label]]),
        "remove_unused_columns": False,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 0.1,
        "optim": "sgd",  # Adam would amplify rounding errors of tiny gradients
    }
    collate = (lambda rows: collate_joined(rows, label)) if joined else (lambda rows: collate_views(rows, views, label))
    loss = rng.choice(["contrastive", "mean", "sum", "items"])
    return options, collate, loss


def loss_of(kind: str, logits: torch.Tensor, labels: torch.Tensor, items: Any) -> torch.Tensor:
    """Return the loss that the user's script computes."""
    if kind == "contrastive":
        return functional.cross_entropy(20 * logits @ logits.T, torch.arange(len(logits)))
    if kind == "items" and items is not None:
        return functional.cross_entropy(logits, labels, reduction="sum") / items
    return functional.cross_entropy(logits, labels, reduction="sum" if kind == "sum" else "mean")


def train(base: Any, folder: Path, seed: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    options, collate, kind = make_script(random.Random(seed))

    class Own(base):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs["labels"] if "labels" in inputs else inputs["target"]
            logits = model(**{name: x for name, x in inputs.items() if name not in ("labels", "target")}).logits
            loss = loss_of(kind, logits, labels, num_items_in_batch)
            return (loss, {"logits": logits}) if return_outputs else loss

    model = tiny_bert(seed)
    data = arrow(40, seed).remove_columns("text")
    trainer = Own(model, arguments(folder, **options), train_dataset=data, data_collator=collate)
    trainer.train()
    history = [line[name] for line in trainer.state.log_history for name in ("loss", "grad_norm") if name in line]
    return history, model.state_dict()


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(n, marks=pytest.mark.long) for n in range(4, 12))])
def test_losses_and_weights_equal_transformers(seed: int, tmp_path: Path) -> None:
    theirs, weights = train(transformers.Trainer, tmp_path / "theirs", seed)
    ours, found = train(tunesmith.Trainer, tmp_path / "ours", seed)
    assert len(theirs) == 8
    assert ours == pytest.approx(theirs, rel=2e-4, abs=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
