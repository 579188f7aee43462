"""predictions.parquet read back as plain columns, without `datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

from tunesmith.errors import CheckpointError, short_text
from tunesmith.files import BadFile, open_plain

MAX_CELLS, MAX_BYTES = 50_000_000, 1_000_000_000
"""A run keeps at most 200,000 rows of each split."""


def read_prediction_columns(path: str | Path) -> dict[str, list[Any]]:
    """Column name -> values in row order; empty when the file is absent. Damage is a CheckpointError."""
    try:
        with open_plain(path, follow=True) as file:
            return _read(file)
    except FileNotFoundError:
        return {}
    except BadFile as error:
        raise CheckpointError(str(error), where=str(path), fix="Run `tunesmith predict` again.") from None


def _read(file: BinaryIO) -> dict[str, list[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        found = pq.ParquetFile(file)
        cells = found.metadata.num_rows * found.metadata.num_columns
        size = sum(found.metadata.row_group(k).total_byte_size for k in range(found.metadata.num_row_groups))
        if cells > MAX_CELLS or size > MAX_BYTES:
            raise BadFile(f"has {cells:,} cells and {size:,} bytes, more than a run writes")
        table = found.read()
        if len(set(table.column_names)) < len(table.column_names):
            raise BadFile("has two columns of one name")
        return {str(name): table.column(name).to_pylist() for name in table.column_names}
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise error if isinstance(error, BadFile) else BadFile(f"is not a parquet file ({short_text(error)})") from None
