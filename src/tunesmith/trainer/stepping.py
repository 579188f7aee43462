"""The engine of a Trainer's run, and what transformers does inside a step: callbacks, the scheduler, counts."""

from __future__ import annotations

from typing import Any

import torch

from tunesmith.data.batches import Window
from tunesmith.train.hooks import StepHooks
from tunesmith.train.optim import attach_kernel, detach_kernel
from tunesmith.train.state import TrainState
from tunesmith.train.strategies import Strategies
from tunesmith.trainer.callbacks import CallbackPart
from tunesmith.trainer.loaders import features_of
from tunesmith.trainer.objective import FeatureLoss, LossPart
from tunesmith.trainer.optimization import OptimizerPart
from tunesmith.trainer.preparation import compiled


class SteppingPart(LossPart, OptimizerPart, CallbackPart):
    """The methods of a Trainer that take part in a step."""

    _speed_ups: Strategies | None = None

    def _make_engine(self) -> TrainState:
        """The engine's state around model and optimizer; steps are captured where nothing of the user's takes part in them."""
        chosen, graphs = self._speed_ups, None
        if chosen is not None and (chosen.fused is not None or chosen.graphs is not None):
            kernel = attach_kernel(self.optimizer, chosen.fused)
            if kernel is not None and chosen.fused is not None:
                chosen.fused.kept_fresh = self._is_only_writer()
            if kernel is not None and chosen.graphs is not None:
                graphs = chosen.graphs
                graphs.before.append(kernel.write_rates)
        loss = FeatureLoss(self._share_of_loss)
        engine = TrainState(self.model, self.optimizer, loss, self.runtime, graphs=graphs, strategies=chosen)
        engine.wrapped = self.model_wrapped = compiled(self, engine.wrapped)
        engine.hooks = self._hooks(engine)
        return engine

    def _is_only_writer(self) -> bool:
        """Whether no code of the user's runs between two steps: it could write weights through `.data`, which leaves no sign."""
        around = (self, *self.callback_handler.callbacks)
        return all(type(part).__module__.startswith(("tunesmith.", "transformers.")) for part in around)

    def _undo_speed_ups(self) -> None:
        """Leaves model and optimizer as a user knows them."""
        if self._speed_ups is not None:
            self._speed_ups.disable()
            self._speed_ups = None
        if self.optimizer is not None:
            detach_kernel(self.optimizer)

    def _hooks(self, engine: TrainState) -> StepHooks:
        """transformers' moments inside a step, each only where a callback looks at it."""

        def begin(window: Window) -> None:
            self._begin_window(window)
            self._tell("on_step_begin")
            every = self.args.torch_empty_cache_steps
            if every and self.state.global_step % every == 0 and self.runtime.device.type == "cuda":
                torch.cuda.empty_cache()
            if engine.graphs is not None:  # what a replay does not do
                if not self.model.training:
                    self.model.train()
                self.current_flos += sum(float(self.floating_point_ops(features_of(b))) for b in window.micro_batches)
            hooks.substep_end = self._teller("on_substep_end")
            hooks.before_update = self._teller("on_pre_optimizer_step")
            hooks.capturable = engine.graphs is not None and not self._listens("on_optimizer_step")

        def after_update(numbers: torch.Tensor) -> None:
            self._tell("on_optimizer_step")
            self._progress.reported_rate = self._get_learning_rate() if self.overrides("_get_learning_rate") else None
            # transformers leaves the scheduler where it is when the loss scale overflowed; asking the device costs a wait
            if engine.loss_scale is None or bool(torch.isfinite(numbers[:2]).all()):
                self._step_scheduler()

        hooks = StepHooks(begin, self._run_micro_batch, after_update=after_update, sets_rate=True)
        return hooks

    def _teller(self, event: str) -> Any:
        """Tells the callbacks; None where none of them does anything at this event."""
        return (lambda: self._tell(event)) if self._listens(event) else None
