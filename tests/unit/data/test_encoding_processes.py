"""Texts tokenized in processes: the tokens, the counts and the order of one process, and errors instead of dead pipes."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiny_model import save_tiny_bert, sentences
from tunesmith.data.tokenize import LEAST_ROWS, PIECE_ROWS, ChunkEncoder, make_token_encoder
from tunesmith.errors import DataError, WorkerError
from tunesmith.inference.predictor import Predictor, chunks_of
from tunesmith.models.files import load_tokenizer

ROWS = LEAST_ROWS + PIECE_ROWS // 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_bert(tmp_path_factory.mktemp("model"), labels=("bad", "good"), initializer_range=0.2)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """All different, some longer than the model, one so long that its end is not read."""
    found = [" ".join([text] * (1 + i % 9)) + f" {i}" for i, (text, _) in enumerate(sentences(ROWS))]
    found[700] = "one day " * 40_000
    return found


def make(folder: Path, processes: int, long_texts: Any = "head") -> ChunkEncoder:
    encoder = make_token_encoder(load_tokenizer(folder), 64, long_texts)
    return ChunkEncoder(encoder, has_types=True, processes=processes)


@pytest.mark.parametrize("long_texts", ["head", "head_tail"])
def test_processes_give_the_rows_and_counts_of_one_process(folder: Path, texts: list[str], long_texts: Any) -> None:
    alone = make(folder, 0, long_texts)
    shared = make(folder, 2, long_texts)
    for columns in ([texts], [texts, texts[::-1]]):
        (expected, cut), (found, found_cut) = alone.encode(columns), shared.encode(columns)
        assert len(found.columns["input_ids"].chunks) > 1
        assert found_cut == cut
        assert cut.rows > 100
        assert cut.unread >= 1
        np.testing.assert_array_equal(found.lengths, expected.lengths)
        every = np.arange(len(texts))
        for name, rows in expected.take(every).items():
            for one, other in zip(rows, found.take(every)[name], strict=True):
                np.testing.assert_array_equal(one, other)
                assert one.dtype == other.dtype


def test_a_predictor_gives_the_same_bits_with_processes(folder: Path, texts: list[str]) -> None:
    predictor = Predictor.load(folder, use_cpu=True)
    expected = predictor.predict_texts(chunks_of([texts]))
    predictor.network.chunks = make(folder, 2)
    found = predictor.predict_texts(chunks_of([texts]))
    np.testing.assert_array_equal(found.logits, expected.logits)
    assert (found.truncated, found.empty) == (expected.truncated, expected.empty)


def test_few_rows_start_no_process(folder: Path, texts: list[str]) -> None:
    shared = make(folder, 2)
    shared.encode([texts[: LEAST_ROWS - 1]])
    assert not shared._started


def test_dead_worker_process_is_an_error_and_the_next_call_works(folder: Path, texts: list[str]) -> None:
    shared = make(folder, 2)
    shared.encode([texts])
    for process in shared._started:
        process.kill()
        process.wait()
    with pytest.raises(WorkerError, match="died"):
        shared.encode([texts])
    assert len(shared.encode([texts])[0]) == len(texts)


def test_error_in_a_worker_process_is_raised_here(folder: Path, texts: list[str]) -> None:
    with pytest.raises(DataError, match="tokenizer failed"):
        make(folder, 2).encode([[*texts[1:], "half of a character: \ud83d"]])


def test_worker_processes_end_with_their_encoder_but_not_with_a_fork(folder: Path, texts: list[str]) -> None:
    shared = make(folder, 2)
    shared.encode([texts])
    processes = list(shared._started)
    child = os.fork()
    if child == 0:  # a forked data loader has the same object, and drops it
        del shared
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert {process.poll() for process in processes} == {None}
    assert len(shared.encode([texts])[0]) == len(texts)
    del shared
    gc.collect()
    assert all(process.poll() is not None for process in processes)
