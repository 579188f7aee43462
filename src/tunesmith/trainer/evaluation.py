"""evaluate and predict: one result per row, in the order of the dataset, whatever sampler fetched the rows."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_pt_utils import nested_concat, nested_detach, nested_numpify
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    denumpify_detensorize,
    has_length,
    speed_metrics,
)

from tunesmith.trainer.arguments import trainer_log
from tunesmith.trainer.callbacks import tell
from tunesmith.trainer.checkpoints import journal_evaluation
from tunesmith.trainer.data import RecordedBatches, RowBatches
from tunesmith.trainer.objective import COUNT, accepts, count_items
from tunesmith.trainer.windows import count_rows, naming_workers, read_batches
from tunesmith.training.distributed import Runtime

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer


def evaluate(
    trainer: Trainer, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
) -> dict[str, float]:
    """Metrics of the evaluation set, or of each of a dict of them, under prefixed keys."""
    given = eval_dataset is not None
    dataset = eval_dataset if given else trainer.eval_dataset
    metrics: dict[str, float] = {}
    if isinstance(dataset, dict):
        for name, part in dataset.items():
            metrics |= trainer.evaluate(part if given else name, ignore_keys, f"{metric_key_prefix}_{name}")
        return metrics
    trainer._memory_tracker.start()
    started = time.time()
    output = trainer.evaluation_loop(
        trainer.get_eval_dataloader(dataset if given else None),
        description="Evaluation",
        prediction_loss_only=True if trainer.compute_metrics is None else None,
        ignore_keys=ignore_keys,
        metric_key_prefix=metric_key_prefix,
    )
    metrics = output.metrics
    steps = math.ceil(output.num_samples / (trainer.args.eval_batch_size * trainer.args.world_size))
    metrics.update(speed_metrics(metric_key_prefix, started, num_samples=output.num_samples, num_steps=steps))
    trainer.log(metrics)
    if trainer._run is not None and trainer.is_in_train:
        journal_evaluation(trainer._run, metric_key_prefix, output, time.time() - started)
    tell(trainer, "on_evaluate", metrics=metrics)
    trainer._memory_tracker.stop_and_update_metrics(metrics)
    return metrics


def evaluation_loop(
    trainer: Trainer,
    dataloader: Any,
    description: str,
    prediction_loss_only: bool | None = None,
    ignore_keys: list[str] | None = None,
    metric_key_prefix: str = "eval",
) -> Any:
    """Predictions, labels and metrics over a DataLoader, with or without labels."""
    args, model = trainer.args, _evaluation_model(trainer)
    loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
    trainer.callback_handler.eval_dataloader = dataloader
    source, recorder = with_recorded_rows(dataloader)
    kept = Gathered(concatenate=args.eval_do_concat_batches)
    metrics: dict[str, Any] = {}
    with naming_workers():
        for step, (inputs, last) in enumerate(_with_last(read_batches(source))):
            part = _predict_batch(trainer, model, inputs, loss_only, ignore_keys)
            tell(trainer, "on_prediction_step")
            if args.batch_eval_metrics:
                metrics = _metrics(trainer, part, compute_result=last) or metrics
                if description != "Prediction":
                    part |= {"predictions": None, "labels": None, "inputs": None}
            kept.add(part)
            if args.eval_accumulation_steps and (step + 1) % args.eval_accumulation_steps == 0:
                kept.to_cpu()
    arrays = kept.over_ranks(trainer.runtime, recorder())
    warn_of_nan(arrays["predictions"])
    rows = len(dataloader.dataset) if has_length(getattr(dataloader, "dataset", None)) else arrays["rows"]
    if not args.batch_eval_metrics:
        metrics = _metrics(trainer, arrays)
    metrics = denumpify_detensorize(metrics)
    if arrays["loss"] is not None:
        metrics[f"{metric_key_prefix}_loss"] = float(np.mean(arrays["loss"]))
    if trainer.model_preparation_time is not None:
        metrics[f"{metric_key_prefix}_model_preparation_time"] = trainer.model_preparation_time
    prefix = f"{metric_key_prefix}_"
    named = {k: v for k, v in metrics.items() if k.startswith(prefix)}
    metrics = named | {prefix + k: v for k, v in metrics.items() if k not in named}
    return EvalLoopOutput(arrays["predictions"], arrays["labels"], metrics, rows)


def prediction_step(
    trainer: Trainer, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
) -> tuple[Any, Any, Any]:
    """(loss, logits, labels) of one batch, each None where there is none."""
    labelled = bool(trainer.label_names) and all(inputs.get(k) is not None for k in trainer.label_names)
    returns_loss = inputs.get("return_loss")
    returns_loss = trainer.can_return_loss if returns_loss is None else returns_loss
    with_loss = labelled or (not trainer.label_names and returns_loss)
    inputs = trainer._prepare_inputs(inputs)
    if ignore_keys is None:
        config = getattr(trainer.model, "config", None)
        ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"] if config else [])
    labels = nested_detach(tuple(inputs.get(n) for n in trainer.label_names)) if with_loss else None
    labels = labels[0] if labels is not None and len(labels) == 1 else labels
    loss = None
    with torch.no_grad(), trainer._loss.in_context():
        if with_loss:
            counts = trainer._loss.passes_count() and accepts(trainer.compute_loss, COUNT)
            items = count_items(inputs, shifted=trainer._loss.shifts_labels) if counts else None
            options = {} if items is None else {COUNT: items}
            loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, **options)
            loss = loss.detach().mean()
        else:
            outputs = model(**inputs)
    if prediction_loss_only:
        return loss, None, None
    logits = _logits_in(outputs, [*ignore_keys, "loss"] if with_loss else ignore_keys, skip_first=with_loss)
    return loss, nested_detach(logits), labels


def _predict_batch(
    trainer: Trainer, model: nn.Module, inputs: Any, loss_only: bool, ignore_keys: Any
) -> dict[str, Any]:
    """One batch's results by name, the loss repeated for each of its rows."""
    rows = count_rows(inputs)
    loss, logits, labels = trainer.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)
    main = getattr(trainer.model, "main_input_name", "input_ids")
    shown = trainer._prepare_input(inputs[main]) if "inputs" in trainer.args.include_for_metrics else None
    if logits is not None and trainer.preprocess_logits_for_metrics is not None:
        logits = trainer.preprocess_logits_for_metrics(logits, labels)
    losses = None if loss is None else loss.float().repeat(rows)
    return {"loss": losses, "predictions": logits, "labels": labels, "inputs": shown, "rows": rows}


