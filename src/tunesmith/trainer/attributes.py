"""The attributes of a Trainer, named once for the parts that share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunesmith.run.journal import Journal
from tunesmith.train.runtime import Runtime
from tunesmith.train.state import TrainState
from tunesmith.trainer.arguments import Horizon
from tunesmith.trainer.loaders import EpochClock, TrainWindows
from tunesmith.trainer.progress import Progress


class TrainerAttributes:
    """What `Trainer.__init__` sets. transformers' own types are Any here: it ships no types."""

    args: Any
    model: Any
    model_wrapped: Any
    data_collator: Any
    train_dataset: Any
    eval_dataset: Any
    processing_class: Any
    model_init: Callable[..., Any] | None
    compute_loss_func: Callable[..., Any] | None
    compute_metrics: Callable[..., Any] | None
    preprocess_logits_for_metrics: Callable[..., Any] | None
    optimizer: Any
    _given_optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    callback_handler: Any
    control: Any
    state: Any
    runtime: Runtime
    accelerator: Any
    label_names: list[str]
    can_return_loss: bool
    label_smoother: Any
    model_accepts_loss_kwargs: bool
    loss_is_scaled_for_ga: bool | None = None
    is_in_train: bool
    model_preparation_time: float | None = None
    hp_search_backend: Any
    hp_name: Any
    hub_model_id: str | None
    current_flos: float
    current_gradient_accumulation_steps: int
    _signature_columns: list[str] | None
    _train_batch_size: int
    _created_lr_scheduler: bool
    _engine: TrainState | None
    _journal: Journal | None
    _journalled: set[tuple[int, str]]
    _own_runs: set[str]
    _clock: EpochClock
    _windows: TrainWindows
    _progress: Progress
    _horizon: Horizon
    _run_id: str
    _trial: Any
    _memory_tracker: Any
    _initial_num_input_tokens_seen: float

    def is_world_process_zero(self) -> bool:
        """Whether this is the main process of all."""
        return bool(self.args.process_index == 0)

    def is_local_process_zero(self) -> bool:
        """Whether this is the main process of its machine."""
        return bool(self.args.local_process_index == 0)

    def overrides(self, name: str) -> bool:
        """Whether a method of ours was replaced, in a subclass or on this object."""
        own = vars(self).get(name, getattr(type(self), name))
        return not str(getattr(own, "__module__", None)).startswith("tunesmith.trainer.")
