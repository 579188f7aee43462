"""The loss as a user may define it (model, `compute_loss_func`, `compute_loss`, `training_step`), handed to the engine."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tunesmith.data.batches import Batch, Window
from tunesmith.errors import ConfigError
from tunesmith.models.families import inner_model
from tunesmith.trainer.arguments import trainer_log
from tunesmith.trainer.windows import as_batch, count_rows, features_of
from tunesmith.training.state import TrainState
from tunesmith.training.step import micro_step

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

COUNT = "num_items_in_batch"
CONTEXTS = ("compute_loss_context_manager", "autocast_smart_context_manager")


def uses_count(function: Callable[..., Any]) -> bool:
    """Whether a loss function reads `num_items_in_batch`, by its bytecode. If not, its result is a mean over its own batch.

    transformers takes such a mean for a share of the whole window, so that accumulating 4 batches makes the loss 4 times
    as large; here it is weighted by its items.
    """
    while hasattr(function, "func"):
        function = function.func
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return True if code is None else _reads_count(code)


@functools.cache
def _reads_count(code: CodeType) -> bool:
    loaded: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_CLOSURE")):
            values = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
            loaded |= {str(value) for value in values}
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return COUNT in loaded
    named = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    return COUNT in loaded or code.co_varnames[named] in loaded


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with this keyword."""
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def count_items(features: Any, *, shifted: bool) -> torch.Tensor | None:
    """Labels that count (not -100) in a batch, or None where there are no labels to count."""
    labels = features.get("labels") if isinstance(features, Mapping) else None
    if not isinstance(labels, torch.Tensor):
        return None
    return (labels[..., 1:] if shifted else labels).ne(-100).sum()


class WindowLoss:
    """The engine's objective over collated batches, for one Trainer: each micro-batch's share of the window's loss, what it is
    divided by in the step under way, and what is counted beside it.

    Methods that a subclass may replace are called on the Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.shifts_labels = False
        """Whether the loss compares each position with the label of the next one."""
        self.items: torch.Tensor | None = None
        self.rows, self.factor = 1, cast(Any, 1.0)
        self.counted: tuple[Any, int] | None = None
        """A model and the number of its parameters: counting takes longer than launching a step."""
        self._items_place: torch.Tensor | None = None
        self._said: set[str] = set()

    @contextlib.contextmanager
    def in_context(self) -> Iterator[None]:
        """Inside, a forward pass has the precision of the run, whatever context manager of a user is around it."""
        trainer = self._trainer
        with trainer.compute_loss_context_manager(), trainer.runtime.autocast():
            yield

    def passes_count(self) -> bool:
        """Whether `compute_loss` is passed the number of items, as transformers decides it."""
        trainer = self._trainer
        takes = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        return bool(takes or not trainer.overrides("compute_loss"))

    def begin_window(self, window: Window, engine: TrainState) -> None:
        """Counts what the losses of this step are divided by, over all ranks."""
        trainer = self._trainer
        counts = [count_items(features_of(b), shifted=self.shifts_labels) for b in window.micro_batches]
        known = [c for c in counts if c is not None]
        trainer.current_gradient_accumulation_steps = len(window.micro_batches)
        self.rows = len(window.rows)
        self.items = None
        if len(known) == len(counts):
            mine = 0 if window.idle else sum(int(c) for c in known)
            if engine.graphs is not None:  # a captured step reads it where it was
                if self._items_place is None:
                    self._items_place = torch.zeros((), dtype=torch.long, device=trainer.args.device)
                self.items = self._items_place.fill_(mine)
            else:
                self.items = trainer.runtime.sum_over_ranks(torch.full((), mine, device=trainer.args.device))

    def run_micro_batch(self, batch: Batch, factor: Any) -> torch.Tensor:
        """The engine's micro-step: the user's or our `training_step`."""
        trainer = self._trainer
        features = features_of(batch)
        self.factor = factor
        passed = self.items if self.passes_count() else None
        loss: torch.Tensor = trainer.training_step(trainer.model_wrapped, features, passed)
        if trainer._engine is None or trainer._engine.graphs is None:
            trainer.current_flos += float(trainer.floating_point_ops(features))
        trainer._track_num_input_tokens(features)
        return loss.detach().to(trainer.args.device)

    def sum(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This micro-batch's share; logits are not kept."""
        return self.share(model, features_of(batch)), None

    def weight(self, labels: npt.NDArray[Any] | None, rows: int) -> float:
        """1: the shares are divided already."""
        return 1.0

    def share(self, model: nn.Module, features: Any) -> torch.Tensor:
        """A micro-batch's share of the window's loss, whatever kind of loss `compute_loss` returns."""
        trainer = self._trainer
        inputs = trainer._prepare_inputs(features)
        items = count_items(inputs, shifted=self.shifts_labels)
        passed = self.items if self.passes_count() else None
        options: dict[str, Any] = {COUNT: passed} if accepts(trainer.compute_loss, COUNT) else {}
        own = trainer.overrides(*CONTEXTS)  # the engine has set the precision already
        with self.in_context() if own else contextlib.nullcontext():
            loss: torch.Tensor = trainer.compute_loss(model, inputs, **options)
        loss = loss.mean() if loss.ndim else loss
        shared = trainer.loss_is_scaled_for_ga
        if shared is None:
            ours = not trainer.overrides("compute_loss")
            shared = passed is not None and items is not None and (ours or uses_count(trainer.compute_loss))
        if shared:
            return loss
        if items is None or self.items is None:
            return loss * (count_rows(inputs) / max(self.rows, 1))
        return loss * (items / self.items)

    def warn_once(self, text: str) -> None:
        """A warning that is not repeated for every batch."""
        if text not in self._said:
            self._said.add(text)
            trainer_log.warning(text)


