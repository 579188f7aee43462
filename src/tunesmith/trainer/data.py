"""DataLoaders of a Trainer: columns the model does not take are dropped; training order is pure, results keep their rows."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, Sampler

from tunesmith.data.batches import Padding
from tunesmith.data.token_rows import TOKEN_COLUMNS, TokenRows
from tunesmith.errors import ConfigError, DataError
from tunesmith.model.adapters import inner_model
from tunesmith.trainer.arguments import rows_per_rank
from tunesmith.trainer.attributes import TrainerAttributes
from tunesmith.trainer.loaders import EpochBatches, RowBatches, SizedLoader
from tunesmith.trainer.streams import SentRows, dealt_stream
from tunesmith.trainer.upstream import DataCollatorWithPadding, has_length, is_arrow_dataset, parts, utils
from tunesmith.trainer.workers import SECONDS

log = logging.getLogger(__name__)


class DataPart(TrainerAttributes):
    """The methods of a Trainer that make DataLoaders."""

    worker_timeout: float = SECONDS
    """Seconds after which a data-loader worker that gives no batch ends the run."""
    _eval_dataloaders: dict[str, Any]

    def get_train_dataloader(self) -> Any:
        """The training DataLoader, in an order that depends on (seed, epoch) alone."""
        if self.train_dataset is None:
            raise ConfigError("Trainer: training requires a train_dataset.")
        return self._get_dataloader(
            self.train_dataset,
            "Training",
            self._train_batch_size,
            sampler_fn=self._get_train_sampler,
            is_training=True,
        )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The evaluation DataLoader; a string names one of a dict of evaluation sets."""
        if eval_dataset is None and self.eval_dataset is None:
            raise ConfigError("Trainer: evaluation requires an eval_dataset.")
        key = eval_dataset if isinstance(eval_dataset, str) else "eval"
        if key in self._eval_dataloaders and self.args.dataloader_persistent_workers:
            return self._eval_dataloaders[key]
        dataset = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        loader = self._get_dataloader(
            self.eval_dataset if dataset is None else dataset,
            "Evaluation",
            self._eval_batch_size(),
            sampler_fn=self._get_eval_sampler,
        )
        self._eval_dataloaders[key] = loader
        return loader

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The DataLoader of `predict`."""
        return self._get_dataloader(test_dataset, "test", self._eval_batch_size(), sampler_fn=self._get_eval_sampler)

    def _eval_batch_size(self) -> int:
        return rows_per_rank(self.args, self.args.eval_batch_size, self.runtime.world)

    def get_total_train_batch_size(self, args: Any = None) -> int:
        """Rows of one optimizer step over all micro-batches and ranks."""
        return int(self._train_batch_size * self.args.gradient_accumulation_steps * self.runtime.world)

    def num_examples(self, dataloader: Any) -> int:
        """Rows of a DataLoader's dataset; estimated from its batches where the dataset has no length."""
        try:
            dataset = dataloader.dataset
            return len(dataset.dataset) if isinstance(dataset, parts.IterableDatasetShard) else len(dataset)
        except (AttributeError, TypeError):
            return len(dataloader) * int(self.args.per_device_train_batch_size)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Our batch sampler. A subclass may return any torch sampler instead."""
        dataset = self.train_dataset if train_dataset is None else train_dataset
        if dataset is None or not has_length(dataset):
            return None
        args = self.args
        grouped = args.train_sampling_strategy == "group_by_length"
        return EpochBatches(
            len(dataset),
            batch_size=self._train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
            sampling=args.train_sampling_strategy,
            lengths=self._lengths_of(dataset) if grouped else None,
            drop_last=args.dataloader_drop_last,
            rank=self.runtime.rank,
            world=self.runtime.world,
            clock=self._clock,
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        """Rows of this rank; longest first where padding is dynamic, so that short rows do not pay for long ones."""
        if eval_dataset is None or not has_length(eval_dataset):
            return None
        order = np.arange(len(eval_dataset))
        if (
            isinstance(self.data_collator, DataCollatorWithPadding)
            and self.args.eval_do_concat_batches
            and not self.args.batch_eval_metrics
            and self.compute_loss_func is None  # a mean of somebody's own may depend on which rows share a batch
            and not any(self.overrides(n) for n in ("compute_loss", "prediction_step", "evaluation_loop"))
            and (rows := token_rows_of(eval_dataset)) is not None
        ):
            order = np.argsort(-rows.lengths, kind="stable")
        mine = order[self.runtime.rank :: self.runtime.world]
        return RowBatches(mine, self._eval_batch_size(), self.args.dataloader_drop_last)

    def _lengths_of(self, dataset: Any) -> npt.NDArray[np.int64]:
        """The number of tokens in each row: from a length column, from Arrow, or by looking at every row."""
        column = self.args.length_column_name
        if column in (getattr(dataset, "column_names", None) or ()):
            return np.asarray(dataset[column], dtype=np.int64)
        if (rows := token_rows_of(dataset)) is not None:
            return rows.lengths.astype(np.int64)
        name = (getattr(self.processing_class, "model_input_names", None) or ["input_ids"])[0]
        first = dataset[0]
        if not isinstance(first, Mapping) or name not in first:
            raise DataError(
                f"group_by_length needs {name!r} or {column!r} in every row",
                fix="Use train_sampling_strategy='random'.",
            )
        return np.array([len(dataset[i][name]) for i in range(len(dataset))], dtype=np.int64)

    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """A DataLoader with the collator and the sampler that belong to it."""
        args = self.args
        if is_arrow_dataset(dataset):
            dataset, collator = self._remove_unused_columns(dataset, description), self.data_collator
        else:
            collator = self._get_collator_with_removed_columns(self.data_collator, description)
        options: dict[str, Any] = {
            "collate_fn": collator,
            "pin_memory": args.dataloader_pin_memory and self.runtime.device.type != "cpu",
        }
        if isinstance(dataset, IterableDataset):
            dataset = dealt_stream(dataset, batch_size, args, self.runtime)
        if not isinstance(dataset, SentRows):  # whose rows come over the process group, which workers are not part of
            options |= {
                "num_workers": args.dataloader_num_workers,
                "persistent_workers": args.dataloader_persistent_workers,
                "multiprocessing_context": args.dataloader_multiprocessing_context,
                "prefetch_factor": args.dataloader_prefetch_factor,
                "in_order": args.dataloader_in_order,
                "timeout": self.worker_timeout if args.dataloader_num_workers else 0,
            }
        if isinstance(dataset, IterableDataset):
            options |= {"batch_size": batch_size, "drop_last": args.dataloader_drop_last}
        else:
            sampler = sampler_fn(dataset) if sampler_fn is not None else None
            options |= _sampler_options(sampler, batch_size, args.dataloader_drop_last)
            if is_training:
                options["worker_init_fn"] = partial(
                    utils.seed_worker, num_workers=args.dataloader_num_workers, rank=self.runtime.rank
                )
        loader = SizedLoader(dataset, **options)
        loader.total_batch_size = batch_size * self.runtime.world
        return loader

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            names = list(inspect.signature(inner_model(self.model).forward).parameters)
            self._signature_columns = [*names, *sorted({"label", "label_ids", *self.label_names} - set(names))]

    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """The dataset without the columns that the model's forward does not take."""
        if not self.args.remove_unused_columns:
            return dataset
        self._set_signature_columns_if_needed()
        names = self._signature_columns or []
        ignored = [c for c in dataset.column_names if c not in names]
        if len(ignored) == len(dataset.column_names):
            raise DataError(
                f"No columns in the dataset match the model's forward method signature: ({', '.join(names)}). "
                f"The following columns have been ignored: [{', '.join(ignored)}]",
                fix="Rename the columns, or set remove_unused_columns=False.",
            )
        if ignored:
            log.info("%s: columns the model does not take are dropped: %s", description, ", ".join(ignored))
        return dataset.remove_columns(ignored)

    def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
        """The collator behind one that drops what the model's forward does not take."""
        if not self.args.remove_unused_columns:
            return data_collator
        self._set_signature_columns_if_needed()
        return utils.RemoveColumnsCollator(
            data_collator=data_collator,
            signature_columns=self._signature_columns,
            logger=log,
            description=description,
            model_name=type(self.model).__name__,
        )

    def _fast_rows(self, loader: Any) -> tuple[TokenRows | None, Padding | None]:
        """Rows and padding that make the batches the DataLoader would make, read straight from Arrow; else (None, None)."""
        overridden = any(
            self.overrides(n)
            for n in ("get_train_dataloader", "_get_train_sampler", "_get_dataloader", "_prepare_inputs")
        )
        if overridden or self.args.dataloader_num_workers or not isinstance(loader.batch_sampler, EpochBatches):
            return None, None
        padding = padding_of(self.data_collator)
        rows = token_rows_of(loader.dataset) if padding is not None else None
        if rows is None or not _same_columns(loader.dataset, self._signature_columns, rows):
            return None, None
        return rows, padding


