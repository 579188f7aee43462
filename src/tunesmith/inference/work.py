"""The work of one process: take a unit that is neither done nor claimed, predict it, write it whole, take the next.

A unit is done when its output file is there: files appear whole. Any number of
processes may work on one folder, at once or one after another; the output depends on the inputs and the model alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from tunesmith.data.row_blocks import fixed_runs, kind_of_rows, read_stdin
from tunesmith.errors import CheckpointError, DataError
from tunesmith.files import BadFile, parse_json
from tunesmith.inference.facts import model_folder_of
from tunesmith.inference.places import Place
from tunesmith.inference.predictor import Predictor, chunks_of
from tunesmith.inference.tables import (
    answer_columns,
    check_cells,
    choose_column_names,
    fill_table,
    list_answers,
    probabilities_of,
)
from tunesmith.inference.units import UNIT_ROWS, InputFile, Unit, units_of
from tunesmith.runs.writing import known_hash

JOB_FILE = "job.json"


@dataclass(frozen=True)
class BulkJob:
    """What is predicted, with which settings, and where it is written."""

    inputs: list[InputFile]
    output: Place
    text: tuple[str, ...]
    top_k: int | None
    reading: dict[str, Any]
    allow_empty_text: bool = False
    bf16: bool = False


def describe_job(job: BulkJob, model: str | Path) -> dict[str, Any]:
    """What makes two jobs the same: inputs by path, size and time of change, the model by its bytes, the settings."""
    folder = model_folder_of(model).folder
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.suffix != ".md")
    digest = hashlib.sha256("\n".join(f"{n} {known_hash(folder / n)}" for n in names).encode()).hexdigest()
    return {
        "format": 2,
        "model": digest,
        "inputs": [file.stamp() for file in job.inputs],
        "text_columns": list(job.text),
        "top_k": job.top_k,
        "reading": job.reading,
        "bf16": job.bf16,
        "unit_rows": UNIT_ROWS,
    }


def join_job(job: BulkJob, model: str | Path, *, where: str, threads: int = 1) -> tuple[bool, int]:
    """Notes the job in the output folder, or checks that it is the one there: (was it there before, threads of a process).

    The last bits of a CPU's answers depend on the number of threads, so all processes use that of the first one.
    """
    mine = json.loads(json.dumps(describe_job(job, model)))
    with job.output.claimed("job", wait=True):
        before = job.output.exists(JOB_FILE)
        if not before:
            strangers = sorted(name.split("/")[0] for name in job.output.names())
            if strangers:
                fix = "Give an empty --output."
                raise DataError(f"holds other files ({', '.join(strangers[:3])})", where=where, fix=fix)
            job.output.write(JOB_FILE, json.dumps({**mine, "threads": threads}, indent=1).encode())
        try:
            there = parse_json(job.output.read(JOB_FILE))
        except (OSError, BadFile) as error:
            raise CheckpointError(f"cannot be read ({error})", where=f"{where.rstrip('/')}/{JOB_FILE}") from None
    changed = [name for name in mine if there.get(name) != mine[name]]
    if changed:
        fix = "Give another --output."
        raise CheckpointError(f"the folder belongs to another job: {', '.join(changed)} differ", where=where, fix=fix)
    return before, int(there.get("threads", threads))


def work_off(job: BulkJob, predictor: Predictor, on_rows: Callable[[int], None] = lambda rows: None) -> int:
    """Works until all units are done, by this or another process; returns the number of rows predicted here."""
    rows = 0
    left = job.inputs
    while left:
        mine, waiting = _sweep(job, left, predictor, on_rows)
        rows += mine
        left = _abandoned(job.output, waiting)
    return rows


def _sweep(
    job: BulkJob, files: list[InputFile], predictor: Predictor, on_rows: Callable[[int], None]
) -> tuple[int, dict[str, InputFile]]:
    """One pass over the units of files: (rows predicted, outputs that another process is making now)."""
    rows = 0
    waiting = {}
    done = job.output.names()
    for file in files:
        for unit in units_of(file, **job.reading):
            part = f"{unit.name}.{file.kind}"  # in the format of its input, never compressed
            if part in done or job.output.exists(part):
                continue
            with job.output.claimed(part) as free:
                if not free:
                    waiting[part] = file
                elif not job.output.exists(part):  # it may have been written between the look and the claim
                    count = predict_unit(job, predictor, unit, part)
                    rows += count
                    on_rows(count)
    return rows, waiting


def _abandoned(output: Place, waiting: dict[str, InputFile]) -> list[InputFile]:
    """Waits for these outputs. If a process died before it wrote one, returns the files of such outputs."""
    while True:
        done = output.names()
        waiting = {part: file for part, file in waiting.items() if part not in done}
        freed = {}
        for part, file in waiting.items():
            with output.claimed(part) as free:
                if free and not output.exists(part):
                    freed[file.path] = file
        if freed or not waiting:
            return list(freed.values())
        time.sleep(output.poll_seconds)


def predict_unit(job: BulkJob, predictor: Predictor, unit: Unit, part: str) -> int:
    """Predicts one unit and publishes its file."""
    table = unit.load()
    label = partial(
        label_columns, predictor, text=job.text, top_k=job.top_k, where=unit.name, allow_empty=job.allow_empty_text
    )
    out = BytesIO()
    if isinstance(table, dict):
        columns = label(table)
        check_cells(Path(part), columns)
        fill_table(out, Path(part).suffix, columns)
        rows = len(columns[job.text[0]])
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        known = {name: table[name].to_pylist() if name in job.text else [] for name in table.column_names}
        for name, values in list(label(known).items())[len(known) :]:
            table = table.append_column(name, pa.array(values))
        pq.write_table(table, out)
        rows = table.num_rows
    job.output.write(part, out.getvalue())
    return int(rows)


def label_columns(
    predictor: Predictor,
    table: dict[str, list[Any]],
    text: tuple[str, ...],
    top_k: int | None,
    *,
    where: str = "input",
    allow_empty: bool = False,
) -> dict[str, list[Any]]:
    """The columns of the table, followed by those of the answers."""
    missing = [name for name in text if name not in table]
    if missing:
        names = ", ".join(list(table)[:10])
        raise DataError(f"has no column {missing[0]!r}, but {names}", where=where, fix="Give --text_column_names.")
    texts = [table[name] for name in text]
    _check_texts(texts, text, where, allow_empty=allow_empty)
    labels = predictor.facts.labels
    ours = choose_column_names(list_answers(labels, top_k), table)
    if not texts[0]:
        return {**table, **{name: [] for name in ours}}
    probabilities = probabilities_of(predictor.predict_texts(chunks_of(texts)).logits, labels.task)
    return {**table, **dict(zip(ours, answer_columns(probabilities, labels, top_k), strict=True))}


def _check_texts(texts: list[list[Any]], names: tuple[str, ...], where: str, *, allow_empty: bool) -> None:
    for name, column in zip(names, texts, strict=True):
        for row, value in enumerate(column, start=1):
            if not isinstance(value, str) or (not value.strip() and not allow_empty):
                what = "is empty" if isinstance(value, str) or value is None else f"is {value!r}, not text"
                fix = "Fill it, or give --allow_empty_text."
                raise DataError(f"column {name!r} {what}", where=f"{where}, row {row}", fix=fix)


def read_whole(given: str, reading: dict[str, Any]) -> dict[str, list[Any]]:
    """All columns of one file, or of stdin."""
    if given == "-":
        return read_stdin(**reading)
    kind, gzipped = kind_of_rows(Path(given))
    units = units_of(InputFile(given, Path(given).stem, kind, gzipped), **reading)
    blocks = (unit.load() if kind != "parquet" else unit.load().to_pydict() for unit in units)
    columns = next(fixed_runs(blocks), None)
    if columns is None:
        raise DataError("has no rows", where=given)
    return columns
