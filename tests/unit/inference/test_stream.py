"""Predictions from texts equal the plain model's, in input order, for any chunks and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import tiny_bert, token_lists
from tiny_model import save_tiny_bert, sentences
from tunesmith.data.batches import Padding, TokenRows
from tunesmith.errors import DataError
from tunesmith.inference import predictor as predictor_module
from tunesmith.inference.predictor import Predictor
from tunesmith.inference.tables import probabilities_of
from tunesmith.speedups.apply import apply_speedups
from tunesmith.training.distributed import make_runtime
from tunesmith.training.evaluation import predict_rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("model"), labels=("bad", "good"), initializer_range=0.2)


def plain_logits(folder: Path, texts: list[str], pairs: list[str] | None) -> Any:
    """Return transformers' logits, computed one text at a time."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = []
    for i, text in enumerate(texts):
        inputs = tokenizer(text, None if pairs is None else pairs[i], truncation=True, return_tensors="pt")
        with torch.inference_mode():
            found.append(model(**inputs).logits[0].numpy())
    return np.stack(found)


@pytest.mark.parametrize("chunk_rows", [1, 7, 1000])
@pytest.mark.parametrize("paired", [False, True])
def test_logits_match_plain_model_in_input_order(
    folder: Path, chunk_rows: int, paired: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predictor_module, "CHUNK_ROWS", chunk_rows)
    texts = [" ".join([text] * (1 + i % 9)) for i, (text, _) in enumerate(sentences(23))]
    pairs = [text for text, _ in sentences(23, 4)] if paired else None
    predictor = Predictor.load(folder, use_cpu=True)
    found = predictor.predict_texts([texts] if pairs is None else [texts, pairs])
    expected = plain_logits(folder, texts, pairs)
    assert np.abs(expected - expected.mean(0)).max() > 0.05, "all rows are equal: the order would be invisible"
    np.testing.assert_allclose(found.logits, expected, atol=1e-5)
    counts = predictor.network.tokenizer(texts, pairs)["input_ids"]
    assert found.truncated.rows_cut == sum(len(ids) > 64 for ids in counts) > 0
    assert found.truncated.tokens_cut == sum(max(0, len(ids) - 64) for ids in counts)
    np.testing.assert_allclose(
        predictor.probabilities(texts, pairs), probabilities_of(expected, predictor.facts.labels.task), atol=1e-5
    )


@pytest.mark.parametrize("limits", [{}, {"max_rows": 5}, {"max_tokens": 40}, {"max_rows": 3, "max_tokens": 60}])
def test_logits_do_not_depend_on_batch_size(limits: dict[str, int]) -> None:
    rows = TokenRows.from_lists(token_lists(41, longest=30))
    runtime = make_runtime(use_cpu=True)
    model = tiny_bert(3)
    plain = predict_rows(model, rows, Padding(), runtime, max_rows=1).logits
    speedups = apply_speedups(model, None, Padding(), device=runtime.device)
    seen: list[int] = []
    packed = predict_rows(model, rows, speedups.collate, runtime, on_batch=seen.append, **limits).logits
    np.testing.assert_allclose(packed, plain, atol=1e-5)
    assert sum(seen) == 41
    assert max(seen) <= limits.get("max_rows", 41)
    assert (len(seen) == 1) == (not limits)


def test_non_text_cell_is_reported_with_its_row(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictor_module, "CHUNK_ROWS", 2)
    texts: list[Any] = ["the film", "a book", "one day", None]
    with pytest.raises(DataError, match="row 4"):
        Predictor.load(folder, use_cpu=True).predict_texts([texts])


def test_tokenizer_of_a_different_model_is_refused(folder: Path, tmp_path: Path) -> None:
    predictor = Predictor.load(save_tiny_bert(tmp_path / "small", labels=("a", "b")), use_cpu=True)
    predictor.network.model.get_input_embeddings().num_embeddings = 10
    with pytest.raises(DataError, match="only 10 embeddings"):
        predictor.probabilities(["the film was good"])


def test_default_label_names_are_accepted_for_a_classifier(tmp_path: Path) -> None:
    home = save_tiny_bert(tmp_path / "plain", labels=("LABEL_0", "LABEL_1"))
    assert "id2label" not in (home / "config.json").read_text()
    assert Predictor.load(home, use_cpu=True).facts.labels.names == ("LABEL_0", "LABEL_1")
