"""Exports of annotation tools are read without conversion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_loading import load_data
from tunesmith.config.options import Reading
from tunesmith.data.read import DataBundle
from tunesmith.data.text_files import column_blocks
from tunesmith.errors import DataError
from unit.data.messy_files import pick, sentence, table

ROWS = range(40)


LABEL = pick("positive", "negative")


def load(path: Path, **options: Any) -> DataBundle:
    return load_data(train_file=path, validation_split_fraction=0, **options)


def label_studio(i: int) -> dict[str, Any]:
    """Return a task of the default JSON export; the second annotator skipped every fourth task."""

    def annotation(choice: str, *, cancelled: bool = False) -> dict[str, Any]:
        value = {
            "value": {"choices": [choice]},
            "id": f"r{i}",
            "from_name": "sentiment",
            "to_name": "text",
            "type": "choices",
        }
        return {"id": i, "completed_by": 1, "result": [value], "was_cancelled": cancelled, "ground_truth": False}

    found = [annotation(LABEL(i))] + [annotation("other", cancelled=True)] * (i % 4 == 0)
    data = {"text": sentence(i), "source": "mail"}
    return {
        "id": i,
        "annotations": found,
        "drafts": [],
        "predictions": [],
        "data": data,
        "meta": {},
        "total_annotations": 1,
    }


def argilla(i: int) -> dict[str, Any]:
    """Return a record of `dataset.records.to_json`: two of three annotators agree."""
    users = [{"value": v, "user_id": f"u{k}"} for k, v in enumerate((LABEL(i), "other", LABEL(i)))]
    return {
        "id": str(i),
        "fields": {"text": sentence(i)},
        "metadata": {"page": i},
        "suggestions": {"sentiment": {"value": "other", "score": 0.4, "agent": "m"}},
        "responses": {"sentiment": users},
        "vectors": {},
    }


def doccano(i: int) -> dict[str, Any]:
    return {"id": i, "text": sentence(i), "label": [LABEL(i)], "Comments": []}


def argilla_flat(i: int) -> dict[str, Any]:
    """Return a record of `to_datasets` (Argilla 2)."""
    return {
        "text": sentence(i),
        "sentiment.responses": [LABEL(i)],
        "sentiment.responses.users": ["u1"],
        "sentiment.responses.status": ["submitted"],
        "sentiment.suggestion": "other",
    }


EXPORTS = [label_studio, argilla, argilla_flat, doccano]


@pytest.mark.parametrize("record", EXPORTS)
def test_export_is_read_as_text_and_one_label(record: Any, tmp_path: Path) -> None:
    rows = [record(i) for i in ROWS]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(rows, indent=2))
    found = load(path)
    assert found.columns.text == ("text",)
    assert found.labels.task.value == "binary"
    names = [found.labels.names[i] for i in found.splits["train"]["labels"][:]]
    assert names == [LABEL(i) for i in ROWS]
    assert found.splits["train"]["text"][:] == [sentence(i) for i in ROWS]
    assert record is doccano or any("is an export of" in note for note in found.notes)


def test_lists_of_one_label_in_csv_are_one_label(tmp_path: Path) -> None:
    table({"text": sentence, "label": lambda i: f"['{LABEL(i)}']"}, rows=len(ROWS))(tmp_path / "x.csv")
    found = load(tmp_path / "x.csv")
    assert sorted(found.labels.names) == ["negative", "positive"]
    assert [found.labels.names[k] for k in found.splits["train"]["labels"]] == [LABEL(i) for i in ROWS]


def test_argilla_parquet_is_read(tmp_path: Path) -> None:
    more = {"sentiment.responses": [LABEL(3), "other", LABEL(3)]}
    rows = [argilla_flat(i) | (more if i == 3 else {}) for i in ROWS]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    found = load(tmp_path / "x.parquet")
    assert (found.columns.text, found.columns.label) == (("text",), "sentiment")
    assert [found.labels.names[i] for i in found.splits["train"]["labels"][:]] == [LABEL(i) for i in ROWS]
    assert any("is an export of Argilla" in note for note in found.notes)


def test_export_in_memory_and_for_prediction_is_read(tmp_path: Path) -> None:
    rows = [label_studio(i) for i in ROWS]
    found = load_data(train_data=rows, validation_split_fraction=0)
    assert (found.columns.text, found.columns.label) == (("text",), "sentiment")
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    [block] = column_blocks(tmp_path / "x.jsonl", "jsonl", Reading())
    assert block["text"] == [sentence(i) for i in ROWS]


def test_export_with_unfinished_tasks_names_them(tmp_path: Path) -> None:
    rows = [label_studio(i) | ({"annotations": []} if i in (3, 7) else {}) for i in ROWS]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    found = load(tmp_path / "x.json", skip_bad_rows=True)
    assert len(found.splits["train"]) == 38
    assert [row.reasons for row in found.bad_rows] == [("sentiment: the label is missing",)] * 2


def test_doccano_documents_without_a_label_are_asked_about(tmp_path: Path) -> None:
    rows = [doccano(i) | ({"label": []} if i in (4, 9) else {}) for i in ROWS]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="If yes, set --label_separator json; if not, --label_separator none"):
        load(tmp_path / "x.jsonl")
    assert load(tmp_path / "x.jsonl", label_separator="json").labels.task.value == "multilabel"
    found = load(tmp_path / "x.jsonl", label_separator="none", skip_bad_rows=True)
    assert (found.labels.task.value, len(found.splits["train"])) == ("binary", 38)


def test_rows_of_single_line_file_are_counted(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([doccano(i) for i in ROWS]))
    assert load(tmp_path / "x.json").parts["train"].where(7).endswith("x.json:8")
