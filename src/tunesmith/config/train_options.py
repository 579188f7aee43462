"""Options about training: how long, with which optimizer and schedule, from which seed, when to evaluate and stop."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Scheduler = Literal[
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "warmup_stable_decay",
]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Training"""

    num_train_epochs: float = 3.0
    """Passes over the training rows; may be a fraction."""

    max_steps: int = -1
    """Train this many optimizer steps, whatever `num_train_epochs` says. -1: by epochs."""

    per_device_train_batch_size: int = 8
    """Rows in one forward and backward pass on one device."""

    per_device_eval_batch_size: int = 8
    """Rows in one forward pass on one device when evaluating."""

    gradient_accumulation_steps: int = 1
    """Batches summed before one optimizer step."""

    learning_rate: float = 5e-5
    """Peak learning rate, reached after warmup."""

    lr_scheduler_type: Scheduler = "linear"
    """Shape of the learning rate over the run."""

    lr_scheduler_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra numbers of the schedule, such as num_cycles, power, min_lr."""

    warmup_steps: int | float = 0
    """Steps during which the learning rate rises from 0; below 1 a share of all steps."""

    optim: Literal["adamw_torch_fused", "adamw_torch"] = "adamw_torch_fused"
    """Optimizer. Fused where torch has a fused kernel for the device."""

    weight_decay: float = 0.0
    """AdamW weight decay, on matrices only (not on biases and normalisation)."""

    adam_beta1: float = 0.9
    """AdamW beta1."""

    adam_beta2: float = 0.999
    """AdamW beta2."""

    adam_epsilon: float = 1e-8
    """AdamW epsilon."""

    max_grad_norm: float = 1.0
    """Clip the gradient to this norm. 0: no clipping."""

    label_smoothing_factor: float = 0.0
    """Share of the target spread evenly over all labels."""

    class_weights: Literal["balanced"] | tuple[float, ...] | None = None
    """Weight of each label in the loss: balanced, or one number for each label in id order."""

    nan_action: Literal["stop", "skip"] = "stop"
    """When a loss or gradient is not finite: stop the run, or skip that update and go on. It is always recorded."""

    seed: int = 42
    """Seed of everything random: head, dropout, row order, split."""

    data_seed: int | None = None
    """Seed of the row order and the split alone. Default: `seed`."""

    full_determinism: bool = False
    """Allow only deterministic kernels, so that a repeated run is equal bit for bit; may be slower."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Evaluation and stopping"""

    eval_strategy: Literal["no", "steps", "epoch"] | None = None
    """When to evaluate. Default: epoch when there is an evaluation set, else no."""

    eval_steps: int | float | None = None
    """With eval_strategy steps: every this many steps; below 1 a share of all steps. Default: `logging_steps`."""

    eval_delay: float = 0
    """Do not evaluate before this many epochs (or steps, with eval_strategy steps)."""

    eval_on_start: bool = False
    """Evaluate once before the first step."""

    train_sample_size: int = 256
    """Training rows evaluated beside the validation rows, so that both curves mean the same. 0: none."""

    metric_name: tuple[str, ...] | None = None
    """Metrics to report. Default: by task (GLUE tasks: the official ones)."""

    metric_for_best_model: str | None = None
    """Metric that says which checkpoint is best. Default: the first metric of the task."""

    greater_is_better: bool | None = None
    """Direction of `metric_for_best_model`. Default: known for each metric."""

    load_best_model_at_end: bool | None = None
    """Export the best model instead of the last. Default: yes when there is an evaluation set."""

    early_stopping_patience: int | None = None
    """Stop after this many evaluations in a row without improvement. Default: never."""

    early_stopping_threshold: float = 0.0
    """Smallest change that counts as an improvement."""
