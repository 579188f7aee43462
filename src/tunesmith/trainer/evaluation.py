"""evaluate and predict: one result per row, in the order of the dataset, whatever sampler fetched the rows."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tunesmith.ranks.sharding import gathered_weights, is_sharded
from tunesmith.trainer.loaders import RecordedBatches, RowBatches, count_rows
from tunesmith.trainer.objective import COUNT, accepts, count_items
from tunesmith.trainer.processes import Gathered, naming_workers, read_batches, warn_of_nan
from tunesmith.trainer.upstream import has_length, parts, speed_metrics, utils

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer


class Evaluation:
    """Evaluates and predicts for one Trainer. Methods that a subclass may replace are called on the Trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def evaluate(self, eval_dataset: Any, ignore_keys: list[str] | None, metric_key_prefix: str) -> dict[str, float]:
        """Metrics of the evaluation set, or of each of a dict of them, under prefixed keys."""
        trainer = self._trainer
        given = eval_dataset is not None
        dataset = eval_dataset if given else trainer.eval_dataset
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
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
        output.metrics.update(self._speed(metric_key_prefix, started, output.num_samples))
        trainer.log(output.metrics)
        if trainer._parts.run is not None and trainer.is_in_train:
            trainer._parts.run.note_evaluation(metric_key_prefix, output, time.time() - started)
        trainer.control = trainer.callback_handler.on_evaluate(
            trainer.args, trainer.state, trainer.control, output.metrics
        )
        trainer._memory_tracker.stop_and_update_metrics(output.metrics)
        found: dict[str, float] = output.metrics
        return found

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None, metric_key_prefix: str) -> Any:
        """(predictions, label_ids, metrics), row i for row i of the dataset."""
        trainer = self._trainer
        trainer._memory_tracker.start()
        started = time.time()
        output = trainer.evaluation_loop(
            trainer.get_test_dataloader(test_dataset),
            description="Prediction",
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        output.metrics.update(self._speed(metric_key_prefix, started, output.num_samples))
        trainer.control = trainer.callback_handler.on_predict(
            trainer.args, trainer.state, trainer.control, output.metrics
        )
        trainer._memory_tracker.stop_and_update_metrics(output.metrics)
        return utils.PredictionOutput(
            predictions=output.predictions, label_ids=output.label_ids, metrics=output.metrics
        )

    def loop(
        self, dataloader: Any, description: str, loss_only: bool, ignore_keys: list[str] | None, metric_key_prefix: str
    ) -> Any:
        """Predictions, labels and metrics over a DataLoader, with or without labels."""
        trainer = self._trainer
        args = trainer.args
        model = self._evaluation_model()
        trainer.callback_handler.eval_dataloader = dataloader
        source, recorder = with_recorded_rows(dataloader)
        kept = Gathered(concatenate=args.eval_do_concat_batches)
        metrics: dict[str, Any] = {}
        with self._evaluating(model):
            for step, (inputs, last) in enumerate(_with_last(read_batches(source))):
                part = self._predict_batch(model, inputs, loss_only, ignore_keys)
                trainer.control = trainer.callback_handler.on_prediction_step(args, trainer.state, trainer.control)
                if args.batch_eval_metrics and part["predictions"] is not None and part["labels"] is not None:
                    metrics = self._batch_metrics(part, last) or metrics
                if not args.batch_eval_metrics or description == "Prediction":
                    kept.add(part)
                else:
                    kept.add({**part, "predictions": None, "labels": None, "inputs": None})
                if args.eval_accumulation_steps and (step + 1) % args.eval_accumulation_steps == 0:
                    kept.to_cpu()
        arrays = kept.over_ranks(trainer.runtime, recorder())
        warn_of_nan(arrays["predictions"])
        rows = len(dataloader.dataset) if has_length(getattr(dataloader, "dataset", None)) else arrays["rows"]
        if trainer.compute_metrics is not None and not args.batch_eval_metrics:
            metrics = self._all_metrics(arrays)
        metrics = utils.denumpify_detensorize(metrics)
        if arrays["loss"] is not None:
            metrics[f"{metric_key_prefix}_loss"] = float(np.mean(arrays["loss"]))
        if trainer.model_preparation_time is not None:
            metrics[f"{metric_key_prefix}_model_preparation_time"] = trainer.model_preparation_time
        prefix = f"{metric_key_prefix}_"
        named = {k: v for k, v in metrics.items() if k.startswith(prefix)}
        metrics = named | {prefix + k: v for k, v in metrics.items() if k not in named}
        return utils.EvalLoopOutput(
            predictions=arrays["predictions"], label_ids=arrays["labels"], metrics=metrics, num_samples=rows
        )

    @contextlib.contextmanager
    def _evaluating(self, model: Any) -> Iterator[None]:
        """Inside, no rank holds a part of the weights only. Model and optimizer are left in evaluation mode, as in
        transformers: the next use of the model is without dropout; a training step sets its own mode."""
        trainer = self._trainer
        for module in (model, trainer.optimizer):
            if callable(getattr(module, "eval", None)):
                module.eval()
        with gathered_weights(model), naming_workers():
            yield

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None
    ) -> tuple[Any, Any, Any]:
        """(loss, logits, labels) of one batch, each None where there is none."""
        trainer = self._trainer
        labelled = bool(trainer.label_names) and all(inputs.get(k) is not None for k in trainer.label_names)
        returns_loss = inputs.get("return_loss")
        returns_loss = trainer.can_return_loss if returns_loss is None else returns_loss
        with_loss = labelled or (not trainer.label_names and returns_loss)
        inputs = trainer._prepare_inputs(inputs)
        if ignore_keys is None:
            config = getattr(trainer.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"] if config else [])
        labels = parts.nested_detach(tuple(inputs.get(n) for n in trainer.label_names)) if with_loss else None
        labels = labels[0] if labels is not None and len(labels) == 1 else labels
        loss = None
        with torch.no_grad(), trainer._parts.loss.in_context():
            if with_loss:
                items = (
                    count_items(inputs, shifted=trainer._parts.loss.shifts_labels)
                    if trainer._parts.loss.passes_count()
                    else None
                )
                options = {COUNT: items} if items is not None and accepts(trainer.compute_loss, COUNT) else {}
                loss, outputs = trainer.compute_loss(model, inputs, return_outputs=True, **options)
                loss = loss.detach().mean()
            else:
                outputs = model(**inputs)
        if prediction_loss_only:
            return loss, None, None
        logits = _logits_in(outputs, [*ignore_keys, "loss"] if with_loss else ignore_keys, skip_first=with_loss)
        return loss, parts.nested_detach(logits), labels

    def _predict_batch(self, model: nn.Module, inputs: Any, loss_only: bool, ignore_keys: Any) -> dict[str, Any]:
        """One batch's results by name, the loss repeated for each of its rows."""
        trainer = self._trainer
        rows = count_rows(inputs)
        loss, logits, labels = trainer.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)
        main = getattr(trainer.model, "main_input_name", "input_ids")
        shown = trainer._prepare_input(inputs[main]) if "inputs" in trainer.args.include_for_metrics else None
        if logits is not None and trainer.preprocess_logits_for_metrics is not None:
            logits = trainer.preprocess_logits_for_metrics(logits, labels)
        return {
            "loss": None if loss is None else loss.float().repeat(rows),
            "predictions": logits,
            "labels": labels,
            "inputs": shown,
            "rows": rows,
        }

    def _batch_metrics(self, part: dict[str, Any], last: bool) -> Any:
        trainer = self._trainer
        if trainer.compute_metrics is None:
            return None
        return trainer.compute_metrics(
            utils.EvalPrediction(
                predictions=part["predictions"],
                label_ids=part["labels"],
                losses=part["loss"] if "loss" in trainer.args.include_for_metrics else None,
                inputs=part["inputs"],
            ),
            compute_result=last,
        )

    def _all_metrics(self, arrays: dict[str, Any]) -> dict[str, Any]:
        trainer = self._trainer
        if arrays["predictions"] is None or arrays["labels"] is None or trainer.compute_metrics is None:
            return {}
        losses = arrays["loss"] if "loss" in trainer.args.include_for_metrics else None
        found: dict[str, Any] = trainer.compute_metrics(
            utils.EvalPrediction(
                predictions=arrays["predictions"], label_ids=arrays["labels"], losses=losses, inputs=arrays["inputs"]
            )
        )
        return found

    def _evaluation_model(self) -> Any:
        """The model on its device, in half precision where a full-eval option asks for it outside of training."""
        trainer = self._trainer
        if is_sharded(trainer.model):
            return trainer.model
        started = time.time()
        trainer.model.to(trainer.args.device)
        if (
            trainer._engine is None and trainer.model_preparation_time is None
        ):  # as transformers: in evaluations before training
            trainer.model_preparation_time = round(time.time() - started, 4)
        if not trainer.is_in_train and (trainer.args.fp16_full_eval or trainer.args.bf16_full_eval):
            trainer.model.to(torch.float16 if trainer.args.fp16_full_eval else torch.bfloat16)
        return trainer.model

    def _speed(self, prefix: str, started: float, rows: int) -> dict[str, float]:
        trainer = self._trainer
        per_step = trainer._parts.loaders.eval_batch_size * trainer.runtime.world
        found: dict[str, float] = speed_metrics(prefix, started, num_samples=rows, num_steps=math.ceil(rows / per_step))
        return found


