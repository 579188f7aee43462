"""One rank of the tests of accelerator_config and of adapters: trains and writes what it saw. Also called in one process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from peft_models import KINDS
from trainer_toys import Regression, RegressionDataset, arguments, arrow, tokenizer
from tunesmith import Trainer
from tunesmith.errors import ConfigError

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class OwnStream(IterableDataset[Any]):
    """Rows that are others on every rank; counts those that were read."""

    def __init__(self) -> None:
        self.rows, self.read = RegressionDataset(length=32, seed=RANK), 0

    def __iter__(self) -> Any:
        for i in range(len(self.rows)):
            self.read += 1
            yield self.rows[i]


class Watching(Trainer):
    """Notes in which micro-batches the gradients of the ranks are exchanged."""

    exchanged: list[bool] | None = None

    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        """The loss as it is."""
        self.exchanged = [*(self.exchanged or []), getattr(model, "require_backward_grad_sync", True)]
        return super().compute_loss(model, inputs, **options)


def trained(folder: Path, *, config: Any = None, data: Any = None, size: int = 8, **options: Any) -> dict[str, Any]:
    """Losses and metrics of a short run with `size` rows a micro-step over all ranks."""
    settings = {"max_steps": 5, "logging_steps": 1, "ddp_timeout": 60, "accelerator_config": config}
    args = arguments(folder, per_device_train_batch_size=size, per_device_eval_batch_size=4, **{**settings, **options})
    rows = RegressionDataset(length=30) if data is None else data
    trainer = Watching(Regression(), args, train_dataset=rows, eval_dataset=RegressionDataset(length=11, seed=9))
    trainer.train()
    return {
        "losses": [line["loss"] for line in trainer.state.log_history if "loss" in line],
        "eval": trainer.evaluate()["eval_loss"],
        "rows": trainer.get_total_train_batch_size(),
        "exchanged": trainer.exchanged,
        "read": getattr(data, "read", None),
    }


def with_adapters(folder: Path) -> dict[str, Any]:
    """A run of a model with two adapters, and the same run resumed from its second step."""

    def make(place: Path) -> Any:
        args = arguments(
            place, per_device_train_batch_size=8 // WORLD, max_steps=4, logging_steps=1, save_strategy="steps",
            save_steps=2, learning_rate=1e-2, ddp_timeout=60,
        )  # fmt: skip
        return Trainer(KINDS["several-adapters"](), args, train_dataset=arrow(30), processing_class=tokenizer())

    whole, again = make(folder / "whole"), make(folder / "again")
    whole.train()
    again.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-2"))
    mine, other = whole.model.state_dict(), again.model.state_dict()
    return {
        "losses": [line["loss"] for line in whole.state.log_history if "loss" in line],
        "exact": all(torch.equal(mine[n], other[n]) for n in mine),
        "files": sorted(str(f.relative_to(folder)) for f in (folder / "whole" / "checkpoint-2").rglob("*model.*")),
    }


def everything(folder: Path) -> dict[str, Any]:
    """All cases by name."""
    split = {"split_batches": True}
    found = {
        "plain": trained(folder / "plain", size=8 // WORLD),
        "split": trained(folder / "split", config=split),
        "uneven": trained(folder / "uneven", config={"even_batches": False}, size=8 // WORLD),
        "dispatched": trained(
            folder / "dispatched",
            config={**split, "dispatch_batches": True},
            data=OwnStream(),
            dataloader_num_workers=1,
        )
        if WORLD > 1
        else trained(folder / "dispatched", data=OwnStream()),
        "accumulated": trained(folder / "accumulated", size=4 // WORLD, gradient_accumulation_steps=2),
        "each": trained(
            folder / "each",
            size=4 // WORLD,
            config={"gradient_accumulation_kwargs": {"num_steps": 2, "sync_each_batch": True}},
        ),
        "adapters": with_adapters(folder / "adapters"),
    }
    try:
        trained(folder / "odd", config=split, size=7)
    except ConfigError as error:
        found["odd"] = str(error)
    return found


def main() -> None:
    """All cases, then `<out>-<rank>.json`."""
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    Path(f"{out}-{RANK}.json").write_text(json.dumps(everything(out.parent)))


if __name__ == "__main__":
    main()
