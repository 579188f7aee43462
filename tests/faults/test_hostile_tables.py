"""Every spreadsheet and Parquet file gives a table or a one-line error, within bounds of time and memory."""

from __future__ import annotations

import random
import time
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_loading import load_data
from patience import patient
from tunesmith.data.read import read_source
from tunesmith.errors import DataError
from unit.data.messy_files import pick, sentence, sheet, table


def read(path: Path) -> Any:
    return read_source(path, name="train", cache_dir=path.parent / "cache").dataset


def table_or_error(path: Path) -> str:
    """Return "table", or the error, which must be one line."""
    try:
        return "table" if read(path).num_rows else "no rows"
    except DataError as error:
        return str(error) if "\n" not in str(error) else "several lines"


def rewrite(path: Path, sheet_xml: str) -> None:
    """Replace the cells of a good workbook."""
    sheet({"text": sentence, "label": pick("a", "b")}, rows=5)(path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name).decode() for name in archive.namelist()}
    main = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    parts["xl/worksheets/sheet1.xml"] = f"<worksheet {main}><sheetData>{sheet_xml}</sheetData></worksheet>"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)


def row(number: int, *cells: tuple[str, str]) -> str:
    inside = "".join(f'<c r="{ref}" t="inlineStr"><is><t>{text}</t></is></c>' for ref, text in cells)
    return f'<row r="{number}">{inside}</row>'


HEAD = row(1, ("A1", "text"), ("B1", "label")) + row(2, ("A2", "one"), ("B2", "x")) + row(3, ("A3", "two"), ("B3", "y"))


@pytest.mark.parametrize(
    "cells",
    [
        HEAD + row(1_048_576, ("XFD1048576", "far")),
        HEAD + row(4, ("ZZZZZZ99999999999", "bad")),
        HEAD + row(4, ("A0", "zero")),
        HEAD + row(4, ("é4", "bad")),
        HEAD + row(4, ("A4", "x")).replace('t="inlineStr"', 't="s"').replace("<is><t>x</t></is>", "<v>99999999999</v>"),
    ],
    ids=["far corner", "long reference", "row zero", "no reference", "shared string out of range"],
)
def test_hostile_cell_gives_a_table_or_one_error(cells: str, tmp_path: Path) -> None:
    path = tmp_path / "x.xlsx"
    rewrite(path, cells)
    began = time.monotonic()
    assert table_or_error(path).startswith((str(path), "table"))
    assert time.monotonic() - began < patient(30)


def test_cell_in_the_last_row_of_the_table_columns_is_read(tmp_path: Path) -> None:
    rewrite(tmp_path / "x.xlsx", HEAD + row(200_000, ("A200000", "last"), ("B200000", "x")))
    source = read_source(tmp_path / "x.xlsx", name="train", cache_dir=tmp_path)
    assert source.dataset["text"][:] == ["one", "two", "last"]
    assert source.line_of(2) == 200_000


def test_zip_bomb_is_refused_quickly(tmp_path: Path) -> None:
    rewrite(tmp_path / "x.xlsx", HEAD + row(4, ("A4", "a" * 100_000_000)))
    began = time.monotonic()
    with pytest.raises(DataError, match=r"unpacks to 100,.* bytes"):
        read(tmp_path / "x.xlsx")
    assert time.monotonic() - began < patient(10)


def test_damaged_spreadsheets_give_a_table_or_one_error(tmp_path: Path) -> None:
    sheet({"text": sentence, "label": pick("a", "b")}, rows=20)(tmp_path / "good.xlsx")
    good = (tmp_path / "good.xlsx").read_bytes()
    rng = random.Random(0)
    for case in range(12):
        data = bytearray(good)
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        if case % 5 == 0:
            data = data[: rng.randrange(4, len(data))]
        path = tmp_path / f"{case}.xlsx"
        path.write_bytes(bytes(data))
        assert table_or_error(path).startswith((str(path), "table"))


def test_parquet_dictionary_bomb_is_refused(tmp_path: Path) -> None:
    """One text of 300 KB in a dictionary and 16,384 references to it: 5 GB from less than a megabyte."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 16_384, pa.int32()), pa.array(["a" * 300_000]))
    labels = pa.array(["x", "y"] * 8_192)
    pq.write_table(pa.table({"text": texts, "label": labels}), tmp_path / "x.parquet", compression="zstd")
    assert (tmp_path / "x.parquet").stat().st_size < 10_000
    with pytest.raises(DataError, match=r"unpacks to more than .* over the limit"):
        read(tmp_path / "x.parquet")


def test_thousand_columns_are_read_within_seconds(tmp_path: Path) -> None:
    columns: dict[str, Any] = {f"c{k}": (lambda i, k=k: f"v{i * k}") for k in range(1_000)}
    table({"text": sentence, "label": pick("a", "b"), **columns}, rows=50)(tmp_path / "x.csv")
    began = time.monotonic()
    found = load_data(train_file=tmp_path / "x.csv", cache_dir=tmp_path)
    assert time.monotonic() - began < patient(15)
    assert any(note.startswith("Not used: 'c0', 'c1'") and note.endswith("and 992 more.") for note in found.notes)
