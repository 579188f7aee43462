"""The work of one process: take a unit that is neither done nor claimed, predict it, write it whole, take the next.

A unit is done when its output file is there: files appear by a rename, after their bytes are on disk. Any number of
processes may work on one folder, at once or one after another; the output depends on the inputs and the model alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunesmith.bulk.claims import claimed
from tunesmith.bulk.units import UNIT_ROWS, InputFile, Unit, units_of
from tunesmith.errors import CheckpointError, DataError
from tunesmith.files import BadFile, read_json
from tunesmith.predict.column_names import choose_column_names, list_answers
from tunesmith.predict.facts import model_folder_of
from tunesmith.predict.predictor import Predictor, answer_columns, probabilities_of
from tunesmith.predict.stream import chunks_of
from tunesmith.predict.tables import write_table
from tunesmith.reading.row_blocks import kind_of_rows, read_stdin
from tunesmith.run.remembered import known_hash
from tunesmith.run.writing import make_folder, replacing, write_file

JOB_FILE = "job.json"
WAIT_SECONDS = 0.5


@dataclass(frozen=True)
class BulkJob:
    """What is predicted, from what, and where to."""

    inputs: list[InputFile]
    output: Path
    text: tuple[str, ...]
    top_k: int | None
    reading: dict[str, Any]
    allow_empty_text: bool = False

    def part(self, file: InputFile, unit: Unit) -> Path:
        """The output file of a unit: in the format of its input, never compressed."""
        return self.output / f"{unit.name}.{file.kind}"


def describe_job(job: BulkJob, model: str | Path) -> dict[str, Any]:
    """What makes two jobs the same: inputs by path, size and time of change, the model by its bytes, the settings."""
    folder = model_folder_of(model).folder
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.suffix != ".md")
    digest = hashlib.sha256("\n".join(f"{n} {known_hash(folder / n)}" for n in names).encode()).hexdigest()
    files = [[str(f.path.resolve()), f.path.stat().st_size, f.path.stat().st_mtime_ns] for f in job.inputs]
    return {
        "format": 1,
        "model": digest,
        "inputs": files,
        "text_columns": list(job.text),
        "top_k": job.top_k,
        "reading": job.reading,
        "unit_rows": UNIT_ROWS,
    }


def join_job(job: BulkJob, model: str | Path) -> bool:
    """Notes the job in the output folder, or checks that it is the one there. True when it was there before."""
    mine = describe_job(job, model)
    file = job.output / JOB_FILE
    make_folder(job.output)
    with claimed(job.output, "job", wait=True):
        if not file.exists():
            strangers = [p.name for p in job.output.iterdir() if not p.name.startswith(".")]
            if strangers:
                raise DataError(
                    f"holds other files ({', '.join(sorted(strangers)[:3])})",
                    where=str(job.output),
                    fix="Give an empty --output.",
                )
            write_file(file, json.dumps(mine, indent=1).encode())
            return False
    try:
        there = read_json(file)
    except (OSError, BadFile) as error:
        raise CheckpointError(f"cannot be read ({error})", where=str(file)) from None
    changed = [name for name in mine if there.get(name) != json.loads(json.dumps(mine[name]))]
    if changed:
        raise CheckpointError(
            f"the folder belongs to another job: {', '.join(changed)} differ",
            where=str(job.output),
            fix="Give another --output.",
        )
    return True


def work_off(job: BulkJob, predictor: Predictor, on_rows: Callable[[int], None] = lambda rows: None) -> int:
    """Works until every unit is done, by whomever; the rows that this process predicted."""
    done = 0
    while True:
        mine, waiting = _sweep(job, predictor, on_rows)
        done += mine
        if not waiting:
            return done
        if not mine:  # others hold all that is left: wait for them, or for their death
            time.sleep(WAIT_SECONDS)


def _sweep(job: BulkJob, predictor: Predictor, on_rows: Callable[[int], None]) -> tuple[int, int]:
    """One pass over all units: (rows predicted, units that another process has now)."""
    rows = waiting = 0
    for file in job.inputs:
        for unit in units_of(file, **job.reading):
            part = job.part(file, unit)
            if part.exists():
                continue
            with claimed(job.output, unit.name) as free:
                if not free:
                    waiting += 1
                elif not part.exists():  # it may have been written between the look and the claim
                    count = predict_unit(job, predictor, unit, part)
                    rows += count
                    on_rows(count)
    return rows, waiting


def predict_unit(job: BulkJob, predictor: Predictor, unit: Unit, part: Path) -> int:
    """Predicts one unit and publishes its file."""
    table = unit.load()
    make_folder(part.parent)
    if isinstance(table, dict):
        columns = label_columns(
            predictor, table, job.text, job.top_k, where=unit.name, allow_empty=job.allow_empty_text
        )
        write_table(part, columns)
        return len(columns[job.text[0]])
    import pyarrow as pa
    import pyarrow.parquet as pq

    known = {name: table[name].to_pylist() if name in job.text else [] for name in table.column_names}
    columns = label_columns(predictor, known, job.text, job.top_k, where=unit.name, allow_empty=job.allow_empty_text)
    for name in list(columns)[len(known) :]:
        table = table.append_column(name, pa.array(columns[name]))
    with replacing(part) as out:
        pq.write_table(table, out)
    return int(table.num_rows)


def label_columns(
    predictor: Predictor,
    table: dict[str, list[Any]],
    text: tuple[str, ...],
    top_k: int | None,
    *,
    where: str = "input",
    allow_empty: bool = False,
) -> dict[str, list[Any]]:
    """The columns with those of the answers behind them."""
    missing = [name for name in text if name not in table]
    if missing:
        names = ", ".join(list(table)[:10])
        raise DataError(f"has no column {missing[0]!r}, but {names}", where=where, fix="Give --text_column_names.")
    texts = [table[name] for name in text]
    _check_texts(texts, text, where, allow_empty=allow_empty)
    labels = predictor.facts.labels
    probabilities = probabilities_of(predictor.predict_texts(chunks_of(texts)).logits, labels.task)
    ours = choose_column_names(list_answers(labels, top_k), table)
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
        rows = read_stdin(**reading)
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}
    columns: dict[str, list[Any]] = {}
    rows_before = 0
    kind, gzipped = kind_of_rows(Path(given))
    for unit in units_of(InputFile(Path(given), Path(given).stem, kind, gzipped), **reading):
        block = unit.load() if kind != "parquet" else unit.load().to_pydict()
        count = len(next(iter(block.values()), []))
        for name in {**columns, **block}:
            columns.setdefault(name, [None] * rows_before).extend(block.get(name, [None] * count))
        rows_before += count
    if not rows_before:
        raise DataError("has no rows", where=given)
    return columns
