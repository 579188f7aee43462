"""Tables that are not text files: objects in memory, Parquet and Arrow files, and spreadsheets."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tunesmith.data.labels import is_list_type
from tunesmith.data.rows import LINE_COLUMN, Source, binary_errors, cell_text
from tunesmith.data.text_files import check_growth, check_header
from tunesmith.errors import DataError, did_you_mean, short_text

if TYPE_CHECKING:
    from datasets import Dataset


TEXT, PAIR, LABEL = "text", "text_pair", "label"
"""Return names for columns without names."""
EXPECTED = "a list of texts, a list of pairs, a Series, an array, or a DataFrame with text columns"


def text_columns_of(texts: Any) -> dict[str, list[Any]]:
    """Return the text columns by name. A single text is refused with what was expected.

    One or two columns must not have numbers and missing values; of three or more, each cell is rendered.
    """
    if isinstance(texts, (str, bytes)):
        raise TypeError(f"got one text, expected {EXPECTED}: put it into a list")
    if texts is None or hasattr(texts, "tocsr") or not (hasattr(texts, "__len__") or hasattr(texts, "__iter__")):
        raise TypeError(f"got {type(texts).__name__}, expected {EXPECTED}")
    if hasattr(texts, "columns") and hasattr(texts, "to_dict"):
        names = [str(name) for name in texts.columns]
        columns = [_plain_list(texts[name]) for name in texts.columns]
    elif isinstance(texts, Mapping):
        names = [str(name) for name in texts]
        columns = [_plain_list(values) for values in texts.values()]
    else:
        columns = _unnamed(texts)
        names = [TEXT, PAIR][: len(columns)]
    if len(names) != len(columns) or not columns:
        raise ValueError(f"got {len(columns)} columns ({', '.join(names[:6])}), expected {EXPECTED}")
    for name, values in zip(names, columns, strict=True) if len(columns) <= 2 else ():
        _require_texts(name, values)
    return dict(zip(names, columns, strict=True))


def refuse_labels_as_text(columns: Mapping[str, Sequence[Any]], labels: Sequence[Any]) -> None:
    """Refuse a text column that equals the labels: the model would read the answer."""
    target = [str(value) for value in labels]
    for name, cells in columns.items():
        if len(target) > 1 and list(map(str, cells)) == target:
            fix = f"Pass the texts without the column {name!r}."
            raise DataError(f"the text column {name!r} equals the labels", fix=fix)


def labeled_table(texts: Any, labels: Any) -> Any:
    """Return a table with the text columns and the column "label", for `read_source`."""
    columns: dict[str, Any] = dict(text_columns_of(texts))
    values = _plain_list(labels)
    rows = len(next(iter(columns.values())))
    if len(values) != rows:
        raise DataError(f"{rows:,} texts and {len(values):,} labels", fix="Pass one label per text.")
    refuse_labels_as_text(columns, values)
    name = LABEL if LABEL not in columns else "the_label"
    return columns_table({**columns, name: values})


def columns_table(columns: Mapping[str, Any]) -> Any:
    """Return a dict of lists, Series or arrays of equal length as a Dataset."""
    import pyarrow as pa
    from datasets import Dataset

    plain = {str(name): _plain_list(values) for name, values in columns.items()}
    lengths = {name: len(values) for name, values in plain.items()}
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name} {length:,}" for name, length in lengths.items())
        raise DataError(f"columns of different lengths: {shown}", fix="Pass one value per row in every column.")
    try:
        return Dataset(pa.table({name: pa.array(values, from_pandas=True) for name, values in plain.items()}))
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        raise DataError(f"a column mixes kinds of values ({error})", fix="Use one kind of value per column.") from None


def _unnamed(texts: Any) -> list[list[Any]]:
    shape = getattr(texts, "shape", None)
    if shape is not None and len(shape) == 2:
        array = np.asarray(texts)
        return [array[:, k].tolist() for k in range(array.shape[1])]
    values = _plain_list(texts)
    pairs = [v for v in values if isinstance(v, (list, tuple, np.ndarray))]
    if not pairs:
        return [values]
    if len(pairs) != len(values) or any(len(p) != len(pairs[0]) for p in pairs):
        raise ValueError(f"single texts and pairs are mixed, expected {EXPECTED}")
    return [list(column) for column in zip(*pairs, strict=True)]


def _plain_list(values: Any) -> list[Any]:
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        raise DataError(f"a column is {type(values).__name__}", fix="Pass a list of values for each column.")
    found = values.tolist() if hasattr(values, "tolist") else list(values)
    return found if isinstance(found, list) else [found]


def _require_texts(name: str, values: Sequence[Any]) -> None:
    for at, value in enumerate(values):
        if not isinstance(value, str):
            kind = "a missing value" if value is None or value != value else f"{type(value).__name__} ({value!r:.40})"
            error = ValueError if value is None or value != value else TypeError
            raise error(f"row {at} of {name!r} contains {kind}, expected text: {EXPECTED}")


def read_memory(source: Any, name: str) -> Source:
    """Read a Dataset, DataFrame, dict of lists or list of dicts."""
    import datasets

    if isinstance(source, datasets.DatasetDict):
        if name not in source:
            problem = f"the DatasetDict contains {', '.join(source)}, none is {name!r}"
            raise DataError(problem, where=name, fix="Pass one of its splits.")
        source = source[name]
    if isinstance(source, datasets.Dataset):
        return Source(name, source, name)
    if isinstance(source, list | tuple) and (not source or isinstance(source[0], dict)):
        return _from_list(source, name)
    if hasattr(source, "to_dict") and hasattr(source, "columns"):
        return Source(name, _from_frame(source, name), name)
    if isinstance(source, Mapping):
        return Source(name, columns_table(source), name)
    fix = "Pass a path, a Dataset, a DataFrame, a dict of lists or a list of dicts."
    raise DataError(f"rows cannot be read from {type(source).__name__}", where=name, fix=fix)


def _from_frame(frame: Any, name: str) -> Dataset:
    import pyarrow as pa
    from datasets import Dataset

    if not hasattr(frame, "to_arrow") and not frame.columns.is_unique:
        twice = frame.columns[frame.columns.duplicated()][0]
        raise DataError(f"the DataFrame has the column {twice!r} twice", fix="Rename one of them.")
    try:
        polars = hasattr(frame, "to_arrow")
        table = frame.to_arrow() if polars else pa.Table.from_pandas(frame, preserve_index=False)
        table = table.replace_schema_metadata(None).combine_chunks()
        return Dataset(pa.Table.from_batches(plain_batches(table.to_batches(), name)) if len(frame) else table)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        if isinstance(error, DataError):
            raise
        fix = "Use one kind of value per column: text, numbers, true/false, dates or lists of these."
        raise DataError(f"the DataFrame cannot be read ({short_text(error)})", where=name, fix=fix) from None


def _from_list(rows: Any, name: str) -> Source:
    from datasets import Dataset

    from tunesmith.data.json_files import convert_export, merge_responses, records_table

    for i, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise DataError(f"{type(row).__name__}, expected a dict", where=f"{name}:{i}", fix="Pass a list of dicts.")
    _, records = convert_export(enumerate(rows, start=1))
    return Source(name, Dataset(merge_responses(records_table(records, name, lines=False))), name)


def parquet_batches(path: Path, origin: str) -> Iterator[Any]:
    """Yield the record batches of a Parquet file, with the schema metadata."""
    import pyarrow.parquet as pq

    with binary_errors("Parquet", origin):
        schema = pq.read_schema(path)
        # Kept as dictionaries until their size is known: one repeated text of a few hundred KB could fill the memory.
        # pyarrow can't do that with differences of texts (DELTA_BYTE_ARRAY): these are read a few rows at a time.
        found = pq.read_metadata(path)
        groups = map(found.row_group, range(found.num_row_groups))
        chunks = [group.column(k) for group in groups for k in range(group.num_columns)]
        texts = {chunk.path_in_schema for chunk in chunks if chunk.physical_type == "BYTE_ARRAY"}
        delta = {chunk.path_in_schema for chunk in chunks if any("BYTE_ARRAY" in name for name in chunk.encodings)}
        rows = 256 if delta else 16_384
        with pq.ParquetFile(path, read_dictionary=sorted(texts - delta)) as file:
            size = sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            check_growth(size, path.stat().st_size, origin)
            batches = (b.replace_schema_metadata(schema.metadata) for b in file.iter_batches(batch_size=rows))
            yield from plain_batches(batches, origin, path.stat().st_size)


def arrow_batches(path: Path, origin: str) -> Iterator[Any]:
    """Yield the record batches of an Arrow IPC file or stream; a hostile offset must not reach compute code."""
    import pyarrow as pa

    with binary_errors("Arrow", origin), pa.OSFile(str(path), "rb") as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        if is_file:
            reader = pa.ipc.open_file(file)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        else:
            _check_stream_end(path, origin)
            batches = iter(pa.ipc.open_stream(file))
        yield from plain_batches(batches, origin, path.stat().st_size)


def plain_batches(batches: Iterable[Any], origin: str, size: int | None = None) -> Iterator[Any]:
    """Yield validated batches in plain columns: `outer.inner` for fields of structs, values instead of dictionaries, and text for
    bytes that are UTF-8 in the first batch. Decoded dictionaries may not grow far beyond the `size` of a file.
    """
    import pyarrow as pa

    types: list[Any] = []
    decoded = 0
    for batch in batches:
        batch.validate(full=True)
        while any(pa.types.is_struct(f.type) for f in batch.schema):
            flat = pa.Table.from_batches([batch]).flatten().replace_schema_metadata(None).combine_chunks()
            batch = flat.to_batches()[0] if flat.num_rows else pa.RecordBatch.from_pylist([], flat.schema)
        if size is not None:
            decoded += sum(_decoded_bytes(column) or column.nbytes for column in batch.columns)
            check_growth(decoded, size, origin)
        types = types or [_plain_type(array) for array in batch.columns]
        arrays = []
        for field, array, kind in zip(batch.schema, batch.columns, types, strict=True):
            try:
                arrays.append(array if array.type == kind else array.cast(kind))
            except pa.ArrowInvalid:
                problem = f"column {field.name!r} contains bytes that are not UTF-8 text"
                raise DataError(problem, where=origin, fix="Write its texts as UTF-8.") from None
        fields = [field.with_type(kind) for field, kind in zip(batch.schema, types, strict=True)]
        yield pa.record_batch(arrays, schema=pa.schema(fields, metadata=batch.schema.metadata))


def _decoded_bytes(array: Any) -> int:
    """Return the size of a dictionary array as plain values, also inside lists; 0 for other arrays."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if is_list_type(array.type):
        return _decoded_bytes(array.flatten())
    if not pa.types.is_dictionary(array.type):
        return 0
    values = array.dictionary
    if not (pa.types.is_string(values.type) or pa.types.is_binary(values.type) or "large" in str(values.type)):
        return 0
    lengths = pc.binary_length(values).cast(pa.int64())
    return pc.sum(lengths.take(array.indices)).as_py() or 0