def _metrics(trainer: Trainer, part: dict[str, Any], **options: bool) -> dict[str, Any]:
    """What `compute_metrics` makes of a batch or of all rows; nothing where predictions or labels are missing."""
    if trainer.compute_metrics is None or part["predictions"] is None or part["labels"] is None:
        return {}
    losses = part["loss"] if "loss" in trainer.args.include_for_metrics else None
    given = EvalPrediction(part["predictions"], part["labels"], inputs=part["inputs"], losses=losses)
    found: dict[str, Any] = trainer.compute_metrics(given, **options)
    return found


def _evaluation_model(trainer: Trainer) -> Any:
    """The model on its device, in half precision where a full-eval option asks for it outside of training.

    Model and optimizer are left in evaluation mode, as in transformers: the next use of the model is without dropout; a
    training step sets its own mode.
    """
    model = trainer.model
    if True:
        started = time.time()
        model.to(trainer.args.device)
        if (
            trainer._engine is None and trainer.model_preparation_time is None
        ):  # as in transformers: in evaluations before training
            trainer.model_preparation_time = round(time.time() - started, 4)
        if not trainer.is_in_train and (trainer.args.fp16_full_eval or trainer.args.bf16_full_eval):
            model.to(torch.float16 if trainer.args.fp16_full_eval else torch.bfloat16)
    for module in (model, trainer.optimizer):
        if callable(getattr(module, "eval", None)):
            module.eval()
    return model


def _logits_in(outputs: Any, ignored: list[str], *, skip_first: bool) -> Any:
    """What a model returned beside the loss: one tensor alone, several as a tuple."""
    if isinstance(outputs, Mapping):
        logits: Any = tuple(v for k, v in outputs.items() if k not in ignored)
    else:
        logits = outputs[1:] if skip_first else outputs
    return logits[0] if isinstance(logits, (tuple, list)) and len(logits) == 1 else logits


