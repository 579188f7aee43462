"""Twenty more files as people have them, in shapes of public data sets and exports; none of them chose a rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unit.data.messy_files import Messy, lines, pick, sentence, sheet, table

ROWS = range(60)


def text(write: str, code: str = "utf-8") -> Callable[[Path], None]:
    """A writer of the lines of a template with {i}, {text} and {ab}."""
    ab = pick("a", "b")
    return lambda path: (
        path.write_bytes(
            "".join(write.format(i=i, text=sentence(i).replace(",", ""), ab=ab(i)) for i in ROWS).encode(code)
        )
        and None
    )


def parquet(columns: dict[str, Callable[[int], Any]]) -> Callable[[Path], None]:
    """A writer of a parquet file."""

    def write(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({name: [f(i) for i in ROWS] for name, f in columns.items()}), path)

    return write


def headed(head: str, write: Callable[[Path], None]) -> Callable[[Path], None]:
    """The writer with a line in front."""

    def both(path: Path) -> None:
        write(path)
        path.write_bytes(head.encode() + path.read_bytes())

    return both


def one_object(value: Any) -> Callable[[Path], None]:
    """A writer of one JSON value."""
    return lambda path: path.write_text(json.dumps(value)) and None


SPANISH = table(
    {"Reseña": lambda i: f"Muy contenta con la atención y el envío {i}", "Opinión": pick("buena", "mala")},
    sep=";",
    code="cp1252",
)
RUSSIAN = table(
    {"Текст": lambda i: f"Товар пришёл сломанным и никто не ответил {i}", "Тон": pick("плохо", "хорошо")}, code="cp1251"
)
NESTED = lines(
    [
        {"id": i, "data": {"text": sentence(i), "lang": "en"}, "annotation": {"label": "ab"[i % 2], "by": "me"}}
        for i in ROWS
    ]
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
FORMER = {
    "comment": sentence,
    "prediction": pick("good", "bad"),
    "prob_good": lambda i: i / 70,
    "prob_bad": lambda i: 1 - i / 70,
}
MORE_FILES = [
    Messy("spanish.csv", SPANISH, ready="--encoding cp1252"),
    Messy("russian.csv", RUSSIAN, ready="--encoding cp1251"),
    Messy("unicode_text.txt", text("{text}\t{ab}\n", "utf-16-le"), ready="--encoding utf-16-le"),
    Messy(
        "tabs.txt",
        table(
            {"sentence_A": sentence, "sentence_B": lambda i: sentence(i + 1), "verdict": pick("same", "other")},
            sep="\t",
        ),
        ("sentence_A", "sentence_B"),
        "verdict",
        "binary",
    ),
    Messy("carets.csv", table({"text": sentence, "label": pick("a", "b")}, sep="^"), ("text",), "label", "binary"),
    Messy(
        "backslashes.csv",
        headed("id,text,label\n", text('{i},"he said \\"{text}\\", and left",{ab}\n')),
        ready='Write them as "" instead',
    ),
    Messy("apostrophes.csv", headed("text,label\n", text("'{text}, yes','{ab}'\n")), ready="Fields are enclosed in '"),
    Messy("trailing.csv", headed("text,label\n", text("{text},{ab},\n")), ready="Rows end with ','"),
    Messy("twice.csv", headed("text,label,label\n", text("{text},{ab},x\n")), ready="Rename one of them"),
    Messy(
        "variants.csv",
        table({"text": sentence, "label": pick("Yes", "yes ", "No", "no")}),
        ready="--merge_label_variants",
    ),
    Messy("nested.jsonl", NESTED, ("data.text",), "annotation.label", "binary"),
    Messy("records.jsonl", RECORDS, ("review",), "label", "binary"),
    Messy(
        "pandas.json",
        one_object({"text": {str(i): sentence(i) for i in ROWS}, "label": {str(i): "ab"[i % 2] for i in ROWS}}),
        ("text",),
        "label",
        "binary",
    ),
    Messy(
        "places.parquet",
        parquet({"text": sentence, "label": lambda i: [i % 2, i % 3 // 2, 1]}),
        ("text",),
        "label",
        "multilabel",
    ),
    Messy(
        "prices.csv",
        table({"Objekt": sentence, "Preis": lambda i: f"{1 + i % 8}.{100 + i},{10 + i} €"}, sep=";"),
        ready="Write plain numbers",
    ),
    Messy("points.csv", table({"essay": sentence, "points": lambda i: i * 7 % 25}), ready="--do_regression true"),
    Messy("emotions.csv", table(HOT), ready="--label_column_name joy,fear,anger"),
    Messy("former.csv", table(FORMER), ready="--label_column_name prediction"),
    Messy("books.xlsx", sheet({"Text": sentence, "Klasse": pick("a", "b")}, more=("Q2",)), ready="--sheet_name Data"),
]