def _plain_type(array: Any) -> Any:
    import pyarrow as pa

    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    if is_list_type(kind) and pa.types.is_dictionary(kind.value_type):
        return pa.list_(kind.value_type.value_type)
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        with suppress(pa.ArrowInvalid):
            if array.cast(kind).cast(pa.large_string()).null_count < len(array):
                return pa.large_string() if pa.types.is_large_binary(kind) else pa.string()
    return kind


def _check_stream_end(path: Path, origin: str) -> None:
    # A stream that is truncated between two batches looks complete. Writers end it with a mark and a length of zero.
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 8))
        if file.read() != b"\xff\xff\xff\xff\0\0\0\0":
            raise DataError("the Arrow stream is truncated: no end mark", where=origin, fix="Write the file again.")


SHEET_ROWS = 10_000
MOST_MEMORY = 4 << 30
MOST_SECONDS = 120
MOST_ZIP_BYTES = 2 << 30
_READER = "import sys; sys.path.append(sys.argv[1]); from tunesmith.data.tables import work; work()"
_SAVE = "Open and save it again, or save the sheet as CSV."


def sheet_batches(path: Path, *, origin: str, sheet: str | None, facts: dict[str, Any]) -> Iterator[Any]:
    """Yield record batches of strings plus the row numbers of the sheet; the first row contains the column names.

    `facts` receives the name of the sheet, and the other sheets, which are not read.
    """
    import pyarrow as pa

    _refuse_bomb(path, origin)
    rows = _read_rows(path, origin, sheet, facts)
    first, header = next(rows, (0, []))
    if not header:
        raise DataError("no sheet has rows", where=origin, fix="It needs a header and at least one row.")
    names = check_header(header, origin)
    while some := list(islice(rows, SHEET_ROWS)):
        for number, cells in some:
            if len(cells) > len(names):
                problem = f"{len(cells)} cells, expected {len(names)}"
                fix = f"Delete the cells outside of the table, or name every column in row {first}."
                raise DataError(problem, where=f"{origin}:{number}", fix=fix)
        full = [cells + [""] * (len(names) - len(cells)) for _, cells in some]
        columns = dict(zip(names, (pa.array(column, pa.string()) for column in zip(*full, strict=True)), strict=True))
        yield pa.record_batch({**columns, LINE_COLUMN: pa.array([n for n, _ in some], pa.int64())})


