"""Input files cut into units of work: row groups of parquet, runs of rows of text files. The cut depends on the files alone."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.errors import DataError, ResourceError
from tunesmith.reading.row_blocks import column_blocks, kind_of_rows

UNIT_ROWS = 20_000
"""Rows of one unit of a text file."""


@dataclass(frozen=True)
class InputFile:
    """One file: `name` is its path below the folder that all inputs share, without the suffixes."""

    path: Path
    name: str
    kind: str
    gzipped: bool


@dataclass(frozen=True)
class Unit:
    """Rows that are predicted and written together. `load` reads them; units are made without reading where that is possible."""

    name: str
    load: Callable[[], Any]
    """Columns as a dict of lists, or a pyarrow table."""


def find_inputs(pattern: str) -> list[InputFile]:
    """The files of a glob pattern, a folder or a single path, in order of their names."""
    found = sorted(glob.glob(pattern, recursive=True))
    files = [
        Path(inner)
        for path in found
        for inner in (sorted(glob.glob(os.path.join(glob.escape(path), "*"))) if os.path.isdir(path) else [path])
        if os.path.isfile(inner)
    ]
    if not files:
        raise DataError(
            "no file matches", where=pattern, fix="Quote the pattern, so that the shell leaves it as it is."
        )
    root = Path(os.path.commonpath([file.parent for file in files]))
    inputs = [InputFile(file, _stem(file.relative_to(root)), *kind_of_rows(file)) for file in files]
    names = [one.name for one in inputs]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        clash = [str(one.path) for one in inputs if one.name == twice]
        raise DataError(
            f"{' and '.join(clash[:2])} would have the same output", fix="Rename one, or give two commands."
        )
    return inputs


def _stem(path: Path) -> str:
    bare = path.with_suffix("") if path.suffix == ".gz" else path
    return bare.with_suffix("").as_posix()


def units_of(file: InputFile, **reading: Any) -> Iterator[Unit]:
    """The units of a file in order."""
    if file.kind == "parquet":
        yield from _row_groups(file)
        return
    blocks = column_blocks(file.path, kind=file.kind, gzipped=file.gzipped, **reading)
    for number, columns in enumerate(_fixed_runs(blocks, UNIT_ROWS)):
        yield Unit(f"{file.name}-{number:05d}", lambda columns=columns: columns)  # type: ignore[misc]


def _row_groups(file: InputFile) -> Iterator[Unit]:
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise ResourceError("parquet needs pyarrow", where=str(file.path), fix="Run: pip install pyarrow") from None
    try:
        groups = pq.ParquetFile(file.path).num_row_groups
    except (OSError, ValueError) as error:
        raise DataError(f"is not a parquet file ({error})", where=str(file.path)) from None
    for number in range(groups):
        yield Unit(
            f"{file.name}-{number:05d}",
            lambda number=number: pq.ParquetFile(file.path).read_row_group(number),  # type: ignore[misc]
        )


def _fixed_runs(blocks: Iterator[dict[str, list[Any]]], size: int) -> Iterator[dict[str, list[Any]]]:
    """The same rows in runs of `size`, however the reader cut them."""
    held: dict[str, list[Any]] = {}
    rows = 0
    for block in blocks:
        count = len(next(iter(block.values()), []))
        for name in {**held, **block}:
            held.setdefault(name, [None] * rows).extend(block.get(name, [None] * count))
        rows += count
        while rows >= size:
            yield {name: values[:size] for name, values in held.items()}
            held = {name: values[size:] for name, values in held.items()}
            rows -= size
    if rows:
        yield held
