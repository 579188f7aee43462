"""Rows 21 to 28 of the fault catalog: every bad file is refused with its location before training."""

from __future__ import annotations

import gzip
import io
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_loading import load_data
from tunesmith.data.read import read_source
from tunesmith.errors import DataError

HEAD = "text,label\n"
GOOD = HEAD + "".join(f"sentence number {i},{'pos' if i % 2 else 'neg'}\n" for i in range(20))
OTHER = HEAD + "another one,pos\nand one more,neg\n"


@dataclass(frozen=True)
class Bad:
    """A training file, its content, and text that the error must contain."""

    name: str
    data: bytes | str
    says: tuple[str, ...]
    options: dict[str, Any]
    validation: bytes | str | None


def bad(name: str, data: bytes | str, *says: str, validation: bytes | str | None = None, **options: Any) -> Bad:
    return Bad(name, data, says, options, validation)


csv, tsv, gz = (partial(bad, name) for name in ("x.csv", "x.tsv", "x.csv.gz"))
json_lines, json_file, parquet_file, arrow_file = (
    partial(bad, f"x.{suffix}") for suffix in ("jsonl", "json", "parquet", "arrow")
)


def at_line(number: int, line: str, base: str = GOOD) -> str:
    """Return the good file with one line replaced (1 is the header)."""
    lines = base.splitlines(keepends=True)
    lines[number - 1] = line + "\n"
    return "".join(lines)


def jsonl(*lines: str, before: int = 4) -> str:
    good = [json.dumps({"text": f"sentence {i}", "label": "pos" if i % 2 else "neg"}) for i in range(before)]
    return "\n".join([*good, *lines]) + "\n"


def parquet(labels: list[Any], texts: list[Any] | None = None) -> bytes:
    out = io.BytesIO()
    texts = [f"sentence {i}" for i in range(len(labels))] if texts is None else texts
    pq.write_table(pa.table({"text": texts, "label": labels}), out)
    return out.getvalue()


def arrow_stream() -> bytes:
    out = io.BytesIO()
    table = pa.table({"text": ["a b", "c d"] * 50, "label": ["x", "y"] * 50})
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    return out.getvalue()