def _read_rows(path: Path, origin: str, asked: str | None, facts: dict[str, Any]) -> Iterator[tuple[int, list[str]]]:
    """Yield (row number, cells) of the one sheet with a table, or of the requested one, without empty rows.

    A separate process parses the file: on hostile cells the parser panics or allocates without limit.
    """
    command = [sys.executable, "-c", _READER, str(Path(__file__).resolve().parents[2]), str(path), asked or ""]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        try:
            head = json.loads(process.stdout.readline() or "{}")
            if "problem" in head:
                raise DataError(head["problem"], where=origin, fix=head["fix"])
            facts |= head
            for line in process.stdout:
                yield tuple(json.loads(line))
            if process.wait() != 0:
                problem = "cannot be read as a spreadsheet: the reader ran out of memory or time, or crashed"
                fix = "Delete cells far outside of the table, or save the sheet as CSV."
                raise DataError(problem, where=origin, fix=fix)
        finally:
            process.kill()


def work() -> None:
    """Run the reader process: print a problem, or the facts and then one line of JSON per row of the sheet."""
    with suppress(ImportError, OSError, ValueError):  # not on every system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    path, asked = sys.argv[2], sys.argv[3] or None
    try:
        import python_calamine as calamine
    except ImportError:
        fix = "pip install python-calamine, or save the sheet as CSV."
        _say({"problem": "reading spreadsheets needs the package python-calamine", "fix": fix})
        return
    try:
        book = calamine.load_workbook(path)
        sheets = {name: sheet for name in book.sheet_names if (sheet := book.get_sheet_by_name(name)).height}
        name = _choose_sheet({name: (sheet.width, sheet.height) for name, sheet in sheets.items()}, asked)
    except DataError as error:
        _say({"problem": error.problem, "fix": error.fix})
    except (calamine.CalamineError, OSError, ValueError) as error:
        _say({"problem": f"cannot be read as a spreadsheet ({short_text(error)})", "fix": _SAVE})
    else:
        _say({"sheet": name, "other_sheets": [repr(other) for other in list(sheets)[:7] if other != name]})
        for number, row in enumerate(sheets[name].iter_rows() if name is not None else (), start=1):
            cells = [cell_text(cell) for cell in row]
            while cells and not cells[-1]:
                cells.pop()
            if cells:
                _say([number, cells])


