# ruff: noqa: E501
"""Realistic messy files, each with the columns and task that a person would recognize, or a question."""

from __future__ import annotations

import gzip
import json
import random
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pandas as pd

SUBJECTS = ("printer", "invoice", "login page", "delivery", "laptop screen", "password mail", "contract", "router")
STATES = ("does not work since monday", "arrived too late again", "shows an error message", "was charged twice")
GERMAN = (
    "Der Drucker druckt seit gestern nicht mehr",
    "Die Rechnung ist doppelt gebucht",
    "Ich komme nicht ins Portal",
)


@dataclass(frozen=True)
class Messy:
    """A file. `expected`: text columns, label column and task to be found; None: a question that suggests `ready`."""

    name: str
    write: Callable[[Path], None]
    expected: tuple[tuple[str, ...], str, str] | None = None
    ready: str | None = None


def found(name: str, expected: str, write: Callable[[Path], None]) -> Messy:
    """Describe a file that is read; `expected` is "text columns > label > task"."""
    text, label, task = expected.split(" > ")
    return Messy(name, write, (tuple(text.split(",")), label, task))


def asked(name: str, ready: str, write: Callable[[Path], None]) -> Messy:
    """Describe a file that leads to a question."""
    return Messy(name, write, ready=ready)


def sentence(i: int) -> str:
    """Return a ticket, different for each i."""
    return f"The {SUBJECTS[i % 8]} {STATES[i % 4]}, ticket {i} from floor {i * 7 % 40}"


def table(
    columns: dict[str, Callable[[int], Any]], rows: int = 60, *, sep: str = ",", head: str = "", code: str = "utf-8"
) -> Callable[[Path], None]:
    """Return a writer of a delimited file; every cell that needs quotes has them."""

    def write(path: Path) -> None:
        frame = pd.DataFrame({name: [str(f(i)) for i in range(rows)] for name, f in columns.items()})
        data = (head + frame.to_csv(sep=sep, index=False)).encode(code)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)

    return write


def sheet(
    columns: dict[str, Callable[[int], Any]], rows: int = 40, more: tuple[str, ...] = ()
) -> Callable[[Path], None]:
    """Return a writer of a minimal XLSX file: inline strings, numbers as numbers, and `more` sheets."""
    names = enumerate(("Data", *more), start=1)
    listed = "".join(f'<sheet name="{name}" sheetId="{k}" r:id="r1"/>' for k, name in names)

    def xml(row: int, values: list[Any]) -> str:
        cells = [
            f'<c r="{chr(65 + k)}{row}"><v>{v}</v></c>'
            if isinstance(v, (int, float))
            else f'<c r="{chr(65 + k)}{row}" t="inlineStr"><is><t>{escape(str(v))}</t></is></c>'
            for k, v in enumerate(values)
        ]
        return f'<row r="{row}">{"".join(cells)}</row>'

    def write(path: Path) -> None:
        body = [xml(1, list(columns)), *(xml(i + 2, [f(i) for f in columns.values()]) for i in range(rows))]
        main = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
        office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
        package = "http://schemas.openxmlformats.org/package/2006"
        kind = "application/vnd.openxmlformats-officedocument.spreadsheetml"
        parts = {
            "[Content_Types].xml": f'<Types xmlns="{package}/content-types"><Default Extension="rels" '
            f'ContentType="application/vnd.openxmlformats-package.relationships+xml"/><Override PartName="/xl/workbook.xml" '
            f'ContentType="{kind}.sheet.main+xml"/><Override PartName="/xl/worksheets/sheet1.xml" ContentType="{kind}.worksheet+xml"/></Types>',
            "_rels/.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" Type="{office}/officeDocument" Target="xl/workbook.xml"/></Relationships>',
            "xl/workbook.xml": f'<workbook {main} xmlns:r="{office}"><sheets>{listed}</sheets></workbook>',
            "xl/_rels/workbook.xml.rels": f'<Relationships xmlns="{package}/relationships"><Relationship Id="r1" Type="{office}/worksheet" Target="worksheets/sheet1.xml"/></Relationships>',
            "xl/worksheets/sheet1.xml": f"<worksheet {main}><sheetData>{''.join(body)}</sheetData></worksheet>",
        }
        with zipfile.ZipFile(path, "w") as archive:
            for name, text in parts.items():
                archive.writestr(name, f'<?xml version="1.0" encoding="UTF-8"?>{text}')

    return write


