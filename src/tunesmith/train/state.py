"""Everything that changes while a run goes on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tunesmith.model.vocabulary import VocabularyCut
from tunesmith.train.graphs import StepGraphs
from tunesmith.train.hooks import StepHooks
from tunesmith.train.losses import Objective
from tunesmith.train.runtime import Runtime
from tunesmith.train.stopping import Progress
from tunesmith.train.surroundings import Surroundings


@dataclass
class LossScale:
    """The dynamic scale of fp16 training, on the device: doubled after 2,000 good steps, halved after a bad one."""

    scale: torch.Tensor
    good_steps: torch.Tensor

    @classmethod
    def start(cls, device: torch.device, scale: float = 65536.0) -> LossScale:
        """A fresh scale."""
        return cls(torch.full((), scale, device=device), torch.zeros((), dtype=torch.int32, device=device))

    def update(self, found_inf: torch.Tensor) -> None:
        """Grows or shrinks the scale without a sync."""
        torch._amp_update_scale_(self.scale, self.good_steps, found_inf, 2.0, 0.5, 2000)


@dataclass
class TrainState:
    """`model` is the plain module, `wrapped` the one that is called (DDP around it on several ranks, itself when sharded)."""

    model: nn.Module
    optimizer: Optimizer
    objective: Objective
    runtime: Runtime
    wrapped: nn.Module = field(init=False)
    loss_scale: LossScale | None = field(init=False, default=None)
    cut: VocabularyCut | None = None
    """Set while only the rows of the embedding that occur in the data are trained."""
    step: int = 0
    progress: Progress = field(default_factory=Progress)
    rows_limit: int | None = None
    """Rows a micro-batch may have since an out-of-memory; None before the first."""
    may_split: bool = True
    """Whether an out-of-memory splits the micro-batch; else it ends the run."""
    evaluation_due: bool = False
    """The evaluation of this step was begun and not finished."""
    poisoned: torch.Tensor | None = None
    """1.0 once a step was not finite: later updates are held back until the host has read it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """State of listeners that want to survive a resume (JSON)."""
    hooks: StepHooks = field(default_factory=StepHooks)
    graphs: StepGraphs | None = None
    """Set where steps are captured and replayed on a GPU."""
    surroundings: Surroundings = field(init=False)

    @property
    def cut_decay(self) -> float:
        """Weight decay times the rate's share of the group that the word embedding is in."""
        if self.cut is None:
            return 0.0
        weight = self.model.get_input_embeddings().weight  # type: ignore[operator]
        for group in self.optimizer.param_groups:
            if any(p is weight for p in group["params"]):
                return float(group.get("weight_decay", 0.0) * group.get("lr_scale", 1.0))
        return 0.0

    def __post_init__(self) -> None:
        self.wrapped = self.runtime.wrap(self.model, self.optimizer)
        self.poisoned = torch.zeros((), device=self.runtime.device)
        self.surroundings = Surroundings(self.model, self.optimizer)
        if self.runtime.precision == "fp16":
            self.loss_scale = LossScale.start(self.runtime.device)
