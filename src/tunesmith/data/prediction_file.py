"""predictions.parquet read back as plain columns, without `datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tunesmith.errors import DataError


def read_prediction_columns(path: str | Path) -> dict[str, list[Any]]:
    """Column name -> values in row order; empty when the file is absent. Damage is a DataError."""
    if not Path(path).is_file():
        return {}
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, memory_map=True)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"is not a parquet file ({error})", where=str(path), fix="Run `tunesmith predict` again."
        ) from None
    return {str(name): table.column(name).to_pylist() for name in table.column_names}