def _sampler_options(sampler: Any, batch_size: int, drop_last: bool) -> dict[str, Any]:
    if isinstance(sampler, (EpochBatches, RowBatches)):
        return {"batch_sampler": sampler}
    if isinstance(sampler, (Sampler, list)) or sampler is not None:
        return {"sampler": sampler, "batch_size": batch_size, "drop_last": drop_last}
    return {"batch_size": batch_size, "drop_last": drop_last}


def token_rows_of(dataset: Any) -> TokenRows | None:
    """The tokens of an Arrow dataset without a copy, or None when its rows are not plainly what is stored."""
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


def _same_columns(dataset: Any, signature: list[str] | None, rows: TokenRows) -> bool:
    """Whether tokens, an all-ones mask and labels are all that a collated batch would hold."""
    if rows.labels is None or not len(rows):
        return False
    if signature is not None and not set(rows.columns) <= set(signature):
        return False
    known = {*TOKEN_COLUMNS, "attention_mask", "label", "labels"}
    shown = getattr(dataset, "format", {}).get("columns") or dataset.column_names
    if not set(shown) <= known or not {"input_ids", "attention_mask"} <= set(shown):
        return False
    if not set(rows.columns) <= set(shown):
        return False
    label = dataset.data.table.column("labels" if "labels" in dataset.column_names else "label")
    if "string" in str(label.type):
        return False  # "1" is not 1: the collator refuses it, and so must this way
    masks = dataset.data.table.column("attention_mask")
    ones = all(bool(np.all(chunk.values.to_numpy(zero_copy_only=False) == 1)) for chunk in masks.chunks)
    return ones and int(sum(len(c.values) for c in masks.chunks)) == int(rows.lengths.sum())


def padding_of(collator: Any) -> Padding | None:
    """Our padding, when it does what this collator does."""
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