def _with_last(source: Any) -> Iterator[tuple[Any, bool]]:
    """(item, whether it is the last) of an iterable."""
    ends = object()
    for item, following in pairwise(chain(source, [ends])):
        yield item, following is ends


def with_recorded_rows(loader: Any) -> tuple[Any, Any]:
    """(a loader with the same batches, a function that says after the loop which rows they were, or None)."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, RowBatches) and not sampler.drop_last:
        return loader, lambda: sampler.rows
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not plain or sampler is None or isinstance(loader.dataset, IterableDataset):
        return loader, lambda: None
    # Rows that drop_last would leave out are read, too: a metric over some of the rows is another metric.
    whole = RowBatches(sampler.rows, sampler.batch_size) if isinstance(sampler, RowBatches) else sampler
    recorder = RecordedBatches(whole)
    names = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    options = {name: getattr(loader, name) for name in names}
    copy: DataLoader[Any] = DataLoader(loader.dataset, batch_sampler=recorder, **options)
    return copy, lambda: np.asarray(recorder.seen, dtype=np.int64)


PARTS = ("loss", "predictions", "labels", "inputs")
PADDING = -100
"""The value that pads narrower results when results of different widths are joined."""


class Gathered:
    """Collects the parts of batches; `concatenate=False` keeps them as lists of batches."""

    def __init__(self, *, concatenate: bool) -> None:
        self._concatenate = concatenate
        self._waiting: dict[str, list[Any]] = {name: [] for name in PARTS}
        self._arrays: dict[str, list[Any]] = {name: [] for name in PARTS}
        self._rows = 0

    def add(self, part: dict[str, Any]) -> None:
        """Keeps one batch's results, on the device they are on."""
        self._rows += part["rows"]
        for name in PARTS:
            if part[name] is not None:
                self._waiting[name].append(part[name])

    def to_cpu(self) -> None:
        """Moves what was kept so far to host memory."""
        for name, values in self._waiting.items():
            self._arrays[name] += [nested_numpify(v) for v in values]
            values.clear()

    def over_ranks(self, runtime: Runtime, rows: npt.NDArray[np.int64] | None) -> dict[str, Any]:
        """Each part over all ranks, in the order of the dataset where the rows are known; None for a part that is missing."""
        self.to_cpu()
        parts = runtime.gather_objects((self._arrays, rows, self._rows))
        out: dict[str, Any] = {"rows": sum(count for _, _, count in parts)}
        known = [r for _, r, _ in parts]
        order = None if any(r is None for r in known) else np.concatenate([np.asarray(r) for r in known])
        for name in PARTS:
            batches = [b for arrays, _, _ in parts for b in arrays[name]]
            if not batches:
                out[name] = None
            elif name == "loss":
                out[name] = reordered(np.concatenate(batches), order)
            elif not self._concatenate:
                out[name] = batches
            else:
                out[name] = reordered(_joined(batches), order)
        return out


def _joined(batches: list[Any]) -> Any:
    """All batches as one; pairwise, so that a set of n batches is not copied n times."""
    while len(batches) > 1:
        pairs = range(0, len(batches) - 1, 2)
        joined = [nested_concat(batches[i], batches[i + 1], padding_index=PADDING) for i in pairs]
        batches = joined + batches[len(joined) * 2 :]
    return batches[0]


def reordered(values: Any, order: npt.NDArray[np.int64] | None) -> Any:
    """Results in the order of the dataset; left as they are when the rows were not each fetched once."""
    if order is None or not np.array_equal(np.sort(order), np.arange(len(order))):
        return values
    if isinstance(values, (list, tuple)):
        return type(values)(reordered(v, order) for v in values)
    if isinstance(values, dict):
        return {k: reordered(v, order) for k, v in values.items()}
    if len(values) != len(order):
        return values
    out = np.empty_like(values)
    out[order] = values
    return out


def warn_of_nan(predictions: Any) -> None:
    """Warns of rows whose answer is not a number: as in transformers they are returned, and argmax makes them class 0."""
    if not isinstance(predictions, np.ndarray) or predictions.dtype.kind != "f" or not len(predictions):
        return
    bad = np.flatnonzero(np.isnan(predictions.reshape(len(predictions), -1)).any(axis=1))
    if len(bad):
        trainer_log.warning(
            "the model's answer is not a number for %d of %d rows, the first at %d", len(bad), len(predictions), bad[0]
        )
