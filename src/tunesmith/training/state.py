"""The state of a run: everything that changes while it trains, and the random number generators."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tunesmith.errors import ConfigError, ResourceError

if TYPE_CHECKING:
    from tunesmith.speedups.apply import Speedups
    from tunesmith.speedups.cuda_graphs import Fingerprint, StepGraphs
    from tunesmith.speedups.vocabulary import RestrictedVocabulary
    from tunesmith.training.distributed import Runtime
    from tunesmith.training.evaluation import Objective

SMALLEST = 2.0**-10
"""The initial scale after 26 halvings."""


@dataclass
class LossScale:
    """The dynamic loss scale of fp16 training, on the device: doubled after 2,000 good steps, halved after an overflow.

    It is not halved below `SMALLEST`: a NaN or infinite gradient is then not caused by the scale.
    """

    scale: torch.Tensor
    good_steps: torch.Tensor

    @classmethod
    def start(cls, device: torch.device, scale: float = 65536.0) -> LossScale:
        """Return a new scale."""
        return cls(torch.full((), scale, device=device), torch.zeros((), dtype=torch.int32, device=device))

    def update(self, found_inf: torch.Tensor) -> None:
        """Update the scale without a synchronization."""
        torch._amp_update_scale_(self.scale, self.good_steps, found_inf.float(), 2.0, 0.5, 2000)
        self.scale.clamp_(min=SMALLEST)

    @property
    def is_smallest(self) -> torch.Tensor:
        """Return whether the scale can't be halved any more."""
        return self.scale <= SMALLEST


@dataclass(frozen=True)
class BestSoFar:
    """The best evaluation: its metric and step, and the number of evaluations since without improvement."""

    value: float | None = None
    step: int | None = None
    evaluations_without_gain: int = 0

    def updated(self, value: float | None, step: int, *, greater_is_better: bool) -> tuple[BestSoFar, bool]:
        """Return the new counters and whether this value is the best; NaN and inf never are."""
        waited = self.evaluations_without_gain + 1
        if value is None or not math.isfinite(value):
            return replace(self, evaluations_without_gain=waited), False
        if self.value is None:
            return BestSoFar(value, step, 0), True
        gain = value - self.value if greater_is_better else self.value - value
        if gain > 0:
            return BestSoFar(value, step, 0), True
        return replace(self, evaluations_without_gain=waited), False

    def is_exhausted(self, patience: int | None) -> bool:
        """Return whether the last `patience` evaluations had no improvement."""
        return patience is not None and self.evaluations_without_gain >= patience


