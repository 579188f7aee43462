"""Prediction of many files into a folder, resumable by the same command.

Every input file is split into parts (row groups of parquet, runs of rows of text files), and each part becomes one output file.
`job.json` describes the job, `parts.jsonl` lists finished parts with their sha256. A part that is listed and has the same hash
is not predicted again.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import Any

from tunesmith.config.options import READ_AS_USUAL, Reading
from tunesmith.data.rows import input_columns, render_rows
from tunesmith.data.text_files import column_blocks, fixed_runs, kind_of_rows, read_stdin
from tunesmith.errors import CheckpointError, DataError, ResourceError
from tunesmith.files import (
    TMP_PREFIX,
    BadFile,
    hash_file,
    known_hash,
    make_folder,
    open_in_place,
    parse_json,
    read_regular,
    user_files,
    write_file,
)
from tunesmith.inference.model_folder import model_folder_of
from tunesmith.inference.predictor import Predictor
from tunesmith.inference.tables import (
    answer_columns,
    check_cells,
    choose_column_names,
    fill_table,
    list_answers,
    probabilities_of,
)
from tunesmith.runs.folder import RunLock, remove_tree

JOB_FILE = "job.json"
PARTS_FILE = "parts.jsonl"
PART_ROWS = 20_000
"""Maximum number of rows in a part."""


@dataclass(frozen=True)
class InputFile:
    """One file. `name` is its path below the common folder of all inputs, without suffixes."""

    path: Path
    name: str
    kind: str
    gzipped: bool


Part = tuple[str, Callable[[], Any]]
"""The name of an output file, and a function that returns its rows: a dict of lists or a pyarrow table."""


@dataclass(frozen=True)
class BulkJob:
    """The files to predict, the settings, and the folder to write to."""

    inputs: list[InputFile]
    output: Path
    text: tuple[str, ...]
    top_k: int | None
    reading: Reading = READ_AS_USUAL
    bf16: bool = False


def run_job(job: BulkJob, predictor: Predictor, on_rows: Callable[[int], None] = lambda rows: None) -> int:
    """Predict all parts that are not finished yet; return the number of predicted rows."""
    make_folder(job.output)
    others = user_files(job.output)
    if others and not is_resumable(job.output):
        problem = f"contains other files ({', '.join(others[:3])})"
        raise DataError(problem, where=str(job.output), fix="Set --output to an empty folder.")
    with RunLock(job.output / ".lock"):
        finished = _open_job(job, predictor)
        for leftover in job.output.rglob(f"{TMP_PREFIX}*"):  # of a process that was killed
            remove_tree(leftover)
        rows = 0
        for file in job.inputs:
            for part, load in parts_of(file, job.reading):
                name = f"{part}.{file.kind}"
                output = job.output / name
                if output.is_file() and finished.get(name) == hash_file(output):
                    continue
                data, count = _predict_part(job, predictor, name, load())
                make_folder(output.parent)
                write_file(output, data)
                line = {"part": name, "rows": count, "sha256": hashlib.sha256(data).hexdigest()}
                with open(open_in_place(job.output / PARTS_FILE), "ab") as listing:
                    listing.write(json.dumps(line).encode() + b"\n")
                rows += count
                on_rows(count)
    return rows


def is_resumable(output: Path) -> bool:
    """Return whether the folder contains a bulk prediction job."""
    return (output / JOB_FILE).exists()


def _open_job(job: BulkJob, predictor: Predictor) -> dict[str, str]:
    """Write `job.json`, or check that it describes the same job; return the hash of each finished part."""
    described = json.loads(json.dumps(_describe_job(job, predictor)))
    if not is_resumable(job.output):
        write_file(job.output / JOB_FILE, json.dumps(described, indent=1).encode())
        return {}
    try:
        stored = parse_json(read_regular(job.output / JOB_FILE))
    except (OSError, BadFile) as error:
        raise CheckpointError(f"cannot be read ({error})", where=str(job.output / JOB_FILE)) from None
    known = stored if isinstance(stored, dict) else {}
    changed = [name for name in described if known.get(name) != described[name]]
    if changed:
        problem = f"the folder belongs to a different job: {', '.join(changed)} changed"
        raise CheckpointError(problem, where=str(job.output), fix="Set --output to another folder.")
    return _finished_parts(job.output / PARTS_FILE)


def _describe_job(job: BulkJob, predictor: Predictor) -> dict[str, Any]:
    folder = model_folder_of(predictor.folder).folder
    abstention = predictor.facts.labels.abstention
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.suffix != ".md")
    digest = hashlib.sha256("\n".join(f"{n} {known_hash(folder / n)}" for n in names).encode()).hexdigest()
    return {
        "format": 3,
        "model": digest,
        "inputs": [[os.path.realpath(file.path), known_hash(file.path)] for file in job.inputs],
        "text_columns": job.text,
        "top_k": job.top_k,
        "reading": asdict(job.reading),
        "bf16": job.bf16,
        "part_rows": PART_ROWS,
        "thresholds": None if abstention is None else [f"{value:.7g}" for value in abstention.thresholds],
    }


def _finished_parts(listing: Path) -> dict[str, str]:
    """Return name -> sha256. A damaged line counts as not written: its part is predicted again."""
    found = {}
    for line in read_regular(listing).splitlines() if listing.exists() else ():
        try:
            data = parse_json(line)
            found[str(data["part"])] = str(data["sha256"])
        except (BadFile, KeyError, TypeError):
            continue
    return found


def find_inputs(pattern: str) -> list[InputFile]:
    """Return the files of a glob pattern, a folder or a single path, sorted by name."""
    found = sorted(glob.glob(pattern, recursive=True))
    files = []
    for path in found:
        inner = [os.path.join(path, name) for name in user_files(Path(path))] if os.path.isdir(path) else [path]
        files += [file for file in inner if os.path.isfile(file)]
    if not files:
        raise DataError("no file matches", where=pattern, fix="Put the pattern in quotes so that the shell keeps it.")
    root = os.path.commonpath([os.path.dirname(os.path.abspath(file)) for file in files])
    inputs = []
    for file in map(Path, files):
        bare = file.with_suffix("") if file.suffix == ".gz" else file
        name = Path(os.path.relpath(bare, root)).with_suffix("").as_posix()
        inputs.append(InputFile(file, name, *kind_of_rows(file)))
    names = Counter(one.name for one in inputs)
    clash = [str(one.path) for one in inputs if names[one.name] > 1]
    if clash:
        fix = "Rename one of them, or run two commands."
        raise DataError(f"{' and '.join(clash[:2])} would have the same output", fix=fix)
    return inputs


def parts_of(file: InputFile, reading: Reading = READ_AS_USUAL) -> Iterator[Part]:
    """Split a file into parts, in order. The split only depends on the file."""
    if file.kind == "parquet":
        yield from _row_groups(file)
        return
    blocks = column_blocks(file.path, file.kind, reading, gzipped=file.gzipped)
    for number, columns in enumerate(fixed_runs(blocks, PART_ROWS)):
        yield f"{file.name}-{number:05d}", columns.copy


def _row_groups(file: InputFile) -> Iterator[Part]:
    """One part per row group, or several if it has more than PART_ROWS rows: pandas writes a million per group."""
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise ResourceError("parquet needs pyarrow", where=str(file.path), fix="Run: pip install pyarrow") from None
    try:
        with pq.ParquetFile(file.path) as table:
            sizes = [table.metadata.row_group(i).num_rows for i in range(table.num_row_groups)]
    except (OSError, ValueError) as error:
        raise DataError(f"is not a parquet file ({error})", where=str(file.path)) from None

    @lru_cache(maxsize=1)
    def read_group(group: int) -> Any:
        with pq.ParquetFile(file.path) as table:
            return table.read_row_group(group)

    def load(group: int, start: int) -> Any:
        return read_group(group).slice(start, PART_ROWS)

    places = [(group, start) for group, size in enumerate(sizes) for start in range(0, size, PART_ROWS)]
    for number, (group, start) in enumerate(places):
        yield f"{file.name}-{number:05d}", partial(load, group, start)


def _predict_part(job: BulkJob, predictor: Predictor, name: str, table: Any) -> tuple[bytes, int]:
    """Return the bytes of the output file and its number of rows."""
    label = partial(
        label_columns, predictor, text=job.text, top_k=job.top_k, where=name, allow_empty=job.reading.allow_empty_text
    )
    out = BytesIO()
    if isinstance(table, dict):
        columns = label(table)
        check_cells(Path(name), columns)
        fill_table(out, Path(name).suffix, columns)
        return out.getvalue(), len(columns[job.text[0]])
    import pyarrow as pa
    import pyarrow.parquet as pq

    known = {name: table[name].to_pylist() if name in job.text else [] for name in table.column_names}
    for name, values in list(label(known).items())[len(known) :]:
        table = table.append_column(name, pa.array(values))
    pq.write_table(table, out)
    return out.getvalue(), int(table.num_rows)


def label_columns(
    predictor: Predictor,
    table: dict[str, list[Any]],
    text: tuple[str, ...],
    top_k: int | None,
    *,
    where: str = "input",
    allow_empty: bool = False,
    predict_logits: Callable[[list[list[str]]], Any] | None = None,
) -> dict[str, list[Any]]:
    """Return the columns of the table, followed by the predictions. `predict_logits` replaces the call of the predictor."""
    missing = [name for name in text if name not in table]
    if missing:
        names = ", ".join(list(table)[:10])
        raise DataError(f"has no column {missing[0]!r}, only {names}", where=where, fix="Set --text_column_names.")
    texts, trained = [table[name] for name in text], predictor.facts.text_columns or text
    if len(trained) > 2 or len(text) > 2:
        if len(trained) != len(text) or not predictor.facts.rendered:
            known = ", ".join(predictor.facts.text_columns or ["one text, or two"])
            raise DataError(f"the model reads {known}; got {len(text)} columns", where=where)
        texts = [render_rows(trained, texts, where)]
    _check_texts(texts, input_columns(text), where, allow_empty=allow_empty)
    labels = predictor.facts.labels
    ours = choose_column_names(list_answers(labels, top_k), table)
    if not texts[0]:
        return {**table, **{name: [] for name in ours}}
    logits = predictor.predict_texts(texts).logits if predict_logits is None else predict_logits(texts)
    probabilities = probabilities_of(logits, labels.task)
    return {**table, **dict(zip(ours, answer_columns(probabilities, labels, top_k), strict=True))}


def _check_texts(texts: list[list[Any]], names: tuple[str, ...], where: str, *, allow_empty: bool) -> None:
    for name, column in zip(names, texts, strict=True):
        for row, value in enumerate(column, start=1):
            if not isinstance(value, str) or (not value.strip() and not allow_empty):
                what = "is empty" if isinstance(value, str) or value is None else f"is {value!r}, not text"
                fix = "Fill the cell, or set --allow_empty_text."
                raise DataError(f"column {name!r} {what}", where=f"{where}, row {row}", fix=fix)


def read_whole(given: str, reading: Reading) -> dict[str, list[Any]]:
    """Return all columns of one file, or of stdin."""
    if given == "-":
        return read_stdin(reading)
    kind, gzipped = kind_of_rows(Path(given))
    parts = parts_of(InputFile(Path(given), Path(given).stem, kind, gzipped), reading)
    blocks = (load() if kind != "parquet" else load().to_pydict() for _, load in parts)
    columns = next(fixed_runs(blocks), None)
    if columns is None:
        raise DataError("has no rows", where=given)
    return columns
