"""The Trainer: transformers' constructor, attributes, methods and results over the one engine. A method that is not here is a
function of the module that does its work, with the Trainer as its first argument, or transformers' own where that does the
same."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import transformers
from torch import nn
from transformers import Trainer as LibraryTrainer
from transformers import trainer_pt_utils as pt_utils
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.trainer import DEFAULT_PROGRESS_CALLBACK
from transformers.trainer_utils import TrainerMemoryTracker
from transformers.utils import can_return_loss, find_labels
from transformers.utils import logging as transformers_logging

from tunesmith.errors import ConfigError
from tunesmith.models.families import inner_model
from tunesmith.trainer import (
    arguments,
    callbacks,
    checkpoints,
    data,
    evaluation,
    objective,
    saving,
    stepping,
    uploads,
)
from tunesmith.trainer.training import TrainerRun, attempt_training
from tunesmith.trainer.validation import check_arguments, check_overrides, refuse_combinations, require_head
from tunesmith.trainer.windows import SECONDS
from tunesmith.training.state import TrainState

if TYPE_CHECKING:
    from tunesmith.trainer.trials import TrialSearch

log = logging.getLogger(__name__)
Context = contextlib.AbstractContextManager[Any]


class Trainer:
    """Change one import and keep the script. Where it differs from transformers: docs/reference/trainer_compatibility.md."""

    _validate_args = refuse_combinations
    set_initial_training_values = arguments.set_initial_training_values
    hyperparameter_search = arguments.hyperparameter_search
    evaluate = evaluation.evaluate
    evaluation_loop, prediction_step = evaluation.evaluation_loop, evaluation.prediction_step
    _evaluate, _determine_best_metric = callbacks.evaluate_in_training, callbacks.remember_best
    _load_callback_state = callbacks.load_callback_states
    compute_loss, training_step = objective.compute_loss, objective.training_step
    floating_point_ops = objective.floating_point_ops
    _track_num_input_tokens, _prepare_inputs = objective.count_input_tokens, objective.prepare_inputs
    _get_train_sampler, _get_eval_sampler = data.train_sampler, data.eval_sampler
    _get_dataloader, _fast_rows = data.make_dataloader, data.fast_rows
    _set_signature_columns_if_needed = data.set_signature_columns
    _remove_unused_columns = data.without_unused
    create_optimizer, _get_learning_rate = stepping.create_optimizer, stepping.get_learning_rate
    save_model, _save, save_state = saving.save_model, saving.save_files, saving.save_state
    save_metrics, create_model_card = saving.save_metrics, saving.create_model_card
    init_hf_repo, push_to_hub = uploads.init_hf_repo, uploads.push_to_hub
    _push_from_checkpoint, _finish_current_push = uploads.push_checkpoint, uploads.finish_uploads
    _load_best_model = checkpoints.load_best_model
    add_callback, pop_callback = LibraryTrainer.add_callback, LibraryTrainer.pop_callback
    remove_callback = LibraryTrainer.remove_callback
    is_world_process_zero = LibraryTrainer.is_world_process_zero
    is_local_process_zero = LibraryTrainer.is_local_process_zero
    call_model_init, predict, log = LibraryTrainer.call_model_init, LibraryTrainer.predict, LibraryTrainer.log
    get_train_dataloader = LibraryTrainer.get_train_dataloader
    get_eval_dataloader = LibraryTrainer.get_eval_dataloader
    get_test_dataloader, num_examples = LibraryTrainer.get_test_dataloader, LibraryTrainer.num_examples
    _get_collator_with_removed_columns = LibraryTrainer._get_collator_with_removed_columns
    create_optimizer_and_scheduler = LibraryTrainer.create_optimizer_and_scheduler
    create_scheduler = LibraryTrainer.create_scheduler
    get_optimizer_cls_and_kwargs = staticmethod(LibraryTrainer.get_optimizer_cls_and_kwargs)
    get_decay_parameter_names = LibraryTrainer.get_decay_parameter_names
    compute_loss_context_manager = LibraryTrainer.compute_loss_context_manager
    store_flos, _get_output_dir = LibraryTrainer.store_flos, LibraryTrainer._get_output_dir
    _report_to_hp_search = LibraryTrainer._report_to_hp_search
    log_metrics, metrics_format = pt_utils.log_metrics, staticmethod(pt_utils.metrics_format)
    get_num_trainable_parameters = pt_utils.get_num_trainable_parameters
    get_learning_rates, get_optimizer_group = pt_utils.get_learning_rates, pt_utils.get_optimizer_group

    use_speed_ups: bool = True
    """Padding-free batches and the like, where they compute the same; set it to False to train without."""
    allow_changed_data: bool = False
    """True: a resume continues although data, model, tokenizer or arguments changed, and the journal records it."""
    worker_timeout: float = SECONDS
    """Seconds after which a data-loader worker that gives no batch ends the run."""
    loss_is_scaled_for_ga: bool | None = None
    model_preparation_time: float | None = None
    hp_space: Callable[..., dict[str, Any]]
    hp_name: Callable[[Any], str] | None = None
    hp_search_backend: Any = None
    compute_objective: Callable[[dict[str, float]], Any]
    objective: Any = None
    deepspeed = None
    is_deepspeed_enabled = is_model_parallel = False
    is_fsdp_xla_enabled = is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False
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
        self.args = transformers.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        check_arguments(self.args)
        arguments.take_accumulation(self.args)
        check_overrides(type(self))
        stepping.seed_for(self.args)
        if tokenizer is not None:
            log.warning("tokenizer= is called processing_class= now")
            processing_class = tokenizer if processing_class is None else processing_class
        self._memory_tracker = TrainerMemoryTracker(self.args.skip_memory_metrics)
        self._memory_tracker.stages = {**self._memory_tracker.stages, "_finish": "train"}
        self._memory_tracker.start()
        transformers_logging.set_verbosity(self.args.get_process_log_level())
        self.runtime = arguments.make_trainer_runtime(self.args, self._build_accelerator_args())
        self.is_fsdp_enabled = False
        self.accelerator = stepping.AcceleratorView(self)
        self.gather_function = self.accelerator.gather_for_metrics
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.processing_class, self.model_init = processing_class, model_init
        self.compute_loss_func, self.compute_metrics = compute_loss_func, compute_metrics
        self.preprocess_logits_for_metrics = preprocess_logits_for_metrics
        self.optimizer, self.lr_scheduler = optimizers
        self._given_optimizer = self.optimizer
        self.optimizer_cls_and_kwargs = optimizer_cls_and_kwargs
        self.data_collator = data.default_collator(processing_class) if data_collator is None else data_collator
        self._set_counters()
        self._set_model(model)
        self._validate_args()
        self._set_callbacks(callbacks)
        self._memory_tracker.stop_and_update_metrics()

    def _set_counters(self) -> None:
        """The state of a Trainer that has done nothing yet."""
        self.is_in_train = False
        self.hub_model_id: str | None = None
        self.neftune_noise_alpha = self.args.neftune_noise_alpha
        self.current_flos, self._initial_num_input_tokens_seen = 0.0, 0.0
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        self._train_batch_size = arguments.rows_per_rank(self.args, self.args.train_batch_size, self.runtime.world)
        self._created_lr_scheduler, self._clock = False, data.EpochClock()
        self._signature_columns: list[str] | None = None
        self._eval_dataloaders: dict[str, Any] = {}  # those with workers that stay
        self._loss = objective.WindowLoss(self)
        self._run: TrainerRun | None = None  # the training run under way, or the last one
        self._run_ids: set[str] = set()  # the runs that this Trainer made: checkpoints of others are never removed
        self._uploads: list[Any] = []  # those under way
        self._search: TrialSearch | None = None  # the search for hyperparameters under way
        self._gathered: dict[str, Any] | None = None  # gathered weights of a sharded model, during a save

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
        shifts = LOSS_MAPPING.get(getattr(inner, "loss_type", None)) is ForCausalLMLoss
        config = getattr(model, "config", None)
        self._loss.shifts_labels = shifts and not getattr(config, "is_encoder_decoder", False)
        factor, self.label_smoother = self.args.label_smoothing_factor, None
        if factor and getattr(config, "problem_type", None) == "multi_label_classification":
            warnings.warn("Label smoothing is not compatible with multi-label classification: left out", stacklevel=3)
        elif factor:
            self.label_smoother = pt_utils.LabelSmoother(epsilon=factor)
        if config is not None:
            config.use_cache = self.args.use_cache

    def _set_callbacks(self, given: list[Any] | None) -> None:
        self.callback_handler = callbacks.make_handler(self, given)
        self.add_callback(transformers.PrinterCallback if self.args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
        if self.args.push_to_hub:
            self.init_hf_repo()
        if self.args.should_save:
            os.makedirs(self.args.output_dir, exist_ok=True)
        self.control = transformers.TrainerControl()
        self.state = callbacks.fresh_state(self)
        callbacks.tell(self, "on_init_end")

    def _build_accelerator_args(self, **options: Any) -> dict[str, Any]:
        """What the run's Accelerator is made from; an override may change the `kwargs_handlers`."""
        return {**arguments.accelerator_arguments(self.args), **options}

    @property
    def _engine(self) -> TrainState | None:
        """The engine's state of the run under way, or of the last one."""
        return None if self._run is None or self._run.record is None else self._run.record.state

    @property
    def _trial(self) -> Any:
        """The trial under way, which `TrainerState` asks for."""
        return None if self._run is None else self._run.trial

    @property
    def tokenizer(self) -> Any:
        """The old name of `processing_class`."""
        return self.processing_class

    def overrides(self, *names: str) -> bool:
        """Whether any of these methods was replaced, in a subclass or on this object."""
        return any(n in vars(self) or getattr(type(self), n) is not getattr(Trainer, n) for n in names)

    def end(self) -> None:
        """Leaves the process group; nothing that communicates between ranks works after it."""
        self.runtime.accelerator.end_training()

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Trains to the end of the plan, or until a callback stops it. Returns (global_step, training_loss, metrics)."""
        self._memory_tracker.start()
        return attempt_training(self, resume_from_checkpoint, trial, ignore_keys_for_eval)

    def _hp_search_setup(self, trial: Any) -> None:
        if self._search is not None and trial is not None:
            self._search.begin_trial(trial)

    def get_total_train_batch_size(self, args: Any = None) -> int:
        """Rows of one optimizer step over all micro-batches and ranks."""
        return int(self._train_batch_size * self.args.gradient_accumulation_steps * self.runtime.world)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Context:
        """Autocast as bf16 or fp16 ask for it."""
        return self.runtime.autocast()

    def _prepare_input(self, data: Any) -> Any:
        """The same structure with its tensors on the device."""
        return objective.on_device(data, self.args.device)

    def _make_engine(self) -> TrainState:
        assert self._run is not None
        return stepping.make_engine(self._run)

    def _save_checkpoint(self, model: nn.Module, trial: Any = None) -> None:
        """Publishes `checkpoint-<step>`, then removes older ones beyond `save_total_limit`."""
        assert self._run is not None
        callbacks.export_callback_states(self)
        checkpoints.save_run(self._run)
