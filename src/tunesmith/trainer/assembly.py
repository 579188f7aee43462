"""What a Trainer is made of: the attributes that scripts know from transformers, and the parts behind its methods."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tunesmith.encoder.params import inner_model
from tunesmith.engine.state import TrainState
from tunesmith.errors import ConfigError
from tunesmith.trainer.arguments import (
    accelerator_arguments,
    check_arguments,
    make_trainer_runtime,
    rows_per_rank,
    take_accumulation,
)
from tunesmith.trainer.attempts import TrialSearch, new_model
from tunesmith.trainer.data import Loaders
from tunesmith.trainer.evaluation import Evaluation
from tunesmith.trainer.listeners import fresh_state, make_handler, new_control, tell
from tunesmith.trainer.loaders import EpochClock
from tunesmith.trainer.objective import WindowLoss
from tunesmith.trainer.processes import SECONDS
from tunesmith.trainer.saving import HubUploads, ModelFiles
from tunesmith.trainer.stepping import AcceleratorView, seed_for
from tunesmith.trainer.training import TrainerRun
from tunesmith.trainer.upstream import (
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    PrinterCallback,
    can_return_loss,
    default_data_collator,
    find_labels,
    library,
    losses,
    parts,
    progress_callback,
    utils,
)
from tunesmith.trainer.upstream import logging as transformers_logging
from tunesmith.trainer.validation import check_overrides, refuse_combinations, require_head

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

log = logging.getLogger(__name__)


@dataclass
class Parts:
    """The parts behind the methods of one Trainer. `run` is the training run under way, or the last one."""

    loaders: Loaders
    loss: WindowLoss
    evaluation: Evaluation
    files: ModelFiles
    hub: HubUploads
    search: TrialSearch
    run: TrainerRun | None = None

    @classmethod
    def of(cls, trainer: Trainer) -> Parts:
        """The parts of a Trainer that is being made."""
        files, hub, search = ModelFiles(trainer), HubUploads(trainer), TrialSearch(trainer)
        return cls(Loaders(trainer), WindowLoss(trainer), Evaluation(trainer), files, hub, search)


def default_collator(processing_class: Any) -> Any:
    """The collator of a Trainer that is given none: it pads where there is a tokenizer."""
    pads = isinstance(processing_class, PreTrainedTokenizerBase)
    return DataCollatorWithPadding(processing_class) if pads else default_data_collator


class TrainerAssembly:
    """The constructor of a Trainer and the methods that belong to one of its attributes alone."""

    use_speed_ups: bool = True
    """Padding-free batches and the like, where they compute the same; set it to False to train without."""
    allow_changed_data: bool = False
    """True: a resume continues although data, model, tokenizer or arguments changed, and the journal records it."""
    worker_timeout: float = SECONDS
    """Seconds after which a data-loader worker that gives no batch ends the run."""
    loss_is_scaled_for_ga: bool | None = None
    model_preparation_time: float | None = None
    hp_space: Callable[..., dict[str, Any]]
    compute_objective: Callable[[dict[str, float]], Any]
    objective: Any = None
    deepspeed = None
    is_deepspeed_enabled = False
    is_fsdp_xla_enabled = is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False
    is_fsdp_enabled = False
    is_model_parallel = False
    place_model_on_device = True

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        self.args = library.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        check_arguments(self.args)
        take_accumulation(self.args)
        check_overrides(type(self))
        seed_for(self.args)
        if tokenizer is not None:
            log.warning("tokenizer= is called processing_class= now")
            processing_class = tokenizer if processing_class is None else processing_class
        self._memory_tracker = utils.TrainerMemoryTracker(self.args.skip_memory_metrics)
        self._memory_tracker.stages = {**self._memory_tracker.stages, "_finish": "train"}
        self._memory_tracker.start()
        transformers_logging.set_verbosity(self.args.get_process_log_level())
        self._parts = Parts.of(cast("Trainer", self))
        self.runtime = make_trainer_runtime(self.args, self._build_accelerator_args())
        self.is_fsdp_enabled = self.runtime.sharding is not None
        self.accelerator = AcceleratorView(cast("Trainer", self))
        self.gather_function = self.accelerator.gather_for_metrics
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class, self.model_init = processing_class, model_init
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self._given_optimizer = self.optimizer
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.data_collator = default_collator(processing_class) if data_collator is None else data_collator
        self._set_counters()
        self._set_model(model)
        self._validate_args()
        self._set_callbacks(callbacks)
        self._memory_tracker.stop_and_update_metrics()

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        """What the run's Accelerator is made from; an override may change the `kwargs_handlers`."""
        return {**accelerator_arguments(self.args), **options}

    def _set_counters(self) -> None:
        """The state of a Trainer that has done nothing yet."""
        self.is_in_train, self.hp_search_backend, self.hp_name = False, cast(Any, None), cast(Any, None)
        self.hub_model_id: str | None = None
        self.neftune_noise_alpha = self.args.neftune_noise_alpha
        self.current_flos, self._initial_num_input_tokens_seen = 0.0, 0.0
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._train_batch_size = rows_per_rank(self.args, self.args.train_batch_size, self.runtime.world)
        self._created_lr_scheduler, self._clock = False, EpochClock()
        self._signature_columns: list[str] | None = None

    def _set_model(self, model: Any) -> None:
        """The model on its device, and what its class says about labels and losses."""
        if model is None and self.model_init is None:
            raise RuntimeError("`Trainer` requires either a `model` or `model_init` argument")
        if model is not None and self.model_init is not None:
            raise ConfigError("`Trainer` requires either a `model` or `model_init` argument, but not both.")
        model = self.call_model_init() if model is None else model
        require_head(type(model))
        if not (self.args.fp16_full_eval or self.args.bf16_full_eval):
            model.to(self.runtime.device)
        self.model = self.model_wrapped = model
        inner = inner_model(model)
        kinds = [p.kind for p in inspect.signature(inner.forward).parameters.values()]
        takes = inspect.Parameter.VAR_KEYWORD in kinds
        self.model_accepts_loss_kwargs = getattr(inner, "accepts_loss_kwargs", takes)
        self.label_names = find_labels(type(inner)) if self.args.label_names is None else self.args.label_names
        self.can_return_loss = can_return_loss(type(inner))
        shifts = losses.LOSS_MAPPING.get(getattr(inner, "loss_type", None)) is losses.ForCausalLMLoss
        config = getattr(model, "config", None)
        self._parts.loss.shifts_labels = shifts and not getattr(config, "is_encoder_decoder", False)
        self.label_smoother = None
        if self.args.label_smoothing_factor != 0:
            if getattr(config, "problem_type", None) == "multi_label_classification":
                warnings.warn(
                    "Label smoothing is not compatible with multi-label classification: left out", stacklevel=3
                )
            else:
                self.label_smoother = parts.LabelSmoother(epsilon=self.args.label_smoothing_factor)
        if config is not None:
            config.use_cache = self.args.use_cache

    def _validate_args(self) -> None:
        """Combinations that cannot work are refused before anything runs."""
        refuse_combinations(cast("Trainer", self))

    def _set_callbacks(self, callbacks: list[Any] | None) -> None:
        trainer = cast("Trainer", self)
        self.callback_handler = make_handler(trainer, callbacks)
        self.add_callback(PrinterCallback if self.args.disable_tqdm else progress_callback())
        if self.args.push_to_hub:
            self.init_hf_repo()
        if self.args.should_save:
            os.makedirs(self.args.output_dir, exist_ok=True)
        self.control = new_control()
        self.state = fresh_state(trainer)
        tell(trainer, "on_init_end")

    @property
    def _engine(self) -> TrainState | None:
        """The engine's state of the run under way, or of the last one."""
        return None if self._parts.run is None else self._parts.run.engine

    @property
    def _trial(self) -> Any:
        """The trial under way, which `TrainerState` asks for."""
        return None if self._parts.run is None else self._parts.run.trial

    def call_model_init(self, trial: Any = None) -> Any:
        """A fresh model from `model_init`, which may take the trial."""
        assert self.model_init is not None
        return new_model(self.model_init, trial)

    def init_hf_repo(self, token: str | None = None) -> None:
        """Makes sure the repository exists."""
        if self.is_world_process_zero():
            self.hub_model_id = self._parts.hub.make_repo(token)

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

    @property
    def tokenizer(self) -> Any:
        """The old name of `processing_class`."""
        return self.processing_class

    def end(self) -> None:
        """Leaves the process group; nothing that talks between ranks works after it."""
        self.runtime.accelerator.end_training()

    def add_callback(self, callback: Any) -> None:
        """Adds a callback, given as an object or a class."""
        self.callback_handler.add_callback(callback)

    def pop_callback(self, callback: Any) -> Any:
        """Removes a callback and returns it; None when it is not there."""
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        """Removes a callback."""
        self.callback_handler.remove_callback(callback)

    def _get_output_dir(self, trial: Any = None) -> str:
        """The run folder: the output folder, or one inside it for each trial of a search."""
        if self.hp_search_backend is None or trial is None:
            return str(self.args.output_dir)
        name = self.hp_name(trial) if self.hp_name is not None else f"run-{trial.number}"
        return str(Path(self.args.output_dir) / name)

    def _hp_search_setup(self, trial: Any) -> None:
        self._parts.search.begin_trial(trial)

    def _report_to_hp_search(self, trial: Any, step: int, metrics: dict[str, float]) -> None:
        self._parts.search.report(trial, step, metrics)

    def _push_from_checkpoint(self, folder: str) -> None:
        self._parts.hub.push_checkpoint(folder)

    def _finish_current_push(self) -> None:
        self._parts.hub.finish()
