"""`TrainingArguments` that accepts old names, and `class Trainer(transformers.Trainer)`: the same training, faster, with an
event log and checkpoints that can be trusted.

Overridden, in the order of this file:
- fast steps: `training_step`, `compute_loss` and `prediction_step` run inside `PackedCalls.active()`, on a GPU the training
  calls inside `ModelGraphs.active()`; `_run_epoch` runs the steps of unmodified scripts as CUDA graphs (captured_steps.py);
- order: `_get_train_sampler` and `_get_eval_sampler` are functions of (seed, epoch) and of the input order;
- NaN: `training_step` and `_get_grad_norm` stop the run before the update;
- checkpoints: `_save_checkpoint` and `_load_*` write and read verified folders without pickle, and resume exactly.
Everything else is transformers' own code, and so is any method that a subclass overrides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import math
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from safetensors.torch import load_file, save
from torch.utils.data import RandomSampler, SequentialSampler
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import has_length

from tunesmith.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    NumericsError,
    ResourceError,
    TunesmithError,
    did_you_mean,
)
from tunesmith.events import NonFinite, Note, Resumed, RunStarted, Saved, StepDone
from tunesmith.files import write_file
from tunesmith.runs.event_log import first_event, require_journal
from tunesmith.runs.folder import (
    MANIFEST,
    RunDir,
    RunLock,
    checkpoint_step,
    publish_folder,
    read_manifest,
    remove_leftovers,
    require_own_target,
    verify,
)
from tunesmith.speedups.model_graphs import GRAPHS, ModelGraphs
from tunesmith.speedups.packed_calls import FIRST_TOKEN, PACKING, PackedCalls
from tunesmith.trainer.identity import BATCH, is_arrow_dataset, model_mark, trainer_identity
from tunesmith.trainer.run_log import RunLog, WaitingStep
from tunesmith.training.checkpoint import (
    Identity,
    contiguous,
    differences,
    from_plain,
    holds_names,
    is_weights,
    load_weights,
    missing_file,
    newest_intact,
    pack_optimizer,
    require_finite,
    rotate,
    to_plain,
    unpack_optimizer,
    weight_files,
    write_files,
)
from tunesmith.training.optimizer import fuse_update
from tunesmith.training.state import SMALLEST, generator_states, only_training_thread, restore_generators

if TYPE_CHECKING:
    from tunesmith.trainer.captured_steps import CapturedSteps

log = logging.getLogger("transformers.trainer")
"""The logger that `log_level` of the arguments sets."""

OPTIMIZER, OPTIMIZER_STATE, SCHEDULER = "optimizer.safetensors", "optimizer.json", "scheduler.json"
PROGRESS = "progress.json"
GENERATORS, GENERATOR_STATE, SCALER = "generators.safetensors", "generators.json", "scaler.json"
TRAINER_STATE, TRAINING_ARGS = "trainer_state.json", "training_args.json"
CHANGED = (
    "Undo the change, set Trainer.allow_changed_data = True to resume anyway, or load the weights with from_pretrained "
    "and start a new run."
)
WHOLE_STEP = {"padding_free": PACKING, "cls_only_last_layer": FIRST_TOKEN, "fused_layers": "fused layers"}
"""Option of `tunesmith train` -> what the line about the speedups calls it."""
READ_BACK_EVERY = 50
"""Steps on a GPU after which their losses are read, at the latest: reading waits until the GPU is done."""


RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "include_tokens_per_second": "include_num_input_tokens_seen",
}
DROPPED = {
    "overwrite_output_dir": "a new run replaces its own files; resume_from_checkpoint continues an old one",
    "logging_dir": "set TENSORBOARD_LOGGING_DIR to choose where TensorBoard writes",
    "jit_mode_eval": "it has no effect",
    "save_safetensors": "weights are always saved as safetensors",
    "fp16_backend": "there is one backend",
    "half_precision_backend": "there is one backend",
    "fp16_opt_level": "there is one level",
}
SWITCHES: dict[str, tuple[str, Any]] = {
    "group_by_length": ("train_sampling_strategy", "group_by_length"),
    "include_inputs_for_metrics": ("include_for_metrics", ["inputs"]),
}
"""Old switches -> the option and value that True stands for."""


class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]
    """`transformers.TrainingArguments` that accepts old names, each with a one-line note."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **modern_names(options))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the Hub token: transformers uploads pickled arguments with the model."""
        return {**self.__dict__, "hub_token": None}