def compute_loss(
    trainer: Trainer, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """The mean loss of the batch; with `num_items_in_batch`, its share of the mean over that many items."""
    items = count_items(inputs, shifted=trainer._loss.shifts_labels)
    labels = None
    if (trainer.label_smoother is not None or trainer.compute_loss_func is not None) and "labels" in inputs:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
    inner = inner_model(trainer.model)
    in_forward = COUNT in inspect.signature(getattr(inner, "forward", model.forward)).parameters
    if in_forward and num_items_in_batch is not None and labels is None:
        inputs = {**inputs, COUNT: num_items_in_batch}
        items = None
    outputs = model(**inputs)
    if trainer.compute_loss_func is not None:
        loss = trainer.compute_loss_func(outputs, labels, num_items_in_batch=num_items_in_batch)
        items = None if uses_count(trainer.compute_loss_func) else items
    elif labels is not None and trainer.label_smoother is not None:
        loss = trainer.label_smoother(outputs, labels, shift_labels=trainer._loss.shifts_labels)
    else:
        loss = _loss_in(outputs, inputs)
    if num_items_in_batch is not None and items is not None:
        loss = loss * (items.to(loss.device) / num_items_in_batch)
    return (loss, outputs) if return_outputs else loss


def training_step(trainer: Trainer, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    """Forward and backward pass of one micro-batch; returns its share of the step's loss."""
    for module in (model, trainer.optimizer):
        if callable(getattr(module, "train", None)):
            module.train()
    if num_items_in_batch is not None:
        trainer._loss.items = torch.as_tensor(num_items_in_batch, device=trainer.args.device)
    rows, engine = count_rows(inputs), trainer._engine
    if engine is None:  # called by hand, outside of a run: this batch is a window of its own
        trainer._loss.rows = rows
        with trainer.runtime.autocast():
            loss = trainer._loss.share(model, inputs)
        trainer.accelerator.backward(loss)
        return loss.detach()
    return micro_step(engine, as_batch(inputs, np.arange(rows)), trainer._loss.factor, model)


def floating_point_ops(trainer: Trainer, inputs: Any) -> float:
    """6 operations per token and parameter (without embeddings); 0 for a model that cannot count its parameters."""
    model, loss = trainer.model, trainer._loss
    main = getattr(model, "main_input_name", "input_ids")
    if not (isinstance(inputs, Mapping) and main in inputs and hasattr(model, "num_parameters")):
        return 0.0
    if loss.counted is None or loss.counted[0] is not model:
        loss.counted = model, int(model.num_parameters(exclude_embeddings=True))
    return float(6 * inputs[main].numel() * loss.counted[1])


def count_input_tokens(trainer: Trainer, inputs: Any) -> None:
    """Adds the tokens of a batch, over all ranks, to `state.num_input_tokens_seen`, if the arguments ask for it.

    Padding is recognised by the attention mask, else by the tokenizer's padding token.
    """
    kind, loss = trainer.args.include_num_input_tokens_seen, trainer._loss
    if kind == "no":
        return
    main = getattr(trainer.model, "main_input_name", "input_ids")
    ids = inputs.get(main) if isinstance(inputs, Mapping) else None
    padding = getattr(trainer.processing_class, "pad_token_id", None)
    seen = 0
    if not isinstance(ids, torch.Tensor):
        loss.warn_once(f"tokens are not counted: batches have no {main!r}, the model's main_input_name")
    elif kind == "non_padding" and "attention_mask" in inputs:
        seen = int(inputs["attention_mask"].sum())
    elif kind == "non_padding" and padding is not None:
        seen = int((ids != padding).sum())
    else:
        if kind == "non_padding":
            loss.warn_once("Could not determine method to count non-padding tokens: all tokens are counted")
        seen = int(ids.numel())
    trainer.state.num_input_tokens_seen += sum(trainer.runtime.gather_objects(seen))


def prepare_inputs(trainer: Trainer, inputs: Any) -> Any:
    """The batch on the device; one without a column is refused."""
    inputs = trainer._prepare_input(inputs)
    if len(inputs) == 0:
        raise ConfigError(
            "the batch is empty: no column of the training set is an argument of the model's forward "
            f"({', '.join(trainer._signature_columns or ())})",
            fix="Rename the columns, or set remove_unused_columns=False.",
        )
    return inputs


def on_device(data: Any, device: Any) -> Any:
    """The same structure with its tensors on the device."""
    if isinstance(data, Mapping):
        return type(data)({k: on_device(v, device) for k, v in data.items()})  # type: ignore[call-arg]
    if isinstance(data, (tuple, list)):
        return type(data)(on_device(v, device) for v in data)
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    return data


def _loss_in(outputs: Any, inputs: Any) -> torch.Tensor:
    """The loss of a model's outputs: by name, or the first of a tuple."""
    if isinstance(outputs, dict) and "loss" not in outputs:
        raise ConfigError(
            f"The model did not return a loss from the inputs, only the following keys: {','.join(outputs)}. "
            f"For reference, the inputs it received are {','.join(inputs)}",
            fix="Give it labels, override compute_loss, or pass compute_loss_func.",
        )
    loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss
