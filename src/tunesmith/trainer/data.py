"""DataLoaders of a Trainer: columns the model does not take are dropped; training order is pure, results keep their rows."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, IterableDataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, default_data_collator
from transformers.trainer_utils import has_length, seed_worker

from tunesmith.encoder.params import inner_model
from tunesmith.errors import DataError
from tunesmith.tokens.batches import Padding
from tunesmith.tokens.token_rows import TOKEN_COLUMNS, TokenRows
from tunesmith.trainer.arguments import rows_per_rank
from tunesmith.trainer.content import is_arrow_dataset
from tunesmith.trainer.loaders import EpochBatches, RowBatches
from tunesmith.trainer.processes import SentRows, dealt_stream

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

log = logging.getLogger(__name__)


def default_collator(processing_class: Any) -> Any:
    """The collator of a Trainer that is given none: it pads where there is a tokenizer."""
    pads = isinstance(processing_class, PreTrainedTokenizerBase)
    return DataCollatorWithPadding(processing_class) if pads else default_data_collator


def train_sampler(trainer: Trainer, train_dataset: Any = None) -> Any:
    """Our batch sampler: micro-batches of this rank in the order of the epoch. A subclass may return any torch sampler."""
    args, dataset = trainer.args, trainer.train_dataset if train_dataset is None else train_dataset
    if dataset is None or not has_length(dataset):
        return None
    return EpochBatches(
        num_rows=len(dataset),
        batch_size=trainer._train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        seed=args.seed if args.data_seed is None else args.data_seed,
        sampling=args.train_sampling_strategy,
        lengths=_lengths_of(trainer, dataset) if args.train_sampling_strategy == "group_by_length" else None,
        drop_last=args.dataloader_drop_last,
        rank=trainer.runtime.rank,
        world=trainer.runtime.world,
        clock=trainer._clock,
    )


def eval_sampler(trainer: Trainer, eval_dataset: Any) -> Any:
    """Rows of this rank; longest first where padding is dynamic, so that short rows do not pay for long ones."""
    if eval_dataset is None or not has_length(eval_dataset):
        return None
    order, args = np.arange(len(eval_dataset)), trainer.args
    pads = isinstance(trainer.data_collator, DataCollatorWithPadding)
    # a mean of the user's own may depend on which rows share a batch
    own = trainer.overrides("compute_loss", "prediction_step", "evaluation_loop")
    own = own or trainer.compute_loss_func is not None
    if pads and args.eval_do_concat_batches and not args.batch_eval_metrics and not own:
        rows = token_rows_of(eval_dataset)
        order = order if rows is None else np.argsort(-rows.lengths, kind="stable")
    mine = order[trainer.runtime.rank :: trainer.runtime.world]
    size = rows_per_rank(args, args.eval_batch_size, trainer.runtime.world)
    return RowBatches(mine, size, args.dataloader_drop_last)


def _lengths_of(trainer: Trainer, dataset: Any) -> npt.NDArray[np.int64]:
    """The number of tokens in each row: from a length column, from Arrow, or by looking at every row."""
    column = trainer.args.length_column_name
    if column in (getattr(dataset, "column_names", None) or ()):
        return np.asarray(dataset[column], dtype=np.int64)
    if (rows := token_rows_of(dataset)) is not None:
        return rows.lengths.astype(np.int64)
    name = (getattr(trainer.processing_class, "model_input_names", None) or ["input_ids"])[0]
    first = dataset[0]
    if not isinstance(first, Mapping) or name not in first:
        raise DataError(
            f"group_by_length needs {name!r} or {column!r} in every row", fix="Use train_sampling_strategy='random'."
        )
    return np.array([len(dataset[i][name]) for i in range(len(dataset))], dtype=np.int64)


def make_dataloader(
    trainer: Trainer,
    dataset: Any,
    description: str,
    batch_size: int,
    sampler_fn: Callable[[Any], Any] | None = None,
    is_training: bool = False,
    dataloader_key: str | None = None,
) -> Any:
    """A DataLoader with the collator and the sampler that belong to it."""
    args, runtime = trainer.args, trainer.runtime
    if not is_training:
        batch_size = rows_per_rank(args, batch_size, runtime.world)
    if is_arrow_dataset(dataset):
        dataset, collator = trainer._remove_unused_columns(dataset, description), trainer.data_collator
    else:
        collator = trainer._get_collator_with_removed_columns(trainer.data_collator, description)
    pinned = args.dataloader_pin_memory and runtime.device.type != "cpu"
    options: dict[str, Any] = {"collate_fn": collator, "pin_memory": pinned}
    streamed = isinstance(dataset, IterableDataset)
    if streamed:
        dataset = dealt_stream(dataset, batch_size, args, runtime)
    if not isinstance(dataset, SentRows):  # whose rows come over the process group, which workers are not part of
        names = ("num_workers", "persistent_workers", "multiprocessing_context", "prefetch_factor", "in_order")
        options |= {name: getattr(args, f"dataloader_{name}") for name in names}
        options["timeout"] = trainer.worker_timeout if args.dataloader_num_workers else 0
    sampler = None if streamed or sampler_fn is None else sampler_fn(dataset)
    if isinstance(sampler, (EpochBatches, RowBatches)):
        options["batch_sampler"] = sampler
    else:
        options |= {"sampler": sampler, "batch_size": batch_size, "drop_last": args.dataloader_drop_last}
    if is_training and not streamed:
        options["worker_init_fn"] = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=runtime.rank)
    loader: Any = DataLoader(dataset, **options)
    loader.total_batch_size = batch_size * runtime.world  # as accelerate's have it
    if dataloader_key is not None and args.dataloader_persistent_workers:
        trainer._eval_dataloaders[dataloader_key] = loader  # where `get_eval_dataloader` looks
    return loader


def set_signature_columns(trainer: Trainer) -> None:
    """What the model's forward takes, and the names that labels go by."""
    if trainer._signature_columns is None:
        names = list(inspect.signature(inner_model(trainer.model).forward).parameters)
        labels = {"label", "label_ids", *trainer.label_names}
        trainer._signature_columns = [*names, *sorted(labels - set(names))]


def without_unused(trainer: Trainer, dataset: Any, description: str | None = None) -> Any:
    """The dataset without the columns that the model's forward does not take."""
    if not trainer.args.remove_unused_columns:
        return dataset
    trainer._set_signature_columns_if_needed()
    names = trainer._signature_columns or []
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


def fast_rows(trainer: Trainer, loader: Any) -> tuple[TokenRows | None, Padding | None]:
    """Rows and padding that make the batches the DataLoader would make, read straight from Arrow; else (None, None)."""
    own = trainer.overrides("get_train_dataloader", "_get_train_sampler", "_get_dataloader", "_prepare_inputs")
    if own or trainer.args.dataloader_num_workers or not isinstance(loader.batch_sampler, EpochBatches):
        return None, None
    padding = collator_padding(trainer.data_collator)
    rows = token_rows_of(loader.dataset) if padding is not None else None
    if rows is None or not _same_columns(loader.dataset, trainer._signature_columns, rows):
        return None, None
    return rows, padding


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
    if rows.labels is None or not len(rows) or (signature is not None and not set(rows.columns) <= set(signature)):
        return False
    known = {*TOKEN_COLUMNS, "attention_mask", "label", "labels"}
    shown = getattr(dataset, "format", {}).get("columns") or dataset.column_names
    if not {"input_ids", "attention_mask", *rows.columns} <= set(shown) <= known:
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
