"""DataLoaders of a Trainer: columns the model does not take are dropped; training order is pure, results keep their rows."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, Sampler

from tunesmith.encoder.params import inner_model
from tunesmith.errors import ConfigError, DataError
from tunesmith.tokens.batches import Padding
from tunesmith.tokens.token_rows import TOKEN_COLUMNS, TokenRows
from tunesmith.trainer.arguments import rows_per_rank
from tunesmith.trainer.loaders import EpochBatches, RowBatches, SizedLoader
from tunesmith.trainer.processes import SentRows, dealt_stream
from tunesmith.trainer.upstream import DataCollatorWithPadding, has_length, is_arrow_dataset, utils

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

log = logging.getLogger(__name__)


class Loaders:
    """Makes the DataLoaders of one Trainer. Methods that a subclass may replace are called on the Trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._kept: dict[str, Any] = {}
        """Evaluation loaders with workers that stay."""

    def train(self) -> Any:
        """The training DataLoader, in an order that depends on (seed, epoch) alone."""
        trainer = self._trainer
        if trainer.train_dataset is None:
            raise ConfigError("Trainer: training requires a train_dataset.")
        return trainer._get_dataloader(
            trainer.train_dataset,
            "Training",
            trainer._train_batch_size,
            sampler_fn=trainer._get_train_sampler,
            is_training=True,
        )

    def evaluation(self, wanted: Any) -> Any:
        """The evaluation DataLoader; a string names one of a dict of evaluation sets."""
        trainer = self._trainer
        if wanted is None and trainer.eval_dataset is None:
            raise ConfigError("Trainer: evaluation requires an eval_dataset.")
        key = wanted if isinstance(wanted, str) else "eval"
        if key in self._kept and trainer.args.dataloader_persistent_workers:
            return self._kept[key]
        dataset = trainer.eval_dataset[wanted] if isinstance(wanted, str) else wanted
        loader = trainer._get_dataloader(
            trainer.eval_dataset if dataset is None else dataset,
            "Evaluation",
            self.eval_batch_size,
            sampler_fn=trainer._get_eval_sampler,
        )
        self._kept[key] = loader
        return loader

    @property
    def eval_batch_size(self) -> int:
        """Rows of this rank's evaluation batches."""
        args = self._trainer.args
        return rows_per_rank(args, args.eval_batch_size, self._trainer.runtime.world)

    def train_sampler(self, dataset: Any) -> Any:
        """Our batch sampler: micro-batches of this rank in the order of the epoch."""
        trainer, args = self._trainer, self._trainer.args
        if dataset is None or not has_length(dataset):
            return None
        grouped = args.train_sampling_strategy == "group_by_length"
        return EpochBatches(
            len(dataset),
            batch_size=trainer._train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            seed=args.seed if args.data_seed is None else args.data_seed,
            sampling=args.train_sampling_strategy,
            lengths=self._lengths_of(dataset) if grouped else None,
            drop_last=args.dataloader_drop_last,
            rank=trainer.runtime.rank,
            world=trainer.runtime.world,
            clock=trainer._clock,
        )

    def eval_sampler(self, eval_dataset: Any) -> Any:
        """Rows of this rank; longest first where padding is dynamic, so that short rows do not pay for long ones."""
        if eval_dataset is None or not has_length(eval_dataset):
            return None
        order = np.arange(len(eval_dataset))
        if (
            isinstance(self._trainer.data_collator, DataCollatorWithPadding)
            and self._trainer.args.eval_do_concat_batches
            and not self._trainer.args.batch_eval_metrics
            and self._trainer.compute_loss_func
            is None  # a mean of the user's own may depend on which rows share a batch
            and not any(self._trainer.overrides(n) for n in ("compute_loss", "prediction_step", "evaluation_loop"))
            and (rows := token_rows_of(eval_dataset)) is not None
        ):
            order = np.argsort(-rows.lengths, kind="stable")
        mine = order[self._trainer.runtime.rank :: self._trainer.runtime.world]
        return RowBatches(mine, self.eval_batch_size, self._trainer.args.dataloader_drop_last)

    def _lengths_of(self, dataset: Any) -> npt.NDArray[np.int64]:
        """The number of tokens in each row: from a length column, from Arrow, or by looking at every row."""
        column = self._trainer.args.length_column_name
        if column in (getattr(dataset, "column_names", None) or ()):
            return np.asarray(dataset[column], dtype=np.int64)
        if (rows := token_rows_of(dataset)) is not None:
            return rows.lengths.astype(np.int64)
        name = (getattr(self._trainer.processing_class, "model_input_names", None) or ["input_ids"])[0]
        first = dataset[0]
        if not isinstance(first, Mapping) or name not in first:
            raise DataError(
                f"group_by_length needs {name!r} or {column!r} in every row",
                fix="Use train_sampling_strategy='random'.",
            )
        return np.array([len(dataset[i][name]) for i in range(len(dataset))], dtype=np.int64)

    def make(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Callable[[Any], Any] | None,
        *,
        is_training: bool,
    ) -> Any:
        """A DataLoader with the collator and the sampler that belong to it."""
        args = self._trainer.args
        if is_arrow_dataset(dataset):
            dataset, collator = self._trainer._remove_unused_columns(dataset, description), self._trainer.data_collator
        else:
            collator = self._trainer._get_collator_with_removed_columns(self._trainer.data_collator, description)
        options: dict[str, Any] = {
            "collate_fn": collator,
            "pin_memory": args.dataloader_pin_memory and self._trainer.runtime.device.type != "cpu",
        }
        if isinstance(dataset, IterableDataset):
            dataset = dealt_stream(dataset, batch_size, args, self._trainer.runtime)
        if not isinstance(dataset, SentRows):  # whose rows come over the process group, which workers are not part of
            options |= {
                "num_workers": args.dataloader_num_workers,
                "persistent_workers": args.dataloader_persistent_workers,
                "multiprocessing_context": args.dataloader_multiprocessing_context,
                "prefetch_factor": args.dataloader_prefetch_factor,
                "in_order": args.dataloader_in_order,
                "timeout": self._trainer.worker_timeout if args.dataloader_num_workers else 0,
            }
        if isinstance(dataset, IterableDataset):
            options |= {"batch_size": batch_size, "drop_last": args.dataloader_drop_last}
        else:
            sampler = sampler_fn(dataset) if sampler_fn is not None else None
            options |= _sampler_options(sampler, batch_size, args.dataloader_drop_last)
            if is_training:
                options["worker_init_fn"] = partial(
                    utils.seed_worker, num_workers=args.dataloader_num_workers, rank=self._trainer.runtime.rank
                )
        loader = SizedLoader(dataset, **options)
        loader.total_batch_size = batch_size * self._trainer.runtime.world
        return loader

    def without_unused(self, dataset: Any, description: str | None) -> Any:
        """The dataset without the columns that the model's forward does not take."""
        if not self._trainer.args.remove_unused_columns:
            return dataset
        self._trainer._set_signature_columns_if_needed()
        names = self._trainer._signature_columns or []
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

    def dropping_collator(self, data_collator: Any, description: str | None) -> Any:
        """The collator behind one that drops what the model's forward does not take."""
        if not self._trainer.args.remove_unused_columns:
            return data_collator
        self._trainer._set_signature_columns_if_needed()
        return utils.RemoveColumnsCollator(
            data_collator=data_collator,
            signature_columns=self._trainer._signature_columns,
            logger=log,
            description=description,
            model_name=type(self._trainer.model).__name__,
        )

    def fast_rows(self, loader: Any) -> tuple[TokenRows | None, Padding | None]:
        """Rows and padding that make the batches the DataLoader would make, read straight from Arrow; else (None, None)."""
        overridden = any(
            self._trainer.overrides(n)
            for n in ("get_train_dataloader", "_get_train_sampler", "_get_dataloader", "_prepare_inputs")
        )
        if (
            overridden
            or self._trainer.args.dataloader_num_workers
            or not isinstance(loader.batch_sampler, EpochBatches)
        ):
            return None, None
        padding = collator_padding(self._trainer.data_collator)
        rows = token_rows_of(loader.dataset) if padding is not None else None
        if rows is None or not _same_columns(loader.dataset, self._trainer._signature_columns, rows):
            return None, None
        return rows, padding


def columns_taken(model: Any, label_names: list[str]) -> list[str]:
    """What a model's forward takes, and the names that labels go by."""
    names = list(inspect.signature(inner_model(model).forward).parameters)
    return [*names, *sorted({"label", "label_ids", *label_names} - set(names))]


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


def collator_padding(collator: Any) -> Padding | None:
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
