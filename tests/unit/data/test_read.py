"""Every kind of file reads back exactly."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tunesmith.config.options import Reading
from tunesmith.data.json_files import json_table
from tunesmith.data.read import read_source
from tunesmith.data.rows import LINE_COLUMN
from tunesmith.data.text_files import choose_dialect, delimited_blocks, text_lines
from tunesmith.errors import ConfigError, DataError

LOOKALIKES = ["NA", "null", "None", "007", "1e5", "TRUE", "nan", "", " x ", "-", "=1+1", "1,5", 'a "b" c', "é\u2028ü"]
EXAMPLES = int(os.environ.get("TUNESMITH_EXAMPLES", "100"))


def read(path: Path, on_progress: Any = None, **options: Any) -> list[dict[str, Any]]:
    source = read_source(path, name="train", reading=Reading(**options), on_progress=on_progress)
    return list(source.dataset.remove_columns(LINE_COLUMN if source.lines else []).to_list())


def lines_of(path: Path) -> list[int]:
    return list(read_source(path, name="train").dataset[LINE_COLUMN])


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


ROWS = [{"text": text, "label": str(i % 2)} for i, text in enumerate(LOOKALIKES)]


def as_csv(rows: list[dict[str, str]], *, newline: str = "\n") -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator=newline)
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def test_value_like_cells_stay_text(tmp_path: Path) -> None:
    assert read(write(tmp_path / "x.csv", as_csv(ROWS))) == ROWS
    tsv = "text\tlabel\n" + "".join(f"{row['text']}\t{row['label']}\n" for row in ROWS)
    assert read(write(tmp_path / "x.tsv", tsv)) == ROWS


def test_mixed_line_ends_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", 'a,b\r\n1,2\r3,4\n"5\r\n6",7\r\n8,9\n\r\n\n')
    assert read(path) == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}, {"a": "5\r\n6", "b": "7"}, {"a": "8", "b": "9"}]
    assert lines_of(path) == [2, 3, 4, 6]


AB = [{"a": "1", "b": "2"}]
READINGS: dict[str, tuple[str, str | bytes, dict[str, str], list[dict[str, str]]]] = {
    "quotes set for tsv": ("x.tsv", 'a\tb\n"x\ny"\t1\n', {"quoting": "minimal"}, [{"a": "x\ny", "b": "1"}]),
    **{f"mark of {code}": ("x.csv", as_csv(ROWS).encode(code), {}, ROWS) for code in ("utf-8-sig", "utf-16", "utf-32")},
    **{
        code: ("x.csv", f"a,b\n{word},2\n".encode(code), {"encoding": code}, [{"a": word, "b": "2"}])
        for code, word in (("cp1252", "naïve"), ("shift_jis", "日本"), ("utf-16-le", "naïve"))
    },
    "empty lines in one column": ("x.csv", "a\nb\n\nc\n", {}, [{"a": "b"}, {"a": ""}, {"a": "c"}]),
    "nameless column": ("x.csv", ",text\n0,a\n", {}, [{"unnamed_1": "0", "text": "a"}]),
    "named delimiter": ("x.csv", "a;b\n1;2,3\n", {"delimiter": "semicolon"}, [{"a": "1", "b": "2,3"}]),
    "delimiter of a text file": ("x.txt", "a|b\n1|2\n", {"delimiter": "|"}, AB),
    "delimiter named in the file": ("x.csv", "sep=;\na;b\n1;2\n", {}, AB),
}


@pytest.mark.parametrize("case", READINGS)
def test_table_is_read_as_written(case: str, tmp_path: Path) -> None:
    name, data, options, rows = READINGS[case]
    assert read(write(tmp_path / name, data), **options) == rows


def test_tsv_keeps_stray_quotes_and_all_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tsv", 'a\tb\n"open\t1\nmiddle\t2\n"again\t3\nx "y" z\t4\n')
    assert [row["a"] for row in read(path)] == ['"open', "middle", '"again', 'x "y" z']


@pytest.mark.parametrize(
    "options",
    [{"delimiter": "ab"}, {"delimiter": '"'}, {"quoting": "maybe"}, {"encoding": "klingon"}, {"encoding": "hex"}],
)
def test_options_without_meaning_are_config_errors(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        read(write(tmp_path / "x.csv", "a,b\n1,2\n"), **options)


def test_json_lines_keep_types_and_widen_integers(tmp_path: Path) -> None:
    rows = [
        {"text": str(i), "n": i if i < 9_000 else i + 0.5, "tags": [] if i % 2 else ["x"], "none": None}
        for i in range(10_000)
    ]
    path = write(tmp_path / "x.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert read(path) == rows
    source = read_source(path, name="train")
    assert source.dataset.features["n"] == Value("float64")
    assert source.where(9_999, "n") == f"{path}:10000:n"


def test_json_array_and_json_lines_are_read(tmp_path: Path) -> None:
    rows = [{"text": 'a\n"b"', "label": 1, "more": {"k": ["v"]}}, {"text": "c", "label": 0, "more": None}]
    want = [{"text": 'a\n"b"', "label": 1, "more.k": ["v"], "more": None}, {**rows[1], "more.k": None}]
    array = write(tmp_path / "x.json", json.dumps(rows, indent=1))
    assert read(array) == want
    assert lines_of(array) == [2, 11]
    assert read(write(tmp_path / "y.json", "\n".join(map(json.dumps, rows)))) == want


def test_binary_and_gzip_files_are_read(tmp_path: Path) -> None:
    table = pa.table(
        {"text": [r["text"] for r in ROWS], "label": pa.array([r["label"] for r in ROWS]).dictionary_encode()}
    )
    pq.write_table(table, tmp_path / "x.parquet")
    encoding = {"text": "DELTA_BYTE_ARRAY"}  # as Spark and Trino write texts
    pq.write_table(table, tmp_path / "d.parquet", use_dictionary=["label"], column_encoding=encoding)
    with pa.ipc.new_file(tmp_path / "f.arrow", table.schema) as file:
        file.write_table(table)
    with pa.ipc.new_stream(tmp_path / "s.arrow", table.schema) as stream:
        stream.write_table(table)
    write(tmp_path / "x.csv", as_csv(ROWS))
    write(tmp_path / "x.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("x.parquet", "d.parquet", "f.arrow", "s.arrow", "x.csv", "x.jsonl"):
        assert read(tmp_path / name) == ROWS, name
    for name in ("x.csv", "x.jsonl"):
        assert read(write(tmp_path / f"{name}.gz", gzip.compress((tmp_path / name).read_bytes()))) == ROWS, name
    with pytest.raises(DataError, match=r"x\.parquet\.gz: is compressed with gzip, .* Run gunzip"):
        read(write(tmp_path / "x.parquet.gz", gzip.compress((tmp_path / "x.parquet").read_bytes())))


def test_objects_in_memory_read_like_files(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    dataset = Dataset.from_dict({"text": ["a", "b"], "label": [0, 1]}, features=features)
    rows = dataset.to_list()
    frame = pd.DataFrame(rows, index=[7, 9]).astype({"label": "category"})
    DatasetDict({"train": dataset}).save_to_disk(tmp_path / "dict")
    dataset.save_to_disk(tmp_path / "one")
    for source in (dataset, DatasetDict({"train": dataset}), frame, rows, tmp_path / "dict", str(tmp_path / "one")):
        got = read_source(source, name="train")
        assert got.dataset.to_list() == rows
    assert read_source(dataset, name="train").where(1, "label") == "train:2:label"
    assert read_source(str(tmp_path / "one"), name="train").dataset.features == features


@pytest.mark.parametrize("source", [[], [1], 7, {"a": 1}, DatasetDict(), [{"a": object()}]])
def test_objects_without_rows_are_refused(source: Any) -> None:
    with pytest.raises(DataError):
        read_source(source, name="train")


def test_file_that_grows_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", as_csv(ROWS))
    with pytest.raises(DataError, match="the file changed while it was read"):
        read(path, on_progress=lambda done, total: write(path, as_csv(ROWS * 2)))
    assert read(path) == ROWS * 2


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", "a\n1\n")
    with pytest.raises(DataError, match=r"no such file\. Files there: train\.csv"):
        read(tmp_path / "trian.csv")
    with pytest.raises(DataError, match="was not written by save_to_disk"):
        read(tmp_path)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet", "csv.gz"])
def test_path_to_no_regular_file_is_one_line(suffix: str, tmp_path: Path) -> None:
    loop, pipe, file = (tmp_path / f"{name}.{suffix}" for name in ("loop", "pipe", "file"))
    loop.symlink_to(loop.name)
    os.mkfifo(pipe)
    write(file, "a\n1\n")
    said = {
        loop: "Too many levels of symbolic links",
        tmp_path / "loop" / loop.name: "no such file",
        loop / loop.name: "Too many levels of symbolic links",
        file / file.name: "Not a directory",
        tmp_path / f"{'x' * 300}.{suffix}": "File name too long",
        pipe: "a pipe or a device, not a file",
    }
    for path, text in said.items():
        with pytest.raises(DataError, match=text) as caught:
            read_source(path, name="train")
        assert caught.value.where == str(path)


def test_mrpc_and_trec_read_equal_from_tsv_and_parquet(shared: Path, tmp_path: Path) -> None:
    counts = {"mrpc": {"train": 3668, "validation": 408, "test": 1725}, "trec": {"train": 5452, "test": 500}}
    for folder, splits in counts.items():
        for split, rows in splits.items():
            text = read_source(shared / "data" / folder / f"{split}.tsv", name=split)
            binary = read_source(shared / "data" / folder / f"{split}.parquet", name=split)
            assert text.dataset.num_rows == binary.dataset.num_rows == rows
            for name in text.column_names:
                assert text.dataset[name][:] == [str(value) for value in binary.dataset[name][:]]


cell = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
tricky = st.sampled_from(["", '"', '""', ",", "\n", "\r", "\r\n", '",\n"', "NA", "é", "\ufeff", "\u2028", "\x1c"])
grids = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(cell | tricky, min_size=width, max_size=width), min_size=1, max_size=12)
)
newlines = st.sampled_from(["\n", "\r\n", "\r"])
property_settings = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def lines_in(text: str) -> Iterator[str]:
    return text_lines(io.BytesIO(text.encode()), "x", encoding="utf-8")


def parse(text: str, kind: str) -> list[list[str]]:
    dialect = choose_dialect(kind, Reading())
    blocks = delimited_blocks(lines_in(text), origin="x", dialect=dialect)
    return [list(row) for block in blocks for row in zip(*block.columns.values(), strict=True)]


def quote(cell: str, *, always: bool) -> str:
    """Quote a cell as in RFC 4180; `csv.writer` of Python 3.11 doesn't quote a CR if lines end in LF."""
    needed = always or any(mark in cell for mark in ',"\r\n')
    return '"' + cell.replace('"', '""') + '"' if needed else cell


