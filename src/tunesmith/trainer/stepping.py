"""The engine of a Trainer's run: the seeds, what is done to the model while it trains, optimizer and scheduler, and what
transformers does inside a step (callbacks, the scheduler, counts).

Optimizer and scheduler come from transformers' own factories, so that every name it knows works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase, enable_full_determinism, set_seed
from transformers.integrations.neftune import activate_neftune, deactivate_neftune
from transformers.trainer import is_optimizer_factory
from transformers.trainer_utils import align_special_tokens

from tunesmith.data.batches import Padding, Window
from tunesmith.data.tokens import TokenRows
from tunesmith.errors import ConfigError
from tunesmith.speedups.apply import Speedups
from tunesmith.trainer.arguments import trainer_log
from tunesmith.trainer.callbacks import listens, tell, waits_for_metric
from tunesmith.trainer.objective import CONTEXTS
from tunesmith.trainer.windows import features_of
from tunesmith.training.distributed import has_triton
from tunesmith.training.optimizer import attach_kernel, in_one_kernel
from tunesmith.training.state import StepHooks, TrainState

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer
    from tunesmith.trainer.training import TrainerRun


def create_optimizer(trainer: Trainer, model: nn.Module | None = None) -> Any:
    """The optimizer that `optim` names, or that was given by its class; made once, and one the user gave is kept."""
    if trainer.optimizer is not None:
        return trainer.optimizer
    module = trainer.model if model is None else model
    decayed = set(trainer.get_decay_parameter_names(module))
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    groups: list[dict[str, Any]] = [
        {
            "params": [p for n, p in trained.items() if (n in decayed) is decays],
            "names": [n for n in trained if (n in decayed) is decays],
            "weight_decay": trainer.args.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    given = trainer.optimizer_cls_and_kwargs
    kind, options = trainer.get_optimizer_cls_and_kwargs(trainer.args, module) if given is None else given
    options = dict(options) if given is not None else in_one_kernel(kind, options, trained.values())
    if is_optimizer_factory(kind):
        trainer.optimizer = kind()(module, **options)
    else:
        chosen = next((options.pop(n) for n in ("params", "model", "optimizer_dict") if n in options), groups)
        trainer.optimizer = kind(chosen, **options)
    if "bitsandbytes" in str(kind) and options.get("optim_bits") == 8:
        _keep_embeddings_in_32_bits(module)
    return trainer.optimizer


def _keep_embeddings_in_32_bits(model: nn.Module) -> None:
    """Makes bitsandbytes keep the optimizer's state of embeddings in 32 bits, as transformers does."""
    import bitsandbytes

    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def get_learning_rate(trainer: Trainer) -> float:
    """The rate the next step will use."""
    return float(trainer.optimizer.param_groups[0]["lr"])


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
        align_special_tokens(model, trainer.processing_class)
    handle = None
    if args.neftune_noise_alpha is not None:
        handle = activate_neftune(model, args.neftune_noise_alpha, trainer.accelerator)
    try:
        yield
    finally:
        if handle is not None:
            deactivate_neftune(model, handle, trainer.accelerator)


def choose_speed_ups(trainer: Trainer, rows: TokenRows | None, padding: Padding | None) -> Speedups | None:
    """The engine's exact speed-ups, where no user code reads a batch; None where they must stay off.

    The vocabulary is never cut: callbacks see the model, and may save it.
    """
    args = trainer.args
    own = trainer.overrides("compute_loss", "training_step", "floating_point_ops", *CONTEXTS)
    plain = trainer.compute_loss_func is None and not args.torch_compile and args.include_num_input_tokens_seen == "no"
    plain = plain and args.neftune_noise_alpha is None  # its noise depends on the width of the batch
    if rows is None or padding is None or own or not plain or not trainer.use_speed_ups:
        return None
    if trainer.is_fsdp_enabled:
        trainer_log.warning("the speed-ups (batches without padding and the like) are off: the weights are sharded")
        return None
    runtime, captures = trainer.runtime, _may_capture(trainer)
    from tunesmith.speedups.apply import apply_speedups

    chosen = apply_speedups(
        trainer.model,
        None,
        padding,
        device=runtime.device,
        world=runtime.world,
        precision=runtime.precision,
        restrict_vocabulary="off",
        cuda_graphs="auto" if captures else "off",
        longest=int(rows.lengths.max(initial=0)),
    )
    if chosen.on:
        trainer_log.info("  speed-ups: %s", ", ".join(chosen.on))
    return chosen


