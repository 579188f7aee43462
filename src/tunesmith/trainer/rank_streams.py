"""Streams over several ranks: each reads the whole stream and takes its rows, or rank 0 reads it and sends them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from tunesmith.ranks.runtime import Runtime
from tunesmith.trainer.upstream import parts


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


def dealt_stream(stream: Any, batch_size: int, args: Any, runtime: Runtime) -> Any:
    """This rank's rows of a stream."""
    if runtime.world == 1:
        return stream
    if args.accelerator_config.dispatch_batches:
        return SentRows(stream, batch_size, args.dataloader_drop_last, runtime)
    return parts.IterableDatasetShard(stream, batch_size, args.dataloader_drop_last, runtime.world, runtime.rank)


def rows_behind(loader: Any, batch_size: int) -> int:
    """Rows of a loader's dataset over all ranks; estimated from its batches where the dataset has no length."""
    try:
        dataset = loader.dataset
        return len(dataset.dataset) if isinstance(dataset, parts.IterableDatasetShard) else len(dataset)
    except (AttributeError, TypeError):
        return len(loader) * batch_size