@dataclass
class TrainState:
    """`model` is the plain module, `wrapped` the one that is called (wrapped in DDP on several ranks)."""

    model: nn.Module
    optimizer: Optimizer
    objective: Objective
    runtime: Runtime
    wrapped: nn.Module = field(init=False)
    loss_scale: LossScale | None = field(init=False, default=None)
    step: int = 0
    progress: BestSoFar = field(default_factory=BestSoFar)
    rows_limit: int | None = None
    """Limit of rows per micro-batch after an out-of-memory error; None before the first."""
    push: float = 0.0
    """Size of the adversarial perturbation of the word embeddings; 0: off."""
    evaluation_due: bool = False
    """The evaluation of this step was interrupted."""
    poisoned: torch.Tensor = field(init=False)
    """1.0 after a NaN or infinite step: later updates are skipped until the host has read it."""
    phase: Literal["gradients", "update", "done"] = "done"
    """Phase of the current step. During the update, some weights are old and some are new."""
    speedups: Speedups | None = None
    """The result of `apply_speedups`. They are verified before the first step, and whenever the model has changed."""
    verified: Hashable | None = None
    """The fingerprint of the model on which they were verified."""
    planned_steps: int = 0
    """Number of remaining steps, which limits the cost of verification."""
    fingerprint: Fingerprint = field(init=False)
    only_writer: bool = False
    """Nothing else changes weights between steps, so the copies for fused layers stay valid."""
    kernel: Any = field(init=False, default=None)
    """The fused kernel that updates the weights, if the device and the optimizer support it."""
    notes: list[str] = field(default_factory=list)
    """Messages for the user, reported with the next event."""

    @property
    def vocabulary(self) -> RestrictedVocabulary | None:
        """Set while only the rows of the embedding that occur in the data are trained."""
        return None if self.speedups is None else self.speedups.vocabulary

    @property
    def graphs(self) -> StepGraphs | None:
        """Set if steps are captured and replayed on a GPU."""
        return None if self.speedups is None else self.speedups.graphs

    @property
    def vocabulary_decay(self) -> float:
        """Weight decay times the learning rate factor of the word embedding's group."""
        if self.vocabulary is None:
            return 0.0
        weight = self.model.get_input_embeddings().weight  # type: ignore[operator]
        for group in self.optimizer.param_groups:
            if any(p is weight for p in group["params"]):
                return float(group.get("weight_decay", 0.0) * group.get("lr_scale", 1.0))
        return 0.0

    def restore_vocabulary(self, reason: str) -> None:
        """Train the whole word embedding again; keep the optimizer state of the used rows."""
        from tunesmith.speedups.vocabulary import restore_whole_table

        assert self.speedups is not None
        assert self.vocabulary is not None
        if self.runtime.world > 1 and hasattr(self, "wrapped"):
            raise ConfigError(
                f"the vocabulary cannot be restricted: {reason}",
                fix="Set --restrict_vocabulary off: ranks that exchange gradients cannot switch to a different table.",
            )
        restore_whole_table(self.vocabulary, self.optimizer)
        self.speedups.forget_vocabulary()
        self.notes.append(f"restrict_vocabulary is off: {reason}")

    def require_exact_vocabulary(self) -> None:
        """Stop restricting the vocabulary if this optimizer changes unused embeddings other than by weight decay."""
        if self.vocabulary is None:
            return
        from tunesmith.speedups.vocabulary import why_inexact

        reason = why_inexact(self.optimizer, self.vocabulary.parameter)
        if reason is not None:
            self.restore_vocabulary(reason)

    def require_whole(self, consequence: str) -> None:
        """Raise a ResourceError if an update was interrupted, so that only some weights are updated."""
        if self.phase == "update":
            raise ResourceError(
                f"the update of step {self.step + 1} was interrupted: some weights are changed and some are not; {consequence}",
                fix="Free memory on the device, then resume from the last checkpoint.",
            )

    def __post_init__(self) -> None:
        from tunesmith.speedups.cuda_graphs import Fingerprint
        from tunesmith.speedups.vocabulary import RestrictedEmbedding
        from tunesmith.training.optimizer import make_kernel

        if self.speedups is None and any(type(module) is RestrictedEmbedding for module in self.model.modules()):
            raise ValueError(
                "The model was changed by apply_speedups. Pass its result as TrainState(..., speedups=...)."
            )
        self.require_exact_vocabulary()
        self.wrapped = self.runtime.wrap(self.model)
        layers = None if self.speedups is None else self.speedups.fused
        if layers is not None or self.graphs is not None:
            self.kernel = make_kernel(self.optimizer, layers)
        if layers is not None:
            layers.kept_fresh = self.kernel is not None and self.only_writer
        self.poisoned = torch.zeros((), device=self.runtime.device)
        self.fingerprint = Fingerprint(self.model, self.optimizer)
        if self.runtime.precision == "fp16":
            self.loss_scale = LossScale.start(self.runtime.device)


_TRAINING = threading.RLock()


@contextmanager
def only_training_thread() -> Iterator[None]:
    """Raise a ResourceError if another thread of this process trains: the random generators belong to the whole process."""
    if not _TRAINING.acquire(blocking=False):
        raise ResourceError(
            "another thread of this process is training; both would draw from the same random generators",
            fix="Train one after the other, or in separate processes.",
        )
    try:
        yield
    finally:
        _TRAINING.release()


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and torch (all devices), as transformers' `set_seed` does."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return 63 well-mixed bits from (seed, step, rank)."""
    return int(np.random.SeedSequence([seed & (2**63 - 1), step, rank]).generate_state(1, np.uint64)[0] >> 1)


def seed_step(seed: int, step: int, rank: int, device: torch.device | None = None) -> None:
    """Set torch's generators for the dropout of one optimizer step: those of the CPU and of this device, or all there are."""
    number = step_seed(seed, step, rank)
    if device is None or device.type not in ("cpu", "cuda"):
        torch.manual_seed(number)
        return
    # torch.manual_seed also keeps the number for each kind of accelerator that is not in use, with the call's stack as text:
    # one to two milliseconds per step.
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":
        torch.cuda.manual_seed_all(number)


def make_deterministic() -> None:
    """Use only deterministic kernels, for `full_determinism`; torch raises an error if there is none."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def generator_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy and torch, for user code; our dropout doesn't need them."""
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, numbers, gauss = random.getstate()
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(np.asarray(keys).astype(np.int64))}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    plain = {"numpy": [kind, int(position), int(has_gauss), float(cached)], "python": [version, list(numbers), gauss]}
    return {"tensors": tensors, "plain": plain}


def restore_generators(states: dict[str, Any], device: torch.device) -> None:
    """Restore the result of `generator_states`."""
    tensors, plain = states["tensors"], states["plain"]
    version, numbers, gauss = plain["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, position, has_gauss, cached = plain["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(tensors["torch"])
    if device.type == "cuda" and "cuda" in tensors:
        torch.cuda.set_rng_state(tensors["cuda"], device)
