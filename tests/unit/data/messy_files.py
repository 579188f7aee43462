# ruff: noqa: E501
"""Files as people have them, written here: each with the columns and the task that a person would see in it, or a question."""

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

SUBJECTS = ("printer", "invoice", "login page", "delivery", "laptop screen", "password mail", "contract", "router")
STATES = ("does not work since monday", "arrived too late again", "shows an error message", "was charged twice")
GERMAN = (
    "Der Drucker druckt seit gestern nicht mehr",
    "Die Rechnung ist doppelt gebucht",
    "Ich komme nicht ins Portal",
)
CHINESE = (
    "打印机从昨天开始不工作了请帮忙",
    "发票被重复扣款两次需要退款",
    "我无法登录系统页面显示错误",
    "快递包裹一直没有送到",
)


@dataclass(frozen=True)
class Messy:
    """`text` and `label` as they should be found, with the task; None for both: a question that names `ready`."""

    name: str
    write: Callable[[Path], None]
    text: tuple[str, ...] | None = None
    label: str | None = None
    task: str | None = None
    ready: str | None = None


def sentence(i: int) -> str:
    """A ticket, different for each i."""
    return f"The {SUBJECTS[i % 8]} {STATES[i % 4]}, ticket {i} from floor {i * 7 % 40}"


def table(
    columns: dict[str, Callable[[int], Any]], rows: int = 60, *, sep: str = ",", head: str = "", code: str = "utf-8"
) -> Callable[[Path], None]:
    """A writer of a file with separators; every cell that needs quotes has them."""

    def cell(value: Any) -> str:
        text = str(value)
        return '"' + text.replace('"', '""') + '"' if sep in text or '"' in text or "\n" in text else text

    def write(path: Path) -> None:
        lines = [sep.join(map(cell, columns)), *(sep.join(cell(f(i)) for f in columns.values()) for i in range(rows))]
        data = (head + "\n".join(lines) + "\n").encode(code)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)

    return write


def sheet(
    columns: dict[str, Callable[[int], Any]], rows: int = 40, more: tuple[str, ...] = ()
) -> Callable[[Path], None]:
    """A writer of an xlsx file: the four parts a reader needs, strings inline, numbers as numbers; `more` sheets like it."""
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
    """A writer of a jsonl file."""
    return lambda path: path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8") and None


def pick(*values: Any) -> Callable[[int], Any]:
    """One of the values, in no order that a row number would show."""
    return lambda i: random.Random(i * 31 + len(values)).choice(values)


QUEUES = pick("billing", "access", "hardware")
FILES = [
    Messy("queue.csv", table({"message": sentence, "queue": QUEUES}), ("message",), "queue", "multiclass"),
    Messy(
        "german.csv",
        table(
            {"Beschreibung": lambda i: f"{GERMAN[i % 3]}, Vorgang {i}", "Kategorie": pick("Technik", "Rechnung")},
            sep=";",
            head="\ufeff",
        ),
        ("Beschreibung",),
        "Kategorie",
        "binary",
    ),
    Messy(
        "chinese.csv",
        table({"内容": lambda i: f"{CHINESE[i % 4]}{i}", "类型": pick("硬件", "账单", "物流")}),
        ("内容",),
        "类型",
        "multiclass",
    ),
    Messy(
        "ids_first.csv",
        table(
            {
                "ticket": lambda i: 10000 + i,
                "opened": lambda i: f"2024-03-{i % 28 + 1:02d}",
                "body": sentence,
                "team": QUEUES,
            }
        ),
        ("body",),
        "team",
        "multiclass",
    ),
    Messy(
        "two_labels.csv",
        table({"message": sentence, "queue": QUEUES, "priority": pick("high", "low", "mid")}),
        ready="--label_column_name",
    ),
    Messy(
        "two_texts.csv",
        table(
            {"subject_line": lambda i: f"about the {SUBJECTS[i % 8]} number {i}", "details": sentence, "queue": QUEUES}
        ),
        ready="--text_column_names",
    ),
    Messy(
        "pairs.tsv",
        table({"phrase_a": sentence, "phrase_b": lambda i: sentence(i + 1), "same": pick(0, 1)}, sep="\t"),
        ("phrase_a", "phrase_b"),
        "same",
        "binary",
    ),
    Messy(
        "pipes.csv",
        table({"text": sentence, "tags": pick("a|b", "b", "a", "c|a", "b|c")}),
        ("text",),
        "tags",
        "multilabel",
    ),
    Messy(
        "semicolons.csv",
        table({"text": sentence, "tags": pick("red;green", "green", "blue;red", "blue")}),
        ("text",),
        "tags",
        "multilabel",
    ),
    Messy(
        "lists.csv",
        table({"text": sentence, "topics": pick('["x", "y"]', '["y"]', "[]", '["z", "x"]')}),
        ("text",),
        "topics",
        "multilabel",
    ),
    Messy(
        "hot.csv",
        table({"comment": sentence, "toxic": pick(0, 1), "insult": pick(0, 0, 1), "threat": pick(1, 0)}),
        ("comment",),
        "toxic,insult,threat",
        "multilabel",
    ),
    Messy(
        "commas.csv",
        table({"text": sentence, "tags": pick("red, green", "green", "blue, red", "blue")}),
        ready="--label_separator comma",
    ),
    Messy("stars.csv", table({"review": sentence, "stars": pick(1, 2, 3, 4, 5)}), ("review",), "stars", "multiclass"),
    Messy(
        "decimals.csv",
        table({"Text": sentence, "Note": lambda i: f"{i % 5},{i % 10}"}, sep=";"),
        ready="Write plain numbers",
    ),
    Messy("missing.csv", table({"text": sentence, "label": pick("yes", "no", "N/A")}), ready="--skip_bad_rows"),
    Messy("dashes.csv", table({"text": sentence, "category": pick("in", "out", "-")}), ready="--skip_bad_rows"),
    Messy(
        "sheet.xlsx",
        sheet({"Nr": lambda i: i, "Anfrage": sentence, "Abteilung": QUEUES}),
        ("Anfrage",),
        "Abteilung",
        "multiclass",
    ),
    Messy(
        "noheader.csv",
        lambda path: table({"the printer on floor nine does not work": sentence, "hardware": QUEUES})(path),
        ready="Add a first line with column names",
    ),
    Messy(
        "latin.jsonl",
        lines([{"texte": f"{sentence(i)} café", "étiquette": "ab"[i % 2], "lang": "fr"} for i in range(40)]),
        ("texte",),
        "étiquette",
        "binary",
    ),
    Messy(
        "zipped.csv.gz",
        table({"question": sentence, "answer": lambda i: sentence(i + 3), "ok": pick("yes", "no")}),
        ready="--text_column_names",
    ),
]
