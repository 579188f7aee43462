"""evaluate and predict: one result per row, in the order of the dataset, whatever sampler fetched the rows."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tunesmith.events import Evaluated
from tunesmith.train.sharding import is_sharded, whole_weights
from tunesmith.trainer.arguments import rows_per_rank
from tunesmith.trainer.gathering import Gathered, warn_of_nan
from tunesmith.trainer.loaders import RecordedBatches, RowBatches, count_rows
from tunesmith.trainer.objective import COUNT, LossPart, accepts, count_items
from tunesmith.trainer.upstream import has_length, parts, speed_metrics, utils
from tunesmith.trainer.workers import naming_workers, read_batches


class EvaluationPart(LossPart):
    """The methods of a Trainer that evaluate and predict."""

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Metrics of the evaluation set, or of each of a dict of them, under prefixed keys."""
        given = eval_dataset is not None
        dataset = eval_dataset if given else self.eval_dataset
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                metrics |= self.evaluate(part if given else name, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        self._memory_tracker.start()
        started = time.time()
        output = self.evaluation_loop(
            self.get_eval_dataloader(dataset if given else None),  # type: ignore[attr-defined]
            description="Evaluation",
            prediction_loss_only=True if self.compute_metrics is None else None,
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        output.metrics.update(self._speed(metric_key_prefix, started, output.num_samples))
        self.log(output.metrics)
        self._note_evaluation(metric_key_prefix, output, time.time() - started)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, output.metrics)
        self._memory_tracker.stop_and_update_metrics(output.metrics)
        found: dict[str, float] = output.metrics
        return found

    def predict(self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test") -> Any:
        """(predictions, label_ids, metrics), row i for row i of the dataset."""
        self._memory_tracker.start()
        started = time.time()
        output = self.evaluation_loop(
            self.get_test_dataloader(test_dataset),  # type: ignore[attr-defined]
            description="Prediction",
            ignore_keys=ignore_keys,
            metric_key_prefix=metric_key_prefix,
        )
        output.metrics.update(self._speed(metric_key_prefix, started, output.num_samples))
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, output.metrics)
        self._memory_tracker.stop_and_update_metrics(output.metrics)
        return utils.PredictionOutput(
            predictions=output.predictions, label_ids=output.label_ids, metrics=output.metrics
        )

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Predictions, labels and metrics over a DataLoader, with or without labels."""
        args = self.args
        loss_only = args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        model = self._evaluation_model()
        self.callback_handler.eval_dataloader = dataloader
        source, recorder = with_recorded_rows(dataloader)
        kept = Gathered(concatenate=args.eval_do_concat_batches)
        metrics: dict[str, Any] = {}
        with self._evaluating(model):
            for step, (inputs, last) in enumerate(_with_last(read_batches(source))):
                part = self._predict_batch(model, inputs, loss_only, ignore_keys)
                self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)
                if args.batch_eval_metrics and part["predictions"] is not None and part["labels"] is not None:
                    metrics = self._batch_metrics(part, last) or metrics
                if not args.batch_eval_metrics or description == "Prediction":
                    kept.add(part)
                else:
                    kept.add({**part, "predictions": None, "labels": None, "inputs": None})
                if args.eval_accumulation_steps and (step + 1) % args.eval_accumulation_steps == 0:
                    kept.to_cpu()
        arrays = kept.over_ranks(self.runtime, recorder())
        warn_of_nan(arrays["predictions"])
        rows = len(dataloader.dataset) if has_length(getattr(dataloader, "dataset", None)) else arrays["rows"]
        if self.compute_metrics is not None and not args.batch_eval_metrics:
            metrics = self._all_metrics(arrays)
        metrics = utils.denumpify_detensorize(metrics)
        if arrays["loss"] is not None:
            metrics[f"{metric_key_prefix}_loss"] = float(np.mean(arrays["loss"]))
        if self.model_preparation_time is not None:
            metrics[f"{metric_key_prefix}_model_preparation_time"] = self.model_preparation_time
        prefix = f"{metric_key_prefix}_"
        named = {k: v for k, v in metrics.items() if k.startswith(prefix)}
        metrics = named | {prefix + k: v for k, v in metrics.items() if k not in named}
        return utils.EvalLoopOutput(
            predictions=arrays["predictions"], label_ids=arrays["labels"], metrics=metrics, num_samples=rows
        )

    @contextlib.contextmanager
    def _evaluating(self, model: Any) -> Iterator[None]:
        """Inside, no rank holds a part of the weights only. Model and optimizer are left in evaluation mode, as in
        transformers: whoever uses the model next does it without dropout; a training step sets its own mode."""
        for module in (model, self.optimizer):
            if callable(getattr(module, "eval", None)):
                module.eval()
        with whole_weights(model), naming_workers():
            yield

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """(loss, logits, labels) of one batch, each None where there is none."""
        labelled = bool(self.label_names) and all(inputs.get(k) is not None for k in self.label_names)
        returns_loss = inputs.get("return_loss")
        returns_loss = self.can_return_loss if returns_loss is None else returns_loss
        with_loss = labelled or (not self.label_names and returns_loss)
        inputs = self._prepare_inputs(inputs)
        if ignore_keys is None:
            config = getattr(self.model, "config", None)
            ignore_keys = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"] if config else [])
        labels = parts.nested_detach(tuple(inputs.get(n) for n in self.label_names)) if with_loss else None
        labels = labels[0] if labels is not None and len(labels) == 1 else labels
        loss = None
        with torch.no_grad(), self._in_context():
            if with_loss:
                items = count_items(inputs, shifted=self._loss_shifts_labels) if self._passes_count() else None
                options = {COUNT: items} if items is not None and accepts(self.compute_loss, COUNT) else {}
                loss, outputs = self.compute_loss(model, inputs, return_outputs=True, **options)
                loss = loss.detach().mean()
            else:
                outputs = model(**inputs)
        if prediction_loss_only:
            return loss, None, None
        logits = _logits_in(outputs, [*ignore_keys, "loss"] if with_loss else ignore_keys, skip_first=with_loss)
        return loss, parts.nested_detach(logits), labels

    def _predict_batch(self, model: nn.Module, inputs: Any, loss_only: bool, ignore_keys: Any) -> dict[str, Any]:
        """One batch's results by name, the loss repeated for each of its rows."""
        rows = count_rows(inputs)
        loss, logits, labels = self.prediction_step(model, inputs, loss_only, ignore_keys=ignore_keys)
        main = getattr(self.model, "main_input_name", "input_ids")
        shown = self._prepare_input(inputs[main]) if "inputs" in self.args.include_for_metrics else None
        if logits is not None and self.preprocess_logits_for_metrics is not None:
            logits = self.preprocess_logits_for_metrics(logits, labels)
        return {
            "loss": None if loss is None else loss.float().repeat(rows),
            "predictions": logits,
            "labels": labels,
            "inputs": shown,
            "rows": rows,
        }

    def _batch_metrics(self, part: dict[str, Any], last: bool) -> Any:
        if self.compute_metrics is None:
            return None
        return self.compute_metrics(
            utils.EvalPrediction(
                predictions=part["predictions"],
                label_ids=part["labels"],
                losses=part["loss"] if "loss" in self.args.include_for_metrics else None,
                inputs=part["inputs"],
            ),
            compute_result=last,
        )

    def _all_metrics(self, arrays: dict[str, Any]) -> dict[str, Any]:
        if arrays["predictions"] is None or arrays["labels"] is None or self.compute_metrics is None:
            return {}
        losses = arrays["loss"] if "loss" in self.args.include_for_metrics else None
        found: dict[str, Any] = self.compute_metrics(
            utils.EvalPrediction(
                predictions=arrays["predictions"], label_ids=arrays["labels"], losses=losses, inputs=arrays["inputs"]
            )
        )
        return found

    def _evaluation_model(self) -> Any:
        """The model on its device, in half precision where a full-eval option asks for it outside of training."""
        if is_sharded(self.model):
            return self.model
        started = time.time()
        self.model.to(self.args.device)
        if (
            self._engine is None and self.model_preparation_time is None
        ):  # as transformers: in evaluations before training
            self.model_preparation_time = round(time.time() - started, 4)
        if not self.is_in_train and (self.args.fp16_full_eval or self.args.bf16_full_eval):
            self.model.to(torch.float16 if self.args.fp16_full_eval else torch.bfloat16)
        return self.model

    def _speed(self, prefix: str, started: float, rows: int) -> dict[str, float]:
        per_step = rows_per_rank(self.args, self.args.eval_batch_size, self.runtime.world) * self.runtime.world
        found: dict[str, float] = speed_metrics(prefix, started, num_samples=rows, num_steps=math.ceil(rows / per_step))
        return found

    def _note_evaluation(self, prefix: str, output: Any, seconds: float) -> None:
        """Writes an evaluation during training to the journal, under the names of our curves."""
        split = "validation" if prefix == "eval" else prefix.removeprefix("eval_")
        known = (self.state.global_step, split) in self._journalled
        if self._journal is None or not self.is_in_train or known:
            return
        speed = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
        metrics = {k.removeprefix(f"{prefix}_"): v for k, v in output.metrics.items() if isinstance(v, (int, float))}
        kept: dict[str, float | None] = {k: float(v) for k, v in metrics.items() if k not in (*speed, "epoch")}
        self._journal.append(
            Evaluated(self.state.global_step, float(self.state.epoch or 0.0), split, kept, output.num_samples, seconds)
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds a line to `state.log_history` and tells the callbacks; override to do more."""
        if self.state.epoch is not None:
            logs["epoch"] = self.state.epoch
        if self.args.include_num_input_tokens_seen != "no":
            logs["num_input_tokens_seen"] = self.state.num_input_tokens_seen
            if start_time is not None:
                tokens = self.state.num_input_tokens_seen - self._initial_num_input_tokens_seen
                logs.update(speed_metrics("train", start_time, num_tokens=tokens))
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)


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
