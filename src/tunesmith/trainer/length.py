"""How long a run is: epochs, steps, rows, as transformers counts them."""

from __future__ import annotations

from typing import Any

from tunesmith.trainer.arguments import Horizon, make_horizon
from tunesmith.trainer.attributes import TrainerAttributes
from tunesmith.trainer.upstream import has_length


class LengthPart(TrainerAttributes):
    """The method of a Trainer that decides how many steps a run has."""

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[int, int, int, float, int, int, int]:
        """(epochs, steps an epoch, rows, rows over all epochs, rows a step, batches an epoch, steps); may be overridden."""
        batches = len(dataloader) if has_length(dataloader) else None
        per_step = self.get_total_train_batch_size(args)  # type: ignore[attr-defined]
        rows = self.num_examples(dataloader) if batches else None  # type: ignore[attr-defined]
        found = make_horizon(args, batches=batches, rows=rows, rows_per_step=per_step)
        rows = found.num_steps * per_step if rows is None else rows
        return (
            found.num_epochs,
            found.steps_per_epoch,
            rows,
            found.samples,
            per_step,
            found.batches_per_epoch,
            found.num_steps,
        )

    def _length_of_run(self, loader: Any) -> Horizon:
        epochs, per_epoch, _, samples, _, batches, steps = self.set_initial_training_values(self.args, loader)
        return Horizon(steps, epochs, per_epoch, batches, samples)
