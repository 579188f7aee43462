"""What the model is shown of rows that are too long: chosen with a reason, and the same when the model predicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tiny_model import sentences
from tunesmith.config.load import load_config
from tunesmith.data.tokenize import EncodedRow, make_token_rows
from tunesmith.errors import ConfigError
from tunesmith.inference.predictor import Predictor
from tunesmith.pipeline.inputs import decide_long_texts


def long_rows(count: int) -> list[dict[str, Any]]:
    """The label is told by the last words of rows that are far longer than the model's 64 positions."""
    return [
        {"text": " ".join(["the"] * 100) + " " + text, "label": "good" if good else "bad"}
        for text, good in sentences(count)
    ]


def test_that_many_rows_are_cut_is_told() -> None:
    assert decide_long_texts(np.full(1000, 100), 512, 512) is None
    assert decide_long_texts(np.r_[np.full(990, 100), np.full(10, 600)], 512, 512) is None
    found = decide_long_texts(np.r_[np.full(900, 100), np.full(100, 600)], 512, 512)
    assert found is not None
    assert (
        found[0]
        .line()
        .startswith("long_texts head: 10.0% of the rows are longer than 512 tokens, which is all the model takes")
    )


def test_a_model_that_takes_more_is_given_more_within_a_bound() -> None:
    some = decide_long_texts(np.array([100] * 9 + [1500]), 512, 8192)
    assert some is not None
    assert (some[0].value, some[1]) == ("full", 8192)
    many = decide_long_texts(np.full(10, 8000), 512, 8192)
    assert many is not None
    assert (many[0].value, many[1]) == ("full", 1024)


def test_auto_tells_what_is_lost(train: Any) -> None:
    _, said = train(train_data=long_rows(40))
    assert any(line.startswith("Recipe: long_texts head: 100.0% of the rows") for line in said)


def test_the_choice_is_kept_for_prediction(train: Any) -> None:
    result, _ = train(train_data=long_rows(60), test_data=long_rows(10), long_texts="head_tail")
    assert load_config(result.run.config_file, need_data=False).long_texts == "head_tail"
    predictor = Predictor.load(result.run.path, use_cpu=True)
    assert predictor.facts.long_texts == "head_tail"
    texts = [row["text"] for row in long_rows(10)]
    ids = predictor.network.encoder.encode([texts])[0].ids
    assert ids[-2] != ids[1]
    table = pq.read_table(result.run.predictions_file).to_pydict()
    kept = [p for p, split in zip(table["prob_good"], table["split"], strict=True) if split == "test"]
    np.testing.assert_allclose(predictor.probabilities(texts)[:, 1], kept, atol=1e-5)


@pytest.mark.parametrize("options", [{"recipe": "hf"}, {"max_seq_length": 32}, {"long_texts": "head"}])
def test_a_flag_and_the_recipe_of_transformers_keep_the_head(train: Any, options: dict[str, Any]) -> None:
    result, said = train(train_data=long_rows(40), **options)
    assert not [line for line in said if line.startswith("Recipe: long_texts")]
    assert load_config(result.run.config_file, need_data=False).long_texts == "head"


def test_all_that_the_model_takes(train: Any) -> None:
    result, _ = train(train_data=long_rows(40), long_texts="full")
    assert Predictor.load(result.run.path, use_cpu=True).facts.max_length == 64


def test_windows_are_read_whole_in_every_way_to_predict(train: Any) -> None:
    rows = long_rows(60)
    result, _ = train(train_data=rows, test_data=rows[:10], long_texts="windows", max_seq_length=32)
    predictor = Predictor.load(result.run.path, use_cpu=True)
    assert predictor.facts.long_texts == "windows"
    [encoded] = predictor.network.encoder.encode([[rows[0]["text"]]])
    assert len(encoded.ids) > 100
    windows = predictor.network.encoder.windows
    assert windows is not None
    ids = np.asarray(encoded.ids)
    parts = [windows.part(ids, start).tolist() for start in windows.starts(len(ids))]
    assert len(parts) == -(-(len(ids) - 2) // 30)
    types = predictor.network.has_types
    alone = predictor.network.logits(
        make_token_rows([EncodedRow(part, [0] * len(part)) for part in parts], has_types=types)
    )
    assert np.allclose(predictor.logits(rows[0]["text"])[0], alone.mean(axis=0), atol=1e-5)
    table = pq.read_table(result.run.predictions_file).to_pydict()
    kept = [p for p, split in zip(table["prob_good"], table["split"], strict=True) if split == "test"]
    texts = [row["text"] for row in rows[:10]]
    assert np.allclose(predictor.probabilities(texts)[:, predictor.facts.labels.names.index("good")], kept, atol=1e-5)
    assert not any(table["truncated"])
    scores = result.evaluate(rows[:10])
    assert scores["accuracy"].n == 10


def test_windows_are_for_one_text_a_row(train: Any) -> None:
    pairs = [{"sentence1": row["text"], "sentence2": "the end", "label": row["label"]} for row in long_rows(20)]
    with pytest.raises(ConfigError, match="long_texts windows does not support text pairs"):
        train(train_data=pairs, long_texts="windows")
