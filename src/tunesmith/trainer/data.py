"""DataLoaders of a Trainer and the samplers behind them: columns the model does not take are dropped, the order of training is
pure, results keep their rows, several ranks share a stream."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import DataLoader, IterableDataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase, default_data_collator
from transformers.trainer_pt_utils import IterableDatasetShard
from transformers.trainer_utils import has_length, seed_worker

from tunesmith.data.batches import Padding
from tunesmith.data.tokens import Sampling, TokenRows, epoch_order
from tunesmith.errors import DataError
from tunesmith.models.families import inner_model
from tunesmith.trainer.arguments import rows_per_rank
from tunesmith.trainer.content import collator_padding, holds_token_rows, is_arrow_dataset, token_rows_of
from tunesmith.training.distributed import Runtime

if TYPE_CHECKING:
    from tunesmith.trainer.facade import Trainer

Indices = npt.NDArray[np.int64]
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
    """Rows of this rank; the longest first where padding is dynamic, so that short rows are padded little."""
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
    streamed, drop_last = isinstance(dataset, IterableDataset), args.dataloader_drop_last
    if streamed and runtime.world > 1 and args.accelerator_config.dispatch_batches:
        dataset = SentRows(dataset, batch_size, drop_last, runtime)
    elif streamed and runtime.world > 1:
        dataset = IterableDatasetShard(dataset, batch_size, drop_last, runtime.world, runtime.rank)
    if not isinstance(dataset, SentRows):  # whose rows come over the process group, which workers are not part of
        names = ("num_workers", "persistent_workers", "multiprocessing_context", "prefetch_factor", "in_order")
        given = {
            name: f"dataloader_{name}" for name in names if hasattr(args, f"dataloader_{name}")
        }  # transformers 5.5 lacks one
        options |= {name: getattr(args, field) for name, field in given.items()}
        options["timeout"] = trainer.worker_timeout if args.dataloader_num_workers else 0
    sampler = None if streamed or sampler_fn is None else sampler_fn(dataset)
    if isinstance(sampler, (EpochBatches, RowBatches)):
        options["batch_sampler"] = sampler
    else:
        options |= {"sampler": sampler, "batch_size": batch_size, "drop_last": drop_last}
    if is_training and not streamed:
        options["worker_init_fn"] = partial(seed_worker, num_workers=args.dataloader_num_workers, rank=runtime.rank)
    loader: Any = DataLoader(dataset, **options)
    loader.total_batch_size = batch_size * runtime.world  # as accelerate's have it
    if dataloader_key is not None and args.dataloader_persistent_workers:
        trainer._eval_dataloaders[dataloader_key] = loader  # where `get_eval_dataloader` looks
    return loader


def set_signature_columns(trainer: Trainer) -> None:
    """The arguments of the model's forward, and the names of labels."""
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
    if rows is None or not holds_token_rows(loader.dataset, trainer._signature_columns, rows):
        return None, None
    return rows, padding


@dataclass
class EpochClock:
    """The epoch under way: loaders that a user wrapped in something else still follow it."""

    epoch: int = 0


@dataclass(eq=False, kw_only=True)
class EpochBatches:
    """A batch sampler whose order is a pure function of (seed, epoch): row numbers of each micro-batch of this rank."""

    num_rows: int
    batch_size: int
    accumulation: int
    seed: int
    sampling: Sampling
    lengths: npt.NDArray[Any] | None
    drop_last: bool
    rank: int
    world: int
    clock: EpochClock = field(default_factory=EpochClock)
    _skip: int = 0

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """The next iteration yields this epoch from window number `skip` on."""
        self.clock.epoch, self._skip = epoch, skip

    def __len__(self) -> int:
        size = self.batch_size * self.world
        return self.num_rows // size if self.drop_last else -(-self.num_rows // size)

    def __iter__(self) -> Iterator[list[int]]:
        for pieces, _, _ in self.windows():
            for piece in pieces:
                yield piece.tolist()

    def windows(self) -> Iterator[tuple[list[Indices], Indices, bool]]:
        """(this rank's micro-batches, all ranks' rows, whether this rank's share counts nothing) of each step."""
        step = self.batch_size * self.accumulation * self.world
        order = epoch_order(
            self.num_rows,
            seed=self.seed,
            epoch=self.clock.epoch,
            rows_per_step=step,
            sampling=self.sampling,
            lengths=self.lengths,
        ).rows
        if self.drop_last:
            # transformers drops the ragged micro-batch, not the whole window
            order = order[: len(self) * self.batch_size * self.world]
        skip, self._skip = self._skip, 0
        for start in range(skip * step, len(order), step):
            rows = order[start : start + step]
            mine = rows[self.rank :: self.world]
            idle = len(mine) == 0
            mine = rows[:1] if idle else mine
            yield [mine[i : i + self.batch_size] for i in range(0, len(mine), self.batch_size)], rows, idle


class RowBatches:
    """A batch sampler for evaluation: rows in order, or longest first; `rows` says where each result belongs."""

    def __init__(self, order: Indices, batch_size: int, drop_last: bool = False) -> None:
        self.rows, self.batch_size, self.drop_last = order, batch_size, drop_last

    def __len__(self) -> int:
        size = self.batch_size
        return len(self.rows) // size if self.drop_last else -(-len(self.rows) // size)

    def __iter__(self) -> Iterator[list[int]]:
        for index in range(len(self)):
            yield self.rows[index * self.batch_size : (index + 1) * self.batch_size].tolist()


class RecordedBatches:
    """A batch sampler of the user that records the rows it yields."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.sampler:
            self.seen.extend(int(i) for i in batch)
            yield list(batch)


class SentRows(IterableDataset[Any]):
    """A stream that rank 0 alone reads: `dispatch_batches`. The rows of each rank are those of IterableDatasetShard."""

    def __init__(self, stream: Any, batch_size: int, drop_last: bool, runtime: Runtime) -> None:
        self.dataset, self.batch_size, self.drop_last, self.runtime = stream, batch_size, drop_last, runtime

    def __len__(self) -> int:
        size = self.batch_size * self.runtime.world
        return (len(self.dataset) // size if self.drop_last else -(-len(self.dataset) // size)) * self.batch_size

    def set_epoch(self, epoch: int) -> None:
        """Passes the epoch on to the stream."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        size = self.batch_size * self.runtime.world
        rows = iter(self.dataset) if self.runtime.is_main else iter(())
        mine = slice(self.runtime.rank * self.batch_size, (self.runtime.rank + 1) * self.batch_size)
        first: list[Any] = []
        while True:
            read = list(islice(rows, size))
            chunk: list[Any] = self.runtime.gather_objects(read)[0]
            first = first or chunk
            last = len(chunk) < size
            if not chunk or (last and self.drop_last):
                return
            while len(chunk) < size:  # as in transformers: completed from the beginning
                chunk = (chunk + first)[:size]
            yield from chunk[mine]
            if last:
                return