def modern_names(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options under their current names; an unknown name raises a ConfigError that suggests the nearest."""
    known = {f.name for f in dataclasses.fields(transformers.TrainingArguments) if f.init}
    out: dict[str, Any] = {}
    for name, value in options.items():
        if name in known:
            out[name] = value
        elif name in RENAMED:
            log.warning("%s is called %s now", name, RENAMED[name])
            out[RENAMED[name]] = value
        elif name == "warmup_ratio":
            log.warning("warmup_ratio is called warmup_steps now (a number below 1 is a ratio)")
            if value and not options.get("warmup_steps"):
                out["warmup_steps"] = value
        elif name in SWITCHES:
            new, switched = SWITCHES[name]
            log.warning("%s is called %s=%r now", name, new, switched)
            out |= {new: switched} if value else {}
        elif name in DROPPED:
            log.warning("%s is not needed: %s", name, DROPPED[name])
        else:
            names = tuple(sorted(known | RENAMED.keys() | DROPPED.keys()))
            raise ConfigError(f"TrainingArguments has no {name!r}", fix=did_you_mean(name, names))
    return out


class EpochLengthSampler(LengthGroupedSampler):  # type: ignore[misc]
    """Groups rows of similar length. The order depends on the seed and the epoch only."""

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths, generator=torch.Generator())
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.seed + self.epoch)
        yield from super().__iter__()


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """transformers' Trainer with packed batches, verified checkpoints, exact resume and a stop at the first NaN."""

    use_speed_ups: bool = True
    """Set it to False to train without speedups."""
    allow_changed_data: bool = False
    """Set it to True to resume although data, model, tokenizer or arguments changed."""

    _packed: PackedCalls | None = None
    _graphs: ModelGraphs | None = None
    _reported: Any = None
    _run_log: RunLog | None = None
    _run_id: str = ""
    _identity: Identity | None = None
    _notes: tuple[str, ...] = ()
    _captured: CapturedSteps | None = None
    _why_not_whole: str = ""
    _step_loss: Any = None
    _waiting: tuple[WaitingStep, ...] = ()
    _skips_on_device: bool = False
    """Whether the optimizer or the loss scaler skips a NaN update by itself, so that no step waits for the GPU."""
    _loss_before: Any = 0.0
    _step_tokens: tuple[int, int] = (0, 0)
    _flops: dict[Any, int] = {}  # noqa: RUF012  (replaced, never changed)
    _batches_read: int = 0
    _epoch: int = 0
    _epoch_generators: dict[str, Any] | None = None
    _due_generators: Path | None = None
    _progress: dict[str, Any] = {}  # noqa: RUF012  (replaced, never changed)
    _noted_step: int = -1
    _epoch_open: bool = True
    _skipped: tuple[str, ...] = ()

    @functools.wraps(transformers.Trainer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, tokenizer: Any = None, **options: Any) -> None:
        if tokenizer is not None:
            log.warning("tokenizer= is called processing_class= now")
            options.setdefault("processing_class", tokenizer)
        super().__init__(*args, **options)
        if self.args.device.type == "cuda" and self.args.dataloader_pin_memory:
            self.accelerator.dataloader_config.non_blocking = (
                True  # otherwise, each batch would wait for the step before
            )
        if self.args.world_size > 1:
            from tunesmith.training.distributed import wait_for_gloo_at_exit

            wait_for_gloo_at_exit()

    @property
    def tokenizer(self) -> Any:
        """The old name of `processing_class`."""
        return self.processing_class

    def _validate_args(self) -> None:
        super()._validate_args()
        args, wanted = self.args, self.args.metric_for_best_model
        if args.fp16 and args.device.type == "cpu":
            log.warning("fp16=True has no effect on a CPU: training runs in float32.")
        evaluates = args.eval_strategy != "no" and not isinstance(self.eval_dataset, dict)
        if (
            wanted
            and evaluates
            and self.compute_metrics is None
            and type(self).evaluate is transformers.Trainer.evaluate
        ):
            known = ("loss", "runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
            if str(wanted).removeprefix("eval_") not in known:
                fix = did_you_mean(str(wanted), known) or "Pass compute_metrics, or use 'loss'."
                raise ConfigError(f"metric_for_best_model is {wanted!r}, but there is no compute_metrics", fix=fix)

    # ---- Training ----

    @only_training_thread()
    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, ignore_keys_for_eval: Any = None
    ) -> Any:
        """Train, or continue from a verified checkpoint. Returns transformers' TrainOutput."""
        try:
            if has_length(self.train_dataset) and len(self.train_dataset) == 0:
                raise DataError("the train_dataset has no rows", fix="It needs at least one row.")
            with self._own_folder(trial) as run:
                folder = self._find_checkpoint(resume_from_checkpoint, run)
                self._identity, self._notes, self._noted_step, self._epoch_generators = None, (), -1, None
                self._loss_before, self._flops = 0.0, {}
                self._run_id = uuid.uuid4().hex
                if folder is not None and (Path(folder) / MANIFEST).is_file():
                    self._run_id = str(read_manifest(Path(folder)).get("run_id", self._run_id))
                return super().train(folder, trial, ignore_keys_for_eval)
        except TunesmithError as error:
            self._end_log(type(error).__name__)
            raise
        finally:
            self._close_captured()
            self._end_log("error")
            self.is_in_train = False

    @contextlib.contextmanager
    def _own_folder(self, trial: Any) -> Iterator[RunDir]:
        """Lock the output folder, and refuse one with files that the run would overwrite although it didn't write them."""
        run = RunDir(self._get_output_dir(trial))
        if not self.is_world_process_zero():
            yield run
            return
        with RunLock(run.path / "_lock"):  # transformers' upload skips names that start with an underscore
            remove_leftovers(run.path)
            require_journal(run.journal_file)
            _require_no_model(run.path)
            yield run

    def _find_checkpoint(self, wanted: str | bool | None, run: RunDir) -> str | None:
        """Return the folder to resume from: the newest valid one, or the requested one after its verification."""
        self._skipped = ()
        if wanted is None or wanted is False:
            return None
        if self._is_sharded:
            found = transformers.trainer_utils.get_last_checkpoint(str(run.path)) if wanted is True else wanted
            if found is None:
                raise CheckpointError(f"No valid checkpoint found in output directory ({run.path})")
            return str(found)
        if wanted is not True:
            folder = Path(wanted)
            if not (folder / MANIFEST).is_file():
                problem = "it was not written by tunesmith's Trainer" if folder.is_dir() else "there is no such folder"
                fix = "Load its weights with from_pretrained and start a new run." if folder.is_dir() else None
                raise CheckpointError(f"Can't find a valid checkpoint at {folder}: {problem}", fix=fix)
            _join_shards(folder)
            verify(folder)
            return str(folder)
        first = first_event(run.journal_file) if run.journal_file.is_file() else None
        newest, self._skipped = newest_intact(run, first.run_id if isinstance(first, RunStarted) else None)
        if newest is None:
            why = f": {'; '.join(self._skipped)}" if self._skipped else ""
            raise CheckpointError(f"No valid checkpoint found in output directory ({run.path}){why}")
        for line in self._skipped:
            log.warning("Skipped checkpoint: %s", line)
        return str(newest)

    @property
    def _on_gpu(self) -> bool:
        return bool(self.args.device.type == "cuda")

    @property
    def _is_sharded(self) -> bool:
        """Whether several processes write parts of a checkpoint, in the format of their library."""
        by_transformers = getattr(self, "is_distributed_loading_by_transformers", False)  # since 5.20
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled or by_transformers)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        """Restore the state, after a comparison of this run with the checkpoint's."""
        _require_labels(self)
        run = RunDir(self._get_output_dir(trial))
        if self.args.save_strategy != "no" and not self._is_sharded and self.is_world_process_zero():
            for folder in run.checkpoints():
                if checkpoint_step(folder) <= max_steps:
                    require_own_target(folder)
        if resume_from_checkpoint is not None and not self._is_sharded and self._identity is None:
            self._compare(Path(resume_from_checkpoint))
        found: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        exact = resume_from_checkpoint is not None and not self._is_sharded
        if self.args.save_strategy != "no" and self._identity is None:
            self._identity = self._make_identity()
        self._close_captured()
        self._captured = None
        self._choose_speedups()
        if self._on_gpu and self._packed is not None:
            from tunesmith.trainer.captured_steps import CapturedSteps

            made = CapturedSteps.make(self, Trainer, self._training_rows())
            self._captured = made if isinstance(made, CapturedSteps) else None
            self._why_not_whole = made if isinstance(made, str) else ""
        notes = self._notes
        if self.use_speed_ups:
            notes = (*notes, self._describe_speedups())
            log.info(notes[-1])
        if self.is_world_process_zero():
            rows = len(self.train_dataset) if has_length(self.train_dataset) else 0
            event: RunStarted | Resumed
            if resume_from_checkpoint is None:
                epochs = max_steps / max(num_update_steps_per_epoch, 1)
                event = RunStarted(self._run_id, 0, max_steps, num_update_steps_per_epoch, epochs, rows, time.time())
            else:
                name = Path(resume_from_checkpoint).name
                event = Resumed(self.state.global_step, name, self._skipped, time.time())
            self._end_log("restarted")
            self._run_log = RunLog(run, event, notes)
        return self._restore_position(Path(resume_from_checkpoint), found) if exact else found

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        """Prepare model and optimizer; whole steps take over the optimizer."""
        prepared = super()._prepare_for_training(*args, **options)
        self._waiting = ()
        if self._captured is not None and not self._captured.begin(self._plain_optimizer()):
            self._leave_whole_steps("the optimizer is not torch's AdamW")
        self._choose_gate()
        return prepared

    def _leave_whole_steps(self, reason: str) -> None:
        """Train with CUDA graphs of the encoder only."""
        assert self._captured is not None
        self._captured.close()
        self._captured, self._why_not_whole = None, reason
        self.report(self._describe_speedups())

    def _choose_gate(self) -> None:
        own = type(self)._get_grad_norm is not Trainer._get_grad_norm or self.args.world_size > 1
        alone = self._on_gpu and self._packed is not None and self._captured is None and not own
        self._skips_on_device = alone and (self._scaler is not None or fuse_update(self._plain_optimizer()))

    @property
    def _scaler(self) -> Any:
        """The gradient scaler of fp16, or None."""
        scaler = getattr(self.accelerator, "scaler", None)
        return scaler if scaler is not None and scaler.is_enabled() else None

    def _may_overflow(self) -> bool:
        """Return whether an infinite gradient may be due to the scale of fp16, which is then lowered."""
        return self._scaler is not None and self._scaler.get_scale() > SMALLEST

    def _close_captured(self) -> None:
        if self._captured is not None:
            self._captured.close()
        if self._graphs is not None:
            self._graphs.free()

    def _restore_position(self, folder: Path, computed: tuple[int, int]) -> tuple[int, int]:
        """Return (epoch, batches to skip) of a checkpoint; an epoch that was complete but not ended is ended first."""
        stored = {"batch_rows": self._batch_rows, **_read_json(folder, PROGRESS)}
        self._progress = stored
        changed = any(note.startswith(("resumes although", BATCH)) for note in self._notes)
        if self.args.ignore_data_skip or changed:
            return computed
        batches = stored["batches"] * stored["batch_rows"] // self._batch_rows
        return (stored["epoch"], batches) if stored["epoch_open"] else (stored["epoch"] + 1, 0)

    @property
    def _batch_rows(self) -> int:
        """Rows of a micro-batch over all processes."""
        return int(self._train_batch_size * self.args.world_size)

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """Run an epoch. One that is continued starts with the generators it started with, so that its order is the same."""
        self._epoch, self._batches_read = options["epoch"], 0
        folder = options["resume_from_checkpoint"]
        continued = folder is not None and self._epoch == options["epochs_trained"] and not self._is_sharded
        if continued and self._continue_epoch(Path(folder), options):
            return
        self._epoch_generators = self._epoch_generators or generator_states(self.args.device)
        if self._captured is not None and not self._captured.run_epoch(
            options["model"], options["train_dataloader"], options
        ):
            self._leave_whole_steps("batches are not rows of tokens with one label each")
            self._choose_gate()
            restore_generators(self._epoch_generators, self.args.device)  # of the first batch, which is read again
        if self._captured is None:
            filters = self.args.logging_nan_inf_filter
            self.args.logging_nan_inf_filter = filters and not self._skips_on_device  # it waits for the GPU
            try:
                super()._run_epoch(*args, **options)
            finally:
                self.args.logging_nan_inf_filter = filters
        self._epoch_generators = None

    def _continue_epoch(self, folder: Path, options: dict[str, Any]) -> bool:
        """Restore the generators and the mean of the next logged loss; return whether the run is complete already."""
        since_log, skipped = self._progress["loss_since_log"], options["steps_trained_in_current_epoch"]
        self._tr_loss += since_log
        self._loss_before = since_log
        self._total_loss_scalar -= since_log  # `train_loss` is the mean over the steps of this call
        self._globalstep_last_logged = self._progress["logged_step"]
        self._batches_read, self._noted_step = skipped, self.state.global_step
        self._restore_generators(folder, "epoch" if skipped else "now")
        self._epoch_generators = generator_states(self.args.device)
        complete: bool = self.state.global_step >= self.state.max_steps
        if complete and not skipped:
            self.control.should_training_stop = True
            return True
        steps = skipped // self.args.gradient_accumulation_steps
        if complete or skipped >= options["steps_in_epoch"]:  # only the end of the epoch is left
            options["num_update_steps_per_epoch"] = max(steps, 1)
            self._due_generators = folder
        return False

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Count the batches, to name the rows of one that fails."""
        found = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._batches_read += len(found[0])
        return found

    def _maybe_log_save_evaluate(self, tr_loss: Any, grad_norm: Any, *args: Any, **options: Any) -> None:
        """Write the step to the event log, then log, evaluate and save as transformers does."""
        if self._due_generators is not None:
            self._restore_generators(self._due_generators, "now")
            self._due_generators = None
        self._epoch_open, self._noted_step = self.state.global_step > self._noted_step, self.state.global_step
        loss = self._step_loss
        if loss is None and self._epoch_open and self._captured is None:  # `training_step` is the user's
            loss = self._kept(tr_loss) - self._loss_before
        if loss is not None:
            rate = options.get("learning_rate") or self._get_learning_rate()
            rows, epoch = self.get_total_train_batch_size(self.args), float(self.state.epoch or 0.0)
            event = StepDone(self.state.global_step, epoch, None, None, float(rate), rows, *self._step_tokens)
            batches = self._batches_read, self.current_gradient_accumulation_steps
            self.note_step(WaitingStep(loss, grad_norm, event, functools.partial(self._rows_of_batches, *batches)))
        vars(self._plain_optimizer()).pop("found_inf", None)
        control = self.control
        ends = not self._epoch_open or control.should_log or control.should_evaluate or control.should_save
        if ends or not self._skips_on_device:
            self.read_back()
        own_step, self._step_loss, self._step_tokens = self._step_loss is None, None, (0, 0)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **options)
        self._loss_before = self._kept(tr_loss) if own_step else 0.0

    def _kept(self, loss: torch.Tensor) -> Any:
        """Return the loss as a number, or a copy on the GPU if nothing has to wait for it."""
        return loss.detach().clone() if self._skips_on_device else float(loss)

    def note_step(self, step: WaitingStep) -> None:
        """Keep a step for `read_back`."""
        self._waiting = (*self._waiting, step)
        if len(self._waiting) == READ_BACK_EVERY:
            self.read_back()

    def read_back(self) -> None:
        """Write the steps since the last call to the event log; a NaN or infinite one raises a NumericsError."""
        waiting, self._waiting = self._waiting, ()
        numbers = _read_numbers([number for step in waiting for number in (step.loss, step.grad_norm)])
        for step, loss, norm in zip(waiting, numbers[::2], numbers[1::2], strict=True):
            if self._run_log is not None:
                self._run_log.step(replace(step.event, loss=loss, grad_norm=norm), step.time)
            gated = self._captured is not None or self._skips_on_device
            is_bad = [number is not None and not math.isfinite(number) for number in (loss, norm)]
            if gated and (is_bad[0] or (is_bad[1] and not self._may_overflow())):
                self._stop_at_nan("loss or gradient", "", step=step.event.step, rows=step.rows())

    def _finalize_training(self, *args: Any, **options: Any) -> Any:
        """Finish, and close the event log."""
        output = super()._finalize_training(*args, **options)
        self._end_log("completed" if self.state.global_step >= self.state.max_steps else "break")
        return output

    def _end_log(self, reason: str) -> None:
        run_log, self._run_log = self._run_log, None
        if run_log is not None:
            run_log.end(reason)

    # ---- Fast steps ----

    def _choose_speedups(self) -> None:
        """Choose packed calls, and on a GPU CUDA graphs for the training calls, unless the arguments rule them out."""
        self._packed = self._graphs = None
        if self._why_no_speedups() is not None:
            return
        half = self.accelerator.mixed_precision in ("bf16", "fp16") and self.accelerator.native_amp
        own_loss = type(self).compute_loss is not Trainer.compute_loss or "compute_loss" in vars(self)
        only_loss = not own_loss and self.compute_loss_func is None and self.label_smoother is None
        self._packed = PackedCalls(self.model, half=half, only_loss=only_loss)
        if self._on_gpu:
            self._graphs = ModelGraphs(self.model, half=half)
            if self.args.world_size > 1:
                self._graphs.close("several processes train")
        self._reported = self._in_use()

    def _in_use(self) -> Any:
        """Return what a line about speedups was written for: it is written again when this changes."""
        return self._packed and self._packed.on, self._graphs and (self._graphs.off, self._graphs.skipped)

    def _why_no_speedups(self) -> str | None:
        args = self.args
        if not self.use_speed_ups:
            return "use_speed_ups is False"
        if self._is_sharded or self.is_model_parallel or args.n_gpu > 1:
            return "the model is spread over several devices"
        if args.torch_compile:
            return "torch_compile is set"
        return "neftune_noise_alpha depends on the padding" if args.neftune_noise_alpha is not None else None

    def _describe_speedups(self) -> str:
        """Return one line: which speedups are on, and why others are off."""
        packed, whole = self._packed, self._captured
        if whole is not None:
            reasons = dict(note.split(" is off: ", 1) for note in whole.speedups.notes)
            return _speedup_line(whole.speedups.on, {WHOLE_STEP.get(name, name): why for name, why in reasons.items()})
        on = () if packed is None else packed.on
        off = {PACKING: self._why_no_speedups()} if packed is None else packed.off
        if self._graphs is not None and self._graphs.off is None:
            on = (GRAPHS,)
            off = {"CUDA graph of the whole step": self._why_not_whole} if self._why_not_whole else {}
        elif self._graphs is not None:
            off = {GRAPHS: self._graphs.off, **off}
        line = _speedup_line(on, off)
        if self._graphs is not None and self._graphs.off is None and self._graphs.skipped is not None:
            line += f" Some calls run without it because {self._graphs.skipped}."
        return line

    @contextlib.contextmanager
    def _fast(self, *, training: bool) -> Iterator[None]:
        """Pack the calls of the model inside this block, or replay them as CUDA graphs."""
        if self._packed is None or self._packed.model is not self.model:
            self._choose_speedups()
        if self._packed is None:
            yield
            return
        replays = training and self._graphs is not None and self._graphs.off is None
        with self._graphs.active() if self._graphs is not None and replays else self._packed.active():
            yield
        if self._in_use() != self._reported:
            self._reported = self._in_use()
            self.report(self._describe_speedups())

    def report(self, line: str) -> None:
        """Log a line about the speedups, and write it to the event log."""
        log.warning(line)
        if self._run_log is not None:
            self._run_log.write(Note(self.state.global_step, line))

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Compute transformers' loss on a packed batch."""
        with self._fast(training=self.model.training):
            return super().compute_loss(model, inputs, *args, **options)

    def training_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Run transformers' training step on a packed batch; a NaN or infinite loss raises a NumericsError."""
        with self._fast(training=True):
            loss = super().training_step(model, inputs, *args, **options)
        ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        if isinstance(ids, torch.Tensor) and ids.device.type == "cpu":
            mask = inputs.get("attention_mask")
            real, all_ids = self._step_tokens
            count = int(mask.sum()) if isinstance(mask, torch.Tensor) else ids.numel()
            self._step_tokens = (real + count, all_ids + ids.numel())
        value = self._kept(loss)
        self._step_loss = value if self._step_loss is None else self._step_loss + value
        if not self._skips_on_device and not math.isfinite(value):
            self._stop_at_nan("loss", "")
        return loss

    def floating_point_ops(self, inputs: Any) -> int:
        """Return transformers' estimate; for a shape that came before, without counting all parameters again."""
        shapes = tuple((name, value.shape) for name, value in inputs.items() if isinstance(value, torch.Tensor))
        if shapes not in self._flops:
            self._flops = {**self._flops, shapes: super().floating_point_ops(inputs)}
        return self._flops[shapes]

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Run transformers' prediction step on a packed batch."""
        with self._fast(training=False):
            return super().prediction_step(model, inputs, *args, **options)

    def evaluation_loop(self, *args: Any, **options: Any) -> Any:
        """Run transformers' evaluation loop; during training, write its result to the event log."""
        started = time.perf_counter()
        output = super().evaluation_loop(*args, **options)
        if self._run_log is not None and self.is_in_train:
            prefix = options.get("metric_key_prefix", "eval")
            self._run_log.evaluated(self, prefix, output, time.perf_counter() - started)
        return output

    # ---- Order ----

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return transformers' sampler; the order depends on the seed of the arguments and the epoch only."""
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.accelerator.dataloader_config.data_seed = seed  # of accelerate's SeedableRandomSampler
        sampler = super()._get_train_sampler(train_dataset)
        if type(sampler) is LengthGroupedSampler:
            return EpochLengthSampler(sampler.batch_size, sampler.lengths, seed)
        return sampler

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Return a sequential sampler: predictions come in the order of the input, also with group_by_length."""
        if eval_dataset is None or not has_length(eval_dataset) or self.args.world_size > 1:
            return None
        return SequentialSampler(eval_dataset)

    # ---- NaN ----

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Return the gradient norm; one that is NaN or infinite raises a NumericsError before the update.

        On a GPU, a fused optimizer or the scaler of fp16 skips the update by itself, and `read_back` raises the error.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        if self._skips_on_device and isinstance(norm, torch.Tensor):
            if self._scaler is not None:
                return norm
            found = [norm, self._step_loss] if isinstance(self._step_loss, torch.Tensor) else [norm]
            finite = torch.stack([torch.isfinite(number).reshape(()) for number in found]).all()
            self._plain_optimizer().found_inf = (~finite).float()
            return norm
        if norm is None or self._may_overflow():
            return norm
        if not abs(float(norm)) < float("inf"):
            named = ((n, p.grad) for n, p in self.model.named_parameters() if p.grad is not None)
            name = next((n for n, g in named if not bool(torch.isfinite(g).all())), "")
            self._stop_at_nan("gradient", name)
        return norm

    def _stop_at_nan(self, what: str, name: str, step: int | None = None, rows: list[int] | None = None) -> None:
        """Raise a NumericsError that names the step and its rows. The weights are those before the step."""
        step = self.state.global_step + 1 if step is None else step
        batches = self._batches_read, self.current_gradient_accumulation_steps
        rows = self._rows_of_batches(*batches) if rows is None else rows
        if self._run_log is not None:
            self._run_log.write(NonFinite(step, what, name, tuple(rows)))
        self._end_log("NumericsError")
        where = Path(self.args.output_dir)
        last = max(RunDir(where).checkpoints(), default=None, key=checkpoint_step)
        shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
        place = f"training rows {shown}" if rows else f"batch {self._batches_read} of epoch {self._epoch}"
        raise NumericsError(
            f"step {step}: {what}{name and ' of '}{name} is NaN or infinite ({place}); the update was skipped"
            + (f"; last good checkpoint: {last.name}" if last is not None else ""),
            where=str(where),
            fix="Lower learning_rate, use bf16 instead of fp16, or check these rows.",
        )

    def _rows_of_batches(self, end: int, count: int) -> list[int]:
        """Return the rows of the last `count` batches before batch `end` of the epoch; empty if the order is the user's."""
        batches: Any = getattr(self.callback_handler.train_dataloader, "batch_sampler", None)
        sampler: Any = getattr(getattr(batches, "batch_sampler", batches), "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self._epoch)
        elif not isinstance(sampler, SequentialSampler) or isinstance(sampler, RandomSampler):
            return []
        return [int(row) for batch in itertools.islice(batches, max(end - max(count, 1), 0), end) for row in batch]

    # ---- Checkpoints ----

    def _make_identity(self) -> Identity:
        return trainer_identity(self, self._training_rows(), model_mark(self.model), self._run_id)

    def _training_rows(self) -> Any:
        """Return the training set as the loader reads it."""
        dataset = self.train_dataset
        return self._remove_unused_columns(dataset, "training") if is_arrow_dataset(dataset) else dataset

    def _compare(self, folder: Path) -> None:
        """Refuse a resume with changed data, model, tokenizer or arguments; report everything else."""
        if read_manifest(folder).get("kind") == "weights":
            raise missing_file(folder, OPTIMIZER)
        if read_manifest(folder).get("kind") != "trainer checkpoint":
            raise CheckpointError(
                "was written by another version of tunesmith's Trainer or by `tunesmith train`",
                where=str(folder),
                fix="Load its weights with from_pretrained and start a new run.",
            )
        self._identity = self._make_identity()
        changed, reported = differences(folder, self._identity)
        if changed and not self.allow_changed_data:
            raise CheckpointError(
                f"this run was started differently: {'; '.join(changed)}", where=str(folder), fix=CHANGED
            )
        self._notes = (*(f"resumes although {text}" for text in changed), *reported)
        for text in self._notes:
            log.warning("Not an exact resume: %s", text)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Publish `checkpoint-<step>` as a verified folder, then remove older ones beyond `save_total_limit`."""
        if self._is_sharded:
            super()._save_checkpoint(model, trial)
            return
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        started, args, state = time.perf_counter(), self.args, self.state
        run = RunDir(self._get_output_dir(trial=trial))
        folder = run.checkpoint(state.global_step)
        best = run.checkpoint(state.best_global_step) if state.best_global_step else None
        if best is not None and (best == folder or best.is_dir()):
            state.best_model_checkpoint = str(best)
        if args.should_save:
            if self._run_log is not None:
                self._run_log.sync()
            (folder / "checkpoint-is-incomplete.txt").unlink(missing_ok=True)  # of transformers' JIT checkpoints
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
            self._identity = self._identity or self._make_identity()
            kind = "weights" if args.save_only_model else "trainer checkpoint"
            publish_folder(
                folder, self._fill_checkpoint, {"kind": kind, "step": state.global_step, **self._identity.to_json()}
            )
        else:
            self._fill_checkpoint(folder)
        self.accelerator.wait_for_everyone()
        if self._run_log is not None:
            self._run_log.write(Saved(state.global_step, folder.name, time.perf_counter() - started))
        if args.push_to_hub:
            self._push_from_checkpoint(str(folder))
        if args.should_save and args.save_total_limit is not None and args.save_total_limit > 0:
            kept = None if state.best_model_checkpoint is None else Path(state.best_model_checkpoint)
            rotate(
                run,
                self._identity.run_id if self._identity else "",
                keep=args.save_total_limit,
                last=state.global_step,
                best=kept,
            )

    def _fill_checkpoint(self, folder: Path) -> None:
        """Write the files of a checkpoint; processes that don't save only take part in the exchange of their states."""
        if self.args.should_save:
            require_finite(self.model.state_dict(), self.state.global_step)
        self.save_model(str(folder), _internal_call=True)
        if self.args.should_save and not holds_names(folder, self.model):
            write_files(folder, weight_files(self.model, self.model.state_dict()))
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(folder))
            self._save_scaler(str(folder))
            self._save_rng_state(str(folder))
        if self.args.should_save:
            logged = {"loss_since_log": float(self._tr_loss), "logged_step": self._globalstep_last_logged}
            place = {"epoch": self._epoch, "batches": self._batches_read, "epoch_open": self._epoch_open}
            place["batch_rows"] = self._batch_rows
            _write_json(folder / PROGRESS, {**logged, **place})
            self._export_callback_states()
            self.state.save_to_json(str(folder / TRAINER_STATE))

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save weights, configuration and tokenizer as transformers does; the arguments as JSON instead of a pickle."""
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            folder = Path(self.args.output_dir if output_dir is None else output_dir)
            (folder / "training_args.bin").unlink(missing_ok=True)
            write_file(folder / TRAINING_ARGS, self.args.to_json_string().encode())

    def _export_callback_states(self) -> None:
        found: dict[str, list[Any]] = {}
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                found.setdefault(type(callback).__name__, []).append(callback.state())
        self.state.stateful_callbacks = {name: states if states[1:] else states[0] for name, states in found.items()}

    def _load_callback_state(self) -> None:
        """Restore callbacks as transformers does, or at least their counters: patience continues where it was."""
        super()._load_callback_state()
        if self.args.restore_callback_states_from_checkpoint:
            return
        for name, stored in self.state.stateful_callbacks.items():
            mine = [c for c in self.callback_handler.callbacks if type(c).__name__ == name]
            for callback, data in zip(mine, stored if isinstance(stored, list) else [stored], strict=False):
                vars(callback).update(data.get("attributes", {}))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the states of optimizer and scheduler as safetensors and JSON."""
        if self._is_sharded:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            tensors, plain = pack_optimizer(self._plain_optimizer())
            write_files(Path(output_dir), {OPTIMIZER: contiguous(tensors)})
            _write_json(Path(output_dir) / OPTIMIZER_STATE, plain)
            _write_json(Path(output_dir) / SCHEDULER, to_plain(self.lr_scheduler.state_dict(), "scheduler"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Restore optimizer and scheduler; a missing file raises a CheckpointError."""
        if checkpoint is None or self._is_sharded:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder = Path(checkpoint)
        plain = _read_json(folder, OPTIMIZER_STATE)
        if not (folder / OPTIMIZER).is_file():
            raise missing_file(folder, OPTIMIZER)
        unpack_optimizer(self._plain_optimizer(), load_file(folder / OPTIMIZER), plain, checkpoint)
        self.lr_scheduler.load_state_dict(from_plain(_read_json(folder, SCHEDULER)))

    def _plain_optimizer(self) -> Any:
        """Return the optimizer without accelerate's wrapper."""
        return self.optimizer.optimizer if isinstance(self.optimizer, AcceleratedOptimizer) else self.optimizer

    def _save_scaler(self, output_dir: str) -> None:
        """Write the state of the gradient scaler as JSON."""
        scaler = getattr(self.accelerator, "scaler", None)
        if self._is_sharded:
            super()._save_scaler(output_dir)
        elif scaler is not None and self.args.should_save:
            _write_json(Path(output_dir) / SCALER, to_plain(scaler.state_dict(), "scaler"))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Restore the gradient scaler."""
        if checkpoint is None or self._is_sharded:
            super()._load_scaler(checkpoint)
        elif getattr(self.accelerator, "scaler", None) is not None and (Path(checkpoint) / SCALER).is_file():
            self.accelerator.scaler.load_state_dict(from_plain(_read_json(Path(checkpoint), SCALER)))

    def _save_rng_state(self, output_dir: str) -> None:
        """Write the generators of all processes, as they are and as they were at the start of the epoch."""
        if self._is_sharded:
            super()._save_rng_state(output_dir)
            return
        now = generator_states(self.args.device)
        ranks = gather_object([{"now": now, "epoch": self._epoch_generators or now}])
        if self.args.should_save:
            tensors: dict[str, torch.Tensor] = {}
            plain = to_plain(ranks, "generators", tensors)
            write_files(Path(output_dir), {GENERATORS: contiguous(tensors)})
            _write_json(Path(output_dir) / GENERATOR_STATE, plain)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restore the generators, after the first batch of the resumed epoch was read."""
        if checkpoint is None or self._is_sharded:
            super()._load_rng_state(checkpoint)
        else:
            self._restore_generators(Path(checkpoint), "now")

    def _restore_generators(self, folder: Path, moment: str) -> None:
        plain = _read_json(folder, GENERATOR_STATE)
        ranks, rank = from_plain(plain, load_file(folder / GENERATORS).__getitem__), self.args.process_index
        if rank < len(ranks):
            restore_generators(ranks[rank][moment], self.args.device)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load the weights of a checkpoint; names and shapes must be the model's own."""
        folder = Path(resume_from_checkpoint)
        if self._is_sharded or not (folder / MANIFEST).is_file():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            if self.is_in_train and self._identity is None:
                self._compare(folder)
            load_weights(self.model if model is None else model, folder)

    def _load_best_model(self) -> None:
        """Load the weights of the best checkpoint, after their verification."""
        folder = Path(self.state.best_model_checkpoint)
        if self._is_sharded or not (folder / MANIFEST).is_file():
            super()._load_best_model()
            return
        try:
            verify(folder)
        except CheckpointError as error:
            verify(folder, names=set(filter(is_weights, read_manifest(folder)["files"])))
            log.warning("The weights of the best checkpoint are valid and used, but: %s", error.line())
        load_weights(self.model, folder)


def _speedup_line(on: Iterable[str], off: Mapping[str, str | None]) -> str:
    reasons = [
        f"{name[0].upper()}{name[1:]} {'are' if name.endswith('s') else 'is'} off because {reason}."
        for name, reason in off.items()
    ]
    return " ".join([f"Speedups: {', '.join(on) or 'none'}.", *reasons])


def _read_numbers(values: list[Any]) -> list[float | None]:
    """Return numbers and tensors as floats; all tensors on one device are read with one wait for it."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    read = iter(
        torch.stack([t.detach().reshape(()).to(tensors[0].device) for t in tensors]).tolist() if tensors else ()
    )
    return [next(read) if isinstance(v, torch.Tensor) else None if v is None else float(v) for v in values]


def _write_json(file: Path, value: Any) -> None:
    write_file(file, json.dumps(value, allow_nan=False).encode())


def _read_json(folder: Path, name: str) -> Any:
    if not (folder / name).is_file():
        raise missing_file(folder, name)
    return json.loads((folder / name).read_bytes())


def _join_shards(folder: Path) -> None:
    """Write weights that were split into shards later as one file again, so that they are verified."""
    index, whole = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file() and not whole.exists():
        names = {Path(name).name for name in json.loads(index.read_bytes())["weight_map"].values()}
        tensors = {key: value for name in names for key, value in load_file(folder / name).items()}
        write_file(whole, save(tensors, metadata={"format": "pt"}))


def _require_no_model(folder: Path) -> None:
    """Refuse an output folder with a model that no training run wrote, before `save_model` would overwrite it."""
    models = [
        n for n in ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors") if (folder / n).exists()
    ]
    written = ("journal.jsonl", TRAINING_ARGS, "training_args.bin", TRAINER_STATE)
    if models and not any((folder / name).exists() for name in written):
        raise ResourceError(
            f"contains {models[0]}, which was not written by a training run",
            where=str(folder),
            fix="Choose another output_dir; save_model() would overwrite it.",
        )


CLASSIFIERS = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")


def _require_labels(trainer: Trainer) -> None:
    """Raise a DataError for an Arrow dataset with a label that the model has no class for."""
    dataset, config = trainer.train_dataset, getattr(trainer.model, "config", None)
    classes = int(getattr(config, "num_labels", 0) or 0)
    own = type(trainer).compute_loss is not Trainer.compute_loss or trainer.compute_loss_func is not None
    single = getattr(config, "problem_type", None) in (None, "single_label_classification")
    if own or not single or classes < 2 or not type(trainer.model).__name__.endswith(CLASSIFIERS):
        return
    if not is_arrow_dataset(dataset) or dataset.format["type"] == "custom":
        return
    name = next((n for n in ("labels", "label", "label_ids") if n in dataset.column_names), None)
    if name is None or not str(dataset.data.table.schema.field(name).type).startswith(("int", "uint")):
        return
    labels = np.asarray(dataset.with_format("numpy")[name][:])
    wrong = np.flatnonzero(((labels < 0) | (labels >= classes)) & (labels != -100))
    if len(wrong):
        raise DataError(
            f"the label is {labels[wrong[0]]}, but the model has {classes} classes (0 to {classes - 1}); "
            f"{len(wrong)} such label{'s' if len(wrong) > 1 else ''}",
            where=f"train_dataset, row {wrong[0]}, {name}",
            fix="Correct the label, or create the model with num_labels for all of them.",
        )