def _choose_sheet(sizes: Mapping[str, tuple[int, int]], asked: str | None) -> str | None:
    """Return the sheet to read, from (width, height) of the sheets with cells. If several are tables, an error asks which one."""
    if asked is not None and asked not in sizes:
        fix = did_you_mean(asked, list(sizes)) or f"Sheets with rows: {', '.join(map(repr, sizes))}."
        raise DataError(f"there is no sheet {asked!r} with rows", fix=fix)
    tables = sorted((n for n, (width, height) in sizes.items() if width > 1 and height > 1), key=lambda n: -sizes[n][1])
    if asked is None and len(tables) > 1:
        shown = ", ".join(f"{name!r} ({sizes[name][1] - 1:,} rows)" for name in tables[:8])
        raise DataError(f"which sheet? {shown}", fix=f"Set for example --sheet_name {shlex.quote(tables[0])}.")
    return asked if asked is not None else next(iter([*tables, *sizes]), None)


def _say(value: Any) -> None:
    sys.stdout.write(f"{json.dumps(value)}\n")


def _refuse_bomb(path: Path, origin: str) -> None:
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise DataError(f"cannot be read as a spreadsheet ({error})", where=origin, fix=_SAVE) from None
    check_growth(size, path.stat().st_size, origin, MOST_ZIP_BYTES)