def lines(rows: list[dict[str, Any]]) -> Callable[[Path], None]:
    """Return a writer of a JSON Lines file."""
    return lambda path: path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8") and None


def pick(*values: Any) -> Callable[[int], Any]:
    """Return a function that picks one of the values, unrelated to the row number."""
    return lambda i: random.Random(i * 31 + len(values)).choice(values)


QUEUES = pick("billing", "access", "hardware")
ROWS = range(60)


def text(write: str, code: str = "utf-8", end: str = "") -> Callable[[Path], None]:
    """Return a writer of lines from a template with {i}, {text} and {ab}."""
    ab = pick("a", "b")
    rows = "".join(write.format(i=i, text=sentence(i).replace(",", ""), ab=ab(i)) for i in ROWS)
    return lambda path: path.write_bytes((rows + end).encode(code)) and None


def parquet(columns: dict[str, Callable[[int], Any]]) -> Callable[[Path], None]:
    """Return a writer of a Parquet file."""
    return lambda path: pd.DataFrame({name: [f(i) for i in ROWS] for name, f in columns.items()}).to_parquet(path)


def headed(head: str, write: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a writer that adds a first line."""

    def both(path: Path) -> None:
        write(path)
        path.write_bytes(head.encode() + path.read_bytes())

    return both


def one_object(value: Any) -> Callable[[Path], None]:
    """Return a writer of one JSON value."""
    return lambda path: path.write_text(json.dumps(value)) and None


SPANISH = table(
    {"Reseña": lambda i: f"Muy contenta con la atención y el envío {i}", "Opinión": pick("buena", "mala")},
    sep=";",
    code="cp1252",
)
RECORDS = lines(
    [
        {"id": i, "data": {"review": sentence(i)}, "annotations": [{"result": [{"value": {"choices": ["ab"[i % 2]]}}]}]}
        for i in ROWS
    ]
)
HOT = {
    "text": sentence,
    "author": lambda i: f"u_{i % 30}",
    "subreddit": pick("cats", "news", "food"),
    "joy": pick(0, 1),
    "fear": pick(0, 1, 0),
    "anger": pick(1, 0, 0),
}
IDS = {"ticket": lambda i: 10000 + i, "opened": lambda i: f"2024-03-{i % 28 + 1:02d}", "body": sentence, "team": QUEUES}
SUBJECT = {"subject_line": lambda i: f"about the {SUBJECTS[i % 8]} number {i}", "details": sentence, "queue": QUEUES}
GERMAN_ROWS = {"Beschreibung": lambda i: f"{GERMAN[i % 3]}, Vorgang {i}", "Kategorie": pick("Technik", "Rechnung")}
PHRASES = {"phrase_a": sentence, "phrase_b": lambda i: sentence(i + 1), "same": pick(0, 1)}
ANSWERS = {"question": sentence, "answer": lambda i: sentence(i + 3), "ok": pick("yes", "no")}
PANDAS = {"text": {str(i): sentence(i) for i in ROWS}, "label": {str(i): "ab"[i % 2] for i in ROWS}}
SPLITS = {"train": [{"text": "a"}, {"text": "b"}], "test": [{"text": "c"}]}
QUESTION = "How satisfied are you? Please explain."
FORM = {
    "Timestamp": lambda i: f"2024/05/{i % 28 + 1} 3:{i:02d}:12 PM GMT+2",
    QUESTION: sentence,
    "Would you recommend us?": pick("Yes", "No"),
}
TOXIC = {"comment": sentence, "toxic": pick(0, 1), "insult": pick(0, 0, 1), "threat": pick(1, 0)}
TOPICS = pick('["x", "y"]', '["y"]', "[]", '["z", "x"]')


def tagged(*tags: str) -> Callable[[Path], None]:
    """Return a writer of texts with several labels in one cell."""
    return table({"text": sentence, "tags": pick(*tags)})


FILES = [
    found("queue.csv", "message > queue > multiclass", table({"message": sentence, "queue": QUEUES})),
    found("german.csv", "Beschreibung > Kategorie > binary", table(GERMAN_ROWS, sep=";", head="\ufeff")),
    found("ids_first.csv", "body > team > multiclass", table(IDS)),
    found("pairs.tsv", "phrase_a,phrase_b > same > binary", table(PHRASES, sep="\t")),
    found("pipes.csv", "text > tags > multilabel", tagged("a|b", "b", "a", "c|a", "b|c")),
    found(
        "numpy.csv", "text > topics > multilabel", table({"text": sentence, "topics": pick("['x' 'y']", "['y']", "[]")})
    ),
    found("lists.csv", "text > topics > multilabel", table({"text": sentence, "topics": TOPICS})),
    found("hot.csv", "comment > toxic,insult,threat > multilabel", table(TOXIC)),
    found("stars.csv", "review > stars > multiclass", table({"review": sentence, "stars": pick(1, 2, 3, 4, 5)})),
    found(
        "sheet.xlsx", "Anfrage > Abteilung > multiclass", sheet({"Nr": int, "Anfrage": sentence, "Abteilung": QUEUES})
    ),
    found("records.jsonl", "review > label > binary", RECORDS),
    found("pandas.json", "text > label > binary", one_object(PANDAS)),
    found("spaces.csv", "text > label > binary", headed("text, label\n", text("{text}, {ab}\n"))),
    found("excel.csv", "text > label > binary", headed("\ufefftext;label\n", text("{text};{ab}\n", end=";\n;\n"))),
    found("google.csv", f"{QUESTION} > Would you recommend us? > binary", table(FORM)),
    asked(
        "indicators.parquet",
        "List the labels of each row",
        parquet({"text": sentence, "label": lambda i: [i % 2, i % 3 // 2, 1]}),
    ),
    asked(
        "two_labels.csv",
        "--label_column_name",
        table({"message": sentence, "queue": QUEUES, "prio": pick("a", "b", "c")}),
    ),
    asked("two_texts.csv", "--text_column_names", table(SUBJECT)),
    asked("commas.csv", "--label_separator comma", tagged("red, green", "green", "blue, red", "blue")),
    asked(
        "decimals.csv", "Write plain numbers", table({"Text": sentence, "Note": lambda i: f"{i % 5},{i % 10}"}, sep=";")
    ),
    asked("missing.csv", "--skip_bad_rows", table({"text": sentence, "label": pick("yes", "no", "N/A")})),
    asked("noheader.csv", "Add a first line with column names", table({sentence(3): sentence, "hardware": QUEUES})),
    asked("zipped.csv.gz", "--text_column_names", table(ANSWERS)),
    asked("spanish.csv", "--encoding cp1252", SPANISH),
    asked("unicode_text.txt", "--encoding utf-16-le", text("{text}\t{ab}\n", "utf-16-le")),
    asked(
        "backslashes.csv",
        'Write them as "" instead',
        headed("id,text,label\n", text('{i},"he said \\"{text}\\", and left",{ab}\n')),
    ),
    asked(
        "variants.csv", "--merge_label_variants", table({"text": sentence, "label": pick("Yes", "yes ", "No", "no")})
    ),
    asked("points.csv", "--do_regression true", table({"essay": sentence, "points": lambda i: i * 7 % 25})),
    asked("emotions.csv", "--label_column_name joy,fear,anger", table(HOT)),
    asked(
        "title.csv", "a title, not a header", headed("Feedback 2024,,\n,,\nid,text,label\n", text("{i},{text},{ab}\n"))
    ),
    asked(
        "unsure.jsonl", "--label_separator none", lines([{"text": sentence(i), "label": ["a"][: i % 9]} for i in ROWS])
    ),
    asked("splits.json", "several lists of rows: 'train' (2), 'test' (1)", one_object(SPLITS)),
    asked("comma.json", "a comma after the last object", lambda path: path.write_text('[{"text": "a"},]') and None),
    asked("renamed.csv", "Rename a spreadsheet to .xlsx", lambda path: path.write_bytes(b"PK\x03\x04..") and None),
    asked("page.xls", "is a web page", lambda path: path.write_text("<html><table></table></html>") and None),
    asked(
        "pointer.parquet", "git lfs pull", lambda path: path.write_text("version https://git-lfs.github.com/") and None
    ),
    asked(
        "objects.csv",
        "not labels",
        table({"text": sentence, "label": pick('{"choices": ["a", "b"]}', '{"choices": ["a"]}')}),
    ),
    asked("formulas.csv", "'mood' has no values", table({"text": sentence, "mood": lambda i: ""})),
    asked("books.xlsx", "--sheet_name Data", sheet({"Text": sentence, "Klasse": pick("a", "b")}, more=("Q2",))),
]
