"""The Trainer: transformers' constructor, methods and results over the one engine."""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable
from typing import Any

from tunesmith.errors import ConfigError
from tunesmith.model.adapters import inner_model
from tunesmith.trainer.arguments import (
    accelerator_arguments,
    check_arguments,
    make_trainer_runtime,
    rows_per_rank,
    take_accumulation,
)
from tunesmith.trainer.callbacks import new_control
from tunesmith.trainer.hub import HubPart
from tunesmith.trainer.loaders import EpochClock
from tunesmith.trainer.methods import check_overrides
from tunesmith.trainer.preparation import AcceleratorView, seed_for
from tunesmith.trainer.running import TrainPart
from tunesmith.trainer.search import SearchPart
from tunesmith.trainer.upstream import (
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    can_return_loss,
    default_data_collator,
    find_labels,
    has_length,
    headless_models,
    library,
    losses,
    parts,
    utils,
)
from tunesmith.trainer.upstream import logging as transformers_logging

log = logging.getLogger(__name__)


class Trainer(TrainPart, SearchPart, HubPart):
    """Change one import and keep the script. Where it differs from transformers: docs/reference/trainer_compatibility.md."""

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
        self.runtime = make_trainer_runtime(self.args, self._build_accelerator_args())
        self.is_fsdp_enabled = self.runtime.sharding is not None
        self.accelerator = AcceleratorView(self)
        self.gather_function = self.accelerator.gather_for_metrics
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class, self.model_init = processing_class, model_init
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self._given_optimizer = self.optimizer
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        pads = isinstance(processing_class, PreTrainedTokenizerBase)
        default = DataCollatorWithPadding(processing_class) if pads else default_data_collator
        self.data_collator = default if data_collator is None else data_collator
        self._set_counters()
        self._set_model(model)
        self._validate_args()
        self._set_callbacks(callbacks)
        self._memory_tracker.stop_and_update_metrics()

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        """What the run's Accelerator is made from; an override may change the `kwargs_handlers`."""
        return {**accelerator_arguments(self.args), **options}

    def _set_counters(self) -> None:
        """Everything a fresh Trainer has not done yet."""
        self.is_in_train, self.hp_search_backend, self.hp_name, self.hub_model_id = False, None, None, None
        self.push_in_progress = []
        self.neftune_noise_alpha = self.args.neftune_noise_alpha
        self.current_flos, self._initial_num_input_tokens_seen = 0.0, 0.0
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._train_batch_size = rows_per_rank(self.args, self.args.train_batch_size, self.runtime.world)
        self._created_lr_scheduler, self._signature_columns, self._eval_dataloaders = False, None, {}
        self._clock = EpochClock()
        self._engine, self._journal, self._trial, self._journalled = None, None, None, set()
        self._own_runs = set()

    def _set_model(self, model: Any) -> None:
        """The model on its device, and what its class says about labels and losses."""
        if model is None and self.model_init is None:
            raise RuntimeError("`Trainer` requires either a `model` or `model_init` argument")
        if model is not None and self.model_init is not None:
            raise ConfigError("`Trainer` requires either a `model` or `model_init` argument, but not both.")
        model = self.call_model_init() if model is None else model
        name = type(model).__name__
        if name in headless_models and not find_labels(type(model)) and not can_return_loss(type(model)):
            raise ConfigError(
                f"The model you have picked ({name}) cannot be used as is for training: it only computes hidden states",
                fix="Use one with a head, such as AutoModelForSequenceClassification.",
            )
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
        self._loss_shifts_labels = shifts and not getattr(config, "is_encoder_decoder", False)
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
        args = self.args
        strategy = getattr(args.eval_strategy, "value", args.eval_strategy)
        if strategy != "no" and self.eval_dataset is None:
            raise ConfigError(
                f"You have set `args.eval_strategy` to {strategy} but you didn't pass an `eval_dataset` to `Trainer`",
                fix="Either set `args.eval_strategy` to `no` or pass an `eval_dataset`.",
            )
        if args.save_strategy == "best" and args.metric_for_best_model is None:
            raise ConfigError("`args.metric_for_best_model` must be provided when using 'best' save_strategy")
        if self.optimizer_cls_and_kwargs is not None and self.optimizer is not None:
            raise RuntimeError("Passing both `optimizers` and `optimizer_cls_and_kwargs` arguments is incompatible.")
        if self.model_init is not None and (self.optimizer is not None or self.lr_scheduler is not None):
            raise RuntimeError(
                "Passing a `model_init` is incompatible with providing the `optimizers` argument. "
                "You should subclass `Trainer` and override the `create_optimizer_and_scheduler` method."
            )
        metrics = self.compute_metrics
        if args.batch_eval_metrics and metrics and "compute_result" not in inspect.signature(metrics).parameters:
            raise ConfigError("with `batch_eval_metrics`, compute_metrics must take a boolean `compute_result`")
        if not callable(self.data_collator):
            raise TypeError("The `data_collator` should be a simple callable (function, class with `__call__`).")
        if self.train_dataset is not None and not has_length(self.train_dataset) and args.max_steps <= 0:
            raise ConfigError(
                "The train_dataset does not implement __len__, max_steps has to be specified. "
                "The number of steps needs to be known in advance for the learning rate scheduler."
            )

    def _set_callbacks(self, callbacks: list[Any] | None) -> None:
        self._make_handler(callbacks)
        if self.args.push_to_hub:
            self.init_hf_repo()
        if self.args.should_save:
            os.makedirs(self.args.output_dir, exist_ok=True)
        self.control = new_control()
        self.state = self._fresh_state()
        self._tell("on_init_end")

    @property
    def tokenizer(self) -> Any:
        """The old name of `processing_class`."""
        return self.processing_class

    def end(self) -> None:
        """Leaves the process group; nothing that talks between ranks works after it."""
        self.runtime.accelerator.end_training()
