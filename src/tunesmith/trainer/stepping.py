"""The engine of a Trainer's run, and what transformers does inside a step: callbacks, the scheduler, counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tunesmith.engine.hooks import StepHooks
from tunesmith.engine.optim import attach_kernel
from tunesmith.engine.state import TrainState
from tunesmith.tokens.batches import Window
from tunesmith.trainer.callbacks import listens, tell
from tunesmith.trainer.loaders import features_of
from tunesmith.trainer.objective import FeatureLoss
from tunesmith.trainer.optimization import waits_for_metric
from tunesmith.trainer.preparation import compiled

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer
    from tunesmith.trainer.training import TrainerRun


def make_engine(run: TrainerRun) -> TrainState:
    """The engine's state around model and optimizer; steps are captured where nothing of the user's takes part in them."""
    trainer, chosen, graphs = run.trainer, run.speed_ups, None
    if chosen is not None and (chosen.fused is not None or chosen.graphs is not None):
        kernel = attach_kernel(trainer.optimizer, chosen.fused)
        if kernel is not None and chosen.fused is not None:
            chosen.fused.kept_fresh = _is_only_writer(trainer)
        if kernel is not None and chosen.graphs is not None:
            graphs = chosen.graphs
            graphs.before.append(kernel.write_rates)
    loss = FeatureLoss(trainer._parts.loss.share)
    engine = TrainState(trainer.model, trainer.optimizer, loss, trainer.runtime, graphs=graphs, strategies=chosen)
    engine.wrapped = trainer.model_wrapped = compiled(trainer, engine.wrapped)
    engine.hooks = _hooks(run, engine)
    return engine


def _is_only_writer(trainer: Trainer) -> bool:
    """Whether no code of the user's runs between two steps: it could write weights through `.data`, which leaves no sign."""
    around = (trainer, *trainer.callback_handler.callbacks)
    return all(type(part).__module__.startswith(("tunesmith.", "transformers.")) for part in around)


def _hooks(run: TrainerRun, engine: TrainState) -> StepHooks:
    """transformers' moments inside a step, each only where a callback looks at it."""
    trainer, loss = run.trainer, run.trainer._parts.loss

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
    """Tells the callbacks; None where none of them does anything at this event."""
    return (lambda: tell(trainer, event)) if listens(trainer, event) else None