def _may_capture(trainer: Trainer) -> bool:
    """Whether the optimizer will be one that our kernel can update; everything else is checked before each step."""
    own = trainer.overrides("create_optimizer", "get_optimizer_cls_and_kwargs")
    asked = trainer.args.optim in ("adamw_torch", "adamw_torch_fused") and trainer.optimizer_cls_and_kwargs is None
    return has_triton() and asked and not own and trainer.label_smoother is None


def _compiled(trainer: Trainer, model: Any) -> Any:
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


def make_engine(run: TrainerRun) -> TrainState:
    """The engine's state around model and optimizer; steps are captured where no user code runs inside them."""
    trainer, chosen = run.trainer, run.speed_ups
    if chosen is not None and (chosen.fused is not None or chosen.graphs is not None):
        kernel = attach_kernel(trainer.optimizer, chosen.fused)
        if kernel is not None and chosen.fused is not None:
            chosen.fused.kept_fresh = _is_only_writer(trainer)
        if kernel is None:
            chosen.graphs = None
        elif chosen.graphs is not None:
            chosen.graphs.before.append(kernel.write_rates)
    model, objective = trainer.model, trainer._loss
    engine = TrainState(model, trainer.optimizer, objective, trainer.runtime, speedups=chosen)
    engine.wrapped = trainer.model_wrapped = _compiled(trainer, engine.wrapped)
    engine.hooks = _hooks(run, engine)
    return engine


def _is_only_writer(trainer: Trainer) -> bool:
    """Whether no user code runs between two steps: it could write weights through `.data`, which leaves no trace."""
    around = (trainer, *trainer.callback_handler.callbacks)
    return all(type(part).__module__.startswith(("tunesmith.", "transformers.")) for part in around)


def _hooks(run: TrainerRun, engine: TrainState) -> StepHooks:
    """The callback events inside a step, each only where a callback uses it."""
    trainer, loss = run.trainer, run.trainer._loss

    def begin(window: Window) -> None:
        loss.begin_window(window, engine)
        tell(trainer, "on_step_begin")
        every = trainer.args.torch_empty_cache_steps
        if every and trainer.state.global_step % every == 0 and trainer.runtime.device.type == "cuda":
            torch.cuda.empty_cache()
        if engine.graphs is not None:  # what a replay does not do
            if not trainer.model.training:
                trainer.model.train()
            counts = [float(trainer.floating_point_ops(features_of(b))) for b in window.micro_batches]
            trainer.current_flos += sum(counts)
        hooks.substep_end = _teller(trainer, "on_substep_end")
        hooks.before_update = _teller(trainer, "on_pre_optimizer_step")
        hooks.capturable = engine.graphs is not None and not listens(trainer, "on_optimizer_step")

    def after_update(numbers: torch.Tensor) -> None:
        tell(trainer, "on_optimizer_step")
        own_rate = trainer.overrides("_get_learning_rate")
        run.progress.reported_rate = trainer._get_learning_rate() if own_rate else None
        # transformers leaves the scheduler where it is when the loss scale overflowed; asking the device costs a wait
        finite = engine.loss_scale is None or bool(torch.isfinite(numbers[:2]).all())
        if finite and trainer.lr_scheduler is not None and not waits_for_metric(trainer.lr_scheduler):
            trainer.lr_scheduler.step()

    hooks = StepHooks(begin, loss.run_micro_batch, after_update=after_update, sets_rate=True)
    return hooks


def _teller(trainer: Trainer, event: str) -> Callable[[], None] | None:
    """Calls the callbacks; None where none of them does anything at this event."""
    return (lambda: tell(trainer, event)) if listens(trainer, event) else None
