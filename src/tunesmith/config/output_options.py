"""Options about what a run leaves behind: folder, checkpoints, logs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Output"""

    output_dir: str | None = None
    """Run folder. Default: runs/<run_name>."""

    run_name: str | None = None
    """Name of the run. Default: made from the data and the model."""

    save_strategy: Literal["no", "steps", "epoch", "best"] | None = None
    """When to write a checkpoint. Default: with each evaluation, or once an epoch without an evaluation set."""

    save_steps: int | float = 500
    """With save_strategy steps: every this many steps; below 1 a share of all steps."""

    save_total_limit: int | None = 1
    """Newest checkpoints kept, beside the best one. none: keep all."""

    save_only_model: bool = False
    """Leave optimizer state out of checkpoints: smaller, but the run cannot be resumed from them."""

    resume_from_checkpoint: bool | str | None = None
    """Go on from the newest sound checkpoint of the run folder (true) or from this checkpoint folder."""

    weights_only: bool = False
    """With resume_from_checkpoint: take only the weights and start optimizer, schedule and data afresh."""

    logging_strategy: Literal["no", "steps", "epoch"] = "steps"
    """When to show the training loss. The journal holds every step in any case."""

    logging_steps: int | float | None = None
    """With logging_strategy steps: every this many steps; below 1 a share. Default: about 20 times an epoch."""

    logging_first_step: bool = False
    """Show the first step too."""

    disable_tqdm: bool | None = None
    """Plain lines instead of progress bars. Default: bars on a terminal."""

    report_to: tuple[str, ...] = ("none",)
    """Trackers beside the journal: tensorboard, wandb, trackio, mlflow or none."""

    project: str = "tunesmith"
    """Project name given to trackers."""