def _logits_in(outputs: Any, ignored: list[str], *, skip_first: bool) -> Any:
    """What a model returned beside the loss: one tensor alone, several as a tuple."""
    if isinstance(outputs, Mapping):
        logits: Any = tuple(v for k, v in outputs.items() if k not in ignored)
    else:
        logits = outputs[1:] if skip_first else outputs
    return logits[0] if isinstance(logits, (tuple, list)) and len(logits) == 1 else logits


def _with_last(source: Any) -> Any:
    """(item, whether it is the last) of an iterable."""
    iterator = iter(source)
    try:
        item = next(iterator)
    except StopIteration:
        return
    for following in iterator:
        yield item, False
        item = following
    yield item, True


def with_recorded_rows(loader: Any) -> tuple[Any, Any]:
    """(a loader with the same batches, a function that says after the loop which rows they were, or None)."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, RowBatches) and not sampler.drop_last:
        return loader, lambda: sampler.rows
    plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not plain or sampler is None or isinstance(loader.dataset, IterableDataset):
        return loader, lambda: None
    # The rows that drop_last leaves out are read all the same: a metric over some of the rows is another metric.
    whole = RowBatches(sampler.rows, sampler.batch_size) if isinstance(sampler, RowBatches) else sampler
    recorder = RecordedBatches(whole)
    options = {
        n: getattr(loader, n)
        for n in ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")
    }
    copy: DataLoader[Any] = DataLoader(loader.dataset, batch_sampler=recorder, **options)
    return copy, lambda: np.asarray(recorder.seen, dtype=np.int64)
