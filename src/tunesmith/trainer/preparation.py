"""What is done to the model for the time of a training run, and the seeds set before it is made."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch

from tunesmith.trainer.upstream import PreTrainedTokenizerBase, enable_full_determinism, neftune, set_seed, utils

log = logging.getLogger(__name__)


def seed_for(args: Any) -> None:
    """Seeds Python, NumPy and torch, with deterministic kernels where `full_determinism` asks for them."""
    if args.full_determinism:
        enable_full_determinism(args.seed)
    else:
        set_seed(args.seed)


@contextlib.contextmanager
def prepared_model(trainer: Any) -> Iterator[None]:
    """The model with gradient checkpointing and noisy embeddings as asked for; the noise is taken off at the end."""
    args, model = trainer.args, trainer.model
    if args.gradient_checkpointing:
        options = dict(args.gradient_checkpointing_kwargs or {})
        placing = {n: options.pop(n) for n in ("every_n_layers", "offload") if n in options}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options or None, **placing)
    if isinstance(trainer.processing_class, PreTrainedTokenizerBase) and hasattr(model, "config"):
        utils.align_special_tokens(model, trainer.processing_class)
    handle = None
    if args.neftune_noise_alpha is not None:
        handle = neftune.activate_neftune(model, args.neftune_noise_alpha, trainer.accelerator)
    try:
        yield
    finally:
        if handle is not None:
            neftune.deactivate_neftune(model, handle, trainer.accelerator)


class AcceleratorView:
    """The accelerator as user code sees it: `backward` knows the engine's loss scale."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer.runtime.accelerator, name)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """The backward pass of a user's own `training_step`."""
        engine = self._trainer._engine
        scale = None if engine is None else engine.loss_scale
        torch.autograd.backward(loss if scale is None else loss * scale.scale)
