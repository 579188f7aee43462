"""What is done to the model for the time of a training run, and the seeds set before it is made."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from tunesmith.errors import ConfigError
from tunesmith.fast.fused_ops import has_triton
from tunesmith.fast.strategies import Strategies, choose_strategies
from tunesmith.tokens.batches import Padding
from tunesmith.tokens.token_rows import TokenRows
from tunesmith.trainer.objective import CONTEXTS
from tunesmith.trainer.upstream import (
    PreTrainedTokenizerBase,
    enable_full_determinism,
    neftune,
    set_seed,
    trainer_log,
    utils,
)

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

log = logging.getLogger(__name__)


def seed_for(args: Any) -> None:
    """Seeds Python, NumPy and torch, with deterministic kernels where `full_determinism` asks for them."""
    if args.full_determinism:
        enable_full_determinism(args.seed)
    else:
        set_seed(args.seed)


@contextlib.contextmanager
def prepared_model(trainer: Trainer) -> Iterator[None]:
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


def choose_speed_ups(trainer: Trainer, rows: TokenRows | None, padding: Padding | None) -> Strategies | None:
    """The engine's exact speed-ups, where nothing a user wrote looks inside a batch; None where they must stay off.

    The vocabulary is never cut: callbacks see the model, and may save it.
    """
    args = trainer.args
    own = any(trainer.overrides(n) for n in ("compute_loss", "training_step", "floating_point_ops", *CONTEXTS))
    plain = trainer.compute_loss_func is None and not args.torch_compile and args.include_num_input_tokens_seen == "no"
    plain = plain and args.neftune_noise_alpha is None  # its noise depends on the width of the batch
    if rows is None or padding is None or own or not plain or not trainer.use_speed_ups:
        return None
    if trainer.is_fsdp_enabled:
        trainer_log.warning("the speed-ups (batches without padding and the like) are off: the weights are sharded")
        return None
    runtime = trainer.runtime
    chosen = choose_strategies(
        trainer.model,
        None,
        padding,
        device=runtime.device,
        world=runtime.world,
        precision=runtime.precision,
        restrict_vocabulary="off",
        cuda_graphs="auto" if _may_capture(trainer) else "off",
        longest=int(rows.lengths.max(initial=0)),
    )
    if chosen.on:
        trainer_log.info("  speed-ups: %s", ", ".join(chosen.on))
    return chosen


def _may_capture(trainer: Trainer) -> bool:
    """Whether the optimizer will be the one whose update our kernel can do: all else is looked at before every step."""
    own = any(trainer.overrides(n) for n in ("create_optimizer", "get_optimizer_cls_and_kwargs"))
    asked = trainer.args.optim == "adamw_torch_fused" and trainer.optimizer_cls_and_kwargs is None
    return has_triton() and asked and not own and trainer.label_smoother is None


def compiled(trainer: Trainer, model: Any) -> Any:
    """The model as `torch_compile` asks for it."""
    args = trainer.args
    if not args.torch_compile:
        return model
    if trainer.is_fsdp_enabled:
        raise ConfigError("torch_compile together with fsdp is not supported", fix="Leave one of them out.")
    return torch.compile(model, backend=args.torch_compile_backend, mode=args.torch_compile_mode)


class AcceleratorView:
    """The accelerator as user code sees it: `backward` knows the engine's loss scale."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer.runtime.accelerator, name)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """The backward pass of a user's own `training_step`."""
        engine = self._trainer._engine
        scale = None if engine is None else engine.loss_scale
        torch.autograd.backward(loss if scale is None else loss * scale.scale)