@property_settings
@given(rows=grids, newline=newlines, quote_all=st.booleans(), end=st.booleans())
def test_any_csv_reads_back_unchanged(rows: list[list[str]], newline: str, quote_all: bool, end: bool) -> None:
    always = quote_all or len(rows[0]) == 1
    table = [[f"c{k}" for k in range(len(rows[0]))], *rows]
    text = newline.join(",".join(quote(cell, always=always) for cell in row) for row in table)
    assert parse(text + newline if end else text, "csv") == rows


@property_settings
@given(rows=grids, newline=newlines)
def test_any_tsv_reads_back_unchanged(rows: list[list[str]], newline: str) -> None:
    rows = [[cell.translate({9: " ", 10: " ", 13: " "}) for cell in row] for row in rows]
    text = newline.join("\t".join(row) for row in [[f"c{k}" for k in range(len(rows[0]))], *rows]) + newline
    if len(rows[0]) > 1 or rows[-1] != [""]:
        assert parse(text, "tsv") == rows


@property_settings
@given(rows=grids, newline=newlines, ascii_only=st.booleans())
def test_any_json_lines_read_back_unchanged(rows: list[list[str]], newline: str, ascii_only: bool) -> None:
    records = [{f"c{k}": value for k, value in enumerate(row)} for row in rows]
    text = "".join(json.dumps(record, ensure_ascii=ascii_only) + newline for record in records)
    table, _ = json_table(lines_in(text), "x", array_allowed=False)
    assert table.drop_columns(LINE_COLUMN).to_pylist() == records
