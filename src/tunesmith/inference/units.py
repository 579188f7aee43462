"""Input files cut into units of work: row groups of parquet, runs of rows of text files. The cut depends on the files alone."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from tunesmith.data.row_blocks import column_blocks, fixed_runs, kind_of_rows
from tunesmith.errors import DataError, ResourceError
from tunesmith.inference.places import file_system, is_remote

UNIT_ROWS = 20_000
"""Rows of one unit, at the most."""


@dataclass(frozen=True)
class InputFile:
    """One file: `name` is its path below the folder that all inputs share, without the suffixes."""

    path: str
    name: str
    kind: str
    gzipped: bool
    fs: Any = None
    """The fsspec file system that has it; None for a file on this machine."""

    def open(self) -> Any:
        """The file, to be read."""
        return open(self.path, "rb") if self.fs is None else self.fs.open(self.path, "rb")

    def stamp(self) -> list[Any]:
        """Equal for a file that has not changed: where it is, its size, its time or tag."""
        if self.fs is None:
            found = os.stat(self.path)
            return [os.path.realpath(self.path), found.st_size, found.st_mtime_ns]
        about = self.fs.info(self.path)
        tag = next((about[key] for key in _TAGS if about.get(key) is not None), None)
        return [self.fs.unstrip_protocol(self.path), about["size"], str(tag)]


_TAGS = ("ETag", "etag", "generation", "md5Hash", "mtime", "created", "last_modified", "LastModified")


@dataclass(frozen=True)
class Unit:
    """Rows that are predicted and written together. `load` reads them; units are made without reading where that is possible."""

    name: str
    load: Callable[[], Any]
    """Columns as a dict of lists, or a pyarrow table."""


def find_inputs(pattern: str) -> list[InputFile]:
    """The files of a glob pattern, a folder or a single path (or URL of fsspec), in order of their names."""
    fs, files = (None, _local_files(pattern)) if not is_remote(pattern) else _remote_files(pattern)
    if not files:
        fix = "Quote the pattern, so that the shell leaves it as it is."
        raise DataError("no file matches", where=pattern, fix=fix)
    root = os.path.commonpath([os.path.dirname(file) for file in files])
    inputs = [
        InputFile(file, _stem(Path(os.path.relpath(file, root))), *kind_of_rows(Path(file)), fs) for file in files
    ]
    names = Counter(one.name for one in inputs)
    clash = [one.path for one in inputs if names[one.name] > 1]
    if clash:
        fix = "Rename one, or give two commands."
        raise DataError(f"{' and '.join(clash[:2])} would have the same output", fix=fix)
    return inputs


def _local_files(pattern: str) -> list[str]:
    found = sorted(glob.glob(pattern, recursive=True))
    return [
        inner
        for path in found
        for inner in (sorted(glob.glob(os.path.join(glob.escape(path), "*"))) if os.path.isdir(path) else [path])
        if os.path.isfile(inner)
    ]


def _remote_files(pattern: str) -> tuple[Any, list[str]]:
    fs, path = file_system(pattern)
    try:
        found = fs.glob(path) if any(c in path for c in "*?[") else fs.find(path, maxdepth=1)
    except OSError as error:
        raise ResourceError(f"cannot be listed ({error})", where=pattern) from None
    return fs, sorted(str(one) for one in found if fs.isfile(one))


def _stem(path: Path) -> str:
    bare = path.with_suffix("") if path.suffix == ".gz" else path
    return bare.with_suffix("").as_posix()


def units_of(file: InputFile, **reading: Any) -> Iterator[Unit]:
    """The units of a file in order."""
    if file.kind == "parquet":
        yield from _row_groups(file)
        return
    blocks = column_blocks(
        Path(file.path), kind=file.kind, gzipped=file.gzipped, open_file=file.open if file.fs else None, **reading
    )
    for number, columns in enumerate(fixed_runs(blocks, UNIT_ROWS)):
        yield Unit(f"{file.name}-{number:05d}", columns.copy)


def _row_groups(file: InputFile) -> Iterator[Unit]:
    """A unit for each row group, several for one of more than `UNIT_ROWS` rows: pandas writes a million in one group."""
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise ResourceError("parquet needs pyarrow", where=file.path, fix="Run: pip install pyarrow") from None
    try:
        with file.open() as opened, pq.ParquetFile(opened) as table:
            sizes = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
    except (OSError, ValueError) as error:
        raise DataError(f"is not a parquet file ({error})", where=file.path) from None

    @lru_cache(maxsize=1)
    def read_group(group: int) -> Any:
        with file.open() as opened, pq.ParquetFile(opened) as table:
            return table.read_row_group(group)

    def load(group: int, start: int) -> Any:
        return read_group(group).slice(start, UNIT_ROWS)

    places = [(group, start) for group, size in enumerate(sizes) for start in range(0, size, UNIT_ROWS)]
    for number, (group, start) in enumerate(places):
        yield Unit(f"{file.name}-{number:05d}", partial(load, group, start))