LATIN = GOOD.replace("sentence number 4,", "caf\u00e9,").encode("latin-1")
ENCODINGS = {
    "latin-1": csv(LATIN, "x.csv:6:1: ", "byte 0xe9 at byte offset", "--encoding cp1252"),
    "latin-1 in the label": csv(at_line(9, "plain,caf\u00e9").encode("latin-1"), "x.csv:9:2: ", "0xe9"),
    "latin-1 header": csv(GOOD.replace("text", "t\u00e9xt").encode("latin-1"), "x.csv:1:1: ", "0xe9"),
    "latin-1 after a quoted newline": csv(
        b'text,label\n"a\nb",pos\nx,caf\xe9\n', "x.csv:4:2: ", "byte offset 26", "0xe9"
    ),
    "truncated UTF-8": csv((GOOD + "caf\u00e9").encode()[:-1], "x.csv:22: ", "truncated"),
    "UTF-16 without a mark": csv(GOOD.encode("utf-16-le"), "x.csv:1:1: ", "NUL", "--encoding utf-16-le"),
    "UTF-16 cut in half a character": csv(GOOD.encode("utf-16")[:-1], "x.csv:21: ", "truncated"),
    "mark against --encoding": csv(GOOD.encode("utf-8-sig"), "x.csv: ", "byte order mark", encoding="cp1252"),
    "wrong --encoding": csv(at_line(6, "\u3042,pos").encode(), "x.csv:6:1: ", "byte offset", encoding="ascii"),
    "NUL": csv(at_line(7, "a\0b,pos"), "x.csv:7:1: ", "NUL"),
    "NUL at the start of json lines": json_lines(b"\0" * 99, "x.jsonl:1:1: ", "NUL"),
    "NUL at the start of json": json_file(b"\0" * 99, "x.json:1:1: ", "NUL"),
    "NUL in tsv": tsv("text\tlabel\na\tb\nc\t\0\n", "x.tsv:3:2: ", "NUL"),
    "latin-1 json line": json_lines(jsonl('{"text": "caf\u00e9"}').encode("latin-1"), "x.jsonl:5:14: ", "0xe9"),
}
QUOTES = {
    "unterminated": csv(at_line(6, '"open,pos'), "x.csv:6: ", "is not closed"),
    "unterminated in the last line": csv(GOOD + 'x,"pos', "x.csv:22: ", "is not closed"),
    "unterminated header": csv('"text,label\na,b\n', "x.csv:1: ", "is not closed"),
    "two stray opening quotes": csv(
        at_line(12, '"b,neg', at_line(6, '"a,pos')), "x.csv:6: ", "closing quote on line 12", "--quoting none"
    ),
    "text after a closing quote": csv(at_line(6, '"a" b,pos'), "x.csv:6: ", "continues after its closing quote"),
}
SHAPES = {
    "long row": csv(at_line(7, "a,b,pos"), "x.csv:7: 3 fields, expected 2"),
    "short row": csv(at_line(7, "a"), "x.csv:7: 1 field, expected 2"),
    "long row after a quoted newline": csv(at_line(7, 'a,b,c\n"q",pos', at_line(3, '"a\nb",pos')), "x.csv:7: 3 fields"),
    "long quoted row": csv(at_line(7, '"a",b,pos'), "x.csv:7: 3 fields, expected 2"),
    "short row with CR": csv(at_line(7, "a").replace("\n", "\r"), "x.csv:7: 1 field"),
    "short row with CRLF": csv(at_line(7, "a").replace("\n", "\r\n"), "x.csv:7: 1 field"),
    "empty line": csv(at_line(7, ""), "x.csv:7: an empty line"),
    "empty line before a quoted row": csv(at_line(8, '"a",pos', at_line(7, "")), "x.csv:7: an empty line"),
    "ragged tsv": tsv("text\tlabel\na\tx\nb\tc\ty\n", "x.tsv:3: 3 fields, expected 2"),
    "duplicate header": csv("text,label,text\na,b,c\n", "x.csv:1:3: ", "'text' appears twice", "fields 1 and 3"),
    "empty header": csv("\n" + GOOD, "x.csv:1: ", "first line is empty"),
    "reserved name": csv("text,__line__\na,b\n", "x.csv:1:2: ", "taken"),
    "no header": csv(GOOD.removeprefix(HEAD), "x.csv:1: ", "no header", "'neg'"),
    "label column missing": csv(
        "text,lable,other\na b,x,1\nc d,y,2\n", "x.csv: ", "which column is the label?", "--label_column_name lable"
    ),
    "requested label missing": csv(GOOD, "no column 'Labels'", "Did you mean 'label'?", label_column_name="Labels"),
    "requested text missing": csv(GOOD, "no column 'txt'", "Did you mean 'text'?", text_column_names="txt"),
    "pair column missing": csv(GOOD, "no column 'sentence1'", "found: text, label", task_name="mrpc"),
    "column missing in validation": csv(
        GOOD, "validation.csv:1: no column 'text'", validation="sentence,label\na,pos\n"
    ),
    "empty text": csv(at_line(7, ",pos"), "x.csv:7:text: the text is empty", "--allow_empty_text"),
    "text of spaces": csv(at_line(7, "  ,pos"), "x.csv:7:text: the text is empty"),
    "empty second text": csv("premise,hypothesis,label\na,b,x\nc,,y\n", "x.csv:3:hypothesis: the text is empty"),
    "0 bytes": csv(b"", "x.csv: ", "0 bytes"),
    "header only": csv(HEAD, "x.csv: ", "there are no rows"),
    "header only without a newline": csv("text,label", "x.csv: ", "there are no rows"),
    "only a byte order mark": csv(b"\xef\xbb\xbf", "x.csv: ", "empty"),
    "empty validation": csv(GOOD, "validation.csv: ", "no rows", validation=HEAD),
    "one row": csv(HEAD + "a b,pos\n", "x.csv:2:label: ", "one label 'pos'"),
    "one row per class": csv(OTHER, "too few", "--validation_file"),
    "unknown ending": bad("x.xlsx", GOOD, "x.xlsx: ", "cannot be read as a spreadsheet", "save the sheet as CSV"),
}
LABELS = {
    "missing": csv(at_line(7, "a b,"), "x.csv:7:label: the label is missing"),
    "unlabeled in train": csv(HEAD + "a,0\nb,1\nc,-1\n", "x.csv:4:label: -1 means unlabeled"),
    "unlabeled in validation": csv(GOOD, "validation.csv:2:label: -1 means", validation=HEAD + "a,-1\n"),
    "only in validation": csv(
        GOOD, "validation.csv:4:label: 'maybe' is not one of neg, pos", validation=OTHER + "x,maybe\n"
    ),
    "misspelled in validation": csv(
        GOOD, "validation.csv:4:label:", "Did you mean 'pos'?", validation=OTHER + "x,poss\n"
    ),
    "case in train": csv(at_line(7, "a b,Pos"), "x.csv:7:label: 'Pos' differs from 'pos' only in case"),
    "space in train": csv(at_line(7, "a b,pos "), "x.csv:7:label: 'pos ' differs from 'pos'"),
    "case in validation": csv(GOOD, "validation.csv:2:label: 'POS' differs from 'pos'", validation=HEAD + "a,POS\n"),
    "not in --label_names": csv(at_line(7, "a b,odd"), "x.csv:7:label: 'odd' is not one of", label_names="neg,pos"),
    "one label": csv(GOOD.replace("neg", "pos"), "x.csv:2:label: ", "one label", "Add rows"),
    "score is a word": csv("text,score\n" + "a b,0.5\n" * 30 + "c d,n/a\n", "x.csv:32:score: 'n/a' is not a number"),
    "score is infinite": csv("text,score\na b,0.5\nc d,inf\n", "x.csv:3:score: 'inf'", do_regression=True),
    "number is missing": csv("text,score\na b,0.5\nc d,\n", "x.csv:3:score: the number is missing", do_regression=True),
    "null in parquet": parquet_file(parquet(["a", None, "b"]), "x.parquet:2:label: the label is missing"),
    "null text in parquet": parquet_file(parquet(["a", "b"], ["x", None]), "x.parquet:2:text: the text is missing"),
    "list with a null": json_lines(
        '{"text": "a b", "label": ["x"]}\n{"text": "c", "label": ["y", null]}\n', "x.jsonl:2:label:", "missing"
    ),
}
CONTAINERS = {
    "bad line": json_lines(jsonl('{"text": '), "x.jsonl:5: not JSON"),
    "cut last line": json_lines(jsonl('{"text": "a", "lab'), "x.jsonl:5: not JSON"),
    "key twice": json_lines(
        jsonl('{"text": "a", "label": "x", "text": "b"}'), "x.jsonl:5: the key 'text' appears twice"
    ),
    "NaN": json_lines(jsonl('{"text": "a", "label": NaN}'), "x.jsonl:5: NaN is not JSON"),
    "Infinity": json_lines(jsonl('{"text": "a", "label": -Infinity}'), "x.jsonl:5: -Infinity"),
    "number too large": json_lines(jsonl('{"text": "a", "label": 1e999}'), "x.jsonl:5: ", "too large"),
    "5,000 digits": json_lines(jsonl('{"text": "a", "label": ' + "9" * 5000 + "}"), "x.jsonl:5: "),
    "depth 100,000": json_lines(jsonl("[" * 100_000), "x.jsonl:5: nested too deeply"),
    "depth 100,000 of objects": json_lines(jsonl('{"a":' * 100_000 + "1" + "}" * 100_000), "x.jsonl:5: nested"),
    "a list": json_lines(jsonl("[1, 2]"), "x.jsonl:5: a list, expected an object"),
    "a number": json_lines(jsonl("7"), "x.jsonl:5: a number, expected an object"),
    "two objects per line": json_lines(jsonl('{"text": "a", "label": "x"} {}'), "x.jsonl:5: not JSON: Extra data"),
    "other keys": json_lines(jsonl('{"text": "a", "lable": "x"}'), "x.jsonl:5: keys differ", "Did you mean 'label'?"),
    "other kind": json_lines(
        jsonl('{"text": "a", "label": 3}'), "x.jsonl:5:label: a whole number here, text in line 1"
    ),
    "list of a number and true": json_lines(
        '{"text": "a", "label": [1.5]}\n{"text": "b", "label": [true]}\n', "x.jsonl:2:label: a list of true/false here"
    ),
    "a number of 70 bits": json_lines(
        jsonl('{"text": "a", "n": 1180591620717411303424}'), "x.jsonl:5:n: a number of more"
    ),
    "half a surrogate": json_lines(jsonl('{"text": "\\ud800", "label": "x"}'), "x.jsonl:5:text: "),
    "empty line in jsonl": json_lines(jsonl("", '{"text": "a", "label": "x"}'), "x.jsonl:5: an empty line"),
    "array in jsonl": json_lines("[{}]", "x.jsonl:1: starts with '['"),
    "cut array": json_file('[{"text": "a", "label": "x"},\n{"text": "b", "label": "y"}', "x.json:2: expected ','"),
    "empty array": json_file("[]", "x.json: ", "no rows"),
    "cut parquet": parquet_file(parquet(["a", "b"] * 50)[:-20], "x.parquet: cannot be read as Parquet"),
    "parquet that is text": parquet_file(GOOD, "x.parquet: cannot be read as Parquet"),
    "arrow cut in a batch": arrow_file(arrow_stream()[:-200], "x.arrow: "),
    "arrow without its end": arrow_file(arrow_stream()[:-8], "x.arrow: ", "no end mark"),
    "arrow that is text": arrow_file(GOOD, "x.arrow: "),
    "cut gzip": gz(gzip.compress(GOOD.encode())[:-12], "x.csv.gz: ", "damaged or truncated"),
    "gzip with a wrong checksum": gz(gzip.compress(GOOD.encode())[:-8] + b"\0" * 8, "x.csv.gz: ", "damaged"),
    "gzip that is text": gz(GOOD, "x.csv.gz: ", "damaged"),
    "gzip of a ragged file": gz(gzip.compress(at_line(7, "a").encode()), "x.csv.gz:7: 1 field"),
}
TABLE = {
    f"{group}: {name}": bad
    for group, cases in (
        ("encoding", ENCODINGS), ("quote", QUOTES), ("shape", SHAPES), ("label", LABELS), ("container", CONTAINERS)
    )
    for name, bad in cases.items()
}  # fmt: skip


