"""Whole optimizer steps on a GPU as one CUDA graph, for a classifier of transformers with its own loss and AdamW.

The engine of `tunesmith train` computes the step, and `run_epoch` does the rest of transformers' `_run_epoch`. Dataset, sampler,
loader and collator may be the user's: their padded batches are packed on the host. Without any of these, rows come straight from
Arrow, which is faster.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from accelerate import skip_first_batches
from torch import nn
from torch.optim import AdamW
from transformers import DataCollatorWithPadding, TrainerCallback
from transformers.trainer import GreedyLR
from transformers.trainer_utils import has_length

from tunesmith.data.batches import (
    TOKEN_COLUMNS,
    Batch,
    Padding,
    TokenRows,
    Window,
    make_batch,
    pin_batch,
    prefetched,
    tensors_of,
)
from tunesmith.events import StepDone
from tunesmith.speedups.apply import Speedups, apply_speedups
from tunesmith.speedups.model_graphs import most_positions
from tunesmith.speedups.packed_calls import own_forward, right_padded_lengths
from tunesmith.speedups.packing import collated
from tunesmith.trainer.identity import is_arrow_dataset
from tunesmith.trainer.run_log import WaitingStep
from tunesmith.training.distributed import Precision, Runtime, has_triton
from tunesmith.training.optimizer import fuse_update
from tunesmith.training.state import TrainState
from tunesmith.training.step import StepResult, train_step

STEP_METHODS = """
    training_step compute_loss compute_loss_context_manager autocast_smart_context_manager get_batch_samples
    _get_num_items_in_batch _prepare_inputs _prepare_input floating_point_ops _track_num_input_tokens _clip_grad_norm
    _get_grad_norm _run_epoch
""".split()  # noqa: SIM905
LOADER_METHODS = ("get_train_dataloader", "_get_dataloader")
STEP_EVENTS = ("on_substep_end", "on_pre_optimizer_step", "on_optimizer_step")


def why_not_whole(trainer: Any, kind: type) -> str | None:
    """Return the reason why a step of this Trainer is not run as a whole; `kind` is the class without the user's overrides."""
    args = trainer.args
    own = overridden(trainer, kind, STEP_METHODS)
    if own:
        return f"{own[0]} is overridden"
    if not type(trainer.model).__name__.endswith("ForSequenceClassification") or not hasattr(trainer.model, "config"):
        return f"{type(trainer.model).__name__} is not a sequence classifier of transformers"
    if not has_length(trainer.train_dataset):
        return "the dataset has no length"
    passed = trainer.optimizer
    if args.optim not in ("adamw_torch", "adamw_torch_fused") or (passed is not None and type(passed) is not AdamW):
        return "the optimizer is not torch's AdamW"
    if trainer.compute_loss_func is not None:
        return "compute_loss_func is set"
    if trainer.label_smoother is not None and args.gradient_accumulation_steps > 1:
        return "label smoothing counts the labels of all batches of a step"
    if args.world_size > 1 or args.include_num_input_tokens_seen != "no":
        return "there are several processes, or tokens are counted"
    for callback, event in itertools.product(trainer.callback_handler.callbacks, STEP_EVENTS):
        if getattr(type(callback), event, None) is not getattr(TrainerCallback, event):
            return f"{type(callback).__name__} takes part in the step"
    return None


def overridden(trainer: Any, kind: type, names: Iterable[str]) -> list[str]:
    """Return the methods that the user's class or the trainer itself replaces."""
    return [n for n in names if n in vars(trainer) or getattr(type(trainer), n) is not getattr(kind, n)]