def as_bytes(data: bytes | str) -> bytes:
    return data.encode() if isinstance(data, str) else data


@pytest.mark.parametrize("case", TABLE)
def test_bad_file_is_refused_with_its_place(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = TABLE[case]
    monkeypatch.chdir(tmp_path)
    Path(bad.name).write_bytes(as_bytes(bad.data))
    options = dict(bad.options)
    if bad.validation is not None:
        Path("validation.csv").write_bytes(as_bytes(bad.validation))
        options["validation_file"] = "validation.csv"
    with pytest.raises(DataError) as caught:
        load_data(train_file=bad.name, **options)
    line = str(caught.value)
    assert caught.value.exit_code == 3
    assert "\n" not in line
    assert all(part in line for part in bad.says), line


def test_unknown_label_in_row_300_001_is_found(tmp_path: Path) -> None:
    file = tmp_path / "x.csv"
    rows = "".join(f"sentence {i},{'positive' if i % 2 else 'negative'}\n" for i in range(300_000))
    file.write_text(HEAD + rows + "the odd one,positiv\n")
    with pytest.raises(DataError, match=r"x\.csv:300002:label: 'positiv' .*Did you mean 'positive'\?"):
        load_data(train_file=file, cache_dir=tmp_path)
    (tmp_path / "train.csv").write_text(HEAD + "a b,negative\nc d,positive\n")
    with pytest.raises(DataError, match=r"x\.csv:300002:label: 'positiv' is not one of negative, positive"):
        load_data(train_file=tmp_path / "train.csv", validation_file=file, cache_dir=tmp_path)


def test_class_id_out_of_range_is_refused() -> None:
    from datasets import ClassLabel, Dataset, Features, Value

    features = Features({"text": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    table = pa.table({"text": ["a b"] * 9, "label": pa.array([0, 1, 0, 1, 7, 0, 1, 0, 1], pa.int64())})
    with pytest.raises(DataError, match=r"train:5:label: label id 7 is outside of 0 to 1 \(no, yes\)"):
        load_data(train_data=Dataset(table.cast(features.arrow_schema)))


@pytest.mark.parametrize("limit", ["RATIO_FREE_BYTES", "MAX_UNPACKED_BYTES"])
def test_gzip_bomb_is_stopped_early(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"tunesmith.data.text_files.{limit}", 1 << 20)
    file = tmp_path / "x.csv.gz"
    file.write_bytes(gzip.compress(HEAD.encode() + b"a,b\n" * (1 << 24), compresslevel=1))
    with pytest.raises(DataError, match=r"x\.csv\.gz: unpacks to (\d+),.* over the limit"):
        read_source(file, name="train")


def test_unclosed_quote_in_large_file_uses_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunesmith.data.text_files.MAX_RECORD_CHARS", 1 << 16)
    file = tmp_path / "x.csv"
    file.write_text(at_line(6, '"open,pos') + "more,pos\n" * 300_000)
    with pytest.raises(DataError, match=r"x\.csv:6: a quoted field starts here and is not closed within"):
        read_source(file, name="train")