class ModelLoss:
    """The model's own loss or transformers' label smoothing, scaled as `Trainer.training_step` does."""

    def __init__(self, trainer: Any) -> None:
        self._trainer, self.batches = trainer, 1

    def sum(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the share of a micro-batch in the step's loss."""
        smoother = self._trainer.label_smoother
        if batch.labels is None:
            raise ValueError("The model did not return a loss: the batch contains no labels.")
        if smoother is None:
            loss = model(**batch.inputs, labels=batch.labels).loss
        else:
            loss = smoother(model(**batch.inputs), batch.labels)
        return (loss if self._trainer.model_accepts_loss_kwargs else loss / self.batches), None

    def weight(self, labels: Any, rows: int) -> float:
        """Return 1: the shares are scaled already."""
        return 1.0


class CapturedSteps:
    """The engine's state around the model and optimizer of a Trainer."""

    def __init__(self, trainer: Any, rows: TokenRows | None, padding: Padding) -> None:
        self._trainer, self._rows = trainer, rows
        """Rows in Arrow, or None if the user's loader collates them."""
        args = trainer.args
        half = trainer.accelerator.native_amp and trainer.accelerator.mixed_precision == "bf16"
        precision: Precision = "bf16" if half else "no"
        self.runtime = Runtime(trainer.accelerator, args.device, precision, 0, 1)
        self.speedups: Speedups = apply_speedups(
            trainer.model,
            None,
            padding,
            device=args.device,
            precision=precision,
            restrict_vocabulary="off",
            longest=most_positions(trainer.model.config) if rows is None else int(rows.lengths.max(initial=0)),
        )
        self._state: TrainState | None = None
        self._switch(on=False)

    @classmethod
    def make(cls, trainer: Any, kind: type, dataset: Any) -> CapturedSteps | str:
        """Return whole steps, or the reason why there are none."""
        if not has_triton():
            return "Triton is not installed"
        if trainer.accelerator.mixed_precision == "fp16" and trainer.accelerator.native_amp:
            return "accelerate scales the loss"
        reason = why_not_whole(trainer, kind)
        if reason is not None:
            return reason
        padding, rows = collator_padding(trainer.data_collator), token_rows_of(dataset)
        workers = trainer.args.dataloader_num_workers or overridden(trainer, kind, LOADER_METHODS)
        if padding is None or rows is None or workers or not holds_token_rows(dataset, rows):
            padding, rows = Padding(trainer.model.config.pad_token_id or 0), None
        made = cls(trainer, rows, padding)
        if made.speedups.graphs is None and trainer.args.device.type == "cuda":
            made.close()
            off = "cuda_graphs is off: "
            return next(note.removeprefix(off) for note in made.speedups.notes if note.startswith(off))
        return made

    def begin(self, optimizer: Any) -> bool:
        """Take over the optimizer, after transformers or the user made it; return False if it is not torch's AdamW."""
        trainer, device = self._trainer, self.runtime.device
        if type(optimizer) is not AdamW or (device.type == "cuda" and not fuse_update(optimizer)):
            return False
        self._loss = ModelLoss(trainer)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        if device.type == "cuda":
            for group in optimizer.param_groups:
                group["capturable"] = True
            # a CUDA graph reads the learning rates here; the scheduler keeps numbers
            self._rates = [torch.full((), float(rate), device=device) for rate in self._rates]
        trainer.optimizer._opt_called = True  # the scheduler would warn that no step was taken
        self._state = TrainState(
            trainer.model,
            optimizer,
            self._loss,
            self.runtime,
            speedups=self.speedups,
            only_writer=self._is_only_writer(),
        )
        self._state.step = trainer.state.global_step
        self._state.planned_steps = trainer.state.max_steps
        return device.type != "cuda" or self._state.kernel is not None

    def _is_only_writer(self) -> bool:
        around = (self._trainer, *self._trainer.callback_handler.callbacks)
        return all(type(part).__module__.startswith(("tunesmith.", "transformers.")) for part in around)

    def close(self) -> None:
        """Leave the model as it was."""
        self.speedups.close()

    def _switch(self, *, on: bool) -> None:
        """Switch the speedups of the model; batches keep their shape."""
        for name, part in self.speedups.parts.items():
            if name != "length_buckets":
                part.enable() if on else part.disable()

    @contextlib.contextmanager
    def _plain(self, needed: bool = True) -> Iterator[None]:
        """Make the model plain inside this block, for callbacks, evaluations and checkpoints."""
        if needed:
            self._switch(on=False)
        yield
        if needed:
            self._switch(on=True)

    def _arrow_windows(self, loader: Any, skipped: int) -> Iterator[Window]:
        """Yield the batches of each step in the order of the loader's sampler, made ahead of time on a GPU."""
        batches = itertools.islice(iter(loader.batch_sampler), skipped, None)
        steps = iter(lambda: list(itertools.islice(batches, self._size)), [])

        def made(rows: list[list[int]]) -> Window:
            assert self._rows is not None
            collate = self.speedups.train_collate
            return self._window([make_batch(self._rows, np.asarray(r, dtype=np.int64), collate) for r in rows])

        yield from prefetched(steps, made) if self.runtime.device.type == "cuda" else map(made, steps)

    def _loader_windows(self, batches: Iterator[Any]) -> Iterator[Window]:
        """Yield the batches of each step as the user's loader collates them; the model is plain meanwhile."""
        while True:
            with self._plain():
                step = list(itertools.islice(batches, self._size))
            if not step:
                return
            yield self._window([self._packed(inputs) for inputs in step])

    def _packed(self, inputs: Any) -> Batch:
        """Return a packed batch; one that is not rows of tokens stays as it is, and its step is not captured."""
        whole = is_token_rows(inputs)
        named = inputs if whole else self._trainer._prepare_inputs(inputs)
        tokens = {name: value for name, value in named.items() if name != "labels"}
        rows = np.arange(len(next(iter(tokens.values()))))
        batch = Batch(tokens, named.get("labels"), rows, 0, 0)
        return collated(batch, self.speedups.train_collate) if whole else batch

    def _window(self, batches: list[Batch]) -> Window:
        movable = self.runtime.device.type == "cuda" and all(
            t.device.type == "cpu" for b in batches for t in tensors_of(b)
        )
        pinned = [pin_batch(batch) for batch in batches] if movable else batches
        return Window(tuple(pinned), np.concatenate([batch.rows for batch in batches]), None)

    @property
    def _size(self) -> int:
        return int(self._trainer.args.gradient_accumulation_steps)

    def run_epoch(self, model: nn.Module, loader: Any, options: dict[str, Any]) -> bool:
        """Run an epoch as transformers' `_run_epoch` does. Numbers stay on the device until something needs them.

        Return False, and leave all to transformers, if the first batch of the loader is not rows of tokens.
        """
        t, skipped = self._trainer, self._trainer._batches_read
        if hasattr(loader, "set_epoch"):
            loader.set_epoch(options["epoch"])
        if self._rows is not None:
            self._run_steps(model, self._arrow_windows(loader, skipped), options)
            return True
        with collated_on_host(loader):
            batches = iter(skip_first_batches(loader, skipped) if skipped else loader)
            first = list(itertools.islice(batches, self._size))
            if not all(map(is_token_rows, first)):
                return False
            if skipped:
                t._load_rng_state(options["resume_from_checkpoint"])
            self._run_steps(model, self._loader_windows(itertools.chain(first, batches)), options)
        return True

    def _run_steps(self, model: nn.Module, windows: Iterator[Window], options: dict[str, Any]) -> None:
        self._switch(on=True)
        try:
            self._run_windows(model, windows, options)
        finally:
            self._switch(on=False)

    def _run_windows(self, model: nn.Module, windows: Iterator[Window], options: dict[str, Any]) -> None:
        t, epoch, per_epoch = self._trainer, options["epoch"], options["steps_in_epoch"]
        skipped = t._batches_read
        rest = {n: options[n] for n in ("trial", "epoch", "ignore_keys_for_eval", "start_time")}
        norm, rate, done = None, None, skipped
        own_callbacks = not self._is_only_writer()
        limit = options["num_update_steps_per_epoch"] - skipped // self._size
        for window in itertools.islice(windows, limit):
            with self._plain(own_callbacks):
                t.control = t.callback_handler.on_step_begin(t.args, t.state, t.control)
            result, rate = self._step(model, window)
            done += len(window.micro_batches)
            norm, t._batches_read = result.grad_norm, done
            batches, size = window.micro_batches, len(window.rows)
            tokens = sum(b.tokens for b in batches), sum(b.padded_tokens for b in batches)
            event = StepDone(result.step, epoch + done / per_epoch, None, None, rate, size, *tokens)
            rows = functools.partial(t._rows_of_batches, done, len(batches))
            t.note_step(WaitingStep(result.loss, norm, event, rows))
            if not isinstance(t.lr_scheduler, (torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR)):
                t.lr_scheduler.step()
            t.state.global_step += 1
            t.state.epoch = epoch + done / per_epoch
            with self._plain(own_callbacks):
                t.control = t.callback_handler.on_step_end(t.args, t.state, t.control)
            c = t.control
            if c.should_log or c.should_evaluate or c.should_save:
                with self._plain():
                    t.read_back()
                    t._maybe_log_save_evaluate(t._tr_loss, norm, model, **rest, learning_rate=rate)
            t._epoch_open, t._noted_step = True, t.state.global_step
            if t.control.should_epoch_stop or t.control.should_training_stop:
                break
        with self._plain():
            t.read_back()
            if done == 0:
                t.control.should_training_stop = True
            t.control = t.callback_handler.on_epoch_end(t.args, t.state, t.control)
            t._maybe_log_save_evaluate(t._tr_loss, norm, model, **rest, learning_rate=rate)

    def _step(self, model: nn.Module, window: Window) -> tuple[StepResult, float]:
        t, state = self._trainer, self._state
        assert state is not None
        self._loss.batches = t.current_gradient_accumulation_steps = len(window.micro_batches)
        rate, groups = float(t._get_learning_rate()), state.optimizer.param_groups
        numbers = [group["lr"] for group in groups]
        for group, place, number in zip(groups, self._rates, numbers, strict=True):
            group["lr"] = group["lr_scale"] = place.fill_(number) if isinstance(place, torch.Tensor) else number
        host = torch.get_rng_state()  # the step seeds it; collators and callbacks draw what they would without us
        with own_forward(t.model):
            result = train_step(state, window, learning_rate=1.0, max_grad_norm=t.args.max_grad_norm, seed=t.args.seed)
        for group, number in zip(groups, numbers, strict=True):
            group["lr"] = number
            del group["lr_scale"]
        torch.set_rng_state(host)
        while state.notes:
            t.report(state.notes.pop(0))
        t._tr_loss += result.loss
        t.current_flos += sum(float(t.floating_point_ops(b.inputs)) for b in window.micro_batches)
        return result, rate


@contextlib.contextmanager
def collated_on_host(loader: Any) -> Iterator[None]:
    """Let a loader of accelerate leave its batches on the host, where they are packed."""
    device = vars(loader).get("device")
    if device is not None:
        loader.device = None
    try:
        yield
    finally:
        if device is not None:
            loader.device = device


def is_token_rows(inputs: Any) -> bool:
    """Return whether a collated batch is token ids on the host, padded on the right, with one label or list per row."""
    if not isinstance(inputs, Mapping) or not {"input_ids", "attention_mask", "labels"} <= set(inputs):
        return False
    tokens = [value for name, value in inputs.items() if name in (*TOKEN_COLUMNS, "attention_mask")]
    if len(tokens) != len(inputs) - 1 or not all(isinstance(t, torch.Tensor) for t in (*tokens, inputs["labels"])):
        return False
    if any(t.device.type != "cpu" or t.ndim != 2 or t.shape != tokens[0].shape for t in tokens):
        return False
    labels = inputs["labels"]
    per_row = labels.ndim == 1 or (labels.ndim == 2 and labels.is_floating_point())
    return per_row and len(labels) == len(tokens[0]) and right_padded_lengths(inputs["attention_mask"]) is not None


def token_rows_of(dataset: Any) -> TokenRows | None:
    """Return the tokens of an Arrow dataset without a copy; None if its rows are not plainly what is stored."""
    if not is_arrow_dataset(dataset) or getattr(dataset, "_indices", None) is not None:
        return None
    kind = getattr(dataset, "format", {}).get("type")
    if kind not in (None, "torch", "numpy") or "input_ids" not in dataset.column_names:
        return None
    table = dataset.data.table
    names = ["labels" if n == "label" and "labels" not in table.column_names else n for n in table.column_names]
    try:
        return TokenRows.from_arrow(table.rename_columns(names))
    except (AttributeError, TypeError, ValueError, NotImplementedError):
        return None


def holds_token_rows(dataset: Any, rows: TokenRows) -> bool:
    """Return whether tokens, a mask of ones and labels are all that a collated batch contains."""
    if rows.labels is None or not len(rows):
        return False
    known = {*TOKEN_COLUMNS, "attention_mask", "label", "labels"}
    shown = getattr(dataset, "format", {}).get("columns") or dataset.column_names
    if not {"input_ids", "attention_mask", *rows.columns} <= set(shown) <= known:
        return False
    label = dataset.data.table.column("labels" if "labels" in dataset.column_names else "label")
    if "string" in str(label.type):
        return False
    masks = dataset.data.table.column("attention_mask")
    ones = all(bool(np.all(chunk.values.to_numpy(zero_copy_only=False) == 1)) for chunk in masks.chunks)
    return ones and int(sum(len(c.values) for c in masks.chunks)) == int(rows.lengths.sum())


def collator_padding(collator: Any) -> Padding | None:
    """Return our padding if it does what this collator does."""
    if type(collator) is not DataCollatorWithPadding or collator.padding not in (True, "longest"):
        return None
    tokenizer = collator.tokenizer
    if collator.return_tensors != "pt" or "attention_mask" not in tokenizer.model_input_names:
        return None
    return Padding(
        pad_token_id=tokenizer.pad_token_id,
        pad_token_type_id=getattr(tokenizer, "pad_token_type_id", 0),
        side=tokenizer.padding_side,
        multiple_of=collator.pad_to_multiple_of,
    )
